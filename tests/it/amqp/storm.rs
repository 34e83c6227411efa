//! Everything at once: effects committed all the while, a broker that stops twenty times, a relay that is killed, a
//! consumer that loses its connection with each. The consumer's own ledger is the witness.

use std::time::Duration;

use fencepost::demo::embedded::rabbitmq::PrivateRabbitmq;
use tokio_util::sync::CancellationToken;

use super::ledger::{self, Consumer};
use super::rig::AmqpRig;

const STOPS: usize = 20;

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_and_every_duplicate_is_explained() {
    let broker = PrivateRabbitmq::start().await.unwrap();
    let amqp = AmqpRig::on(&broker.url(), "ack = 'required'").await;
    ledger::install(&amqp).await;
    let mut relay = amqp.relay().await;
    let stop = CancellationToken::new();
    let consumer = Consumer::start(&amqp).await;
    let producing = amqp.produce(5, Duration::from_millis(100), &stop).await;

    for round in 0..STOPS {
        broker.ctl(&["stop_app"]).await.unwrap();
        if round == STOPS / 2 {
            relay.kill().await;
            relay = amqp.relay().await;
        }
        broker.ctl(&["start_app"]).await.unwrap();
        let before = amqp.rig.count("select count(*) from public.payments").await;
        let more = format!("select least(count(*) - {before}, 30) from public.payments");
        amqp.rig.counts(&more, 30).await;
    }
    stop.cancel();
    let committed = i64::from(producing.await.unwrap());
    let applied = "select count(*) from fencepost.deliveries where token in ('applied', 'duplicate')";
    // A busy machine takes its time over what piled up; what must not happen is that nothing moves any more.
    loop {
        let done = amqp.rig.count(applied).await;
        if done >= committed {
            break;
        }
        amqp.rig.counts(&format!("select least(n, {0}) from ({applied}) a (n)", done + 1), done + 1).await;
    }
    amqp.rig.rests().await;

    let failures = consumer.failures();
    assert!(failures >= STOPS, "the consumer felt {failures} of {STOPS} stops");
    let count = |sql: &'static str| async { amqp.rig.client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) };
    assert_eq!(count("select count(*) from public.payments").await, committed, "each effect was made");
    assert_eq!(count("select count(distinct key) from public.payments").await, committed, "and made once");
    // What the broker handed out once more says so itself; any further copy must be an attempt whose end was unknown.
    let unexplained = "
        select count(*) from (
            select r.key, count(*) filter (where not r.redelivered) as copies from public.receipts r group by r.key
        ) r where r.copies > 1 + (
            select count(*) from fencepost.attempts a where a.effect_id = fencepost.effect_id_of(r.key) and a.token in ('ambiguous', 'lost'))";
    assert_eq!(count(unexplained).await, 0, "duplicates nobody can explain");
    assert_eq!(amqp.endless_attempts().await, 0, "an attempt without exactly one token");
    let ambiguous = count("select count(*) from fencepost.attempts where token in ('ambiguous', 'lost')").await;
    let copies = count("select count(*) - count(distinct key) from public.receipts").await;
    eprintln!("{committed} effects, {failures} broken connections, {ambiguous} unknown ends, {copies} extra copies");
    assert!(copies > 0, "no stop hit anything");
}
