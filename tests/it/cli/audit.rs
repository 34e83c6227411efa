//! `fencepost audit` and `fencepost wait`: on what a real relay left behind, and on holes made on purpose.

use axum::Router;
use axum::http::StatusCode;
use serde_json::Value;
use tokio_postgres::Client;

use super::{NOTHING, fencepost, json, with_consumers};
use crate::support::db::TestDb;
use crate::support::process::Process;

async fn settled() -> (TestDb, Client) {
    let db = with_consumers(&["a", "b"]).await;
    let client = db.client().await;
    fill(&client).await;
    (db, client)
}

/// Kinds of the holes, as `--json` names them.
fn kinds(proof: &Value) -> Vec<&str> {
    proof["holes"].as_array().unwrap().iter().map(|hole| hole["kind"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn an_outbox_without_holes_is_proved() {
    let (db, client) = settled().await;
    let proof = json(&db, NOTHING, 0, &["audit"]).await;
    assert_eq!((&proof["effects"], &proof["ended"]["applied"]), (&3.into(), &3.into()), "{proof}");
    assert_eq!(proof["completions"]["effects"], 2);
    // What waits has a reason: not read yet, in a relay's hands, parked.
    client.batch_execute("select fencepost.emit('[{\"consumer\": \"b\", \"payload\": 4}]', 't3')").await.unwrap();
    let proof = json(&db, NOTHING, 0, &["audit"]).await;
    assert_eq!(proof["waiting"]["unread"], 1, "{proof}");
    let flight = "insert into fencepost.flights (shard, seq, epoch, relay, base, target, first_id, last_id)
                  select f.shard, 2, s.epoch, s.relay, f.target, pg_current_snapshot(), e.id, e.id
                  from fencepost.effects e join fencepost.flights f on f.shard = e.shard and f.seq = 1
                  join fencepost.shards s on s.shard = e.shard where e.task_id = 't3'";
    let held = "update fencepost.shards set relay = gen_random_uuid(), lease_expires_at = clock_timestamp() + interval '1 hour'";
    client.batch_execute(&format!("{held}; {flight}")).await.unwrap();
    let proof = json(&db, NOTHING, 0, &["audit"]).await;
    assert_eq!(proof["waiting"]["in_flight"], 1, "{proof}");
    client
        .batch_execute(
            "insert into fencepost.lags select shard, 2, 2, 2 from fencepost.flights where seq = 2;
             update fencepost.flights set token = 'done' where seq = 2",
        )
        .await
        .unwrap();
    let proof = json(&db, NOTHING, 0, &["audit"]).await;
    assert_eq!(proof["waiting"]["lagging"], 1, "{proof}");
    client
        .batch_execute(
            "delete from fencepost.lags;
             insert into fencepost.parked (effect_id, consumer_id, shard, state, next_attempt_at)
             select id, 2, shard, 'retry', clock_timestamp() from fencepost.effects where task_id = 't3'",
        )
        .await
        .unwrap();
    let proof = json(&db, NOTHING, 0, &["audit"]).await;
    assert_eq!(proof["waiting"]["retry"], 1, "{proof}");
}

/// Each hole made on purpose, with what names it.
#[tokio::test]
async fn each_hole_is_named() {
    let one = "(select id from fencepost.effects where task_id = 't1')";
    let cases = [
        ("delivery_without_end", "t1:1 to a", format!("delete from fencepost.ledger where effect_id = {one}")),
        // Committed, seen by the newest flight's snapshot, and covered by none.
        (
            "delivery_without_end",
            "t1:1 to a",
            format!(
                "delete from fencepost.ledger where effect_id = {one};
                 update fencepost.flights set first_id = null where first_id = {one}"
            ),
        ),
        (
            "waiting_without_reason",
            "t1:1 to a",
            format!(
                "delete from fencepost.ledger where effect_id = {one};
                 insert into fencepost.parked (effect_id, consumer_id, shard, state) select id, 1, shard, 'dead' from fencepost.effects where id = {one}"
            ),
        ),
        (
            "fact_about_nothing",
            "to b",
            format!("insert into fencepost.ledger (effect_id, consumer_id, token, attempt) values ({one}, 2, 'applied', 1)"),
        ),
        (
            "parked_about_nothing",
            "effect 9999",
            "insert into fencepost.parked (effect_id, consumer_id, shard, state, next_attempt_at) values (9999, 1, 0, 'retry', now())".into(),
        ),
        ("payload_changed", "effect ", format!("update fencepost.effects set payload = 'x', size = 1 where id = {one}")),
        (
            "attempt_without_token",
            "t1:1 to a, attempt 2",
            format!(
                "insert into fencepost.attempts (effect_id, consumer_id, attempt, ended, relay) values ({one}, 1, 2, false, gen_random_uuid())"
            ),
        ),
        (
            "attempt_missing",
            "t1:1 to a, attempt 1",
            format!("update fencepost.ledger set attempt = 2 where effect_id = {one}"),
        ),
        ("flight_gap", "flight 1 of shard 0", "update fencepost.flights set base = pg_current_snapshot() where shard = 0 and seq = 1".into()),
        ("flight_gap", "flight 2 of shard 0", "update fencepost.flights set seq = 2 where shard = 0 and seq = 1".into()),
        ("flight_left_open", "flight 1 of shard 3", "update fencepost.flights set token = null where shard = 3 and seq = 1".into()),
        ("shard_without_position", "shard 5", "delete from fencepost.flights where shard = 5".into()),
        (
            "effects_missing",
            "t2:1",
            "delete from fencepost.ledger l using fencepost.effects e where e.id = l.effect_id and e.task_id = 't2' and e.position = 2;
             delete from fencepost.effects where task_id = 't2' and position = 2"
                .into(),
        ),
        ("effect_without_completion", "t1:1", "update fencepost.tasks set token = 'no_action' where task_id = 't1'".into()),
        (
            "completion_without_token",
            "t9:1",
            "insert into fencepost.tasks (task_id, kind, status, lease_epoch, claims_left, ended_at) values ('t9', 'k', 'completed', 1, 1, now())".into(),
        ),
    ];
    let (db, client) = settled().await;
    for (kind, object, make) in cases {
        client.batch_execute("begin; set local session_replication_role = replica").await.unwrap();
        client.batch_execute(&make).await.unwrap_or_else(|e| panic!("{kind}: {e:?}"));
        client.batch_execute("commit").await.unwrap();
        let proof = json(&db, NOTHING, 1, &["audit"]).await;
        let hole = proof["holes"].as_array().unwrap().iter().find(|hole| hole["kind"] == kind);
        let found = hole.is_some_and(|hole| hole["object"].as_str().unwrap().contains(object));
        assert!(found, "{kind} {object}: {proof:#}");
        assert_eq!(proof["holes_by_kind"][kind], 1);
        let (code, text, _) = fencepost(&db, NOTHING, &["audit"]).await;
        assert!(code == 1 && text.contains(kind) && text.contains(object), "{text}");
        // A fresh one for the next.
        client
            .batch_execute(
                "begin; set local session_replication_role = replica;
                 delete from fencepost.parked; delete from fencepost.attempts; delete from fencepost.ledger; delete from fencepost.effects;
                 delete from fencepost.tasks; delete from fencepost.flights where seq > 0;
                 insert into fencepost.flights (shard, seq, epoch, base, target, last_id, token, closed_at)
                 select shard, 0, 0, pg_current_snapshot(), pg_current_snapshot(), 0, 'origin', clock_timestamp() from fencepost.shards
                 on conflict do nothing;
                 commit",
            )
            .await
            .unwrap();
        fill(&client).await;
        let proof = json(&db, NOTHING, 0, &["audit"]).await;
        assert!(kinds(&proof).is_empty(), "mended after {kind}");
    }
}

/// The effects of two tasks, read by a flight per shard that is done, each with a fact.
async fn fill(client: &Client) {
    client
        .batch_execute(
            "select fencepost.emit('[{\"consumer\": \"a\", \"payload\": 1}]', 't1');
             select fencepost.emit('[{\"consumer\": \"a\", \"payload\": 2}, {\"consumer\": \"b\", \"payload\": 3}]', 't2');",
        )
        .await
        .unwrap();
    client
        .batch_execute(
            "insert into fencepost.flights (shard, seq, epoch, base, target, first_id, last_id, token, closed_at)
             select f.shard, 1, 0, min(f.target::text)::pg_snapshot, pg_current_snapshot(), min(e.id), coalesce(max(e.id), 0), 'done', clock_timestamp()
             from fencepost.flights f left join fencepost.effects e on e.shard = f.shard where f.seq = 0 group by f.shard;
             insert into fencepost.ledger (effect_id, consumer_id, token, attempt)
             select e.id, t, 'applied', 1 from fencepost.effects e, unnest(e.targets) t;",
        )
        .await
        .unwrap();
}

#[tokio::test]
async fn only_the_range_is_looked_at() {
    let (db, client) = settled().await;
    client
        .batch_execute("begin; set local session_replication_role = replica; delete from fencepost.ledger; commit")
        .await
        .unwrap();
    json(&db, NOTHING, 1, &["audit", "--since", "1h"]).await;
    let before = json(&db, NOTHING, 0, &["audit", "--until", "2001-01-01T00:00:00Z"]).await;
    assert_eq!(before["effects"], 0);
    let (code, _, err) = fencepost(&db, NOTHING, &["audit", "--since", "yesterdayish"]).await;
    assert!(code == 2 && err.contains("--since"), "{err}");
    let (code, out, err) = fencepost(&db, NOTHING, &["audit", "--since", "1h", "--until", "2h"]).await;
    assert!(code == 2 && out.is_empty() && err.contains("lower bound must be less"), "{out} {err}");
}

#[tokio::test]
async fn waiting_says_what_still_waits_and_what_needs_a_person() {
    let (db, client) = settled().await;
    let drained = json(&db, NOTHING, 0, &["wait", "--until-drained", "--timeout", "10s"]).await;
    assert_eq!(drained["outcome"], "drained");
    client.batch_execute("select fencepost.submit_task('k')").await.unwrap();
    json(&db, NOTHING, 0, &["wait", "--until-drained", "--timeout", "10s"]).await;
    let tasks = json(&db, NOTHING, 1, &["wait", "--until-drained", "--tasks", "--timeout", "300ms"]).await;
    assert_eq!((tasks["outcome"].as_str(), tasks["tasks"].as_i64()), (Some("timed_out"), Some(1)));

    client.batch_execute("select fencepost.emit('[{\"consumer\": \"b\", \"payload\": 4}]', 't3')").await.unwrap();
    let (code, text, _) = fencepost(&db, NOTHING, &["wait", "--until-drained", "--timeout", "300ms"]).await;
    assert!(code == 1 && text.contains("unread"), "{text}");

    // Everything is read; what is left is dead.
    let park = "begin; set local session_replication_role = replica;
                update fencepost.flights set target = pg_current_snapshot() where seq = 1;
                insert into fencepost.parked (effect_id, consumer_id, shard, state, reason)
                select id, 2, shard, 'dead', 'its budget' from fencepost.effects where task_id = 't3'; commit";
    client.batch_execute(park).await.unwrap();
    let report = json(&db, NOTHING, 1, &["wait", "--until-drained", "--timeout", "60s"]).await;
    assert_eq!(report["outcome"], "needs_a_person");
    let left = &report["waiting"][0];
    assert_eq!(
        (left["consumer"].as_str(), left["token"].as_str(), left["count"].as_i64()),
        (Some("b"), Some("dead"), Some(1))
    );
}

#[tokio::test]
async fn waiting_outlasts_a_database_that_is_not_there_yet() {
    let db = TestDb::empty().await;
    let (code, text, _) = fencepost(&db, NOTHING, &["wait", "--until-drained", "--timeout", "300ms"]).await;
    assert!(code == 1 && text.contains("could not be asked"), "{text}");
    let url = db.url().to_owned();
    let waiting = tokio::spawn(async move {
        let env = [("DATABASE_URL", url.as_str())];
        crate::support::process::run(&["wait", "--until-drained", "--timeout", "30s"], &env).await
    });
    assert_eq!(fencepost(&db, NOTHING, &["migrate"]).await.0, 0);
    let (code, text, err) = waiting.await.unwrap();
    assert!(code == 0 && text.contains("drained"), "{text}{err}");
}

#[tokio::test]
async fn what_a_relay_delivered_is_drained_and_proved() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let router = Router::new().fallback(async || StatusCode::OK);
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    let db = TestDb::new().await;
    let path = std::env::temp_dir().join(format!("{}.audit.toml", db.name()));
    std::fs::write(&path, format!("[[consumers]]\nname = 'a'\nkind = 'http'\nurl = '{url}'\n")).unwrap();
    let env = [("DATABASE_URL", db.url()), ("FENCEPOST_CONFIG", path.to_str().unwrap())];
    let mut relay = Process::start(&["run"], &env);
    relay.says("consumer applied").await;
    let emit = "select fencepost.emit(jsonb_build_array(jsonb_build_object('consumer', 'a', 'payload', n))) from generate_series(1, 300) n";
    db.client().await.batch_execute(emit).await.unwrap();
    json(&db, NOTHING, 0, &["wait", "--until-drained"]).await;
    let proof = json(&db, NOTHING, 0, &["audit"]).await;
    assert_eq!(proof["ended"]["accepted"], 300, "{proof}");
    relay.kill().await;
    std::fs::remove_file(path).unwrap();
}
