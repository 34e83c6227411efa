//! Leases under contention: claims that race, heartbeats, expiry, takeover.

use std::collections::{BTreeMap, HashSet};

use tokio_postgres::Client;

use super::{billing, claim, code, complete, one, refused, rows};
use crate::support::eventually;

async fn expired(c: &Client, task: &str) {
    let sql = format!("select lease_expires_at < clock_timestamp() from fencepost.tasks where task_id = '{task}'");
    eventually("the lease expires", async || (one(c, &sql).await == "t").then_some(())).await;
}

/// Sixteen connections claim twenty tasks some eight hundred times with leases that expire at once.
#[tokio::test(flavor = "multi_thread")]
async fn each_epoch_is_claimed_exactly_once() {
    let (db, c) = billing().await;
    c.batch_execute(
        "select fencepost.submit_task('k', '{}', 't' || n, max_claims => 1000000) from generate_series(1, 20) n",
    )
    .await
    .unwrap();
    let mut racing = Vec::new();
    for worker in 0..16 {
        let client = db.client().await;
        racing.push(tokio::spawn(async move {
            let mut claims = Vec::new();
            let sql =
                "select task_id, lease_epoch from fencepost.claim_tasks($1, max_tasks => $2, lease => '1 microsecond')";
            for turn in 0..50 {
                for row in client.query(sql, &[&format!("w{worker}"), &(1 + turn % 3)]).await.unwrap() {
                    claims.push((row.get::<_, String>(0), row.get::<_, i64>(1)));
                }
            }
            claims
        }));
    }
    let (mut seen, mut highest) = (HashSet::new(), BTreeMap::<String, i64>::new());
    for worker in racing {
        for (task, epoch) in worker.await.unwrap() {
            let top = highest.entry(task.clone()).or_default();
            *top = epoch.max(*top);
            assert!(seen.insert((task.clone(), epoch)), "{task}:{epoch} was claimed twice");
        }
    }
    assert!(seen.len() >= 400, "the race was no race: {} claims", seen.len());
    assert_eq!(seen.len() as i64, highest.values().sum::<i64>(), "an epoch was skipped or answered to nobody");
    let lost: i64 = one(&c, "select count(*) from fencepost.task_epochs where token = 'lost'").await.parse().unwrap();
    assert_eq!(lost, seen.len() as i64 - highest.len() as i64, "every epoch but the last of each task was taken over");
    // Nobody but the last owner completes.
    for (task, top) in &highest {
        let owner = one(&c, &format!("select owner from fencepost.tasks where task_id = '{task}'")).await;
        if *top > 1 {
            assert_eq!(code(&c, &complete(task, top - 1, &owner)).await, "OB001");
        }
        assert_eq!(one(&c, &complete(task, *top, &owner)).await, "1");
    }
}

/// Many connections share out many tasks: none is given to two, none is left.
#[tokio::test(flavor = "multi_thread")]
async fn a_crowd_shares_the_work_without_waiting() {
    let (db, c) = billing().await;
    c.batch_execute(
        "select fencepost.submit_task(case when n % 2 = 0 then 'even' else 'odd' end) from generate_series(1, 400) n",
    )
    .await
    .unwrap();
    let mut racing = Vec::new();
    for worker in 0..12 {
        let client = db.client().await;
        racing.push(tokio::spawn(async move {
            // A claim that waited for another's would run into this.
            client.batch_execute("set lock_timeout = '5s'").await.unwrap();
            let kinds = if worker % 3 == 0 { "null" } else { "'{even,odd}'" };
            let sql = format!("select task_id from fencepost.claim_tasks('w{worker}', {kinds}, 7)");
            let mut mine = Vec::new();
            loop {
                let rows = client.query(&sql, &[]).await.unwrap();
                if rows.is_empty() {
                    return mine;
                }
                mine.extend(rows.iter().map(|row| row.get::<_, String>(0)));
            }
        }));
    }
    let mut all = Vec::new();
    for worker in racing {
        all.extend(worker.await.unwrap());
    }
    // Rows another claim held at that moment are skipped: the last few may be left for the next turn.
    all.extend(rows(&c, "select task_id from fencepost.claim_tasks('last', max_tasks => 400)").await);
    assert_eq!(all.len(), 400);
    assert_eq!(all.iter().collect::<HashSet<_>>().len(), 400);
}

#[tokio::test]
async fn a_late_completion_is_accepted_and_flagged() {
    let (_db, c) = billing().await;
    c.batch_execute("select fencepost.submit_task('k', '{}', 't'), fencepost.submit_task('k', '{}', 'u')")
        .await
        .unwrap();
    rows(&c, "select from fencepost.claim_tasks('w', max_tasks => 2, lease => '20 milliseconds')").await;
    expired(&c, "t").await;
    expired(&c, "u").await;
    one(&c, &complete("t", 1, "w")).await;
    one(&c, "select fencepost.complete_task_no_action('u', 1, 'w', 'r')").await;
    assert_eq!(
        rows(&c, "select task_id, token, late from fencepost.completions order by 1").await,
        ["t|effects|t", "u|no_action|t"]
    );
}

#[tokio::test]
async fn a_lost_lease_is_refused_and_never_resurrected() {
    let (_db, c) = billing().await;
    c.batch_execute("select fencepost.submit_task('k', '{}', 't')").await.unwrap();
    rows(&c, "select from fencepost.claim_tasks('w1', lease => '20 milliseconds')").await;
    expired(&c, "t").await;
    let late = "select fencepost.heartbeat('t', 1, 'w1', '20 milliseconds') > clock_timestamp() - interval '1 s'";
    assert_eq!(one(&c, late).await, "t", "expired but taken by nobody: still ours");
    expired(&c, "t").await;
    assert_eq!(claim(&c, "t", "w2").await, 2);
    let row = "select owner, lease_epoch, lease_expires_at from fencepost.tasks";
    let taken = one(&c, row).await;
    let (state, message) = refused(&c, "select fencepost.heartbeat('t', 1, 'w1', '1 day')").await;
    assert_eq!(
        (state.as_str(), message.as_str()),
        ("OB001", "lease lost: task 't' is not leased to 'w1' under epoch 1")
    );
    for call in [
        "select fencepost.heartbeat('t', 2, 'w1')".to_string(),
        "select fencepost.heartbeat('t', 1, 'w2')".into(),
        complete("t", 1, "w1"),
        complete("t", 2, "w1"),
        "select fencepost.fail_task('t', 1, 'w1', 'r', '0 s')".into(),
        "select fencepost.fail_task('t', 1, 'w1', 'r')".into(),
        "select fencepost.release_task('t', 1, 'w1', 'r')".into(),
        "select fencepost.complete_task_no_action('t', 1, 'w1', 'r')".into(),
    ] {
        assert_eq!(code(&c, &call).await, "OB001", "{call}");
    }
    assert_eq!(one(&c, row).await, taken, "nothing of the refused calls is left");
    one(&c, &complete("t", 2, "w2")).await;
}

/// The same owner, restarted: its name does not let it through.
#[tokio::test]
async fn the_epoch_fences_a_worker_of_the_same_name() {
    let (_db, c) = billing().await;
    c.batch_execute("select fencepost.submit_task('k', '{}', 't')").await.unwrap();
    let again = "select lease_epoch from fencepost.claim_tasks('w', lease => '1 microsecond')";
    assert_eq!(one(&c, again).await, "1");
    assert_eq!(one(&c, again).await, "2");
    assert_eq!(code(&c, &complete("t", 1, "w")).await, "OB001");
    one(&c, &complete("t", 2, "w")).await;
}

#[tokio::test]
async fn a_heartbeat_extends_and_never_shortens() {
    let (_db, c) = billing().await;
    c.batch_execute("select fencepost.submit_task('k', '{}', 't')").await.unwrap();
    claim(&c, "t", "w").await;
    assert_eq!(one(&c, "select fencepost.heartbeat('t', 1, 'w', '1 hour') between clock_timestamp() + interval '59 min' and clock_timestamp() + interval '1 hour'").await, "t");
    assert_eq!(
        one(&c, "select fencepost.heartbeat('t', 1, 'w', '1 s') > clock_timestamp() + interval '59 min'").await,
        "t"
    );
    assert_eq!(code(&c, "select fencepost.heartbeat('t', 1, 'w', '-1 s')").await, "22023");
}

#[tokio::test]
async fn a_heartbeat_during_the_completion_answers_at_once() {
    let (db, a) = billing().await;
    let b = db.client().await;
    a.batch_execute("select fencepost.submit_task('k', '{}', 't')").await.unwrap();
    claim(&a, "t", "w").await;
    let expiry = one(&a, "select lease_expires_at from fencepost.tasks").await;
    a.batch_execute(&format!("begin; {}", complete("t", 1, "w"))).await.unwrap();
    // Were it to wait for the row, this would end it with an error.
    b.batch_execute("set lock_timeout = '10s'").await.unwrap();
    assert_eq!(one(&b, "select fencepost.heartbeat('t', 1, 'w', '1 day')").await, expiry);
    assert_eq!(code(&b, "select fencepost.heartbeat('t', 1, 'v', '1 day')").await, "OB001", "for its holder only");
    a.batch_execute("commit").await.unwrap();
    assert_eq!(code(&b, "select fencepost.heartbeat('t', 1, 'w')").await, "OB003");
}

/// Claims skip what another transaction holds, whatever it will do with it.
#[tokio::test]
async fn a_claim_does_not_take_what_is_being_completed() {
    let (db, a) = billing().await;
    let b = db.client().await;
    a.batch_execute("select fencepost.submit_task('k', '{}', 't')").await.unwrap();
    rows(&a, "select from fencepost.claim_tasks('w', lease => '1 microsecond')").await;
    a.batch_execute(&format!("begin; {}", complete("t", 1, "w"))).await.unwrap();
    b.batch_execute("set lock_timeout = '10s'").await.unwrap();
    assert_eq!(rows(&b, "select from fencepost.claim_tasks('v')").await.len(), 0);
    a.batch_execute("rollback").await.unwrap();
    assert_eq!(
        rows(&b, "select lease_epoch from fencepost.claim_tasks('v')").await,
        ["2"],
        "rolled back: the lease had expired"
    );
}

/// Two completions of one epoch at once: the second waits, then is told that it had been done.
#[tokio::test]
async fn twins_of_one_owner_complete_once() {
    let (db, a) = billing().await;
    let b = db.client().await;
    a.batch_execute("select fencepost.submit_task('k', '{}', 't')").await.unwrap();
    claim(&a, "t", "w").await;
    a.batch_execute(&format!("begin; {}", complete("t", 1, "w"))).await.unwrap();
    let pid = one(&b, "select pg_backend_pid()").await;
    let second = tokio::spawn(async move { code(&b, &complete("t", 1, "w")).await });
    let waits = format!("select wait_event_type = 'Lock' from pg_stat_activity where pid = {pid}");
    eventually("the second waits for the row", async || (one(&a, &waits).await == "t").then_some(())).await;
    a.batch_execute("commit").await.unwrap();
    assert_eq!(second.await.unwrap(), "OB003");
    assert_eq!(rows(&a, "select key from fencepost.intended").await, ["t:1"]);
}

#[tokio::test]
async fn bad_leases_are_refused() {
    let (_db, c) = billing().await;
    for args in [
        "''",
        "null",
        "'w', lease => '0 s'",
        "'w', lease => null",
        "'w', max_tasks => 0",
        "'w', max_tasks => null",
        "'w', lease => '1 year'",
    ] {
        assert_eq!(code(&c, &format!("select fencepost.claim_tasks({args})")).await, "22023", "{args}");
    }
    assert_eq!(code(&c, &format!("select fencepost.claim_tasks('{}')", "w".repeat(257))).await, "22023");
    assert_eq!(rows(&c, &format!("select from fencepost.claim_tasks('{}')", "w".repeat(256))).await.len(), 0);
}
