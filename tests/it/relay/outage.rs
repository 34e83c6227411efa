//! PostgreSQL goes away and comes back: nothing is lost, nothing that was answered is sent again, and little is said.

use std::time::Duration;

use fencepost::demo::embedded::postgres::PrivatePostgres;
use fencepost::store;
use fencepost::store::session::Session;
use serde_json::json;
use tokio_postgres::{Client, NoTls};

use super::{Relay, all_landed, all_settled, declare, emit, emit_many};
use crate::support::db::{TestDb, own_server};
use crate::support::eventually;
use crate::support::process::Process;
use crate::support::receiver::Receiver;
use crate::support::script::{Gate, Script};

async fn connect(server: &PrivatePostgres) -> Client {
    let (client, connection) = tokio_postgres::connect(&server.url("postgres"), NoTls).await.expect("a connection");
    tokio::spawn(connection);
    client
}

/// Lines an operator would be woken by.
fn complaints(relay: &Process) -> usize {
    relay.log().lines().filter(|line| line.contains(" WARN ") || line.contains(" ERROR ")).count()
}

/// The server is gone for longer than the relay needs to see it everywhere, with answers on their way.
async fn survives(relay: Relay, outage: Duration) {
    let mut server = own_server().await;
    let client = connect(&server).await;
    let receiver = Receiver::start().await;
    declare(&client, "c", &receiver, json!({"timeout": "60s", "concurrency": 16})).await;
    let gate = Gate::shut();
    receiver.always(Script::answer(200).ack("applied").behind(&gate));
    let relay = relay.env("DATABASE_URL", &server.url("postgres"));
    let mut relay = relay.set("log.level", "info,fencepost::relay::settler=debug").start();
    relay.says("shard taken").await;
    emit_many(&client, "c", "x", 60).await;
    receiver.wait_until(16).await;

    server.stop_immediate().await.unwrap();
    relay.says("the database is gone").await;
    // Sixteen answers arrive that cannot be written.
    gate.open();
    relay.says("outcomes wait for the database").await;
    let answered: Vec<String> = receiver.requests()[..16].iter().map(|request| request.key()).collect();
    tokio::time::sleep(outage).await;
    server.restart().await.unwrap();

    let client = connect(&server).await;
    let tokens = all_settled(&client, 60).await;
    assert_eq!(tokens["applied"], 60);
    all_landed(&client).await;
    for key in &answered {
        assert_eq!(receiver.requests_for(key).len(), 1, "{key} was answered, and sent again");
    }
    emit_many(&client, "c", "y", 40).await;
    all_settled(&client, 100).await;
    let complaints = complaints(&relay);
    // Each of its sessions may say so once, each of its shards may be lost once.
    assert!(complaints > 0 && complaints <= 24, "{complaints} complaints:\n{}", relay.log());
}

#[tokio::test]
async fn an_outage_shorter_than_the_leases_is_survived() {
    survives(Relay::at(""), Duration::from_secs(3)).await;
}

#[tokio::test]
async fn an_outage_longer_than_the_leases_is_survived() {
    survives(Relay::at("").short_leases(), Duration::from_secs(5)).await;
}

#[tokio::test]
async fn transaction_ids_that_a_crash_hands_out_again_hide_nothing() {
    let mut server = own_server().await;
    let client = connect(&server).await;
    client.batch_execute("alter system set autovacuum = off").await.unwrap();
    let receiver = Receiver::start().await;
    declare(&client, "c", &receiver, json!({})).await;
    server.restart().await.unwrap();
    let client = connect(&server).await;
    // No renewal writes while ids are burnt: what is written is what survives the crash.
    let mut relay = Relay::at(&server.url("postgres"))
        .set("relay.shard_lease", "30m")
        .set("relay.renew_every", "10m")
        .set("relay.poll_max", "5ms")
        .start();
    eventually("it holds every shard", async || {
        let sql = "select 1 from fencepost.shards where relay is not null having count(*) = 8";
        client.query_opt(sql, &[]).await.unwrap().map(drop)
    })
    .await;
    emit_many(&client, "c", "before", 10).await;
    all_settled(&client, 10).await;
    all_landed(&client).await;
    // What was written so far is on disk, what comes now is not: ids without a trace.
    client.batch_execute("checkpoint").await.unwrap();
    let mut burnt = 0;
    for _ in 0..500 {
        burnt = client.query_one("select pg_current_xact_id()::text::bigint", &[]).await.unwrap().get(0);
    }
    let polls = "select max(calls)::bigint from (select count(*) as calls from pg_stat_activity where query like '-- store::read_ahead%') p";
    eventually("the relay polls", async || {
        (client.query_one(polls, &[]).await.unwrap().get::<_, i64>(0) > 0).then_some(())
    })
    .await;
    server.stop_immediate().await.unwrap();
    relay.says("the database is gone").await;
    server.restart().await.unwrap();

    let client = connect(&server).await;
    emit(&client, &json!([{"consumer": "c", "payload_text": "after"}])).await;
    let sql = "select max(xid::text::bigint) from fencepost.effects";
    let xid: i64 = client.query_one(sql, &[]).await.unwrap().get(0);
    assert!(xid < burnt, "no id was handed out again: {xid} after {burnt}");
    all_settled(&client, 11).await;
    assert_eq!(receiver.requests().len(), 11);
}

#[tokio::test]
async fn an_opening_that_may_not_be_on_the_standby_is_not_sent() {
    let server = own_server().await;
    let client = connect(&server).await;
    let receiver = Receiver::start().await;
    declare(&client, "c", &receiver, json!({})).await;
    let mut relay =
        Relay::at(&server.url("postgres")).set("relay.shard_lease", "30m").set("relay.renew_every", "10m").start();
    // Taken and swept: what a takeover writes would wait for the standby as well.
    for shard in 0..8 {
        relay.says(&format!("shard taken shard={shard} ")).await;
    }
    // A synchronous standby that is not there: every flushed commit waits.
    client.batch_execute("set synchronous_commit = local").await.unwrap();
    client.batch_execute("alter system set synchronous_standby_names = 'ghost'").await.unwrap();
    client.batch_execute("select pg_reload_conf()").await.unwrap();
    emit(&client, &json!([{"consumer": "c", "payload_text": "x"}])).await;
    let waiting = |statement: &str| {
        format!("select pid from pg_stat_activity where wait_event = 'SyncRep' and query like '-- store::{statement}%'")
    };
    let wait_for = async |statement: &str| {
        eventually(&format!("{statement} waits for the standby"), async || {
            client.query_opt(&waiting(statement), &[]).await.unwrap().map(|row| row.get::<_, i32>(0))
        })
        .await
    };
    let opening = wait_for("write_ahead").await;
    // A cancelled wait answers success, with a warning.
    client.query("select pg_cancel_backend($1)", &[&opening]).await.unwrap();
    wait_for("adopt").await;
    relay.says("may not be on the synchronous standby").await;
    assert_eq!(receiver.requests().len(), 0, "sent before it was safe");
    client.batch_execute("alter system reset synchronous_standby_names").await.unwrap();
    client.batch_execute("select pg_reload_conf()").await.unwrap();
    all_settled(&client, 1).await;
    assert_eq!(receiver.requests().len(), 1);
    assert!(relay.log().contains("was adopted"));
}

/// As a relay that was frozen amid a transaction finds it: its statement is met by the server's farewell.
#[tokio::test]
async fn a_session_that_the_server_ended_is_lost_and_its_statement_unanswered() {
    let db = TestDb::new().await;
    let other = db.client().await;
    let session = Session::open(&db.database()).await.unwrap();
    let client = session.client();
    client.batch_execute("set idle_in_transaction_session_timeout = '1s'").await.unwrap();
    let pid: i32 = client.query_one("select pg_backend_pid()", &[]).await.unwrap().get(0);
    let signal = async |name: &str| {
        let kill = format!("copy (select 1) to program 'cat >/dev/null; kill -{name} {pid}'");
        other.batch_execute(&kill).await.unwrap();
    };
    client.batch_execute("begin").await.unwrap();
    signal("STOP").await;
    let its_patience_ends = async {
        eventually("the time is up", async || {
            let sql =
                "select 1 from pg_stat_activity where pid = $1 and clock_timestamp() > state_change + interval '1.5 s'";
            other.query_opt(sql, &[&pid]).await.unwrap().map(drop)
        })
        .await;
        signal("CONT").await;
    };
    let (answer, ()) = tokio::join!(client.batch_execute("select 1"), its_patience_ends);
    let error = store::Error::from(answer.unwrap_err());
    assert_eq!(error.sqlstate().map(|state| state.code()), Some("25P03"), "{error}");
    assert!(error.is_disconnect(), "{error}");
}
