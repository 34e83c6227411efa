//! Who had to wait for whom. Neither is measured against the clock of a machine that may be busy with other things.
//!
//! I9: a shard that nobody holds is taken before any relay has passed it by too often. A relay looks for shards at each of
//! its ticks, so these count the time in which somebody could have taken it: they stand still with relays and database.
//!
//! I12: while one consumer is down, the others get what is theirs.

use std::collections::{BTreeMap, HashMap};

use crate::checker::Violation;
use crate::consumers::Receipt;
use crate::database::{Database, Tenure};

/// One a second. Those that died count as sharers for a lease, three ticks, one after the other; and a relay that was
/// frozen amid a transaction keeps its locks for five seconds.
pub const TICKS: usize = 8;

/// One consumer's outage, amid nothing else that was wrong.
#[derive(Clone, Debug)]
pub struct Outage {
    pub of: &'static str,
    /// When it ended, in microseconds since 1970.
    pub until: i64,
    /// By key and consumer, what was committed during it for the others, for at once, behind nothing of its own key.
    pub due: Vec<(String, String)>,
}

/// How long the shard waited that waited longest.
#[derive(Clone, Copy, Default, Debug)]
pub struct Longest {
    pub ticks: usize,
    /// By the database's clock, outages of the database and of all relays included.
    pub millis: i64,
}

/// I9.
pub fn reclaims(database: &Database) -> (Vec<Violation>, Longest) {
    let mut ticks: BTreeMap<&str, Vec<i64>> = BTreeMap::new();
    for (relay, at) in &database.ticks {
        ticks.entry(relay).or_default().push(*at);
    }
    let passed_by = |from: i64, until: i64| {
        let of = |ticks: &Vec<i64>| ticks.iter().filter(|at| (from..until).contains(*at)).count();
        ticks.values().map(of).max().unwrap_or(0)
    };
    let (mut found, mut longest) = (Vec::new(), Longest::default());
    let mut given_up: HashMap<i16, i64> = HashMap::new();
    for Tenure { shard, at, relay, was_relay, was_until, .. } in &database.tenures {
        if relay.is_none() {
            given_up.insert(*shard, *at);
            continue;
        }
        let free_since = if was_relay.is_some() { *was_until } else { given_up.get(shard).copied() };
        let Some(free_since) = free_since.filter(|since| since < at) else { continue };
        let (ticks, millis) = (passed_by(free_since, *at), (at - free_since) / 1_000);
        longest = Longest { ticks: longest.ticks.max(ticks), millis: longest.millis.max(millis) };
        if ticks > TICKS {
            let what =
                format!("shard {shard} was nobody's for {millis} ms, and a relay ticked {ticks} times meanwhile");
            found.push(Violation { invariant: "I9", what });
        }
    }
    (found, longest)
}

/// I12.
pub fn starved(
    outages: &[Outage],
    database: &Database,
    receipts: &BTreeMap<&'static str, Vec<Receipt>>,
) -> Vec<Violation> {
    let mut first: HashMap<(&str, &str), i64> = HashMap::new();
    for (consumer, receipts) in receipts {
        for receipt in receipts {
            let at = first.entry((&receipt.key, consumer)).or_insert(receipt.at);
            *at = receipt.at.min(*at);
        }
    }
    let mut found = Vec::new();
    for Outage { of, until, due } in outages {
        for (key, consumer) in due {
            let received = first.get(&(key.as_str(), consumer.as_str())).is_some_and(|at| at <= until);
            // What expired, or was given up, ended without having been received.
            let ended = database
                .deliveries
                .get(&(key.clone(), consumer.clone()))
                .is_some_and(|delivery| delivery.facts.iter().any(|fact| fact.at <= *until));
            if !received && !ended {
                let what = format!("{key} did not reach {consumer} as long as {of} was down");
                found.push(Violation { invariant: "I12", what });
            }
        }
    }
    found
}
