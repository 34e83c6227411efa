//! `ordering = key`: what is promised is the order of first arrivals per key; a key that waits waits alone.

use std::collections::HashMap;

use fencepost::demo::embedded::guardian::Signal;
use serde_json::json;

use super::rig::{Rig, http};
use crate::support::eventually;
use crate::support::receiver::{Cut, Receiver, Request, Script};

const ORDERED: &str = "ordering = 'key'";

/// Commits the effect number `n` of an ordering key, after those before it.
async fn emit_nth(rig: &Rig, key: &str, n: usize) -> String {
    let effects = json!([{ "consumer": "shop", "payload": n, "ordering_key": key }]);
    rig.emit_with(&format!("{key}_{n}"), effects).await
}

/// Ordering key and number, out of the task id `<key>_<n>`.
fn place(request: &Request) -> (String, usize) {
    let key = request.key();
    let (key, rest) = key.split_once('_').expect("a task of this test");
    (key.to_owned(), rest.split(':').next().and_then(|n| n.parse().ok()).expect("a number"))
}

/// What arrived of each ordering key, in order.
fn arrivals(receiver: &Receiver) -> HashMap<String, Vec<usize>> {
    let mut arrived: HashMap<String, Vec<usize>> = HashMap::new();
    for request in receiver.requests() {
        let (key, n) = place(&request);
        arrived.entry(key).or_default().push(n);
    }
    arrived
}

/// One arrival in three or so meets trouble, the same at every run.
fn trouble(request: &Request) -> Option<Script> {
    let (key, n) = place(request);
    let attempt = request.attempt() as usize;
    match (key.len() + n * 7 + attempt * 3) % 9 {
        0 => Some(Script::answer(503).into()),
        1 => Some(Script::cut(Cut::Rst)),
        2 => Some(Script::answer(409).into()),
        _ => None,
    }
}

#[tokio::test]
async fn each_key_arrives_in_order_whatever_is_retried() {
    let receiver = Receiver::start().await;
    receiver.choose(trouble);
    let rig = Rig::new(&http("shop", &receiver.url(), ORDERED)).await;
    let _relay = rig.relay().await;
    for n in 0..20 {
        for key in ["a", "bb", "ccc", "dddd"] {
            emit_nth(&rig, key, n).await;
        }
    }
    rig.counts("select count(*) from fencepost.ledger where token = 'applied'", 80).await;
    rig.rests().await;
    let arrived = arrivals(&receiver);
    assert!(receiver.requests().len() > 100, "there was trouble");
    for (key, numbers) in arrived {
        assert!(numbers.is_sorted(), "{key}: a later one never comes while an earlier one waits: {numbers:?}");
        assert_eq!(numbers.iter().collect::<std::collections::BTreeSet<_>>().len(), 20, "{key}: {numbers:?}");
    }
}

#[tokio::test]
async fn order_outlives_relays() {
    let receiver = Receiver::start().await;
    receiver.choose(trouble);
    let rig = Rig::new(&http("shop", &receiver.url(), &format!("{ORDERED}\nconcurrency = 4"))).await;
    rig.apply().await;
    let mut relay = rig.relay().await;
    for n in 0..20 {
        for key in ["a", "bb", "ccc", "dddd"] {
            emit_nth(&rig, key, n).await;
        }
        if n == 5 || n == 15 {
            // Killed with work in hand, its shards are taken over.
            relay.kill().await;
            rig.expire_leases().await;
            relay = rig.relay().await;
        } else if n == 10 {
            relay.signal(Signal::Term);
            assert!(relay.ended().await.success(), "{}", relay.log());
            relay = rig.relay().await;
        }
    }
    rig.counts("select count(distinct effect_id) from fencepost.ledger where token = 'applied'", 80).await;
    rig.rests().await;
    for (key, numbers) in arrivals(&receiver) {
        let mut first = Vec::new();
        for n in numbers {
            if !first.contains(&n) {
                first.push(n);
            }
        }
        assert_eq!(first, (0..20).collect::<Vec<_>>(), "{key}: a consumer that dedups sees them in order");
    }
}

#[tokio::test]
async fn a_waiting_head_blocks_its_key_and_only_its_key() {
    let receiver = Receiver::start().await;
    let rig =
        Rig::with_retry("base = '50ms'\ncap = '200ms'\nshort_budget = 2", &http("shop", &receiver.url(), ORDERED))
            .await;
    let _relay = rig.relay().await;
    receiver.on_key("a_0:1", Script::answer(404));
    emit_nth(&rig, "a", 0).await;
    emit_nth(&rig, "a", 1).await;
    rig.becomes("a_0:1", "shop", "dead").await;
    emit_nth(&rig, "a", 2).await;
    for n in 0..5 {
        emit_nth(&rig, "b", n).await;
    }
    rig.becomes("b_4:1", "shop", "applied").await;
    for n in [1, 2] {
        let blocked = rig.becomes(&format!("a_{n}:1"), "shop", "blocked").await;
        assert!(blocked.reason.contains("an earlier delivery of its key"), "{blocked:?}");
    }
    assert!(arrivals(&receiver)["a"].iter().all(|n| *n == 0), "the key waits for its head");

    rig.change(&["deliveries", "skip", "a_0:1"]).await;
    rig.becomes("a_0:1", "shop", "skipped").await;
    for n in [1, 2] {
        rig.becomes(&format!("a_{n}:1"), "shop", "applied").await;
    }
    emit_nth(&rig, "a", 3).await;
    rig.becomes("a_3:1", "shop", "applied").await;
    assert_eq!(arrivals(&receiver)["a"], [0, 0, 1, 2, 3]);
    rig.rests().await;
}

#[tokio::test]
async fn doubt_frees_no_key_until_somebody_resolves_it() {
    let receiver = Receiver::start().await;
    let rig = Rig::new(&http("shop", &receiver.url(), &format!("{ORDERED}\non_ambiguous = 'hold'"))).await;
    let _relay = rig.relay().await;
    receiver.on_key("a_0:1", Script::cut(Cut::Rst));
    emit_nth(&rig, "a", 0).await;
    emit_nth(&rig, "a", 1).await;
    rig.becomes("a_0:1", "shop", "in_doubt").await;
    rig.becomes("a_1:1", "shop", "blocked").await;
    rig.change(&["deliveries", "resolve", "a_0:1", "--as", "applied"]).await;
    rig.becomes("a_1:1", "shop", "applied").await;
    assert_eq!(arrivals(&receiver)["a"], [0, 1]);
}

#[tokio::test]
async fn a_scheduled_effect_takes_its_place_when_it_is_due() {
    let receiver = Receiver::start().await;
    let rig = Rig::new(&http("shop", &receiver.url(), ORDERED)).await;
    let _relay = rig.relay().await;
    let effects = json!([{ "consumer": "shop", "payload": 0, "ordering_key": "a", "deliver_in": "1500 ms" }]);
    rig.emit_with("a_0", effects).await;
    rig.becomes("a_0:1", "shop", "scheduled").await;
    // Not due, it blocks nobody.
    emit_nth(&rig, "a", 1).await;
    rig.becomes("a_1:1", "shop", "applied").await;
    assert_eq!(arrivals(&receiver)["a"], [1]);
    // Due, it has its place before what comes later.
    receiver.on_key("a_0:1", Script::answer(503));
    eventually("it is tried", async || (receiver.requests_for("a_0:1").len() > 1).then_some(())).await;
    emit_nth(&rig, "a", 2).await;
    rig.becomes("a_2:1", "shop", "blocked").await;
    receiver.on_key("a_0:1", Script::answer(200).ack("applied"));
    rig.becomes("a_2:1", "shop", "applied").await;
    let arrived = arrivals(&receiver).remove("a").expect("arrivals");
    assert_eq!(arrived.last(), Some(&2));
    assert_eq!(arrived.iter().filter(|n| **n == 2).count(), 1);
}
