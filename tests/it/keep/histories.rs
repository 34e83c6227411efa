//! Histories that were rewound or copied, with real servers: a standby promoted without the last transactions, a database
//! set back to a moment, a dump restored elsewhere, and what an operator says where nothing shows it.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use fencepost::demo::embedded::postgres::{Durability, PrivatePostgres};
use fencepost::store::schema;
use serde_json::json;
use tokio_postgres::{Client, NoTls};

use crate::support::copies::Backup;
use crate::support::db::TestDb;
use crate::support::eventually;
use crate::support::process::{self, Process};
use crate::support::receiver::Receiver;
use crate::support::script::{Gate, Script};

async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

/// A server with an empty database `x`.
async fn server() -> PrivatePostgres {
    let server = PrivatePostgres::start(Durability::None).await.unwrap();
    connect(&server.url("postgres")).await.batch_execute("create database x template template0").await.unwrap();
    server
}

async fn migrated() -> (PrivatePostgres, Client) {
    let server = server().await;
    let mut client = connect(&server.url("x")).await;
    schema::migrate(&mut client).await.unwrap();
    (server, client)
}

/// Relays with short leases, with an edge that absorbs duplicates and one that does not.
struct Setting {
    config: PathBuf,
    receiver: Receiver,
}

impl Setting {
    async fn new() -> Self {
        let receiver = Receiver::start().await;
        let config = std::env::temp_dir().join(format!("fencepost-history-{:016x}.toml", rand::random::<u64>()));
        let url = receiver.url();
        let text = format!(
            "[relay]\nshard_lease = '3s'\nrenew_every = '1s'\nshutdown_grace = '1s'\n[retry]\nbase = '50ms'\ncap = '200ms'\n[admin]\nlisten = '127.0.0.1:0'
             [[consumers]]\nname = 'a'\nkind = 'http'\nurl = '{url}'\nack = 'required'\ntimeout = '2s'\ntopics = ['t']
             [[consumers]]\nname = 'h'\nkind = 'http'\nurl = '{url}'\nack = 'none'\non_ambiguous = 'hold'\ntimeout = '2s'\n"
        );
        std::fs::write(&config, text).unwrap();
        Self { config, receiver }
    }

    fn env<'a>(&'a self, url: &'a str) -> [(&'a str, &'a str); 2] {
        [("DATABASE_URL", url), ("FENCEPOST_CONFIG", self.config.to_str().unwrap())]
    }

    fn relay(&self, url: &str) -> Process {
        Process::start(&["run"], &self.env(url))
    }

    fn seen(&self, key: &str) -> usize {
        self.receiver.requests_for(key).len()
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.config);
    }
}

async fn emit(client: &Client, task: &str, consumer: &str) {
    let effects = json!([{"consumer": consumer, "payload": 1}]);
    client.query("select fencepost.record_completion($1, 1, $2)", &[&task, &effects]).await.unwrap();
}

async fn count(client: &Client, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.unwrap_or_else(|e| panic!("{sql}: {e:?}")).get(0)
}

async fn counts(client: &Client, sql: &str, wanted: i64) {
    let mut last = -1;
    let what = format!("{wanted} = {sql}");
    eventually(&what, async || {
        last = count(client, sql).await;
        (last == wanted).then_some(())
    })
    .await;
}

const APPLIED: &str = "select count(*) from fencepost.ledger where token = 'applied'";

#[tokio::test]
async fn a_standby_promoted_without_the_last_transactions_loses_no_effect_it_has() {
    let (mut primary, c) = migrated().await;
    let standby = primary.standby().await.unwrap();
    let setting = Setting::new().await;
    // On a standby a relay waits.
    let mut idle = setting.relay(&standby.url("x"));
    idle.says("the server is a standby").await;
    idle.kill().await;

    let ports: Vec<String> = [&primary, &standby]
        .map(|s| s.tcp_url("x").rsplit_once('@').unwrap().1.split('/').next().unwrap().to_owned())
        .to_vec();
    let password = primary.tcp_url("x").split(':').nth(2).unwrap().split('@').next().unwrap().to_owned();
    let both = format!("postgresql://postgres:{password}@{}/x?target_session_attrs=read-write", ports.join(","));
    let mut relay = setting.relay(&both);
    relay.says("shard taken shard=7 ").await;
    for n in 0..20 {
        emit(&c, &format!("safe-{n}"), "a").await;
    }
    counts(&c, APPLIED, 20).await;
    c.batch_execute("select fencepost.submit_task('k', '{}', 'work')").await.unwrap();
    let s = connect(&standby.url("x")).await;
    counts(&s, APPLIED, 20).await;
    counts(&s, "select count(*) from fencepost.tasks where task_id = 'work'", 1).await;

    // From here on the standby hears nothing.
    s.batch_execute("alter system set primary_conninfo = ''").await.unwrap();
    s.batch_execute("select pg_reload_conf()").await.unwrap();
    counts(&s, "select count(*) from pg_stat_wal_receiver", 0).await;
    let claim = "select lease_epoch from fencepost.claim_tasks('w', task_ids => array['work'])";
    assert_eq!(count(&c, claim).await, 1, "an epoch that will be forgotten");
    for n in 0..60 {
        emit(&c, &format!("lost-{n}"), "a").await;
    }
    counts(&c, APPLIED, 80).await;
    // Their outcome comes when their effects are no more.
    let gate = Gate::shut();
    let late = Script::answer(200).ack("applied").behind(&gate);
    setting.receiver.choose(move |request| request.key().starts_with("stalled").then(|| late.clone()));
    for n in 0..8 {
        emit(&c, &format!("stalled-{n}"), "a").await;
    }
    setting.receiver.wait_until(88).await;
    let lost_ids = count(&c, "select max(id) from fencepost.effects").await;
    primary.stop_immediate().await.unwrap();
    s.batch_execute("select pg_promote()").await.unwrap();
    eventually("the standby is promoted", async || {
        let recovery = "select pg_is_in_recovery()::int::bigint";
        (count(&s, recovery).await == 0).then_some(())
    })
    .await;
    assert_eq!(count(&s, APPLIED).await, 20, "the last transactions are lost");
    for n in 0..100 {
        emit(&s, &format!("new-{n}"), "a").await;
    }
    let again =
        count(&s, &format!("select count(*) from fencepost.effects where task_id like 'new-%' and id <= {lost_ids}"))
            .await;
    assert!(again > 0, "ids of lost effects were drawn again");
    gate.open();

    relay.says("all that was in memory is dropped").await;
    counts(&s, APPLIED, 120).await;
    for n in 0..100 {
        assert!(setting.seen(&format!("new-{n}:1")) >= 1, "new-{n} never arrived");
    }
    counts(&s, "select count(*) from fencepost.flights where token is null", 0).await;
    assert_eq!(count(&s, "select count(*) from fencepost.parked").await, 0);
    assert_eq!(count(&s, "select count(*) from fencepost.alarms").await, 0);
    let epoch = count(&s, claim).await;
    assert!(epoch >= 1 << 20, "epoch {epoch} could have been given out before");
    assert_eq!(
        count(&s, "select count(*) from fencepost.flights where token = 'rebase'").await,
        0,
        "positions stay valid"
    );
    relay.kill().await;
}

#[tokio::test]
async fn a_database_set_back_to_a_moment_loses_no_effect_it_has_and_gives_no_epoch_out_twice() {
    let (mut primary, c) = migrated().await;
    drop(c);
    let backup = Backup::of(&mut primary).await;
    let url = primary.url("x");
    let c = connect(&url).await;
    let setting = Setting::new().await;
    let mut relay = setting.relay(&url);
    relay.says("shard taken shard=7 ").await;
    for n in 0..20 {
        emit(&c, &format!("safe-{n}"), "a").await;
    }
    counts(&c, APPLIED, 20).await;
    counts(&c, "select count(*) from fencepost.flights where token is null", 0).await;
    c.batch_execute("select fencepost.submit_task('k', '{}', 'work')").await.unwrap();
    // On their way when the moment comes, and when everything ends.
    let gate = Gate::shut();
    let late = Script::answer(200).ack("applied").behind(&gate);
    let slow = |key: &str| ["going", "stalled"].iter().any(|label| key.starts_with(label));
    setting.receiver.choose(move |request| slow(&request.key()).then(|| late.clone()));
    for n in 0..8 {
        emit(&c, &format!("going-{n}"), "a").await;
    }
    setting.receiver.wait_until(28).await;

    // The moment. Of what follows nobody but the consumer will know.
    c.batch_execute("select pg_create_restore_point('the moment')").await.unwrap();
    let claim = "select lease_epoch from fencepost.claim_tasks('w', task_ids => array['work'])";
    assert_eq!(count(&c, claim).await, 1, "an epoch that will be forgotten");
    for n in 0..60 {
        emit(&c, &format!("lost-{n}"), "a").await;
    }
    counts(&c, APPLIED, 80).await;
    for n in 0..8 {
        emit(&c, &format!("stalled-{n}"), "a").await;
    }
    setting.receiver.wait_until(96).await;
    let lost_ids = count(&c, "select max(id) from fencepost.effects").await;
    backup.holds_all().await;
    primary.stop_immediate().await.unwrap();
    let _recovered = backup.recover_to("the moment").await;

    let s = connect(&url).await;
    assert_eq!(count(&s, APPLIED).await, 20);
    assert_eq!(count(&s, "select count(*) from fencepost.effects").await, 28, "nothing of what followed the moment");
    for n in 0..100 {
        emit(&s, &format!("new-{n}"), "a").await;
    }
    let again = format!("select count(*) from fencepost.effects where task_id like 'new-%' and id <= {lost_ids}");
    assert!(count(&s, &again).await > 0, "ids of lost effects were drawn again");
    gate.open();

    // It is said, and what was in memory says nothing of what has its ids now.
    relay.says("the database is on another server, timeline or copy than before").await;
    relay.says("all that was in memory is dropped").await;
    counts(&s, APPLIED, 20 + 8 + 100).await;
    for (label, many) in [("going", 8), ("new", 100)] {
        for n in 0..many {
            assert!(setting.seen(&format!("{label}-{n}:1")) >= 1, "{label}-{n} never arrived");
        }
    }
    for n in 0..20 {
        assert_eq!(setting.seen(&format!("safe-{n}:1")), 1, "positions stay valid: safe-{n} is not read again");
    }
    counts(&s, "select count(*) from fencepost.flights where token is null", 0).await;
    assert_eq!(count(&s, "select count(*) from fencepost.flights where token = 'rebase'").await, 0);
    assert_eq!(count(&s, "select count(*) from fencepost.parked").await, 0);
    assert_eq!(count(&s, "select count(*) from fencepost.alarms").await, 0);
    let epoch = count(&s, claim).await;
    assert!(epoch >= 1 << 20, "epoch {epoch} could have been given out before");
    let (code, out, err) = process::run(&["audit"], &setting.env(&url)).await;
    assert_eq!(code, 0, "{out} {err}");
    relay.kill().await;
}

#[tokio::test]
async fn a_dump_restored_elsewhere_is_rebased_and_nothing_is_lost_or_read_again() {
    let (old, c) = migrated().await;
    let setting = Setting::new().await;
    // Far ahead in transactions of what the new server will have seen.
    c.batch_execute("do $$ begin for i in 1..3000 loop perform pg_current_xact_id(); commit; end loop; end $$")
        .await
        .unwrap();
    let mut relay = setting.relay(&old.url("x"));
    relay.says("shard taken shard=7 ").await;
    for n in 0..20 {
        emit(&c, &format!("done-{n}"), "a").await;
    }
    counts(&c, APPLIED, 20).await;
    relay.kill().await;
    for n in 0..10 {
        emit(&c, &format!("unread-{n}"), "a").await;
    }
    emit(&c, "held", "h").await;
    c.query(
        "select fencepost.emit('[{\"consumer\": \"a\", \"payload\": 1, \"deliver_in\": \"1 hour\"}]', 'later')",
        &[],
    )
    .await
    .unwrap();
    c.batch_execute("select fencepost.submit_task('k', '{}', 'work')").await.unwrap();
    let claim = "select lease_epoch from fencepost.claim_tasks('w', task_ids => array['work'], lease => '1 ms')";
    assert_eq!(count(&c, claim).await, 1);

    let new = server().await;
    let file = std::env::temp_dir().join(format!("fencepost-dump-{:016x}", rand::random::<u64>()));
    let run = |program: &str, args: &[&str]| {
        let output = Command::new(new.program(program)).args(args).output().unwrap();
        assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    };
    let path = file.to_str().unwrap();
    run("pg_dump", &["-Fc", "-f", path, "-d", &old.url("x")]);
    run("pg_restore", &["-d", &new.url("x"), path]);
    std::fs::remove_file(&file).unwrap();

    let n = connect(&new.url("x")).await;
    let behind = "select count(*) from fencepost.effects where xid >= pg_snapshot_xmax(pg_current_snapshot())";
    assert!(count(&n, behind).await > 0, "effects carry transaction ids this server has not come to");
    // A producer that had begun before the rebase, and commits after.
    let open = connect(&new.url("x")).await;
    open.batch_execute("begin").await.unwrap();
    emit(&open, "open", "a").await;
    let mut relay = setting.relay(&new.url("x"));
    relay.says("the log must be rebased").await;
    relay.says("the rebase waits for transactions").await;
    for k in 0..10 {
        emit(&n, &format!("during-{k}"), "a").await;
    }
    open.batch_execute("commit").await.unwrap();
    relay.says("the log was rebased").await;
    for k in 0..10 {
        emit(&n, &format!("after-{k}"), "a").await;
    }
    counts(&n, APPLIED, 20 + 10 + 1 + 10 + 10).await;
    for key in ["open:1", "unread-3:1", "during-3:1", "after-3:1", "done-3:1"] {
        assert_eq!(setting.seen(key), 1, "{key}");
    }
    let state = "select count(*) from fencepost.deliveries where (key, token) in (values ('held:1', 'in_doubt'), ('later:1', 'scheduled'))";
    assert_eq!(count(&n, state).await, 2);
    assert_eq!(setting.seen("held:1"), 0);
    assert_eq!(count(&n, "select count(*) from fencepost.flights where token = 'rebase'").await, 8);
    assert_eq!(count(&n, "select count(*) from fencepost.audit_log where action = 'rebase'").await, 1);
    let above = "select count(*) from fencepost.history, fencepost.effects where task_id like 'after-%' and id > log_floor and log_floor >= 68719476735";
    assert_eq!(count(&n, above).await, 10, "reading touches no old segment");
    let epoch = count(&n, claim).await;
    assert!(epoch >= 1 << 20, "epoch {epoch} could have been given out before");

    // Once is enough; and what is read is still read once.
    relay.kill().await;
    let mut second = setting.relay(&new.url("x"));
    second.says("shard taken shard=7 ").await;
    emit(&n, "last", "a").await;
    counts(&n, APPLIED, 52).await;
    assert!(!second.log().contains("rebase"), "{}", second.log());
    assert_eq!(count(&n, "select count(*) from fencepost.alarms").await, 0);
    second.kill().await;
}

#[tokio::test]
async fn an_identity_behind_its_effects_is_refused_with_the_remedy() {
    let db = TestDb::new().await;
    let setting = Setting::new().await;
    let mut relay = setting.relay(db.url());
    relay.says("shard taken shard=7 ").await;
    let c = db.client().await;
    for n in 0..3 {
        emit(&c, &format!("t{n}"), "a").await;
    }
    relay.kill().await;
    c.batch_execute("select setval('fencepost.effects_id_seq', 1)").await.unwrap();
    let (code, _, err) = process::run(&["run"], &setting.env(db.url())).await;
    assert_eq!(code, 1, "{err}");
    let remedy = "select setval('fencepost.effects_id_seq', 3)";
    assert!(err.contains(remedy), "{err}");
    c.batch_execute(remedy).await.unwrap();
    let mut relay = setting.relay(db.url());
    relay.says("shard taken shard=7 ").await;
    relay.kill().await;
}

#[tokio::test]
async fn an_operator_says_what_nothing_shows() {
    let db = TestDb::new().await;
    let setting = Setting::new().await;
    let c = db.client().await;
    let mut relay = setting.relay(db.url());
    relay.says("shard taken shard=7 ").await;
    c.batch_execute("select fencepost.submit_task('k', '{}', 'work')").await.unwrap();
    let yes = ["--yes", "--reason", "the volume was set back"];
    let rebase = async |more: &[&str]| {
        let args: Vec<&str> = ["rebase"].iter().chain(more).copied().collect();
        process::run(&args, &setting.env(db.url())).await
    };
    let (code, out, err) = rebase(&["--new-history", "--yes", "--reason", "x"]).await;
    assert!(code == 2 && err.contains("stop the relays first"), "{code} {out} {err}");
    relay.kill().await;
    tokio::time::sleep(Duration::from_millis(10)).await;
    eventually("the leases run out", async || {
        let held = "select count(*) from fencepost.shards where lease_expires_at > clock_timestamp()";
        (count(&c, held).await == 0).then_some(())
    })
    .await;
    let (code, out, err) = rebase(&["--new-history"]).await;
    assert!(code == 2 && out.contains("epochs go on") && err.contains("nothing was changed"), "{code} {out} {err}");
    let (code, out, err) = rebase(&["--new-history", yes[0], yes[1], yes[2]]).await;
    assert_eq!(code, 0, "{out} {err}");
    let claim = "select lease_epoch from fencepost.claim_tasks('w', task_ids => array['work'])";
    assert!(count(&c, claim).await >= 1 << 20);

    emit(&c, "owed", "a").await;
    let (code, out, _) = rebase(&[]).await;
    assert!(code == 2 && out.contains("not needed") && out.contains("1 unfinished"), "{code} {out}");
    let (code, out, err) = rebase(&yes).await;
    assert_eq!(code, 0, "{out} {err}");
    let audited = "select count(*) from fencepost.audit_log where reason = 'the volume was set back'";
    assert_eq!(count(&c, audited).await, 2);
    let mut relay = setting.relay(db.url());
    counts(&c, APPLIED, 1).await;
    assert_eq!(setting.seen("owed:1"), 1);
    relay.kill().await;
}
