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
