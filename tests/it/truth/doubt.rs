//! When an attempt may have taken effect and nobody knows: who holds it, what is kept as evidence, what resolves it.

use serde_json::json;

use super::rig::{Attempt, Rig, http};
use crate::support::receiver::{Cut, Gate, Receiver, Script};

const HOLD: &str = "on_ambiguous = 'hold'";

#[tokio::test]
async fn a_hold_edge_keeps_the_evidence_and_waits_for_an_operator() {
    let receiver = Receiver::start().await;
    let rig = Rig::new(&http("bank", &receiver.url(), HOLD)).await;
    let mut relay = rig.relay().await;
    for (task, script, phase, error) in [
        ("stall", Script::stall(), "wait", "no answer within 1s"),
        ("fin", Script::cut(Cut::Fin), "wait", "connection closed before message completed"),
        ("rst", Script::cut(Cut::Rst), "wait", "reset"),
        ("half", Script::raw("HTTP/1.1 200 OK\r\nOutbox-A").then_cut(Cut::Fin), "wait", "connection closed"),
    ] {
        receiver.on_key(&format!("{task}:1"), script);
        let key = rig.emit(task, "bank").await;
        let held = rig.becomes(&key, "bank", "in_doubt").await;
        assert!(held.reason.contains("no answer"), "{held:?}");
        let [Attempt { started: true, token, status: None, phase: got, bytes_left: Some(true), error: why, .. }] =
            &rig.attempts(&key, "bank").await[..]
        else {
            panic!("{task}: one attempt, started and ended: {:?}", rig.attempts(&key, "bank").await)
        };
        assert_eq!((token.as_deref(), got.as_deref()), (Some("ambiguous"), Some(phase)), "{task}");
        let why = why.as_deref().unwrap_or_default();
        assert!(why.contains(error), "{task}: {why:?} lacks {error:?}");
        rig.wire_agrees(&receiver, &key, "bank").await;
    }
    assert_eq!(rig.count("select count(*) from fencepost.parked where next_attempt_at is not null").await, 0);

    // The operator's word is the operator's, never the consumer's.
    rig.change(&["deliveries", "resolve", "stall:1", "--as", "applied"]).await;
    rig.change(&["deliveries", "resolve", "fin:1", "--as", "not-applied"]).await;
    rig.becomes("stall:1", "bank", "operator:applied").await;
    rig.becomes("fin:1", "bank", "operator:not_applied").await;
    // An operator may also have it asked: what the consumer answers resolves the doubt.
    receiver.on_key("rst:1", Script::answer(200).ack("duplicate"));
    rig.change(&["deliveries", "retry", "rst:1"]).await;
    let resolved = rig.becomes("rst:1", "bank", "duplicate").await;
    assert!(!resolved.doubt);
    assert_eq!(rig.tokens("rst:1", "bank").await, ["ambiguous", "duplicate"]);
    assert_eq!(receiver.requests().len(), 5, "nothing else was sent");
    relay.kill().await;
}

#[tokio::test]
async fn a_later_answer_resolves_a_doubt_or_is_flagged() {
    let receiver = Receiver::start().await;
    let rig = Rig::new(&http("shop", &receiver.url(), "")).await;
    rig.apply().await;
    // (then, doubt left): what the consumer says after an attempt nobody heard the end of.
    let cases = [
        (vec![Script::answer(200).ack("applied")], "applied", false),
        (vec![Script::answer(200).ack("duplicate")], "duplicate", false),
        (vec![Script::answer(200)], "accepted", true),
        (vec![Script::answer(412).ack("stale; current=2")], "stale", true),
        (vec![Script::answer(400).ack("rejected")], "rejected", true),
        (vec![Script::answer(503).ack("not-applied"), Script::answer(400).ack("rejected")], "rejected", false),
        (vec![Script::answer(429), Script::answer(400).ack("rejected")], "rejected", true),
    ];
    for (n, (answers, ..)) in cases.iter().enumerate() {
        let mut scripts = vec![Script::cut(Cut::Rst)];
        scripts.extend(answers.iter().cloned().map(Script::from));
        receiver.on_key_in_turn(&format!("task-{n}:1"), scripts);
        rig.client.execute("select fencepost.submit_task('kind', '{}', $1)", &[&format!("task-{n}")]).await.unwrap();
        rig.emit(&format!("task-{n}"), "shop").await;
    }
    rig.second_epochs().await;
    let _relay = rig.relay().await;
    for (n, (answers, token, doubt)) in cases.iter().enumerate() {
        let key = format!("task-{n}:1");
        let got = rig.becomes(&key, "shop", token).await;
        assert_eq!((got.doubt, got.attempts), (*doubt, answers.len() as i32 + 1), "{key}: {got:?}");
        let mut tokens = rig.tokens(&key, "shop").await;
        assert_eq!(tokens.remove(0), "ambiguous");
        assert_eq!(tokens.last().map(String::as_str), Some(*token));
        rig.wire_agrees(&receiver, &key, "shop").await;
    }
}

#[tokio::test]
async fn a_crash_puts_in_doubt_only_what_was_started() {
    let receiver = Receiver::start().await;
    let gate = Gate::shut();
    receiver.always(Script::answer(200).ack("applied").behind(&gate));
    let rig = Rig::new(&http("bank", &receiver.url(), &format!("{HOLD}\nconcurrency = 1"))).await;
    rig.apply().await;
    // One completion, one ordering key: one shard, one flight.
    let effects: Vec<_> =
        (0..100).map(|n| json!({ "consumer": "bank", "payload": n, "ordering_key": "account" })).collect();
    rig.emit_with("batch", json!(effects)).await;
    let mut relay = rig.relay().await;
    let sent = receiver.wait_until(1).await[0].key();
    assert_eq!(
        rig.count("select max(deliveries)::bigint from fencepost.flights").await,
        100,
        "one flight has them all"
    );
    relay.kill().await;
    gate.open();
    assert_eq!(rig.count("select count(*) from fencepost.attempts").await, 1, "one was started, and nothing ended it");
    rig.expire_leases().await;

    let _next = rig.relay().await;
    let settled = "select count(*) from fencepost.ledger where token = 'applied'";
    rig.counts(settled, 99).await;
    let held = rig.becomes(&sent, "bank", "in_doubt").await;
    assert_eq!(held.attempts, 1);
    assert_eq!(rig.tokens(&sent, "bank").await, ["lost"]);
    assert_eq!(rig.count("select count(*) from fencepost.parked").await, 1);
    assert_eq!(receiver.requests().len(), 100, "each key once");
}

#[tokio::test]
async fn a_definite_status_is_no_doubt() {
    let receiver = Receiver::start().await;
    let rig =
        Rig::new(&http("bank", &receiver.url(), "ack = 'none'\non_ambiguous = 'hold'\ndefinite_statuses = [503]"))
            .await;
    let _relay = rig.relay().await;
    receiver.next(Script::answer(503));
    receiver.next(Script::answer(503));
    let key = rig.emit("task", "bank").await;
    let got = rig.becomes(&key, "bank", "applied").await;
    assert!(!got.doubt && got.attempts == 3, "{got:?}");
    assert_eq!(rig.tokens(&key, "bank").await, ["not_applied", "not_applied", "applied"]);
    rig.wire_agrees(&receiver, &key, "bank").await;
}

#[tokio::test]
async fn a_retry_the_consumer_may_have_forgotten_goes_to_an_operator() {
    let receiver = Receiver::start().await;
    let consumers =
        [http("says", &receiver.url(), ""), http("configured", &receiver.url(), "dedup_retain = '1s'")].concat();
    let rig = Rig::new(&consumers).await;
    let _relay = rig.relay().await;
    receiver
        .on_key_in_turn("says:1", vec![Script::cut(Cut::Rst), Script::answer(409).ack("in-progress; retain=1").into()]);
    receiver.on_key("configured:1", Script::answer(500));
    for name in ["says", "configured"] {
        let key = rig.emit(name, name).await;
        let held = rig.becomes(&key, name, "in_doubt").await;
        assert!(held.reason.contains("may have forgotten the key"), "{held:?}");
        assert!(held.attempts > 1, "it was tried again while the consumer remembered: {held:?}");
        rig.wire_agrees(&receiver, &key, name).await;
    }
}

#[tokio::test]
async fn expired_is_said_only_of_what_cannot_have_been_applied() {
    let receiver = Receiver::start().await;
    let rig = Rig::new(&http("shop", &receiver.url(), "")).await;
    let _relay = rig.relay().await;
    receiver.on_key("doubtful:1", Script::answer(500));
    receiver.on_key("sure:1", Script::answer(429));
    for task in ["doubtful", "sure"] {
        rig.emit_with(task, json!([{ "consumer": "shop", "payload": 1, "expires_in": "1 second" }])).await;
    }
    let held = rig.becomes("doubtful:1", "shop", "in_doubt").await;
    assert!(held.reason.contains("expired after an attempt"), "{held:?}");
    let expired = rig.becomes("sure:1", "shop", "expired").await;
    assert!(expired.attempts > 0 && !expired.doubt, "{expired:?}");
    for key in ["doubtful:1", "sure:1"] {
        rig.wire_agrees(&receiver, key, "shop").await;
    }
}
