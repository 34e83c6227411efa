//! What waits: deliveries on their way into a lane, lanes that fall behind and come back.

use std::time::Duration;

use tokio::time::Instant;

use super::Rooms;
use super::task::State;
use crate::model::key::Shard;
use crate::model::token::Waiting;
use crate::relay::delivery::Delivery;
use crate::relay::lane::Offer;
use crate::relay::settler::{Settlement, Verdict};
use crate::store::lags::LaneId;
use crate::store::parking::Room;
use crate::store::settle::{Durability, Parking};

/// Deliveries from the parking lot that one lane takes in hand at once.
const RETRIES_IN_HAND: usize = 256;
/// A lane with more than this waiting for longer than [`LAGGING_AFTER`] lags.
const QUEUE_KEPT: usize = 500;
const LAGGING_AFTER: Duration = Duration::from_secs(4);

impl State {
    pub(super) fn offer(&mut self, delivery: Delivery) {
        let (shard, epoch) = (delivery.lease.shard, delivery.lease.epoch);
        let shut = self.gate.is_shut_for(self.park_after, Instant::now());
        let Some(lane) = self.lane_of(shard, epoch) else {
            // Its shard was lost on the way here, and the delivery with it.
            return;
        };
        let crowded = lane.is_clogged()
            || (lane.fresh_len() >= QUEUE_KEPT
                && lane.oldest_fresh().is_some_and(|since| since.elapsed() > LAGGING_AFTER));
        let fresh = !delivery.is_parked();
        match lane.offer(delivery) {
            Offer::Queued if fresh && (shut || crowded) => self.fall_behind(shard),
            Offer::Queued => {}
            Offer::Lags(delivery) => self.leave_unread(delivery),
            Offer::Blocked(delivery) => {
                lane.blocked(lane.key(&delivery).map(ToString::to_string).as_deref());
                self.park(delivery, Parking::waiting(Waiting::Blocked, None, "an earlier delivery of its key waits"));
            }
        }
    }

    /// What waits too long leaves its flight: its lane lags, and other consumers do not wait for it.
    pub(super) fn sweep(&mut self) {
        self.share_rate();
        let shut = self.gate.is_shut_for(self.park_after, Instant::now());
        let late: Vec<Shard> = self
            .lanes
            .iter()
            .filter(|(_, (_, lane))| {
                lane.oldest_fresh().is_some_and(|since| {
                    let age = since.elapsed();
                    let crowded = age > LAGGING_AFTER && lane.fresh_len() > QUEUE_KEPT;
                    shut || crowded || age > self.park_after || lane.is_clogged()
                })
            })
            .map(|(shard, _)| *shard)
            .collect();
        for shard in late {
            self.fall_behind(shard);
        }
    }

    pub(super) fn fall_behind(&mut self, shard: Shard) {
        let unread = self.lanes.get_mut(&shard).map(|(_, lane)| lane.fall_behind()).unwrap_or_default();
        if !unread.is_empty() {
            tracing::debug!(consumer = %self.served.consumer.name, %shard, deliveries = unread.len(), "the lane lags");
        }
        unread.into_iter().for_each(|delivery| self.leave_unread(delivery));
    }

    pub(super) fn leave_unread(&mut self, delivery: Delivery) {
        self.settle(Settlement { delivery, verdict: Verdict::Lag, end: None, durability: Durability::Lazy });
    }

    pub(super) fn rooms(&mut self) -> Rooms {
        let mut rooms = Rooms::default();
        let shut = self.served.edge.shut().is_some();
        if self.draining || shut || self.gate.is_shut_for(Duration::from_millis(500), Instant::now()) {
            return rooms;
        }
        let consumer = self.consumer_id();
        for (shard, (lease, lane)) in &mut self.lanes {
            if !lease.is_alive() || lease.gives_way() {
                continue;
            }
            let rows = RETRIES_IN_HAND.saturating_sub(lane.retries_len());
            if rows > 0 {
                rooms.parked.push(Room { shard: *shard, consumer, rows: rows as u32 });
            }
            if lane.wants_page() {
                rooms.pages.push(LaneId { shard: *shard, consumer, epoch: lease.epoch });
            }
        }
        rooms
    }

    pub(super) fn drain(&mut self) {
        if self.draining {
            return;
        }
        self.draining = true;
        let shards: Vec<Shard> = self.lanes.keys().copied().collect();
        shards.into_iter().for_each(|shard| self.leave_queued(shard));
    }

    /// What waits in a lane is left: fresh deliveries in its lag range, those from the parking lot in their rows.
    pub(super) fn leave_queued(&mut self, shard: Shard) {
        self.fall_behind(shard);
        if let Some((_, lane)) = self.lanes.get_mut(&shard) {
            lane.drop_retries();
        }
    }

    /// The lanes begin anew: what waits is left and read again, and the new order holds from here on.
    pub(super) fn reorder(&mut self) {
        let ordering = self.ordering();
        for shard in self.lanes.keys().copied().collect::<Vec<_>>() {
            self.leave_queued(shard);
            if let Some((_, lane)) = self.lanes.get_mut(&shard) {
                lane.reorder(ordering);
            }
        }
    }
}
