//! The ceiling of HTTP: the relay's own client and window against the same consumer, without any database. It has a
//! runtime of its own, as the relay has.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Instant, SystemTime};

use bytes::Bytes;
use sha2::{Digest, Sha256};

use crate::bench::sink::Sink;
use crate::bench::{Error, Result};
use crate::edge::Reach;
use crate::edge::http::HttpEdge;
use crate::model::consumer::{AckMode, Consumer, ConsumerEntry, DEFAULT_CONCURRENCY};
use crate::model::effect::{AttemptContext, Effect};
use crate::model::key::{ConsumerId, EffectId, EffectKey, LeaseEpoch, Shard, TaskId};
use crate::model::outcome::End;

/// Deliveries a second of `count` deliveries, each of which must be answered and counted once.
pub async fn http(count: u32, bodies: &[Vec<u8>]) -> Result<f64> {
    let sink = Sink::start(count).await?;
    let edge = edge(&sink.url())?;
    let bodies: Arc<Vec<Body>> = Arc::new(bodies.iter().map(Body::new).collect());
    let took = elsewhere(move || async move {
        let next = Arc::new(AtomicU32::new(0));
        let edge = Arc::new(edge);
        let started = Instant::now();
        let workers: Vec<_> = (0..DEFAULT_CONCURRENCY)
            .map(|_| tokio::spawn(post(Arc::clone(&edge), Arc::clone(&next), count, Arc::clone(&bodies))))
            .collect();
        for worker in workers {
            worker.await??;
        }
        Ok(started.elapsed())
    })
    .await?;
    sink.verify(count)?;
    Ok(f64::from(count) / took.as_secs_f64())
}

async fn post(edge: Arc<HttpEdge>, next: Arc<AtomicU32>, count: u32, bodies: Arc<Vec<Body>>) -> Result<()> {
    loop {
        let n = next.fetch_add(1, Ordering::Relaxed);
        if n >= count {
            return Ok(());
        }
        deliver(&edge, &bodies[n as usize % bodies.len()].effect(n)).await?;
    }
}

/// One delivery, which must succeed.
#[expect(clippy::disallowed_methods, reason = "no database takes part here; the time is only a header's")]
pub async fn deliver(edge: &HttpEdge, effect: &Effect) -> Result<()> {
    let outcome = edge.attempt(AttemptContext { effect, number: 1, now: SystemTime::now() }).await;
    match outcome.end {
        End::Answered { status: 200, .. } => Ok(()),
        end => Err(Error::Untrue(format!("the bare client: {end:?} {:?}", outcome.evidence.error))),
    }
}

/// A body with its digest.
pub struct Body {
    payload: Bytes,
    sha256: [u8; 32],
}

impl Body {
    pub fn new(payload: impl AsRef<[u8]>) -> Self {
        let payload = Bytes::copy_from_slice(payload.as_ref());
        let sha256 = Sha256::digest(&payload).into();
        Self { payload, sha256 }
    }

    /// The n-th delivery, as it would come from the log.
    pub fn effect(&self, n: u32) -> Effect {
        // Unwrap safety: well-formed by construction.
        let task = TaskId::new(format!("bench-{n}")).expect("a task id");
        let epoch = LeaseEpoch::new(1).expect("an epoch");
        Effect {
            id: EffectId(i64::from(n)),
            shard: Shard(0),
            ordering_key: task.as_str().to_owned(),
            key: EffectKey::new(task, epoch, 1).expect("a key"),
            targets: vec![ConsumerId(1)],
            topic: None,
            kind: Some("bench.effect".into()),
            schema_version: None,
            content_type: "application/json".into(),
            headers: Vec::new(),
            traceparent: None,
            payload: self.payload.clone(),
            sha256: self.sha256,
            committed_at: SystemTime::UNIX_EPOCH,
            deliver_after: None,
            expires_at: None,
        }
    }
}

/// The way to one consumer, with the defaults of a consumer whose word is required.
pub fn edge(url: &str) -> Result<HttpEdge> {
    Ok(HttpEdge::new(&consumer(url)?, &Reach::default().egress)?)
}

fn consumer(url: &str) -> Result<Consumer> {
    let spec = serde_json::json!({ "name": "sink", "kind": "http", "url": url });
    let entry = serde_json::from_value::<ConsumerEntry>(spec).map_err(|error| Error::Untrue(error.to_string()))?;
    let entry = ConsumerEntry { ack: Some(AckMode::Required), ..entry };
    entry.check(ConsumerId(1)).map_err(|faults| Error::Untrue(format!("{faults:?}")))
}

/// Runs `work` in a runtime of its own, as a process of its own would.
pub async fn elsewhere<T, F>(work: impl FnOnce() -> F + Send + 'static) -> Result<T>
where
    F: Future<Output = Result<T>>,
    T: Send + 'static,
{
    tokio::task::spawn_blocking(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        runtime.map_err(Error::io("cannot start a runtime"))?.block_on(async { work().await })
    })
    .await?
}
