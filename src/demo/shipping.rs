//! A real AMQP service: `demo-shipping` reads its queue, dedups and fences through the consumer kit, and replies with its
//! own word (contract, section 5): after its commit, and before the broker may forget the message.

use std::time::Duration;

use futures_util::StreamExt;
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicNackOptions, BasicPublishOptions, BasicQosOptions, ConfirmSelectOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel};
use tokio_util::sync::CancellationToken;

use super::consumers::{SHIPPING, Service};
use super::site::Site;
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

/// Reads until `stop`, through every outage of the broker.
pub async fn serve(site: &Site, broker: &Broker, stop: CancellationToken) -> Result<()> {
    let service = Service::shipping(site)?;
    let work = async {
        loop {
            match read(&service, broker).await {
                Ok(()) => tracing::warn!("the broker ended the subscription; trying again"),
                Err(error) => {
                    tracing::warn!(error = format!("{:#}", anyhow::Error::from(error)), "trying again")
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
    };
    stop.run_until_cancelled(work).await;
    Ok(())
}

/// One connection.
async fn read(service: &Service, broker: &Broker) -> Result<()> {
    let link = Link::open(broker, Purpose::Look, CONNECT).await?;
    let channel = link.channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    channel.basic_qos(PREFETCH, BasicQosOptions::default()).await?;
    let options = BasicConsumeOptions::default();
    let mut stream = channel.basic_consume(SHIPPING.into(), "".into(), options, FieldTable::default()).await?;
    while let Some(delivery) = stream.next().await {
        let delivery = delivery?;
        match answer(service, &channel, &delivery).await {
            Ok(()) => delivery.acker.ack(BasicAckOptions::default()).await?,
            Err(Error::Broker(error)) => return Err(error.into()),
            Err(error) => {
                tracing::warn!(error = format!("{:#}", anyhow::Error::from(error)), "a message goes back to the queue");
                tokio::time::sleep(PAUSE).await;
                delivery.acker.nack(BasicNackOptions { requeue: true, ..BasicNackOptions::default() }).await?
            }
        };
    }
    Ok(())
}

async fn answer(service: &Service, channel: &Channel, delivery: &Delivery) -> Result<()> {
    let properties = &delivery.properties;
    let key = properties.message_id().as_ref().and_then(|id| id.as_str().parse::<EffectKey>().ok());
    let Some(key) = key.filter(|key| service.is_ours(key)) else {
        // Of somebody else: nobody could do anything with a reply.
        return Ok(());
    };
    let word = service.take(&key, &delivery.data).await?;
    reply(channel, delivery, word).await
}

/// Echoes what names the delivery, and adds the word. Confirmed by the broker before the message is acked.
async fn reply(channel: &Channel, delivery: &Delivery, word: Ack) -> Result<()> {
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
    let confirm = channel.basic_publish("".into(), queue, options, b"", properties).await?.await?;
    if !confirm.is_ack() {
        return Err(Error::Unconfirmed);
    }
    Ok(())
}
