//! The parking lot: what is due there, and which keys it blocks.

use std::time::Duration;

use tokio_postgres::{Client, Row};

use super::Result;
use super::effects::{EFFECT_COLUMNS, ReadEffect, read_effect};
use super::settle::DeliveryId;
use crate::model::effect::Effect;
use crate::model::key::{ConsumerId, Shard, ShardEpoch};

/// How much a lane can take from the parking lot now.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    pub shard: Shard,
    pub consumer: ConsumerId,
    pub rows: u32,
}

/// What is known of a delivery's trouble. Ages are by the database's clock.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trouble {
    pub attempts: u32,
    /// Attempts that may have left this machine.
    pub sent: u32,
    pub refusals: u32,
    /// Relays that died during an attempt of it.
    pub deaths: u32,
    pub failing_for: Option<Duration>,
    /// Since the first attempt whose effect is unknown.
    pub in_doubt_for: Option<Duration>,
    pub in_progress_for: Option<Duration>,
    /// How long the consumer said it remembers keys.
    pub retain: Option<Duration>,
}

/// Why a parked delivery's turn has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Turn {
    /// It failed, was blocked, or its lane lagged.
    Again,
    Scheduled,
    /// An operator sends it again, whatever is known of it.
    Replay,
}

/// A parked delivery whose turn has come.
#[derive(Clone, Debug)]
pub struct Due {
    pub effect: Effect,
    pub consumer: ConsumerId,
    pub turn: Turn,
    pub trouble: Trouble,
    pub expired: bool,
}

/// Deliveries that are due, at most `rows` for each lane, oldest turn first, without those in `in_hand`.
///
/// A delivery of an ordered key is due only while none before it waits, here or in what its lane has still to read; one that
/// is scheduled for later blocks nobody.
pub async fn due(client: &Client, rooms: &[Room], in_hand: &[DeliveryId]) -> Result<Vec<Due>> {
    let shards: Vec<i16> = rooms.iter().map(|r| r.shard.0).collect();
    let consumers: Vec<i32> = rooms.iter().map(|r| r.consumer.0).collect();
    let rows: Vec<i64> = rooms.iter().map(|r| i64::from(r.rows)).collect();
    let (held_effects, held_consumers): (Vec<i64>, Vec<i32>) =
        in_hand.iter().map(|delivery| (delivery.effect.0, delivery.consumer.0)).unzip();
    let age = |column: &str| format!("extract(epoch from clock_timestamp() - p.{column})::float8 as {column}_age");
    let sql = format!(
        "-- store::due
select {EFFECT_COLUMNS}, p.consumer_id, p.state, p.replay, p.attempts, p.sent, p.refusals, p.deaths, p.retain_seconds, {}, {}, {}
from unnest($1::smallint[], $2::integer[], $3::bigint[]) as r (shard, consumer_id, rows)
cross join lateral (
    select p.effect_id, p.consumer_id, p.state, p.replay, p.attempts, p.sent, p.refusals, p.deaths, p.retain_seconds, p.first_failed_at, p.first_doubt_at,
           p.in_progress_since
    from fencepost.parked p
    where p.shard = r.shard and p.consumer_id = r.consumer_id and p.next_attempt_at <= clock_timestamp()
      and p.state in ('retry', 'scheduled', 'backlog')
      and not exists (select 1 from unnest($4::bigint[], $5::integer[]) as h (effect_id, consumer_id)
                      where h.effect_id = p.effect_id and h.consumer_id = p.consumer_id)
      and (p.replay or not exists (select 1 from fencepost.ledger l where l.effect_id = p.effect_id and l.consumer_id = p.consumer_id offset 0))
      and (p.ordering_key is null or p.replay or not exists (
          select 1 from fencepost.parked q
          where q.consumer_id = p.consumer_id and q.ordering_key = p.ordering_key and q.effect_id < p.effect_id
            and not (q.state = 'scheduled' and q.next_attempt_at > clock_timestamp())))
      and (p.behind is null or p.replay or not exists (
          select 1 from fencepost.lags g
          where g.shard = p.shard and g.consumer_id = p.consumer_id and g.from_seq <= p.behind))
    order by p.next_attempt_at limit r.rows
) p
cross join lateral (
    select * from fencepost.effects e where e.id = p.effect_id
    union all
    select * from fencepost.effects_kept k where k.id = p.effect_id
    limit 1
) e
order by p.consumer_id, e.id",
        age("first_failed_at"),
        age("first_doubt_at"),
        age("in_progress_since")
    );
    let rows = client.query(&sql, &[&shards, &consumers, &rows, &held_effects, &held_consumers]).await?;
    rows.iter().map(due_from_row).collect()
}

fn due_from_row(row: &Row) -> Result<Due> {
    let age = |column: &str| row.get::<_, Option<f64>>(column).map(|s| Duration::from_secs_f64(s.max(0.0)));
    let count = |column: &str| row.get::<_, i32>(column).max(0).unsigned_abs();
    let ReadEffect { effect, expired, .. } = read_effect(row)?;
    Ok(Due {
        effect,
        consumer: ConsumerId(row.get("consumer_id")),
        turn: match (row.get("replay"), row.get("state")) {
            (true, _) => Turn::Replay,
            (false, "scheduled") => Turn::Scheduled,
            (false, _) => Turn::Again,
        },
        trouble: Trouble {
            attempts: count("attempts"),
            sent: count("sent"),
            refusals: count("refusals"),
            deaths: count("deaths"),
            failing_for: age("first_failed_at_age"),
            in_doubt_for: age("first_doubt_at_age"),
            in_progress_for: age("in_progress_since_age"),
            retain: row.get::<_, Option<i64>>("retain_seconds").map(|s| Duration::from_secs(s.max(0).unsigned_abs())),
        },
        expired,
    })
}

/// Whether nothing at all is parked in these shards.
pub async fn is_empty(client: &Client, shards: &[Shard]) -> Result<bool> {
    let shards: Vec<i16> = shards.iter().map(|s| s.0).collect();
    let row = client
        .query_one(
            "-- store::nothing_parked
             select not exists (select from fencepost.parked where shard = any($1))",
            &[&shards],
        )
        .await?;
    Ok(row.get(0))
}

/// Ordered keys of a shard that have deliveries waiting in the parking lot, with how many.
pub async fn blocked_keys(client: &Client, shards: &[Shard]) -> Result<Vec<(Shard, ConsumerId, String, u64)>> {
    let shards: Vec<i16> = shards.iter().map(|s| s.0).collect();
    let rows = client
        .query(
            "-- store::blocked_keys
             select shard, consumer_id, ordering_key, count(*)
             from fencepost.parked
             where shard = any($1) and ordering_key is not null and state <> 'scheduled' and not replay
             group by shard, consumer_id, ordering_key",
            &[&shards],
        )
        .await?;
    Ok(rows
        .iter()
        .map(|row| (Shard(row.get(0)), ConsumerId(row.get(1)), row.get(2), row.get::<_, i64>(3).unsigned_abs()))
        .collect())
}

/// Mends what a crash or an operator may leave: parked rows whose delivery has a fact, and blocked rows whose head is
/// gone. Only in shards still held under these epochs. Returns how many it mended.
pub async fn mend(client: &Client, held: &[(Shard, ShardEpoch)]) -> Result<u64> {
    let shards: Vec<i16> = held.iter().map(|(shard, _)| shard.0).collect();
    let epochs: Vec<i64> = held.iter().map(|(_, epoch)| epoch.0).collect();
    let removed = client
        .execute(
            "-- store::remove_settled
             delete from fencepost.parked p
             using fencepost.shards s
             where (s.shard, s.epoch) in (select h.shard, h.epoch from unnest($1::smallint[], $2::bigint[]) as h (shard, epoch))
               and p.shard = s.shard and not p.replay
               and exists (select 1 from fencepost.ledger l where l.effect_id = p.effect_id and l.consumer_id = p.consumer_id offset 0)",
            &[&shards, &epochs],
        )
        .await?;
    let released = client
        .execute(
            "-- store::release_headless
             update fencepost.parked p set state = 'retry', next_attempt_at = clock_timestamp()
             from fencepost.shards s
             where (s.shard, s.epoch) in (select h.shard, h.epoch from unnest($1::smallint[], $2::bigint[]) as h (shard, epoch))
               and p.shard = s.shard and p.state = 'blocked'
               and not exists (select 1 from fencepost.parked q where q.consumer_id = p.consumer_id
                               and q.ordering_key = p.ordering_key and q.effect_id < p.effect_id
                               and not (q.state = 'scheduled' and q.next_attempt_at > clock_timestamp()))",
            &[&shards, &epochs],
        )
        .await?;
    Ok(removed + released)
}
