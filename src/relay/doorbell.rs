//! Sleeping and being woken: the LISTEN session of a relay. Nothing depends on it but latency; without it the relay
//! polls.

use std::collections::HashSet;
use std::sync::Arc;

use tokio::sync::{Mutex, Notify};
use tokio_util::sync::CancellationToken;

use super::outage;
use super::router::Router;
use crate::edge::error::report;
use crate::model::key::Shard;
use crate::store::session::Session;
use crate::store::{Database, doorbell};

/// What the outside can tell a relay.
#[derive(Default)]
pub struct Doorbell {
    inner: Mutex<Inner>,
    /// Effects were committed.
    pub rung: Notify,
    /// A shard was given up.
    pub shards: Notify,
    /// A delivery was parked, or an operator made one due.
    pub parked: Notify,
    /// A consumer's word waited for the attempt that has just ended.
    pub early: Notify,
}

#[derive(Default)]
struct Inner {
    /// The session that listens, once it has proved that it does.
    session: Option<Arc<Session>>,
    armed: HashSet<Shard>,
}

/// Whether a commit will ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Armed {
    /// For some shard only since this call: what was committed before it must still be looked for.
    JustNow,
    All,
    /// For some shard it does not: a producer is at work there, or nothing listens.
    Partly,
}

impl Doorbell {
    /// Hangs the doorbell up for the shards where it does not hang yet.
    pub async fn arm(&self, shards: &[Shard]) -> Armed {
        let mut inner = self.inner.lock().await;
        let missing: Vec<Shard> = shards.iter().filter(|shard| !inner.armed.contains(shard)).copied().collect();
        if missing.is_empty() {
            return Armed::All;
        }
        let Some(session) = inner.session.clone() else { return Armed::Partly };
        match doorbell::arm(session.client(), &missing).await {
            Ok(armed) if armed.is_empty() => Armed::Partly,
            Ok(armed) => {
                inner.armed.extend(armed);
                Armed::JustNow
            }
            Err(error) => {
                tracing::debug!(error = %report(&error), "the doorbell could not be armed");
                Armed::Partly
            }
        }
    }

    /// Whether it hangs for all of them.
    pub async fn hangs(&self, shards: &[Shard]) -> bool {
        let inner = self.inner.lock().await;
        shards.iter().all(|shard| inner.armed.contains(shard))
    }

    /// Takes it down, if it hangs.
    pub async fn disarm(&self) {
        let mut inner = self.inner.lock().await;
        if inner.armed.is_empty() {
            return;
        }
        inner.armed.clear();
        let Some(session) = inner.session.clone() else { return };
        if let Err(error) = doorbell::disarm(session.client()).await {
            tracing::debug!(error = %report(&error), "the doorbell could not be taken down");
        }
    }

    async fn attach(&self, session: Option<Arc<Session>>) {
        let mut inner = self.inner.lock().await;
        inner.armed.clear();
        inner.session = session;
    }
}

/// Keeps a listening session until `stop`.
pub async fn keep(bell: Arc<Doorbell>, router: Arc<Router>, database: Database, stop: CancellationToken) {
    while let Some((session, mut heard)) = outage::reconnect_listening(&database, "doorbell", &stop).await {
        let word = uuid::Uuid::now_v7().to_string();
        if let Err(error) = doorbell::listen(session.client(), &word).await {
            tracing::debug!(error = %report(&error), "listening failed");
            continue;
        }
        let proof = async {
            while let Some(note) = heard.recv().await {
                if doorbell::is_proof(&note.channel, &note.payload, &word) {
                    return true;
                }
            }
            false
        };
        if !tokio::time::timeout(doorbell::PROOF_WITHIN, proof).await.unwrap_or(false) {
            tracing::warn!(
                "notifications do not arrive on this connection (a transaction pooler?): the relay will poll"
            );
            stop.cancelled().await;
            return;
        }
        bell.attach(Some(Arc::new(session))).await;
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                note = heard.recv() => match note.as_ref().map(|note| note.channel.as_str()) {
                    Some(doorbell::EFFECTS) => bell.rung.notify_one(),
                    Some(doorbell::SHARDS) => bell.shards.notify_one(),
                    Some(doorbell::PARKED) => bell.parked.notify_one(),
                    Some(doorbell::CONSUMERS) => router.changed.notify_one(),
                    Some(_) => {}
                    None => break,
                },
            }
        }
        bell.attach(None).await;
        // Whatever was rung meanwhile was heard by nobody.
        bell.rung.notify_one();
    }
}
