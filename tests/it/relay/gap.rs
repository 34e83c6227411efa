//! Nothing missing, nothing twice, nothing that did not commit: whatever the producers do.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rand::Rng;
use serde_json::{Value, json};
use tokio_postgres::Client;

use super::{Relay, all_landed, all_settled, declare};
use crate::support::db::TestDb;
use crate::support::receiver::Receiver;

const WRITERS: usize = 32;
const ROUNDS: usize = 25;
/// Keys that several writers serialise by a row of their own.
const KEYS: i64 = 6;

/// One producer: what it commits it also remembers.
struct Writer {
    client: Client,
    markers: Arc<AtomicU64>,
    committed: Vec<u64>,
}

impl Writer {
    async fn sql(&self, sql: &str) {
        self.client.batch_execute(sql).await.unwrap_or_else(|e| panic!("{sql}: {e:?}"));
    }

    /// Emits effects in the present transaction; what they say is not committed yet.
    async fn emit(&self, count: usize, key: Option<i64>) -> Vec<u64> {
        let markers: Vec<u64> = (0..count).map(|_| self.markers.fetch_add(1, Ordering::SeqCst)).collect();
        let effect = |marker: &u64| match key {
            Some(key) => json!({"topic": "t", "payload": marker, "ordering_key": format!("key-{key}")}),
            None => json!({"topic": "t", "payload": marker}),
        };
        let effects: Value = markers.iter().map(effect).collect();
        self.client.query("select fencepost.emit($1)", &[&effects]).await.expect("emit");
        markers
    }

    async fn round(&mut self, name: &str) {
        let (kind, count, late) = {
            let mut rng = rand::rng();
            let late = if rng.random_ratio(1, 12) { rng.random_range(500..2_500) } else { rng.random_range(0..60) };
            (rng.random_range(0..9), rng.random_range(1..4), Duration::from_millis(late))
        };
        self.sql("begin").await;
        match kind {
            0 => {
                self.emit(count, None).await;
                tokio::time::sleep(late).await;
                self.sql("rollback").await;
            }
            1 | 2 => {
                let markers = self.emit(count, None).await;
                tokio::time::sleep(late).await;
                self.sql("commit").await;
                self.committed.extend(markers);
            }
            // Savepoints: one rolled back, one released, one released inside one that is rolled back.
            3 | 4 => {
                let mut markers = self.emit(1, None).await;
                self.sql("savepoint a").await;
                self.emit(1, None).await;
                self.sql("savepoint b").await;
                self.emit(1, None).await;
                self.sql("release savepoint b; rollback to savepoint a; savepoint c").await;
                markers.extend(self.emit(count, None).await);
                tokio::time::sleep(late).await;
                self.sql("release savepoint c").await;
                markers.extend(self.emit(1, None).await);
                self.sql("commit").await;
                self.committed.extend(markers);
            }
            // Two phases; a transaction that notified cannot be prepared.
            5 | 6 => {
                self.sql("set local fencepost.doorbell = off").await;
                let markers = self.emit(count, None).await;
                self.sql(&format!("prepare transaction '{name}'")).await;
                tokio::time::sleep(late).await;
                if kind == 5 {
                    self.sql(&format!("commit prepared '{name}'")).await;
                    self.committed.extend(markers);
                } else {
                    self.sql(&format!("rollback prepared '{name}'")).await;
                }
            }
            // Serialised by a row; now and then far more than a page holds.
            _ => {
                let key = rand::rng().random_range(0..KEYS);
                let count = if rand::rng().random_ratio(1, 6) { 40 } else { count };
                self.client.query("select 1 from app_keys where key = $1 for update", &[&key]).await.expect("a row");
                let markers = self.emit(count, Some(key)).await;
                tokio::time::sleep(late / 4).await;
                self.sql("commit").await;
                self.committed.extend(markers);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_missing_nothing_comes_twice_nothing_uncommitted_is_sent() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let receiver = Receiver::start().await;
    declare(&client, "plain", &receiver, json!({"topics": ["t"]})).await;
    declare(&client, "ordered", &receiver, json!({"topics": ["t"], "ordering": "key"})).await;
    client
        .batch_execute(
            "create table app_keys (key bigint primary key); insert into app_keys select generate_series(0, 5)",
        )
        .await
        .unwrap();
    let mut relay = Relay::of(&db).set("relay.flight_deliveries", "7").start();
    relay.says("shard taken").await;

    let markers = Arc::new(AtomicU64::new(0));
    let mut writers = tokio::task::JoinSet::new();
    for n in 0..WRITERS {
        let mut writer = Writer { client: db.client().await, markers: Arc::clone(&markers), committed: Vec::new() };
        let name = format!("{}-{n}", db.name());
        writers.spawn(async move {
            for _ in 0..ROUNDS {
                writer.round(&name).await;
            }
            writer.committed
        });
    }
    let committed: BTreeSet<u64> = writers.join_all().await.into_iter().flatten().collect();
    let emitted = markers.load(Ordering::SeqCst);
    assert!((committed.len() as u64) < emitted, "something was rolled back");

    let tokens = all_settled(&client, committed.len() * 2).await;
    assert_eq!(tokens, BTreeMap::from([("applied".into(), committed.len() as i64 * 2)]));
    all_landed(&client).await;
    let partial = "select count(*) from fencepost.flights where partial and token = 'done'";
    assert!(client.query_one(partial, &[]).await.unwrap().get::<_, i64>(0) > 0, "no difference needed pages");

    let requests = receiver.requests();
    for consumer in ["plain", "ordered"] {
        let mut got: Vec<u64> = requests
            .iter()
            .filter(|r| r.header("outbox-consumer").as_deref() == Some(consumer))
            .map(|r| String::from_utf8_lossy(&r.body).parse().expect("a marker"))
            .collect();
        got.sort_unstable();
        let missing: Vec<_> = committed.iter().filter(|marker| got.binary_search(marker).is_err()).collect();
        assert!(missing.is_empty(), "{consumer} misses {missing:?}");
        assert!(got.windows(2).all(|pair| pair[0] != pair[1]), "{consumer} got something twice");
        assert_eq!(got.len(), committed.len(), "{consumer} got what never committed");
    }

    // What a row lock serialised arrives in that order: ids are drawn under the lock.
    let stored = client
        .query("select ordering_key, convert_from(payload, 'UTF8') from fencepost.effects where ordering_key like 'key-%' order by id", &[])
        .await
        .unwrap();
    let mut expected: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut key_of: BTreeMap<String, String> = BTreeMap::new();
    for row in &stored {
        expected.entry(row.get(0)).or_default().push(row.get(1));
        key_of.insert(row.get(1), row.get(0));
    }
    let mut arrived: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for request in requests.iter().filter(|r| r.header("outbox-consumer").as_deref() == Some("ordered")) {
        let marker = String::from_utf8_lossy(&request.body).into_owned();
        if let Some(key) = key_of.get(&marker) {
            arrived.entry(key.clone()).or_default().push(marker);
        }
    }
    assert_eq!(arrived, expected);
    assert!(expected.len() as i64 == KEYS && expected.values().all(|markers| markers.len() > 1));
}
