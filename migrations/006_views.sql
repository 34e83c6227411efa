-- The stable views, and how to reach one effect by its key.

create view fencepost.completions as
select task_id, lease_epoch, owner, token, reason, late, ended_at
from fencepost.tasks
where token is not null
union all
select task_id, lease_epoch, owner, token, reason, late, ended_at
from fencepost.task_epochs;

-- One row per delivery, with the id that makes it cheap to find. Effects outlive their segment in effects_kept.
create view fencepost.intended_by_id as
select e.id as effect_id, d.consumer_id, e.shard,
       e.task_id || ':' || e.lease_epoch || case when e.position > 1 then ':' || e.position else '' end as key,
       e.topic, e.type, e.payload, e.deliver_after, e.committed_at
from (select id, shard, task_id, lease_epoch, position, targets, topic, type, payload, deliver_after, committed_at
      from fencepost.effects
      union all
      select id, shard, task_id, lease_epoch, position, targets, topic, type, payload, deliver_after, committed_at
      from fencepost.effects_kept) e
cross join lateral unnest(case when e.targets = '{}' then array[0] else e.targets end) d (consumer_id);

-- The strongest fact decides; else where it is parked; else whether its lane lags; else nothing is known yet: it did
-- not finish.
create view fencepost.deliveries_by_id as
select i.effect_id, i.consumer_id, i.key, c.name as consumer,
       coalesce(f.token::text, p.state, (
           select 'backlog' from fencepost.lags g where g.shard = i.shard and g.consumer_id = i.consumer_id
       )) as token,
       coalesce(f.attempt, p.attempts, 0) as attempts,
       case when f.token is null then p.next_attempt_at end as next_attempt_at,
       case when f.token is null then p.reason else f.note end as reason,
       f.ack_raw, f.at as settled_at
from fencepost.intended_by_id i
left join fencepost.consumers c on c.consumer_id = i.consumer_id
left join lateral (
    select l.token, l.attempt, l.note, l.ack_raw, l.at
    from fencepost.ledger l
    where l.effect_id = i.effect_id and l.consumer_id = i.consumer_id
    order by l.token
    limit 1
) f on true
left join fencepost.parked p on p.effect_id = i.effect_id and p.consumer_id = i.consumer_id;

create view fencepost.intended as
select i.key, c.name as consumer, i.topic, i.type, i.payload, i.deliver_after, i.committed_at
from fencepost.intended_by_id i
left join fencepost.consumers c on c.consumer_id = i.consumer_id;

create view fencepost.deliveries as
select key, consumer, token, attempts, next_attempt_at, reason, ack_raw, settled_at
from fencepost.deliveries_by_id;

-- The effect with this idempotency key, or null. A few index look-ups, however large the log is.
create function fencepost.effect_id_of(key text) returns bigint
language plpgsql stable security definer set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    task  text := split_part(effect_id_of.key, ':', 1);
    epoch bigint;
    place integer;
    id    bigint;
begin
    if effect_id_of.key !~ '^[A-Za-z0-9_-]+:[1-9][0-9]{0,18}(:([2-9]|[1-9][0-9]{1,8}))?$'
       or split_part(effect_id_of.key, ':', 2)::numeric > 9223372036854775807 then
        return null;
    end if;
    epoch := split_part(effect_id_of.key, ':', 2);
    place := coalesce(nullif(split_part(effect_id_of.key, ':', 3), ''), '1');
    with completion as (
        select t.first_effect_id, t.last_effect_id from fencepost.tasks t
        where t.task_id = task and t.lease_epoch = epoch
        union all
        select e.first_effect_id, e.last_effect_id from fencepost.task_epochs e
        where e.task_id = task and e.lease_epoch = epoch
    )
    select f.id into id
    from completion c
    cross join lateral (
        select e.id from fencepost.effects e
        where e.id between c.first_effect_id and c.last_effect_id
          and e.task_id = task and e.lease_epoch = epoch and e.position = place
        union all
        select k.id from fencepost.effects_kept k
        where k.id between c.first_effect_id and c.last_effect_id
          and k.task_id = task and k.lease_epoch = epoch and k.position = place
    ) f
    limit 1;
    return id;
end $$;

-- The deliveries of one key, found by index: the view reads the whole log when it is asked by key.
create function fencepost.deliveries_of(key text) returns setof fencepost.deliveries
language sql stable security definer set search_path = pg_catalog, pg_temp as $$
    select key, consumer, token, attempts, next_attempt_at, reason, ack_raw, settled_at
    from fencepost.deliveries_by_id
    where effect_id = fencepost.effect_id_of(deliveries_of.key)
    order by consumer_id
$$;
