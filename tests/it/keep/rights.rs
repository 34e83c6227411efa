//! A relay whose role was granted a relay's part and nothing else: it delivers, deletes what it may, and says what it may not.

use std::fs;

use fencepost::store::Database;
use secrecy::SecretString;

use super::{Rounds, WIDTH, emit, keep_for, segments, two_consumers};
use crate::support::db::TestDb;
use crate::support::eventually;
use crate::support::process::Process;
use crate::support::receiver::Receiver;

const ALARM: &str = "select detail from fencepost.alarms where name = 'retention' and resolved_at is null";

/// A role of this database's own. Roles belong to the whole server: `drop_role` it.
async fn lesser_role(db: &TestDb) -> String {
    let role = format!("{}_relay", db.name());
    let grant = format!("create role {role} login; select fencepost.grant_to('{role}', 'relay')");
    db.client().await.batch_execute(&grant).await.unwrap();
    role
}

async fn drop_role(db: &TestDb, role: &str) {
    let gone = format!("drop owned by {role}; drop role {role}");
    db.client().await.batch_execute(&gone).await.unwrap();
}

#[tokio::test]
async fn a_relay_without_the_owners_rights_delivers_deletes_rows_and_says_what_it_may_not() {
    let db = TestDb::new().await;
    let c = db.client().await;
    let role = lesser_role(&db).await;
    let receiver = Receiver::start().await;
    let config = std::env::temp_dir().join(format!("{role}.toml"));
    let consumer = format!("[[consumers]]\nname = 'a'\nkind = 'http'\nurl = '{}'\nack = 'required'\n", receiver.url());
    fs::write(&config, consumer).unwrap();
    let url = db.url_as(&role);
    let env = [("DATABASE_URL", url.as_str()), ("FENCEPOST_CONFIG", config.to_str().unwrap())];
    c.batch_execute(
        "insert into fencepost.audit_log (at, action, object, reason) values (clock_timestamp() - interval '91 days', 'x', 'x', 'x');
         insert into fencepost.workers (owner, token, refused, at) values ('old', 'failed', 1, clock_timestamp() - interval '8 days')",
    )
    .await
    .unwrap();
    let mut relay = Process::start(&["run"], &env);
    let said = relay.says("may neither add nor drop segments of the log").await;
    assert!(said.contains(&format!(" to {role}, and restart the relay")), "{said}");
    let count = async |sql: &str| c.query_one(sql, &[]).await.unwrap().get::<_, i64>(0);
    eventually("rows are deleted by age", async || {
        let left = "select (select count(*) from fencepost.audit_log where action = 'x') + (select count(*) from fencepost.workers)";
        (count(left).await == 0).then_some(())
    })
    .await;
    assert!(c.query_opt(ALARM, &[]).await.unwrap().is_none(), "nothing is due yet");
    emit(&c, "t", ("consumer", "a")).await;
    receiver.wait_until(1).await;

    // The segment's time is over: from here on the log should have moved on.
    keep_for(&c, "12 seconds", "0").await;
    relay.kill().await;
    let mut relay = Process::start(&["run"], &env);
    let alarm: String = eventually("the alarm", async || c.query_opt(ALARM, &[]).await.unwrap()).await.get(0);
    assert!(alarm.contains(&format!(" to {role}, and restart the relay")), "{alarm}");
    emit(&c, "u", ("consumer", "a")).await;
    eventually("it goes on delivering", async || {
        receiver.requests().iter().any(|request| request.key() == "u:1").then_some(())
    })
    .await;
    assert_eq!(segments(&c, "effects").await, [0, WIDTH]);
    relay.kill().await;

    // The remedy it names.
    let owner: String = c.query_one("select quote_ident(current_user)", &[]).await.unwrap().get(0);
    assert!(alarm.contains(&format!("grant {owner} to {role}")), "{alarm}");
    c.batch_execute(&format!("grant {owner} to {role}")).await.unwrap();
    let mut relay = Process::start(&["run"], &env);
    relay.says("the log goes on in a new segment").await;
    eventually("no alarm", async || c.query_opt(ALARM, &[]).await.unwrap().is_none().then_some(())).await;
    relay.kill().await;
    fs::remove_file(config).unwrap();
    drop_role(&db, &role).await;
}

#[tokio::test]
async fn a_relay_that_may_not_leaves_the_segments_to_one_that_may() {
    let db = TestDb::new().await;
    let c = db.client().await;
    let role = lesser_role(&db).await;
    two_consumers(&c).await;
    keep_for(&c, "1 microsecond", "0").await;
    emit(&c, "t", ("consumer", "a")).await;
    let lesser = Database::new(&SecretString::from(db.url_as(&role)), "test").unwrap();
    // The lesser one was first, and does what can be done.
    let mut first = Rounds::over(&lesser).await;
    first.round().await;
    assert!(c.query_opt(ALARM, &[]).await.unwrap().is_some());
    let mut second = Rounds::new(&db).await;
    second.round().await;
    assert!(c.query_opt(ALARM, &[]).await.unwrap().is_none(), "somebody sees to it");
    assert_eq!(segments(&c, "effects").await, [0, WIDTH, 2 * WIDTH]);
    let next = emit(&c, "u", ("consumer", "a")).await;
    assert_eq!(next, WIDTH, "the log has moved on");
    first.round().await;
    assert!(c.query_opt(ALARM, &[]).await.unwrap().is_none(), "and nobody complains");
    drop((first, second));
    drop_role(&db, &role).await;
}
