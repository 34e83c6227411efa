//! The checker: three witnesses, one judgement. Every invariant has a number, and every receipt beyond the first must be
//! explained by something that was recorded.
//!
//! I1 nothing is lost · I2 a word is the consumer's own, given before it was written down · I3 no wrong key, no altered
//! body · I4 nothing of what aborted · I5 every attempt ends · I6 an old epoch changes nothing · I7 no unexplained
//! duplicate · I8 order by key · I9 what nobody holds is taken soon · I10 all settles after the faults · I11 facts do not
//! contradict · I12 no outage of one consumer keeps anything from another · I14 what fencepost says of itself is so.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::accounts::{self, Accounts};
use crate::consumers::{Profile, Receipt, Said, Speech, Transport, profile};
use crate::database::{Database, Delivery, Tenure};
use crate::pace::{self, Longest, Outage};
use crate::producers::{Claimed, Intent, Part, Told};

/// A broken promise.
#[derive(Clone, Debug)]
pub struct Violation {
    pub invariant: &'static str,
    pub what: String,
}

/// The witnesses.
#[derive(Default)]
pub struct Case {
    pub parts: Vec<Part>,
    pub claims: Vec<Claimed>,
    pub database: Database,
    /// By consumer.
    pub receipts: BTreeMap<&'static str, Vec<Receipt>>,
    pub outages: Vec<Outage>,
    pub accounts: Accounts,
}

/// What a run came to, in numbers.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    pub effects: usize,
    pub deliveries: usize,
    pub receipts: usize,
    pub duplicates: usize,
    pub unknown: usize,
    pub takeovers: usize,
    pub longest: Longest,
    pub tokens: BTreeMap<String, usize>,
    pub orphans: BTreeMap<String, i64>,
    pub ends: BTreeMap<String, usize>,
}

/// Attempts that ended so may have left a receipt and are followed by another attempt.
const UNFINISHED: [&str; 7] =
    ["ambiguous", "lost", "throttled", "refused", "not_applied", "in_progress", "not_delivered"];
/// Of these the consumer itself said that nothing happened, or that it is still at it.
const DEFINITE: [&str; 5] = ["throttled", "refused", "not_applied", "in_progress", "not_delivered"];

pub fn check(case: &Case) -> (Vec<Violation>, Tally) {
    let mut judge = Judge { case, violations: Vec::new(), by_delivery: by_delivery(&case.receipts) };
    judge.settled();
    judge.commits();
    judge.receipts();
    judge.words();
    judge.attempts();
    judge.duplicates();
    judge.order();
    judge.epochs();
    judge.tenures();
    let (reclaims, longest) = pace::reclaims(&case.database);
    judge.violations.extend(reclaims);
    judge.violations.extend(pace::starved(&case.outages, &case.database, &case.receipts));
    judge.violations.extend(accounts::check(&case.accounts));
    let tally = Tally { longest, ..tally(case) };
    (judge.violations, tally)
}

type ByDelivery<'a> = HashMap<(&'a str, &'a str), Vec<&'a Receipt>>;

fn by_delivery<'a>(receipts: &'a BTreeMap<&'static str, Vec<Receipt>>) -> ByDelivery<'a> {
    let mut found: ByDelivery<'a> = HashMap::new();
    for (consumer, receipts) in receipts {
        for receipt in receipts {
            found.entry((&receipt.key, consumer)).or_default().push(receipt);
        }
    }
    found
}

struct Judge<'a> {
    case: &'a Case,
    violations: Vec<Violation>,
    by_delivery: ByDelivery<'a>,
}

impl<'a> Judge<'a> {
    fn fault(&mut self, invariant: &'static str, what: impl Into<String>) {
        self.violations.push(Violation { invariant, what: what.into() });
    }

    fn received(&self, delivery: &Delivery) -> Vec<&'a Receipt> {
        self.by_delivery.get(&(delivery.key.as_str(), delivery.consumer.as_str())).cloned().unwrap_or_default()
    }

    fn settled(&mut self) {
        for (what, count) in self.case.database.left_over.clone() {
            self.fault("I10", format!("{count} {what} long after the last fault"));
        }
        for delivery in self.case.database.deliveries.values().filter(|delivery| !delivery.settled) {
            let state = delivery.token.as_deref().unwrap_or("unknown to everybody");
            self.fault("I1", format!("{} at {} is {state}", delivery.key, delivery.consumer));
        }
        for (name, object, detail) in self.case.database.alarms.clone() {
            // A delivery may well be under way at three deaths of a relay; the other alarms speak of mistakes.
            if name != "poison" {
                self.fault("I1", format!("alarm {name} about {object}: {detail}"));
            }
        }
    }

    /// Each part of a transaction is there whole or not at all, as its producer was told.
    fn commits(&mut self) {
        let database = &self.case.database;
        let mut meant: HashSet<(&str, &str)> = HashSet::new();
        for part in &self.case.parts {
            let committed = database.business.contains(&part.part);
            match (part.told, committed) {
                (Some(Told::Committed), false) => self.fault("I1", format!("{} committed and is gone", part.part)),
                (Some(Told::Aborted), true) => self.fault("I4", format!("{} aborted and is there", part.part)),
                _ => {}
            }
            if !committed {
                continue;
            }
            for intent in &part.intents {
                for target in &intent.targets {
                    meant.insert((&intent.key, target));
                    match database.deliveries.get(&(intent.key.clone(), (*target).to_owned())) {
                        None => self.fault("I1", format!("{} to {target} has no effect", intent.key)),
                        Some(delivery) if delivery.sha256 != intent.sha256 => {
                            self.fault("I3", format!("{} is stored with another body", intent.key));
                        }
                        Some(_) => {}
                    }
                }
            }
        }
        for delivery in database.deliveries.values() {
            if !meant.contains(&(delivery.key.as_str(), delivery.consumer.as_str())) {
                self.fault("I4", format!("{} to {} was intended by nobody", delivery.key, delivery.consumer));
            }
        }
    }

    /// What consumers were sent is what committed, byte for byte.
    fn receipts(&mut self) {
        for (consumer, receipts) in &self.case.receipts {
            for receipt in receipts {
                let id = (receipt.key.clone(), (*consumer).to_owned());
                match self.case.database.deliveries.get(&id) {
                    None => self.fault("I3", format!("{consumer} received {}, which no effect has", receipt.key)),
                    Some(delivery) if delivery.sha256 != receipt.sha256 => {
                        self.fault("I3", format!("{consumer} received another body under {}", receipt.key));
                    }
                    Some(_) => {}
                }
                if let Some(odd) = &receipt.odd {
                    self.fault("I3", format!("{consumer}, {}: {odd}", receipt.key));
                }
            }
        }
    }

    /// A fact that a consumer gave was given by it, and before it was written down.
    fn words(&mut self) {
        for delivery in self.case.database.deliveries.values() {
            let received = self.received(delivery);
            for fact in &delivery.facts {
                let wanted: &[Said] = match fact.token.as_str() {
                    "applied" => &[Said::Applied],
                    "duplicate" => &[Said::Duplicate],
                    "stale" => &[Said::Stale],
                    "conflict" => &[Said::Conflict],
                    // A malformed word counts as none.
                    "accepted" => &[Said::Fine, Said::Garbage],
                    // The broker's word: it has it, and so the consumer gets it, sooner or later.
                    "confirmed" => {
                        if received.is_empty() {
                            self.fault(
                                "I2",
                                format!("{} is confirmed, and {} never got it", delivery.key, delivery.consumer),
                            );
                        }
                        continue;
                    }
                    "expired" => {
                        if received.iter().any(|receipt| receipt.applied.is_some()) {
                            self.fault("I2", format!("{} expired, and {} applied it", delivery.key, delivery.consumer));
                        }
                        continue;
                    }
                    "skipped" | "operator:applied" | "operator:not_applied" => continue,
                    other => {
                        self.fault("I2", format!("{} is {other}, which nobody said", delivery.key));
                        continue;
                    }
                };
                let gave = |receipt: &&Receipt| {
                    receipt.said.is_some_and(|said| wanted.contains(&said))
                        && receipt.answered.is_some_and(|at| at <= fact.at)
                };
                if !received.iter().any(gave) {
                    let (key, consumer, token) = (&delivery.key, &delivery.consumer, &fact.token);
                    let heard: Vec<_> = received.iter().map(|r| (r.said, r.answered.map(|at| at - fact.at))).collect();
                    self.fault("I2", format!("{key} is {token}, but {consumer} had not said so: {heard:?}"));
                }
            }
            let has = |token: &str| delivery.facts.iter().any(|fact| fact.token == token);
            if (has("applied") || has("duplicate")) && (has("rejected") || has("conflict")) {
                self.fault("I11", format!("{} at {} has contradicting facts", delivery.key, delivery.consumer));
            }
        }
    }

    /// A start that nobody ended was forgotten.
    fn attempts(&mut self) {
        for delivery in self.case.database.deliveries.values() {
            for (number, attempt) in &delivery.attempts {
                if attempt.started.is_some() && attempt.ended.is_none() {
                    let (key, consumer) = (&delivery.key, &delivery.consumer);
                    self.fault("I5", format!("attempt {number} of {key} at {consumer} has no end"));
                }
            }
        }
    }

    /// One receipt is what was asked for; each further one needs a reason on record.
    fn duplicates(&mut self) {
        for delivery in self.case.database.deliveries.values() {
            let Some(profile) = profile(&delivery.consumer) else { continue };
            let receipts = self.received(delivery);
            // The broker brings a message again by itself, and not always says so: there the attempts count.
            let (received, hold) = match profile.transport {
                Transport::Http => (receipts.len(), profile.holds()),
                Transport::Amqp => (receipts.iter().map(|r| r.attempt).collect::<HashSet<_>>().len(), false),
            };
            let among = |tokens: &[&str]| {
                let ended = |attempt: &&crate::database::Attempt| {
                    attempt.ended.as_deref().is_some_and(|token| tokens.contains(&token))
                };
                delivery.attempts.values().filter(ended).count()
            };
            // Where a duplicate costs, only the consumer's own word or an operator's allows another attempt.
            let reasons = match profile.transport {
                Transport::Http if hold => among(&DEFINITE) + delivery.asked,
                Transport::Http => among(&UNFINISHED),
                // Confirmed, and no reply in time.
                Transport::Amqp => delivery.attempts.len().saturating_sub(1),
            };
            if received > 1 + reasons {
                let (key, consumer) = (&delivery.key, &delivery.consumer);
                let attempts = &delivery.attempts;
                self.fault(
                    "I7",
                    format!(
                        "{consumer} received {key} {received} times, with reasons for {}: {attempts:?}",
                        1 + reasons
                    ),
                );
            }
        }
    }

    /// Nothing of a key is sent before what came earlier has ended.
    fn order(&mut self) {
        let mut lines: BTreeMap<(&str, &str), Vec<(i64, &Intent)>> = BTreeMap::new();
        for part in self.case.parts.iter().filter(|part| self.case.database.business.contains(&part.part)) {
            for intent in &part.intents {
                let Some((key, n)) = &intent.order else { continue };
                for target in intent.targets.iter().filter(|target| profile(target).is_some_and(Profile::ordered)) {
                    lines.entry((target, key)).or_default().push((*n, intent));
                }
            }
        }
        for ((consumer, ordering_key), mut line) in lines {
            line.sort_by_key(|(n, _)| *n);
            let mut reached: Option<(i64, &str)> = None;
            for (_, intent) in line {
                let Some(delivery) = self.case.database.deliveries.get(&(intent.key.clone(), consumer.to_owned()))
                else {
                    continue;
                };
                let received = self.received(delivery);
                let Some(first) = received.iter().map(|receipt| receipt.at).min() else { continue };
                if let Some((ended, before)) = reached
                    && first < ended
                {
                    let early = ended - first;
                    self.fault(
                        "I8",
                        format!(
                            "{consumer}, key {ordering_key}: {} came {early} µs before {before} had ended",
                            intent.key
                        ),
                    );
                }
                let ended = ended_for_order(profile(consumer), delivery, &received);
                reached = ended.map(|at| (at, intent.key.as_str())).max(reached);
            }
        }
    }

    /// A completion under an epoch that is over is refused.
    fn epochs(&mut self) {
        for part in &self.case.parts {
            let Some((task, epoch)) = &part.lease else { continue };
            if part.told != Some(Told::Committed) {
                continue;
            }
            let newer = |claim: &&Claimed| claim.task == *task && claim.epoch > *epoch && claim.at < part.begun;
            if let Some(claim) = self.case.claims.iter().find(newer) {
                self.fault("I6", format!("{task} completed under epoch {epoch} after {} was claimed", claim.epoch));
            }
        }
        let mut granted: HashSet<(&str, i64)> = HashSet::new();
        for claim in &self.case.claims {
            if !granted.insert((&claim.task, claim.epoch)) {
                self.fault("I6", format!("epoch {} of {} was given out twice", claim.epoch, claim.task));
            }
        }
    }

    /// No lease is taken before it ends, and nothing starts under one that is over.
    fn tenures(&mut self) {
        let mut held: HashMap<i16, Vec<&Tenure>> = HashMap::new();
        for tenure in &self.case.database.tenures {
            let stolen = tenure.was_relay.is_some()
                && tenure.relay.is_some()
                && tenure.was_until.is_some_and(|until| until > tenure.at);
            if stolen || tenure.epoch < tenure.was_epoch {
                self.fault("I6", format!("shard {} was taken before its lease ended: {tenure:?}", tenure.shard));
            }
            held.entry(tenure.shard).or_default().push(tenure);
        }
        for delivery in self.case.database.deliveries.values() {
            for (number, attempt) in &delivery.attempts {
                let Some((at, relay)) = &attempt.started else { continue };
                let holder = held.get(&delivery.shard).and_then(|tenures| tenures.iter().rfind(|t| t.at <= *at));
                let holder = holder.and_then(|tenure| tenure.relay.as_deref());
                if holder != Some(relay.as_str()) {
                    let key = &delivery.key;
                    self.fault(
                        "I6",
                        format!("attempt {number} of {key} was started by {relay}, when {holder:?} held the shard"),
                    );
                }
            }
        }
    }
}

/// From when on the next of its key may be sent: none where something else than an attempt ended it.
fn ended_for_order(profile: Option<&Profile>, delivery: &Delivery, received: &[&Receipt]) -> Option<i64> {
    let by_attempt = ["applied", "duplicate", "accepted", "stale", "conflict", "confirmed"];
    if !delivery.facts.iter().all(|fact| by_attempt.contains(&fact.token.as_str())) {
        return None;
    }
    match profile?.speech {
        Speech::Words => received.iter().filter(|receipt| receipt.applied.is_some()).map(|receipt| receipt.at).min(),
        Speech::Bare => {
            received.iter().filter(|receipt| matches!(receipt.said, Some(Said::Fine))).map(|receipt| receipt.at).min()
        }
    }
}

fn tally(case: &Case) -> Tally {
    let mut tally = Tally {
        effects: case.database.deliveries.keys().map(|(key, _)| key).collect::<HashSet<_>>().len(),
        deliveries: case.database.deliveries.len(),
        receipts: case.receipts.values().map(Vec::len).sum(),
        unknown: case.parts.iter().filter(|part| part.told == Some(Told::Unknown)).count(),
        takeovers: case.database.tenures.iter().filter(|t| t.relay.is_some()).count(),
        orphans: case.database.orphans.clone(),
        ..Tally::default()
    };
    let keys: HashSet<_> =
        case.receipts.iter().flat_map(|(name, list)| list.iter().map(move |r| (name, r.key.as_str()))).collect();
    tally.duplicates = tally.receipts - keys.len();
    for delivery in case.database.deliveries.values() {
        *tally.tokens.entry(delivery.token.clone().unwrap_or_else(|| "none".into())).or_default() += 1;
        for token in delivery.attempts.values().filter_map(|attempt| attempt.ended.clone()) {
            *tally.ends.entry(token).or_default() += 1;
        }
    }
    tally
}
