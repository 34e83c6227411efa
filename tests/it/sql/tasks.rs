//! The life of a task: submitted, claimed, ended, run again.

use super::{billing, claim, code, complete, one, refused, rows};

#[tokio::test]
async fn submitting_the_same_work_again_changes_nothing() {
    let (_db, c) = billing().await;
    let submit =
        |id: &str, kind: &str, payload: &str| format!("select fencepost.submit_task('{kind}', '{payload}', '{id}')");
    assert_eq!(one(&c, &submit("t", "mail", r#"{"a": 1, "b": 2}"#)).await, "t");
    assert_eq!(one(&c, &submit("t", "mail", r#"{"b": 2,   "a": 1}"#)).await, "t", "the same JSON in another spelling");
    assert_eq!(code(&c, &submit("t", "mail", r#"{"a": 2}"#)).await, "OB007");
    assert_eq!(code(&c, &submit("t", "post", r#"{"a": 1, "b": 2}"#)).await, "OB007");
    assert_eq!(
        one(&c, "select count(*), min(kind), min(payload::text) from fencepost.tasks").await,
        r#"1|mail|{"a": 1, "b": 2}"#
    );

    let epoch = claim(&c, "t", "w").await;
    one(&c, &complete("t", epoch, "w")).await;
    assert_eq!(one(&c, &submit("t", "mail", r#"{"a": 1, "b": 2}"#)).await, "t", "a completed task is not run again");
    assert_eq!(rows(&c, "select from fencepost.claim_tasks('w')").await.len(), 0);
}

#[tokio::test]
async fn a_task_without_an_id_gets_a_uuid_that_grows() {
    let (_db, c) = billing().await;
    let ids = rows(&c, "select fencepost.submit_task('k') from generate_series(1, 3)").await;
    for id in &ids {
        let id: uuid::Uuid = id.parse().unwrap();
        assert_eq!(id.get_version_num(), 7);
    }
    let at: i64 = one(&c, &format!("select (extract(epoch from clock_timestamp()) * 1000)::bigint - ('x' || replace(left('{}', 13), '-', ''))::bit(48)::bigint", ids[0])).await.parse().unwrap();
    assert!((0..60_000).contains(&at), "not the database's clock: {at} ms off");
}

#[tokio::test]
async fn claims_come_in_order_of_run_at_and_heed_kinds_and_ids() {
    let (_db, c) = billing().await;
    for (id, kind, at) in [("c", "x", "3"), ("a", "y", "1"), ("b", "x", "2")] {
        c.batch_execute(&format!("select fencepost.submit_task('{kind}', '{{}}', '{id}', '2020-01-0{at}Z')"))
            .await
            .unwrap();
    }
    c.batch_execute("select fencepost.submit_task('x', '{}', 'later', clock_timestamp() + interval '1 hour')")
        .await
        .unwrap();
    let claimed = |args: &str| format!("select task_id from fencepost.claim_tasks('w', {args})");
    assert_eq!(rows(&c, &claimed("'{z}', 9")).await.len(), 0);
    assert_eq!(rows(&c, &claimed("task_ids => '{later}'")).await.len(), 0, "not before run_at, by name either");
    assert_eq!(rows(&c, &claimed("'{x}', 1")).await, ["b"]);
    assert_eq!(rows(&c, &claimed("'{y}', task_ids => '{c}'")).await.len(), 0, "kinds and task_ids both hold");
    assert_eq!(rows(&c, &claimed("null, 9")).await, ["a", "c"]);
}

#[tokio::test]
async fn max_tasks_is_a_limit_over_expired_and_ready_tasks_of_many_kinds() {
    let (_db, c) = billing().await;
    c.batch_execute(
        "select fencepost.submit_task(k, '{}', k || n) from unnest('{x,y,z}'::text[]) k, generate_series(1, 5) n",
    )
    .await
    .unwrap();
    assert_eq!(rows(&c, "select from fencepost.claim_tasks('w', '{x}', 3, '1 microsecond')").await.len(), 3);
    let claimed = rows(&c, "select task_id, previous from fencepost.claim_tasks('w', '{x,y,x}', 4)").await;
    assert_eq!(claimed.len(), 4);
    assert_eq!(
        claimed.iter().filter(|row| row.ends_with("|lost")).count(),
        3,
        "expired leases come first: {claimed:?}"
    );
    assert_eq!(rows(&c, "select from fencepost.claim_tasks('w', '{x,y,z}', 10000)").await.len(), 11);
}

#[tokio::test]
async fn previous_says_how_the_epoch_before_ended() {
    let (_db, c) = billing().await;
    c.batch_execute("select fencepost.submit_task('k', '{}', 't')").await.unwrap();
    let next = "select lease_epoch, previous from fencepost.claim_tasks('w', lease => '1 microsecond')";
    assert_eq!(one(&c, next).await, "1|-");
    assert_eq!(one(&c, next).await, "2|lost");
    one(&c, "select fencepost.fail_task('t', 2, 'w', 'no', '0 s')").await;
    assert_eq!(one(&c, next).await, "3|failed");
    one(&c, "select fencepost.release_task('t', 3, 'w', 'shutting down')").await;
    assert_eq!(one(&c, next).await, "4|released");
    assert_eq!(
        rows(&c, "select lease_epoch, owner, token, reason, late from fencepost.completions order by 1").await,
        ["1|w|lost|-|f", "2|w|failed|no|t", "3|w|released|shutting down|t"]
    );
}

#[tokio::test]
async fn a_task_that_kills_its_workers_stops() {
    let (_db, c) = billing().await;
    c.batch_execute(
        "select fencepost.submit_task('k', '{}', 't', max_claims => 2), fencepost.submit_task('k', '{}', 'u')",
    )
    .await
    .unwrap();
    let next =
        "select task_id, lease_epoch from fencepost.claim_tasks('w', lease => '1 microsecond', task_ids => '{t}')";
    assert_eq!(one(&c, next).await, "t|1");
    assert_eq!(one(&c, next).await, "t|2");
    // One that has no claims left does not hide the next in line.
    assert_eq!(one(&c, "select task_id from fencepost.claim_tasks('w')").await, "u");
    assert_eq!(
        one(&c, "select status, token, reason from fencepost.tasks where task_id = 't'").await,
        "failed|failed|claims_exhausted"
    );
    assert_eq!(code(&c, &complete("t", 2, "w")).await, "OB001", "its last owner lost the lease");
    assert_eq!(
        rows(&c, "select lease_epoch, token, reason from fencepost.completions where task_id = 't' order by 1").await,
        ["1|lost|-", "2|lost|-", "3|failed|claims_exhausted"]
    );
    one(&c, "select fencepost.reopen_task('t', 'the worker is mended')").await;
    assert_eq!(one(&c, next).await, "t|4", "re-opened with all its claims");
}

#[tokio::test]
async fn failing_for_good_and_failing_with_a_retry() {
    let (_db, c) = billing().await;
    c.batch_execute("select fencepost.submit_task('k', '{}', 't'), fencepost.submit_task('k', '{}', 'u')")
        .await
        .unwrap();
    claim(&c, "t", "w").await;
    claim(&c, "u", "w").await;
    one(&c, "select fencepost.fail_task('t', 1, 'w', 'disk full')").await;
    one(&c, "select fencepost.fail_task('u', 1, 'w', 'busy', '1 hour')").await;
    assert_eq!(
        rows(&c, "select task_id, status, token, run_at > clock_timestamp() + interval '59 minutes' from fencepost.tasks order by 1").await,
        ["t|failed|failed|f", "u|ready|-|t"]
    );
    assert_eq!(
        rows(&c, "select from fencepost.claim_tasks('w', max_tasks => 9)").await.len(),
        0,
        "an hour has not passed"
    );
    let (state, message) = refused(&c, "select fencepost.fail_task('t', 1, 'w', 'disk full')").await;
    assert_eq!((state.as_str(), message.as_str()), ("OB003", "epoch 1 of task 't' has already completed: failed"));
    assert_eq!(code(&c, "select fencepost.fail_task('u', 1, 'w', 'busy', '1 hour')").await, "OB003");
    assert_eq!(
        code(&c, &complete("u", 1, "w")).await,
        "OB001",
        "a failed epoch never reads as a completion that committed"
    );
    assert_eq!(code(&c, "select fencepost.fail_task('u', 1, 'w', 'x', '-1 s')").await, "22023");
}

#[tokio::test]
async fn nothing_to_say_is_said() {
    let (_db, c) = billing().await;
    c.batch_execute("select fencepost.submit_task('k', '{}', 't')").await.unwrap();
    claim(&c, "t", "w").await;
    assert_eq!(code(&c, "select fencepost.complete_task('t', 1, 'w', '[]')").await, "OB004");
    assert_eq!(code(&c, "select fencepost.complete_task('t', 1, 'w', null)").await, "OB004");
    assert_eq!(code(&c, "select fencepost.complete_task_no_action('t', 1, 'w', '')").await, "22023");
    one(&c, "select fencepost.complete_task_no_action('t', 1, 'w', 'already shipped')").await;
    assert_eq!(one(&c, "select token, reason, late from fencepost.completions").await, "no_action|already shipped|f");
    assert_eq!(code(&c, &complete("t", 1, "w")).await, "OB003");
    assert_eq!(code(&c, "select fencepost.heartbeat('t', 1, 'w')").await, "OB003");
}

#[tokio::test]
async fn errors_come_in_the_promised_precedence() {
    let (_db, c) = billing().await;
    c.batch_execute("select fencepost.submit_task('k', '{}', 't')").await.unwrap();
    assert_eq!(code(&c, &complete("nobody", 1, "w")).await, "OB006");
    assert_eq!(code(&c, &complete("t", 1, "w")).await, "OB001", "never claimed");
    claim(&c, "t", "w").await;
    assert_eq!(code(&c, &complete("t", 1, "v")).await, "OB001", "another owner");
    assert_eq!(code(&c, &complete("t", 2, "w")).await, "OB001", "another epoch");
    assert_eq!(one(&c, &complete("t", 1, "w")).await, "1");
    for call in [
        complete("t", 1, "w"),
        complete("t", 1, "v"),
        "select fencepost.complete_task_no_action('t', 1, 'w', 'r')".into(),
        "select fencepost.fail_task('t', 1, 'w', 'r')".into(),
        "select fencepost.fail_task('t', 1, 'w', 'r', '1 s')".into(),
        "select fencepost.release_task('t', 1, 'w', 'r')".into(),
        "select fencepost.heartbeat('t', 1, 'v')".into(),
    ] {
        assert_eq!(code(&c, &call).await, "OB003", "{call}");
    }
    assert_eq!(code(&c, &complete("t", 2, "w")).await, "OB001");
    for call in [
        "select fencepost.heartbeat('x', 1, 'w')",
        "select fencepost.fail_task('x', 1, 'w', 'r', '1 s')",
        "select fencepost.release_task('x', 1, 'w', 'r')",
        "select fencepost.cancel_task('x', 'r')",
        "select fencepost.reopen_task('x', 'r')",
    ] {
        assert_eq!(code(&c, call).await, "OB006", "{call}");
    }
}

#[tokio::test]
async fn only_a_ready_task_is_cancelled() {
    let (_db, c) = billing().await;
    c.batch_execute("select fencepost.submit_task('k', '{}', 't'), fencepost.submit_task('k', '{}', 'u')")
        .await
        .unwrap();
    claim(&c, "u", "w").await;
    assert_eq!(
        one(&c, "select fencepost.cancel_task('t', 'not needed'), fencepost.cancel_task('u', 'not needed')").await,
        "t|f"
    );
    assert_eq!(one(&c, "select fencepost.cancel_task('t', 'again')").await, "f");
    assert_eq!(
        one(&c, "select task_id, lease_epoch, owner, token, reason from fencepost.completions").await,
        "t|1|-|failed|cancelled: not needed"
    );
    one(&c, &complete("u", 1, "w")).await;
}

#[tokio::test]
async fn reopening_waits_for_what_the_task_sent() {
    let (_db, c) = billing().await;
    c.batch_execute("select fencepost.submit_task('k', '{}', 't')").await.unwrap();
    assert_eq!(code(&c, "select fencepost.reopen_task('t', 'r')").await, "55000", "still ready");
    claim(&c, "t", "w").await;
    assert_eq!(code(&c, "select fencepost.reopen_task('t', 'r')").await, "55000", "still running");
    one(&c, &complete("t", 1, "w")).await;
    assert_eq!(code(&c, "select fencepost.reopen_task('t', 'r')").await, "55000", "its delivery waits");

    one(&c, "select fencepost.reopen_task('t', 'the invoice was wrong', force => true)").await;
    assert_eq!(
        one(&c, "select action, object, reason, actor = session_user, detail from fencepost.audit_log").await,
        r#"reopen_task|t|the invoice was wrong|t|{"epoch": 1, "force": true, "waiting": true}"#
    );
    assert_eq!(code(&c, &complete("t", 1, "w")).await, "OB003", "a re-opened epoch keeps its word");
    assert_eq!(claim(&c, "t", "w").await, 2);
    one(&c, &complete("t", 2, "w")).await;
    assert_eq!(code(&c, "select fencepost.reopen_task('t', 'r')").await, "55000", "deliveries of both epochs wait");
    c.batch_execute("insert into fencepost.ledger (effect_id, consumer_id, token, attempt) select id, targets[1], 'applied', 1 from fencepost.effects where lease_epoch = 2").await.unwrap();
    assert_eq!(code(&c, "select fencepost.reopen_task('t', 'r')").await, "55000", "the first epoch's waits");
    c.batch_execute("insert into fencepost.ledger (effect_id, consumer_id, token, attempt) select id, targets[1], 'skipped', 1 from fencepost.effects where lease_epoch = 1").await.unwrap();
    one(&c, "select fencepost.reopen_task('t', 'r')").await;
    assert_eq!(
        rows(&c, "select key from fencepost.intended order by key").await,
        ["t:1", "t:2"],
        "nothing is withdrawn"
    );
}

#[tokio::test]
async fn a_worker_ticks_at_most_once_a_second() {
    let (_db, c) = billing().await;
    for _ in 0..20 {
        rows(&c, "select from fencepost.claim_tasks('w')").await;
    }
    assert_eq!(one(&c, "select tick, token from fencepost.workers").await, "1|idle");
    // As after a second: the clock is not ours to move.
    c.batch_execute("update fencepost.workers set at = at - interval '1 second'; select fencepost.submit_task('k')")
        .await
        .unwrap();
    rows(&c, "select from fencepost.claim_tasks('w')").await;
    assert_eq!(
        one(&c, "select tick, token, at > clock_timestamp() - interval '1 second' from fencepost.workers").await,
        "2|worked|t"
    );
}
