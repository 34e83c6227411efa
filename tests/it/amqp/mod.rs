//! AMQP against a real RabbitMQ. What counts is what the queues hold and what the consumers wrote down, not our tables.

mod acks;
mod cli;
mod examples;
mod external;
mod failover;
mod faults;
mod ledger;
mod publish;
pub mod rig;
mod rights;
mod shut;
mod storm;
mod tls;

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use fencepost::edge::amqp::AmqpEdge;
use fencepost::edge::amqp::token::AckKey;
use fencepost::model::broker::Broker;
use fencepost::model::consumer::{Consumer, ConsumerEntry, EdgeSpec};
use fencepost::model::effect::{AttemptContext, Effect};
use fencepost::model::key::{ConsumerId, EffectId, Shard};
use fencepost::model::outcome::Outcome;

use crate::support::eventually;

/// An entry as it would stand in the file, without `name` and `kind`.
pub fn consumer(toml: &str) -> Consumer {
    let text = format!("name = 'billing'\nkind = 'amqp'\n{toml}");
    let entry: ConsumerEntry = toml::from_str(&text).expect("an entry");
    entry.check(ConsumerId(1)).expect("a consumer")
}

pub fn keys() -> Arc<AckKey> {
    Arc::new(AckKey::new("test", "secret".into()))
}

/// An edge whose way to the broker is open.
pub async fn open_edge(consumer: &Consumer, broker: &Arc<Broker>) -> AmqpEdge {
    let edge = edge(consumer, broker);
    opens(&edge).await;
    edge
}

pub fn edge(consumer: &Consumer, broker: &Arc<Broker>) -> AmqpEdge {
    let EdgeSpec::Amqp(spec) = &consumer.edge else { panic!("not an AMQP consumer") };
    AmqpEdge::new(consumer, spec, broker, &keys()).expect("an edge")
}

pub async fn opens(edge: &AmqpEdge) {
    eventually("the way to the broker opens", async || edge.shut().is_none().then_some(())).await
}

pub async fn shuts(edge: &AmqpEdge) -> Arc<str> {
    eventually("the way to the broker shuts", async || edge.shut()).await
}

pub fn effect(key: &str) -> Effect {
    Effect {
        id: EffectId(1),
        shard: Shard(0),
        key: key.parse().expect("a key"),
        targets: vec![ConsumerId(1)],
        topic: None,
        kind: Some("order.paid".into()),
        schema_version: None,
        content_type: "application/json".into(),
        headers: Vec::new(),
        ordering_key: "task".into(),
        traceparent: None,
        payload: Bytes::from(format!("{{\"key\": \"{key}\"}}")),
        sha256: [0; 32],
        committed_at: UNIX_EPOCH + Duration::from_secs(1),
        deliver_after: None,
        expires_at: None,
    }
}

pub async fn attempt(edge: &AmqpEdge, effect: &Effect) -> Outcome {
    let now: SystemTime = UNIX_EPOCH + Duration::from_secs(1);
    edge.attempt(AttemptContext { effect, number: 1, now }).await
}
