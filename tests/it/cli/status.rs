//! `fencepost status`.

use std::time::Duration;

use fencepost::producer::{self, Effect, ErrorKind, NewTask, Payload, Worker};
use serde_json::json as value;

use super::{NOTHING, fencepost, json, with_consumers};
use crate::support::eventually;

#[tokio::test]
async fn status_counts_what_waits_without_any_relay() {
    let db = with_consumers(&["a", "b"]).await;
    let client = db.client().await;
    client
        .batch_execute(
            "select fencepost.emit(jsonb_build_array(jsonb_build_object('consumer', 'a', 'payload', n))) from generate_series(1, 30) n;
             insert into fencepost.ledger (effect_id, consumer_id, token, attempt)
             select id, 1, 'applied', 1 from fencepost.effects order by id limit 10;",
        )
        .await
        .unwrap();
    let status = json(&db, NOTHING, 0, &["status"]).await;
    let edge = &status["edges"][0];
    assert_eq!((edge["name"].as_str(), edge["unread"].as_i64()), (Some("a"), Some(30)));
    assert_eq!(edge["settled_last_minute"], 10);
    assert!(edge["oldest_waiting_seconds"].as_f64().unwrap() < 60.0);
    assert_eq!(status["edges"][1]["unread"], 0);
    assert_eq!(status["shards"].as_array().unwrap().len(), 8);

    // Everything is read, as a relay would have: one flight per shard; three deliveries are parked.
    client
        .batch_execute(
            "insert into fencepost.flights (shard, seq, epoch, base, target, last_id, token, closed_at)
             select shard, 1, 0, target, pg_current_snapshot(), 0, 'done', clock_timestamp() from fencepost.flights where seq = 0;
             insert into fencepost.parked (effect_id, consumer_id, shard, state, next_attempt_at)
             select id, 1, shard, 'retry', clock_timestamp() from fencepost.effects order by id desc limit 3;",
        )
        .await
        .unwrap();
    let status = json(&db, NOTHING, 0, &["status"]).await;
    assert_eq!(status["edges"][0]["unread"], 0);
    assert_eq!(status["edges"][0]["waiting"]["retry"], 3);

    // A fact that came late: the row that waits for nothing any more is not counted.
    client
        .batch_execute(
            "insert into fencepost.ledger (effect_id, consumer_id, token, attempt)
             select effect_id, consumer_id, 'duplicate', 2 from fencepost.parked order by effect_id limit 1",
        )
        .await
        .unwrap();
    assert_eq!(json(&db, NOTHING, 0, &["status"]).await["edges"][0]["waiting"]["retry"], 2);
}

#[tokio::test]
async fn status_ends_with_1_for_what_needs_a_person() {
    let db = with_consumers(&["a", "b"]).await;
    let client = db.client().await;
    assert_eq!(fencepost(&db, NOTHING, &["status"]).await.0, 0);
    let cases = [
        ("insert into fencepost.parked (effect_id, consumer_id, shard, state) values (1, 1, 0, 'dead')", "a: 1 dead"),
        ("insert into fencepost.parked (effect_id, consumer_id, shard, state) values (1, 2, 0, 'in_doubt')", "b: 1 in doubt"),
        ("insert into fencepost.alarms (name, object, detail) values ('conflict', 'k', 'other payload')", "alarm conflict k"),
        (
            "insert into fencepost.relays (relay, name, version, token, at)
             values (gen_random_uuid(), 'r1', '1', 'idle', clock_timestamp() - interval '46 seconds')",
            "relay r1",
        ),
        (
            "insert into fencepost.workers (owner, token, at) values ('w1', 'worked', clock_timestamp() - interval '91 seconds');
             insert into fencepost.tasks (task_id, kind, status, owner, lease_epoch, lease_expires_at, claims_left)
             values ('t1', 'k', 'running', 'w1', 1, clock_timestamp() - interval '1 minute', 1)",
            "worker w1",
        ),
    ];
    for (sql, finding) in cases {
        client.batch_execute(sql).await.unwrap();
        let (code, out, _) = fencepost(&db, NOTHING, &["status"]).await;
        assert!(code == 1 && out.contains(finding), "{finding}: {out}");
        client
            .batch_execute(
                "truncate fencepost.parked, fencepost.alarms, fencepost.relays, fencepost.workers, fencepost.tasks",
            )
            .await
            .unwrap();
    }
    client
        .batch_execute(
            "insert into fencepost.relays (relay, name, version, token, at, stopped_at)
             values (gen_random_uuid(), 'r2', '1', 'idle', clock_timestamp() - interval '1 hour', clock_timestamp() - interval '1 hour');
             insert into fencepost.workers (owner, token, at) values ('w2', 'idle', clock_timestamp() - interval '1 hour');",
        )
        .await
        .unwrap();
    let (code, out, _) = fencepost(&db, NOTHING, &["status"]).await;
    assert_eq!(code, 0, "a relay that stopped and a worker that left are no findings: {out}");
}

#[tokio::test]
async fn an_alarm_stands_until_it_is_resolved_and_comes_back_if_raised_again() {
    let db = with_consumers(&["a"]).await;
    let client = db.client().await;
    let raise = "insert into fencepost.alarms (name, object, detail) values ('conflict', 'a/t1:1', 'd'), ('conflict', 'a/t2:1', 'd')
                 on conflict (name, object) do update set resolved_at = null";
    client.batch_execute(raise).await.unwrap();
    let yes = ["--yes", "--reason", "asked the owner"];
    let resolve = async |args: &[&str]| {
        let args: Vec<&str> = ["alarms", "resolve"].iter().chain(args).chain(&yes).copied().collect();
        fencepost(&db, NOTHING, &args).await.0
    };
    assert_eq!(resolve(&["conflict", "a/t1:1"]).await, 0);
    let left = json(&db, NOTHING, 0, &["alarms", "list"]).await;
    assert_eq!((left.as_array().unwrap().len(), left[0]["object"].as_str()), (1, Some("a/t2:1")));
    assert_eq!(resolve(&["conflict"]).await, 0);
    assert_eq!(resolve(&["conflict"]).await, 1, "there is nothing left");
    assert_eq!(fencepost(&db, NOTHING, &["status"]).await.0, 0);
    client.batch_execute(raise).await.unwrap();
    assert_eq!(fencepost(&db, NOTHING, &["status"]).await.0, 1);
}

#[tokio::test]
async fn status_tells_stuck_tasks_and_lost_leases() {
    let db = with_consumers(&["a"]).await;
    let mut client = db.client().await;
    for (kind, count) in [("charge", 3), ("mail", 1)] {
        for n in 0..count {
            producer::submit(&client, &NewTask::new(kind, value!({ "n": n }))).await.unwrap();
        }
    }
    let hasty = Worker::new("hasty").kinds(&["charge"]).lease(Duration::from_millis(1));
    let leases = hasty.claim(&client, 3).await.unwrap();
    Worker::new("calm").kinds(&["mail"]).claim(&client, 1).await.unwrap();
    let stuck = eventually("three are stuck", async || {
        let status = json(&db, NOTHING, 0, &["status"]).await;
        (status["leases"]["kinds"][0]["stuck"] == 3).then_some(status)
    })
    .await;
    let kinds = &stuck["leases"]["kinds"];
    assert_eq!((&kinds[0]["kind"], &kinds[0]["running"]), (&value!("charge"), &value!(0)), "{kinds}");
    assert!(kinds[0]["oldest_stuck_seconds"].as_f64().unwrap() > 0.0, "{kinds}");
    let mail = value!({"kind": "mail", "running": 1, "stuck": 0, "oldest_stuck_seconds": null});
    assert_eq!(kinds[1], mail);
    assert!(stuck["notices"][0].as_str().unwrap().contains("3 tasks of kind charge are stuck"), "{}", stuck["notices"]);

    // Two are taken over; of those who lost them one finds out, and says so after its transaction was rolled back.
    assert_eq!(Worker::new("careful").claim(&client, 2).await.unwrap().len(), 2);
    let mut lost = Vec::new();
    for lease in &leases {
        let tx = client.transaction().await.unwrap();
        match lease.complete(&tx, &[Effect::to("a", Payload::Text("x".into()))], None).await {
            Ok(_) => tx.rollback().await.unwrap(),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::LeaseLost);
                lost.push(lease);
                tx.rollback().await.unwrap();
            }
        }
    }
    assert_eq!(lost.len(), 2);
    hasty.report_lease_lost(&client).await.unwrap();
    hasty.report_failure(&client).await.unwrap();
    let status = json(&db, NOTHING, 0, &["status"]).await;
    let leases = &status["leases"];
    assert_eq!((&leases["lost"], &leases["lost_last_hour"], &leases["refused"]), (&value!(2), &value!(2), &value!(1)));
    assert_eq!(leases["kinds"][0]["stuck"], 1);
    let of_hasty = status["workers"].as_array().unwrap().iter().find(|worker| worker["owner"] == "hasty").unwrap();
    assert_eq!((&of_hasty["refused"], &of_hasty["token"]), (&value!(1), &value!("failed")));
    let (code, out, _) = fencepost(&db, NOTHING, &["status"]).await;
    assert_eq!(code, 0, "nobody is needed yet: {out}");
    assert!(out.contains("leases lost: 2, 2 of them in the last hour; completions refused for it: 1"), "{out}");
    assert!(out.contains("1 tasks of kind charge are stuck"), "{out}");
}

#[tokio::test]
async fn status_says_that_deliveries_wait_and_no_relay_runs() {
    let db = with_consumers(&["a"]).await;
    let client = db.client().await;
    let quiet = json(&db, NOTHING, 0, &["status"]).await;
    assert_eq!((&quiet["notices"], &quiet["findings"]), (&value!([]), &value!([])), "nothing waits");

    // For less than three leases it is a start like any other; after that somebody must see to it.
    client.batch_execute("select fencepost.emit('[{\"consumer\": \"a\", \"payload\": 1}]', 'now')").await.unwrap();
    let status = json(&db, NOTHING, 0, &["status"]).await;
    let notice = status["notices"][0].as_str().unwrap();
    assert!(notice.starts_with("no relay runs (none has run here yet), and deliveries wait: 1, "), "{notice}");
    let (_, out, _) = fencepost(&db, NOTHING, &["status"]).await;
    assert!(
        out.contains(notice.split(", the oldest").next().unwrap()) && out.contains("nothing needs a person"),
        "{out}"
    );

    client
        .batch_execute(
            "insert into fencepost.effects (committed_at, lease_epoch, position, size, shard, targets, task_id, content_type, ordering_key, sha256, payload)
             select clock_timestamp() - interval '1 hour', 1, 1, size, shard, targets, 'old', content_type, 'old', sha256, payload
             from fencepost.effects",
        )
        .await
        .unwrap();
    let status = json(&db, NOTHING, 1, &["status"]).await;
    let finding = status["findings"][0].as_str().unwrap();
    assert!(finding.contains("deliveries wait: 2, the oldest for 1h00m; start one: fencepost run"), "{finding}");

    let ticked = async |ago: &str, stopped: bool, code: i32| {
        let sql = format!(
            "truncate fencepost.relays;
             insert into fencepost.relays (relay, name, version, token, at, stopped_at)
             select gen_random_uuid(), 'r', '1', 'idle', t, case when {stopped} then t end from (select clock_timestamp() - interval '{ago}') m (t)"
        );
        client.batch_execute(&sql).await.unwrap();
        let status = json(&db, NOTHING, code, &["status"]).await;
        (status["notices"].to_string(), status["findings"].to_string())
    };
    assert_eq!(ticked("1 second", false, 0).await, ("[]".into(), "[]".into()), "one runs");
    let (notices, findings) = ticked("1 second", true, 0).await;
    assert!(notices.contains("no relay runs (the last ticked 1s ago)") && findings == "[]", "{notices} {findings}");
    let (notices, findings) = ticked("1 hour", true, 1).await;
    assert!(findings.contains("no relay runs (the last ticked 1h00m ago)") && notices == "[]", "{notices} {findings}");
}

#[tokio::test]
async fn a_relay_that_died_is_a_finding_until_one_of_its_name_is_back() {
    let db = with_consumers(&["a"]).await;
    let client = db.client().await;
    let relay = async |name: &str, ticked: &str| {
        let sql = format!(
            "insert into fencepost.relays (relay, name, version, token, started_at, at)
             values (gen_random_uuid(), '{name}', '1', 'idle', clock_timestamp() - interval '{ticked}' - interval '1 minute',
                     clock_timestamp() - interval '{ticked}')"
        );
        client.batch_execute(&sql).await.unwrap();
    };
    relay("r1", "1 hour").await;
    relay("r2", "1 second").await;
    let status = json(&db, NOTHING, 1, &["status"]).await;
    let finding = status["findings"][0].as_str().unwrap();
    assert!(finding.starts_with("relay r1 ") && finding.contains("has not ticked for 1h00m"), "{finding}");
    relay("r1", "1 second").await;
    assert_eq!(json(&db, NOTHING, 0, &["status"]).await["findings"], value!([]));
    // One that ran beside it all the while is not the one that came back.
    client
        .batch_execute("update fencepost.relays set started_at = clock_timestamp() - interval '2 hours'")
        .await
        .unwrap();
    json(&db, NOTHING, 1, &["status"]).await;
}
