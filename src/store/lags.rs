//! Lag ranges: flights that a slow lane still has to read. One row per lane, whatever waits.
//!
//! A range is drained by pages of whole flights. The page in hand is marked before its first byte leaves
//! (`draining_to`), so that after a crash its deliveries count as lost attempts, as those of a lost flight do.

use tokio_postgres::Client;

use super::Result;
use super::effects::{EFFECT_COLUMNS, EFFECT_OF_M, ReadEffect, read_effect};
use super::log::FLIGHT_EFFECTS;
use super::lost::{end_and_park, unaccounted};
use crate::model::key::{ConsumerId, FlightSeq, Shard, ShardEpoch};

/// The flights one lane still has to read, both ends included.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Range {
    pub from: FlightSeq,
    pub to: FlightSeq,
}

/// A lane, and the shard's epoch under which it is worked on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LaneId {
    pub shard: Shard,
    pub consumer: ConsumerId,
    pub epoch: ShardEpoch,
}

/// A page of a range: what its flights still owe the consumer.
#[derive(Debug)]
pub struct Page {
    /// The last flight of the page.
    pub up_to: FlightSeq,
    pub effects: Vec<ReadEffect>,
}

/// Bounds of a page; it always holds at least one flight.
#[derive(Clone, Copy, Debug)]
pub struct PageSize {
    pub flights: i64,
    pub deliveries: i64,
}

/// The ranges of a shard.
pub async fn ranges(client: &Client, shard: Shard) -> Result<Vec<(ConsumerId, Range)>> {
    let rows = client
        .query(
            "-- store::lag_ranges\nselect consumer_id, from_seq, to_seq from fencepost.lags where shard = $1",
            &[&shard.0],
        )
        .await?;
    Ok(rows
        .iter()
        .map(|row| (ConsumerId(row.get(0)), Range { from: FlightSeq(row.get(1)), to: FlightSeq(row.get(2)) }))
        .collect())
}

/// Reads the next page of a lane's range and marks it, durably. `None` where the range or the shard is gone.
pub async fn page(client: &Client, lane: LaneId, size: PageSize) -> Result<Option<Page>> {
    let sql = format!(
        "-- store::lag_page
with held as (
    select 1 from fencepost.shards where shard = $1 and epoch = $3 for key share
), range as (
    select g.from_seq, g.to_seq from fencepost.lags g
    where g.shard = $1 and g.consumer_id = $2 and exists (select 1 from held)
), candidates as materialized (
    select f.shard, f.seq, f.base, f.target, f.first_id, f.last_id, f.partial, f.deliveries, sum(f.deliveries) over (order by f.seq) as run
    from range r cross join lateral (
        select shard, seq, base, target, first_id, last_id, partial, deliveries from fencepost.flights f
        where f.shard = $1 and f.seq between r.from_seq and r.to_seq and f.first_id is not null order by f.seq limit $4
    ) f
), chosen as materialized (
    select c.shard, c.seq, c.base, c.target, c.first_id, c.last_id, c.partial, c.deliveries from candidates c
    where c.run <= $5 or c.seq = (select min(seq) from candidates)
), marked as (
    update fencepost.lags g set draining_to = coalesce((select max(seq) from chosen), g.to_seq)
    where g.shard = $1 and g.consumer_id = $2 and exists (select 1 from range)
    returning g.draining_to
), owed as (
    select f.seq, m.id
    from chosen f cross join lateral ({FLIGHT_EFFECTS}) m
    where $2 = any(m.targets)
      and not exists (select 1 from fencepost.ledger l where l.effect_id = m.id and l.consumer_id = $2 offset 0)
      and not exists (select 1 from fencepost.parked p where p.effect_id = m.id and p.consumer_id = $2 offset 0)
)
select e.*, d.draining_to, o.seq
from marked d left join owed o on true
left join lateral (select {EFFECT_COLUMNS} from (select o.id) m cross join lateral ({EFFECT_OF_M}) e) e on true
order by o.seq, e.id"
    );
    let rows =
        client.query(&sql, &[&lane.shard.0, &lane.consumer.0, &lane.epoch.0, &size.flights, &size.deliveries]).await?;
    let Some(first) = rows.first() else { return Ok(None) };
    let mut page = Page { up_to: FlightSeq(first.get("draining_to")), effects: Vec::new() };
    for row in rows.iter().filter(|row| row.get::<_, Option<i64>>(0).is_some()) {
        page.effects.push(read_effect(row)?);
    }
    Ok(Some(page))
}

/// After a takeover: what was out of marked pages counts as lost attempts and is parked, as with a lost flight; the
/// ranges begin after them. Returns how many deliveries were parked.
pub async fn end_pages(client: &Client, shard: Shard, epoch: ShardEpoch) -> Result<u64> {
    let missing = unaccounted("select f.consumer_id where f.consumer_id = any(e.targets)");
    let parked = end_and_park("its page was lost with the relay");
    let sql = format!(
        "-- store::end_lag_pages
with held as (
    select 1 from fencepost.shards where shard = $1 and epoch = $2 for key share
), marked as (
    select g.consumer_id, g.from_seq, g.to_seq, g.draining_to from fencepost.lags g
    where g.shard = $1 and g.draining_to is not null and exists (select 1 from held)
), f as (
    select g.consumer_id, f.shard, f.seq, f.relay, f.base, f.target, f.first_id, f.last_id, f.partial, f.deliveries
    from marked g
    join fencepost.flights f on f.shard = $1 and f.seq between g.from_seq and g.draining_to and f.first_id is not null
), missing as (
    {missing}
), {parked}, moved as (
    update fencepost.lags g set from_seq = m.draining_to + 1, draining_to = null
    from marked m where g.shard = $1 and g.consumer_id = m.consumer_id and m.draining_to < m.to_seq
), emptied as (
    delete from fencepost.lags g using marked m
    where g.shard = $1 and g.consumer_id = m.consumer_id and m.draining_to >= m.to_seq
)
select count(*) from parked"
    );
    Ok(client.query_one(&sql, &[&shard.0, &epoch.0]).await?.get::<_, i64>(0).unsigned_abs())
}
