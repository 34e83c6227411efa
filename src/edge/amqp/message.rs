//! One AMQP message: its properties and headers (contract, section 5), checked before any socket is touched. A message
//! a broker must refuse would take the channel, or the whole connection, with it.

use std::time::UNIX_EPOCH;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable, ShortString};

use super::token::AckKey;
use crate::edge::request::child_of;
use crate::model::consumer::AckMode;
use crate::model::effect::AttemptContext;
use crate::model::key::Shard;

pub const TASK_ID: &str = "outbox-task-id";
pub const CONSUMER: &str = "outbox-consumer";
pub const ACK_TOKEN: &str = "outbox-ack-token";
pub const LEASE_EPOCH: &str = "outbox-lease-epoch";
pub const ATTEMPT: &str = "outbox-attempt";
const SCHEMA_VERSION: &str = "outbox-schema-version";
const DIGEST: &str = "content-digest";
const TRACEPARENT: &str = "traceparent";
const META: &str = "x-meta-";

/// The headers must fit one frame, and a broker may negotiate less than the usual 128 KiB.
const HEADERS_MAX: usize = 64 * 1024;
/// What RabbitMQ 4 takes by default, the smallest of the versions in use.
const BODY_MAX: usize = 16 * 1024 * 1024;
const PERSISTENT: u8 = 2;

/// Why a message is not sent, now or ever.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Invalid {
    #[error("{field} is {length} bytes; AMQP allows 255")]
    Short { field: &'static str, length: usize },
    #[error("{0} holds a control character")]
    Control(String),
    #[error("the headers are {0} bytes; at most {HEADERS_MAX} are sent")]
    Headers(usize),
    #[error("the payload is {0} bytes; at most {BODY_MAX} are sent")]
    Body(usize),
}

/// A message ready to be published.
#[derive(Debug)]
pub struct Message {
    /// The idempotency key: `message_id`.
    pub id: String,
    pub properties: BasicProperties,
    pub body: Bytes,
}

/// The queue the consumers of a shard reply to.
pub fn reply_queue(deployment: &str, shard: Shard) -> String {
    format!("fencepost.acks.{deployment}.{shard}")
}

/// Builds the message of one attempt.
pub fn build(ctx: &AttemptContext<'_>, consumer: &str, ack: AckMode, keys: &AckKey) -> Result<Message, Invalid> {
    let effect = ctx.effect;
    let id = effect.key.to_string();
    if effect.payload.len() > BODY_MAX {
        return Err(Invalid::Body(effect.payload.len()));
    }
    let mut headers = Headers::default();
    headers.text(TASK_ID, effect.key.task_id().as_str())?;
    headers.text(CONSUMER, consumer)?;
    headers.text(DIGEST, &format!("sha-256=:{}:", STANDARD.encode(effect.sha256)))?;
    headers.number(LEASE_EPOCH, effect.key.lease_epoch().get())?;
    headers.number(ATTEMPT, i64::from(ctx.number))?;
    if let Some(version) = &effect.schema_version {
        headers.text(SCHEMA_VERSION, version)?;
    }
    if let Some(parent) = effect.traceparent.as_deref().and_then(child_of) {
        headers.text(TRACEPARENT, &parent)?;
    }
    for (name, value) in &effect.headers {
        headers.text(&format!("{META}{}", name.to_ascii_lowercase()), value)?;
    }
    if ack != AckMode::None {
        headers.text(ACK_TOKEN, &keys.token(consumer, &id))?;
    }
    let committed = effect.committed_at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let mut properties = BasicProperties::default()
        .with_delivery_mode(PERSISTENT)
        .with_message_id(short("message_id", &id)?)
        .with_correlation_id(short("correlation_id", &format!("{consumer}/{id}"))?)
        .with_content_type(short("content_type", &effect.content_type)?)
        .with_app_id(short("app_id", "fencepost")?)
        .with_timestamp(committed)
        .with_headers(headers.finish()?);
    if let Some(kind) = &effect.kind {
        properties = properties.with_type(short("type", kind)?);
    }
    if ack != AckMode::None {
        properties = properties.with_reply_to(short("reply_to", &reply_queue(keys.deployment(), effect.shard))?);
    }
    Ok(Message { id, properties, body: effect.payload.clone() })
}

/// `ShortString::from` would panic beyond 255 bytes.
pub fn short(field: &'static str, text: &str) -> Result<ShortString, Invalid> {
    if text.chars().any(char::is_control) {
        return Err(Invalid::Control(field.into()));
    }
    ShortString::try_new(text).map_err(|_| Invalid::Short { field, length: text.len() })
}

#[derive(Default)]
struct Headers {
    table: FieldTable,
    size: usize,
}

impl Headers {
    fn text(&mut self, name: &str, value: &str) -> Result<(), Invalid> {
        if value.chars().any(|c| c.is_control() && c != '\t') {
            return Err(Invalid::Control(format!("header {name}")));
        }
        self.insert(name, AMQPValue::LongString(value.into()), 4 + value.len())
    }

    fn number(&mut self, name: &str, value: i64) -> Result<(), Invalid> {
        self.insert(name, AMQPValue::LongLongInt(value), 8)
    }

    fn insert(&mut self, name: &str, value: AMQPValue, size: usize) -> Result<(), Invalid> {
        // A length byte for the name, a type byte for the value.
        self.size += 2 + name.len() + size;
        self.table.insert(short("a header's name", name)?, value);
        Ok(())
    }

    fn finish(self) -> Result<FieldTable, Invalid> {
        if self.size > HEADERS_MAX { Err(Invalid::Headers(self.size)) } else { Ok(self.table) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::effect::Effect;
    use crate::model::key::{ConsumerId, EffectId};

    fn effect() -> Effect {
        Effect {
            id: EffectId(1),
            shard: Shard(3),
            key: "task:7:2".parse().unwrap(),
            targets: vec![ConsumerId(1)],
            topic: None,
            kind: Some("order.paid".into()),
            schema_version: None,
            content_type: "application/json".into(),
            headers: vec![("X-Tenant".into(), "a".into())],
            ordering_key: "task".into(),
            traceparent: Some("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".into()),
            payload: Bytes::from_static(b"{}"),
            sha256: [0; 32],
            committed_at: UNIX_EPOCH + std::time::Duration::from_secs(5),
            deliver_after: None,
            expires_at: None,
        }
    }

    fn built(effect: &Effect, ack: AckMode) -> Result<Message, Invalid> {
        let ctx = AttemptContext { effect, number: 2, now: UNIX_EPOCH };
        build(&ctx, "billing", ack, &AckKey::new("dep", "s".into()))
    }

    #[test]
    fn properties_are_the_contracts() {
        let effect = effect();
        let message = built(&effect, AckMode::Required).unwrap();
        let properties = &message.properties;
        let text = |value: &Option<ShortString>| value.as_ref().map(|s| s.as_str().to_string());
        assert_eq!(text(properties.message_id()), Some("task:7:2".into()));
        assert_eq!(text(properties.correlation_id()), Some("billing/task:7:2".into()));
        assert_eq!(text(properties.reply_to()), Some("fencepost.acks.dep.3".into()));
        assert_eq!(text(properties.kind()), Some("order.paid".into()));
        assert_eq!((properties.delivery_mode(), properties.timestamp()), (&Some(2), &Some(5)));
        assert_eq!((properties.expiration(), properties.priority(), properties.user_id()), (&None, &None, &None));
        let headers = properties.headers().as_ref().unwrap().inner();
        assert_eq!(headers["outbox-lease-epoch"], AMQPValue::LongLongInt(7));
        assert_eq!(headers["outbox-attempt"], AMQPValue::LongLongInt(2));
        assert_eq!(headers["x-meta-x-tenant"], AMQPValue::LongString("a".into()));
        assert!(headers.contains_key("outbox-ack-token") && headers.contains_key("traceparent"));
        let silent = built(&effect, AckMode::None).unwrap();
        assert_eq!(silent.properties.reply_to(), &None);
        assert!(!silent.properties.headers().as_ref().unwrap().inner().contains_key("outbox-ack-token"));
    }

    #[test]
    fn what_a_broker_would_answer_with_a_dead_connection_is_refused_here() {
        let with = |change: fn(&mut Effect)| {
            let mut effect = effect();
            change(&mut effect);
            built(&effect, AckMode::Required).err()
        };
        assert_eq!(with(|_| ()), None);
        assert_eq!(with(|e| e.kind = Some("k".repeat(255))), None);
        assert_eq!(with(|e| e.kind = Some("k".repeat(256))), Some(Invalid::Short { field: "type", length: 256 }));
        assert_eq!(
            with(|e| e.headers = vec![("n".repeat(249), "v".into())]),
            Some(Invalid::Short { field: "a header's name", length: 256 })
        );
        assert!(matches!(with(|e| e.headers = vec![("n".into(), "v".repeat(65_536))]), Some(Invalid::Headers(_))));
        assert!(matches!(with(|e| e.payload = vec![0; BODY_MAX + 1].into()), Some(Invalid::Body(_))));
        assert_eq!(with(|e| e.kind = Some("a\nb".into())), Some(Invalid::Control("type".into())));
        // Sender-selected distribution is reached by these names alone, and never by ours.
        assert_eq!(with(|e| e.headers = vec![("CC".into(), "q".into())]), None);
    }
}
