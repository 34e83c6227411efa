//! The database goes away, or forgets.

use std::sync::Arc;
use std::time::SystemTime;

use fencepost::demo::embedded::guardian::Signal;
use fencepost::model::key::{FlightSeq, Shard, ShardEpoch};
use fencepost::relay::settler::Settler;
use fencepost::store::settle::CloseRow;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::support::db::{database_at, own_server};
use crate::support::kill;
use crate::support::receiver::{Gate, Receiver, Script};
use crate::truth::rig::{Rig, http};

#[tokio::test]
async fn a_database_gone_while_effects_are_in_flight_costs_no_second_send() {
    let receiver = Receiver::start().await;
    let gate = Gate::shut();
    receiver.always(Script::answer(200).ack("applied").behind(&gate));
    let mut server = own_server().await;
    let consumers = [
        http("shop", &receiver.url(), "timeout = '20s'"),
        http("bank", &receiver.url(), "timeout = '20s'\non_ambiguous = 'hold'"),
    ]
    .concat();
    let mut rig = Rig::on_server(&server, &consumers.replace("timeout = '1s'\n", "")).await;
    let mut relay =
        rig.relay_with(&[("FENCEPOST__RELAY__SHARD_LEASE", "60s"), ("FENCEPOST__RELAY__RENEW_EVERY", "20s")]);
    rig.holds_all(&mut relay).await;
    for n in 0..10 {
        rig.emit(&format!("retry-{n}"), "shop").await;
        rig.emit(&format!("hold-{n}"), "bank").await;
    }
    receiver.wait_until(20).await;
    server.stop_immediate().await.expect("it stops");
    gate.open();
    relay.says("the database is gone").await;
    server.restart().await.expect("it starts again");
    rig.reconnect().await;
    rig.counts("select count(*) from fencepost.ledger where token = 'applied'", 20).await;
    rig.rests().await;
    assert_eq!(receiver.requests().len(), 20, "outcomes waited in memory; nothing was sent twice");
    assert_eq!(rig.count("select count(*) from fencepost.flights where token = 'lost'").await, 0);
}

/// A log writer that stands still keeps what was committed without waiting off the disk.
async fn log_writer_stands_still(rig: &Rig) -> i32 {
    let sql = "select pid from pg_stat_activity where backend_type = 'walwriter'";
    let writer = rig.client.query_one(sql, &[]).await.expect("a log writer").get(0);
    kill("STOP", writer);
    writer
}

/// The server ends every session and recovers what its disk has.
async fn crashes_with(writer: i32, rig: &mut Rig) {
    kill("KILL", writer);
    let lost = rig.client.query_one("select pg_sleep(30)", &[]).await;
    assert!(lost.is_err(), "the server crashed");
    rig.reconnect().await;
}

#[tokio::test]
async fn outcomes_a_database_crash_forgot_are_written_again() {
    let server = own_server().await;
    let mut rig = Rig::on_server(&server, "").await;
    let open = "insert into fencepost.flights (shard, seq, epoch, relay, base, target, first_id, last_id, deliveries)
                select 0, n, 1, gen_random_uuid(), s, s, n, n, 1 from generate_series(1, 300) n, pg_current_snapshot() s";
    rig.client.batch_execute(open).await.expect("flights");
    let (settler, written) =
        Settler::start(database_at(rig.url()), Uuid::now_v7(), Arc::default(), CancellationToken::new());
    let writer = log_writer_stands_still(&rig).await;
    // All before the writer looks, so that they are many: few would be flushed.
    for seq in 1..=300 {
        let (shard, epoch) = (Shard(0), ShardEpoch(1));
        settler.close_empty(CloseRow { shard, seq: FlightSeq(seq), epoch, parks: Vec::new() });
    }
    rig.counts("select count(*) from fencepost.flights where token = 'done' and epoch = 1", 300).await;
    let closed: SystemTime =
        rig.client.query_one("select max(closed_at) from fencepost.flights", &[]).await.expect("a time").get(0);
    crashes_with(writer, &mut rig).await;

    rig.counts("select count(*) from fencepost.flights where token = 'done' and epoch = 1", 300).await;
    let again: i64 = rig
        .client
        .query_one("select count(*) from fencepost.flights where epoch = 1 and closed_at > $1", &[&closed])
        .await
        .expect("a count")
        .get(0);
    assert_eq!(again, 300, "they were forgotten, and written once more");
    drop(settler);
    written.await.expect("the writer ends");
}

#[tokio::test]
async fn few_facts_are_on_disk_and_a_database_crash_keeps_them() {
    let receiver = Receiver::start().await;
    let server = own_server().await;
    let mut rig = Rig::on_server(&server, &http("shop", &receiver.url(), "")).await;
    let mut relay =
        rig.relay_with(&[("FENCEPOST__RELAY__SHARD_LEASE", "60s"), ("FENCEPOST__RELAY__RENEW_EVERY", "20s")]);
    rig.holds_all(&mut relay).await;
    let writer = log_writer_stands_still(&rig).await;
    rig.emit("task", "shop").await;
    rig.becomes("task:1", "shop", "applied").await;
    rig.counts("select count(*) from fencepost.flights where token = 'done' and deliveries = 1", 1).await;
    relay.signal(Signal::Stop);
    crashes_with(writer, &mut rig).await;
    assert_eq!(rig.count("select count(*) from fencepost.ledger").await, 1, "the fact is there");
    assert_eq!(rig.count("select count(*) from fencepost.flights where token is null and deliveries = 1").await, 0);

    relay.signal(Signal::Continue);
    rig.rests().await;
    assert_eq!(receiver.requests().len(), 1, "nothing was sent again");
}

#[tokio::test]
async fn facts_a_failover_forgot_are_asked_for_again() {
    let receiver = Receiver::start().await;
    let rig = Rig::new(&http("shop", &receiver.url(), "")).await;
    let _relay = rig.relay().await;
    // Before the effect: it is sent at once.
    receiver.on_key_in_turn(
        "task:1",
        [Script::answer(200).ack("applied").into(), Script::answer(200).ack("duplicate").into()],
    );
    let key = rig.emit("task", "shop").await;
    rig.becomes(&key, "shop", "applied").await;
    rig.rests().await;
    // As on a standby that had the flight, for whose commit the relay waits, and not yet what closed it.
    rig.client
        .batch_execute(
            "begin; set local session_replication_role = replica; delete from fencepost.ledger;
             update fencepost.flights set token = null, closed_at = null where deliveries > 0; commit",
        )
        .await
        .expect("a fault");
    rig.becomes(&key, "shop", "duplicate").await;
    rig.rests().await;
    assert_eq!(rig.tokens(&key, "shop").await, ["lost", "duplicate"]);
    assert_eq!(rig.count("select count(*) from fencepost.alarms where name = 'unaccounted'").await, 1);
    assert_eq!(receiver.requests().len(), 2);
}

#[tokio::test]
async fn every_session_of_a_relay_may_end_at_any_moment() {
    let receiver = Receiver::start().await;
    let rig = Rig::new(
        &[http("shop", &receiver.url(), "ordering = 'key'"), http("bank", &receiver.url(), "on_ambiguous = 'hold'")]
            .concat(),
    )
    .await;
    let _relay = rig.relay().await;
    let mut killed = 0;
    for n in 0..100 {
        rig.emit(&format!("retry-{n}"), "shop").await;
        rig.emit(&format!("hold-{n}"), "bank").await;
        if n % 10 == 5 {
            rig.counts("select least(count(*), 4) from pg_stat_activity where datname = current_database() and application_name like 'fencepost%' and application_name <> 'fencepost test'", 4).await;
            killed += rig
                .count("select count(pg_terminate_backend(pid)) from pg_stat_activity where datname = current_database() and application_name like 'fencepost%' and application_name <> 'fencepost test'")
                .await;
        }
    }
    assert!(killed >= 30, "{killed} sessions were ended");
    rig.counts("select count(distinct effect_id) from fencepost.ledger where token = 'applied'", 200).await;
    rig.rests().await;
    assert_eq!(rig.count("select count(*) from fencepost.alarms").await, 0);
    for n in 0..100 {
        let sent = receiver.requests_for(&format!("hold-{n}:1")).len();
        assert_eq!(sent, 1, "hold-{n}: what may have been applied is never sent again by itself");
    }
}
