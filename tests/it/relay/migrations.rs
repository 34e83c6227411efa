//! Ten replicas start at once; a schema from the future is left alone.

use crate::support::db::TestDb;
use crate::support::process;

#[tokio::test]
async fn ten_processes_migrate_an_empty_database_at_once() {
    let db = TestDb::empty().await;
    let env = [("DATABASE_URL", db.url())];
    let mut racing = tokio::task::JoinSet::new();
    for _ in 0..10 {
        let url = db.url().to_owned();
        racing.spawn(async move { process::run(&["migrate", "--json"], &[("DATABASE_URL", &url)]).await });
    }
    let mut applied = 0;
    for (code, out, err) in racing.join_all().await {
        assert_eq!(code, 0, "{out}{err}");
        let said: serde_json::Value = serde_json::from_str(&out).expect("JSON");
        applied += said["applied"].as_array().expect("a list").len();
    }
    let client = db.client().await;
    let known: i64 = client.query_one("select count(*) from fencepost.schema_migrations", &[]).await.unwrap().get(0);
    assert_eq!(applied as i64, known, "each migration was applied by one of them");
    for (sql, expected) in [
        ("select count(*) from fencepost.flights where token = 'origin'", 8),
        ("select count(*) from fencepost.shards", 8),
        ("select count(*) from fencepost.history", 1),
    ] {
        assert_eq!(client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0), expected, "{sql}");
    }
    let (code, _, err) = process::run(&["status"], &env).await;
    assert_eq!(code, 0, "{err}");
}

#[tokio::test]
async fn a_newer_schema_is_refused_by_every_command() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let newer = "insert into fencepost.schema_migrations select (jsonb_populate_record(m, '{\"version\": 9999, \"name\": \"9999_future\"}')).*
                 from fencepost.schema_migrations m order by version desc limit 1";
    client.batch_execute(newer).await.unwrap();
    let env = [("DATABASE_URL", db.url()), ("FENCEPOST__ADMIN__LISTEN", "127.0.0.1:0")];
    for command in ["migrate", "run", "status"] {
        let (code, out, err) = process::run(&[command], &env).await;
        assert_eq!(code, 1, "{command}: {out}{err}");
        assert!(format!("{out}{err}").contains("version 9999"), "{command}: {out}{err}");
    }
    let touched = "select count(*) from fencepost.relays";
    assert_eq!(client.query_one(touched, &[]).await.unwrap().get::<_, i64>(0), 0);
}

#[tokio::test]
async fn a_relay_waits_for_nobody_to_migrate() {
    let db = TestDb::empty().await;
    let env = [("DATABASE_URL", db.url()), ("FENCEPOST__ADMIN__LISTEN", "127.0.0.1:0")];
    let (code, out, err) = process::run(&["run"], &env).await;
    assert_eq!(code, 1, "{out}{err}");
    assert!(format!("{out}{err}").contains("run `fencepost migrate`"), "{out}{err}");
}
