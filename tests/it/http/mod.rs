//! Contract section 4 against a scripted receiver: every answer, every cut, and what each leaves as evidence.

mod answers;
mod connect;
mod cuts;
mod examples;
mod request;
mod reuse;

use std::time::{Duration, SystemTime};

use bytes::Bytes;
use fencepost::edge::egress::EgressPolicy;
use fencepost::edge::http::HttpEdge;
use fencepost::model::consumer::{Consumer, ConsumerEntry};
use fencepost::model::effect::{AttemptContext, Effect};
use fencepost::model::key::{ConsumerId, EffectId, Shard};
use fencepost::model::outcome::{AckReading, End, Outcome};
use sha2::{Digest, Sha256};

use crate::support::PATIENCE;

/// The key of [`effect`].
const KEY: &str = "task-1:3";

fn consumer(url: &str, more: &str) -> Consumer {
    let text = format!("name = 'billing'\nkind = 'http'\nurl = '{url}'\n{more}");
    let entry: ConsumerEntry = toml::from_str(&text).expect("a consumer");
    entry.check(ConsumerId(1)).expect("no faults")
}

/// An edge that gives up soon, for what would otherwise end by the default of 15 s.
fn hasty(url: &str) -> HttpEdge {
    edge(url, "timeout = '1s'\nconnect_timeout = '300ms'")
}

fn edge(url: &str, more: &str) -> HttpEdge {
    HttpEdge::new(&consumer(url, more), &EgressPolicy::default()).expect("an edge")
}

fn effect(payload: impl Into<Bytes>) -> Effect {
    let payload = payload.into();
    Effect {
        id: EffectId(1),
        shard: Shard(0),
        key: KEY.parse().expect("a key"),
        targets: vec![ConsumerId(1)],
        topic: None,
        kind: None,
        schema_version: None,
        content_type: "application/json".into(),
        headers: Vec::new(),
        ordering_key: "task-1".into(),
        traceparent: None,
        sha256: Sha256::digest(&payload).into(),
        payload,
        committed_at: clock(),
        deliver_after: None,
        expires_at: None,
    }
}

async fn attempt(edge: &HttpEdge, effect: &Effect) -> Outcome {
    attempt_number(edge, effect, 1).await
}

async fn attempt_number(edge: &HttpEdge, effect: &Effect, number: u32) -> Outcome {
    let ctx = AttemptContext { effect, number, now: clock() };
    tokio::time::timeout(PATIENCE, edge.attempt(ctx)).await.expect("an attempt ends by itself")
}

fn answered(outcome: &Outcome) -> (u16, &AckReading) {
    match &outcome.end {
        End::Answered { status, ack } => (*status, ack),
        other => panic!("{other:?} instead of an answer: {:?}", outcome.evidence),
    }
}

/// Stands in for the database's clock, which the relay would pass on.
#[allow(clippy::disallowed_methods)]
fn clock() -> SystemTime {
    SystemTime::now()
}

fn seconds(n: u64) -> Option<Duration> {
    Some(Duration::from_secs(n))
}
