//! The demo's AMQP service: `demo-shipping` dedups and fences as `demo-billing` does, says so over the reply queue, and
//! only then lets the broker forget the message. It comes back whenever the broker does.

use std::sync::Arc;
use std::time::Duration;

use futures_util::TryStreamExt;
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicNackOptions, BasicPublishOptions, BasicQosOptions, BasicRejectOptions,
    ConfirmSelectOptions, QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use secrecy::{ExposeSecret, SecretString};
use tokio::sync::Mutex;

use super::consumers::Service;
use crate::inbox::Verdict;
use crate::model::key::EffectKey;

/// How long a connection may take, and the wait before the next try.
const CONNECT: Duration = Duration::from_secs(10);
const AGAIN: Duration = Duration::from_millis(500);
/// Messages in hand at once.
const PREFETCH: u16 = 32;

type Result<T, E = lapin::Error> = std::result::Result<T, E>;

/// The service's own queue; fencepost's reply queues are declared by `fencepost amqp init`.
pub async fn declare(url: &SecretString, queue: &str) -> Result<()> {
    let broker = connect(url).await?;
    let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    broker.create_channel().await?.queue_declare(queue.into(), options, FieldTable::default()).await?;
    Ok(())
}

/// Removes the queue again, with what is in it.
pub async fn remove(url: &SecretString, queue: &str) -> Result<()> {
    let broker = connect(url).await?;
    broker.create_channel().await?.queue_delete(queue.into(), QueueDeleteOptions::default()).await?;
    Ok(())
}

/// Consumes until it is dropped.
pub async fn serve(service: Arc<Service>, url: SecretString, queue: String) {
    loop {
        if let Err(error) = consume(&service, &url, &queue).await {
            tracing::debug!(%error, "the broker is away");
        }
        tokio::time::sleep(AGAIN).await;
    }
}

async fn connect(url: &SecretString) -> Result<Connection> {
    let connecting = Connection::connect(url.expose_secret(), ConnectionProperties::default());
    tokio::time::timeout(CONNECT, connecting)
        .await
        .unwrap_or_else(|_| Err(std::io::Error::from(std::io::ErrorKind::TimedOut).into()))
}

async fn consume(service: &Service, url: &SecretString, queue: &str) -> Result<()> {
    let broker = connect(url).await?;
    let (incoming, replies) = (broker.create_channel().await?, broker.create_channel().await?);
    replies.confirm_select(ConfirmSelectOptions::default()).await?;
    incoming.basic_qos(PREFETCH, BasicQosOptions::default()).await?;
    let options = BasicConsumeOptions::default();
    let messages = incoming.basic_consume(queue.into(), "".into(), options, FieldTable::default()).await?;
    let replies = Mutex::new(replies);
    let replies = &replies;
    messages.try_for_each_concurrent(usize::from(PREFETCH), |message| receive(service, replies, message)).await
}

async fn receive(service: &Service, replies: &Mutex<Channel>, message: Delivery) -> Result<()> {
    let key = message.properties.message_id().as_ref().and_then(|id| id.as_str().parse::<EffectKey>().ok());
    let Some(key) = key else {
        // Not from fencepost.
        message.acker.reject(BasicRejectOptions { requeue: false }).await?;
        return Ok(());
    };
    match service.receive(&key, &message.data).await {
        Ok(verdict) if verdict != Verdict::InProgress => {
            reply(replies, &message, verdict).await?;
            message.acker.ack(BasicAckOptions::default()).await?;
        }
        // Not decided, or unknown: the broker hands it out again.
        _ => {
            message.acker.nack(BasicNackOptions { requeue: true, ..BasicNackOptions::default() }).await?;
        }
    }
    Ok(())
}

/// Until the broker has confirmed the reply, the message is not acked.
async fn reply(replies: &Mutex<Channel>, message: &Delivery, verdict: Verdict) -> Result<()> {
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
    // One at a time onto the channel; the confirms are waited for together.
    let sent = replies.lock().await.basic_publish("".into(), queue.clone(), options, b"", properties).await?;
    let confirm = sent.await?;
    if !confirm.is_ack() || confirm.take_message().is_some() {
        return Err(std::io::Error::other(format!("the reply queue {queue} did not take a reply")).into());
    }
    Ok(())
}
