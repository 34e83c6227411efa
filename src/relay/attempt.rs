//! One attempt, from the start row it may need to the outcome, and what follows from it.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use deadpool_postgres::Pool;
use futures_util::FutureExt;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::clock::DatabaseClock;
use super::delivery::Delivery;
use super::health::Health;
use super::options::RetryOptions;
use super::settle::{Circumstances, Decision, Next, decide};
use super::settler::{Settlement, Settler, StartAnswer, Verdict};
use crate::edge::Edge;
use crate::failpoint;
use crate::model::consumer::{Consumer, OnAmbiguous, Ordering};
use crate::model::effect::AttemptContext;
use crate::model::outcome::{AckReading, End, Evidence, Outcome, Phase};
use crate::model::token::{Ack, AttemptToken, Fact};
use crate::mutant::{self, Mutant};
use crate::store::gates;
use crate::store::settle::{Durability, EndRow, FactRow, ParkRow, Parking, StartRow};

/// A consumer with its edge.
pub struct Served {
    pub consumer: Consumer,
    pub edge: Edge,
}

/// What attempts of all consumers share.
pub struct Shared {
    pub settler: Settler,
    pub pool: Pool,
    /// Where it is said at once which ways are shut.
    pub health: Arc<Health>,
    pub clock: DatabaseClock,
    pub retry: RetryOptions,
    /// Deliveries during whose attempts a relay died run one at a time.
    pub suspects: Semaphore,
    /// How many relays share the consumers' rates, by the last look around; at least one.
    pub relays: Arc<AtomicUsize>,
    /// The grace is over: what is still out will not be waited for.
    pub abandon: CancellationToken,
}

/// How an attempt ended for its lane.
pub enum Ended {
    With {
        delivery: Delivery,
        outcome: Outcome,
    },
    /// Nothing was sent: a fact says already how the delivery ended.
    Before(Delivery),
    /// Nothing was sent: the shard is not ours any more.
    NotStarted(Delivery),
}

/// Makes one attempt of `delivery`. Nothing is sent before its marker is on disk: an open flight, or a start row where
/// the delivery comes from the parking lot or its edge holds what is ambiguous.
pub async fn attempt(delivery: Delivery, served: Arc<Served>, shared: Arc<Shared>) -> Ended {
    let _alone = match delivery.trouble.deaths {
        0 => None,
        // The semaphore is never closed.
        _ => shared.suspects.acquire().await.ok(),
    };
    if needs_start(&delivery, &served.consumer) {
        let row = StartRow {
            delivery: delivery.id(),
            shard: delivery.lease.shard,
            epoch: delivery.lease.epoch,
            attempt: delivery.trouble.attempts + 1,
        };
        match shared.settler.start_attempt(row).await {
            StartAnswer::Started => {}
            StartAnswer::Ended => return Ended::Before(delivery),
            StartAnswer::Refused => return Ended::NotStarted(delivery),
        }
    }
    if !delivery.lease.is_alive() {
        if needs_start(&delivery, &served.consumer) {
            shared.settler.end_attempt(not_made(&delivery));
        }
        return Ended::NotStarted(delivery);
    }
    failpoint::reach("attempt_started", &delivery.effect.payload).await;
    let context =
        AttemptContext { effect: &delivery.effect, number: delivery.trouble.sent + 1, now: shared.clock.now() };
    let mut outcome = tokio::select! {
        biased;
        outcome = AssertUnwindSafe(sent(&served, context)).catch_unwind() => {
            // Whatever it did before it broke is not known, and nobody else will say how the attempt ended.
            outcome.unwrap_or_else(|_| silent("the relay failed within the attempt: its log says where"))
        }
        () = shared.abandon.cancelled() => silent("the relay stopped before an answer came"),
    };
    failpoint::reach("answered", &delivery.effect.payload).await;
    if let End::Answered { ack: AckReading::Word { ack: Ack::Stale { current }, .. }, .. } = outcome.end {
        // Rare, and large: it has a place of its own.
        if let Some(why) = Box::pin(disbelieved(&delivery, current, &shared.pool)).await {
            disbelieve(&mut outcome, why);
        }
    }
    Ended::With { delivery, outcome }
}

pub fn needs_start(delivery: &Delivery, consumer: &Consumer) -> bool {
    (delivery.is_parked() && !mutant::is(Mutant::RetryWithoutStart))
        || consumer.contract.on_ambiguous == OnAmbiguous::Hold
}

/// The end of an attempt whose start was written while the lease ran out: nobody need wonder what it did.
fn not_made(delivery: &Delivery) -> EndRow {
    EndRow {
        delivery: delivery.id(),
        attempt: delivery.trouble.attempts + 1,
        token: AttemptToken::NotDelivered,
        status: None,
        phase: Phase::Prepare,
        bytes_left: false,
        took: Duration::ZERO,
        ack_raw: None,
        error: Some("the shard's lease ended before the attempt could be made".into()),
    }
}

async fn sent(served: &Served, context: AttemptContext<'_>) -> Outcome {
    failpoint::reach("sending", &context.effect.payload).await;
    served.edge.attempt(context).await
}

/// An attempt of which nobody knows what it did.
fn silent(error: &str) -> Outcome {
    Outcome {
        end: End::Ambiguous,
        evidence: Evidence { phase: Phase::Wait, bytes_left: true, took: Duration::ZERO, error: Some(error.into()) },
        retry_after: None,
    }
}

/// A `stale` is believed only where its epoch is known to the task.
async fn disbelieved(delivery: &Delivery, current: i64, pool: &Pool) -> Option<&'static str> {
    let client = pool.get().await.ok()?;
    match gates::epoch_is_known(&client, delivery.effect.key.task_id().as_str(), current).await {
        Ok(false) => Some("stale names an epoch its task has never had"),
        // Where the database cannot be asked the consumer's word stands.
        Ok(true) | Err(_) => None,
    }
}

fn disbelieve(outcome: &mut Outcome, why: &'static str) {
    if let End::Answered { ack, .. } = &mut outcome.end {
        let raw = ack.raw().unwrap_or_default().to_string();
        *ack = AckReading::Malformed { raw, why };
    }
}

/// What an ended attempt comes to: the decision for the lane, the settlement for the disk.
pub fn conclude(
    delivery: Delivery,
    outcome: &Outcome,
    served: &Served,
    retry: &RetryOptions,
) -> (Decision, Settlement) {
    let consumer = &served.consumer;
    let decision = decide(
        outcome,
        Circumstances {
            contract: consumer.contract,
            definite_statuses: &consumer.definite_statuses,
            trouble: &delivery.trouble,
            retry,
            ack_timeout: consumer.ack_timeout,
            jitter: rand::random(),
        },
    );
    let attempt = delivery.trouble.attempts + 1;
    let end = EndRow {
        delivery: delivery.id(),
        attempt,
        token: decision.attempt,
        status: outcome.status(),
        phase: outcome.evidence.phase,
        bytes_left: outcome.evidence.bytes_left,
        took: outcome.evidence.took,
        ack_raw: outcome.ack_raw().map(ToString::to_string),
        error: outcome.evidence.error.clone(),
    };
    let started = needs_start(&delivery, consumer);
    let (verdict, end) = match &decision.next {
        Next::Fact { fact, doubt } => {
            let row = FactRow {
                delivery: delivery.id(),
                fact: *fact,
                attempt,
                status: outcome.status(),
                doubt: *doubt,
                ack_raw: said_more(outcome),
                note: None,
            };
            // A first try that succeeds costs its fact and nothing else.
            (Verdict::Fact(row), started.then_some(end))
        }
        Next::Park(parking) => {
            let mut row = park_row(&delivery, consumer.contract.ordering, parking.clone());
            row.attempts = attempt;
            row.sent += u32::from(outcome.evidence.bytes_left);
            (Verdict::Park(row), Some(end))
        }
    };
    let durability = match consumer.contract.on_ambiguous {
        OnAmbiguous::Retry => Durability::Lazy,
        OnAmbiguous::Hold => Durability::Flushed,
    };
    (decision, Settlement { delivery, verdict, end, durability })
}

/// The consumer's words, where they were more than the bare token.
fn said_more(outcome: &Outcome) -> Option<String> {
    match &outcome.end {
        End::Answered { ack: AckReading::Word { ack, raw, .. }, .. } if raw == ack.wire() => None,
        _ => outcome.ack_raw().map(ToString::to_string),
    }
}

/// The row with which a delivery goes to the parking lot.
pub fn park_row(delivery: &Delivery, ordering: Ordering, parking: Parking) -> ParkRow {
    ParkRow {
        delivery: delivery.id(),
        shard: delivery.lease.shard,
        epoch: delivery.lease.epoch,
        ordering_key: (ordering == Ordering::Key).then(|| delivery.effect.ordering_key.clone()),
        attempts: delivery.trouble.attempts,
        sent: delivery.trouble.sent,
        parking,
    }
}

/// A fact that no attempt gave.
pub fn fact_row(delivery: &Delivery, fact: Fact, doubt: bool) -> FactRow {
    FactRow {
        delivery: delivery.id(),
        fact,
        attempt: delivery.trouble.attempts,
        status: None,
        doubt,
        ack_raw: None,
        note: None,
    }
}
