//! The edges: where an attempt leaves this machine and its outcome is read. An edge reports what it saw; it decides
//! nothing about retries and knows no database.
//!
//! HTTP: [`http`] makes the attempt, `request` writes its headers, `body` watches its bytes go, [`sign`] signs them,
//! [`ack`] reads the consumer's word (an RFC 8941 item, `item`), `retry_after` its hint, and [`egress`] guards where a
//! request may go at all. AMQP: [`amqp`].

pub mod ack;
pub mod amqp;
mod body;
pub mod egress;
pub mod error;
pub mod http;
mod item;
pub mod request;
mod retry_after;
pub mod sign;

use std::sync::Arc;
use std::time::Duration;

use crate::model::broker::Broker;
use crate::model::consumer::{Consumer, EdgeSpec};
use crate::model::effect::AttemptContext;
use crate::model::outcome::{AckReading, End, Evidence, Outcome, Phase};
use crate::model::token::Ack;

/// A consumer's edge, ready to make attempts.
pub enum Edge {
    Http(Box<http::HttpEdge>),
    Amqp(amqp::AmqpEdge),
    /// Nothing is sent and everything counts as applied.
    AtOnce,
}

/// Whether consumers are really reached. Nothing a person can write down changes it: `fencepost bench` does, where it
/// measures what everything but the edge costs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Edges {
    #[default]
    Real,
    /// See [`Edge::AtOnce`].
    AtOnce,
}

/// What the configuration says about the world outside.
#[derive(Clone, Debug, Default)]
pub struct Reach {
    pub egress: egress::EgressPolicy,
    pub brokers: Vec<Arc<Broker>>,
    pub edges: Edges,
}

impl Reach {
    pub fn broker(&self, name: &str) -> Option<&Arc<Broker>> {
        self.brokers.iter().find(|broker| broker.name == name)
    }
}

impl From<egress::EgressPolicy> for Reach {
    fn from(egress: egress::EgressPolicy) -> Self {
        Self { egress, ..Self::default() }
    }
}

impl Edge {
    /// Reads the consumer's secrets and builds its client. `keys` are the installation's own. Must be called within a
    /// runtime.
    pub fn new(consumer: &Consumer, reach: &Reach, keys: &Arc<amqp::token::AckKey>) -> Result<Self, error::EdgeError> {
        match &consumer.edge {
            _ if reach.edges == Edges::AtOnce => Ok(Self::AtOnce),
            EdgeSpec::Http { .. } => Ok(Self::Http(Box::new(http::HttpEdge::new(consumer, &reach.egress)?))),
            EdgeSpec::Amqp(spec) => {
                let broker = reach.broker(&spec.broker).ok_or_else(|| error::EdgeError::Broker {
                    consumer: consumer.name.clone(),
                    broker: spec.broker.clone(),
                })?;
                Ok(Self::Amqp(amqp::AmqpEdge::new(consumer, spec, broker, keys)?))
            }
        }
    }

    /// Makes one attempt. Always ends, within the consumer's timeout. What an edge has to remember meanwhile is large and
    /// has a place of its own, so that the attempt around it is moved cheaply.
    pub async fn attempt(&self, ctx: AttemptContext<'_>) -> Outcome {
        match self {
            Self::Http(edge) => Box::pin(edge.attempt(ctx)).await,
            Self::Amqp(edge) => Box::pin(edge.attempt(ctx)).await,
            Self::AtOnce => applied_at_once(),
        }
    }

    /// Why no attempt should be started now: the way is shut for every delivery alike. `None` while it is open.
    pub fn shut(&self) -> Option<Arc<str>> {
        match self {
            Self::Http(_) | Self::AtOnce => None,
            Self::Amqp(edge) => edge.shut(),
        }
    }

    /// Whether it knows by itself when nothing gets through: then failures of single attempts say no more than that.
    pub fn shuts_by_itself(&self) -> bool {
        matches!(self, Self::Amqp(_))
    }

    /// Waits until the way opens or shuts.
    pub async fn turned(&self) {
        match self {
            Self::Http(_) | Self::AtOnce => std::future::pending().await,
            Self::Amqp(edge) => edge.turned().await,
        }
    }
}

fn applied_at_once() -> Outcome {
    let ack = AckReading::Word { ack: Ack::Applied, retain: None, raw: Ack::Applied.wire().into() };
    let evidence = Evidence { phase: Phase::Done, bytes_left: true, took: Duration::ZERO, error: None };
    Outcome { end: End::Answered { status: 200, ack }, evidence, retry_after: None }
}
