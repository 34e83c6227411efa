//! A real AMQP service: `demo-shipping` reads its queue, dedups and fences through the consumer kit, and replies with its
//! own word (contract, section 5): after its commit, and before the broker may forget the message.

use std::sync::Arc;
use std::time::Duration;

use futures_util::TryStreamExt;
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicNackOptions, BasicPublishOptions, BasicQosOptions, ConfirmSelectOptions,
    QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel};
use tokio::sync::Mutex;

use super::consumers::{SHIPPING, Service};
use super::{Error, Result};
use crate::edge::amqp::link::{Link, Purpose};
use crate::edge::amqp::message;
use crate::model::broker::Broker;
use crate::model::key::EffectKey;
use crate::model::token::Ack;

const CONNECT: Duration = Duration::from_secs(10);
/// Before it tries again, the broker or a message.
const PAUSE: Duration = Duration::from_secs(1);
const PREFETCH: u16 = 32;

/// Reads until it is dropped, through every outage of the broker.
pub async fn serve(service: Arc<Service>, broker: Arc<Broker>) {
    loop {
        match read(&service, &broker).await {
            Ok(()) => tracing::info!("the broker ended the subscription; trying again"),
            Err(error) => tracing::info!(error = format!("{:#}", anyhow::Error::from(error)), "trying again"),
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Declares the service's own queue, durable; fencepost's reply queues are declared by `fencepost amqp init`.
pub async fn declare(broker: &Broker) -> Result<()> {
    let link = Link::open(broker, Purpose::Look, CONNECT).await?;
    let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    link.channel().await?.queue_declare(SHIPPING.into(), options, FieldTable::default()).await?;
    link.close().await;
    Ok(())
}

/// One connection.
async fn read(service: &Service, broker: &Broker) -> Result<()> {
    let link = Link::open(broker, Purpose::Look, CONNECT).await?;
    let channel = link.channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    channel.basic_qos(PREFETCH, BasicQosOptions::default()).await?;
    let options = BasicConsumeOptions::default();
    let stream = channel.basic_consume(SHIPPING.into(), "".into(), options, FieldTable::default()).await?;
    let replies = Mutex::new(channel);
    let replies = &replies;
    let taken = async |delivery: Delivery| {
        match answer(service, replies, &delivery).await {
            Ok(()) => delivery.acker.ack(BasicAckOptions::default()).await?,
            Err(Error::Broker(error)) => return Err(error.into()),
            Err(error) => {
                tracing::warn!(error = format!("{:#}", anyhow::Error::from(error)), "a message goes back to the queue");
                tokio::time::sleep(PAUSE).await;
                delivery.acker.nack(BasicNackOptions { requeue: true, ..BasicNackOptions::default() }).await?
            }
        };
        Ok(())
    };
    stream.map_err(Error::from).try_for_each_concurrent(usize::from(PREFETCH), taken).await
}

async fn answer(service: &Service, replies: &Mutex<Channel>, delivery: &Delivery) -> Result<()> {
    let properties = &delivery.properties;
    let key = properties.message_id().as_ref().and_then(|id| id.as_str().parse::<EffectKey>().ok());
    let Some(key) = key.filter(|key| service.is_ours(key)) else {
        // Of somebody else: nobody could do anything with a reply.
        return Ok(());
    };
    let word = service.take(&key, &delivery.data).await?;
    reply(replies, delivery, word).await
}

/// Echoes what names the delivery, and adds the word. Confirmed by the broker before the message is acked.
async fn reply(replies: &Mutex<Channel>, delivery: &Delivery, word: Ack) -> Result<()> {
    let asked = &delivery.properties;
    let (Some(queue), Some(correlation)) = (asked.reply_to().clone(), asked.correlation_id().clone()) else {
        return Ok(());
    };
    let mut headers = FieldTable::default();
    for name in [message::CONSUMER, message::ACK_TOKEN] {
        if let Some(value) = asked.headers().as_ref().and_then(|headers| headers.inner().get(name)) {
            headers.insert(name.into(), value.clone());
        }
    }
    headers.insert("outbox-ack".into(), AMQPValue::LongString(word.wire().into()));
    if let Ack::Stale { current } = word {
        headers.insert("outbox-ack-current".into(), AMQPValue::LongLongInt(current));
    }
    let properties =
        BasicProperties::default().with_delivery_mode(2).with_correlation_id(correlation).with_headers(headers);
    let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
    // One at a time onto the channel; the confirms are waited for together.
    let sent = replies.lock().await.basic_publish("".into(), queue, options, b"", properties).await?;
    let confirm = sent.await?;
    if !confirm.is_ack() {
        return Err(Error::Unconfirmed);
    }
    Ok(())
}
