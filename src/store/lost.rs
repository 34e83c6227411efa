//! SQL for deliveries whose relay is gone, of open flights and of marked pages alike: their attempts end as `lost`, and they
//! are parked.
//!
//! At a `retry` edge such a delivery has an attempt `lost` and is tried again; so has one behind another of its key,
//! whose outcome may have been lost with the relay before it was written. A `hold` edge is put in doubt only
//! where its attempt had a start row of its own: the flight alone does not say that anything left. What is scheduled for
//! later was not tried and waits for its time. Where a lane lags in order, what it has still to read of earlier flights
//! comes first (`behind`).

use super::effects::EFFECT_OF_M;
use super::log::FLIGHT_EFFECTS;

/// Of the flights `f`, each delivery that has neither fact nor parked row. `consumers` selects the `consumer_id`s that are
/// meant, of those of an effect `e`.
pub(super) fn unaccounted(consumers: &str) -> String {
    format!(
        "select e.id, e.shard, t.consumer_id, f.relay,
           case when e.deliver_after > clock_timestamp() then e.deliver_after end as due_at,
           case when c.spec->>'ordering' = 'key' then e.ordering_key end as ordering_key,
           coalesce(c.spec->>'on_ambiguous' = 'hold', false) as hold,
           exists (select 1 from fencepost.attempts a where a.effect_id = e.id and a.consumer_id = t.consumer_id
                   and a.attempt = 1 and not a.ended offset 0)
           and not exists (select 1 from fencepost.attempts z where z.effect_id = e.id and z.consumer_id = t.consumer_id
                           and z.attempt = 1 and z.ended and z.token <> 'ambiguous' offset 0) as started,
           case when c.spec->>'ordering' = 'key'
                 and exists (select 1 from fencepost.lags g where g.shard = f.shard and g.consumer_id = t.consumer_id
                             and g.from_seq < f.seq offset 0) then f.seq - 1 end as behind
    from f cross join lateral ({FLIGHT_EFFECTS}) m
    cross join lateral ({EFFECT_OF_M}) e
    cross join lateral ({consumers}) t
    left join fencepost.consumers c on c.consumer_id = t.consumer_id
    where not exists (select 1 from fencepost.ledger l where l.effect_id = e.id and l.consumer_id = t.consumer_id offset 0)
      and not exists (select 1 from fencepost.parked p where p.effect_id = e.id and p.consumer_id = t.consumer_id offset 0)"
    )
}

/// The parts `ended` and `parked` of a statement whose `missing` is [`unaccounted`]; `parked` gives the states.
pub(super) fn end_and_park(reason: &str) -> String {
    format!(
        "turn as (
    select m.id, m.shard, m.consumer_id, m.relay, m.ordering_key, m.hold, m.started, m.due_at, m.behind,
           m.started or (not m.hold and m.due_at is null) as tried,
           m.due_at is null and m.ordering_key is not null and (
               row_number() over (partition by m.consumer_id, m.ordering_key, m.due_at is null order by m.id) > 1
               or exists (select 1 from fencepost.parked q where q.consumer_id = m.consumer_id
                          and q.ordering_key = m.ordering_key and q.state <> 'scheduled' and q.effect_id < m.id offset 0)) as waits
    from missing m
), ended as (
    insert into fencepost.attempts (effect_id, consumer_id, attempt, ended, relay, token)
    select id, consumer_id, 1, true, relay, 'lost' from turn where tried
    on conflict do nothing
), parked as (
    insert into fencepost.parked (effect_id, consumer_id, shard, ordering_key, state, attempts, sent, next_attempt_at, reason,
                                  first_failed_at, first_doubt_at, behind)
    select id, consumer_id, shard, ordering_key,
           case when hold and started then 'in_doubt' when due_at is not null then 'scheduled' when waits then 'blocked' else 'retry' end,
           tried::integer, tried::integer,
           case when not waits and not (hold and started) then coalesce(due_at, clock_timestamp()) end,
           '{reason}',
           case when tried then clock_timestamp() end,
           case when tried then clock_timestamp() end,
           case when due_at is null then behind end
    from turn
    on conflict do nothing
    returning state
)"
    )
}
