//! AMQP 0-9-1 (RabbitMQ). One [`publisher`] task per consumer owns its connection and confirm channel (`link`), builds
//! nothing itself (`message` does, and refuses what would kill a channel), learns from `window` what the broker said
//! about each message, and keeps apart what a channel died with (`suspects`). [`replies`] takes in the consumers'
//! acknowledgements, [`token`] keeps them honest, [`topology`] looks at what exists.

pub mod link;
pub mod message;
pub mod publisher;
pub mod replies;
mod suspects;
pub mod token;
pub mod topology;
mod window;

use std::fmt;
use std::sync::Arc;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use self::message::Invalid;
use self::publisher::{Fate, Gate, Job, Plan};
use self::token::AckKey;
use super::error::{EdgeError, report};
use crate::model::broker::Broker;
use crate::model::consumer::{AckMode, AmqpSpec, Consumer};
use crate::model::effect::AttemptContext;
use crate::model::outcome::{End, Evidence, Outcome, Phase};

/// The way to one AMQP consumer. Dropped, it finishes what is out and says goodbye to the broker.
pub struct AmqpEdge {
    consumer: String,
    ack: AckMode,
    keys: Arc<AckKey>,
    jobs: mpsc::Sender<Job>,
    gate: watch::Receiver<Gate>,
}

impl AmqpEdge {
    /// Starts the consumer's publisher, which connects by itself. Must be called within a runtime.
    pub fn new(
        consumer: &Consumer,
        spec: &AmqpSpec,
        broker: &Arc<Broker>,
        keys: &Arc<AckKey>,
    ) -> Result<Self, EdgeError> {
        let unusable = |source: Invalid| EdgeError::Message { consumer: consumer.name.clone(), source };
        let window = consumer.concurrency.get() as usize;
        let plan = Plan {
            consumer: consumer.name.clone(),
            broker: Arc::clone(broker),
            exchange: message::short("exchange", &spec.exchange).map_err(unusable)?,
            routing_key: message::short("routing_key", &spec.routing_key).map_err(unusable)?,
            window,
            connect_timeout: consumer.connect_timeout,
            confirm_timeout: consumer.timeout,
        };
        let (jobs, received) = mpsc::channel(window);
        let (sender, gate) = watch::channel(Some("connecting".into()));
        tokio::spawn(publisher::run(plan, received, sender));
        let (ack, keys) = (consumer.contract.ack, Arc::clone(keys));
        Ok(Self { consumer: consumer.name.clone(), ack, keys, jobs, gate })
    }

    /// Publishes the effect once and waits for the broker's word. Every wait inside has its deadline.
    pub async fn attempt(&self, ctx: AttemptContext<'_>) -> Outcome {
        let started = Instant::now();
        let fate = match message::build(&ctx, &self.consumer, self.ack, &self.keys) {
            Err(invalid) => return outcome(End::Refused, Phase::Prepare, started, Some(report(&invalid))),
            Ok(message) => self.publish(message).await,
        };
        let (end, phase, error) = match fate {
            Fate::Confirmed => (End::Confirmed, Phase::Done, None),
            Fate::Unroutable(why) => (End::Unroutable, Phase::Done, Some(why)),
            Fate::Shut(why) => (End::Shut, Phase::Connect, Some(why)),
            Fate::NotDelivered(why) => (End::NotDelivered, Phase::Done, Some(why)),
            Fate::Refused(why) => (End::Refused, Phase::Done, Some(why)),
            Fate::Ambiguous(why) => (End::Ambiguous, Phase::Wait, Some(why)),
        };
        outcome(end, phase, started, error)
    }

    async fn publish(&self, message: message::Message) -> Fate {
        if let Some(why) = self.shut() {
            return Fate::Shut(why.to_string());
        }
        let (reply, fate) = oneshot::channel();
        if self.jobs.send(Job { message, reply }).await.is_err() {
            return Fate::Shut("the publisher has ended".into());
        }
        fate.await.unwrap_or_else(|_| Fate::Ambiguous("the publisher ended without a word".into()))
    }

    /// Why no attempt should be started now; `None` while the way is open.
    pub fn shut(&self) -> Option<Arc<str>> {
        self.gate.borrow().clone()
    }

    /// Waits until [`AmqpEdge::shut`] says something else than when this was called.
    pub async fn turned(&self) {
        let mut gate = self.gate.clone();
        gate.mark_unchanged();
        // Without a publisher it will never turn again.
        if gate.changed().await.is_err() {
            std::future::pending().await
        }
    }
}

impl fmt::Debug for AmqpEdge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AmqpEdge").field("consumer", &self.consumer).finish_non_exhaustive()
    }
}

fn outcome(end: End, phase: Phase, started: Instant, error: Option<String>) -> Outcome {
    let evidence = Evidence { phase, bytes_left: phase > Phase::Connect, took: started.elapsed(), error };
    Outcome { end, evidence, retry_after: None }
}
