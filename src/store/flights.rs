//! What becomes of flights whose relay is gone: closed as `lost`, their unfinished deliveries parked.

use tokio_postgres::Client;

use super::Result;
use super::effects::EFFECT_OF_M;
use super::log::FLIGHT_EFFECTS;
use crate::model::key::{FlightSeq, Shard, ShardEpoch};

/// What closing lost flights or ending interrupted attempts came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Deliveries that will be tried again.
    pub retried: u64,
    /// Deliveries whose attempt may have taken effect at an edge that cannot tell.
    pub in_doubt: u64,
    /// Deliveries that were being attempted at the death of three relays.
    pub dead: u64,
}

/// So many deaths of a relay during attempts of one delivery make it `dead`: it may be what kills them.
const DEATHS_MAX: i32 = 3;

/// Open flights of a shard under earlier epochs than `epoch`, oldest first.
pub async fn left_open(client: &Client, shard: Shard, epoch: ShardEpoch) -> Result<Vec<FlightSeq>> {
    let rows = client
        .query(
            "-- store::flights_left_open
             select seq from fencepost.flights where shard = $1 and epoch < $2 and token is null order by seq",
            &[&shard.0, &epoch.0],
        )
        .await?;
    Ok(rows.iter().map(|row| FlightSeq(row.get(0))).collect())
}

/// Open flights of a shard after `after` that were opened under this very epoch, oldest first.
pub async fn open_under(client: &Client, shard: Shard, epoch: ShardEpoch, after: FlightSeq) -> Result<Vec<FlightSeq>> {
    let rows = client
        .query(
            "-- store::flights_open
             select seq from fencepost.flights
             where shard = $1 and epoch = $2 and seq > $3 and token is null order by seq",
            &[&shard.0, &epoch.0, &after.0],
        )
        .await?;
    Ok(rows.iter().map(|row| FlightSeq(row.get(0))).collect())
}

/// Whether the first attempt of effect `e` at `consumer` was started and its end is not known.
pub(super) fn first_try_is_open(consumer: &str) -> String {
    format!(
        "exists (select 1 from fencepost.attempts a where a.effect_id = e.id and a.consumer_id = {consumer}
                 and a.attempt = 1 and not a.ended offset 0)
         and not exists (select 1 from fencepost.attempts z where z.effect_id = e.id and z.consumer_id = {consumer}
                         and z.attempt = 1 and z.ended and z.token <> 'ambiguous' offset 0)"
    )
}

/// Ends the first attempt of what was `told` to have been tried: nobody knows more.
pub(super) const END_TRIED: &str =
    "insert into fencepost.attempts (effect_id, consumer_id, attempt, ended, relay, token)
    select id, consumer_id, 1, true, relay, 'lost' from told where tried
    on conflict do nothing";

/// Closes one flight of a predecessor as `lost` and parks each of its deliveries that has neither fact nor parked row.
///
/// At a `retry` edge such a delivery has an attempt `lost` and is tried again; so has one behind another of its key,
/// whose outcome may have been lost with the relay before it was written. A `hold` edge is put in doubt only
/// where its attempt had a start row of its own: the flight alone does not say that anything left. What is scheduled for
/// later was not tried and waits for its time.
pub async fn close_lost(client: &Client, shard: Shard, seq: FlightSeq, epoch: ShardEpoch) -> Result<Swept> {
    let started = first_try_is_open("t.consumer_id");
    let sql = format!(
        "-- store::close_lost
with guard as (
    select 1 from fencepost.shards where shard = $1 and epoch = $3 for key share
), f as (
    select shard, seq, relay, base, target, first_id, last_id, partial, deliveries from fencepost.flights
    where shard = $1 and seq = $2 and token is null and exists (select 1 from guard)
), missing as (
    select e.id, e.shard, t.consumer_id, f.relay,
           case when e.deliver_after > clock_timestamp() then e.deliver_after end as due_at,
           case when c.spec->>'ordering' = 'key' then e.ordering_key end as ordering_key,
           coalesce(c.spec->>'on_ambiguous' = 'hold', false) as hold,
           {started} as started
    from f cross join lateral ({FLIGHT_EFFECTS}) m
    cross join lateral ({EFFECT_OF_M}) e
    cross join lateral unnest(e.targets) as t (consumer_id)
    left join fencepost.consumers c on c.consumer_id = t.consumer_id
    where not exists (select 1 from fencepost.ledger l where l.effect_id = e.id and l.consumer_id = t.consumer_id offset 0)
      and not exists (select 1 from fencepost.parked p where p.effect_id = e.id and p.consumer_id = t.consumer_id offset 0)
), turn as (
    select m.id, m.shard, m.consumer_id, m.relay, m.ordering_key, m.hold, m.started, m.due_at,
           m.due_at is null and m.ordering_key is not null and (
               row_number() over (partition by m.consumer_id, m.ordering_key, m.due_at is null order by m.id) > 1
               or exists (select 1 from fencepost.parked q where q.consumer_id = m.consumer_id
                          and q.ordering_key = m.ordering_key and q.state <> 'scheduled' and q.effect_id < m.id offset 0)) as waits
    from missing m
), told as (
    select t.id, t.shard, t.consumer_id, t.relay, t.ordering_key, t.hold, t.started, t.due_at, t.waits,
           t.started or (not t.hold and t.due_at is null) as tried
    from turn t
), ended as (
    {END_TRIED}
), parked as (
    insert into fencepost.parked (effect_id, consumer_id, shard, ordering_key, state, attempts, sent, next_attempt_at, reason,
                                  first_failed_at, first_doubt_at)
    select id, consumer_id, shard, ordering_key,
           case when hold and started then 'in_doubt' when due_at is not null then 'scheduled' when waits then 'blocked' else 'retry' end,
           tried::integer, tried::integer,
           case when not waits and not (hold and started) then coalesce(due_at, clock_timestamp()) end,
           'its flight was lost with the relay',
           case when tried then clock_timestamp() end,
           case when tried then clock_timestamp() end
    from told
    on conflict do nothing
    returning state
), closed as (
    update fencepost.flights x set token = 'lost', closed_at = clock_timestamp()
    from f where x.shard = f.shard and x.seq = f.seq
)
select count(*) filter (where state <> 'in_doubt'), count(*) filter (where state = 'in_doubt') from parked"
    );
    let row = client.query_one(&sql, &[&shard.0, &seq.0, &epoch.0]).await?;
    Ok(Swept { retried: row.get::<_, i64>(0).unsigned_abs(), in_doubt: row.get::<_, i64>(1).unsigned_abs(), dead: 0 })
}

/// Ends attempts from the parking lot that were started and never ended: their relay is gone, or has lost the shard. Only
/// these count as deaths of the relay, and only where it is another: one that takes its own shard back is alive.
pub async fn end_interrupted(client: &Client, shard: Shard, epoch: ShardEpoch) -> Result<Swept> {
    let row = client
        .query_one(
            "-- store::end_interrupted
with guard as (
    select relay from fencepost.shards where shard = $1 and epoch = $2 for key share
), interrupted as (
    select p.effect_id, p.consumer_id, p.attempts, a.relay, coalesce(c.spec->>'on_ambiguous' = 'hold', false) as hold,
           p.deaths + (a.relay is distinct from g.relay)::integer as deaths, a.relay is distinct from g.relay as died
    from guard g cross join fencepost.parked p
    join fencepost.attempts a on a.effect_id = p.effect_id and a.consumer_id = p.consumer_id
                              and a.attempt = p.attempts and not a.ended
    left join fencepost.consumers c on c.consumer_id = p.consumer_id
    where p.shard = $1 and p.attempts > 0
      and not exists (select 1 from fencepost.attempts z where z.effect_id = p.effect_id
                      and z.consumer_id = p.consumer_id and z.attempt = p.attempts and z.ended offset 0)
), ended as (
    insert into fencepost.attempts (effect_id, consumer_id, attempt, ended, relay, token)
    select effect_id, consumer_id, attempts, true, relay, 'lost' from interrupted
    on conflict do nothing
), swept as (
    update fencepost.parked p
    set deaths = i.deaths, sent = p.sent + 1,
        state = case when i.deaths >= $3 then 'dead' when i.hold then 'in_doubt' else 'retry' end,
        next_attempt_at = case when i.deaths >= $3 or i.hold then null else clock_timestamp() end,
        reason = case when i.deaths >= $3 then 'the relay died during each of its last attempts'
                      when i.died then 'the relay died during its attempt'
                      else 'the relay lost its shard during its attempt' end,
        first_failed_at = coalesce(p.first_failed_at, clock_timestamp()),
        first_doubt_at = coalesce(p.first_doubt_at, clock_timestamp())
    from interrupted i where p.effect_id = i.effect_id and p.consumer_id = i.consumer_id
    returning p.state
)
select count(*) filter (where state = 'retry'), count(*) filter (where state = 'in_doubt'), count(*) filter (where state = 'dead') from swept",
            &[&shard.0, &epoch.0, &DEATHS_MAX],
        )
        .await?;
    let count = |n: usize| row.get::<_, i64>(n).unsigned_abs();
    Ok(Swept { retried: count(0), in_doubt: count(1), dead: count(2) })
}
