//! What every change has in common: shown first, done only with `--yes --reason`, and audited.

use super::{NOTHING, fencepost, http_consumer};
use crate::support::db::TestDb;

#[tokio::test]
async fn nothing_changes_without_yes_and_reason() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let config = http_consumer("a");
    for consent in [&[][..], &["--yes"], &["--reason", "why"], &["--yes", "--reason", " "]] {
        let args: Vec<&str> = ["consumers", "apply"].iter().chain(consent).copied().collect();
        let (code, _, err) = fencepost(&db, &config, &args).await;
        assert_eq!(code, 2, "{consent:?}: {err}");
    }
    let (code, out, _) = fencepost(&db, &config, &["consumers", "apply", "--dry-run"]).await;
    assert!(code == 0 && out.contains("add      a"), "{out}");
    let count = |sql: &'static str| async { client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) };
    assert_eq!(count("select count(*) from fencepost.consumers").await, 0);
    assert_eq!(count("select count(*) from fencepost.audit_log").await, 0);

    let (code, _, err) = fencepost(&db, &config, &["consumers", "apply", "--yes", "--reason", "first"]).await;
    assert_eq!(code, 0, "{err}");
    let row = client
        .query_one("select actor::text, action, object, reason, detail from fencepost.audit_log", &[])
        .await
        .unwrap();
    assert_eq!(row.get::<_, String>(1), "consumers apply");
    assert_eq!(row.get::<_, String>(3), "first");
    assert_eq!(row.get::<_, serde_json::Value>(4)["changes"][0]["name"], "a");
}

#[tokio::test]
async fn hostile_text_is_escaped() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let hostile = "x\u{1b}[2J\u{202e}";
    client
        .execute("insert into fencepost.alarms (name, object, detail) values ('orphan', $1, $1)", &[&hostile])
        .await
        .unwrap();
    let (code, out, _) = fencepost(&db, NOTHING, &["status"]).await;
    assert_eq!(code, 1);
    assert!(out.contains("x\\u{1b}[2J\\u{202e}") && !out.contains('\u{1b}'), "{out:?}");
    let (_, _, err) = fencepost(&db, NOTHING, &["consumers", "pause", hostile]).await;
    assert!(!err.contains('\u{1b}'), "{err:?}");
}
