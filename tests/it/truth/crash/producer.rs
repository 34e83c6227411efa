//! The producer dies, or its answers do.

use serde_json::json;
use tokio_postgres::error::SqlState;

use crate::support::postgres_proxy::PostgresProxy;
use crate::support::receiver::Receiver;
use crate::truth::rig::{Rig, http};

#[tokio::test]
async fn a_producer_that_dies_before_its_commit_leaves_nothing() {
    let receiver = Receiver::start().await;
    let rig = Rig::new(&http("shop", &receiver.url(), "")).await;
    let _relay = rig.relay().await;
    let mut producer = rig.connect().await;
    let pid: i32 = producer.query_one("select pg_backend_pid()", &[]).await.unwrap().get(0);
    let tx = producer.transaction().await.unwrap();
    let effects = json!([{ "consumer": "shop", "payload": 1 }]);
    tx.execute("select fencepost.record_completion('task', 1, $1)", &[&effects]).await.unwrap();
    rig.client.execute("select pg_terminate_backend($1)", &[&pid]).await.unwrap();
    assert!(tx.commit().await.is_err(), "the producer died first");

    // A later one arrives, so the relay has read past it.
    rig.emit("later", "shop").await;
    rig.becomes("later:1", "shop", "applied").await;
    assert_eq!(rig.count("select count(*) from fencepost.effects").await, 1);
    assert_eq!(receiver.requests().len(), 1);
}

#[tokio::test]
async fn a_commit_answered_to_nobody_is_known_by_its_repetition() {
    let receiver = Receiver::start().await;
    let rig = Rig::new(&http("shop", &receiver.url(), "")).await;
    let _relay = rig.relay().await;
    let (proxy, url) = PostgresProxy::before_postgres(rig.url()).await;
    let (mut producer, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    let effects = json!([{ "consumer": "shop", "payload": 1 }]);
    let tx = producer.transaction().await.unwrap();
    tx.execute("select fencepost.record_completion('task', 1, $1)", &[&effects]).await.unwrap();
    proxy.swallow(b"COMMIT\0");
    assert!(tx.commit().await.is_err(), "the producer cannot know");
    assert_eq!(proxy.cuts(), 1, "its answer was cut");

    // Whoever repeats the same completion learns that it had committed.
    let repeated = rig.client.execute("select fencepost.record_completion('task', 1, $1)", &[&effects]).await;
    assert_eq!(repeated.unwrap_err().code(), Some(&SqlState::from_code("OB003")));
    rig.becomes("task:1", "shop", "applied").await;
    rig.rests().await;
    assert_eq!(receiver.requests().len(), 1, "one effect");
}

#[tokio::test]
async fn a_worker_that_lost_its_lease_commits_nothing() {
    let receiver = Receiver::start().await;
    let rig = Rig::new(&http("shop", &receiver.url(), "")).await;
    let _relay = rig.relay().await;
    let mut slow = rig.connect().await;
    slow.batch_execute("create table charges (worker text); select fencepost.submit_task('kind', '{}', 'task')")
        .await
        .unwrap();
    let claim = "select lease_epoch from fencepost.claim_tasks($1, lease => interval '1 ms')";
    assert_eq!(slow.query_one(claim, &[&"slow"]).await.unwrap().get::<_, i64>(0), 1);
    let complete = "select fencepost.complete_task('task', $1, $2, $3)";
    let effects = |worker: &str| json!([{ "consumer": "shop", "payload": worker }]);

    let fast = rig.connect().await;
    let claim = "select lease_epoch from fencepost.claim_tasks($1)";
    assert_eq!(fast.query_one(claim, &[&"fast"]).await.unwrap().get::<_, i64>(0), 2, "the lease was taken over");
    let tx = slow.transaction().await.unwrap();
    tx.batch_execute("insert into charges values ('slow')").await.unwrap();
    let refused = tx.execute(complete, &[&1i64, &"slow", &effects("slow")]).await.unwrap_err();
    assert_eq!(refused.code(), Some(&SqlState::from_code("OB001")));
    drop(tx);
    fast.execute(complete, &[&2i64, &"fast", &effects("fast")]).await.unwrap();

    rig.becomes("task:2", "shop", "applied").await;
    rig.rests().await;
    assert_eq!(
        receiver.requests().iter().map(|r| (r.key(), r.body.clone())).collect::<Vec<_>>(),
        [("task:2".into(), b"\"fast\"".to_vec())]
    );
    assert_eq!(rig.count("select count(*) from charges").await, 0, "its business rows went with it");
    assert_eq!(rig.count("select count(*) from fencepost.completions where token = 'lost'").await, 1);
}
