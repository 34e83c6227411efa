//! `fencepost consumers`.

use serde_json::Value;

use super::{NOTHING, fencepost, http_consumer, json};
use crate::support::db::TestDb;

const YES: [&str; 3] = ["--yes", "--reason", "test"];

async fn apply(db: &TestDb, config: &str) -> (i32, String, String) {
    fencepost(db, config, &["consumers", "apply", YES[0], YES[1], YES[2]]).await
}

async fn change(db: &TestDb, args: &[&str]) -> (i32, String, String) {
    let args: Vec<&str> = ["consumers"].iter().chain(args).chain(&YES).copied().collect();
    fencepost(db, NOTHING, &args).await
}

async fn topics(db: &TestDb) -> Vec<String> {
    let sql = "select topic from fencepost.subscriptions order by topic";
    db.client().await.query(sql, &[]).await.unwrap().iter().map(|row| row.get(0)).collect()
}

fn states(list: &Value) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_string();
    list.as_array().unwrap().iter().map(|c| (text(&c["name"]), text(&c["state"]))).collect()
}

#[tokio::test]
async fn applying_adds_changes_and_never_removes() {
    let db = TestDb::new().await;
    let first = format!("revision = 3\n{}topics = ['t', 'u']\n{}", http_consumer("a"), http_consumer("b"));
    assert_eq!(apply(&db, &first).await.0, 0);
    assert_eq!(topics(&db).await, ["t", "u"]);

    let second = format!("revision = 4\n{}topics = ['u']\ntimeout = '3s'\n", http_consumer("a"));
    let (code, out, _) = fencepost(&db, &second, &["consumers", "apply", "--dry-run"]).await;
    assert_eq!(code, 0);
    assert!(out.contains("timeout: (default) -> \"3s\"") && out.contains("absent   b"), "{out}");
    assert_eq!(topics(&db).await, ["t", "u"], "a dry run changes nothing");
    assert_eq!(apply(&db, &second).await.0, 0);
    assert_eq!(topics(&db).await, ["u"]);
    let list = json(&db, NOTHING, 0, &["consumers", "list"]).await;
    assert_eq!(states(&list), [("a".into(), "active".into()), ("b".into(), "active".into())]);
    assert!(!list.to_string().contains("hunter2"), "{list}");

    let (code, out, _) = apply(&db, &first).await;
    assert!(code == 1 && out.contains("revision 3 is older than 4"), "{out}");
    assert_eq!(topics(&db).await, ["u"], "an older file changes nothing");
}

#[tokio::test]
async fn pause_and_resume_are_audited_and_idempotent() {
    let db = TestDb::new().await;
    apply(&db, &format!("{}{}", http_consumer("a"), http_consumer("b"))).await;
    assert_eq!(change(&db, &["pause", "a"]).await.0, 0);
    let (code, out, _) = change(&db, &["pause", "a"]).await;
    assert!(code == 0 && out.contains("nothing to pause"), "{out}");
    let state = |list| states(&list).into_iter().map(|(_, state)| state).collect::<Vec<_>>();
    assert_eq!(state(json(&db, NOTHING, 0, &["consumers", "list"]).await), ["paused", "active"]);
    assert_eq!(change(&db, &["pause", "--all"]).await.0, 0);
    assert_eq!(state(json(&db, NOTHING, 0, &["consumers", "list"]).await), ["paused", "paused"]);
    assert_eq!(change(&db, &["resume", "a", "b"]).await.0, 0);
    assert_eq!(state(json(&db, NOTHING, 0, &["consumers", "list"]).await), ["active", "active"]);
    let (code, _, err) = change(&db, &["pause", "nobody"]).await;
    assert!(code == 2 && err.contains("there is no consumer \"nobody\""), "{err}");

    let sql = "select action || ' ' || object from fencepost.audit_log order by id offset 1";
    let audit: Vec<String> = db.client().await.query(sql, &[]).await.unwrap().iter().map(|r| r.get(0)).collect();
    assert_eq!(
        audit,
        ["consumers pause a", "consumers pause b", "consumers resume a", "consumers resume b"],
        "each change once, none for what changed nothing"
    );
}

#[tokio::test]
async fn a_retired_consumer_stays_retired_until_it_is_resumed() {
    let db = TestDb::new().await;
    let config = format!("{}topics = ['t']\n", http_consumer("a"));
    apply(&db, &config).await;
    assert_eq!(change(&db, &["retire", "a"]).await.0, 0);
    assert!(topics(&db).await.is_empty());
    let client = db.client().await;
    let emit = "select fencepost.emit('[{\"consumer\": \"a\", \"payload\": 1}]')";
    let refused = client.batch_execute(emit).await.unwrap_err();
    assert_eq!(refused.code().unwrap().code(), "OB002");

    let (code, out, _) = apply(&db, &config).await;
    assert!(code == 0 && out.contains("retired  a"), "{out}");
    assert!(client.batch_execute(emit).await.is_err(), "applying the file brings nothing back");
    assert_eq!(change(&db, &["resume", "a"]).await.0, 0);
    client.batch_execute(emit).await.unwrap();
    assert_eq!(topics(&db).await, ["t"]);
}

#[tokio::test]
async fn a_rotated_secret_leaves_the_present_one_as_the_previous() {
    let db = TestDb::new().await;
    let folder = std::env::temp_dir().join(format!("{}.rotate", db.name()));
    std::fs::create_dir(&folder).unwrap();
    let (secret, previous) = (folder.join("secret"), folder.join("previous"));
    let first = fencepost(&db, NOTHING, &["secret", "new"]).await.1;
    std::fs::write(&secret, &first).unwrap();
    std::fs::write(&previous, &first).unwrap();
    let keys = format!("secret_file = '{}'\nprevious_secret_file = '{}'\n", secret.display(), previous.display());
    assert_eq!(apply(&db, &format!("{}{keys}", http_consumer("a"))).await.0, 0);

    let (code, out, _) = fencepost(&db, NOTHING, &["consumers", "rotate", "a"]).await;
    assert!(code == 2 && out.contains("both signatures"), "a preview alone: {out}");
    assert_eq!(std::fs::read_to_string(&secret).unwrap(), first);

    assert_eq!(change(&db, &["rotate", "a"]).await.0, 0);
    let second = std::fs::read_to_string(&secret).unwrap();
    assert!(second.starts_with("whsec_") && second != first);
    assert_eq!(change(&db, &["rotate", "a"]).await.0, 0);
    assert_eq!(std::fs::read_to_string(&previous).unwrap(), second);
    let audited = "select count(*) from fencepost.audit_log where action = 'consumers rotate' and object = 'a'";
    assert_eq!(db.client().await.query_one(audited, &[]).await.unwrap().get::<_, i64>(0), 2);

    assert_eq!(apply(&db, &format!("revision = 2\n{}", http_consumer("a"))).await.0, 0);
    let (code, _, err) = fencepost(&db, NOTHING, &["consumers", "rotate", "a"]).await;
    assert!(code == 2 && err.contains("has no secret_file"), "{err}");
    std::fs::remove_dir_all(folder).unwrap();
}
