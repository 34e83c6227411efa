//! More keys of a lane wait in the parking lot than a relay keeps in mind: the lane lags until there is room, and order
//! holds.

use std::collections::HashMap;
use std::time::Duration;

use serde_json::json;

use super::reconciler::CLOSED_OVER;
use super::{count, counts, facts_of};
use crate::relay::{Relay, declare};
use crate::support::db::TestDb;
use crate::support::eventually_within;
use crate::support::receiver::Receiver;

/// Keys that wait; one relay keeps ten thousand of a lane in mind.
const WAITING: usize = 10_100;
/// Keys nothing is known of, and those of the waiting that are meant once more.
const FRESH: usize = 200;
const AGAIN: usize = 300;
/// All keys are of one shard.
const SHARD: i16 = 3;
/// Ten thousand requests, each with a start of its own.
const LONG: Duration = Duration::from_secs(120);

#[tokio::test]
async fn a_lane_with_ten_thousand_waiting_keys_lags_and_everything_comes_in_order() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let receiver = Receiver::start().await;
    declare(&client, "c", &receiver, json!({"ordering": "key", "concurrency": 64, "timeout": "14s"})).await;
    let keys = format!(
        "create table keys as select row_number() over (order by n) as n, 'k' || n as key
         from generate_series(1, {}) n where fencepost.shard_of('k' || n) = {SHARD} limit {}",
        (WAITING + FRESH) * 12,
        WAITING + FRESH
    );
    client.batch_execute(&keys).await.unwrap();
    assert_eq!(count(&client, "select count(*) from keys").await, (WAITING + FRESH) as i64);
    let emit = async |label: &str, from: usize, to: usize| {
        let sql = format!(
            "select fencepost.emit(jsonb_agg(jsonb_build_object('consumer', 'c', 'ordering_key', key, 'payload_text', key || ' {label}') order by n))
             from keys where n between {from} and {to} group by n / 500"
        );
        client.batch_execute(&sql).await.unwrap();
    };
    // A relay of earlier left them all waiting for their next attempt, which is far away.
    emit("first", 1, WAITING).await;
    client.execute(CLOSED_OVER, &[]).await.unwrap();
    client
        .batch_execute(
            "insert into fencepost.parked (effect_id, consumer_id, shard, ordering_key, state, attempts, sent, next_attempt_at)
             select id, 1, shard, ordering_key, 'retry', 1, 1, clock_timestamp() + interval '1 hour' from fencepost.effects",
        )
        .await
        .unwrap();
    let mut relay = Relay::of(&db).start();
    relay.says(&format!("shard taken shard={SHARD} ")).await;

    emit("second", WAITING - AGAIN + 1, WAITING + FRESH).await;
    let unread = format!(
        "select coalesce(sum(f.deliveries), 0)::bigint from fencepost.lags l
         join fencepost.flights f on f.shard = l.shard and f.seq between l.from_seq and l.to_seq where l.shard = {SHARD}"
    );
    counts(&client, &unread, (AGAIN + FRESH) as i64).await;
    counts(&client, "select count(*) from fencepost.flights where token is null", 0).await;
    // What is behind one that waits, waits with it; of another key the lane keeps nothing.
    let rows = "select count(*) from fencepost.parked";
    assert_eq!(count(&client, rows).await, (WAITING + AGAIN) as i64);
    let known = format!("{rows} p join keys k on k.key = p.ordering_key where k.n > {WAITING}");
    assert_eq!(count(&client, &known).await, 0);
    assert!(receiver.requests().is_empty(), "nothing of the lane can go");

    let due = "update fencepost.parked set next_attempt_at = clock_timestamp() where state = 'retry'";
    client.batch_execute(due).await.unwrap();
    let all = (WAITING + AGAIN + FRESH) as i64;
    eventually_within(LONG, "everything has arrived", async || {
        (count(&client, &facts_of("c")).await == all).then_some(())
    })
    .await;
    counts(&client, "select (select count(*) from fencepost.parked) + (select count(*) from fencepost.lags)", 0).await;
    let mut seen: HashMap<String, String> = HashMap::new();
    for request in receiver.requests() {
        let body = String::from_utf8(request.body.to_vec()).expect("text");
        let (key, label) = body.split_once(' ').expect("a key and a label");
        let before = seen.insert(key.to_owned(), label.to_owned());
        assert!(label == "second" || before.is_none(), "{key}: first after {before:?}");
    }
    assert_eq!(seen.len(), WAITING + FRESH);
    assert_eq!(receiver.requests().len() as i64, all, "each once");
    assert_eq!(count(&client, "select count(*) from fencepost.alarms").await, 0);
}
