//! An AMQP consumer that makes each effect once and says so: lapin and the consumer kit of this crate.
//!
//!     DATABASE_URL=postgresql://... AMQP_URL=amqp://... QUEUE=billing cargo run --example amqp_consumer
//!
//! Per message: one transaction of its own (the verdict, and the effect if it is ours to make), then the reply, then the
//! broker's ack. A crash in between brings the message again, and the inbox calls it a duplicate.

use std::env;

use anyhow::{Context, bail};
use fencepost::inbox::{Inbox, Verdict};
use fencepost::model::key::EffectKey;
use futures_util::StreamExt;
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicNackOptions, BasicPublishOptions, BasicQosOptions, BasicRejectOptions,
    ConfirmSelectOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use tokio_postgres::{Client, NoTls};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let database = env::var("DATABASE_URL").context("DATABASE_URL names this service's own database")?;
    let url = env::var("AMQP_URL").context("AMQP_URL names the broker")?;
    let queue = env::var("QUEUE").unwrap_or_else(|_| "billing".into());
    let (mut client, connection) = tokio_postgres::connect(&database, NoTls).await?;
    tokio::spawn(connection);
    // Our name for the fencepost database that sends to us.
    let inbox = Inbox::new("inbox", "billing")?;
    inbox.install(&client).await?;
    client.batch_execute("create table if not exists payments (key text not null, body bytea not null)").await?;

    let broker = Connection::connect(&url, ConnectionProperties::default()).await?;
    let (incoming, replies) = (broker.create_channel().await?, broker.create_channel().await?);
    replies.confirm_select(ConfirmSelectOptions::default()).await?;
    incoming.basic_qos(20, BasicQosOptions::default()).await?;
    let options = BasicConsumeOptions::default();
    let mut messages = incoming.basic_consume(queue.as_str().into(), "".into(), options, FieldTable::default()).await?;
    println!("consuming {queue}");
    while let Some(message) = messages.next().await {
        let message = message?;
        let key = message.properties.message_id().as_ref().and_then(|id| id.as_str().parse::<EffectKey>().ok());
        let Some(key) = key else {
            // Not from fencepost.
            message.acker.reject(BasicRejectOptions { requeue: false }).await?;
            continue;
        };
        match apply(&mut client, &inbox, &key, &message.data).await {
            Ok(Verdict::InProgress) => return_it(&message).await?,
            Ok(verdict) => {
                reply(&replies, &message, verdict).await?;
                message.acker.ack(BasicAckOptions::default()).await?;
            }
            Err(error) => {
                println!("{key}: {error:#}");
                return_it(&message).await?;
            }
        }
    }
    bail!("the broker ended the subscription")
}

/// The verdict, and the effect if it is ours to make, in one transaction.
async fn apply(client: &mut Client, inbox: &Inbox, key: &EffectKey, body: &[u8]) -> anyhow::Result<Verdict> {
    let tx = client.transaction().await?;
    let verdict = inbox.apply(&tx, key, body).await?;
    if verdict == Verdict::Applied {
        tx.execute("insert into payments (key, body) values ($1, $2)", &[&key.to_string(), &body]).await?;
    }
    tx.commit().await?;
    Ok(verdict)
}

/// Whether it was applied is unknown, or not decided yet: the broker hands it out again.
async fn return_it(message: &Delivery) -> anyhow::Result<()> {
    tokio::time::sleep(std::time::Duration::from_millis(500)).await;
    message.acker.nack(BasicNackOptions { requeue: true, ..BasicNackOptions::default() }).await?;
    Ok(())
}

/// Tells fencepost what became of the key. Until the broker has confirmed the reply, the message is not acked.
async fn reply(replies: &Channel, message: &Delivery, verdict: Verdict) -> anyhow::Result<()> {
    let asked = &message.properties;
    let (Some(queue), Some(echoed)) = (asked.reply_to(), asked.headers()) else { return Ok(()) };
    let mut headers = FieldTable::default();
    for name in ["outbox-consumer", "outbox-ack-token"] {
        if let Some(value) = echoed.inner().get(name) {
            headers.insert(name.into(), value.clone());
        }
    }
    headers.insert("outbox-ack".into(), AMQPValue::LongString(verdict.ack().wire().into()));
    if let Verdict::Stale { current } = verdict {
        headers.insert("outbox-ack-current".into(), AMQPValue::LongLongInt(current));
    }
    let mut properties = BasicProperties::default().with_delivery_mode(2).with_headers(headers);
    if let Some(id) = asked.correlation_id() {
        properties = properties.with_correlation_id(id.clone());
    }
    let options = BasicPublishOptions { mandatory: true, immediate: false };
    let confirm = replies.basic_publish("".into(), queue.clone(), options, b"", properties).await?.await?;
    if !confirm.is_ack() || confirm.take_message().is_some() {
        bail!("the reply queue {queue} did not take a reply");
    }
    Ok(())
}
