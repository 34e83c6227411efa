//! `fencepost deliveries`: what each command lists, and what it leaves in the tables.

use super::{NOTHING, fencepost, json, with_consumers};
use crate::support::db::TestDb;

const YES: [&str; 3] = ["--yes", "--reason", "checked by hand"];

/// One effect `t<n>:1` for consumer a, parked with this state.
async fn parked(db: &TestDb, n: i32, state: &str) {
    let client = db.client().await;
    let emit = "select fencepost.emit('[{\"consumer\": \"a\", \"payload\": 1}]', $1)";
    client.query(emit, &[&format!("t{n}")]).await.unwrap();
    client
        .execute(
            "insert into fencepost.parked (effect_id, consumer_id, shard, ordering_key, state, attempts, refusals, deaths,
                                           first_failed_at, first_doubt_at, reason)
             select id, 1, shard, ordering_key, $1::text, 5, 3, 2, clock_timestamp() - interval '2 days', clock_timestamp() - interval '2 days', '503'
             from fencepost.effects order by id desc limit 1",
            &[&state],
        )
        .await
        .unwrap();
}

async fn deliveries(db: &TestDb, args: &[&str]) -> (i32, String, String) {
    let args: Vec<&str> = ["deliveries"].iter().chain(args).copied().collect();
    fencepost(db, NOTHING, &args).await
}

async fn one<T: for<'a> tokio_postgres::types::FromSql<'a>>(db: &TestDb, sql: &str) -> T {
    db.client().await.query_one(sql, &[]).await.unwrap().get(0)
}

#[tokio::test]
async fn list_shows_what_waits_and_what_has_ended() {
    let db = with_consumers(&["a", "b"]).await;
    parked(&db, 1, "dead").await;
    parked(&db, 2, "retry").await;
    let all = json(&db, NOTHING, 0, &["deliveries", "list"]).await;
    assert_eq!((all[0]["key"].as_str(), all[0]["token"].as_str()), (Some("t1:1"), Some("dead")));
    assert_eq!(all.as_array().unwrap().len(), 2);
    let dead = json(&db, NOTHING, 0, &["deliveries", "list", "--token", "dead", "--consumer", "a"]).await;
    assert_eq!(dead.as_array().unwrap().len(), 1);
    let (code, out, _) = deliveries(&db, &["list", "--consumer", "b"]).await;
    assert!(code == 0 && out == "none\n", "{out}");
    let (code, out, _) = deliveries(&db, &["list", "t2:1", "--limit", "1"]).await;
    assert!(code == 0 && out.contains("t2:1") && !out.contains("t1:1"), "{out}");

    // A fact that came late ends it, whatever the parked row says.
    db.client()
        .await
        .batch_execute(
            "insert into fencepost.ledger (effect_id, consumer_id, token, attempt) select effect_id, 1, 'stale', 6 from fencepost.parked where state = 'retry';
             insert into fencepost.ledger (effect_id, consumer_id, token, attempt) select effect_id, 1, 'applied', 7 from fencepost.parked where state = 'retry'",
        )
        .await
        .unwrap();
    assert_eq!(json(&db, NOTHING, 0, &["deliveries", "list"]).await.as_array().unwrap().len(), 1);
    let ended = json(&db, NOTHING, 0, &["deliveries", "list", "--token", "applied", "--token", "stale"]).await;
    assert_eq!(ended.as_array().unwrap().len(), 1);
    assert_eq!(ended[0]["token"], "applied", "the strongest fact decides");

    for (args, said) in [
        (&["list", "--token", "gone"][..], "waiting tokens are retry, blocked"),
        (&["list", "--token", "dead", "--token", "applied"], "one kind at a time"),
        (&["list", "--consumer", "x"], "there is no consumer \"x\""),
        (&["list", "t1"], "an idempotency key is"),
        (&["retry"], "name deliveries by KEY"),
        (&["retry", "--token", "blocked"], "retry is for retry, backlog, unacked, in_doubt, dead"),
        (&["replay", "--token", "dead"], "replay is for deliveries that have ended"),
        (&["skip", "--token", "applied"], "skip is for deliveries that wait"),
    ] {
        let (code, _, err) = deliveries(&db, args).await;
        assert!(code == 2 && err.contains(said), "{args:?}: {code} {err}");
    }
    assert_eq!(deliveries(&db, &["list", "t9:1"]).await.0, 1);
}

#[tokio::test]
async fn retry_previews_then_makes_it_due_with_a_fresh_budget() {
    let db = with_consumers(&["a"]).await;
    parked(&db, 1, "dead").await;
    parked(&db, 2, "in_doubt").await;
    let (code, out, err) = deliveries(&db, &["retry", "--consumer", "a"]).await;
    assert_eq!(code, 2);
    assert!(out.contains("t1:1") && out.contains("ack=optional") && out.contains("absorbed only if"), "{out}");
    assert!(err.contains("nothing was changed"), "{err}");
    assert_eq!(one::<i64>(&db, "select count(*) from fencepost.parked where state = 'retry'").await, 0);
    // What a declaration says of answers is no promise of dedup, least of all where a duplicate costs.
    for (declared, told) in [
        (r#"{"ack": "required"}"#, "absorbed if this consumer dedups"),
        (r#"{"on_ambiguous": "hold"}"#, "must be feared"),
    ] {
        let sql = format!("update fencepost.consumers set spec = spec || '{declared}'");
        db.client().await.batch_execute(&sql).await.unwrap();
        let (_, out, _) = deliveries(&db, &["retry", "--consumer", "a"]).await;
        assert!(out.contains(told), "{declared}: {out}");
    }
    db.client()
        .await
        .batch_execute("update fencepost.consumers set spec = spec - 'ack' - 'on_ambiguous'")
        .await
        .unwrap();

    let (code, _, err) = deliveries(&db, &["retry", "t1:1", YES[0], YES[1], YES[2]]).await;
    assert_eq!(code, 0, "{err}");
    let due = "select state = 'retry' and next_attempt_at <= clock_timestamp() and refusals = 0 and deaths = 0 and first_failed_at is null
                      and first_doubt_at > clock_timestamp() - interval '1 minute' and attempts = 5
               from fencepost.parked order by effect_id limit 1";
    assert!(one::<bool>(&db, due).await);
    assert_eq!(
        one::<String>(&db, "select state from fencepost.parked order by effect_id desc limit 1").await,
        "in_doubt"
    );
    let audit = "select action || '|' || object || '|' || reason from fencepost.audit_log order by id desc limit 1";
    assert_eq!(one::<String>(&db, audit).await, "deliveries retry|t1:1 a|checked by hand");
}

#[tokio::test]
async fn resolve_writes_the_operators_word_and_no_other() {
    let db = with_consumers(&["a"]).await;
    for (n, word, token) in [(1, "applied", "operator:applied"), (2, "not-applied", "operator:not_applied")] {
        parked(&db, n, "in_doubt").await;
        let key = format!("t{n}:1");
        let (code, _, err) = deliveries(&db, &["resolve", &key, "--as", word, YES[0], YES[1], YES[2]]).await;
        assert_eq!(code, 0, "{err}");
        assert_eq!(one::<i64>(&db, "select count(*) from fencepost.parked").await, 0);
        let fact = "select token::text || ' ' || note from fencepost.ledger order by effect_id desc limit 1";
        assert_eq!(one::<String>(&db, fact).await, format!("{token} checked by hand"));
    }
    // It has ended: there is nothing left to resolve.
    let (code, out, _) = deliveries(&db, &["resolve", "t1:1", "--as", "applied", YES[0], YES[1], YES[2]]).await;
    assert!(code == 1 && out.contains("nothing to resolve"), "{out}");
}

#[tokio::test]
async fn skip_releases_the_key() {
    let db = with_consumers(&["a"]).await;
    let client = db.client().await;
    client
        .batch_execute(
            "select fencepost.emit('[{\"consumer\": \"a\", \"payload\": 1, \"ordering_key\": \"k\"}]', 't1');
             select fencepost.emit('[{\"consumer\": \"a\", \"payload\": 2, \"ordering_key\": \"k\"}]', 't2');
             insert into fencepost.parked (effect_id, consumer_id, shard, ordering_key, state)
             select id, 1, shard, ordering_key, case task_id when 't1' then 'dead' else 'blocked' end from fencepost.effects;",
        )
        .await
        .unwrap();
    assert_eq!(deliveries(&db, &["skip", "t1:1", YES[0], YES[1], YES[2]]).await.0, 0);
    assert_eq!(one::<String>(&db, "select token::text from fencepost.ledger").await, "skipped");
    assert_eq!(one::<String>(&db, "select state from fencepost.parked").await, "retry");
}

#[tokio::test]
async fn replay_parks_a_delivery_that_has_ended_once() {
    let db = with_consumers(&["a"]).await;
    let client = db.client().await;
    client
        .batch_execute(
            "select fencepost.emit('[{\"consumer\": \"a\", \"payload\": 1}]', 't1');
             select fencepost.emit('[{\"topic\": \"nobody\", \"payload\": 1}]', 't2');
             insert into fencepost.ledger (effect_id, consumer_id, token, attempt) select id, 1, 'rejected', 4 from fencepost.effects where task_id = 't1'",
        )
        .await
        .unwrap();
    let (code, _, err) = deliveries(&db, &["replay", "t1:1", YES[0], YES[1], YES[2]]).await;
    assert_eq!(code, 0, "{err}");
    let row = "select replay and state = 'retry' and attempts = 4 and ordering_key is null and next_attempt_at <= clock_timestamp() from fencepost.parked";
    assert!(one::<bool>(&db, row).await);
    let listed = json(&db, NOTHING, 0, &["deliveries", "list"]).await;
    assert_eq!(listed[0]["replay"], true, "it waits although it has a fact");
    let (code, _, err) = deliveries(&db, &["replay", "t1:1", YES[0], YES[1], YES[2]]).await;
    assert!(code == 1 && err.contains("0 of 1 changed"), "{err}");
    assert_eq!(deliveries(&db, &["replay", "t2:1", YES[0], YES[1], YES[2]]).await.0, 1, "nobody was to get it");
    // What has expired is never sent, whatever it ended with: not even on an operator's word.
    db.client()
        .await
        .batch_execute(
            "select fencepost.emit('[{\"consumer\": \"a\", \"payload\": 1, \"expires_in\": \"1 millisecond\"}]', task) from unnest(array['t3', 't4']) task;
             insert into fencepost.ledger (effect_id, consumer_id, token, attempt)
             select id, 1, case task_id when 't3' then 'expired' else 'applied' end::fencepost.fact, 1 from fencepost.effects where task_id in ('t3', 't4')",
        )
        .await
        .unwrap();
    let (code, out, _) = deliveries(&db, &["replay", "t3:1", YES[0], YES[1], YES[2]]).await;
    assert!(code == 1 && out.contains("unless they expired"), "{out}");
    let (code, _, err) = deliveries(&db, &["replay", "t3:1", "--token", "expired"]).await;
    assert!(code == 2 && err.contains("is never sent"), "{err}");
    let (code, _, err) = deliveries(&db, &["replay", "t4:1", YES[0], YES[1], YES[2]]).await;
    assert!(code == 1 && err.contains("0 of 1 changed") && err.contains("have expired"), "{err}");
    assert_eq!(one::<i64>(&db, "select count(*) from fencepost.parked").await, 1);
}

#[tokio::test]
async fn tail_tells_facts_and_failures() {
    let db = with_consumers(&["a"]).await;
    let client = db.client().await;
    client
        .batch_execute(
            "select fencepost.emit('[{\"consumer\": \"a\", \"payload\": 1}]', 't1');
             insert into fencepost.attempts (effect_id, consumer_id, attempt, ended, token, status, error, at)
             select id, 1, 1, true, 'ambiguous', 503, 'reset', clock_timestamp() - interval '5 seconds' from fencepost.effects;
             insert into fencepost.ledger (effect_id, consumer_id, token, attempt, at)
             select id, 1, 'duplicate', 2, clock_timestamp() - interval '4 seconds' from fencepost.effects;",
        )
        .await
        .unwrap();
    let (code, out, _) = deliveries(&db, &["tail", "--once", "--since", "1m"]).await;
    assert_eq!(code, 0);
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines.len(), 2, "{out}");
    assert!(lines[0].contains("t1:1  a  ambiguous 503  attempt 1  reset"), "{out}");
    assert!(lines[1].contains("t1:1  a  duplicate  attempt 2"), "{out}");
    assert_eq!(deliveries(&db, &["tail", "--once", "--since", "3s"]).await.1, "");
}
