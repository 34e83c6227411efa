//! Pages of a difference that is too large for one flight: a manifest of what it holds is read ahead, and the next page
//! of every shard is opened in one statement and one commit.

use std::collections::{BTreeMap, VecDeque};

use super::Result;
use super::effects::{EFFECT_COLUMNS, EFFECT_WIDTH, read_effect};
use super::log::{Held, OpenedFlight, Opener, PageLimits, Position, Reached, Reading, unflushed};
use super::session::Session;
use crate::model::key::{EffectId, FlightSeq, Shard};

/// What is still to be read of a shard's difference, in order, as far as it was read ahead.
#[derive(Debug, Default)]
pub struct Manifest {
    entries: VecDeque<Entry>,
    /// Whether the difference may go on after the entries.
    beyond: bool,
}

/// Sixteen bytes: a hundred thousand of them are held for each shard of a large backlog.
#[derive(Clone, Copy, Debug)]
struct Entry {
    id: EffectId,
    deliveries: u32,
    bytes: u32,
}

/// The effects of the next flight.
#[derive(Clone, Debug)]
pub struct Page {
    ids: Vec<EffectId>,
    deliveries: u32,
    /// Whether the difference may go on after it.
    partial: bool,
}

impl Manifest {
    /// Reads up to `limit` entries of what lies ahead of `reached`.
    pub async fn read(session: &Session, shard: Shard, reached: &Reached, limit: i64) -> Result<Self> {
        let Reached::Partial { base, target, after } = reached else {
            return Ok(Self::default());
        };
        let statement = session.prepared(MANIFEST).await?;
        let rows = session.client().query(&statement, &[&shard.0, &base.0, &target.0, &after.0, &limit]).await?;
        let count = |n: i32| n.max(0).unsigned_abs();
        let entries: VecDeque<Entry> = rows
            .iter()
            .map(|row| Entry { id: EffectId(row.get(0)), deliveries: count(row.get(1)), bytes: count(row.get(2)) })
            .collect();
        let beyond = entries.len() as i64 == limit;
        Ok(Self { entries, beyond })
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The next page within `limits`, one effect at least; `None` where nothing is left.
    pub fn page(&self, limits: PageLimits) -> Option<Page> {
        let (mut run, mut bytes) = (0, 0);
        let fits = |entry: &&Entry| {
            let first = run == 0;
            run += u64::from(entry.deliveries.max(1));
            bytes += u64::from(entry.bytes);
            first || (run <= u64::from(limits.deliveries) && bytes <= limits.bytes)
        };
        let taken: Vec<Entry> = self.entries.iter().take_while(fits).copied().collect();
        if taken.is_empty() {
            return None;
        }
        Some(Page {
            deliveries: taken.iter().map(|entry| entry.deliveries).sum(),
            partial: self.beyond || taken.len() < self.entries.len(),
            ids: taken.into_iter().map(|entry| entry.id).collect(),
        })
    }

    /// A flight was opened over everything up to `last`.
    pub fn opened(&mut self, last: EffectId) {
        while self.entries.front().is_some_and(|entry| entry.id <= last) {
            self.entries.pop_front();
        }
    }
}

/// What of shard $1 is visible in snapshot $3 and was not in snapshot $2, above $4, in order. `id + 0` keeps the planner
/// from walking the primary key.
const MANIFEST: &str = "-- store::manifest
select z.id, z.deliveries, z.size from (
    select e.id, cardinality(e.targets) as deliveries, e.size from fencepost.effects e
    where e.shard = $1::smallint and e.xid >= pg_snapshot_xmax($2::text::pg_snapshot)
      and e.xid < pg_snapshot_xmax($3::text::pg_snapshot) and pg_visible_in_snapshot(e.xid, $3::text::pg_snapshot)
    union all
    select e.id, cardinality(e.targets), e.size from pg_snapshot_xip($2::text::pg_snapshot) x
    cross join lateral (
        select e.id, e.targets, e.size from fencepost.effects e where e.shard = $1::smallint and e.xid = x offset 0
    ) e
    where pg_visible_in_snapshot(x, $3::text::pg_snapshot)
) z where z.id + 0 > $4::bigint order by z.id + 0 limit $5";

/// Where the pages' ids lie close together, as those of a backlog do, all are found by one walk over them.
const BY_RANGE: &str = "from fencepost.effects e
join wanted w on w.shard = e.shard + 0 and e.id + 0 between w.first_id and w.last_id
             and pg_visible_in_snapshot(e.xid, w.target) and not pg_visible_in_snapshot(e.xid, w.base)
left join opened o on o.shard = w.shard
where e.id between $12::bigint and $13::bigint and cardinality($14::bigint[]) > 0";

/// And one by one otherwise.
const BY_ID: &str = "from unnest($14::bigint[]) as i (id)
cross join lateral (select * from fencepost.effects e where e.id = i.id offset 0) e
left join opened o on o.shard = e.shard
where e.id between $12::bigint and $13::bigint";

/// A walk over so many ids for each that is wanted is cheaper than looking each up.
const WALKED_FOR_ONE: usize = 8;

/// Opens the next flight of each shard over its page: one statement, one commit.
pub async fn open_pages(session: &Session, pages: &[(Held, Page)], opener: Opener) -> Result<Reading> {
    let mut columns = Columns::default();
    let mut positions = BTreeMap::new();
    for (held, page) in pages {
        let Reached::Partial { base, target, .. } = &held.position.reached else { continue };
        let (Some(first), Some(last)) = (page.ids.first(), page.ids.last()) else { continue };
        columns.push(held, (*first, *last), page);
        columns.bases.push(&base.0);
        columns.targets.push(&target.0);
        let reached = match page.partial {
            true => Reached::Partial { base: base.clone(), target: target.clone(), after: *last },
            false => Reached::Whole(target.clone()),
        };
        positions.insert(held.shard, Position { seq: held.position.next_seq(), reached });
    }
    let (Some(lowest), Some(highest)) = (columns.firsts.iter().min(), columns.lasts.iter().max()) else {
        return Ok(Reading::default());
    };
    let found = match (highest - lowest) as usize <= WALKED_FOR_ONE * columns.ids.len() {
        true => BY_RANGE,
        false => BY_ID,
    };
    let sql = format!(
        "-- store::open_pages
with wanted as materialized (
    select w.shard, w.seq, w.epoch, w.base::pg_snapshot as base, w.target::pg_snapshot as target, w.first_id, w.last_id,
           w.partial, w.deliveries
    from unnest($1::smallint[], $2::bigint[], $3::bigint[], $4::text[], $5::text[], $6::bigint[], $7::bigint[], $8::boolean[],
                $9::integer[]) as w (shard, seq, epoch, base, target, first_id, last_id, partial, deliveries)
), opened as (
    insert into fencepost.flights (shard, seq, epoch, relay, nonce, base, target, first_id, last_id, partial, deliveries)
    select w.shard, w.seq, w.epoch, $10::uuid, $11::uuid, w.base, w.target, w.first_id, w.last_id, w.partial, w.deliveries
    from wanted w
    on conflict (shard, seq) do nothing
    returning shard
)
select {EFFECT_COLUMNS}, o.shard is not null as opened, clock_timestamp() as now
{found}"
    );
    let warnings = session.warnings();
    let statement = session.prepared(&sql).await?;
    let rows = session
        .client()
        .query(
            &statement,
            &[
                &columns.shards,
                &columns.seqs,
                &columns.epochs,
                &columns.bases,
                &columns.targets,
                &columns.firsts,
                &columns.lasts,
                &columns.partials,
                &columns.deliveries,
                /* relay */ &opener.relay,
                /* nonce */ &opener.nonce,
                /* lowest */ lowest,
                /* highest */ highest,
                &columns.ids,
            ],
        )
        .await?;
    if session.warnings() != warnings {
        return Err(unflushed());
    }
    let mut reading = Reading { now: rows.first().map(|row| row.get(EFFECT_WIDTH + 1)), ..Reading::default() };
    let mut flights: BTreeMap<Shard, OpenedFlight> = BTreeMap::new();
    for row in &rows {
        let read = read_effect(row)?;
        let shard = read.effect.shard;
        if !row.get::<_, bool>(EFFECT_WIDTH) {
            if !reading.lost.contains(&shard) {
                reading.lost.push(shard);
            }
        } else if let Some(flight) = flights.get_mut(&shard) {
            flight.effects.push(read);
        } else if let Some(position) = positions.remove(&shard) {
            flights.insert(shard, OpenedFlight { shard, position, effects: vec![read] });
        }
    }
    reading.opened = flights.into_values().map(OpenedFlight::in_order).collect();
    Ok(reading)
}

/// The pages as the statement's parameters.
#[derive(Default)]
struct Columns<'a> {
    shards: Vec<i16>,
    seqs: Vec<i64>,
    epochs: Vec<i64>,
    bases: Vec<&'a str>,
    targets: Vec<&'a str>,
    firsts: Vec<i64>,
    lasts: Vec<i64>,
    partials: Vec<bool>,
    deliveries: Vec<i32>,
    ids: Vec<i64>,
}

impl Columns<'_> {
    fn push(&mut self, held: &Held, (first, last): (EffectId, EffectId), page: &Page) {
        self.shards.push(held.shard.0);
        self.seqs.push(held.position.next_seq().0);
        self.epochs.push(held.epoch.0);
        self.firsts.push(first.0);
        self.lasts.push(last.0);
        self.partials.push(page.partial);
        self.deliveries.push(page.deliveries as i32);
        self.ids.extend(page.ids.iter().map(|id| id.0));
    }
}

/// Closes a difference that turned out to hold nothing more: a flight without deliveries, done at once.
pub async fn finish_difference(session: &Session, held: &Held, opener: Opener) -> Result<Option<Position>> {
    let Reached::Partial { base, target, after } = &held.position.reached else {
        return Ok(None);
    };
    let row = session
        .client()
        .query_opt(
            "-- store::finish_difference
             insert into fencepost.flights (shard, seq, epoch, relay, nonce, base, target, last_id, token, closed_at)
             values ($1, $2, $3, $4, $5, $6::text::pg_snapshot, $7::text::pg_snapshot, $8, 'done', clock_timestamp())
             on conflict (shard, seq) do nothing
             returning seq",
            &[
                &held.shard.0,
                &held.position.next_seq().0,
                &held.epoch.0,
                &opener.relay,
                &opener.nonce,
                &base.0,
                &target.0,
                &after.0,
            ],
        )
        .await?;
    Ok(row.map(|row| Position { seq: FlightSeq(row.get(0)), reached: Reached::Whole(target.clone()) }))
}
