//! What the relay tells the outside about itself, without being asked twice.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

/// Consumers whose way is shut for this relay now, each with the reason.
pub type ShutEdges = BTreeMap<String, String>;

/// Shared by the relay, which writes, and the admin endpoints, which read.
#[derive(Debug)]
pub struct Health {
    started: Instant,
    last_turn: Mutex<Instant>,
    last_renewal: Mutex<Option<Instant>>,
    shards: AtomicU64,
    shut_edges: watch::Sender<ShutEdges>,
}

impl Default for Health {
    fn default() -> Self {
        let now = Instant::now();
        Self {
            started: now,
            last_turn: Mutex::new(now),
            last_renewal: Mutex::new(None),
            shards: AtomicU64::new(0),
            shut_edges: watch::Sender::default(),
        }
    }
}

impl Health {
    /// The reader's loop has come round, or is alive and waiting.
    pub fn turned(&self) {
        *self.last_turn.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Waits for `what` and stays alive meanwhile: a relay that waits, for its database as a rule, does not hang.
    pub async fn during<T>(&self, what: impl Future<Output = T>) -> T {
        let mut what = std::pin::pin!(what);
        loop {
            self.turned();
            if let Ok(done) = tokio::time::timeout(Duration::from_secs(1), &mut what).await {
                return done;
            }
        }
    }

    /// The database answered a renewal.
    pub fn renewed(&self, shards: usize) {
        *self.last_renewal.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        self.shards.store(shards as u64, Ordering::Relaxed);
    }

    /// The way to a consumer is shut, or open again (`None`).
    pub fn edge(&self, consumer: &str, shut: Option<&str>) {
        self.shut_edges.send_if_modified(|edges| {
            let before = match shut {
                Some(why) => edges.insert(consumer.to_string(), why.to_string()),
                None => edges.remove(consumer),
            };
            before.as_deref() != shut
        });
    }

    /// The ways that are shut, now and whenever that changes.
    pub fn shut_edges(&self) -> watch::Receiver<ShutEdges> {
        self.shut_edges.subscribe()
    }

    pub fn since_turn(&self) -> Duration {
        self.last_turn.lock().unwrap_or_else(PoisonError::into_inner).elapsed()
    }

    /// `None` before the first renewal.
    pub fn since_renewal(&self) -> Option<Duration> {
        self.last_renewal.lock().unwrap_or_else(PoisonError::into_inner).map(|at| at.elapsed())
    }

    pub fn uptime(&self) -> Duration {
        self.started.elapsed()
    }

    /// Shards held; a standby holds none.
    pub fn shards(&self) -> u64 {
        self.shards.load(Ordering::Relaxed)
    }
}
