//! A broker with several addresses: one that is dead is passed over, and one that dies is left for another.

use std::collections::HashSet;
use std::time::Duration;

use fencepost::model::broker::Broker;
use tokio_util::sync::CancellationToken;

use super::rig::{AmqpRig, header};
use crate::support::broker::id;
use crate::support::eventually;
use crate::support::fault_proxy::FaultProxy;

const WITHOUT_REPLIES: &str = "ack = 'none'\non_ambiguous = 'retry'";

/// `[brokers.default]` with these ports of this machine.
fn hosts(amqp: &AmqpRig, ports: &[u16]) -> String {
    let hosts: Vec<String> = ports.iter().map(|port| format!("'127.0.0.1:{port}'")).collect();
    let (login, _) = amqp.url().strip_prefix("amqp://").unwrap().split_once('@').unwrap();
    let (username, password) = login.split_once(':').unwrap();
    let password = amqp.file("password", password);
    format!("hosts = [{}]\nusername = '{username}'\npassword_file = '{password}'\nheartbeat = '1s'", hosts.join(", "))
}

fn port(amqp: &AmqpRig) -> u16 {
    Broker::from_url("b", amqp.url()).unwrap().hosts[0].port
}

#[tokio::test]
async fn a_dead_address_is_passed_over() {
    let amqp = AmqpRig::new(WITHOUT_REPLIES).await;
    let wire = FaultProxy::start(format!("127.0.0.1:{}", port(&amqp)).parse().unwrap()).await;
    // Refused at once, reset when something is said, and taken without a word.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mute = silent.local_addr().unwrap().port();
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    wire.refuse();
    let hasty = format!("{WITHOUT_REPLIES}\nconnect_timeout = '500ms'");
    amqp.configure_broker(&hosts(&amqp, &[closed, mute, wire.port(), port(&amqp)]), &hasty);
    // Hosts are tried in random order: often enough that a dead one is the first of some.
    for n in 0..5 {
        let mut relay = amqp.relay().await;
        let key = amqp.rig.emit(&format!("pay-{n}"), "billing").await;
        amqp.rig.becomes(&key, "billing", "confirmed").await;
        relay.kill().await;
    }
    let keys: HashSet<String> = amqp.receive(5).await.iter().map(id).collect();
    assert_eq!(keys.len(), 5);
    amqp.configure_broker(&hosts(&amqp, &[closed, mute, wire.port()]), &hasty);
    let mut relay = amqp.relay().await;
    let why = relay.says("none of the broker's hosts can be talked to").await;
    let (code, said) = amqp.fencepost(&["amqp", "check"]).await;
    assert_eq!(code, 1, "{said}");
    for dead in [closed, mute, wire.port()].map(|port| format!("127.0.0.1:{port}")) {
        assert!(said.contains(&dead), "{said}");
        assert!(why.contains(&dead), "{why}");
    }
    assert!(why.contains(&format!("127.0.0.1:{mute} did not open a connection within 500ms")), "{why}");
}

/// The address in use dies again and again while effects are committed: what is on it ends as unknown, the rest goes by
/// the other. The queue is the witness.
#[tokio::test(flavor = "multi_thread")]
async fn an_address_that_dies_under_load_is_left_for_another() {
    let amqp = AmqpRig::new(WITHOUT_REPLIES).await;
    let server = format!("127.0.0.1:{}", port(&amqp)).parse().unwrap();
    let addresses = [FaultProxy::start(server).await, FaultProxy::start(server).await];
    amqp.configure_broker(&hosts(&amqp, &[addresses[0].port(), addresses[1].port()]), WITHOUT_REPLIES);
    let _relay = amqp.relay().await;

    let stop = CancellationToken::new();
    let producing = amqp.produce(20, Duration::from_millis(5), &stop).await;
    let confirmed = "select count(*) from fencepost.ledger where token = 'confirmed'";
    let more = async |than: i64| {
        eventually("deliveries go on", async || (amqp.rig.count(confirmed).await > than).then_some(())).await;
    };
    for _ in 0..6 {
        more(amqp.rig.count(confirmed).await + 200).await;
        let used = usize::from(addresses[1].open() > 0);
        assert_eq!((addresses[used].open(), addresses[1 - used].open()), (1, 0), "one connection, by one address");
        let before = addresses[1 - used].accepted();
        addresses[used].refuse();
        eventually("the other address is used", async || (addresses[1 - used].accepted() > before).then_some(())).await;
        more(amqp.rig.count(confirmed).await + 200).await;
        addresses[used].heal();
    }
    stop.cancel();
    let committed: i32 = producing.await.unwrap();
    amqp.rig.counts(confirmed, i64::from(committed)).await;
    amqp.rig.rests().await;

    let depth = amqp.client.depth(&amqp.queue).await as usize;
    let arrived = amqp.receive(depth).await;
    let keys: HashSet<String> = arrived.iter().map(id).collect();
    assert_eq!(keys.len(), usize::try_from(committed).unwrap(), "an effect is not in the queue");
    assert_eq!(amqp.endless_attempts().await, 0, "an attempt without exactly one token");
    // A copy is one attempt more, each with its own number, after one whose end nobody knew.
    let attempts: HashSet<(String, String)> =
        arrived.iter().map(|message| (id(message), header(message, "outbox-attempt").unwrap())).collect();
    assert_eq!(attempts.len(), arrived.len(), "an attempt was published twice");
    let ambiguous = amqp.rig.count("select count(*) from fencepost.attempts where token = 'ambiguous'").await;
    eprintln!("{committed} effects, {ambiguous} attempts with an unknown end, {} extra copies", depth - keys.len());
    assert!((depth - keys.len()) as i64 <= ambiguous, "a copy nobody can explain");
    assert!(ambiguous > 0, "no address died with anything on it");
}
