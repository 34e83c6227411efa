//! `fencepost status`.

use super::{NOTHING, fencepost, json, with_consumers};

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
