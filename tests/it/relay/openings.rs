//! Openings whose answer never came: adopted where they are ours, never sent twice, never lost.

use serde_json::json;
use tokio_postgres::Client;

use super::{Relay, all_landed, all_settled, declare, emit, emit_many};
use crate::support::db::TestDb;
use crate::support::eventually;
use crate::support::postgres_proxy::PostgresProxy;
use crate::support::receiver::Receiver;

async fn count(client: &Client, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.expect("a count").get(0)
}

#[tokio::test]
async fn an_opening_answered_to_nobody_is_adopted_and_sent_once() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let receiver = Receiver::start().await;
    declare(&client, "c", &receiver, json!({})).await;
    let (proxy, url) = PostgresProxy::before_postgres(db.url()).await;
    let mut relay = Relay::at(&url).start();
    relay.says("shard taken").await;
    for round in 1..=5 {
        // The payload travels to the relay in the answer to the opening, and in no other: something large has its flight
        // first. Its end leaves the server only with the commit.
        let mark = format!("swallowed-{round}");
        let payload = "x".repeat(70_000) + &mark;
        proxy.swallow(mark.as_bytes());
        emit(
            &client,
            &json!([{"consumer": "c", "payload_text": payload}, {"consumer": "c", "payload_text": "another"}]),
        )
        .await;
        all_settled(&client, round * 2).await;
        assert_eq!(proxy.cuts(), round, "the answer was swallowed");
    }
    all_landed(&client).await;
    assert!(relay.log().matches("was adopted").count() == 5, "{}", relay.log());
    assert_eq!(receiver.requests().len(), 10, "nothing was sent twice");
    assert!(receiver.requests().iter().all(|request| request.attempt() == 1));
    assert_eq!(count(&client, "select count(*) from fencepost.flights where token = 'lost'").await, 0);
    assert_eq!(count(&client, "select count(*) from fencepost.flights where deliveries > 0").await, 5);
}

/// The same where what was read had been sent ahead, or waited for that very answer.
#[tokio::test]
async fn a_flight_of_what_was_sent_ahead_that_is_answered_to_nobody_is_known_again() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let receiver = Receiver::start().await;
    declare(&client, "c", &receiver, json!({})).await;
    let (proxy, url) = PostgresProxy::before_postgres(db.url()).await;
    let mut relay = Relay::at(&url).start();
    for shard in 0..8 {
        relay.says(&format!("shard taken shard={shard} ")).await;
    }
    for round in 1..=5 {
        // The first of a key's shard waits for its flight, those after it are sent ahead.
        proxy.swallow_answer_to("-- store::write_ahead");
        emit(&client, &json!([{"consumer": "c", "payload": round, "ordering_key": "k"}])).await;
        all_settled(&client, round).await;
        eventually("the answer is swallowed", async || (proxy.cuts() == round).then_some(())).await;
        all_landed(&client).await;
    }
    assert_eq!(relay.log().matches("was adopted").count(), 5, "{}", relay.log());
    assert_eq!(receiver.requests().len(), 5, "nothing was sent twice");
    assert_eq!(count(&client, "select count(*) from fencepost.flights where token = 'lost'").await, 0);
    assert_eq!(count(&client, "select count(*) from fencepost.flights where deliveries = 1").await, 5);
}

#[tokio::test]
async fn an_opening_that_commits_after_its_relay_gave_it_up_is_sent_once() {
    let db = TestDb::new().await;
    let mut client = db.client().await;
    let watch = db.client().await;
    let receiver = Receiver::start().await;
    declare(&client, "c", &receiver, json!({})).await;
    let (proxy, url) = PostgresProxy::before_postgres(db.url()).await;
    let mut relay = Relay::at(&url).start();
    relay.says("shard taken").await;
    emit_many(&client, "c", "before", 1).await;
    all_settled(&client, 1).await;
    all_landed(&client).await;

    // The opening waits for a lock while its connection is cut; the server does not notice, and commits it in the end.
    let lock = client.transaction().await.unwrap();
    lock.batch_execute("lock table fencepost.flights in share mode").await.unwrap();
    // Something large is never sent ahead of its flight.
    emit(&watch, &json!([{"consumer": "c", "payload_text": "x".repeat(70_000)}])).await;
    let waiting = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock' and query ~ '^-- store::(open_flights|write_ahead)'";
    let waits = async |n| (count(&watch, waiting).await == n).then_some(());
    eventually("the opening waits", async || waits(1).await).await;
    proxy.cut_all();
    eventually("the relay is back and opens again", async || waits(2).await).await;
    assert_eq!(receiver.requests().len(), 1);
    lock.commit().await.unwrap();

    all_settled(&watch, 2).await;
    emit_many(&watch, "c", "after", 30).await;
    all_settled(&watch, 32).await;
    all_landed(&watch).await;
    assert_eq!(receiver.requests().len(), 32, "nothing was sent twice");
}
