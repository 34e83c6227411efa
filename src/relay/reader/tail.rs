//! What of a shard was read ahead and handed out, and has no flight on disk yet.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::model::key::{EffectId, FlightSeq};
use crate::relay::delivery::Flight;
use crate::relay::launch;
use crate::relay::lease::{InAir, ShardLease};
use crate::store::ahead::Unwritten;
use crate::store::effects::ReadEffect;
use crate::store::log::Held;

/// The flight to come.
#[derive(Debug)]
pub struct Tail {
    pub flight: Arc<Flight>,
    ids: BTreeSet<EffectId>,
    deliveries: usize,
}

impl Tail {
    pub fn new(lease: &Arc<ShardLease>, seq: FlightSeq) -> Self {
        lease.reads_ahead();
        let flight = Arc::new(Flight::ahead(seq, InAir::of(lease, seq)));
        Self { flight, ids: BTreeSet::new(), deliveries: 0 }
    }

    /// What is handed out next belongs to the same flight.
    pub fn takes(&mut self, effects: &[ReadEffect]) {
        let deliveries = launch::deliveries(effects);
        self.ids.extend(effects.iter().map(|read| read.effect.id));
        self.deliveries += deliveries;
        self.flight.grows(deliveries);
    }

    /// The rest, where these were not handed out after all.
    pub fn without(mut self, effects: &[ReadEffect]) -> Option<Self> {
        let deliveries = launch::deliveries(effects);
        effects.iter().for_each(|read| _ = self.ids.remove(&read.effect.id));
        self.deliveries -= deliveries;
        self.flight.shrinks(deliveries);
        (!self.ids.is_empty()).then_some(self)
    }

    pub fn holds(&self, id: EffectId) -> bool {
        self.ids.contains(&id)
    }

    pub fn last(&self) -> Option<EffectId> {
        self.ids.last().copied()
    }

    /// What its flight's row will say. `None` where nothing was handed out.
    pub fn unwritten(&self, held: Held) -> Option<Unwritten> {
        let (first, last) = (*self.ids.first()?, *self.ids.last()?);
        Some(Unwritten { held, first, last, deliveries: self.deliveries })
    }
}
