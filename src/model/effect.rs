//! An effect as it lies in the log, and one attempt to deliver it.

use std::time::SystemTime;

use bytes::Bytes;

use super::key::{ConsumerId, EffectId, EffectKey, Shard};

/// One intended external action of a completion. Immutable once committed; the payload's bytes are sent verbatim.
#[derive(Clone, Debug)]
pub struct Effect {
    pub id: EffectId,
    pub shard: Shard,
    pub key: EffectKey,
    /// The consumers it was routed to, resolved when it was committed.
    pub targets: Vec<ConsumerId>,
    pub topic: Option<String>,
    /// The producer's name for what happened, `Outbox-Type` on the wire.
    pub kind: Option<String>,
    pub schema_version: Option<String>,
    pub content_type: String,
    pub headers: Vec<(String, String)>,
    /// The producer's key of order; the task id where it gave none.
    pub ordering_key: String,
    pub traceparent: Option<String>,
    pub payload: Bytes,
    pub sha256: [u8; 32],
    /// Stamped by the database when the row was inserted.
    pub committed_at: SystemTime,
    pub deliver_after: Option<SystemTime>,
    pub expires_at: Option<SystemTime>,
}

/// What an edge needs to make one attempt.
#[derive(Clone, Copy, Debug)]
pub struct AttemptContext<'a> {
    pub effect: &'a Effect,
    /// From 1; counts every attempt of this delivery that may have left.
    pub number: u32,
    /// The database's clock at the start of the attempt.
    pub now: SystemTime,
}
