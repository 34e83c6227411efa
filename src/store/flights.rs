//! What becomes of flights whose relay is gone: closed as `lost`, their unfinished deliveries parked.

use std::time::Duration;

use tokio_postgres::Client;

use super::Result;
use super::lost::{end_and_park, unaccounted};
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
    /// Attempts whose delivery had ended otherwise while they were out.
    pub overtaken: u64,
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

/// Closes one flight of a predecessor as `lost` and parks each of its deliveries that has neither fact nor parked row
/// (`store::lost`).
pub async fn close_lost(client: &Client, shard: Shard, seq: FlightSeq, epoch: ShardEpoch) -> Result<Swept> {
    let missing = unaccounted("select unnest(e.targets) as consumer_id");
    let parked = end_and_park("its flight was lost with the relay");
    let sql = format!(
        "-- store::close_lost
with guard as (
    select 1 from fencepost.shards where shard = $1 and epoch = $3 for key share
), f as (
    select shard, seq, relay, base, target, first_id, last_id, partial, deliveries from fencepost.flights
    where shard = $1 and seq = $2 and token is null and exists (select 1 from guard)
), missing as (
    {missing}
), {parked}, closed as (
    update fencepost.flights x set token = 'lost', closed_at = clock_timestamp()
    from f where x.shard = f.shard and x.seq = f.seq
)
select count(*) filter (where state <> 'in_doubt'), count(*) filter (where state = 'in_doubt') from parked"
    );
    let row = client.query_one(&sql, &[&shard.0, &seq.0, &epoch.0]).await?;
    Ok(Swept {
        retried: row.get::<_, i64>(0).unsigned_abs(),
        in_doubt: row.get::<_, i64>(1).unsigned_abs(),
        ..Swept::default()
    })
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
    Ok(Swept { retried: count(0), in_doubt: count(1), dead: count(2), ..Swept::default() })
}

/// Ends what is still open of a shard's attempts when flights and parking lot are swept: their deliveries ended while they
/// were out, by a late word or an operator's. With it the shard is swept. `longest`: no attempt was begun so long before its
/// holder left the shard.
pub async fn end_overtaken(client: &Client, shard: Shard, epoch: ShardEpoch, longest: Duration) -> Result<u64> {
    let ended = client
        .execute(
            "-- store::end_overtaken
with swept as (
    update fencepost.shards s set left_at = null
    from (select shard, left_at from fencepost.shards where shard = $1 and epoch = $2 and left_at is not null for update) h
    where s.shard = h.shard
    returning h.left_at
)
insert into fencepost.attempts (effect_id, consumer_id, attempt, ended, relay, token)
select a.effect_id, a.consumer_id, a.attempt, true, a.relay, 'lost'
from swept cross join lateral (
    select * from fencepost.attempts b where b.at >= swept.left_at - make_interval(secs => $3) and not b.ended offset 0
) a
where not exists (select 1 from fencepost.attempts z where z.effect_id = a.effect_id and z.consumer_id = a.consumer_id
                  and z.attempt = a.attempt and z.ended offset 0)
  and exists (select 1 from fencepost.effects e where e.id = a.effect_id and e.shard = $1
              union all select 1 from fencepost.effects_kept k where k.id = a.effect_id and k.shard = $1 offset 0)
on conflict do nothing",
            &[&shard.0, &epoch.0, &longest.as_secs_f64()],
        )
        .await?;
    Ok(ended)
}
