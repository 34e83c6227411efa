//! The right to work on a shard, as this relay sees it.

use std::collections::HashSet;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::time::Instant;

use crate::model::key::{FlightSeq, Shard, ShardEpoch};
use crate::mutant::{self, Mutant};

/// A shard held under an epoch, until a local monotonic deadline.
///
/// The deadline is taken before the renewal is sent, so that it can only be earlier than the database's.
#[derive(Debug)]
pub struct ShardLease {
    pub shard: Shard,
    pub epoch: ShardEpoch,
    deadline: Mutex<Option<Instant>>,
    yielding: AtomicBool,
    unread: AtomicBool,
    in_hand: AtomicUsize,
    newest: AtomicI64,
    in_air: Mutex<HashSet<FlightSeq>>,
    read_ahead: AtomicBool,
}

/// A flight's place among those of its lease that are in the air; given up when nobody has it in hand any more.
#[derive(Debug)]
pub struct InAir {
    lease: Arc<ShardLease>,
    seq: FlightSeq,
}

/// A delivery's share in a lease: a shard is handed over when nobody holds one any more.
#[derive(Debug)]
pub struct LeaseHold(Arc<ShardLease>);

impl ShardLease {
    pub fn new(shard: Shard, epoch: ShardEpoch, deadline: Instant) -> Self {
        let deadline = Mutex::new(Some(deadline));
        Self {
            shard,
            epoch,
            deadline,
            yielding: AtomicBool::new(false),
            unread: AtomicBool::new(false),
            in_hand: AtomicUsize::new(0),
            newest: AtomicI64::new(0),
            in_air: Mutex::default(),
            read_ahead: AtomicBool::new(false),
        }
    }

    /// Whether an attempt may start now.
    pub fn is_alive(&self) -> bool {
        self.deadline
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_some_and(|deadline| Instant::now() < deadline || mutant::is(Mutant::NoEpochPredicate))
    }

    pub fn is_lost(&self) -> bool {
        self.deadline.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Moves the deadline of a lease that was not lost. One whose deadline has passed meanwhile is lost, though the
    /// database may have renewed it in time: what came due in between was dropped.
    pub fn extend(&self, until: Instant) {
        let mut deadline = self.deadline.lock().unwrap_or_else(PoisonError::into_inner);
        *deadline = deadline
            .filter(|deadline| Instant::now() < *deadline || mutant::is(Mutant::NoEpochPredicate))
            .map(|_| until);
    }

    /// Ends the lease for good: what is still in hand under it is dropped, its facts are kept.
    pub fn lose(&self) {
        *self.deadline.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// From now on nothing more of the shard is read: another relay is to have it.
    pub fn give_way(&self) {
        self.yielding.store(true, Ordering::Release);
    }

    pub fn gives_way(&self) -> bool {
        self.yielding.load(Ordering::Acquire)
    }

    /// The newest flight that was opened under this lease, or was there before it.
    pub fn reached(&self, seq: FlightSeq) {
        self.newest.store(seq.0, Ordering::Release);
    }

    pub fn newest_flight(&self) -> FlightSeq {
        FlightSeq(self.newest.load(Ordering::Acquire))
    }

    /// Whether a flight opened under this lease is in hand.
    pub fn is_in_air(&self, seq: FlightSeq) -> bool {
        self.in_air.lock().unwrap_or_else(PoisonError::into_inner).contains(&seq)
    }

    /// Something was read that has no flight yet.
    pub fn reads_ahead(&self) {
        self.read_ahead.store(true, Ordering::Release);
    }

    /// All that was read has its flight.
    pub fn has_written(&self) {
        self.read_ahead.store(false, Ordering::Release);
    }

    pub fn is_read_ahead(&self) -> bool {
        self.read_ahead.load(Ordering::Acquire)
    }

    /// The reader has let go of the shard: no flight of it is being opened.
    pub fn let_go(&self) {
        self.unread.store(true, Ordering::Release);
    }

    /// Whether the shard can be handed over: nothing of it is read any more, and everything in hand is settled.
    pub fn is_free(&self) -> bool {
        self.unread.load(Ordering::Acquire) && self.in_hand.load(Ordering::Acquire) == 0
    }
}

impl InAir {
    pub fn of(lease: &Arc<ShardLease>, seq: FlightSeq) -> Self {
        lease.in_air.lock().unwrap_or_else(PoisonError::into_inner).insert(seq);
        Self { lease: Arc::clone(lease), seq }
    }
}

impl Drop for InAir {
    fn drop(&mut self) {
        self.lease.in_air.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.seq);
    }
}

impl LeaseHold {
    pub fn of(lease: &Arc<ShardLease>) -> Self {
        lease.in_hand.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(lease))
    }
}

impl Deref for LeaseHold {
    type Target = ShardLease;

    fn deref(&self) -> &ShardLease {
        &self.0
    }
}

impl Drop for LeaseHold {
    fn drop(&mut self) {
        self.0.in_hand.fetch_sub(1, Ordering::AcqRel);
    }
}
