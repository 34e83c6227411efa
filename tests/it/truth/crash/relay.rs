//! The relay dies, or stops for too long.

use fencepost::demo::embedded::guardian::Signal;
use serde_json::json;

use super::died;
use crate::support::db::own_server;
use crate::support::eventually;
use crate::support::receiver::{Gate, Receiver, Script};
use crate::truth::rig::{Rig, http};

/// A `retry` and a `hold` edge to one receiver.
fn both_edges(receiver: &Receiver) -> String {
    [http("shop", &receiver.url(), ""), http("bank", &receiver.url(), "on_ambiguous = 'hold'")].concat()
}

#[tokio::test]
async fn a_relay_that_dies_before_its_flight_opens_changes_nothing() {
    let receiver = Receiver::start().await;
    let rig = Rig::new(&both_edges(&receiver)).await;
    rig.apply().await;
    rig.emit("task", "shop").await;
    died(&mut rig.failing_relay("before_flight=abort")).await;
    assert_eq!(rig.count("select count(*) from fencepost.flights where deliveries > 0").await, 0);
    rig.expire_leases().await;
    let _next = rig.relay().await;
    rig.becomes("task:1", "shop", "applied").await;
    rig.rests().await;
    assert_eq!(receiver.requests().len(), 1);
    rig.wire_agrees(&receiver, "task:1", "shop").await;
}

#[tokio::test]
async fn a_relay_that_dies_between_flight_and_send_has_sent_nothing() {
    let receiver = Receiver::start().await;
    let rig = Rig::new(&both_edges(&receiver)).await;
    rig.apply().await;
    // One completion and one key: one flight, of which nothing leaves.
    let effects = json!([
        { "consumer": "shop", "payload": 1, "ordering_key": "k" },
        { "consumer": "bank", "payload": 2, "ordering_key": "k" },
        { "consumer": "shop", "payload": 3, "ordering_key": "k", "deliver_in": "1 hour" },
    ]);
    rig.emit_with("task", effects).await;
    died(&mut rig.failing_relay("flight_opened=abort")).await;
    assert_eq!(rig.count("select count(*) from fencepost.flights where token is null and deliveries = 3").await, 1);
    rig.expire_leases().await;

    let _next = rig.relay().await;
    // Where a duplicate is absorbed the first attempt counts as lost, since nobody can tell.
    let retried = rig.becomes("task:1", "shop", "applied").await;
    assert_eq!((retried.attempts, rig.tokens("task:1", "shop").await), (2, vec!["lost".into(), "applied".into()]));
    assert_eq!(receiver.requests_for("task:1")[0].attempt(), 2);
    // Where it is not, an attempt has a start row, and there was none.
    let held = rig.becomes("task:1:2", "bank", "applied").await;
    assert_eq!((held.attempts, receiver.requests_for("task:1:2")[0].attempt()), (1, 1));
    // What is scheduled for later waits for its time.
    rig.becomes("task:1:3", "shop", "scheduled").await;
    assert_eq!(rig.count("select count(*) from fencepost.flights where token = 'lost'").await, 1);
    assert_eq!(receiver.requests().len(), 2);
}

#[tokio::test]
async fn a_relay_that_dies_between_start_and_first_byte_leaves_doubt_where_it_is_held() {
    let receiver = Receiver::start().await;
    let rig = Rig::new(&both_edges(&receiver)).await;
    rig.apply().await;
    rig.emit("task", "bank").await;
    died(&mut rig.failing_relay("attempt_started=abort")).await;
    assert_eq!(receiver.requests().len(), 0, "nothing left");
    rig.expire_leases().await;
    let _next = rig.relay().await;
    rig.becomes("task:1", "bank", "in_doubt").await;
    assert_eq!(rig.tokens("task:1", "bank").await, ["lost"]);
    // The operator asks the consumer, whose word settles it.
    rig.change(&["deliveries", "retry", "task:1"]).await;
    rig.becomes("task:1", "bank", "applied").await;
    assert_eq!(receiver.requests().len(), 1);
}

#[tokio::test]
async fn a_relay_that_dies_between_send_and_outcome_is_followed_by_the_same_key() {
    let receiver = Receiver::start().await;
    let rig = Rig::new(&both_edges(&receiver)).await;
    rig.apply().await;
    for (consumer, token) in [("shop", "duplicate"), ("bank", "in_doubt")] {
        let key = rig.emit(consumer, consumer).await;
        receiver.on_key_in_turn(
            &key,
            [Script::answer(200).ack("applied").into(), Script::answer(200).ack("duplicate").into()],
        );
        died(&mut rig.failing_relay("answered=abort")).await;
        assert_eq!(receiver.requests_for(&key).len(), 1, "it was sent and answered");
        assert_eq!(rig.delivery(&key, consumer).await.token, None, "and nobody wrote it down");
        rig.expire_leases().await;
        let mut next = rig.relay().await;
        let got = rig.becomes(&key, consumer, token).await;
        assert!(!got.doubt || token == "in_doubt", "{got:?}");
        let sent = receiver.requests_for(&key);
        let expected = if token == "duplicate" { vec![1, 2] } else { vec![1] };
        assert_eq!(sent.iter().map(|r| r.attempt()).collect::<Vec<_>>(), expected);
        assert!(sent.iter().all(|request| request.body == sent[0].body), "identical bytes");
        next.signal(Signal::Term);
        next.ended().await;
    }
}

#[tokio::test]
async fn a_relay_that_dies_before_its_outcome_is_written_is_followed_by_the_same_key() {
    let receiver = Receiver::start().await;
    let rig = Rig::new(&both_edges(&receiver)).await;
    rig.apply().await;
    let key = rig.emit("task", "shop").await;
    receiver
        .on_key_in_turn(&key, [Script::answer(200).ack("applied").into(), Script::answer(200).ack("duplicate").into()]);
    died(&mut rig.failing_relay("settle=abort")).await;
    assert_eq!(rig.count("select count(*) from fencepost.ledger").await, 0);
    rig.expire_leases().await;
    let _next = rig.relay().await;
    rig.becomes(&key, "shop", "duplicate").await;
    assert_eq!(receiver.requests().len(), 2);
}

#[tokio::test]
async fn an_outcome_that_could_not_be_written_is_written_again_and_not_sent_again() {
    let receiver = Receiver::start().await;
    let rig = Rig::new(&both_edges(&receiver)).await;
    let _relay = rig.relay().await;
    // Statements are prepared by now: preparing one would wait for the lock as well.
    rig.emit("before", "bank").await;
    rig.becomes("before:1", "bank", "applied").await;
    let mut other = rig.connect().await;
    let lock = other.transaction().await.unwrap();
    lock.batch_execute("lock table fencepost.ledger in share mode").await.unwrap();
    // The held one first: its start row must be written before the writer stands.
    rig.emit("hold", "bank").await;
    receiver.wait_until(2).await;
    rig.emit("retry", "shop").await;
    receiver.wait_until(3).await;
    let killed = "select count(pg_terminate_backend(pid)) from pg_stat_activity
                  where datname = current_database() and wait_event_type = 'Lock' and query like '-- store::settle%'";
    for round in 0..3 {
        eventually("a write waits and is killed", async || (rig.count(killed).await > 0).then_some(())).await;
        assert_eq!(rig.count("select count(*) from fencepost.ledger").await, 1, "round {round}");
    }
    lock.commit().await.unwrap();
    rig.becomes("retry:1", "shop", "applied").await;
    rig.becomes("hold:1", "bank", "applied").await;
    rig.rests().await;
    assert_eq!(receiver.requests().len(), 3, "each was sent once");
}

#[tokio::test]
async fn a_relay_paused_past_its_lease_does_no_harm_when_it_wakes() {
    let receiver = Receiver::start().await;
    let rig = Rig::new(&both_edges(&receiver)).await;
    rig.apply().await;
    let key = rig.emit("task", "shop").await;
    receiver
        .on_key_in_turn(&key, [Script::answer(200).ack("applied").into(), Script::answer(200).ack("duplicate").into()]);
    // It stops itself at the last moment: between its last look at its lease and the first byte.
    let mut paused = rig.failing_relay("attempt_started=stop");
    stopped(paused.pid()).await;
    rig.expire_leases().await;
    let _next = rig.relay().await;
    rig.becomes(&key, "shop", "applied").await;
    assert_eq!(receiver.requests().len(), 1);

    paused.signal(Signal::Continue);
    receiver.wait_until(2).await;
    // Its late word is kept as a fact and changes nothing; it has lost the shard and opens no flight.
    rig.counts("select count(*) from fencepost.ledger", 2).await;
    rig.becomes(&key, "shop", "applied").await;
    paused.says("lost").await;
    rig.emit("later", "shop").await;
    rig.becomes("later:1", "shop", "applied").await;
    rig.rests().await;
    assert_eq!(receiver.requests().len(), 3, "nothing but the one it was about to send");
}

/// Of one key: the first has a flight before it is sent, and the next may be sent ahead of one.
fn in_one_shard(consumers: &[&str]) -> serde_json::Value {
    consumers.iter().map(|consumer| json!({ "consumer": consumer, "payload": 1, "ordering_key": "k" })).collect()
}

#[tokio::test]
async fn a_relay_that_dies_before_what_it_sent_ahead_has_a_flight() {
    let receiver = Receiver::start().await;
    let server = own_server().await;
    let rig = Rig::on_server(&server, &both_edges(&receiver)).await;
    rig.apply().await;
    let mut relay = rig.failing_relay("before_ahead=abort@2");
    rig.holds_all(&mut relay).await;
    rig.emit_with("first", in_one_shard(&["shop"])).await;
    rig.becomes("first:1", "shop", "applied").await;
    // Nobody is answered: what became of them is not known to anybody.
    let gate = Gate::shut();
    receiver.always(Script::answer(200).ack("applied").behind(&gate));
    rig.emit_with("task", in_one_shard(&["shop", "bank"])).await;
    died(&mut relay).await;
    assert_eq!(receiver.requests().len(), 3, "both were sent");
    assert_eq!(rig.count("select count(*) from fencepost.flights where deliveries > 0").await, 1, "and have no flight");
    gate.open();
    receiver.always(Script::answer(200).ack("applied"));
    rig.expire_leases().await;

    let _next = rig.relay().await;
    rig.becomes("task:1", "shop", "applied").await;
    assert_eq!(rig.tokens("task:1", "shop").await, ["lost", "applied"]);
    rig.becomes("task:1:2", "bank", "in_doubt").await;
    assert_eq!(rig.tokens("task:1:2", "bank").await, ["lost"]);
    assert_eq!(receiver.requests_for("task:1:2").len(), 1, "no second request where it costs");
    assert_eq!(rig.count("select count(*) from fencepost.flights where token = 'lost'").await, 1);
}

#[tokio::test]
async fn what_was_sent_ahead_when_the_connection_was_lost_is_not_sent_again() {
    let receiver = Receiver::start().await;
    let server = own_server().await;
    let rig = Rig::on_server(&server, &both_edges(&receiver)).await;
    rig.apply().await;
    let mut relay = rig.failing_relay("before_ahead=stop@2");
    rig.holds_all(&mut relay).await;
    rig.emit_with("first", in_one_shard(&["shop"])).await;
    rig.becomes("first:1", "shop", "applied").await;
    rig.emit_with("task", in_one_shard(&["shop", "bank"])).await;
    stopped(relay.pid()).await;
    assert_eq!(receiver.requests().len(), 3, "both were sent");
    assert_eq!(rig.count("select count(*) from fencepost.flights where deliveries > 0").await, 1, "and have no flight");
    // What is committed meanwhile comes with the same reading, and was not sent.
    rig.emit_with("more", in_one_shard(&["shop"])).await;
    let ended = "select count(pg_terminate_backend(pid)) from pg_stat_activity
                 where datname = current_database() and application_name like 'fencepost%' and application_name <> 'fencepost test'";
    assert!(rig.count(ended).await > 3);
    relay.signal(Signal::Continue);
    for (key, consumer) in [("task:1", "shop"), ("task:1:2", "bank"), ("more:1", "shop")] {
        rig.becomes(key, consumer, "applied").await;
    }
    rig.rests().await;
    assert_eq!(receiver.requests().len(), 4, "each was sent once");
    let row = "select count(*) from fencepost.flights where token = 'done' and deliveries = 3";
    assert_eq!(rig.count(row).await, 1, "one flight for what was sent ahead and what was not");
    assert_eq!(rig.count("select count(*) from fencepost.flights where token = 'lost'").await, 0);
}

#[tokio::test]
async fn a_lane_leaves_nothing_unread_that_has_no_flight() {
    let receiver = Receiver::start().await;
    let server = own_server().await;
    let rig = Rig::on_server(&server, &both_edges(&receiver)).await;
    rig.apply().await;
    rig.change(&["consumers", "pause", "shop"]).await;
    let mut relay = rig.failing_relay("before_ahead=stop@2");
    rig.holds_all(&mut relay).await;
    rig.emit_with("first", in_one_shard(&["bank"])).await;
    rig.becomes("first:1", "bank", "applied").await;
    // Its lane leaves it unread at once.
    rig.emit_with("task", in_one_shard(&["shop"])).await;
    stopped(relay.pid()).await;
    assert_eq!(rig.count("select count(*) from fencepost.lags").await, 0, "a range is of flights that are there");
    relay.signal(Signal::Continue);
    rig.becomes("task:1", "shop", "backlog").await;
    rig.change(&["consumers", "resume", "shop"]).await;
    rig.becomes("task:1", "shop", "applied").await;
    rig.rests().await;
    assert_eq!(receiver.requests().len(), 2);
    assert_eq!(rig.count("select count(*) from fencepost.alarms").await, 0);
}

/// Waits until the process stands still.
async fn stopped(pid: u32) {
    eventually("the relay stops itself", async || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("a process");
        stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T')).then_some(())
    })
    .await;
}
