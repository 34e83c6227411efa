//! Completions of tasks that are leased elsewhere, and effects without tasks.

use super::{EFFECT, billing, claim, code, complete, one, refused, rows};
use crate::support::eventually;

fn record(task: &str, epoch: i64) -> String {
    format!("select fencepost.record_completion('{task}', {epoch}, '{EFFECT}')")
}

#[tokio::test]
async fn one_completion_per_task_id() {
    let (_db, c) = billing().await;
    assert_eq!(one(&c, &record("t", 7)).await, "1");
    assert_eq!(rows(&c, "select key from fencepost.intended").await, ["t:7"]);
    for epoch in [1, 6, 7, 8] {
        let (state, message) = refused(&c, &record("t", epoch)).await;
        assert_eq!(
            (state.as_str(), message.as_str()),
            ("OB003", "task 't' has already completed under epoch 7: effects")
        );
    }
    one(&c, "select fencepost.reopen_task('t', 'again', true)").await;
    assert_eq!(code(&c, &record("t", 6)).await, "OB001", "below the highest known");
    assert_eq!(code(&c, &record("t", 7)).await, "OB003", "the epoch that completed");
    assert_eq!(one(&c, &record("t", 9)).await, "1");
    assert_eq!(
        rows(&c, "select lease_epoch, owner, token, late from fencepost.completions order by 1").await,
        ["7|-|effects|f", "9|-|effects|f"]
    );
    assert_eq!(rows(&c, "select key from fencepost.intended order by 1").await, ["t:7", "t:9"]);
}

#[tokio::test]
async fn a_lease_held_here_is_not_bypassed() {
    let (_db, c) = billing().await;
    c.batch_execute("select fencepost.submit_task('k', '{}', 't')").await.unwrap();
    claim(&c, "t", "w").await;
    assert_eq!(code(&c, &record("t", 1)).await, "OB001");
    assert_eq!(code(&c, &record("t", 2)).await, "OB001");
    one(&c, &complete("t", 1, "w")).await;
    assert_eq!(code(&c, &record("t", 2)).await, "OB003");
}

#[tokio::test]
async fn bad_arguments_are_named() {
    let (_db, c) = billing().await;
    assert_eq!(code(&c, &record("t", 0)).await, "22023");
    assert_eq!(code(&c, &format!("select fencepost.record_completion(null, 1, '{EFFECT}')")).await, "22023");
    assert_eq!(code(&c, &record("a b", 1)).await, "23514");
    assert_eq!(code(&c, "select fencepost.record_completion('t', 1, '[]')").await, "OB004");
    assert_eq!(one(&c, "select count(*) from fencepost.tasks").await, "0");
}

#[tokio::test]
async fn emit_completes_a_new_task_id() {
    let (_db, c) = billing().await;
    let id = one(&c, &format!("select fencepost.emit('{EFFECT}')")).await;
    assert_eq!(rows(&c, "select key from fencepost.intended").await, [format!("{id}:1")]);
    let named = format!("select fencepost.emit('{EFFECT}', 'order-1')");
    assert_eq!(one(&c, &named).await, "order-1");
    assert_eq!(code(&c, &named).await, "OB003", "it had committed");
    c.batch_execute("select fencepost.submit_task('k', '{}', 'order-2')").await.unwrap();
    assert_eq!(code(&c, &format!("select fencepost.emit('{EFFECT}', 'order-2')")).await, "OB007", "a task of its own");
    assert_eq!(one(&c, "select status from fencepost.tasks where task_id = 'order-2'").await, "ready");
}

/// Two services record the same attempt at once: one waits, and is refused.
#[tokio::test]
async fn recording_races_end_with_one() {
    let (db, a) = billing().await;
    let b = db.client().await;
    a.batch_execute(&format!("begin; {}", record("t", 1))).await.unwrap();
    let pid = one(&b, "select pg_backend_pid()").await;
    let second = tokio::spawn(async move { code(&b, &record("t", 2)).await });
    let waits = format!("select wait_event_type = 'Lock' from pg_stat_activity where pid = {pid}");
    eventually("the second waits for the first", async || (one(&a, &waits).await == "t").then_some(())).await;
    a.batch_execute("commit").await.unwrap();
    assert_eq!(second.await.unwrap(), "OB003");
    assert_eq!(rows(&a, "select key from fencepost.intended").await, ["t:1"]);
}
