//! What an operator does while a relay runs, seen from the consumer.

use std::collections::VecDeque;
use std::future::{Ready, ready};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};

use super::{NOTHING, fencepost, json};
use crate::support::db::TestDb;
use crate::support::eventually;
use crate::support::process::Process;

/// A consumer that answers from a script, then 200, and keeps what it was sent.
#[derive(Clone, Default)]
struct Consumer {
    script: Arc<Mutex<VecDeque<u16>>>,
    seen: Arc<Mutex<Vec<(String, Bytes)>>>,
}

impl Consumer {
    async fn start(script: &[u16]) -> (Self, String) {
        let consumer = Self { script: Arc::new(Mutex::new(script.iter().copied().collect())), ..Self::default() };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        let router = Router::new().fallback(Self::answer).with_state(consumer.clone());
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        (consumer, url)
    }

    fn answer(State(consumer): State<Self>, headers: HeaderMap, body: Bytes) -> Ready<StatusCode> {
        consumer.seen.lock().unwrap().push((headers["webhook-id"].to_str().unwrap().into(), body));
        let status = consumer.script.lock().unwrap().pop_front().unwrap_or(200);
        ready(StatusCode::from_u16(status).unwrap())
    }

    fn seen(&self) -> Vec<(String, Bytes)> {
        self.seen.lock().unwrap().clone()
    }
}

/// A relay with one consumer; its process ends with the test.
async fn running(db: &TestDb, url: &str) -> Process {
    let path = std::env::temp_dir().join(format!("{}.live.toml", db.name()));
    let config = format!(
        "[retry]\nshort_budget = 1\n[[consumers]]\nname = 'a'\nkind = 'http'\nurl = '{url}'\nordering = 'key'\n"
    );
    std::fs::write(&path, config).unwrap();
    let env = [("DATABASE_URL", db.url()), ("FENCEPOST_CONFIG", path.to_str().unwrap())];
    let mut process = Process::start(&["run"], &env);
    process.says("consumer applied").await;
    std::fs::remove_file(path).unwrap();
    process
}

async fn emit(db: &TestDb, task: &str) {
    let sql = "select fencepost.emit('[{\"consumer\": \"a\", \"payload\": {\"n\": 1}, \"ordering_key\": \"k\"}]', $1)";
    db.client().await.query(sql, &[&task]).await.unwrap();
}

/// Waits until the delivery of `key` has this token.
async fn becomes(db: &TestDb, key: &str, token: &str) {
    let client = db.client().await;
    eventually(&format!("{key} becomes {token}"), async || {
        let row = client.query_one("select token from fencepost.deliveries_of($1)", &[&key]).await.unwrap();
        (row.get::<_, Option<String>>(0).as_deref() == Some(token)).then_some(())
    })
    .await;
}

async fn operator(db: &TestDb, args: &[&str]) {
    let args: Vec<&str> = args.iter().copied().chain(["--yes", "--reason", "test"]).collect();
    let (code, out, err) = fencepost(db, NOTHING, &args).await;
    assert_eq!(code, 0, "{args:?}: {out}{err}");
}

#[tokio::test]
async fn a_dead_delivery_is_retried_and_an_ended_one_replayed_with_key_and_bytes() {
    let db = TestDb::new().await;
    let (consumer, url) = Consumer::start(&[404]).await;
    let _relay = running(&db, &url).await;
    emit(&db, "t1").await;
    becomes(&db, "t1:1", "dead").await;
    operator(&db, &["deliveries", "retry", "t1:1"]).await;
    becomes(&db, "t1:1", "accepted").await;
    assert_eq!(consumer.seen().len(), 2);

    operator(&db, &["deliveries", "replay", "t1:1"]).await;
    eventually("it is sent again", async || (consumer.seen().len() == 3).then_some(())).await;
    let seen = consumer.seen();
    assert!(seen.iter().all(|request| *request == seen[0]), "the same key and bytes: {seen:?}");
    eventually("the replay has ended", async || {
        let waiting = json(&db, NOTHING, 0, &["deliveries", "list"]).await;
        waiting.as_array().unwrap().is_empty().then_some(())
    })
    .await;
}

#[tokio::test]
async fn skipping_the_head_of_a_key_lets_the_next_go() {
    let db = TestDb::new().await;
    let (consumer, url) = Consumer::start(&[404]).await;
    let _relay = running(&db, &url).await;
    emit(&db, "t1").await;
    becomes(&db, "t1:1", "dead").await;
    emit(&db, "t2").await;
    becomes(&db, "t2:1", "blocked").await;
    let told = json(&db, NOTHING, 0, &["effect", "t2:1"]).await;
    assert_eq!(told["waiting"][0]["why"][0]["code"], "behind", "{told}");
    operator(&db, &["deliveries", "skip", "t1:1"]).await;
    becomes(&db, "t2:1", "accepted").await;
    becomes(&db, "t1:1", "skipped").await;
    let keys: Vec<String> = consumer.seen().into_iter().map(|(key, _)| key).collect();
    assert_eq!(keys, ["t1:1", "t2:1"]);
}

#[tokio::test]
async fn a_paused_consumer_is_left_alone_until_it_is_resumed() {
    let db = TestDb::new().await;
    let (consumer, url) = Consumer::start(&[410]).await;
    let _relay = running(&db, &url).await;
    emit(&db, "t1").await;
    // 410 pauses the consumer: the relay says so where an operator looks.
    eventually("the consumer is paused", async || {
        let list = json(&db, NOTHING, 0, &["consumers", "list"]).await;
        (list[0]["state"] == "paused").then_some(())
    })
    .await;
    becomes(&db, "t1:1", "backlog").await;
    let told = json(&db, NOTHING, 0, &["effect", "t1:1"]).await;
    assert_eq!(told["waiting"][0]["why"][0]["code"], "paused", "{told}");
    assert_eq!(consumer.seen().len(), 1);
    assert_eq!(fencepost(&db, NOTHING, &["status"]).await.0, 1, "an alarm stands");
    operator(&db, &["consumers", "resume", "a"]).await;
    assert_eq!(json(&db, NOTHING, 0, &["alarms", "list"]).await, serde_json::json!([]));
    becomes(&db, "t1:1", "accepted").await;
}
