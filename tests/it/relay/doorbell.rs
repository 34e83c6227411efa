//! Waking up: no commit is slept through, and where notifications do not arrive nobody sleeps.

use std::time::Duration;

use rand::Rng;
use serde_json::json;
use tokio_postgres::Client;

use super::{Relay, all_settled, declare, emit_many};
use crate::support::db::TestDb;
use crate::support::postgres_proxy::PostgresProxy;
use crate::support::receiver::Receiver;
use crate::support::{PATIENCE, eventually};

/// A sleeping relay wakes by itself only after this: a commit that rang for nobody hangs the test.
const NEVER: &str = "1h";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_commit_is_slept_through() {
    let db = TestDb::new().await;
    let (client, watch) = (db.client().await, db.client().await);
    let receiver = Receiver::start().await;
    declare(&client, "c", &receiver, json!({})).await;
    let mut relay = Relay::of(&db).set("relay.poll_max", NEVER).start();
    relay.says("shard taken").await;
    let (arrived, mut arrivals) = tokio::sync::mpsc::unbounded_channel();
    receiver.choose(move |_| {
        let _ = arrived.send(());
        None
    });
    for n in 0..1_500 {
        match n % 10 {
            // It certainly sleeps.
            0 => eventually("the relay sleeps", async || asleep(&watch).await).await,
            // Commits fall before, into and after the moment at which it lies down.
            _ => tokio::time::sleep(Duration::from_micros(rand::rng().random_range(0..4_000))).await,
        }
        emit_many(&client, "c", "x", 1).await;
        let arrival = tokio::time::timeout(PATIENCE, arrivals.recv()).await;
        assert!(matches!(arrival, Ok(Some(()))), "commit {n} was slept through");
    }
    all_settled(&client, 1_500).await;
}

/// Whether the doorbell hangs in every shard.
async fn asleep(client: &Client) -> Option<()> {
    let sql = "select 1 from pg_locks where locktype = 'advisory' and mode = 'ExclusiveLock' and objsubid = 2 and classid = fencepost.doorbell_class()
               and database = (select oid from pg_database where datname = current_database()) having count(*) = 8";
    client.query_opt(sql, &[]).await.unwrap().map(drop)
}

#[tokio::test]
async fn a_slow_commit_keeps_the_relay_awake() {
    let db = TestDb::new().await;
    let (client, watch) = (db.client().await, db.client().await);
    let receiver = Receiver::start().await;
    declare(&client, "c", &receiver, json!({})).await;
    let mut relay = Relay::of(&db).set("relay.poll_max", NEVER).start();
    relay.says("shard taken").await;
    eventually("the relay sleeps", async || asleep(&watch).await).await;
    // Others wake it meanwhile; it must not lie down beside a producer that rang and has not committed.
    client.batch_execute("begin").await.unwrap();
    emit_many(&client, "c", "slow", 8).await;
    emit_many(&watch, "c", "quick", 32).await;
    all_settled(&watch, 32).await;
    client.batch_execute("commit").await.unwrap();
    all_settled(&watch, 40).await;
}

#[tokio::test]
async fn behind_a_pooler_that_swallows_notifications_the_relay_polls() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let receiver = Receiver::start().await;
    declare(&client, "c", &receiver, json!({})).await;
    let (proxy, url) = PostgresProxy::before_postgres(db.url()).await;
    proxy.swallow_notifications();
    let mut relay = Relay::at(&url).set("relay.poll_max", NEVER).start();
    relay.says("the relay will poll").await;
    for n in 1..=20 {
        emit_many(&client, "c", "x", 1).await;
        all_settled(&client, n).await;
    }
}

#[tokio::test]
async fn a_cut_listening_session_is_made_anew() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let receiver = Receiver::start().await;
    declare(&client, "c", &receiver, json!({})).await;
    let mut relay = Relay::of(&db).set("relay.poll_max", NEVER).start();
    relay.says("shard taken").await;
    for n in 1..=10 {
        let sql = "select count(pg_terminate_backend(pid)) from pg_locks where locktype = 'advisory' and mode = 'ExclusiveLock'
                   and classid = fencepost.doorbell_class() and database = (select oid from pg_database where datname = current_database())";
        eventually("a sleeping session is cut", async || {
            (client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) > 0).then_some(())
        })
        .await;
        emit_many(&client, "c", "x", 1).await;
        all_settled(&client, n).await;
    }
}
