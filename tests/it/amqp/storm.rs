//! Everything at once: effects committed all the while, a broker that stops twenty times, a relay that is killed, a
//! consumer that loses its connection with each. The consumer's own ledger is the witness.

use std::time::Duration;

use fencepost::demo::embedded::rabbitmq::PrivateRabbitmq;
use fencepost::inbox::{Inbox, Verdict};
use fencepost::model::key::EffectKey;
use futures_util::StreamExt;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions, ConfirmSelectOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Connection, ConnectionProperties};
use tokio_util::sync::CancellationToken;

use super::rig::{AmqpRig, header};
use crate::support::broker::{id, table};

const STOPS: usize = 20;
const LEDGER: &str = "
    create table public.receipts (n bigint generated always as identity, key text, attempt int, redelivered boolean, verdict text);
    create table public.payments (key text);";

/// Consumes and replies until its connection fails.
async fn consume(url: &str, queue: &str, database: &mut tokio_postgres::Client) -> anyhow::Result<()> {
    let inbox = Inbox::new("inbox", "billing")?;
    let broker = Connection::connect(url, ConnectionProperties::default()).await?;
    let (incoming, replies) = (broker.create_channel().await?, broker.create_channel().await?);
    replies.confirm_select(ConfirmSelectOptions::default()).await?;
    incoming.basic_qos(50, BasicQosOptions::default()).await?;
    let consumed =
        incoming.basic_consume(queue.into(), "".into(), BasicConsumeOptions::default(), FieldTable::default());
    let mut messages = consumed.await?;
    while let Some(message) = messages.next().await {
        let message = message?;
        let key: EffectKey = id(&message).parse()?;
        let tx = database.transaction().await?;
        let verdict = inbox.apply(&tx, &key, &message.data).await?;
        if verdict == Verdict::Applied {
            tx.execute("insert into public.payments values ($1)", &[&key.to_string()]).await?;
        }
        let attempt: i32 = header(&message, "outbox-attempt").unwrap().parse()?;
        tx.execute(
            "insert into public.receipts (key, attempt, redelivered, verdict) values ($1, $2, $3, $4)",
            &[&key.to_string(), &attempt, &message.redelivered, &verdict.ack().wire()],
        )
        .await?;
        tx.commit().await?;
        let echoed = message.properties.headers().as_ref().unwrap().inner();
        let headers = table(&[
            ("outbox-consumer", echoed["outbox-consumer"].clone()),
            ("outbox-ack-token", echoed["outbox-ack-token"].clone()),
            ("outbox-ack", AMQPValue::LongString(verdict.ack().wire().into())),
        ]);
        let correlation = message.properties.correlation_id().clone().unwrap();
        let properties =
            BasicProperties::default().with_correlation_id(correlation).with_headers(headers).with_delivery_mode(2);
        let queue = message.properties.reply_to().clone().unwrap();
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let confirm = replies.basic_publish("".into(), queue, options, b"", properties).await?.await?;
        anyhow::ensure!(confirm.is_ack() && confirm.take_message().is_none(), "the reply was not taken");
        message.acker.ack(BasicAckOptions::default()).await?;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_and_every_duplicate_is_explained() {
    let broker = PrivateRabbitmq::start().await.unwrap();
    let amqp = AmqpRig::on(&broker.url(), "ack = 'required'").await;
    amqp.rig.client.batch_execute(LEDGER).await.unwrap();
    let inbox = Inbox::new("inbox", "billing").unwrap();
    inbox.install(&amqp.rig.client).await.unwrap();
    let mut relay = amqp.relay().await;
    let stop = CancellationToken::new();

    let (url, queue, ended) = (broker.url(), amqp.queue.clone(), stop.clone());
    let mut database = amqp.rig.connect().await;
    let consuming = tokio::spawn(async move {
        let mut failures = 0;
        while !ended.is_cancelled() {
            tokio::select! {
                failed = consume(&url, &queue, &mut database) => {
                    failures += usize::from(failed.is_err());
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                () = ended.cancelled() => {}
            }
        }
        failures
    });
    let (producer, ended) = (amqp.rig.connect().await, stop.clone());
    let producing = tokio::spawn(async move {
        let mut committed = 0;
        while !ended.is_cancelled() {
            let sql =
                "select fencepost.record_completion('job-' || n, 1, '[{\"consumer\": \"billing\", \"payload\": 1}]')
                       from generate_series($1::int, $1 + 4) n";
            producer.execute(sql, &[&committed]).await.expect("a commit");
            committed += 5;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        committed
    });

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
    // The consumer goes on until everything is told.
    let (url, queue) = (broker.url(), amqp.queue.clone());
    let mut database = amqp.rig.connect().await;
    let failures = consuming.await.unwrap();
    let consuming = tokio::spawn(async move {
        loop {
            let _ = consume(&url, &queue, &mut database).await;
        }
    });
    amqp.rig.counts(applied, committed).await;
    amqp.rig.rests().await;
    consuming.abort();

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
