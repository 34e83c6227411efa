//! Replies over AMQP: heard from the brokers, written down, then acked. Whoever holds a shard reads its queue.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::doorbell::Doorbell;
use super::early;
use super::options::RetryOptions;
use super::outage;
use super::overdue;
use super::router::Router;
use crate::edge::Reach;
use crate::edge::amqp::message::reply_queue;
use crate::edge::amqp::replies::{self as wire, Batch, Heard};
use crate::edge::amqp::token::AckKey;
use crate::edge::error::report;
use crate::model::broker::Broker;
use crate::model::consumer::{AckMode, EdgeSpec};
use crate::model::key::Shard;
use crate::store::alarms::{self, Alarm};
use crate::store::early::{Deferred, Pace};
use crate::store::replies::{self, Orphan, Recorded, Word};
use crate::store::session::Session;
use crate::store::{self, Database};

/// How often it is looked which shards are held and which brokers matter.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// A queue that cannot be read for so long is an alarm; shorter is a restart.
const ALARM_AFTER: Duration = Duration::from_secs(10);
/// Batches waiting to be written, over all shards of a broker.
const WAITING_MAX: usize = 16;

/// What reading replies needs.
#[derive(Clone)]
pub struct Replies {
    pub database: Database,
    pub router: Arc<Router>,
    pub reach: Reach,
    pub keys: Arc<AckKey>,
    pub retry: RetryOptions,
    pub bell: Arc<Doorbell>,
}

impl Replies {
    /// Reads the reply queues of the shards held, on every broker with a consumer that may reply, until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        let mut tasks = JoinSet::new();
        let mut told = Vec::new();
        for broker in &self.reach.brokers {
            let (shards, held) = watch::channel(Vec::new());
            let (sender, heard) = mpsc::channel(WAITING_MAX);
            tasks.spawn(wire::run(Arc::clone(broker), Arc::clone(&self.keys), held, sender, stop.clone()));
            tasks.spawn(Box::pin(self.clone().write_down(Arc::clone(broker), heard, stop.clone())));
            told.push((broker.name.clone(), shards));
        }
        let pool = self.database.pool(2);
        tasks.spawn(overdue::watch(self.clone(), pool.clone(), stop.clone()));
        tasks.spawn(early::watch(self.clone(), pool, stop.clone()));
        let mut look = tokio::time::interval(LOOK_EVERY);
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                _ = look.tick() => self.tell(&told),
            }
        }
        while tasks.join_next().await.is_some() {}
    }

    fn tell(&self, told: &[(String, watch::Sender<Vec<Shard>>)]) {
        let held = self.held();
        let consumers = self.router.consumers();
        for (broker, shards) in told {
            let replying = consumers.iter().any(|consumer| {
                matches!(&consumer.edge, EdgeSpec::Amqp(spec) if spec.broker == *broker)
                    && consumer.contract.ack != AckMode::None
            });
            let wanted = if replying { held.clone() } else { Vec::new() };
            shards.send_if_modified(|known| {
                let changed = *known != wanted;
                *known = wanted;
                changed
            });
        }
    }

    fn held(&self) -> Vec<Shard> {
        let mut held: Vec<Shard> = self.router.leases().iter().map(|lease| lease.shard).collect();
        held.sort();
        held
    }

    async fn write_down(self, broker: Arc<Broker>, mut heard: mpsc::Receiver<Heard>, stop: CancellationToken) {
        let mut session = None;
        let mut queues = Queues::default();
        while let Some(heard) = heard.recv().await {
            match heard {
                Heard::Batch(batch) => {
                    if self.record(&mut session, batch, &stop).await.is_none() {
                        return;
                    }
                }
                Heard::Reading(shard) => {
                    queues.reading(shard);
                    self.alarm(&mut session, &broker, shard, None, &stop).await;
                }
                Heard::Unread { shard, why } => {
                    // Whoever holds the shard now reads its queue, and speaks for it.
                    let held = self.held();
                    queues.only(&held);
                    if !held.contains(&shard) {
                        continue;
                    }
                    tracing::warn!(broker = %broker.name, %shard, %why, "replies cannot be read");
                    if queues.unread(shard, Instant::now()) {
                        self.alarm(&mut session, &broker, shard, Some(&why), &stop).await;
                    }
                }
            }
        }
    }

    /// Writes a batch down, however long it takes. `None` where the relay ends first.
    async fn record(&self, session: &mut Option<Session>, batch: Batch, stop: &CancellationToken) -> Option<()> {
        let (mut words, mut orphans) = (Vec::new(), Vec::new());
        for reply in &batch.replies {
            match reply {
                Ok(reply) => words.push(Word {
                    consumer: reply.consumer.clone(),
                    key: reply.key.clone(),
                    ack: reply.word,
                    raw: reply.raw.clone(),
                    properties: reply.properties.clone(),
                }),
                Err(orphan) => orphans.push(Orphan {
                    correlation_id: orphan.correlation_id.clone(),
                    why: orphan.why.into(),
                    properties: orphan.properties.clone(),
                }),
            }
        }
        match self.write(session, batch.shard, &words, &orphans, stop).await? {
            Ok(recorded) => self.tell_of(session, &words, &recorded).await,
            Err(error) => {
                // One of them cannot be written: the others must not wait for it, and it must not come back for ever.
                tracing::warn!(error = %report(&error), replies = batch.replies.len(), "a batch of replies could not be written; writing one by one");
                for orphan in &orphans {
                    let written = self.write(session, batch.shard, &[], std::slice::from_ref(orphan), stop).await?;
                    if let Err(error) = written {
                        tracing::error!(error = %report(&error), why = %orphan.why, "an orphan could not be kept");
                    }
                }
                for word in words {
                    let one = std::slice::from_ref(&word);
                    match self.write(session, batch.shard, one, &[], stop).await? {
                        Ok(recorded) => self.tell_of(session, one, &recorded).await,
                        Err(error) => {
                            let why = format!("it could not be written: {}", report(&error));
                            let orphan = Orphan {
                                correlation_id: Some(format!("{}/{}", word.consumer, word.key)),
                                why,
                                properties: word.properties.clone(),
                            };
                            tracing::error!(reply = ?orphan.correlation_id, why = %orphan.why, "a reply is lost to its delivery");
                            let _ = self.write(session, batch.shard, &[], &[orphan], stop).await?;
                        }
                    }
                }
            }
        }
        metrics::counter!("fencepost_orphan_acks_total").increment(orphans.len() as u64);
        batch.recorded();
        Some(())
    }

    /// One transaction, repeated while the database is away.
    async fn write(
        &self,
        session: &mut Option<Session>,
        shard: Shard,
        words: &[Word],
        orphans: &[Orphan],
        stop: &CancellationToken,
    ) -> Option<store::Result<Vec<Recorded>>> {
        loop {
            let mut open = self.open(session, stop).await?;
            match replies::record(open.client_mut(), shard, words, orphans, self.pace()).await {
                Err(error) if error.is_disconnect() => {
                    tracing::debug!(error = %report(&error), "replies wait for the database");
                }
                written => {
                    *session = Some(open);
                    return Some(written);
                }
            }
        }
    }

    /// The session there is, or the next. `None` where the relay ends before the database is back.
    async fn open(&self, session: &mut Option<Session>, stop: &CancellationToken) -> Option<Session> {
        match session.take() {
            Some(open) => Some(open),
            None => outage::reconnect(&self.database, "replies", stop).await,
        }
    }

    pub fn pace(&self) -> Pace {
        Pace {
            base: self.retry.base,
            cap: self.retry.cap,
            budget: self.retry.budget,
            in_progress_max: self.retry.in_progress_max,
        }
    }

    async fn tell_of(&self, session: &Option<Session>, words: &[Word], recorded: &[Recorded]) {
        let mut freed = false;
        for (word, recorded) in words.iter().zip(recorded) {
            let consumer = word.consumer.clone();
            match recorded {
                Recorded::Fact { fact, contradicts } => {
                    freed = true;
                    metrics::counter!("fencepost_replies_total", "consumer" => consumer, "token" => fact.as_str())
                        .increment(1);
                    let object = format!("{}/{}", word.consumer, word.key);
                    if let Some(other) = contradicts {
                        let detail = format!("it replied both {other} and {fact}");
                        raise(session, Alarm::AckConflict, &object, &detail).await;
                    }
                    if *fact == crate::model::token::Fact::Conflict {
                        raise(session, Alarm::Conflict, &object, "same key, other payload").await;
                    }
                }
                Recorded::Deferred(deferred) => {
                    match deferred {
                        Deferred::Acted => freed = true,
                        Deferred::Kept => self.bell.early.notify_one(),
                    }
                    metrics::counter!("fencepost_replies_total", "consumer" => consumer, "token" => word.ack.wire())
                        .increment(1);
                }
                Recorded::Orphan(why) => {
                    tracing::warn!(consumer = %word.consumer, key = %word.key, why, "a reply matches nothing");
                    metrics::counter!("fencepost_orphan_acks_total").increment(1);
                }
            }
        }
        if freed {
            // A key may have been freed, or a delivery made due.
            self.bell.parked.notify_one();
        }
    }

    /// Raises the alarm of a queue, or resolves it, whichever relay raised it. Repeated while the database is away:
    /// nobody would do it later.
    async fn alarm(
        &self,
        session: &mut Option<Session>,
        broker: &Broker,
        shard: Shard,
        why: Option<&str>,
        stop: &CancellationToken,
    ) {
        let object = format!("{}/{}", broker.name, reply_queue(self.keys.deployment(), shard));
        loop {
            let Some(open) = self.open(session, stop).await else { return };
            let told = match why {
                Some(why) => alarms::raise(open.client(), Alarm::RepliesUnread, &object, why).await,
                None => alarms::resolve(open.client(), Alarm::RepliesUnread, &object).await,
            };
            match told {
                Err(error) if error.is_disconnect() => {
                    tracing::debug!(error = %report(&error), "an alarm waits for the database");
                    continue;
                }
                Err(error) => tracing::error!(error = %report(&error), "an alarm could not be written"),
                Ok(()) => {}
            }
            *session = Some(open);
            return;
        }
    }
}

async fn raise(session: &Option<Session>, alarm: Alarm, object: &str, detail: &str) {
    let Some(session) = session else { return };
    if let Err(error) = alarms::raise(session.client(), alarm, object, detail).await {
        tracing::error!(error = %report(&error), "an alarm could not be written");
    }
}

/// The queues that are not read, and what was told of them.
#[derive(Default)]
struct Queues(HashMap<Shard, Unread>);

struct Unread {
    since: Instant,
    alarmed: bool,
}

impl Queues {
    /// Forgets the queues of shards that are not held: should one come back, its time begins anew.
    fn only(&mut self, held: &[Shard]) {
        self.0.retain(|shard, _| held.contains(shard));
    }

    fn reading(&mut self, shard: Shard) {
        self.0.remove(&shard);
    }

    /// Whether this has lasted long enough for an alarm, which is then raised once.
    fn unread(&mut self, shard: Shard, now: Instant) -> bool {
        let unread = self.0.entry(shard).or_insert(Unread { since: now, alarmed: false });
        let alarms = !unread.alarmed && now.duration_since(unread.since) >= ALARM_AFTER;
        unread.alarmed |= alarms;
        alarms
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_is_an_alarm_once_it_was_unread_for_long_by_its_own_holder() {
        let (mine, other) = (Shard(1), Shard(2));
        let begun = Instant::now();
        let mut queues = Queues::default();
        assert!(!queues.unread(mine, begun) && !queues.unread(other, begun));
        // The other shard goes to another relay, and comes back.
        queues.only(&[mine]);
        assert!(!queues.unread(other, begun + ALARM_AFTER / 2));
        let late = begun + ALARM_AFTER;
        assert!(queues.unread(mine, late) && !queues.unread(other, late));
        assert!(!queues.unread(mine, late), "once");
        queues.reading(mine);
        assert!(!queues.unread(mine, late), "its time begins anew");
    }
}
