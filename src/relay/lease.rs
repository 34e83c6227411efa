//! The right to work on a shard, as this relay sees it.

use std::sync::{Mutex, PoisonError};

use tokio::time::Instant;

use crate::model::key::{Shard, ShardEpoch};

/// A shard held under an epoch, until a local monotonic deadline.
///
/// The deadline is taken before the renewal is sent, so that it can only be earlier than the database's.
#[derive(Debug)]
pub struct ShardLease {
    pub shard: Shard,
    pub epoch: ShardEpoch,
    deadline: Mutex<Option<Instant>>,
}

impl ShardLease {
    pub fn new(shard: Shard, epoch: ShardEpoch, deadline: Instant) -> Self {
        Self { shard, epoch, deadline: Mutex::new(Some(deadline)) }
    }

    /// Whether an attempt may start now.
    pub fn is_alive(&self) -> bool {
        self.deadline.lock().unwrap_or_else(PoisonError::into_inner).is_some_and(|deadline| Instant::now() < deadline)
    }

    /// Moves the deadline of a lease that was not lost.
    pub fn extend(&self, until: Instant) {
        if let Some(deadline) = self.deadline.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            *deadline = until;
        }
    }

    /// Ends the lease for good: what is still in hand under it is dropped, its facts are kept.
    pub fn lose(&self) {
        *self.deadline.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}
