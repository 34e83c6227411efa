//! Writing down what became of deliveries, many at a time.
//!
//! Facts are unconditional: whoever learns one appends it, whatever its epoch. Claims (parked rows, attempt starts)
//! hold only under the shard's present epoch; what was refused is told back.

use std::borrow::Cow;
use std::time::Duration;

use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Transaction};
use uuid::Uuid;

use super::Result;
use super::lags::{LaneId, Range};
use super::session::Session;
use crate::model::key::{ConsumerId, EffectId, FlightSeq, Shard, ShardEpoch};
use crate::model::outcome::Phase;
use crate::model::token::{AttemptToken, Fact, Waiting};
use crate::mutant::{self, Mutant};

/// One (effect, consumer) pair.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct DeliveryId {
    pub effect: EffectId,
    pub consumer: ConsumerId,
}

/// A terminal fact about a delivery.
#[derive(Clone, Debug)]
pub struct FactRow {
    pub delivery: DeliveryId,
    pub fact: Fact,
    pub attempt: u32,
    pub status: Option<u16>,
    /// An earlier attempt is unresolved.
    pub doubt: bool,
    /// The consumer's words, where they were more than the bare token.
    pub ack_raw: Option<String>,
    pub note: Option<String>,
}

/// The end of an attempt.
#[derive(Clone, Debug)]
pub struct EndRow {
    pub delivery: DeliveryId,
    pub attempt: u32,
    pub token: AttemptToken,
    pub status: Option<u16>,
    pub phase: Phase,
    pub bytes_left: bool,
    pub took: Duration,
    pub ack_raw: Option<String>,
    pub error: Option<String>,
}

/// The start of an attempt that needs a marker of its own.
#[derive(Clone, Debug)]
pub struct StartRow {
    pub delivery: DeliveryId,
    pub shard: Shard,
    pub epoch: ShardEpoch,
    pub attempt: u32,
}

/// What happens to a moment that is kept with a parked row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Moment {
    Keep,
    /// Now, unless it is set already.
    Set,
    Clear,
}

/// A delivery that waits in the parking lot.
#[derive(Clone, Debug)]
pub struct ParkRow {
    pub delivery: DeliveryId,
    pub shard: Shard,
    pub epoch: ShardEpoch,
    /// Only where the consumer orders by key.
    pub ordering_key: Option<String>,
    pub state: Waiting,
    pub attempts: u32,
    /// Those of them that may have left this machine.
    pub sent: u32,
    /// From the database's now; `None` where no moment will make it due.
    pub due_in: Option<Duration>,
    pub reason: String,
    pub refusals: u32,
    pub first_failed: Moment,
    pub first_doubt: Moment,
    pub in_progress: Moment,
    pub retain: Option<Duration>,
}

/// A flight whose last delivery is settled by the same batch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CloseRow {
    pub shard: Shard,
    pub seq: FlightSeq,
    pub epoch: ShardEpoch,
    /// Its deliveries that this batch parks: where one is refused, the flight stays open.
    pub parks: Vec<DeliveryId>,
}

/// Flights that a lane leaves unread for now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LagRow {
    pub lane: LaneId,
    pub range: Range,
}

/// A page of a lag range that is settled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AdvanceRow {
    pub lane: LaneId,
    pub up_to: FlightSeq,
}

#[derive(Default, Debug)]
pub struct Batch {
    pub facts: Vec<FactRow>,
    /// Deliveries with a fact in this batch that may have a parked row.
    pub unpark: Vec<DeliveryId>,
    pub ends: Vec<EndRow>,
    pub parks: Vec<ParkRow>,
    pub starts: Vec<StartRow>,
    pub closes: Vec<CloseRow>,
    pub lags: Vec<LagRow>,
    pub advances: Vec<AdvanceRow>,
    pub durability: Durability,
}

/// Whether the answer waits for the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Durability {
    /// A crash of the database may forget the batch: the deliveries are sent again and absorbed as duplicates.
    #[default]
    Lazy,
    Flushed,
}

/// What became of a batch besides being written.
#[derive(Default, Debug)]
pub struct Written {
    pub refused: Refused,
    pub early: Early,
}

/// Whether a consumer's word has been waiting for the end of an attempt in a batch (`early`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Early {
    #[default]
    None,
    Some,
}

/// The claims of a batch that were refused, because the shard has another owner or, for a start, a fact was there already.
#[derive(Default, Debug)]
pub struct Refused {
    pub parks: Vec<DeliveryId>,
    pub starts: Vec<DeliveryId>,
    /// Shards whose lag ranges were refused.
    pub shards: Vec<Shard>,
}

impl Batch {
    pub fn is_empty(&self) -> bool {
        self.facts.is_empty()
            && self.unpark.is_empty()
            && self.ends.is_empty()
            && self.parks.is_empty()
            && self.starts.is_empty()
            && self.closes.is_empty()
            && self.lags.is_empty()
            && self.advances.is_empty()
    }

    /// Only facts and closed flights: the healthy path.
    fn is_plain(&self) -> bool {
        self.unpark.is_empty()
            && self.ends.is_empty()
            && self.parks.is_empty()
            && self.starts.is_empty()
            && self.lags.is_empty()
            && self.advances.is_empty()
    }
}

/// How far the database's log is written, and how far it is on disk, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Wal {
    pub inserted: u64,
    pub flushed: u64,
}

/// From now on commits of this session are answered before they are on disk, but for those that ask for it.
pub async fn commit_lazily(session: &Session) -> Result<()> {
    session.client().batch_execute("-- store::commit_lazily\nset synchronous_commit = off").await?;
    Ok(())
}

pub async fn wal(session: &Session) -> Result<Wal> {
    let statement = session
        .prepared(
            "-- store::wal
             select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint, pg_wal_lsn_diff(pg_current_wal_flush_lsn(), '0/0')::bigint",
        )
        .await?;
    let row = session.client().query_one(&statement, &[]).await?;
    let at = |n: usize| row.get::<_, i64>(n).max(0).unsigned_abs();
    Ok(Wal { inserted: at(0), flushed: at(1) })
}

/// Writes a batch: all of it or nothing. May be repeated after an error whose cause was the connection: a start that
/// was written by the same relay is not refused the second time.
pub async fn write(session: &mut Session, batch: &Batch, relay: Uuid) -> Result<Written> {
    let level = match batch.durability {
        Durability::Lazy => "off",
        Durability::Flushed => "on",
    };
    if batch.is_plain() && batch.durability == Durability::Lazy {
        write_plain(session, batch).await?;
        return Ok(Written::default());
    }
    let facts = session.prepared(&facts_sql(Known::Perhaps)).await?;
    let tx = session.client_mut().transaction().await?;
    tx.batch_execute(&format!("set local synchronous_commit = {level}")).await?;
    let mut refused = Refused::default();
    if !batch.parks.is_empty() {
        refused.parks = parks(&tx, &batch.parks).await?;
    }
    if !batch.lags.is_empty() {
        refused.shards = lags(&tx, &batch.lags).await?;
    }
    if !batch.advances.is_empty() {
        advances(&tx, &batch.advances).await?;
    }
    if !batch.starts.is_empty() {
        refused.starts = starts(&tx, &batch.starts, relay).await?;
    }
    if !batch.ends.is_empty() {
        ends(&tx, &batch.ends, relay).await?;
    }
    if !batch.facts.is_empty() || !batch.closes.is_empty() {
        tx.execute(&facts, &FactColumns::of(batch, &refused).params()).await?;
    }
    if !batch.unpark.is_empty() {
        unpark(&tx, &batch.unpark).await?;
    }
    tx.commit().await?;
    // Those a consumer's word may have overtaken.
    let spoken_of = |park: &&ParkRow| matches!(park.state, Waiting::Unacked | Waiting::InDoubt);
    let overtaken: Vec<DeliveryId> = batch.parks.iter().filter(spoken_of).map(|park| park.delivery).collect();
    let early = match overtaken.is_empty() {
        true => Early::None,
        false => drop_settled(session.client(), &overtaken).await?,
    };
    Ok(Written { refused, early })
}

/// Removes the parked rows of deliveries that have a fact, and says whether a word waits for any of them. A row and a word
/// that were committed at the same moment did not see each other: whoever of the two writes calls this after its commit,
/// and the later one finds both.
pub async fn drop_settled(client: &Client, rows: &[DeliveryId]) -> Result<Early> {
    let effects: Vec<i64> = rows.iter().map(|d| d.effect.0).collect();
    let consumers: Vec<i32> = rows.iter().map(|d| d.consumer.0).collect();
    let row = client
        .query_one(
            "-- store::drop_settled
             with d as (
                 select * from unnest($1::bigint[], $2::integer[]) as d (effect_id, consumer_id)
             ), dropped as (
                 delete from fencepost.parked p using d
                 where p.effect_id = d.effect_id and p.consumer_id = d.consumer_id and not p.replay
                   and exists (select 1 from fencepost.ledger l where l.effect_id = d.effect_id and l.consumer_id = d.consumer_id offset 0)
             )
             select exists (select from d join fencepost.early_acks using (effect_id, consumer_id))",
            &[&effects, &consumers],
        )
        .await?;
    Ok(if row.get(0) { Early::Some } else { Early::None })
}

/// The healthy path. That a fact is there already is rare, and looking for it costs every row a third of its time and a
/// record in the WAL: the rows are inserted as new, and once more with care where one was not.
async fn write_plain(session: &Session, batch: &Batch) -> Result<()> {
    let columns = FactColumns::of(batch, &Refused::default());
    let statement = session.prepared(&facts_sql(Known::No)).await?;
    match session.client().execute(&statement, &columns.params()).await {
        Err(error) if error.code() == Some(&SqlState::UNIQUE_VIOLATION) => {
            let statement = session.prepared(&facts_sql(Known::Perhaps)).await?;
            session.client().execute(&statement, &columns.params()).await?;
        }
        done => {
            done?;
        }
    }
    Ok(())
}

/// Whether facts that are to be written may be there already.
#[derive(Clone, Copy)]
enum Known {
    No,
    Perhaps,
}

fn facts_sql(known: Known) -> String {
    let (name, conflict) = match known {
        Known::No => ("settle_new", ""),
        Known::Perhaps => ("settle", "on conflict do nothing"),
    };
    format!(
        "-- store::{name}
with facts as (
    insert into fencepost.ledger (effect_id, consumer_id, token, attempt, status, doubt, ack_raw, note)
    select f.effect_id, f.consumer_id, f.token::fencepost.fact, f.attempt, f.status, nullif(f.doubt, false), f.ack_raw, f.note
    from unnest($1::bigint[], $2::integer[], $3::text[], $4::integer[], $5::smallint[], $6::boolean[], $7::text[], $8::text[])
        as f (effect_id, consumer_id, token, attempt, status, doubt, ack_raw, note)
    {conflict}
)
update fencepost.flights x set token = 'done', closed_at = clock_timestamp()
from unnest($9::smallint[], $10::bigint[], $11::bigint[]) as c (shard, seq, epoch)
where x.shard = c.shard and x.seq = c.seq and x.epoch = c.epoch and x.token is null"
    )
}

#[derive(Default)]
struct FactColumns {
    effects: Vec<i64>,
    consumers: Vec<i32>,
    tokens: Vec<&'static str>,
    attempts: Vec<i32>,
    statuses: Vec<Option<i16>>,
    doubts: Vec<bool>,
    acks: Vec<Option<String>>,
    notes: Vec<Option<String>>,
    shards: Vec<i16>,
    seqs: Vec<i64>,
    epochs: Vec<i64>,
}

impl CloseRow {
    /// Whether everything the flight depends on was accepted.
    fn holds(&self, refused: &Refused) -> bool {
        !refused.shards.contains(&self.shard) && self.parks.iter().all(|park| !refused.parks.contains(park))
    }
}

impl FactColumns {
    fn of(batch: &Batch, refused: &Refused) -> Self {
        let mut columns = Self::default();
        for row in &batch.facts {
            columns.effects.push(row.delivery.effect.0);
            columns.consumers.push(row.delivery.consumer.0);
            columns.tokens.push(row.fact.as_str());
            columns.attempts.push(row.attempt as i32);
            columns.statuses.push(row.status.map(|s| s as i16));
            columns.doubts.push(row.doubt);
            columns.acks.push(row.ack_raw.clone());
            columns.notes.push(row.note.clone());
        }
        for row in batch.closes.iter().filter(|close| close.holds(refused)) {
            columns.shards.push(row.shard.0);
            columns.seqs.push(row.seq.0);
            columns.epochs.push(row.epoch.0);
        }
        columns
    }

    fn params(&self) -> [&(dyn tokio_postgres::types::ToSql + Sync); 11] {
        [
            &self.effects,
            &self.consumers,
            &self.tokens,
            &self.attempts,
            &self.statuses,
            &self.doubts,
            &self.acks,
            &self.notes,
            &self.shards,
            &self.seqs,
            &self.epochs,
        ]
    }
}

/// The statement of a claim: it holds only under the present epoch.
fn claim(sql: &str) -> Cow<'_, str> {
    if !mutant::is(Mutant::NoEpochPredicate) {
        return Cow::Borrowed(sql);
    }
    let blind =
        sql.replace("(s.shard, s.epoch) in (select shard, epoch from wanted)", "s.shard in (select shard from wanted)");
    Cow::Owned(blind.replace(" and h.epoch = w.epoch", "").replace(" and s.relay = $6", ""))
}

/// Extends the lanes' ranges. Returns the shards that have another owner.
async fn lags(tx: &Transaction<'_>, rows: &[LagRow]) -> Result<Vec<Shard>> {
    let shards: Vec<i16> = rows.iter().map(|r| r.lane.shard.0).collect();
    let epochs: Vec<i64> = rows.iter().map(|r| r.lane.epoch.0).collect();
    let consumers: Vec<i32> = rows.iter().map(|r| r.lane.consumer.0).collect();
    let froms: Vec<i64> = rows.iter().map(|r| r.range.from.0).collect();
    let tos: Vec<i64> = rows.iter().map(|r| r.range.to.0).collect();
    let done = tx
        .query(
            claim("-- store::lag
with wanted as (
    select w.shard, w.epoch, w.consumer_id, w.from_seq, w.to_seq
    from unnest($1::smallint[], $2::bigint[], $3::integer[], $4::bigint[], $5::bigint[]) as w (shard, epoch, consumer_id, from_seq, to_seq)
), held as (
    select s.shard, s.epoch from fencepost.shards s
    where (s.shard, s.epoch) in (select shard, epoch from wanted) for key share
)
insert into fencepost.lags as g (shard, consumer_id, from_seq, to_seq)
select w.shard, w.consumer_id, w.from_seq, w.to_seq from wanted w join held h on h.shard = w.shard and h.epoch = w.epoch
on conflict (shard, consumer_id) do update
set from_seq = least(g.from_seq, excluded.from_seq), to_seq = greatest(g.to_seq, excluded.to_seq)
returning g.shard").as_ref(),
            &[&shards, &epochs, &consumers, &froms, &tos],
        )
        .await?;
    let held: Vec<i16> = done.iter().map(|row| row.get(0)).collect();
    Ok(rows.iter().map(|r| r.lane.shard).filter(|shard| !held.contains(&shard.0)).collect())
}

async fn advances(tx: &Transaction<'_>, rows: &[AdvanceRow]) -> Result<()> {
    let shards: Vec<i16> = rows.iter().map(|r| r.lane.shard.0).collect();
    let epochs: Vec<i64> = rows.iter().map(|r| r.lane.epoch.0).collect();
    let consumers: Vec<i32> = rows.iter().map(|r| r.lane.consumer.0).collect();
    let up_to: Vec<i64> = rows.iter().map(|r| r.up_to.0).collect();
    tx.execute(
        "-- store::advance_lags
with done as (
    select d.shard, d.consumer_id, d.up_to
    from unnest($1::smallint[], $2::bigint[], $3::integer[], $4::bigint[]) as d (shard, epoch, consumer_id, up_to)
    join fencepost.shards s on s.shard = d.shard and s.epoch = d.epoch
), ended as (
    delete from fencepost.lags g using done d
    where g.shard = d.shard and g.consumer_id = d.consumer_id and g.to_seq <= d.up_to
)
update fencepost.lags g set from_seq = greatest(g.from_seq, d.up_to + 1), draining_to = null
from done d where g.shard = d.shard and g.consumer_id = d.consumer_id and g.to_seq > d.up_to",
        &[&shards, &epochs, &consumers, &up_to],
    )
    .await?;
    Ok(())
}

async fn unpark(tx: &Transaction<'_>, rows: &[DeliveryId]) -> Result<()> {
    let effects: Vec<i64> = rows.iter().map(|d| d.effect.0).collect();
    let consumers: Vec<i32> = rows.iter().map(|d| d.consumer.0).collect();
    tx.execute(
        "-- store::unpark
         delete from fencepost.parked p using unnest($1::bigint[], $2::integer[]) as d (effect_id, consumer_id)
         where p.effect_id = d.effect_id and p.consumer_id = d.consumer_id",
        &[&effects, &consumers],
    )
    .await?;
    Ok(())
}

async fn ends(tx: &Transaction<'_>, rows: &[EndRow], relay: Uuid) -> Result<()> {
    let effects: Vec<i64> = rows.iter().map(|r| r.delivery.effect.0).collect();
    let consumers: Vec<i32> = rows.iter().map(|r| r.delivery.consumer.0).collect();
    let attempts: Vec<i32> = rows.iter().map(|r| r.attempt as i32).collect();
    let tokens: Vec<&str> = rows.iter().map(|r| r.token.as_str()).collect();
    let statuses: Vec<Option<i16>> = rows.iter().map(|r| r.status.map(|s| s as i16)).collect();
    let phases: Vec<&str> = rows.iter().map(|r| r.phase.as_str()).collect();
    let left: Vec<bool> = rows.iter().map(|r| r.bytes_left).collect();
    let took: Vec<i32> = rows.iter().map(|r| r.took.as_millis().min(i32::MAX as u128) as i32).collect();
    let acks: Vec<Option<&str>> = rows.iter().map(|r| r.ack_raw.as_deref()).collect();
    let errors: Vec<Option<&str>> = rows.iter().map(|r| r.error.as_deref()).collect();
    tx.execute(
        "-- store::end_attempts
         insert into fencepost.attempts (effect_id, consumer_id, attempt, ended, relay, token, status, phase, bytes_left, took_ms, ack_raw, error)
         select e.effect_id, e.consumer_id, e.attempt, true, $11, e.token, e.status, e.phase, e.bytes_left, e.took_ms, e.ack_raw, e.error
         from unnest($1::bigint[], $2::integer[], $3::integer[], $4::text[], $5::smallint[], $6::text[], $7::boolean[], $8::integer[], $9::text[], $10::text[])
             as e (effect_id, consumer_id, attempt, token, status, phase, bytes_left, took_ms, ack_raw, error)
         on conflict do nothing",
        &[&effects, &consumers, &attempts, &tokens, &statuses, &phases, &left, &took, &acks, &errors, &relay],
    )
    .await?;
    Ok(())
}

fn moment(moment: Moment) -> i16 {
    match moment {
        Moment::Keep => 0,
        Moment::Set => 1,
        Moment::Clear => 2,
    }
}

async fn parks(tx: &Transaction<'_>, rows: &[ParkRow]) -> Result<Vec<DeliveryId>> {
    let effects: Vec<i64> = rows.iter().map(|r| r.delivery.effect.0).collect();
    let consumers: Vec<i32> = rows.iter().map(|r| r.delivery.consumer.0).collect();
    let shards: Vec<i16> = rows.iter().map(|r| r.shard.0).collect();
    let epochs: Vec<i64> = rows.iter().map(|r| r.epoch.0).collect();
    let keys: Vec<Option<&str>> = rows.iter().map(|r| r.ordering_key.as_deref()).collect();
    let states: Vec<&str> = rows.iter().map(|r| r.state.as_str()).collect();
    let attempts: Vec<i32> = rows.iter().map(|r| r.attempts as i32).collect();
    let sent: Vec<i32> = rows.iter().map(|r| r.sent as i32).collect();
    let due: Vec<Option<f64>> = rows.iter().map(|r| r.due_in.map(|d| d.as_secs_f64())).collect();
    let reasons: Vec<&str> = rows.iter().map(|r| r.reason.as_str()).collect();
    let refusals: Vec<i32> = rows.iter().map(|r| r.refusals as i32).collect();
    let moments: Vec<Vec<i16>> =
        [|r: &ParkRow| r.first_failed, |r: &ParkRow| r.first_doubt, |r: &ParkRow| r.in_progress]
            .iter()
            .map(|of| rows.iter().map(|r| moment(of(r))).collect())
            .collect();
    let retains: Vec<Option<i64>> = rows.iter().map(|r| r.retain.map(|d| d.as_secs() as i64)).collect();
    let done = tx
        .query(
            claim("-- store::park
with wanted as (
    select w.effect_id, w.consumer_id, w.shard, w.epoch, w.ordering_key, w.state, w.attempts, w.due_in, w.reason, w.refusals,
           w.failed, w.doubt, w.progress, w.retain, w.sent
    from unnest($1::bigint[], $2::integer[], $3::smallint[], $4::bigint[], $5::text[], $6::text[], $7::integer[], $8::float8[],
                $9::text[], $10::integer[], $11::smallint[], $12::smallint[], $13::smallint[], $14::bigint[], $15::integer[])
        as w (effect_id, consumer_id, shard, epoch, ordering_key, state, attempts, due_in, reason, refusals, failed, doubt, progress, retain, sent)
), held as (
    select s.shard, s.epoch from fencepost.shards s
    where (s.shard, s.epoch) in (select shard, epoch from wanted) for key share
), parked as (
insert into fencepost.parked as p (effect_id, consumer_id, shard, ordering_key, state, attempts, next_attempt_at, reason, refusals,
                                   first_failed_at, first_doubt_at, in_progress_since, retain_seconds, sent)
select w.effect_id, w.consumer_id, w.shard, w.ordering_key, w.state, w.attempts,
       clock_timestamp() + make_interval(secs => w.due_in), w.reason, w.refusals,
       case when w.failed = 1 then clock_timestamp() end, case when w.doubt = 1 then clock_timestamp() end,
       case when w.progress = 1 then clock_timestamp() end, w.retain, w.sent
from wanted w join held h on h.shard = w.shard and h.epoch = w.epoch
where not exists (select 1 from fencepost.ledger l where l.effect_id = w.effect_id and l.consumer_id = w.consumer_id offset 0)
   or exists (select 1 from fencepost.parked r where r.effect_id = w.effect_id and r.consumer_id = w.consumer_id and r.replay offset 0)
on conflict (effect_id, consumer_id) do update set
    ordering_key = excluded.ordering_key, state = excluded.state, attempts = excluded.attempts, next_attempt_at = excluded.next_attempt_at, reason = excluded.reason,
    refusals = excluded.refusals, sent = excluded.sent, retain_seconds = coalesce(excluded.retain_seconds, p.retain_seconds),
    first_failed_at = coalesce(p.first_failed_at, excluded.first_failed_at),
    first_doubt_at = case when (select w.doubt from wanted w where w.effect_id = p.effect_id and w.consumer_id = p.consumer_id) = 2
                          then null else coalesce(p.first_doubt_at, excluded.first_doubt_at) end,
    in_progress_since = case when (select w.progress from wanted w where w.effect_id = p.effect_id and w.consumer_id = p.consumer_id) = 2
                          then null else coalesce(p.in_progress_since, excluded.in_progress_since) end
returning p.effect_id, p.consumer_id
)
select effect_id, consumer_id from parked
union
-- A reply overtook its confirm: the delivery has ended, and needs no row.
select w.effect_id, w.consumer_id from wanted w
where exists (select 1 from fencepost.ledger l where l.effect_id = w.effect_id and l.consumer_id = w.consumer_id offset 0)").as_ref(),
            &[
                &effects, &consumers, &shards, &epochs, &keys, &states, &attempts, &due, &reasons, &refusals, &moments[0],
                &moments[1], &moments[2], &retains, &sent,
            ],
        )
        .await?;
    Ok(refused(rows.iter().map(|r| r.delivery), &done))
}

async fn starts(tx: &Transaction<'_>, rows: &[StartRow], relay: Uuid) -> Result<Vec<DeliveryId>> {
    let effects: Vec<i64> = rows.iter().map(|r| r.delivery.effect.0).collect();
    let consumers: Vec<i32> = rows.iter().map(|r| r.delivery.consumer.0).collect();
    let attempts: Vec<i32> = rows.iter().map(|r| r.attempt as i32).collect();
    let shards: Vec<i16> = rows.iter().map(|r| r.shard.0).collect();
    let epochs: Vec<i64> = rows.iter().map(|r| r.epoch.0).collect();
    let done = tx
        .query(
            claim("-- store::start_attempts
with wanted as (
    select w.effect_id, w.consumer_id, w.attempt, w.shard, w.epoch
    from unnest($1::bigint[], $2::integer[], $3::integer[], $4::smallint[], $5::bigint[]) as w (effect_id, consumer_id, attempt, shard, epoch)
), held as (
    select s.shard, s.epoch from fencepost.shards s
    where (s.shard, s.epoch) in (select shard, epoch from wanted) and s.relay = $6 for key share
), allowed as (
    select w.effect_id, w.consumer_id, w.attempt from wanted w join held h on h.shard = w.shard and h.epoch = w.epoch
    where not exists (select 1 from fencepost.ledger l where l.effect_id = w.effect_id and l.consumer_id = w.consumer_id offset 0)
       or exists (select 1 from fencepost.parked r where r.effect_id = w.effect_id and r.consumer_id = w.consumer_id and r.replay offset 0)
), counted as (
    update fencepost.parked p set attempts = a.attempt
    from allowed a where p.effect_id = a.effect_id and p.consumer_id = a.consumer_id
)
insert into fencepost.attempts as attempts (effect_id, consumer_id, attempt, ended, relay)
select effect_id, consumer_id, attempt, false, $6 from allowed
on conflict (effect_id, consumer_id, attempt, ended) do update set relay = excluded.relay
    where attempts.relay = excluded.relay
returning effect_id, consumer_id").as_ref(),
            &[&effects, &consumers, &attempts, &shards, &epochs, &relay],
        )
        .await?;
    Ok(refused(rows.iter().map(|r| r.delivery), &done))
}

fn refused(wanted: impl Iterator<Item = DeliveryId>, done: &[tokio_postgres::Row]) -> Vec<DeliveryId> {
    let done: std::collections::HashSet<DeliveryId> =
        done.iter().map(|row| DeliveryId { effect: EffectId(row.get(0)), consumer: ConsumerId(row.get(1)) }).collect();
    wanted.filter(|delivery| !done.contains(delivery)).collect()
}
