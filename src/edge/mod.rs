//! The edges: where an attempt leaves this machine and its outcome is read. An edge reports what it saw; it decides
//! nothing about retries and knows no database.
//!
//! HTTP: [`http`] makes the attempt, `request` writes its headers, `body` watches its bytes go, [`sign`] signs them,
//! [`ack`] reads the consumer's word (an RFC 8941 item, `item`), `retry_after` its hint, and [`egress`] guards where a
//! request may go at all.

pub mod ack;
mod body;
pub mod egress;
pub mod error;
pub mod http;
mod item;
pub mod request;
mod retry_after;
pub mod sign;

use crate::model::consumer::{Consumer, EdgeSpec};
use crate::model::effect::AttemptContext;
use crate::model::outcome::Outcome;

/// A consumer's edge, ready to make attempts.
pub enum Edge {
    Http(http::HttpEdge),
}

impl Edge {
    /// Reads the consumer's secrets and builds its client.
    pub fn new(consumer: &Consumer, egress: &egress::EgressPolicy) -> Result<Self, error::EdgeError> {
        match consumer.edge {
            EdgeSpec::Http { .. } | EdgeSpec::Amqp { .. } => Ok(Self::Http(http::HttpEdge::new(consumer, egress)?)),
        }
    }

    /// Makes one attempt. Always ends, within the consumer's timeout.
    pub async fn attempt(&self, ctx: AttemptContext<'_>) -> Outcome {
        match self {
            Self::Http(edge) => edge.attempt(ctx).await,
        }
    }
}
