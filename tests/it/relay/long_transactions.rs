//! Whatever stays open delays nobody else, and is delivered when it ends.

use serde_json::json;

use super::{Relay, all_settled, declare, emit, emit_many};
use crate::support::db::TestDb;
use crate::support::receiver::Receiver;

#[tokio::test]
async fn a_long_transaction_of_any_kind_delays_nobody() {
    let (db, other) = (TestDb::new().await, TestDb::new().await);
    let client = db.client().await;
    let receiver = Receiver::start().await;
    declare(&client, "c", &receiver, json!({"ordering": "key"})).await;
    let mut relay = Relay::of(&db).start();
    relay.says("shard taken").await;
    let prepared = format!("{}-long", db.name());
    let elsewhere = format!("{}-elsewhere", db.name());

    let reading = db.client().await;
    reading
        .batch_execute("begin isolation level repeatable read; select count(*) from fencepost.effects")
        .await
        .unwrap();
    let reading_elsewhere = other.client().await;
    reading_elsewhere.batch_execute("begin isolation level repeatable read; select 1 from pg_class").await.unwrap();
    let writing = db.client().await;
    writing.batch_execute("begin").await.unwrap();
    emit(&writing, &json!([{"consumer": "c", "payload_text": "written late"}])).await;
    let writing_elsewhere = other.client().await;
    writing_elsewhere.batch_execute("begin; create table long (n int)").await.unwrap();
    let two_phase = db.client().await;
    two_phase.batch_execute("begin; set local fencepost.doorbell = off").await.unwrap();
    emit(&two_phase, &json!([{"consumer": "c", "payload_text": "prepared"}])).await;
    two_phase.batch_execute(&format!("prepare transaction '{prepared}'")).await.unwrap();
    let two_phase_elsewhere = other.client().await;
    two_phase_elsewhere
        .batch_execute(&format!("begin; create table longer (n int); prepare transaction '{elsewhere}'"))
        .await
        .unwrap();

    // All of them are still open while everybody else's effects arrive, in every shard and over many readings.
    for round in 1..=5 {
        emit_many(&client, "c", "others", 40).await;
        all_settled(&client, round * 40).await;
    }
    let open: i64 = client
        .query_one(
            "select (select count(*) from pg_stat_activity where state = 'idle in transaction' and datname in ($1, $2))
                  + (select count(*) from pg_prepared_xacts where database in ($1, $2))",
            &[&db.name(), &other.name()],
        )
        .await
        .unwrap()
        .get(0);
    assert_eq!(open, 6, "they were open all the time");
    let bodies =
        || receiver.requests().iter().map(|r| String::from_utf8_lossy(&r.body).into_owned()).collect::<Vec<_>>();
    assert!(bodies().iter().all(|body| body.starts_with("others")));

    // Each is delivered when it ends, however old it is by then.
    writing.batch_execute("commit").await.unwrap();
    all_settled(&client, 201).await;
    two_phase.batch_execute(&format!("commit prepared '{prepared}'")).await.unwrap();
    all_settled(&client, 202).await;
    assert_eq!(bodies()[200..], ["written late", "prepared"]);
    two_phase_elsewhere.batch_execute(&format!("rollback prepared '{elsewhere}'")).await.unwrap();
    reading.batch_execute("commit").await.unwrap();
}
