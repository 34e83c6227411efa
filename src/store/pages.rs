//! Pages of a difference that is too large for one flight: a manifest of what it holds is read ahead, and the next page
//! of every shard is opened in one commit.

use std::collections::{BTreeMap, VecDeque};
use std::pin::pin;
use std::time::SystemTime;

use futures_util::TryStreamExt;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;

use super::effects::{EFFECT_COLUMNS, read_effect};
use super::log::{self, Held, OpenedFlight, Opener, PageLimits, Position, Reached, Reading};
use super::session::Session;
use super::{Error, Result};
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

/// The effects of the next flight, one at least.
#[derive(Clone, Debug)]
pub struct Page {
    entries: Vec<Entry>,
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
        let entries: Vec<Entry> = self.entries.iter().take_while(fits).copied().collect();
        let partial = self.beyond || entries.len() < self.entries.len();
        (!entries.is_empty()).then_some(Page { entries, partial })
    }

    /// A flight was opened over everything up to `last`.
    pub fn opened(&mut self, last: EffectId) {
        while self.entries.front().is_some_and(|entry| entry.id <= last) {
            self.entries.pop_front();
        }
    }
}

impl Page {
    fn first(&self) -> EffectId {
        self.entries[0].id
    }

    fn last(&self) -> EffectId {
        self.entries[self.entries.len() - 1].id
    }

    fn holds(&self, id: EffectId) -> bool {
        self.entries.binary_search_by_key(&id, |entry| entry.id).is_ok()
    }

    fn deliveries(&self) -> u32 {
        self.entries.iter().map(|entry| entry.deliveries).sum()
    }

    /// The flight over it, as yet without effects. `None` where the difference was read through.
    fn flight(&self, held: &Held) -> Option<OpenedFlight> {
        let Reached::Partial { base, target, .. } = &held.position.reached else { return None };
        let reached = match self.partial {
            true => Reached::Partial { base: base.clone(), target: target.clone(), after: self.last() },
            false => Reached::Whole(target.clone()),
        };
        let position = Position { seq: held.position.next_seq(), reached, ahead_to: None };
        Some(OpenedFlight { shard: held.shard, position, effects: Vec::new() })
    }

    /// What of it lies up to `horizon`.
    fn up_to(mut self, horizon: EffectId) -> Option<Self> {
        let kept = self.entries.partition_point(|entry| entry.id <= horizon);
        self.partial |= kept < self.entries.len();
        self.entries.truncate(kept);
        (kept > 0).then_some(self)
    }
}

/// Where the pages of all shards begin close to one another they end together: then one walk over the ids finds just
/// them, and shards that are ahead wait a turn for the others.
pub fn aligned(pages: Vec<(Held, Page)>) -> Vec<(Held, Page)> {
    let firsts = pages.iter().map(|(_, page)| page.first().0);
    let (Some(lowest), Some(highest)) = (firsts.clone().min(), firsts.max()) else { return pages };
    let horizon = pages.iter().map(|(_, page)| page.last()).min();
    match horizon {
        Some(horizon) if highest - lowest <= WALKED_FOR_ONE * ids_of(&pages) => {
            pages.into_iter().filter_map(|(held, page)| Some((held, page.up_to(horizon)?))).collect()
        }
        _ => pages,
    }
}

fn ids_of(pages: &[(Held, Page)]) -> i64 {
    pages.iter().map(|(_, page)| page.entries.len() as i64).sum()
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

/// Where the pages' ids lie close together, as those of a backlog do, all are found by one walk over them. It may find
/// others in between.
const BY_RANGE: &str = "from fencepost.effects e
where e.id between ($2::bigint[])[1] and ($2::bigint[])[2] and (e.shard + 0)::smallint = any($1::smallint[])";

/// And one by one otherwise.
const BY_ID: &str = "from unnest($2::bigint[]) as i (id)
cross join lateral (select * from fencepost.effects e where e.id = i.id offset 0) e where e.shard = any($1::smallint[])";

/// A walk over so many ids for each that is wanted is cheaper than looking each up.
const WALKED_FOR_ONE: i64 = 8;

/// Opens the next flight of each shard over its page, in one commit. Where the number of one is taken, its shard is lost.
pub async fn open_pages(session: &Session, pages: &[(Held, Page)], opener: Opener) -> Result<Reading> {
    if let Some(reading) = open_all(session, pages, opener).await? {
        return Ok(reading);
    }
    let mut all = Reading::default();
    for page in pages {
        match open_all(session, std::slice::from_ref(page), opener).await? {
            Some(reading) => {
                all.opened.extend(reading.opened);
                all.now = reading.now;
            }
            None => all.lost.push(page.0.shard),
        }
    }
    Ok(all)
}

/// `None` where the number of one was taken: nothing was opened then.
async fn open_all(session: &Session, pages: &[(Held, Page)], opener: Opener) -> Result<Option<Reading>> {
    if pages.is_empty() {
        return Ok(Some(Reading::default()));
    }
    // Two statements, sent together: the rows of one that also writes would be laid aside by the server until it has
    // written.
    let (opened, effects) = tokio::join!(open(session, pages, opener), effects(session, pages));
    let now = match opened {
        Err(Error::Postgres(error)) if error.code() == Some(&SqlState::UNIQUE_VIOLATION) => return Ok(None),
        opened => opened?,
    };
    let opened = effects?.into_values().map(OpenedFlight::in_order).collect();
    Ok(Some(Reading { now: Some(now), opened, ..Reading::default() }))
}

/// Writes the flights. Gives the database's clock.
async fn open(session: &Session, pages: &[(Held, Page)], opener: Opener) -> Result<SystemTime> {
    let mut columns = Columns::default();
    for (held, page) in pages {
        columns.push(held, page);
    }
    let sql = "-- store::open_pages
insert into fencepost.flights (shard, seq, epoch, relay, nonce, base, target, first_id, last_id, partial, deliveries)
select w.shard, w.seq, w.epoch, $10::uuid, $11::uuid, w.base::pg_snapshot, w.target::pg_snapshot, w.first_id, w.last_id,
       w.partial, w.deliveries
from unnest($1::smallint[], $2::bigint[], $3::bigint[], $4::text[], $5::text[], $6::bigint[], $7::bigint[], $8::boolean[],
            $9::integer[]) as w (shard, seq, epoch, base, target, first_id, last_id, partial, deliveries)
returning clock_timestamp()";
    let rows = log::open(
        session,
        sql,
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
        ],
    )
    .await?;
    rows.first().map(|row| row.get(0)).ok_or_else(|| Error::Corrupt("flights were opened and not answered".into()))
}

/// Reads what the pages hold, as flights that count once they are written. Each row is taken apart while the server is at
/// the next.
async fn effects(session: &Session, pages: &[(Held, Page)]) -> Result<BTreeMap<Shard, OpenedFlight>> {
    let mut flights: BTreeMap<Shard, (OpenedFlight, &Page)> =
        pages.iter().filter_map(|(held, page)| Some((held.shard, (page.flight(held)?, page)))).collect();
    let shards: Vec<i16> = pages.iter().map(|(held, _)| held.shard.0).collect();
    let lowest = pages.iter().map(|(_, page)| page.first().0).min().unwrap_or_default();
    let highest = pages.iter().map(|(_, page)| page.last().0).max().unwrap_or_default();
    let (found, ids) = match highest - lowest <= WALKED_FOR_ONE * ids_of(pages) {
        true => (BY_RANGE, vec![lowest, highest]),
        false => (BY_ID, pages.iter().flat_map(|(_, page)| page.entries.iter().map(|entry| entry.id.0)).collect()),
    };
    let statement = session.prepared(&format!("-- store::read_pages\nselect {EFFECT_COLUMNS} {found}")).await?;
    let parameters: [&(dyn ToSql + Sync); 2] = [&shards, &ids];
    let rows = session.client().query_raw(&statement, parameters).await?;
    let mut rows = pin!(rows);
    while let Some(row) = rows.try_next().await? {
        let read = read_effect(&row)?;
        if let Some((flight, page)) = flights.get_mut(&read.effect.shard)
            && page.holds(read.effect.id)
        {
            flight.effects.push(read);
        }
    }
    let whole = |(shard, (flight, page)): (Shard, (OpenedFlight, &Page))| {
        let read: usize = flight.effects.iter().map(|read| read.effect.targets.len()).sum();
        match read == page.deliveries() as usize {
            true => Ok((shard, flight)),
            // Its segment was dropped just now: what is kept of it is found by whoever adopts the flight.
            false => {
                Err(Error::Corrupt(format!("shard {shard}: of {} deliveries {read} were found", page.deliveries())))
            }
        }
    };
    flights.into_iter().map(whole).collect()
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
}

impl<'a> Columns<'a> {
    fn push(&mut self, held: &'a Held, page: &Page) {
        let Reached::Partial { base, target, .. } = &held.position.reached else { return };
        self.shards.push(held.shard.0);
        self.seqs.push(held.position.next_seq().0);
        self.epochs.push(held.epoch.0);
        self.bases.push(&base.0);
        self.targets.push(&target.0);
        self.firsts.push(page.first().0);
        self.lasts.push(page.last().0);
        self.partials.push(page.partial);
        self.deliveries.push(page.deliveries() as i32);
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
    Ok(row.map(|row| Position { seq: FlightSeq(row.get(0)), reached: Reached::Whole(target.clone()), ahead_to: None }))
}
