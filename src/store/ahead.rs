//! Reading ahead: what little is new may be sent before it has a flight, where the newest flight of its shard says that
//! it may be (`flights.ahead_to`). So a first byte does not wait for a flush, and a flight is for what some milliseconds
//! bring.
//!
//! That row is the marker that exists before the byte. Whoever takes a shard over whose owner is gone closes everything up
//! to `ahead_to` that has no flight as lost (`leave_lost`); whoever hands one over in order has given all of it
//! a flight and takes the licence back ([`shards::release`](super::shards::release)).

use std::sync::LazyLock;
use std::time::SystemTime;

use tokio_postgres::{Row, Transaction};

use super::Result;
use super::effects::{EFFECT_COLUMNS, EFFECT_WIDTH, ReadEffect, read_effect};
use super::log::{self, Held, NEW, Opener, Position, Reached, Snapshot};
use super::session::Session;
use crate::model::key::{EffectId, FlightSeq, Shard};
use crate::mutant::{self, Mutant};

/// So many ids beyond its last a flight lets its relay send ahead. They are those of all shards. After a crash as many
/// deliveries at most count as lost attempts though they had not been sent.
pub const AHEAD_IDS: i64 = 256;
/// The most effects of one reading, and the largest payload.
const EFFECTS_MAX: i64 = 64;
const LARGE: usize = 65_536;
/// How often it is asked again whether what was read is on disk: as long as a flush takes.
const ASKED_AGAIN: u32 = 8;

/// What is new since a snapshot, in order.
#[derive(Debug)]
pub struct New {
    pub effects: Vec<ReadEffect>,
    pub seen: Snapshot,
    pub commits: Commits,
    /// The database's clock.
    pub now: SystemTime,
}

/// Whether what was read could still be lost itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Commits {
    OnDisk,
    /// Nobody knows: with its flight they will be.
    Unknown,
}

/// What reading ahead found.
#[derive(Debug)]
pub enum Ahead {
    Nothing,
    New(New),
    /// More than is read this way, or something large.
    Much,
}

/// What was read ahead of a shard and is to have its flight.
#[derive(Clone, Debug)]
pub struct Unwritten {
    pub held: Held,
    pub first: EffectId,
    pub last: EffectId,
    pub deliveries: usize,
}

/// New effects since snapshot $2 of the shards $1: of transactions that began after it, and of those in progress in it. The
/// second branch is another statement, since a snapshot has mostly none. What was inserted before this statement looked, its
/// own commits among it, is on disk where the server has flushed as far; a standby is not asked.
fn statement(of_transactions: &str) -> String {
    let columns = EFFECT_COLUMNS
        .replace("e.payload", &format!("case when e.size <= {LARGE} then e.payload else ''::bytea end as payload"));
    format!(
        "-- store::read_ahead
select {columns}, e.size > {LARGE} as large, case when w.inserted > pg_current_wal_flush_lsn() then w.inserted::text end as unflushed, w.alone,
       pg_current_snapshot()::text as seen, clock_timestamp() as now
from (
    select pg_current_wal_insert_lsn() as inserted, current_setting('synchronous_standby_names') = '' as alone,
           (select log_floor from fencepost.history) as log_floor
    offset 0
) w cross join lateral ({of_transactions}) e
limit {EFFECTS_MAX} + 1"
    )
}

static LATER: LazyLock<String> = LazyLock::new(|| statement(BEGAN_LATER));
static ANY: LazyLock<String> = LazyLock::new(|| statement(&format!("{BEGAN_LATER} union all {WERE_IN_PROGRESS}")));

const BEGAN_LATER: &str = "select e.* from fencepost.effects e
    where e.shard = any($1::smallint[]) and e.xid >= pg_snapshot_xmax($2::text::pg_snapshot) and e.id + 0 > w.log_floor";

const WERE_IN_PROGRESS: &str = "select e.* from pg_snapshot_xip($2::text::pg_snapshot) x cross join unnest($1::smallint[]) h (shard)
    cross join lateral (select * from fencepost.effects e where e.shard = h.shard and e.xid = x and e.id + 0 > w.log_floor offset 0) e";

/// Looks for what is new in `shards` since `seen`, which must be of the same server run: a crash hands the same transaction
/// ids out again. Writes nothing.
pub async fn read(session: &Session, shards: &[Shard], seen: &Snapshot) -> Result<Ahead> {
    let sql = if seen.has_in_progress() { &*ANY } else { &*LATER };
    let shards: Vec<i16> = shards.iter().map(|shard| shard.0).collect();
    let statement = session.prepared(sql).await?;
    let rows = session.client().query(&statement, &[&shards, &seen.as_str()]).await?;
    let Some(first) = rows.first() else { return Ok(Ahead::Nothing) };
    let is_large = |row: &Row| row.get::<_, bool>(EFFECT_WIDTH);
    if rows.len() as i64 > EFFECTS_MAX || rows.iter().any(is_large) {
        return Ok(Ahead::Much);
    }
    let commits = match (first.get(EFFECT_WIDTH + 1), first.get(EFFECT_WIDTH + 2)) {
        (None, true) => Commits::OnDisk,
        (Some(unflushed), true) => flushed(session, unflushed).await?,
        (_, false) => Commits::Unknown,
    };
    let (seen, now) = (Snapshot(first.get(EFFECT_WIDTH + 3)), first.get(EFFECT_WIDTH + 4));
    let mut effects = rows.iter().map(read_effect).collect::<Result<Vec<_>>>()?;
    effects.sort_by_key(|read| read.effect.id);
    Ok(Ahead::New(New { effects, seen, commits, now }))
}

/// Mostly another commit is on its way to the disk, and is there when it is asked again.
async fn flushed(session: &Session, unflushed: &str) -> Result<Commits> {
    let statement =
        session.prepared("-- store::flushed\nselect pg_current_wal_flush_lsn() >= $1::text::pg_lsn").await?;
    for _ in 0..ASKED_AGAIN {
        if session.client().query_one(&statement, &[&unflushed]).await?.get(0) {
            return Ok(Commits::OnDisk);
        }
    }
    Ok(Commits::Unknown)
}

/// Gives what was read ahead up to `seen` its flights, in one commit. Shards that are missing from the answer are lost:
/// somebody else has taken the number.
pub async fn write(
    session: &Session,
    unwritten: &[Unwritten],
    seen: &Snapshot,
    opener: Opener,
) -> Result<Vec<(Shard, Position)>> {
    let (mut shards, mut seqs, mut epochs, mut bases) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (mut firsts, mut lasts, mut deliveries) = (Vec::new(), Vec::new(), Vec::new());
    for one in unwritten {
        let Reached::Whole(base) = &one.held.position.reached else { continue };
        shards.push(one.held.shard.0);
        seqs.push(one.held.position.next_seq().0);
        epochs.push(one.held.epoch.0);
        bases.push(base.as_str());
        firsts.push(one.first.0);
        lasts.push(one.last.0);
        deliveries.push(one.deliveries as i32);
    }
    let sql = format!(
        "-- store::write_ahead
insert into fencepost.flights (shard, seq, epoch, relay, nonce, base, target, first_id, last_id, deliveries, ahead_to)
select w.shard, w.seq, w.epoch, $1::uuid, $2::uuid, w.base::pg_snapshot, $3::text::pg_snapshot, w.first_id, w.last_id, w.deliveries,
       w.last_id + {AHEAD_IDS}
from unnest($4::smallint[], $5::bigint[], $6::bigint[], $7::text[], $8::bigint[], $9::bigint[], $10::integer[])
     as w (shard, seq, epoch, base, first_id, last_id, deliveries)
on conflict (shard, seq) do nothing
returning shard, seq, base::text, target::text, last_id, partial, ahead_to"
    );
    let rows = log::open(
        session,
        &sql,
        &[
            /* relay */ &opener.relay,
            /* nonce */ &opener.nonce,
            /* seen */ &seen.as_str(),
            &shards,
            &seqs,
            &epochs,
            &bases,
            &firsts,
            &lasts,
            &deliveries,
        ],
    )
    .await?;
    Ok(rows.iter().map(|row| (Shard(row.get(0)), Position::from_row(row, 1))).collect())
}

/// The newest flight of a shard that is being taken over. Where its relay may have sent ahead of it, that has a flight now, in
/// its relay's name, to be closed as lost like the others it left open; and reading goes on after it. Without a licence
/// nothing was sent, and what nobody has read is not gone over.
pub(super) async fn leave_lost(tx: &Transaction<'_>, shard: Shard) -> Result<Option<FlightSeq>> {
    let sent = match mutant::is(Mutant::SentAheadForgotten) {
        true => "false",
        false => "not f.partial",
    };
    let sql = format!(
        "-- store::leave_lost
with newest as (
    select f.* from fencepost.flights f where f.shard = $1 order by f.seq desc limit 1
), sent as (
    select d.id, d.deliveries
    from (
        select f.shard, f.target as base, f.ahead_to, y.log_floor from newest f cross join fencepost.history y
        where {sent} and f.ahead_to is not null offset 0
    ) h cross join lateral ({NEW}) d
    where d.id <= h.ahead_to
), left_open as (
    insert into fencepost.flights (shard, seq, epoch, relay, base, target, first_id, last_id, partial, deliveries)
    select f.shard, f.seq + 1, f.epoch, f.relay, f.target, pg_current_snapshot(), s.first_id, s.last_id, true, s.deliveries
    from newest f cross join (
        select min(id) as first_id, max(id) as last_id, sum(deliveries) as deliveries from sent having count(*) > 0
    ) s
    on conflict (shard, seq) do nothing
    returning seq
)
select coalesce(l.seq, f.seq) from newest f left join left_open l on true"
    );
    let row = tx.query_opt(&sql, &[&shard.0]).await?;
    Ok(row.map(|row| FlightSeq(row.get(0))))
}
