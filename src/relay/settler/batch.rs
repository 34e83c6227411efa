//! From outcomes to rows: what a group of them writes, which flights it closes, and which ranges of flights it leaves unread.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{Entry, Verdict};
use crate::model::key::{FlightSeq, Shard, ShardEpoch};
use crate::mutant::{self, Mutant};
use crate::relay::delivery::{Delivery, Flight, FlightKind, Origin};
use crate::store::lags::{LaneId, Range};
use crate::store::settle::{AdvanceRow, Batch, CloseRow, DeliveryId, Durability, LagRow};

/// What a group comes to, with the flights it lands and the ranges it leaves unread.
pub(super) fn batch_of(group: &[Entry]) -> Batch {
    let mut batch = Batch::default();
    let mut lags: HashMap<LaneId, Range> = HashMap::new();
    let mut landing: HashMap<*const Flight, Landing<'_>> = HashMap::new();
    for entry in group {
        match entry {
            Entry::Flush(_) => {}
            Entry::End(row) => batch.ends.push(row.clone()),
            Entry::Close(row) => batch.closes.push(row.clone()),
            Entry::Advance(row) => batch.advances.push(*row),
            Entry::Written { flight, shard, epoch } => {
                landing
                    .entry(Arc::as_ptr(flight))
                    .or_insert_with(|| Landing::of_log(flight, *shard, *epoch))
                    .settled += 1;
            }
            Entry::Start(row, _) => {
                batch.starts.push(row.clone());
                batch.durability = Durability::Flushed;
            }
            Entry::Settle(settlement) => {
                let delivery = &settlement.delivery;
                match &settlement.verdict {
                    Verdict::Fact(row) => {
                        batch.facts.push(row.clone());
                        if delivery.is_parked() || !delivery.lease.is_alive() {
                            batch.unpark.push(delivery.id());
                        }
                    }
                    Verdict::Park(row) => batch.parks.push(row.clone()),
                    // A row that is left in the parking lot is mended, unless it is an operator's replay.
                    Verdict::Known | Verdict::Lag => {}
                }
                batch.ends.extend(settlement.end.clone());
                if settlement.durability == Durability::Flushed {
                    batch.durability = Durability::Flushed;
                }
                if let Origin::Flight(flight) = &delivery.origin {
                    let landed = landing.entry(Arc::as_ptr(flight)).or_insert_with(|| Landing::of(flight, delivery));
                    landed.settled += 1;
                    match settlement.verdict {
                        Verdict::Park(_) => landed.parks.push(delivery.id()),
                        Verdict::Lag if mutant::is(Mutant::LagForgotten) => {}
                        Verdict::Lag => extend(&mut lags, delivery, flight.seq),
                        Verdict::Fact(_) | Verdict::Known => {}
                    }
                }
            }
        }
    }
    batch.lags = lags.into_iter().map(|(lane, range)| LagRow { lane, range }).collect();
    for landed in landing.into_values().filter(Landing::is_complete) {
        match landed.flight.kind {
            FlightKind::Log => batch.closes.push(landed.close()),
            FlightKind::Page => batch.advances.extend(landed.advance()),
        }
    }
    // Ranges move on: what was written of them cannot be written again later.
    if !batch.lags.is_empty() || !batch.advances.is_empty() {
        batch.durability = Durability::Flushed;
    }
    batch
}

fn extend(lags: &mut HashMap<LaneId, Range>, delivery: &Delivery, seq: FlightSeq) {
    let lane = lane_of(delivery);
    let range = lags.entry(lane).or_insert(Range { from: seq, to: seq });
    range.from = range.from.min(seq);
    range.to = range.to.max(seq);
}

fn lane_of(delivery: &Delivery) -> LaneId {
    LaneId { shard: delivery.lease.shard, consumer: delivery.consumer, epoch: delivery.lease.epoch }
}

/// How much of a flight a batch settles.
struct Landing<'a> {
    flight: &'a Flight,
    shard: Shard,
    epoch: ShardEpoch,
    /// Of one of its deliveries: where it is a page, they are all of one lane.
    lane: Option<LaneId>,
    settled: usize,
    parks: Vec<DeliveryId>,
}

impl<'a> Landing<'a> {
    fn of(flight: &'a Flight, delivery: &Delivery) -> Self {
        let lane = lane_of(delivery);
        Self { lane: Some(lane), ..Self::of_log(flight, lane.shard, lane.epoch) }
    }

    fn of_log(flight: &'a Flight, shard: Shard, epoch: ShardEpoch) -> Self {
        Self { flight, shard, epoch, lane: None, settled: 0, parks: Vec::new() }
    }

    /// Whether nothing else of the flight is outstanding.
    fn is_complete(&self) -> bool {
        self.flight.outstanding.load(Ordering::Acquire) == self.settled || mutant::is(Mutant::FlightClosedEarly)
    }

    fn close(self) -> CloseRow {
        CloseRow { shard: self.shard, seq: self.flight.seq, epoch: self.epoch, parks: self.parks }
    }

    /// A page whose parked rows are refused belongs to a lost shard, and so is its advance.
    fn advance(self) -> Option<AdvanceRow> {
        Some(AdvanceRow { lane: self.lane?, up_to: self.flight.seq })
    }
}
