-- The scenario: every new order is paid, and its mail is intended in the same transaction.
begin;
with paid as (
    update shop.orders set status = 'paid' where status = 'new' returning id, total
)
select fencepost.emit(
           jsonb_build_array(jsonb_build_object('topic', 'order.paid', 'payload', jsonb_build_object('order', id, 'total', total))),
           'order-' || id)
from paid;
commit;
