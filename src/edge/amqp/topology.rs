//! What exists at the broker. Looking is passive and on a channel that is thrown away, since a wrong name kills it;
//! declaring is for `fencepost amqp init` alone.

use lapin::options::{ExchangeDeclareOptions, QueueDeclareOptions};
use lapin::types::{FieldTable, ShortString};
use lapin::{Channel, ExchangeKind};

use super::link::{Link, LinkError};

/// A queue as its broker counts it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Depth {
    pub messages: u32,
    pub consumers: u32,
}

/// Fails where the exchange does not exist, and says what to do.
pub async fn exchange_exists(link: &Link, exchange: ShortString, vhost: &str) -> Result<(), LinkError> {
    let channel = link.channel().await?;
    let options = ExchangeDeclareOptions { passive: true, ..ExchangeDeclareOptions::default() };
    let name = exchange.as_str().to_string();
    let asked = channel.exchange_declare(exchange, ExchangeKind::Direct, options, FieldTable::default());
    link.answer("exchange.declare", asked).await.map_err(|error| missing(error, "exchange", &name, vhost))?;
    goodbye(link, channel).await;
    Ok(())
}

/// How full a queue is; fails where it does not exist.
pub async fn queue_depth(link: &Link, queue: ShortString, vhost: &str) -> Result<Depth, LinkError> {
    let channel = link.channel().await?;
    let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    let name = queue.as_str().to_string();
    let found = link
        .answer("queue.declare", channel.queue_declare(queue, options, FieldTable::default()))
        .await
        .map_err(|error| missing(error, "queue", &name, vhost))?;
    goodbye(link, channel).await;
    Ok(Depth { messages: found.message_count(), consumers: found.consumer_count() })
}

/// Declares a durable queue without arguments; one that exists with others is left as it is and named.
pub async fn declare_queue(link: &Link, queue: ShortString) -> Result<(), LinkError> {
    let channel = link.channel().await?;
    let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    let declared = link.answer("queue.declare", channel.queue_declare(queue, options, FieldTable::default())).await;
    declared.map_err(|error| match error {
        LinkError::Protocol(words) if words.contains("ACCESS_REFUSED") => LinkError::Protocol(format!(
            "{words} (whoever declares needs configure there: rabbitmqctl set_permissions, or let the broker's owner run this)"
        )),
        other => other,
    })?;
    goodbye(link, channel).await;
    Ok(())
}

fn missing(error: LinkError, what: &str, name: &str, vhost: &str) -> LinkError {
    match error {
        LinkError::Protocol(words) if words.contains("NOT_FOUND") || words.contains("NOT-FOUND") => {
            LinkError::Protocol(format!(
                "{what} {name:?} does not exist in virtual host {vhost:?}: its owner must declare it"
            ))
        }
        other => other,
    }
}

/// A channel that is not closed stays open as long as its connection.
async fn goodbye(link: &Link, channel: Channel) {
    if let Err(error) = link.answer("channel.close", channel.close(200, "OK".into())).await {
        tracing::debug!(%error, "closing a channel");
    }
}
