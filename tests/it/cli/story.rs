//! `fencepost task` and `fencepost effect`.

use super::{NOTHING, fencepost, json, with_consumers};
use crate::support::db::TestDb;

/// The reasons of the only delivery that waits.
async fn why(db: &TestDb, key: &str) -> Vec<String> {
    let told = json(db, NOTHING, 0, &["effect", key]).await;
    let reasons = told["waiting"][0]["why"].as_array().cloned().unwrap_or_default();
    reasons.iter().map(|why| why["code"].as_str().unwrap().to_string()).collect()
}

#[tokio::test]
async fn a_task_tells_its_epochs_and_effects() {
    let db = with_consumers(&["a", "b"]).await;
    let client = db.client().await;
    client
        .batch_execute(
            "select fencepost.submit_task('mail', '{}', 't1');
             select fencepost.claim_tasks('w1', null, 1, '1 millisecond');
             select pg_sleep(0.01);
             select fencepost.claim_tasks('w2');",
        )
        .await
        .unwrap();
    let told = json(&db, NOTHING, 0, &["task", "t1"]).await;
    assert_eq!((told["status"].as_str(), told["owner"].as_str()), (Some("running"), Some("w2")));
    assert!(told["events"].to_string().contains("epoch 1: lost"), "{told}");

    client
        .batch_execute(
            "select fencepost.complete_task('t1', 2, 'w2', '[{\"consumer\": \"a\", \"payload\": 1}, {\"consumer\": \"b\", \"payload\": 2}]')",
        )
        .await
        .unwrap();
    let (code, out, _) = fencepost(&db, NOTHING, &["task", "t1"]).await;
    assert_eq!(code, 0);
    for line in
        ["epoch 2: effects", "effect t1:2 ", "effect t1:2:2 ", "to b: did not finish yet", "no relay has read it yet"]
    {
        assert!(out.contains(line), "{line} is missing in {out}");
    }
    assert_eq!(fencepost(&db, NOTHING, &["task", "t9"]).await.0, 1);
    assert_eq!(fencepost(&db, NOTHING, &["task", "a b"]).await.0, 2);
}

#[tokio::test]
async fn an_effect_says_why_it_is_not_delivered() {
    let db = with_consumers(&["a"]).await;
    let client = db.client().await;
    client
        .batch_execute(
            "select fencepost.emit('[{\"consumer\": \"a\", \"payload\": 1, \"ordering_key\": \"k\"}]', 't1')",
        )
        .await
        .unwrap();
    assert_eq!(why(&db, "t1:1").await, ["no_relay", "unread"]);
    client
        .batch_execute(
            "update fencepost.shards set relay = gen_random_uuid(), lease_expires_at = clock_timestamp() + interval '1 hour'",
        )
        .await
        .unwrap();
    assert_eq!(why(&db, "t1:1").await, ["unread"]);
    client
        .batch_execute(
            "insert into fencepost.flights (shard, seq, epoch, base, target, first_id, last_id, deliveries)
             select f.shard, 1, 0, f.target, pg_current_snapshot(), e.id, e.id, 1
             from fencepost.flights f join fencepost.effects e using (shard) where f.seq = 0",
        )
        .await
        .unwrap();
    assert_eq!(why(&db, "t1:1").await, ["in_flight"]);
    client
        .batch_execute("update fencepost.flights set token = 'done', closed_at = clock_timestamp() where seq = 1")
        .await
        .unwrap();
    assert_eq!(why(&db, "t1:1").await, ["unaccounted"]);
    client
        .batch_execute("insert into fencepost.lags (shard, consumer_id, from_seq, to_seq) select shard, 1, 1, 1 from fencepost.flights where seq = 1")
        .await
        .unwrap();
    assert_eq!(why(&db, "t1:1").await, ["lagging"]);

    client
        .batch_execute(
            "delete from fencepost.lags;
             insert into fencepost.attempts (effect_id, consumer_id, attempt, ended, token, status, phase, bytes_left, took_ms, error)
             select id, 1, 1, true, 'ambiguous', null, 'wait', true, 15000, 'timeout' from fencepost.effects;
             insert into fencepost.parked (effect_id, consumer_id, shard, ordering_key, state, attempts, next_attempt_at, reason)
             select id, 1, shard, ordering_key, 'retry', 1, clock_timestamp() + interval '1 hour', 'timeout' from fencepost.effects;
             select fencepost.emit('[{\"consumer\": \"a\", \"payload\": 1, \"ordering_key\": \"k\"}]', 't2');
             insert into fencepost.parked (effect_id, consumer_id, shard, ordering_key, state)
             select id, 1, shard, ordering_key, 'blocked' from fencepost.effects where task_id = 't2'",
        )
        .await
        .unwrap();
    assert_eq!(why(&db, "t1:1").await, ["retry"]);
    let (_, out, _) = fencepost(&db, NOTHING, &["effect", "t1:1"]).await;
    for line in
        ["attempt 1: ambiguous", "until wait, bytes may have left, 15000 ms, timeout", "the next attempt is due in 59m"]
    {
        assert!(out.contains(line), "{line} is missing in {out}");
    }
    assert_eq!(why(&db, "t2:1").await, ["behind", "blocked"]);
    let (_, out, _) = fencepost(&db, NOTHING, &["effect", "t2:1", "--consumer", "a"]).await;
    assert!(out.contains("t1:1 waits before it (retry)"), "{out}");

    client
        .batch_execute(
            "update fencepost.consumers set paused = true, paused_reason = '410', not_before = clock_timestamp() + interval '1 hour'",
        )
        .await
        .unwrap();
    assert_eq!(why(&db, "t1:1").await, ["paused", "not_before", "retry"]);
}

#[tokio::test]
async fn an_effect_tells_what_ended_it_and_who_intervened() {
    let db = with_consumers(&["a"]).await;
    let client = db.client().await;
    client
        .batch_execute(
            "select fencepost.emit('[{\"consumer\": \"a\", \"payload\": 1}]', 't1');
             insert into fencepost.parked (effect_id, consumer_id, shard, state) select id, 1, shard, 'in_doubt' from fencepost.effects",
        )
        .await
        .unwrap();
    let resolve = ["deliveries", "resolve", "t1:1", "--as", "applied", "--yes", "--reason", "seen in their books"];
    assert_eq!(fencepost(&db, NOTHING, &resolve).await.0, 0);
    let (code, out, _) = fencepost(&db, NOTHING, &["effect", "t1:1"]).await;
    assert_eq!(code, 0);
    for text in
        ["to a: operator:applied", "ended: operator:applied", "deliveries resolve as applied", "seen in their books"]
    {
        assert!(out.contains(text), "{text} is missing in {out}");
    }
    assert!(!out.contains("->"), "it waits for nothing: {out}");
    assert_eq!(fencepost(&db, NOTHING, &["effect", "t1:2"]).await.0, 1);
    assert_eq!(fencepost(&db, NOTHING, &["effect", "t1"]).await.0, 2);
}

#[tokio::test]
async fn a_task_is_cancelled_or_reopened_with_a_reason() {
    let db = with_consumers(&["a"]).await;
    let client = db.client().await;
    let yes = ["--yes", "--reason", "wrong input"];
    let task = async |id: &str, args: &[&str]| {
        let args: Vec<&str> = ["task", id].iter().chain(args).chain(&yes).copied().collect();
        fencepost(&db, NOTHING, &args).await
    };
    client.batch_execute("select fencepost.submit_task('mail', '{}', 't1')").await.unwrap();
    let (code, out, _) = fencepost(&db, NOTHING, &["task", "t1", "--cancel"]).await;
    assert!(code == 2 && out.contains("waits for a worker"), "shown, not done: {out}");
    assert_eq!(task("t1", &["--cancel"]).await.0, 0);
    let (code, _, err) = task("t1", &["--cancel"]).await;
    assert!(code == 1 && err.contains("t1 is failed"), "{err}");

    client.batch_execute("select fencepost.emit('[{\"consumer\": \"a\", \"payload\": 1}]', 't2')").await.unwrap();
    let (code, _, err) = task("t2", &["--reopen"]).await;
    assert!(code == 1 && err.contains("still waits"), "{err}");
    assert_eq!(task("t2", &["--reopen", "--force"]).await.0, 0);
    let told = json(&db, NOTHING, 0, &["task", "t2"]).await;
    assert_eq!(told["status"], "ready");
    assert!(told["events"].to_string().contains("reopen_task"), "{told}");
    assert_eq!(told["effects"][0]["key"], "t2:1", "what committed stays");
    assert_eq!(task("t2", &["--force"]).await.0, 2);
    let sql = "select string_agg(action || ' ' || reason, '; ' order by id) from fencepost.audit_log where object in ('t1', 't2')";
    let audit: String = client.query_one(sql, &[]).await.unwrap().get(0);
    assert_eq!(audit, "task cancel wrong input; reopen_task wrong input");
}
