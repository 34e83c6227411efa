//! What follows from an attempt that came back: for its lane, its gate, and the disk.

use std::sync::Arc;

use tokio::time::Instant;

use super::task::State;
use crate::edge::error::report;
use crate::model::outcome::{AckReading, End, Outcome};
use crate::model::token::{Fact, Waiting};
use crate::relay::attempt::{self, Ended};
use crate::relay::breaker::Report;
use crate::relay::delivery::Delivery;
use crate::relay::gate::Class;
use crate::relay::lane::WasParked;
use crate::relay::settle::{Next, Signal};
use crate::relay::settler::{Settlement, Verdict};
use crate::store::alarms;
use crate::store::settle::{Durability, Parking};

impl State {
    pub(super) fn came_back(&mut self, class: Class, ended: Ended) {
        self.gate.leave(class);
        let (delivery, outcome) = match ended {
            Ended::With { delivery, outcome } => (delivery, outcome),
            Ended::Before(delivery) => {
                self.withdraw(&delivery);
                // Its flight need not wait for it.
                let (verdict, durability) = (Verdict::Known, Durability::Lazy);
                return self.settle(Settlement { delivery, verdict, end: None, durability });
            }
            // Its shard is lost: dropped.
            Ended::NotStarted(delivery) => return self.withdraw(&delivery),
        };
        self.report(&outcome);
        let (shard, epoch) = (delivery.lease.shard, delivery.lease.epoch);
        let was_parked = WasParked::of(&delivery);
        let (served, effect) = (Arc::clone(&self.served), Arc::clone(&delivery.effect));
        let name = &served.consumer.name;
        let key = self.lane_of(shard, epoch).and_then(|lane| lane.key(&delivery).map(ToString::to_string));
        let (decision, settlement) = attempt::conclude(delivery, &outcome, &served, &self.shared.retry);
        self.tally.count(name, decision.attempt);
        if outcome.ack_is_malformed() {
            metrics::counter!("fencepost_malformed_acks_total", "consumer" => name.clone()).increment(1);
        }
        let mut behind = Vec::new();
        match &decision.next {
            Next::Fact { fact, .. } => {
                if *fact == Fact::Conflict {
                    self.raise(alarms::Alarm::Conflict, format!("{name}/{}", effect.key), "same key, other payload");
                }
                if let Some(lane) = self.lane_of(shard, epoch) {
                    lane.ended(key.as_deref(), was_parked);
                }
            }
            Next::Park(parking) => {
                if let Some(lane) = self.lane_of(shard, epoch) {
                    tracing::info!(consumer = %name, key = %effect.key, attempt = %decision.attempt, next = %parking.state, reason = %parking.reason, "parked");
                    behind = lane.parked(key.as_deref(), was_parked, parking.state);
                } else {
                    tracing::info!(consumer = %name, key = %effect.key, attempt = %decision.attempt, reason = %parking.reason, "late: another relay holds its shard, and what becomes of it");
                }
            }
        }
        self.settle(settlement);
        self.park_behind(behind);
        if let Some(signal) = decision.signal {
            self.heed(signal);
        }
    }

    /// What the attempt says about the consumer as a whole.
    pub(super) fn report(&mut self, outcome: &Outcome) {
        let was_broken = self.gate.is_broken();
        let report = match &outcome.end {
            End::NotDelivered | End::Ambiguous if self.served.edge.shuts_by_itself() => {
                return self.gate.withdrawn(Instant::now());
            }
            End::NotDelivered | End::Ambiguous => Report::Failing,
            End::Answered { status: 500.., ack: AckReading::Silent | AckReading::Malformed { .. } } => Report::Failing,
            End::Answered { .. } | End::Confirmed | End::Unroutable | End::Refused => Report::Healthy,
            // Not tried: the edge opens again by itself.
            End::Shut => return self.gate.withdrawn(Instant::now()),
        };
        self.gate.report(report, Instant::now());
        let name = &self.served.consumer.name;
        match (was_broken, self.gate.is_broken()) {
            (false, true) => {
                tracing::warn!(consumer = %name, "the consumer does not answer: its breaker opens");
                metrics::counter!("fencepost_breaker_opened_total", "consumer" => name.clone()).increment(1);
            }
            (true, false) => tracing::info!(consumer = %name, "the consumer answers again: its breaker closes"),
            _ => {}
        }
    }

    pub(super) fn heed(&mut self, signal: Signal) {
        match signal {
            Signal::Gone => self.gate.pause(),
            Signal::NotBefore(wait) => self.gate.not_before(Instant::now() + wait),
        }
        self.words.pass_on(self.shared.pool.clone(), self.consumer_id(), signal);
    }

    pub(super) fn raise(&self, alarm: alarms::Alarm, object: String, detail: &'static str) {
        let pool = self.shared.pool.clone();
        tokio::spawn(async move {
            if let Ok(client) = pool.get().await
                && let Err(error) = alarms::raise(&client, alarm, &object, detail).await
            {
                tracing::error!(error = %report(&error), "an alarm could not be written");
            }
        });
    }

    /// It was not sent after all: its key is free, and it says nothing of the consumer.
    fn withdraw(&mut self, delivery: &Delivery) {
        self.free(delivery);
        self.gate.withdrawn(Instant::now());
    }

    pub(super) fn free(&mut self, delivery: &Delivery) {
        if let Some(lane) = self.lane_of(delivery.lease.shard, delivery.lease.epoch) {
            let key = lane.key(delivery).map(ToString::to_string);
            lane.ended(key.as_deref(), WasParked::of(delivery));
        }
    }

    /// Parks a delivery that was on its way, and those behind it.
    pub(super) fn park_in_order(&mut self, delivery: Delivery, parking: Parking) {
        let mut behind = Vec::new();
        if let Some(lane) = self.lane_of(delivery.lease.shard, delivery.lease.epoch) {
            let key = lane.key(&delivery).map(ToString::to_string);
            behind = lane.parked(key.as_deref(), WasParked::of(&delivery), parking.state);
        }
        self.park(delivery, parking);
        self.park_behind(behind);
    }

    pub(super) fn park_behind(&mut self, behind: Vec<Delivery>) {
        for delivery in behind {
            self.park(delivery, Parking::waiting(Waiting::Blocked, None, "an earlier delivery of its key waits"));
        }
    }

    pub(super) fn park(&mut self, delivery: Delivery, parking: Parking) {
        let row = attempt::park_row(&delivery, self.ordering(), parking);
        self.settle(Settlement { delivery, verdict: Verdict::Park(row), end: None, durability: Durability::Lazy });
    }

    pub(super) fn settle(&self, settlement: Settlement) {
        self.shared.settler.settle(settlement);
    }
}
