//! All or nothing with the caller's own rows: rollbacks, savepoints, two-phase commits, isolation, the doorbell.

use tokio::sync::mpsc;
use tokio_postgres::AsyncMessage;

use super::{EFFECT, billing, claim, code, complete, one, rows};
use crate::support::PATIENCE;

const LEFT: &str = "select (select count(*) from fencepost.effects), (select count(*) from fencepost.ledger), (select string_agg(status || lease_epoch || coalesce(token, ''), ',') from fencepost.tasks), (select count(*) from fencepost.task_epochs)";

#[tokio::test]
async fn a_rolled_back_completion_leaves_nothing() {
    let (_db, c) = billing().await;
    c.batch_execute("create table public.orders (id int); select fencepost.submit_task('k', '{}', 't')").await.unwrap();
    claim(&c, "t", "w").await;
    let before = one(&c, LEFT).await;
    c.batch_execute(&format!("begin; insert into public.orders values (1); {}; rollback", complete("t", 1, "w")))
        .await
        .unwrap();
    assert_eq!(one(&c, LEFT).await, before);
    c.batch_execute(&format!("begin; insert into public.orders values (1); {}; commit", complete("t", 1, "w")))
        .await
        .unwrap();
    assert_eq!(one(&c, LEFT).await, "1|0|completed1effects|0");
    assert_eq!(one(&c, "select count(*) from public.orders").await, "1");
}

/// One bad effect among good ones, an unrouted one included: the refused call leaves nothing, even where the caller
/// goes on.
#[tokio::test]
async fn nothing_of_a_refused_call_survives() {
    let (_db, c) = billing().await;
    c.batch_execute("create table public.orders (id int); select fencepost.submit_task('k', '{}', 't')").await.unwrap();
    claim(&c, "t", "w").await;
    let before = one(&c, LEFT).await;
    let bad = r#"select fencepost.complete_task('t', 1, 'w', '[{"topic": "nobody", "payload": 1}, {"consumer": "billing", "payload": 1}, {"consumer": "typo", "payload": 1}]')"#;
    assert_eq!(code(&c, bad).await, "OB002");
    assert_eq!(one(&c, LEFT).await, before);

    // The trap the guide warns of: caught at a savepoint, the business rows commit without their effect.
    c.batch_execute("begin; insert into public.orders values (1); savepoint s").await.unwrap();
    assert_eq!(code(&c, bad).await, "OB002");
    assert_eq!(code(&c, "select 1").await, "25P02", "the error aborts to the innermost savepoint");
    c.batch_execute("rollback to s; commit").await.unwrap();
    assert_eq!(one(&c, "select count(*) from public.orders").await, "1");
    assert_eq!(one(&c, LEFT).await, before);
    assert_eq!(one(&c, &complete("t", 1, "w")).await, "1", "the lease is still held");
}

#[tokio::test]
async fn a_completion_under_a_released_savepoint_commits() {
    let (_db, c) = billing().await;
    let sql = format!(
        "begin; savepoint a; select fencepost.emit('{EFFECT}', 'a'); release a;
         savepoint b; select fencepost.emit('{EFFECT}', 'b'); rollback to b;
         select fencepost.emit('{EFFECT}', 'c'); commit"
    );
    c.batch_execute(&sql).await.unwrap();
    assert_eq!(rows(&c, "select key from fencepost.intended order by 1").await, ["a:1", "c:1"]);
    assert_eq!(
        one(&c, "select count(distinct xid) from fencepost.effects").await,
        "1",
        "the top transaction's id, under savepoints too"
    );
}

/// What the guide advises against, and why.
#[tokio::test]
async fn above_read_committed_a_heartbeat_fails_the_completion() {
    let (db, a) = billing().await;
    let b = db.client().await;
    a.batch_execute("select fencepost.submit_task('k', '{}', 't')").await.unwrap();
    claim(&a, "t", "w").await;
    a.batch_execute("begin isolation level repeatable read; select 1").await.unwrap();
    one(&b, "select fencepost.heartbeat('t', 1, 'w', '1 hour') is not null").await;
    assert_eq!(code(&a, &complete("t", 1, "w")).await, "40001");
    a.batch_execute("rollback; begin; select 1").await.unwrap();
    one(&b, "select fencepost.heartbeat('t', 1, 'w', '2 hours') is not null").await;
    assert_eq!(one(&a, &complete("t", 1, "w")).await, "1");
    a.batch_execute("commit").await.unwrap();
}

#[tokio::test]
async fn the_doorbell_rings_once_per_shard_and_only_for_a_sleeper() {
    let (db, c) = billing().await;
    let (heard, mut notifications) = mpsc::unbounded_channel();
    let relay = db
        .database()
        .connect_with(move |message| {
            if let AsyncMessage::Notification(n) = message {
                let _ = heard.send((n.channel().to_string(), n.payload().to_string()));
            }
        })
        .await
        .unwrap();
    let shard = one(&c, "select fencepost.shard_of('t')").await;
    let bell = format!("select pg_try_advisory_lock(fencepost.doorbell_class(), {shard})");
    relay.batch_execute("listen fencepost_doorbell").await.unwrap();

    // Awake: no notification, and it cannot fall asleep while a producer is about to commit.
    c.batch_execute(&format!("begin; select fencepost.emit('{EFFECT}', 't')")).await.unwrap();
    assert_eq!(one(&relay, &bell).await, "f");
    c.batch_execute("rollback").await.unwrap();
    assert_eq!(one(&relay, &bell).await, "t", "asleep now");

    let three = r#"select fencepost.emit('[{"consumer": "billing", "payload": 1}, {"consumer": "billing", "payload": 2}, {"consumer": "billing", "payload": 3}]', 't')"#;
    c.batch_execute(&format!("begin; set local fencepost.doorbell = off; {three}; rollback")).await.unwrap();
    c.batch_execute(three).await.unwrap();
    c.batch_execute("notify fencepost_doorbell, 'end'").await.unwrap();
    let mut all = Vec::new();
    while all.last().is_none_or(|(_, payload)| payload != "end") {
        all.push(tokio::time::timeout(PATIENCE, notifications.recv()).await.unwrap().unwrap());
    }
    assert_eq!(all, [("fencepost_doorbell".to_string(), shard), ("fencepost_doorbell".into(), "end".into())]);
}

#[tokio::test]
async fn two_phase_producers_switch_the_doorbell_off() {
    let (db, c) = billing().await;
    let relay = db.client().await;
    let shard = one(&c, "select fencepost.shard_of('t')").await;
    one(&relay, &format!("select pg_advisory_lock(fencepost.doorbell_class(), {shard}) is null")).await;
    let gid = format!("{}-1", db.name());
    let transaction = format!("begin; select fencepost.emit('{EFFECT}', 't')");

    c.batch_execute(&transaction).await.unwrap();
    assert_eq!(code(&c, &format!("prepare transaction '{gid}'")).await, "0A000", "it has rung for a sleeper");

    c.batch_execute(&format!("set fencepost.doorbell = off; {transaction}; prepare transaction '{gid}'"))
        .await
        .unwrap();
    assert_eq!(one(&c, "select count(*) from fencepost.effects").await, "0");
    c.batch_execute(&format!("commit prepared '{gid}'")).await.unwrap();
    assert_eq!(rows(&c, "select key from fencepost.intended").await, ["t:1"]);
}

#[tokio::test]
async fn a_test_can_look_inside_the_transaction_it_rolls_back() {
    let (_db, c) = billing().await;
    c.batch_execute("begin; select fencepost.submit_task('k', '{}', 't')").await.unwrap();
    claim(&c, "t", "w").await;
    one(&c, &complete("t", 1, "w")).await;
    assert_eq!(
        one(&c, "select key, consumer, convert_from(payload, 'UTF8') from fencepost.intended").await,
        "t:1|billing|1"
    );
    assert_eq!(one(&c, "select task_id, lease_epoch, token from fencepost.completions").await, "t|1|effects");
    c.batch_execute("rollback").await.unwrap();
    assert_eq!(one(&c, LEFT).await, "0|0|-|0");
}
