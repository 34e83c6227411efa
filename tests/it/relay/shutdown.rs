//! SIGTERM under load, SIGTERM when nobody answers, and a second SIGTERM.

use fencepost::demo::embedded::guardian::Signal;
use serde_json::json;
use tokio_postgres::Client;

use super::{Relay, all_landed, all_settled, declare, emit_many, tokens};
use crate::support::db::TestDb;
use crate::support::receiver::Receiver;
use crate::support::script::{Gate, Script};

async fn count(client: &Client, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.expect("a count").get(0)
}

const HELD: &str = "select count(*) from fencepost.shards where relay is not null";
const OPEN: &str = "select count(*) from fencepost.flights where token is null";

#[tokio::test]
async fn under_load_nothing_is_lost_and_nothing_comes_twice() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let receiver = Receiver::start().await;
    declare(&client, "plain", &receiver, json!({"timeout": "60s", "concurrency": 8})).await;
    declare(&client, "ordered", &receiver, json!({"timeout": "60s", "concurrency": 8, "ordering": "key"})).await;
    let relay = Relay::of(&db);
    for round in 1..=3 {
        let gate = Gate::shut();
        receiver.always(Script::answer(200).ack("applied").behind(&gate));
        let mut running = relay.start();
        let seen = receiver.requests().len();
        emit_many(&client, "plain", "x", 150).await;
        emit_many(&client, "ordered", "x", 150).await;
        receiver.wait_until(seen + 16).await;
        running.signal(Signal::Term);
        running.says("relay stops").await;
        gate.open();
        assert!(running.ended().await.success(), "{}", running.log());
        assert_eq!((count(&client, HELD).await, count(&client, OPEN).await), (0, 0), "{}", running.log());
        let stopped = "select count(*) from fencepost.relays where stopped_at is not null";
        assert_eq!(count(&client, stopped).await, round);
        assert!(tokens(&client).await.get("applied").copied().unwrap_or_default() < 300 * round, "it had work left");
    }
    let mut last = relay.start();
    all_settled(&client, 900).await;
    all_landed(&client).await;
    assert_eq!(receiver.requests().len(), 900, "what was parked at a stop was never sent before");
    last.signal(Signal::Term);
    assert!(last.ended().await.success());
}

#[tokio::test]
async fn what_nobody_answers_within_the_grace_is_parked_as_unknown() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let receiver = Receiver::start().await;
    declare(&client, "retried", &receiver, json!({"timeout": "60s"})).await;
    declare(&client, "held", &receiver, json!({"timeout": "60s", "on_ambiguous": "hold"})).await;
    receiver.always(Script::stall());
    let relay = Relay::of(&db).set("relay.shutdown_grace", "300ms");
    let mut running = relay.start();
    emit_many(&client, "retried", "x", 5).await;
    emit_many(&client, "held", "x", 5).await;
    receiver.wait_until(10).await;
    running.signal(Signal::Term);
    assert!(running.ended().await.success());
    assert!(running.log().contains("the grace is over"));
    let tokens = tokens(&client).await;
    assert_eq!((tokens.get("retry"), tokens.get("in_doubt")), (Some(&5), Some(&5)), "{tokens:?}");
    assert_eq!((count(&client, HELD).await, count(&client, OPEN).await), (0, 0));
    let doubted = "select count(*) from fencepost.parked where first_doubt_at is not null";
    assert_eq!(count(&client, doubted).await, 10);
}

#[tokio::test]
async fn a_second_signal_ends_it_at_once() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let receiver = Receiver::start().await;
    declare(&client, "c", &receiver, json!({"timeout": "60s"})).await;
    receiver.always(Script::stall());
    // Were the second signal not heard, the test would wait for this in vain.
    let mut running = Relay::of(&db).set("relay.shutdown_grace", "10m").start();
    emit_many(&client, "c", "x", 5).await;
    receiver.wait_until(5).await;
    running.signal(Signal::Term);
    running.says("relay stops").await;
    running.signal(Signal::Term);
    assert_eq!(running.ended().await.code(), Some(1));
    assert!(running.log().contains("a second signal"));
    assert_eq!(count(&client, "select count(*) from fencepost.ledger").await, 0);
    assert!(count(&client, OPEN).await > 0, "the open flights say what is not known");
}

#[tokio::test]
async fn without_a_database_it_ends_all_the_same() {
    let url = "postgresql://postgres@127.0.0.1:1/none?sslmode=disable";
    let mut running = Relay::at(url).start();
    running.says("the database is gone").await;
    running.signal(Signal::Term);
    assert!(running.ended().await.success());
}
