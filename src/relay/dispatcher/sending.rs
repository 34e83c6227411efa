//! Which delivery goes next, and whether it may.

use std::sync::Arc;

use tokio::time::Instant;

use super::task::State;
use crate::model::key::Shard;
use crate::model::token::{Fact, Waiting};
use crate::relay::attempt;
use crate::relay::delivery::Delivery;
use crate::relay::gate::{Class, Competing, Shut};
use crate::relay::settle::outlived_retain;
use crate::relay::settler::{Settlement, Verdict};
use crate::store::settle::{Durability, Parking};

impl State {
    /// Starts what may start. Returns when to look again, where only time will open the gate.
    pub(super) fn start_attempts(&mut self) -> Option<Instant> {
        let mut wake = None;
        if self.served.edge.shut().is_some() {
            return None;
        }
        // The probe of an open breaker is not left to one that may fail by itself: it would hold up all others for ever.
        let order = match self.gate.is_broken() {
            true => [Class::Fresh, Class::Retry],
            false => [Class::Retry, Class::Fresh],
        };
        for class in order {
            while let Some(shard) = self.lane_with(class) {
                let other = if class == Class::Retry { Class::Fresh } else { Class::Retry };
                let competing = if self.lane_with(other).is_some() { Competing::Yes } else { Competing::No };
                match self.gate.enter(class, competing, Instant::now()) {
                    Ok(()) => self.start_one(shard, class),
                    Err(Shut::NotBefore(moment) | Shut::Rate(moment) | Shut::Broken(moment)) => {
                        wake = Some(moment);
                        break;
                    }
                    Err(Shut::Paused | Shut::Full) => break,
                }
            }
        }
        wake
    }

    /// The lane whose oldest delivery of this class came first; behind an open breaker the one with the retry least tried.
    pub(super) fn lane_with(&self, class: Class) -> Option<Shard> {
        if class == Class::Retry && self.gate.is_broken() {
            let tried = self.lanes.iter().filter_map(|(shard, (_, lane))| Some((lane.least_tried()?, *shard)));
            return tried.min().map(|(_, shard)| shard);
        }
        self.lanes
            .iter()
            .filter_map(|(shard, (_, lane))| {
                let since = match class {
                    Class::Fresh => lane.oldest_fresh(),
                    Class::Retry => lane.oldest_retry(),
                };
                since.map(|since| (since, *shard))
            })
            .min()
            .map(|(_, shard)| shard)
    }

    pub(super) fn start_one(&mut self, shard: Shard, class: Class) {
        let broken = self.gate.is_broken();
        let taken = self.lanes.get_mut(&shard).and_then(|(_, lane)| match class {
            Class::Fresh => lane.next_fresh(),
            Class::Retry if broken => lane.take_least_tried(),
            Class::Retry => lane.next_retry(),
        });
        let Some(delivery) = taken else {
            self.gate.leave(class);
            self.gate.withdrawn(Instant::now());
            return;
        };
        if let Some(delivery) = self.ended_before_its_attempt(delivery) {
            let (served, shared) = (Arc::clone(&self.served), Arc::clone(&self.shared));
            self.attempts.spawn(async move { (class, attempt::attempt(delivery, served, shared).await) });
        } else {
            self.gate.leave(class);
            self.gate.withdrawn(Instant::now());
        }
    }

    /// Deliveries that must not be sent any more: expired, or retried beyond the consumer's memory.
    pub(super) fn ended_before_its_attempt(&mut self, delivery: Delivery) -> Option<Delivery> {
        let trouble = &delivery.trouble;
        let expired = delivery.expired || delivery.effect.expires_at.is_some_and(|at| at <= self.shared.clock.now());
        if expired && trouble.in_doubt_for.is_none() {
            let row = attempt::fact_row(&delivery, Fact::Expired, false);
            self.free(&delivery);
            self.settle(Settlement { delivery, verdict: Verdict::Fact(row), end: None, durability: Durability::Lazy });
            return None;
        }
        let why = match (expired, outlived_retain(trouble, self.served.consumer.dedup_retain)) {
            (true, _) => "it expired after an attempt whose effect is unknown",
            (false, true) => "the consumer may have forgotten the key since the first attempt whose effect is unknown",
            (false, false) => return Some(delivery),
        };
        self.park_in_order(delivery, Parking::waiting(Waiting::InDoubt, None, why));
        None
    }
}
