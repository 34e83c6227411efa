//! One intended effect, as `complete_task` takes it.

use std::collections::BTreeMap;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Serialize;
use serde_json::Value;

/// An effect to be: to one consumer or to a topic, with one payload.
#[derive(Clone, Debug, Serialize)]
pub struct Effect {
    #[serde(flatten)]
    target: Target,
    #[serde(flatten)]
    payload: Payload,
    #[serde(skip_serializing_if = "Option::is_none")]
    content_type: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    schema_version: Option<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    headers: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ordering_key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    traceparent: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    amends: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    deliver_in: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_in: Option<String>,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum Target {
    Consumer(String),
    Topic(String),
}

/// What is sent: the bytes are frozen when the completion commits.
#[derive(Clone, Debug, Serialize)]
pub enum Payload {
    /// The bytes are PostgreSQL's own text of this value.
    #[serde(rename = "payload")]
    Json(Value),
    /// Sent verbatim.
    #[serde(rename = "payload_text")]
    Text(String),
    /// Sent verbatim.
    #[serde(rename = "payload_base64", serialize_with = "base64")]
    Bytes(Vec<u8>),
}

fn base64<S: serde::Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&STANDARD.encode(bytes))
}

impl Effect {
    /// For one consumer, by name.
    pub fn to(consumer: impl Into<String>, payload: Payload) -> Self {
        Self::new(Target::Consumer(consumer.into()), payload)
    }

    /// For whoever is subscribed to the topic when the completion commits.
    pub fn on(topic: impl Into<String>, payload: Payload) -> Self {
        Self::new(Target::Topic(topic.into()), payload)
    }

    fn new(target: Target, payload: Payload) -> Self {
        Self {
            target,
            payload,
            content_type: None,
            kind: None,
            schema_version: None,
            headers: BTreeMap::new(),
            ordering_key: None,
            traceparent: None,
            amends: None,
            deliver_in: None,
            expires_in: None,
        }
    }

    /// What happened, `Outbox-Type` on the wire.
    pub fn kind(mut self, kind: impl Into<String>) -> Self {
        self.kind = Some(kind.into());
        self
    }

    pub fn content_type(mut self, content_type: impl Into<String>) -> Self {
        self.content_type = Some(content_type.into());
        self
    }

    pub fn schema_version(mut self, version: impl Into<String>) -> Self {
        self.schema_version = Some(version.into());
        self
    }

    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.headers.insert(name.into(), value.into());
        self
    }

    /// Effects of one key arrive in order, where the consumer's `ordering = key`. Without it: the task id.
    pub fn ordering_key(mut self, key: impl Into<String>) -> Self {
        self.ordering_key = Some(key.into());
        self
    }

    /// The W3C trace this effect belongs to.
    pub fn traceparent(mut self, traceparent: impl Into<String>) -> Self {
        self.traceparent = Some(traceparent.into());
        self
    }

    /// The key of the effect this one corrects.
    pub fn amends(mut self, key: impl Into<String>) -> Self {
        self.amends = Some(key.into());
        self
    }

    /// Not before so long after the commit.
    pub fn deliver_in(mut self, wait: Duration) -> Self {
        self.deliver_in = Some(interval(wait));
        self
    }

    /// Not after so long after the commit.
    pub fn expires_in(mut self, wait: Duration) -> Self {
        self.expires_in = Some(interval(wait));
        self
    }
}

fn interval(wait: Duration) -> String {
    format!("{} seconds", wait.as_secs_f64())
}

/// The array `complete_task` takes.
pub(super) fn array(effects: &[Effect]) -> Value {
    // Unwrap safety: every key is a string and every value is one of serde_json's own.
    serde_json::to_value(effects).expect("effects are JSON")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_effect_has_only_the_fields_it_was_given() {
        let one = Effect::to("billing", Payload::Json(json!({"n": 1})));
        let two = Effect::on("order.paid", Payload::Bytes(vec![0, 255]))
            .kind("order.paid")
            .content_type("application/octet-stream")
            .header("tenant", "a")
            .deliver_in(Duration::from_millis(1500));
        assert_eq!(
            array(&[one, two]),
            json!([
                {"consumer": "billing", "payload": {"n": 1}},
                {"topic": "order.paid", "payload_base64": "AP8=", "type": "order.paid",
                 "content_type": "application/octet-stream", "headers": {"tenant": "a"},
                 "deliver_in": "1.5 seconds"},
            ])
        );
    }
}
