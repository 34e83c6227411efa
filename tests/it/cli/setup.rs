//! migrate, check, grant, and what every command has in common.

use super::{NOTHING, fencepost, http_consumer, json};
use crate::support::db::TestDb;
use crate::support::process;

#[tokio::test]
async fn migrate_says_what_it_applied_and_is_idempotent() {
    let db = TestDb::empty().await;
    let (code, _, err) = fencepost(&db, NOTHING, &["status"]).await;
    assert_eq!(code, 1);
    assert!(err.contains("run `fencepost migrate`"), "{err}");

    let before = json(&db, NOTHING, 0, &["migrate", "--dry-run"]).await;
    assert_eq!(before["pending"][0], "001_tables");
    let first = json(&db, NOTHING, 0, &["migrate"]).await;
    assert_eq!(first["applied"], before["pending"]);
    let (code, out, _) = fencepost(&db, NOTHING, &["migrate"]).await;
    assert_eq!((code, out.contains("up to date")), (0, true), "{out}");
}

#[tokio::test]
async fn a_faulty_configuration_ends_with_2_and_every_fault() {
    let db = TestDb::new().await;
    let config = "[relay]\nshard_lease = '1'\nfoo = 1\n[[consumers]]\nname = 'a'\nkind = 'http'\n";
    let (code, out, err) = fencepost(&db, config, &["check"]).await;
    assert_eq!(code, 2, "{out}{err}");
    for key in ["relay.shard_lease: ", "relay.foo: ", "consumers[0] (a).url: missing"] {
        assert!(out.contains(key), "{key} is missing in {out}");
    }
    let (code, _, err) = fencepost(&db, config, &["consumers", "apply", "--dry-run"]).await;
    assert_eq!(code, 2);
    assert!(err.contains("3 faults"), "{err}");
    // The database is named by the environment: a broken file does not hide its state.
    assert_eq!(fencepost(&db, config, &["status"]).await.0, 0);
}

#[tokio::test]
async fn without_a_database_the_answer_is_2() {
    let (code, _, err) = process::run(&["status", "--config", "/no/such.toml"], &[("DATABASE_URL", "host=")]).await;
    assert_eq!(code, 2, "{err}");
    let (code, _, err) = process::run(&["statuses"], &[]).await;
    assert_eq!(code, 2, "{err}");
    // A database that is there does not make up for a file that was named and is not.
    let db = TestDb::new().await;
    let (code, _, err) = process::run(&["status", "--config", "/no/such.toml"], &[("DATABASE_URL", db.url())]).await;
    assert!(code == 2 && err.contains("/no/such.toml"), "{err}");
}

#[tokio::test]
async fn an_unreachable_database_is_1_and_says_so() {
    let url = "postgresql://u:hunter2@127.0.0.1:1/x";
    for command in [&["status"][..], &["migrate"], &["wait", "--until-drained", "--timeout", "1ms"]] {
        let (code, out, err) = process::run(command, &[("DATABASE_URL", url)]).await;
        let said = out + &err;
        assert_eq!(code, 1, "{command:?}: {said}");
        assert!(
            said.contains("127.0.0.1:1") && said.contains("refused") && !said.contains("hunter2"),
            "{command:?}: {said}"
        );
    }
    let (_, _, err) = process::run(&["status"], &[("DATABASE_URL", url)]).await;
    assert!(err.contains("cannot reach the database"), "{err}");
    let mut relay = process::Process::start(&["run"], &[("DATABASE_URL", url)]);
    let line = relay.says("the database is").await;
    assert!(line.contains("127.0.0.1:1") && !relay.log().contains("hunter2"), "{}", relay.log());
    relay.kill().await;
}

#[tokio::test]
async fn check_names_what_cannot_be_reached() {
    let db = TestDb::new().await;
    let report = json(&db, &http_consumer("a"), 1, &["check"]).await;
    let wrong: Vec<&str> = report["findings"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|finding| !finding["wrong"].is_null())
        .map(|finding| finding["subject"].as_str().unwrap())
        .collect();
    assert_eq!(wrong, ["consumer a at 127.0.0.1:1"]);
    assert!(!report.to_string().contains("hunter2"));
    json(&db, &http_consumer("a"), 0, &["check", "--offline"]).await;

    let unreadable = format!("{}secret_file = '/no/such'\n", http_consumer("a"));
    let (code, out, _) = fencepost(&db, &unreadable, &["check", "--offline"]).await;
    assert!(code == 1 && out.contains("/no/such"), "{out}");
    let long = "[retry]\nbudget = '8d'\n";
    let (code, out, _) = fencepost(&db, long, &["check"]).await;
    assert!(code == 1 && out.contains("shorter than retry.budget"), "{out}");
}

#[tokio::test]
async fn check_names_the_rights_a_relay_lacks() {
    let db = TestDb::new().await;
    let role = format!("{}_relay", db.name());
    let client = db.client().await;
    client
        .batch_execute(&format!(
            "create role {role} login; grant usage on schema fencepost to {role}; \
        grant select on fencepost.schema_migrations, fencepost.settings to {role}"
        ))
        .await
        .unwrap();
    let url = db.url_as(&role);
    let (code, out, err) = process::run(&["check"], &[("DATABASE_URL", &url)]).await;
    assert_eq!(code, 1, "{out}{err}");
    assert!(out.contains(&format!("fencepost grant {role} --as relay")), "{out}");
    let grant = ["grant", &role, "--as", "relay", "--yes", "--reason", "tests"];
    assert_eq!(fencepost(&db, NOTHING, &grant).await.0, 0);
    let (code, out, err) = process::run(&["check"], &[("DATABASE_URL", &url)]).await;
    assert_eq!(code, 0, "{out}{err}");
    // The rights suffice for what a relay and its operator do.
    let path = std::env::temp_dir().join(format!("{role}.toml"));
    std::fs::write(&path, format!("{}topics = ['t']", http_consumer("a"))).unwrap();
    let env = [("DATABASE_URL", url.as_str()), ("FENCEPOST_CONFIG", path.to_str().unwrap())];
    for args in [
        &["consumers", "apply", "--yes", "--reason", "r"][..],
        &["consumers", "retire", "a", "--yes", "--reason", "r"],
        &["consumers", "resume", "a", "--yes", "--reason", "r"],
        &["status"],
        &["deliveries", "list"],
    ] {
        let (code, out, err) = process::run(args, &env).await;
        assert_eq!(code, 0, "{args:?}: {out}{err}");
    }
    std::fs::remove_file(path).unwrap();
    client.batch_execute(&format!("drop owned by {role}; drop role {role}")).await.unwrap();
}

#[tokio::test]
async fn secrets_are_new_each_time_and_valid() {
    let new = async || process::run(&["secret", "new"], &[]).await.1;
    let (one, other) = (new().await, new().await);
    assert_ne!(one, other);
    fencepost::edge::sign::Secret::parse(&one).unwrap();
}
