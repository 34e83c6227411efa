//! Reading the log without gaps, and opening flights in the same statement.
//!
//! An effect is new if it is visible now and was not visible in the snapshot of the last reading. Two disjoint
//! branches find the new ones by index: transactions that began after that snapshot, and those that were in progress
//! in it. One predicate with OR would scan the log at every poll.

use std::collections::BTreeMap;
use std::time::SystemTime;

use tokio_postgres::Row;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::ahead::AHEAD_IDS;
use super::effects::{EFFECT_COLUMNS, EFFECT_OF_M, EFFECT_WIDTH, ReadEffect, read_effect};
use super::session::Session;
use super::{Error, Result};
use crate::model::key::{EffectId, FlightSeq, Shard, ShardEpoch};
use crate::mutant::{self, Mutant};

/// A `pg_snapshot` in PostgreSQL's own text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot(pub(super) String);

/// Where a shard's reading stands: the newest flight row, and nothing else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Position {
    pub seq: FlightSeq,
    pub reached: Reached,
    /// Up to this id what is read next may be sent before it has a flight (`store::ahead`).
    pub ahead_to: Option<EffectId>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reached {
    /// Everything visible in this snapshot was read.
    Whole(Snapshot),
    /// Of the difference between two snapshots everything up to an id was read: the difference was large.
    Partial { base: Snapshot, target: Snapshot, after: EffectId },
}

/// A shard to read from, and as whom.
#[derive(Clone, Debug)]
pub struct Held {
    pub shard: Shard,
    pub epoch: ShardEpoch,
    pub position: Position,
}

/// Who opens a flight. The nonce recognises an opening whose answer was lost.
#[derive(Clone, Copy, Debug)]
pub struct Opener {
    pub relay: Uuid,
    pub nonce: Uuid,
}

/// The limits of one flight.
#[derive(Clone, Copy, Debug)]
pub struct PageLimits {
    pub deliveries: u32,
    pub bytes: u64,
}

/// A flight that was just opened, durably.
#[derive(Clone, Debug)]
pub struct OpenedFlight {
    pub shard: Shard,
    pub position: Position,
    pub effects: Vec<ReadEffect>,
}

/// What one reading found.
#[derive(Debug, Default)]
pub struct Reading {
    pub opened: Vec<OpenedFlight>,
    /// Shards whose next flight number was already taken: somebody else owns them now.
    pub lost: Vec<Shard>,
    /// The database's clock, where anything was read.
    pub now: Option<SystemTime>,
    /// What the reading saw, where it was one of the whole difference.
    pub seen: Option<Snapshot>,
}

impl OpenedFlight {
    /// Rows come as the database found them.
    pub(super) fn in_order(mut self) -> Self {
        self.effects.sort_by_key(|read| read.effect.id);
        self
    }
}

impl Snapshot {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether transactions were in progress in it: `xmin:xmax:those`.
    pub fn has_in_progress(&self) -> bool {
        !self.0.ends_with(':')
    }
}

impl Position {
    /// From the columns `seq, base, target, last_id, partial, ahead_to`, the first of which is the `at`th.
    pub(super) fn from_row(row: &Row, at: usize) -> Self {
        let (base, target) = (Snapshot(row.get(at + 1)), Snapshot(row.get(at + 2)));
        let reached = match row.get(at + 4) {
            true => Reached::Partial { base, target, after: EffectId(row.get(at + 3)) },
            false => Reached::Whole(target),
        };
        Self { seq: FlightSeq(row.get(at)), reached, ahead_to: row.get::<_, Option<i64>>(at + 5).map(EffectId) }
    }

    /// The number of the next flight: this relay's own last + 1. The primary key makes it a compare-and-set.
    pub fn next_seq(&self) -> FlightSeq {
        FlightSeq(self.seq.0 + 1)
    }
}

/// New effects of one shard `h` (shard, base) above the floor of a rebase, in the order of their ids. `id + 0` keeps the
/// planner from walking the primary key.
pub(super) const NEW: &str = "select z.id, z.deliveries, z.size from (
            select e.id, cardinality(e.targets) as deliveries, e.size from fencepost.effects e
            where e.shard = h.shard and e.xid >= pg_snapshot_xmax(h.base::pg_snapshot) and e.id + 0 > h.log_floor
            union all
            select e.id, cardinality(e.targets), e.size from pg_snapshot_xip(h.base::pg_snapshot) x
            cross join lateral (select e.id, e.targets, e.size from fencepost.effects e
                                where e.shard = h.shard and e.xid = x and e.id + 0 > h.log_floor offset 0) e
        ) z order by z.id + 0";

/// Reads what is new in all `held` shards whose last difference is read through, and opens a flight for each that has
/// something: one statement, one snapshot, one commit. Writes nothing where nothing is new.
pub async fn open_flights(session: &Session, held: &[Held], opener: Opener, limits: PageLimits) -> Result<Reading> {
    let whole = |h: &Held| match &h.position.reached {
        Reached::Whole(base) => Some((h.shard.0, h.position.next_seq().0, h.epoch.0, base.0.clone())),
        Reached::Partial { .. } => None,
    };
    let (mut shards, mut seqs, mut epochs, mut bases) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (shard, seq, epoch, base) in held.iter().filter_map(whole) {
        shards.push(shard);
        seqs.push(seq);
        epochs.push(epoch);
        bases.push(base);
    }
    if shards.is_empty() {
        return Ok(Reading::default());
    }
    let sql = open_flights_sql();
    let rows = open(
        session,
        &sql,
        &[
            /* shards */ &shards,
            /* seqs */ &seqs,
            /* epochs */ &epochs,
            /* bases */ &bases,
            /* relay */ &opener.relay,
            /* nonce */ &opener.nonce,
            /* deliveries */ &i64::from(limits.deliveries),
            /* bytes */ &(limits.bytes as i64),
        ],
    )
    .await?;
    reading_from_rows(&rows)
}

/// What [`Mutant::CursorById`] takes for new.
const IDS_ABOVE: &str = "select e.id, cardinality(e.targets) as deliveries, e.size from fencepost.effects e
    where e.shard = h.shard and e.id > (select max(f.last_id) from fencepost.flights f where f.shard = h.shard) order by e.id";

/// The statement of [`open_flights`], for the test of its plan.
pub fn open_flights_sql() -> String {
    let new = if mutant::is(Mutant::CursorById) { IDS_ABOVE } else { NEW };
    format!(
        "-- store::open_flights
with held as (
    select h.shard, h.seq, h.epoch, h.base, y.log_floor
    from unnest($1::smallint[], $2::bigint[], $3::bigint[], $4::text[]) as h (shard, seq, epoch, base)
    cross join fencepost.history y
), sized as (
    select h.shard, h.seq, h.epoch, h.base, d.id, d.deliveries, sum(greatest(d.deliveries, 1)) over running as run,
           sum(d.size) over running as bytes, row_number() over running as n
    from held h cross join lateral ({new} limit $7::bigint + 1) d
    window running as (partition by h.shard order by d.id rows unbounded preceding)
), found as materialized (
    select s.shard, s.seq, s.epoch, s.base, s.id, s.deliveries, s.n = 1 or (s.run <= $7::bigint and s.bytes <= $8::bigint) as fits
    from sized s
), opened as (
    insert into fencepost.flights (shard, seq, epoch, relay, nonce, base, target, first_id, last_id, partial, deliveries, ahead_to)
    select f.shard, f.seq, f.epoch, $5::uuid, $6::uuid, f.base::pg_snapshot, pg_current_snapshot(), min(f.id),
           max(f.id) filter (where f.fits), not bool_and(f.fits), sum(f.deliveries) filter (where f.fits),
           case when bool_and(f.fits) then max(f.id) + {AHEAD_IDS} end
    from found f group by f.shard, f.seq, f.epoch, f.base
    on conflict (shard, seq) do nothing
    returning shard, seq, base::text, target::text, last_id, partial, ahead_to
)
select {EFFECT_COLUMNS}, f.shard as in_shard, o.seq, o.base, o.target, o.last_id, o.partial, o.ahead_to, s.seen, s.now
from (select pg_current_snapshot()::text as seen, clock_timestamp() as now offset 0) s
left join found f on f.fits
left join opened o on o.shard = f.shard
left join lateral (
    select * from fencepost.effects e where e.id = case when o.shard is not null then f.id end offset 0
) e on true"
    )
}

/// The newest flight of a shard. A shard without one is an error, never "now".
pub async fn position(session: &Session, shard: Shard) -> Result<Position> {
    let row = session
        .client()
        .query_opt(
            "-- store::position
             select seq, base::text, target::text, last_id, partial, ahead_to
             from fencepost.flights where shard = $1 order by seq desc limit 1",
            &[&shard.0],
        )
        .await?
        .ok_or_else(|| {
            Error::Corrupt(format!("shard {shard} has no flight row: where its reading stands is unknown"))
        })?;
    Ok(Position::from_row(&row, 0))
}

/// A flight of ours whose opening was answered to nobody: found by its nonce, made durable again, never sent before.
pub async fn adopt(session: &Session, held: &Held, opener: Opener) -> Result<Option<OpenedFlight>> {
    let warnings = session.warnings();
    // The update is a commit of its own: once it is answered without a warning, so is everything before it.
    let found = session
        .client()
        .query_opt(
            "-- store::adopt
             update fencepost.flights set opened_at = opened_at
             where shard = $1 and seq = $2 and epoch = $3 and relay = $4 and nonce = $5 and token is null
             returning seq, base::text, target::text, last_id, partial, ahead_to",
            &[&held.shard.0, &held.position.next_seq().0, &held.epoch.0, &opener.relay, &opener.nonce],
        )
        .await?;
    let Some(row) = found else { return Ok(None) };
    let position = Position::from_row(&row, 0);
    let sql = format!(
        "-- store::flight_effects
select {EFFECT_COLUMNS}
from fencepost.flights f cross join lateral ({FLIGHT_EFFECTS}) m cross join lateral ({EFFECT_OF_M}) e
where f.shard = $1 and f.seq = $2 order by e.id"
    );
    let rows = session.client().query(&sql, &[&held.shard.0, &position.seq.0]).await?;
    if session.warnings() != warnings {
        return Err(unflushed());
    }
    let effects = rows.iter().map(read_effect).collect::<Result<_>>()?;
    Ok(Some(OpenedFlight { shard: held.shard, position, effects }))
}

/// The effects a flight `f` covers, by id and consumers: its page of the difference between its two snapshots. A page of a
/// large difference is found by walking its ids, where they lie close together: its snapshots are those of all the
/// other pages, and each would enumerate all of it. Otherwise the difference is enumerated, since a late commit's ids may lie
/// anywhere. `case` keeps the planner from walking the shard, and looks at the snapshots last.
pub(super) const FLIGHT_EFFECTS: &str = "select e.id, e.targets from fencepost.effects e
    where f.partial and f.last_id - f.first_id <= 128 * f.deliveries
      and e.id between f.first_id and f.last_id
      and case when e.shard = f.shard then pg_visible_in_snapshot(e.xid, f.target) and not pg_visible_in_snapshot(e.xid, f.base) end
    union all
    select e.id, e.targets from fencepost.effects e
    where not (f.partial and f.last_id - f.first_id <= 128 * f.deliveries)
      and e.shard = f.shard and e.xid >= pg_snapshot_xmax(f.base) and e.xid < pg_snapshot_xmax(f.target)
      and pg_visible_in_snapshot(e.xid, f.target) and e.id + 0 between f.first_id and f.last_id
    union all
    select e.id, e.targets from pg_snapshot_xip(f.base) x
    cross join lateral (select e.id, e.targets from fencepost.effects e where e.shard = f.shard and e.xid = x offset 0) e
    where not (f.partial and f.last_id - f.first_id <= 128 * f.deliveries)
      and pg_visible_in_snapshot(x, f.target) and e.id + 0 between f.first_id and f.last_id
    union all
    select k.id, k.targets from fencepost.effects_kept k
    where k.shard = f.shard and k.id between f.first_id and f.last_id
      and pg_visible_in_snapshot(k.xid, f.target) and not pg_visible_in_snapshot(k.xid, f.base)
      and not exists (select from fencepost.effects e where e.id = k.id)";

/// Executes a statement that opens flights. It counts only if it was answered without a warning.
pub(super) async fn open(session: &Session, sql: &str, parameters: &[&(dyn ToSql + Sync)]) -> Result<Vec<Row>> {
    let warnings = session.warnings();
    let statement = session.prepared(sql).await?;
    let rows = session.client().query(&statement, parameters).await?;
    match session.warnings() == warnings {
        true => Ok(rows),
        false => Err(unflushed()),
    }
}

fn unflushed() -> Error {
    Error::Corrupt("the flight's commit was answered with a warning: it may not be on the synchronous standby".into())
}

fn reading_from_rows(rows: &[Row]) -> Result<Reading> {
    let first = rows.first();
    let mut reading = Reading {
        now: first.map(|row| row.get("now")),
        seen: first.map(|row| Snapshot(row.get("seen"))),
        ..Reading::default()
    };
    let mut flights: BTreeMap<i16, OpenedFlight> = BTreeMap::new();
    for row in rows {
        let Some(shard) = row.get::<_, Option<i16>>(EFFECT_WIDTH) else { continue };
        if row.get::<_, Option<i64>>(EFFECT_WIDTH + 1).is_none() {
            if reading.lost.last() != Some(&Shard(shard)) {
                reading.lost.push(Shard(shard));
            }
            continue;
        }
        let flight = flights.entry(shard).or_insert_with(|| OpenedFlight {
            shard: Shard(shard),
            position: Position::from_row(row, EFFECT_WIDTH + 1),
            effects: Vec::new(),
        });
        flight.effects.push(read_effect(row)?);
    }
    reading.opened = flights.into_values().map(OpenedFlight::in_order).collect();
    Ok(reading)
}
