//! The campaign's checker against inputs that are wrong on purpose: each invariant here is seen to fail, and to hold.

#![allow(dead_code)]

mod accounts;
mod amqp;
mod checker;
mod consumers;
mod database;
mod history;
mod http;
mod operator;
mod pace;
mod plan;
mod producers;
mod replicas;
mod stage;

#[path = "../it/support/fault_proxy.rs"]
mod fault_proxy;
#[path = "../it/support/postgres_proxy.rs"]
mod postgres_proxy;

use accounts::{Account, Accounts, Figures};
use checker::Case;
use consumers::{Receipt, Said};
use database::{Delivery, Fact, Tenure};
use pace::Outage;

const SECOND: i64 = 1_000_000;

/// How often each invariant was broken.
fn broken(case: &Case) -> Vec<(&'static str, usize)> {
    let mut counts = std::collections::BTreeMap::new();
    for violation in checker::check(case).0 {
        *counts.entry(violation.invariant).or_insert(0) += 1;
    }
    counts.into_iter().collect()
}

fn tenure(at: i64, relay: Option<&str>, was_relay: Option<&str>, was_until: Option<i64>) -> Tenure {
    let named = |name: &str| name.to_owned();
    let (relay, was_relay) = (relay.map(named), was_relay.map(named));
    Tenure { shard: 3, at, epoch: 2, relay, was_epoch: 1, was_relay, was_until }
}

/// The lease of `a` ends after three seconds; `b` ticks each second and takes the shard at `taken`.
fn takeover(taken: i64) -> Case {
    let mut case = Case::default();
    case.database.tenures =
        vec![tenure(0, Some("a"), None, None), tenure(taken, Some("b"), Some("a"), Some(3 * SECOND))];
    case.database.ticks = (0..taken / SECOND).map(|n| ("b".to_owned(), n * SECOND)).collect();
    case
}

#[test]
fn a_shard_that_relays_pass_by_breaks_i9() {
    assert_eq!(broken(&takeover(5 * SECOND)), []);
    assert_eq!(broken(&takeover(40 * SECOND)), [("I9", 1)]);
}

#[test]
fn a_shard_that_was_given_up_is_free_from_then_on() {
    let mut case = takeover(40 * SECOND);
    case.database.tenures.insert(1, tenure(38 * SECOND, None, Some("a"), Some(39 * SECOND)));
    case.database.tenures[2] = tenure(40 * SECOND, Some("b"), None, None);
    assert_eq!(broken(&case), []);
    case.database.tenures[1].at = SECOND;
    assert_eq!(broken(&case), [("I9", 1)]);
}

#[test]
fn time_in_which_no_relay_ticks_does_not_count_for_i9() {
    let mut case = takeover(40 * SECOND);
    case.database.ticks.retain(|(_, at)| *at < 5 * SECOND || *at > 36 * SECOND);
    assert_eq!(broken(&case), []);
    // Each of three is given its own time.
    case.database.ticks = (0..24).map(|n| (format!("relay {}", n % 3), (4 + n) * SECOND)).collect();
    assert_eq!(broken(&case), []);
}

fn receipt(at: i64) -> Receipt {
    Receipt {
        at,
        key: "t:1".into(),
        attempt: 1,
        sha256: "00".into(),
        again: false,
        odd: None,
        applied: Some(1),
        said: Some(Said::Applied),
        answered: Some(at),
    }
}

/// `orders` is owed one delivery while `billing` is down until second 10, and is sent it at `at`.
fn outage(at: i64) -> Case {
    let mut case = Case::default();
    let delivery = Delivery {
        key: "t:1".into(),
        consumer: "orders".into(),
        sha256: "00".into(),
        token: Some("applied".into()),
        settled: true,
        facts: vec![Fact { token: "applied".into(), at: at + SECOND }],
        ..Delivery::default()
    };
    let id = ("t:1".to_owned(), "orders".to_owned());
    case.database.deliveries.insert(id.clone(), delivery);
    case.receipts.insert("orders", vec![receipt(at)]);
    case.outages = vec![Outage { of: "billing", until: 10 * SECOND, due: vec![id] }];
    case
}

/// Without what the other invariants say of a case that nobody intended.
fn starved(case: &Case) -> usize {
    pace::starved(&case.outages, &case.database, &case.receipts).len()
}

#[test]
fn what_comes_only_after_anothers_outage_breaks_i12() {
    assert_eq!(starved(&outage(9 * SECOND)), 0);
    assert_eq!(starved(&outage(11 * SECOND)), 1);
    let all = checker::check(&outage(11 * SECOND)).0;
    assert!(all.iter().any(|violation| violation.invariant == "I12"), "{all:?}");
}

#[test]
fn what_never_comes_breaks_i12_unless_it_has_ended() {
    let mut case = outage(9 * SECOND);
    case.receipts.clear();
    let delivery = case.database.deliveries.values_mut().next().expect("one");
    delivery.facts = vec![Fact { token: "expired".into(), at: 9 * SECOND }];
    assert_eq!(starved(&case), 0);
    let delivery = case.database.deliveries.values_mut().next().expect("one");
    delivery.facts.clear();
    assert_eq!(starved(&case), 1);
}

fn account(says: &[(&str, i64)], holds: &[(&str, i64)]) -> Account {
    let figures =
        |pairs: &[(&str, i64)]| -> Figures { pairs.iter().map(|(name, n)| ((*name).to_owned(), *n)).collect() };
    Account { who: "relay-0".into(), says: figures(says), holds: figures(holds) }
}

#[test]
fn a_gauge_beside_the_tables_breaks_i14() {
    let judged = |says: &[(&str, i64)], holds: &[(&str, i64)]| {
        let accounts = Accounts { gauges: vec![account(says, holds)], ..Accounts::default() };
        broken(&Case { accounts, ..Case::default() })
    };
    assert_eq!(judged(&[("waiting mail dead", 2), ("unread mail", 0)], &[("waiting mail dead", 2)]), []);
    assert_eq!(judged(&[("waiting mail dead", 1)], &[("waiting mail dead", 2)]), [("I14", 1)]);
    assert_eq!(judged(&[("waiting mail dead", 3)], &[("waiting mail dead", 2)]), [("I14", 1)]);
    assert_eq!(judged(&[], &[("waiting mail dead", 2)]), [("I14", 1)], "not said at all");
    assert_eq!(judged(&[("lagging mail", 2)], &[]), [("I14", 1)], "not there at all");
}

#[test]
fn a_counter_that_missed_an_attempt_breaks_i14() {
    let judged = |says: i64, lost: i64| {
        let counters = vec![account(&[("attempts mail refused", says)], &[("attempts mail refused", 4)])];
        broken(&Case { accounts: Accounts { counters, lost, ..Accounts::default() }, ..Case::default() })
    };
    assert_eq!(judged(4, 0), []);
    assert_eq!(judged(6, 2), [], "their rows were taken by `lost`");
    assert_eq!(judged(7, 2), [("I14", 1)]);
    assert_eq!(judged(3, 2), [("I14", 1)]);
}
