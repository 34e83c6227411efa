//! Writing outcomes down, in groups: whatever came together goes into one commit.
//!
//! An outcome is never given up: while the database is away it waits here, in memory that the flights' bytes bound,
//! and the write is repeated, never the send.

mod batch;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use self::batch::batch_of;
use super::delivery::{Delivery, Flight, Origin};
use super::doorbell::Doorbell;
use super::outage;
use super::unflushed::{ASK_EVERY, Unflushed};
use crate::edge::error::report;
use crate::failpoint;
use crate::model::key::{Shard, ShardEpoch};
use crate::mutant::{self, Mutant};
use crate::store::session::Session;
use crate::store::settle::{
    self, AdvanceRow, Batch, CloseRow, DeliveryId, Durability, Early, EndRow, FactRow, ParkRow, Refused, StartRow,
    Written,
};
use crate::store::{Database, alarms};

/// The most outcomes of one commit.
const BATCH_MAX: usize = 1_000;
/// The writer waits for more: a commit costs what twenty rows do, and a moment in which the reader cannot tell what is on
/// disk. With enough of them in hand it does not wait.
const ENOUGH: usize = 250;
const GATHER_FOR: Duration = Duration::from_millis(100);
const COUNT_EVERY: Duration = Duration::from_millis(5);
const READ_WITHIN: Duration = Duration::from_millis(5);
/// How often what waits for its flight is looked at where nothing happens.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Where outcomes are handed in.
#[derive(Clone)]
pub struct Settler {
    entries: mpsc::UnboundedSender<Entry>,
    /// Rung where somebody waits for what was handed in.
    awaited: Arc<Notify>,
    /// Rung where something was just read.
    read: Arc<Notify>,
}

/// What became of a delivery.
pub struct Settlement {
    pub delivery: Delivery,
    pub verdict: Verdict,
    pub end: Option<EndRow>,
    pub durability: Durability,
}

pub enum Verdict {
    Fact(FactRow),
    Park(ParkRow),
    /// A fact that somebody else wrote says already how it ended.
    Known,
    /// Its lane leaves the flight unread for now.
    Lag,
}

/// Whether an attempt that needed a start row may leave.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StartAnswer {
    Started,
    /// The delivery has ended: a fact says how.
    Ended,
    /// The shard has another owner.
    Refused,
}

enum Entry {
    Settle(Box<Settlement>),
    Start(StartRow, oneshot::Sender<StartAnswer>),
    End(EndRow),
    Close(CloseRow),
    /// What was read ahead has its flight now.
    Written {
        flight: Arc<Flight>,
        shard: Shard,
        epoch: ShardEpoch,
    },
    Advance(AdvanceRow),
    Flush(oneshot::Sender<()>),
}

impl Entry {
    fn is_awaited(&self) -> bool {
        matches!(self, Self::Start(..) | Self::Flush(_))
    }

    /// A lag range is of flights that have a row. Where the shard is lost there will be none.
    fn waits_for_flight(&self) -> bool {
        match self {
            Self::Settle(settlement) if matches!(settlement.verdict, Verdict::Lag) => match &settlement.delivery.origin
            {
                Origin::Flight(flight) => !flight.is_written() && !settlement.delivery.lease.is_lost(),
                Origin::Parked { .. } => false,
            },
            _ => false,
        }
    }
}

impl Settler {
    /// Starts the writer. It ends when every handle is gone and all is written, or at `abandon`.
    pub fn start(
        database: Database,
        relay: Uuid,
        bell: Arc<Doorbell>,
        abandon: CancellationToken,
    ) -> (Self, tokio::task::JoinHandle<()>) {
        let (sender, entries) = mpsc::unbounded_channel();
        let (awaited, read) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let session = None;
        let writer = Writer {
            database,
            relay,
            bell,
            abandon,
            session,
            unflushed: Unflushed::default(),
            awaited: awaited.clone(),
            read: read.clone(),
            waiting: Vec::new(),
        };
        (Self { entries: sender, awaited, read }, tokio::spawn(writer.run(entries)))
    }

    pub fn settle(&self, settlement: Settlement) {
        // Without a writer the process is ending: the open flight says what is not known.
        let _ = self.entries.send(Entry::Settle(Box::new(settlement)));
    }

    /// Something was just read: a good moment to write (`Writer::gather`).
    pub fn after_reading(&self) {
        self.read.notify_waiters();
    }

    /// Commits the start of an attempt, in a group with others.
    pub async fn start_attempt(&self, row: StartRow) -> StartAnswer {
        let (reply, answer) = oneshot::channel();
        let _ = self.entries.send(Entry::Start(row, reply));
        self.awaited.notify_one();
        answer.await.unwrap_or(StartAnswer::Refused)
    }

    /// Ends an attempt that was started and then not made.
    pub fn end_attempt(&self, row: EndRow) {
        let _ = self.entries.send(Entry::End(row));
    }

    /// Closes a flight that has no deliveries: nobody subscribed to any of its effects.
    pub fn close_empty(&self, row: CloseRow) {
        let _ = self.entries.send(Entry::Close(row));
    }

    /// What was read ahead has its flight.
    pub fn written(&self, flight: Arc<Flight>, shard: Shard, epoch: ShardEpoch) {
        let _ = self.entries.send(Entry::Written { flight, shard, epoch });
    }

    /// A page of a lag range in which nothing was owed any more.
    pub fn advance_empty(&self, row: AdvanceRow) {
        let _ = self.entries.send(Entry::Advance(row));
    }

    /// Waits until everything handed in before is written.
    pub async fn flush(&self) {
        let (reply, done) = oneshot::channel();
        let _ = self.entries.send(Entry::Flush(reply));
        self.awaited.notify_one();
        let _ = done.await;
    }
}

/// Over a new connection, what a crash may have forgotten comes first.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Connection {
    Known,
    New,
}

struct Writer {
    database: Database,
    relay: Uuid,
    bell: Arc<Doorbell>,
    abandon: CancellationToken,
    session: Option<Session>,
    unflushed: Unflushed,
    awaited: Arc<Notify>,
    read: Arc<Notify>,
    /// What waits for its flight's row, and whoever waits for that.
    waiting: Vec<Entry>,
}

impl Writer {
    async fn run(mut self, mut entries: mpsc::UnboundedReceiver<Entry>) {
        let mut group = Vec::with_capacity(BATCH_MAX);
        loop {
            tokio::select! {
                received = entries.recv_many(&mut group, BATCH_MAX) => if received == 0 { break },
                // Until all is on disk, the connection's end must not go unnoticed.
                () = tokio::time::sleep(ASK_EVERY), if !self.unflushed.is_empty() => {}
                // Their shard may have been lost.
                () = tokio::time::sleep(LOOK_AGAIN), if !self.waiting.is_empty() => {}
            }
            let least = match group.is_empty() || group.iter().any(Entry::is_awaited) {
                true => Durability::Lazy,
                false => self.gather(&mut entries, &mut group).await,
            };
            let ready = self.ready(std::mem::take(&mut group));
            self.write(ready, least).await;
            group.reserve(BATCH_MAX);
            if self.abandon.is_cancelled() {
                return;
            }
        }
    }

    /// What of a group, and of those that waited, can be written now. A flush is over when what came before it is written.
    fn ready(&mut self, group: Vec<Entry>) -> Vec<Entry> {
        let mut entries = std::mem::take(&mut self.waiting);
        entries.extend(group);
        if !entries.iter().any(Entry::waits_for_flight) {
            return entries;
        }
        let (waiting, ready) =
            entries.into_iter().partition(|entry| entry.waits_for_flight() || matches!(entry, Entry::Flush(_)));
        self.waiting = waiting;
        ready
    }

    /// Waits for enough. Where so much does not come, it waits for the reader as well, a moment: what is inserted while a
    /// producer commits stands between that commit and the end of the log, and the reader cannot tell that the commit is on
    /// disk (`store::ahead`). After a reading there is time, and what few there are is flushed. Gives how durable the group
    /// is to be at least.
    async fn gather(&self, entries: &mut mpsc::UnboundedReceiver<Entry>, group: &mut Vec<Entry>) -> Durability {
        // A ring for what was written long ago only shortens the moment.
        let awaited = self.awaited.notified();
        tokio::pin!(awaited);
        let began = Instant::now();
        let least = loop {
            if group.len() + entries.len() >= ENOUGH {
                break Durability::Lazy;
            }
            if began.elapsed() >= GATHER_FOR {
                tokio::select! {
                    () = &mut awaited => {}
                    () = self.read.notified() => {}
                    () = tokio::time::sleep(READ_WITHIN) => {}
                }
                break Durability::Local;
            }
            if tokio::time::timeout(COUNT_EVERY, &mut awaited).await.is_ok() {
                break Durability::Lazy;
            }
        };
        while group.len() < BATCH_MAX
            && let Ok(entry) = entries.try_recv()
        {
            group.push(entry);
        }
        least
    }

    /// Writes one group, however long it takes, then lets go of what it settled.
    async fn write(&mut self, group: Vec<Entry>, least: Durability) {
        let mut batch = batch_of(&group);
        batch.durability = batch.durability.max(match self.unflushed.is_long() {
            true => Durability::Local,
            false => least,
        });
        if !batch.is_empty() {
            failpoint::reach("settle", &[]).await;
        }
        match self.persist(&batch).await {
            Some(Ok(Written { refused, ended, early })) => {
                if early == Early::Some {
                    self.bell.early.notify_one();
                }
                // What leaves the parking lot may have released the next of its key.
                if !batch.parks.is_empty() || !batch.unpark.is_empty() || !batch.advances.is_empty() {
                    self.bell.parked.notify_one();
                }
                self.unflushed.committed(batch);
                release(group, &refused, &ended);
            }
            Some(Err(error)) if group.len() > 1 => {
                // One of them cannot be written: the others must not wait for it.
                tracing::warn!(error = %report(&error), entries = group.len(), "a group could not be written; writing one by one");
                for entry in group {
                    Box::pin(self.write(vec![entry], least)).await;
                }
            }
            Some(Err(error)) => self.unwritable(group, &error).await,
            None => {}
        }
    }

    /// `None` where the relay was told to end before the database came back.
    async fn persist(&mut self, batch: &Batch) -> Option<Result<Written, crate::store::Error>> {
        loop {
            let (mut session, connection) = match self.session.take() {
                Some(session) => (session, Connection::Known),
                None => (outage::reconnect(&self.database, "settler", &self.abandon).await?, Connection::New),
            };
            match self.persist_over(&mut session, connection, batch).await {
                Err(error) if error.is_disconnect() => {
                    tracing::debug!(error = %report(&error), "outcomes wait for the database");
                    if mutant::is(Mutant::CommitErrorAsSuccess) {
                        return Some(Ok(Written::default()));
                    }
                }
                written => {
                    self.session = Some(session);
                    return Some(written);
                }
            }
        }
    }

    async fn persist_over(
        &mut self,
        session: &mut Session,
        connection: Connection,
        batch: &Batch,
    ) -> Result<Written, crate::store::Error> {
        if connection == Connection::New {
            settle::commit_lazily(session).await?;
            for batch in self.unflushed.again() {
                match settle::write(session, batch, self.relay).await {
                    Err(error) if error.is_disconnect() => return Err(error),
                    Err(error) => tracing::error!(error = %report(&error), "outcomes could not be written again"),
                    Ok(_) => {}
                }
            }
        }
        if self.unflushed.wants_to_know() || (batch.is_empty() && !self.unflushed.is_empty()) {
            self.unflushed.reached(settle::wal(session).await?);
        }
        match batch.is_empty() {
            true => Ok(Written::default()),
            false => settle::write(session, batch, self.relay).await,
        }
    }

    /// The flight stays open, so the delivery is not forgotten: the reconciler parks it, or whoever takes the shard over.
    async fn unwritable(&mut self, group: Vec<Entry>, error: &crate::store::Error) {
        for entry in &group {
            if let (Entry::Settle(settlement), Some(session)) = (entry, &self.session) {
                let object = settlement.delivery.effect.key.to_string();
                if let Err(error) =
                    alarms::raise(session.client(), alarms::Alarm::Unwritable, &object, &report(error)).await
                {
                    tracing::error!(error = %report(&error), "an alarm could not be written");
                }
            }
        }
    }
}

fn release(group: Vec<Entry>, refused: &Refused, ended: &[DeliveryId]) {
    for entry in group {
        match entry {
            Entry::Settle(settlement) => {
                // One that was refused its parked row or its range is not accounted for: its flight must stay open.
                let delivery = &settlement.delivery;
                let accounted =
                    !refused.parks.contains(&delivery.id()) && !refused.shards.contains(&delivery.lease.shard);
                if let (Origin::Flight(flight), true) = (&settlement.delivery.origin, accounted) {
                    flight.outstanding.fetch_sub(1, Ordering::AcqRel);
                }
            }
            Entry::End(_) | Entry::Close(_) | Entry::Advance(_) => {}
            Entry::Written { flight, .. } => {
                flight.outstanding.fetch_sub(1, Ordering::AcqRel);
            }
            Entry::Start(row, reply) => {
                let answer = match &row.delivery {
                    delivery if refused.starts.contains(delivery) => StartAnswer::Refused,
                    delivery if ended.contains(delivery) => StartAnswer::Ended,
                    _ => StartAnswer::Started,
                };
                // A lane that is gone asks no more.
                let _ = reply.send(answer);
            }
            Entry::Flush(reply) => {
                let _ = reply.send(());
            }
        }
    }
}
