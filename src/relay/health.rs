//! What the relay tells the outside about itself, without being asked twice.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Shared by the relay, which writes, and the admin endpoints, which read.
#[derive(Debug)]
pub struct Health {
    started: Instant,
    last_turn: Mutex<Instant>,
    last_renewal: Mutex<Option<Instant>>,
    shards: AtomicU64,
}

impl Default for Health {
    fn default() -> Self {
        let now = Instant::now();
        Self { started: now, last_turn: Mutex::new(now), last_renewal: Mutex::new(None), shards: AtomicU64::new(0) }
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
