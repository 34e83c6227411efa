//! The database goes away, or forgets.

use fencepost::demo::embedded::guardian::Signal;

use crate::support::db::own_server;
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

#[tokio::test]
async fn facts_a_database_crash_forgot_are_written_again() {
    let receiver = Receiver::start().await;
    let server = own_server().await;
    let mut rig = Rig::on_server(&server, &http("shop", &receiver.url(), "")).await;
    let mut relay =
        rig.relay_with(&[("FENCEPOST__RELAY__SHARD_LEASE", "60s"), ("FENCEPOST__RELAY__RENEW_EVERY", "20s")]);
    rig.holds_all(&mut relay).await;
    // A log writer that stands still keeps what was committed without waiting off the disk.
    let writer: i32 = rig
        .client
        .query_one("select pid from pg_stat_activity where backend_type = 'walwriter'", &[])
        .await
        .expect("a log writer")
        .get(0);
    kill("STOP", writer);
    rig.emit("task", "shop").await;
    rig.becomes("task:1", "shop", "applied").await;
    rig.counts("select count(*) from fencepost.flights where token = 'done' and deliveries = 1", 1).await;
    relay.signal(Signal::Stop);
    kill("KILL", writer);
    // The server ends every session and recovers what its disk has.
    let lost = rig.client.query_one("select pg_sleep(30)", &[]).await;
    assert!(lost.is_err(), "the server crashed");
    rig.reconnect().await;
    assert_eq!(rig.count("select count(*) from fencepost.ledger").await, 0, "the fact was forgotten");
    assert_eq!(rig.count("select count(*) from fencepost.flights where token is null and deliveries = 1").await, 1);

    relay.signal(Signal::Continue);
    rig.becomes("task:1", "shop", "applied").await;
    rig.rests().await;
    assert_eq!(receiver.requests().len(), 1, "the write was repeated, not the send");
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
