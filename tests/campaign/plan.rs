//! What will go wrong when: drawn from the seed before a run begins.

use std::time::Duration;

use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use serde::Serialize;

use crate::amqp::SHARDS;
use crate::consumers::{Damage, HTTP, Mood, PROFILES};

/// A fault, when it begins and how long it lasts.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Planned {
    pub at: Duration,
    pub lasts: Duration,
    pub fault: Fault,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub enum Fault {
    /// SIGKILL, and a start after a while.
    RelayKilled(usize),
    /// SIGSTOP past the lease, then SIGCONT.
    RelayPaused(usize),
    /// SIGTERM under load.
    RelayStopped(usize),
    /// SIGTERM, and SIGKILL before its grace is over.
    RelayStoppedAndKilled(usize),
    /// Ten short pauses in a row, most of the time.
    RelayStarved(usize),
    /// `pg_terminate_backend` of some sessions of relays.
    BackendsKilled(u8),
    /// Immediate stop, and a start after a while.
    DatabaseCrash,
    /// The answer of a COMMIT never arrives.
    CommitUnanswered(usize),
    /// The answer of the statement that opens a flight never arrives.
    FlightUnanswered(usize),
    DatabaseCut(usize),
    DatabaseRefused(usize),
    DatabaseSwallowsRequests(usize),
    DatabaseSwallowsAnswers(usize),
    DatabaseBlackHole(usize),
    DatabaseSlow(usize),
    ConsumerCut(usize),
    ConsumerRefused(usize),
    ConsumerSwallowsRequests(usize),
    ConsumerSwallowsAnswers(usize),
    ConsumerCutAfter(usize, u64),
    ConsumerMood(usize, Mood),
    ConsumerPaused(usize),
    /// An operator gives up something that waits.
    Skipped,
    /// `ACCESS EXCLUSIVE` on effects.
    EffectsLocked,
    /// SIGKILL, and a start after a while.
    BrokerKilled,
    BrokerRestarted,
    /// Memory: publishers are blocked.
    BrokerAlarm,
    BrokerCut,
    BrokerRefused,
    BrokerBlackHole,
    /// Confirms and replies are lost.
    BrokerSwallowsAnswers,
    /// The binding of the n-th AMQP consumer's queue comes and goes.
    BrokerUnbound(usize),
    /// What waits in a queue is gone, though it was confirmed. Only where the consumer's own word ends a delivery.
    BrokerPurged(usize),
    /// What consumers reply while no relay reaches the broker is gone before one does.
    RepliesPurged,
    /// A shard's queue for replies is gone for a while.
    RepliesDeleted(i16),
    /// What becomes of an AMQP consumer's replies.
    RepliesDamaged(usize, Damage),
    /// The answer of a producer's COMMIT never arrives.
    ProducerUnanswered,
}

/// Between the starts of two faults.
const GAP: Duration = Duration::from_millis(1_000);
/// Faults begin so long after the load.
const QUIET: Duration = Duration::from_secs(2);

/// Each kind of fault in turn, in an order drawn anew each time, while there is time.
pub fn plan(rng: &mut StdRng, length: Duration, relays: usize) -> Vec<Planned> {
    let longest = (length / 8).clamp(Duration::from_secs(4), Duration::from_secs(20));
    let (mut plan, mut at) = (Vec::new(), QUIET);
    let mut deck: Vec<Fault> = Vec::new();
    while at + Duration::from_secs(1) < length {
        let fault = deck.pop().unwrap_or_else(|| {
            deck = full_deck(rng, relays);
            deck.shuffle(rng);
            // Unwrap safety: a full deck is not empty.
            deck.pop().expect("a fault")
        });
        let lasts = draw(rng, Duration::from_millis(500), longest).min(length - at);
        plan.push(Planned { at, lasts, fault });
        at += draw(rng, GAP / 3, GAP * 2);
    }
    plan
}

fn full_deck(rng: &mut StdRng, relays: usize) -> Vec<Fault> {
    let mut deck = Vec::new();
    for relay in 0..relays {
        deck.extend([Fault::RelayKilled(relay), Fault::RelayPaused(relay), Fault::CommitUnanswered(relay)]);
    }
    let relay = |rng: &mut StdRng| rng.random_range(0..relays);
    let consumer = |rng: &mut StdRng| rng.random_range(0..PROFILES.len());
    deck.extend([
        Fault::RelayStopped(relay(rng)),
        Fault::RelayStoppedAndKilled(relay(rng)),
        Fault::RelayStarved(relay(rng)),
        Fault::BackendsKilled(rng.random_range(1..6)),
        Fault::BackendsKilled(rng.random_range(1..6)),
        Fault::DatabaseCrash,
        Fault::FlightUnanswered(relay(rng)),
        Fault::DatabaseCut(relay(rng)),
        Fault::DatabaseRefused(relay(rng)),
        Fault::DatabaseSwallowsRequests(relay(rng)),
        Fault::DatabaseSwallowsAnswers(relay(rng)),
        Fault::DatabaseBlackHole(relay(rng)),
        Fault::DatabaseSlow(relay(rng)),
        Fault::ConsumerCut(consumer(rng)),
        Fault::ConsumerRefused(consumer(rng)),
        Fault::ConsumerSwallowsRequests(consumer(rng)),
        Fault::ConsumerSwallowsAnswers(consumer(rng)),
        Fault::ConsumerCutAfter(consumer(rng), rng.random_range(1..2_000)),
        Fault::ConsumerPaused(consumer(rng)),
        Fault::Skipped,
        Fault::EffectsLocked,
        Fault::ProducerUnanswered,
        Fault::ProducerUnanswered,
    ]);
    deck.extend([
        Fault::BrokerKilled,
        Fault::BrokerRestarted,
        Fault::BrokerAlarm,
        Fault::BrokerCut,
        Fault::BrokerRefused,
        Fault::BrokerBlackHole,
        Fault::BrokerSwallowsAnswers,
        Fault::BrokerUnbound(rng.random_range(HTTP..PROFILES.len())),
        Fault::BrokerUnbound(PROFILES.len() - 1),
        Fault::BrokerPurged(rng.random_range(HTTP..PROFILES.len() - 1)),
    ]);
    deck.extend([Fault::RepliesPurged, Fault::RepliesDeleted(rng.random_range(0..SHARDS))]);
    let speaking = |rng: &mut StdRng| rng.random_range(HTTP..PROFILES.len() - 1);
    deck.extend(Damage::ALL.iter().map(|damage| Fault::RepliesDamaged(speaking(rng), *damage)));
    deck.extend(Mood::BAD.iter().map(|mood| Fault::ConsumerMood(consumer(rng), *mood)));
    deck
}

pub fn draw(rng: &mut StdRng, least: Duration, most: Duration) -> Duration {
    least + (most.saturating_sub(least)).mul_f64(rng.random::<f64>())
}
