//! The consumers' replies: one durable queue per shard, read on a connection of its own, handed on in batches, and
//! acked to the broker only when whoever took a batch says that it is written down.
//!
//! A reply names its delivery by `correlation_id`, `outbox-consumer` and the ack token, and brings the consumer's word
//! in `outbox-ack` (contract, section 5). Everything in it is untrusted until the token is checked.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{FutureExt, StreamExt};
use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::{AMQPValue, FieldTable};
use serde_json::{Map, Value};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::link::{Link, LinkError, Purpose};
use super::message::{self, reply_queue};
use super::token::AckKey;
use crate::edge::ack;
use crate::edge::error::{printable, report};
use crate::model::broker::Broker;
use crate::model::key::{EffectKey, Shard};
use crate::model::token::Ack;

const ACK: &str = "outbox-ack";
const CURRENT: &str = "outbox-ack-current";
/// Replies the broker may hand out without an ack.
const PREFETCH: u16 = 200;
const BATCH_MAX: usize = 100;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The pause before a queue, or the broker, is tried again.
const PAUSE: Duration = Duration::from_secs(2);
/// The longest text kept of one property of a reply that matches nothing.
const KEPT: usize = 256;

/// What comes from the broker's reply queues.
#[derive(Debug)]
pub enum Heard {
    Batch(Batch),
    /// A shard's queue is being read.
    Reading(Shard),
    /// A shard's queue cannot be read now.
    Unread {
        shard: Shard,
        why: String,
    },
}

/// Replies that came together. Dropped without [`Batch::recorded`], the broker will hand them out again.
#[derive(Debug)]
pub struct Batch {
    pub shard: Shard,
    pub replies: Vec<Result<Reply, Orphan>>,
    recorded: oneshot::Sender<()>,
}

/// A reply whose token is right.
#[derive(Clone, Debug, PartialEq)]
pub struct Reply {
    pub consumer: String,
    pub key: EffectKey,
    pub word: Ack,
    /// The word as it came, where it was more than the bare token.
    pub raw: Option<String>,
    /// What to keep of it should it match nothing.
    pub properties: Value,
}

/// A reply that is nobody's.
#[derive(Clone, Debug, PartialEq)]
pub struct Orphan {
    pub correlation_id: Option<String>,
    pub why: &'static str,
    pub properties: Value,
}

impl Batch {
    /// All of it is on disk: the broker may forget it.
    pub fn recorded(self) {
        // A connection that is gone hands them out again, which is harmless.
        let _ = self.recorded.send(());
    }
}

/// Reads the reply queues of the shards held until `stop`. Without shards there is no connection.
pub async fn run(
    broker: Arc<Broker>,
    keys: Arc<AckKey>,
    mut shards: watch::Receiver<Vec<Shard>>,
    heard: mpsc::Sender<Heard>,
    stop: CancellationToken,
) {
    let work = async {
        loop {
            let wanted = shards.borrow_and_update().clone();
            if wanted.is_empty() {
                if shards.changed().await.is_err() {
                    return;
                }
                continue;
            }
            let why = match Link::open(&broker, Purpose::Replies, CONNECT_TIMEOUT).await {
                Ok(link) => {
                    let why = session(&link, &keys, &mut shards, &heard).await;
                    link.kill();
                    why
                }
                Err(error) => report(&error),
            };
            for shard in wanted {
                if heard.send(Heard::Unread { shard, why: why.clone() }).await.is_err() {
                    return;
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
    };
    tokio::select! {
        () = work => {}
        () = stop.cancelled() => {}
    }
}

/// One connection: a channel for each shard, since a missing queue takes its channel with it. Gives the reason of its
/// end.
async fn session(
    link: &Link,
    keys: &Arc<AckKey>,
    shards: &mut watch::Receiver<Vec<Shard>>,
    heard: &mpsc::Sender<Heard>,
) -> String {
    let mut events = link.events();
    let mut readers: JoinSet<Shard> = JoinSet::new();
    let mut running: HashMap<Shard, tokio::task::AbortHandle> = HashMap::new();
    let mut look = tokio::time::interval(PAUSE);
    loop {
        let wanted = shards.borrow_and_update().clone();
        running.retain(|shard, reader| {
            let keep = wanted.contains(shard);
            if !keep {
                reader.abort();
            }
            keep
        });
        for shard in wanted.iter().filter(|shard| !running.contains_key(shard)).copied().collect::<Vec<_>>() {
            match link.channel().await {
                Ok(channel) => {
                    let (keys, heard) = (Arc::clone(keys), heard.clone());
                    let reader = async move {
                        let why = read(channel, shard, &keys, &heard).await;
                        // Whoever hears nothing any more is ending, and so is the session.
                        let _ = heard.send(Heard::Unread { shard, why }).await;
                        tokio::time::sleep(PAUSE).await;
                        shard
                    };
                    running.insert(shard, readers.spawn(reader));
                }
                Err(error) => return report(&error),
            }
        }
        if wanted.is_empty() {
            return "no shard is held".into();
        }
        tokio::select! {
            changed = shards.changed() => if changed.is_err() { return "the relay ends".into() },
            event = events.next() => match event {
                Some(lapin::Event::Error(error)) => if !link.is_up() { return report(&error) },
                Some(_) => {}
                None => return "the connection ended".into(),
            },
            Some(ended) = readers.join_next(), if !readers.is_empty() => {
                // One that was aborted is not wanted any more.
                if let Ok(shard) = ended {
                    running.remove(&shard);
                }
            }
            _ = look.tick() => if !link.is_up() { return "the connection is gone".into() },
        }
    }
}

/// Reads one queue until it cannot be read any more. Gives the reason.
async fn read(channel: lapin::Channel, shard: Shard, keys: &AckKey, heard: &mpsc::Sender<Heard>) -> String {
    match consume(channel, shard, keys, heard).await {
        Ok(()) => "the broker ended the subscription: was the queue deleted? (fencepost amqp init)".into(),
        Err(error) => {
            let why = report(&error);
            if why.contains("NOT_FOUND") {
                format!("{why} (fencepost amqp init declares it)")
            } else if why.contains("ACCESS_REFUSED") {
                format!("{why} (it takes read there: rabbitmqctl set_permissions)")
            } else {
                why
            }
        }
    }
}

async fn consume(
    channel: lapin::Channel,
    shard: Shard,
    keys: &AckKey,
    heard: &mpsc::Sender<Heard>,
) -> Result<(), LinkError> {
    let queue = message::short("queue", &reply_queue(keys.deployment(), shard))
        .map_err(|invalid| LinkError::Protocol(invalid.to_string()))?;
    let answered = async {
        channel.basic_qos(PREFETCH, BasicQosOptions::default()).await?;
        let options = BasicConsumeOptions::default();
        channel.basic_consume(queue, "".into(), options, FieldTable::default()).await
    };
    let mut stream = match tokio::time::timeout(CONNECT_TIMEOUT, answered).await {
        Ok(consumer) => consumer.map_err(|error| LinkError::Protocol(report(&error)))?,
        Err(_) => return Err(LinkError::Silent { what: "basic.consume", limit: CONNECT_TIMEOUT }),
    };
    if heard.send(Heard::Reading(shard)).await.is_err() {
        return Ok(());
    }
    while let Some(first) = stream.next().await {
        let mut deliveries = vec![first.map_err(|error| LinkError::Protocol(report(&error)))?];
        while deliveries.len() < BATCH_MAX
            && let Some(Some(Ok(next))) = stream.next().now_or_never()
        {
            deliveries.push(next);
        }
        let replies = deliveries.iter().map(|delivery| parse(delivery, keys)).collect();
        let (recorded, done) = oneshot::channel();
        if heard.send(Heard::Batch(Batch { shard, replies, recorded })).await.is_err() {
            return Ok(());
        }
        if done.await.is_err() {
            // Not written down, and the relay is ending: another one will get them.
            return Ok(());
        }
        if let Some(last) = deliveries.last() {
            let acked = last.acker.ack(BasicAckOptions { multiple: true });
            match tokio::time::timeout(CONNECT_TIMEOUT, acked).await {
                Ok(acked) => acked.map_err(|error| LinkError::Protocol(report(&error)))?,
                Err(_) => return Err(LinkError::Silent { what: "basic.ack", limit: CONNECT_TIMEOUT }),
            };
        }
    }
    Ok(())
}

/// Reads one reply, and believes nothing of it before its token is verified.
pub fn parse(delivery: &Delivery, keys: &AckKey) -> Result<Reply, Orphan> {
    let properties = &delivery.properties;
    let headers = properties.headers().as_ref();
    let text = |name: &str| headers.and_then(|headers| headers.inner().get(name)).and_then(text_of);
    let kept = kept(headers);
    let correlation_id = properties.correlation_id().as_ref().map(|id| printable(id.as_str(), KEPT));
    let orphan = |why| Orphan { correlation_id: correlation_id.clone(), why, properties: kept.clone() };

    let named = properties.correlation_id().as_ref().ok_or_else(|| orphan("it has no correlation_id"))?;
    let (consumer, key) =
        named.as_str().split_once('/').ok_or_else(|| orphan("its correlation_id is not <consumer>/<key>"))?;
    let token = text(message::ACK_TOKEN).ok_or_else(|| orphan("it has no outbox-ack-token"))?;
    if !keys.verify(consumer, key, &token) {
        return Err(orphan("its outbox-ack-token was never given out for this delivery"));
    }
    let key: EffectKey = key.parse().map_err(|_| orphan("its correlation_id names no idempotency key"))?;
    if text(message::CONSUMER).is_some_and(|named| named != consumer) {
        return Err(orphan("outbox-consumer and correlation_id name different consumers"));
    }
    let said = text(ACK).ok_or_else(|| orphan("it has no outbox-ack"))?;
    let current = match headers.and_then(|headers| headers.inner().get(CURRENT)) {
        None => None,
        Some(value) => Some(integer_of(value).ok_or_else(|| orphan("outbox-ack-current is not an epoch"))?),
    };
    let word = ack::word(said.trim(), current, &key).map_err(orphan)?;
    let raw = match word {
        Ack::Stale { current } => Some(format!("stale; current={current}")),
        _ => None,
    };
    Ok(Reply { consumer: consumer.into(), key, word, raw, properties: kept })
}

fn text_of(value: &AMQPValue) -> Option<String> {
    match value {
        AMQPValue::LongString(text) => std::str::from_utf8(text.as_bytes()).ok().map(Into::into),
        AMQPValue::ShortString(text) => Some(text.as_str().into()),
        _ => None,
    }
}

/// Clients write integers as whatever type their language gives them.
fn integer_of(value: &AMQPValue) -> Option<i64> {
    match value {
        AMQPValue::ShortShortInt(n) => Some(i64::from(*n)),
        AMQPValue::ShortShortUInt(n) => Some(i64::from(*n)),
        AMQPValue::ShortInt(n) => Some(i64::from(*n)),
        AMQPValue::ShortUInt(n) => Some(i64::from(*n)),
        AMQPValue::LongInt(n) => Some(i64::from(*n)),
        AMQPValue::LongUInt(n) => Some(i64::from(*n)),
        AMQPValue::LongLongInt(n) => Some(*n),
        other => text_of(other)?.trim().parse().ok(),
    }
}

/// The headers as text, bounded, without the token: it would let a reader of the table answer.
fn kept(headers: Option<&FieldTable>) -> Value {
    let mut map = Map::new();
    let headers = headers.into_iter().flat_map(|headers| headers.inner());
    for (name, value) in headers.filter(|(name, _)| name.as_str() != message::ACK_TOKEN).take(16) {
        let text = text_of(value).or_else(|| integer_of(value).map(|n| n.to_string()));
        let text = text.unwrap_or_else(|| format!("{:?}", value.get_type()));
        map.insert(printable(name.as_str(), KEPT), Value::String(printable(&text, KEPT)));
    }
    Value::Object(map)
}
