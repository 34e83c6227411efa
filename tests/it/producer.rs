//! The Rust client of the SQL functions.

use std::time::Duration;

use fencepost::model::key::TaskId;
use fencepost::model::token::CompletionToken;
use fencepost::producer::{self, Effect, ErrorKind, Lease, NewTask, Payload, Worker};
use serde_json::json;
use tokio_postgres::Client;

use crate::support::db::TestDb;
use crate::support::eventually;

const SECOND: Duration = Duration::from_secs(1);

fn worker(owner: &str) -> Worker {
    Worker::new(owner).kinds(&["work"])
}

fn effect() -> Effect {
    Effect::to("billing", Payload::Text("{ \"n\" : 1 }".into())).kind("paid")
}

async fn consumer(client: &Client) {
    let spec = json!({"kind": "http", "url": "http://127.0.0.1:9/"});
    client.query("select fencepost.declare_consumer('billing', $1)", &[&spec]).await.unwrap();
}

async fn claim_one(worker: &Worker, client: &Client) -> Lease {
    worker.claim(client, 1).await.unwrap().pop().expect("a task")
}

#[tokio::test]
async fn a_task_is_submitted_claimed_and_completed_with_its_effect() {
    let db = TestDb::new().await;
    let mut client = db.client().await;
    consumer(&client).await;
    let id = producer::submit(&client, &NewTask::new("work", json!({"n": 1}))).await.unwrap();
    assert!(worker("a").kinds(&["other"]).claim(&client, 9).await.unwrap().is_empty());
    let lease = claim_one(&worker("a"), &client).await;
    assert_eq!((&lease.task_id, lease.epoch.get(), lease.kind.as_str()), (&id, 1, "work"));
    assert_eq!((&lease.payload, lease.previous), (&json!({"n": 1}), None));
    let longer = lease.heartbeat(&client, 60 * SECOND).await.unwrap();
    assert!(longer > lease.expires_at);
    let tx = client.transaction().await.unwrap();
    assert_eq!(lease.complete(&tx, &[effect(), effect()], Some(&json!("done"))).await.unwrap(), 2);
    tx.commit().await.unwrap();
    let sql = "select key, convert_from(payload, 'UTF8') from fencepost.intended order by key";
    let stored: Vec<(String, String)> =
        client.query(sql, &[]).await.unwrap().iter().map(|row| (row.get(0), row.get(1))).collect();
    let body = "{ \"n\" : 1 }".to_owned();
    assert_eq!(stored, [(format!("{id}:1"), body.clone()), (format!("{id}:1:2"), body)]);
}

#[tokio::test]
async fn every_refusal_has_its_kind() {
    let db = TestDb::new().await;
    let mut client = db.client().await;
    consumer(&client).await;
    let id = TaskId::new("t").unwrap();
    let task = NewTask::new("work", json!({})).id(id.clone());
    producer::submit(&client, &task).await.unwrap();
    assert_eq!(producer::submit(&client, &task).await.unwrap(), id, "the same again changes nothing");
    let other = NewTask::new("work", json!({"other": true})).id(id);
    assert_eq!(producer::submit(&client, &other).await.unwrap_err().kind(), ErrorKind::IdTaken);

    let lease = claim_one(&worker("a"), &client).await;
    let cases = [
        (Effect::to("nobody", Payload::Text("x".into())), ErrorKind::UnknownConsumer),
        (effect().content_type("a\nb"), ErrorKind::Malformed),
        (Effect::to("billing", Payload::Bytes(vec![0; 2 << 20])), ErrorKind::TooLarge),
    ];
    for (bad, kind) in cases {
        let tx = client.transaction().await.unwrap();
        assert_eq!(lease.complete(&tx, &[bad], None).await.unwrap_err().kind(), kind);
    }
    let stranger = Lease { task_id: TaskId::new("unknown").unwrap(), ..lease.clone() };
    assert_eq!(stranger.release(&client, "x").await.unwrap_err().kind(), ErrorKind::UnknownTask);
    let other = Lease { owner: "b".into(), ..lease.clone() };
    let refused = other.complete_no_action(&client, "x").await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::LeaseLost);
    assert!(refused.to_string().contains("(OB001)"), "{refused}");
    lease.complete_no_action(&client, "nothing to do").await.unwrap();
    assert_eq!(lease.complete_no_action(&client, "again").await.unwrap_err().kind(), ErrorKind::AlreadyCompleted);

    let stop = "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()";
    db.client().await.execute(stop, &[]).await.unwrap();
    let cut = eventually("the connection is cut", async || worker("a").claim(&client, 1).await.err()).await;
    assert_eq!(cut.kind(), ErrorKind::Disconnected);
}

#[tokio::test]
async fn epochs_end_with_their_words_and_the_next_claim_hears_them() {
    let db = TestDb::new().await;
    let client = db.client().await;
    producer::submit(&client, &NewTask::new("work", json!({}))).await.unwrap();
    let worker = worker("a").lease(Duration::from_millis(50));
    claim_one(&worker, &client).await.release(&client, "not now").await.unwrap();
    let lease = claim_one(&worker, &client).await;
    assert_eq!((lease.epoch.get(), lease.previous), (2, Some(CompletionToken::Released)));
    lease.fail(&client, "again", Some(Duration::ZERO)).await.unwrap();
    let old = claim_one(&worker, &client).await;
    assert_eq!((old.epoch.get(), old.previous), (3, Some(CompletionToken::Failed)));
    let new = eventually("the lease expires", async || worker.claim(&client, 1).await.unwrap().pop()).await;
    assert_eq!((new.epoch.get(), new.previous), (4, Some(CompletionToken::Lost)));
    assert_eq!(old.heartbeat(&client, SECOND).await.unwrap_err().kind(), ErrorKind::LeaseLost);
    worker.report_failure(&client).await.unwrap();
    let row = client.query_one("select token from fencepost.workers where owner = 'a'", &[]).await.unwrap();
    assert_eq!(row.get::<_, String>(0), "failed");
    new.fail(&client, "for good", None).await.unwrap();
    let row = client.query_one("select string_agg(token, ' ' order by lease_epoch) from fencepost.completions", &[]);
    assert_eq!(row.await.unwrap().get::<_, String>(0), "released failed lost failed");
}

#[tokio::test]
async fn a_service_without_tasks_emits() {
    let db = TestDb::new().await;
    let mut client = db.client().await;
    consumer(&client).await;
    let tx = client.transaction().await.unwrap();
    let id = producer::emit(&tx, &[effect()], None).await.unwrap();
    tx.commit().await.unwrap();
    let row = client.query_one("select key from fencepost.intended", &[]).await.unwrap();
    assert_eq!(row.get::<_, String>(0), format!("{id}:1"));
}
