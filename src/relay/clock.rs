//! The database's clock, carried forward by this machine's monotonic one between two readings.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use tokio::time::Instant;

/// Never this machine's wall clock: it may be an hour off and nothing changes.
#[derive(Clone, Debug)]
pub struct DatabaseClock(Arc<Mutex<(SystemTime, Instant)>>);

impl DatabaseClock {
    pub fn new(read: SystemTime) -> Self {
        Self(Arc::new(Mutex::new((read, Instant::now()))))
    }

    pub fn set(&self, read: SystemTime) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = (read, Instant::now());
    }

    pub fn now(&self) -> SystemTime {
        let (read, at) = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        read + at.elapsed()
    }
}
