//! One delivery on its way through the relay, and the flight or parked row it came from.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Notify;
use tokio::time::Instant;

use super::lease::{InAir, LeaseHold};
use crate::model::effect::Effect;
use crate::model::key::{ConsumerId, EffectId, FlightSeq};
use crate::store::parking::{Trouble, Turn};
use crate::store::settle::DeliveryId;

/// One (effect, consumer) pair in hand.
#[derive(Debug)]
pub struct Delivery {
    pub effect: Arc<Effect>,
    pub consumer: ConsumerId,
    pub lease: LeaseHold,
    pub trouble: Trouble,
    pub expired: bool,
    pub origin: Origin,
    /// When it came into hand.
    pub since: Instant,
    /// Shows its lane that it is not settled yet.
    pub lane: Option<Arc<()>>,
    pub share: Share,
}

/// Where a delivery came from decides what its first byte needs: an open flight, or a start row of its own.
#[derive(Debug)]
pub enum Origin {
    Flight(Arc<Flight>),
    Parked { turn: Turn, guard: InHand },
}

/// A flight in the air, or a page of a lag range. It may close when nothing of it is outstanding.
#[derive(Debug)]
pub struct Flight {
    pub kind: FlightKind,
    /// A page's last flight.
    pub seq: FlightSeq,
    pub outstanding: AtomicUsize,
    /// `None` for a page.
    pub place: Option<InAir>,
    /// Whether its row is on disk: what is read ahead is handed out before.
    written: AtomicBool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FlightKind {
    /// What was new in the log.
    Log,
    /// Flights a lane had left unread.
    Page,
}

/// Deliveries from the parking lot that are in hand, so that the loader does not bring them twice.
#[derive(Clone, Debug, Default)]
pub struct Hand(Arc<Mutex<HashSet<DeliveryId>>>);

/// A place in a [`Hand`], given up when the delivery is settled.
#[derive(Debug)]
pub struct InHand {
    hand: Hand,
    delivery: DeliveryId,
}

/// The bytes of payload a relay may hold at once, and the deliveries they belong to.
#[derive(Clone, Debug)]
pub struct ByteBudget {
    inner: Arc<BudgetInner>,
}

#[derive(Debug)]
struct BudgetInner {
    limit: u64,
    used: AtomicU64,
    deliveries: AtomicUsize,
    freed: Notify,
}

/// Bytes taken from a [`ByteBudget`].
#[derive(Debug)]
struct Charge {
    budget: ByteBudget,
    bytes: u64,
    deliveries: usize,
}

/// What a delivery holds of a [`ByteBudget`], given back when it is settled: its own place, and with the others of its effect
/// the bytes. So one consumer that does not answer keeps what is its own, and not the flights of all.
#[derive(Debug, Default)]
pub struct Share {
    _own: Option<Charge>,
    _effect: Option<Arc<Charge>>,
}

/// What an effect takes up, in bytes: its payload, and half a kilobyte beside it.
fn size(effect: &Effect) -> u64 {
    effect.payload.len() as u64 + 512
}

impl Flight {
    /// A flight, or a page, that is on disk and of which so many deliveries are handed out.
    pub fn written(kind: FlightKind, seq: FlightSeq, deliveries: usize, place: Option<InAir>) -> Self {
        Self { kind, seq, outstanding: AtomicUsize::new(deliveries), place, written: AtomicBool::new(true) }
    }

    /// One that will be on disk. Until it is, it counts as outstanding itself.
    pub fn ahead(seq: FlightSeq, place: InAir) -> Self {
        let (outstanding, written) = (AtomicUsize::new(1), AtomicBool::new(false));
        Self { kind: FlightKind::Log, seq, outstanding, place: Some(place), written }
    }

    /// So many deliveries more are handed out.
    pub fn grows(&self, deliveries: usize) {
        self.outstanding.fetch_add(deliveries, Ordering::AcqRel);
    }

    /// So many were not handed out after all.
    pub fn shrinks(&self, deliveries: usize) {
        self.outstanding.fetch_sub(deliveries, Ordering::AcqRel);
    }

    pub fn is_written(&self) -> bool {
        self.written.load(Ordering::Acquire)
    }

    pub fn has_row(&self) {
        self.written.store(true, Ordering::Release);
    }
}

impl Delivery {
    pub fn id(&self) -> DeliveryId {
        DeliveryId { effect: self.effect.id, consumer: self.consumer }
    }

    pub fn effect_id(&self) -> EffectId {
        self.effect.id
    }

    pub fn flight_kind(&self) -> Option<FlightKind> {
        match &self.origin {
            Origin::Flight(flight) => Some(flight.kind),
            Origin::Parked { .. } => None,
        }
    }

    pub fn flight_seq(&self) -> Option<FlightSeq> {
        match &self.origin {
            Origin::Flight(flight) => Some(flight.seq),
            Origin::Parked { .. } => None,
        }
    }

    pub fn is_parked(&self) -> bool {
        matches!(self.origin, Origin::Parked { .. })
    }
}

impl Hand {
    /// Takes the delivery in hand, unless it is already.
    pub fn take(&self, delivery: DeliveryId) -> Option<InHand> {
        let new = self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(delivery);
        new.then(|| InHand { hand: self.clone(), delivery })
    }

    pub fn all(&self) -> Vec<DeliveryId> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect()
    }
}

impl Drop for InHand {
    fn drop(&mut self) {
        self.hand.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.delivery);
    }
}

impl ByteBudget {
    pub fn new(limit: u64) -> Self {
        Self {
            inner: Arc::new(BudgetInner {
                limit,
                used: AtomicU64::new(0),
                deliveries: AtomicUsize::new(0),
                freed: Notify::new(),
            }),
        }
    }

    /// What is left, as far as is known now.
    pub fn room(&self) -> u64 {
        self.inner.limit.saturating_sub(self.inner.used.load(Ordering::Acquire))
    }

    /// Whether so much is left that reading again is worth it: small change would be read in small pages.
    pub fn has_room(&self) -> bool {
        self.room() >= self.inner.limit.div_ceil(4)
    }

    /// The shares of an effect that was read already, one for each of its targets: one large effect may go over the limit,
    /// never two readings.
    pub fn shares(&self, effect: &Effect) -> Vec<Share> {
        if effect.targets.len() == 1 {
            return vec![Share { _own: Some(self.charge(size(effect), 1)), _effect: None }];
        }
        let bytes = Arc::new(self.charge(size(effect), 0));
        let share = |_| Share { _own: Some(self.charge(0, 1)), _effect: Some(Arc::clone(&bytes)) };
        effect.targets.iter().map(share).collect()
    }

    /// The share of a delivery whose place is bounded otherwise.
    pub fn bytes_of(&self, effect: &Effect) -> Share {
        Share { _own: Some(self.charge(size(effect), 0)), _effect: None }
    }

    fn charge(&self, bytes: u64, deliveries: usize) -> Charge {
        self.inner.used.fetch_add(bytes, Ordering::AcqRel);
        self.inner.deliveries.fetch_add(deliveries, Ordering::AcqRel);
        Charge { budget: self.clone(), bytes, deliveries }
    }

    /// Waits until something was given back.
    pub async fn freed(&self) {
        self.inner.freed.notified().await;
    }

    /// Deliveries that were read and are not settled.
    pub fn deliveries(&self) -> usize {
        self.inner.deliveries.load(Ordering::Acquire)
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.budget.inner.used.fetch_sub(self.bytes, Ordering::AcqRel);
        self.budget.inner.deliveries.fetch_sub(self.deliveries, Ordering::AcqRel);
        self.budget.inner.freed.notify_one();
    }
}
