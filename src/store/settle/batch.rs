//! What a batch is made of: facts, claims, and the ends of attempts.

use std::time::Duration;

use crate::model::key::{ConsumerId, EffectId, FlightSeq, Shard, ShardEpoch};
use crate::model::outcome::Phase;
use crate::model::token::{AttemptToken, Fact, Waiting};
use crate::store::lags::{LaneId, Range};

/// One (effect, consumer) pair.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct DeliveryId {
    pub effect: EffectId,
    pub consumer: ConsumerId,
}

/// A terminal fact about a delivery.
#[derive(Clone, Debug)]
pub struct FactRow {
    pub delivery: DeliveryId,
    pub fact: Fact,
    pub attempt: u32,
    pub status: Option<u16>,
    /// An earlier attempt is unresolved.
    pub doubt: bool,
    /// The consumer's words, where they were more than the bare token.
    pub ack_raw: Option<String>,
    pub note: Option<String>,
}

/// The end of an attempt.
#[derive(Clone, Debug)]
pub struct EndRow {
    pub delivery: DeliveryId,
    pub attempt: u32,
    pub token: AttemptToken,
    pub status: Option<u16>,
    pub phase: Phase,
    pub bytes_left: bool,
    pub took: Duration,
    pub ack_raw: Option<String>,
    pub error: Option<String>,
}

/// The start of an attempt that needs a marker of its own.
#[derive(Clone, Debug)]
pub struct StartRow {
    pub delivery: DeliveryId,
    pub shard: Shard,
    pub epoch: ShardEpoch,
    pub attempt: u32,
}

/// What happens to a moment that is kept with a parked row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Moment {
    Keep,
    /// Now, unless it is set already.
    Set,
    Clear,
}

/// How a delivery goes to the parking lot.
#[derive(Clone, Debug, PartialEq)]
pub struct Parking {
    pub state: Waiting,
    /// From the database's now; `None` where no moment will make it due.
    pub due_in: Option<Duration>,
    pub reason: String,
    pub refusals: u32,
    pub first_failed: Moment,
    pub first_doubt: Moment,
    pub in_progress: Moment,
    pub retain: Option<Duration>,
}

impl Parking {
    /// Of a delivery that waits without having been attempted now.
    pub fn waiting(state: Waiting, due_in: Option<Duration>, reason: &str) -> Self {
        Self {
            state,
            due_in,
            reason: reason.into(),
            refusals: 0,
            first_failed: Moment::Keep,
            first_doubt: Moment::Keep,
            in_progress: Moment::Keep,
            retain: None,
        }
    }
}

/// A delivery that waits in the parking lot.
#[derive(Clone, Debug)]
pub struct ParkRow {
    pub delivery: DeliveryId,
    pub shard: Shard,
    pub epoch: ShardEpoch,
    /// Only where the consumer orders by key.
    pub ordering_key: Option<String>,
    pub attempts: u32,
    /// Those of them that may have left this machine.
    pub sent: u32,
    pub parking: Parking,
}

/// A flight whose last delivery is settled by the same batch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CloseRow {
    pub shard: Shard,
    pub seq: FlightSeq,
    pub epoch: ShardEpoch,
    /// Its deliveries that this batch parks: where one is refused, the flight stays open.
    pub parks: Vec<DeliveryId>,
}

/// Flights that a lane leaves unread for now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LagRow {
    pub lane: LaneId,
    pub range: Range,
}

/// A page of a lag range that is settled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AdvanceRow {
    pub lane: LaneId,
    pub up_to: FlightSeq,
}

#[derive(Default, Debug)]
pub struct Batch {
    pub facts: Vec<FactRow>,
    /// Deliveries with a fact in this batch that may have a parked row.
    pub unpark: Vec<DeliveryId>,
    pub ends: Vec<EndRow>,
    pub parks: Vec<ParkRow>,
    pub starts: Vec<StartRow>,
    pub closes: Vec<CloseRow>,
    pub lags: Vec<LagRow>,
    pub advances: Vec<AdvanceRow>,
    pub durability: Durability,
}

/// Whether the answer waits for the disk.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Durability {
    /// A crash of the database may forget the batch: the deliveries are sent again and absorbed as duplicates.
    #[default]
    Lazy,
    /// It waits for this server's disk, and for no standby.
    Local,
    Flushed,
}

impl Durability {
    /// PostgreSQL's `synchronous_commit`.
    pub(super) fn level(self) -> &'static str {
        match self {
            Self::Lazy => "off",
            Self::Local => "local",
            Self::Flushed => "on",
        }
    }
}

/// What became of a batch besides being written.
#[derive(Default, Debug)]
pub struct Written {
    pub refused: Refused,
    /// Deliveries whose attempt was not started because a fact says already how they ended.
    pub ended: Vec<DeliveryId>,
    pub early: Early,
}

/// Whether a consumer's word has been waiting for the end of an attempt in a batch (`early`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Early {
    #[default]
    None,
    Some,
}

/// The claims of a batch that were refused, because the shard has another owner.
#[derive(Default, Debug)]
pub struct Refused {
    pub parks: Vec<DeliveryId>,
    pub starts: Vec<DeliveryId>,
    /// Shards whose lag ranges were refused.
    pub shards: Vec<Shard>,
}

impl Batch {
    pub fn is_empty(&self) -> bool {
        self.facts.is_empty()
            && self.unpark.is_empty()
            && self.ends.is_empty()
            && self.parks.is_empty()
            && self.starts.is_empty()
            && self.closes.is_empty()
            && self.lags.is_empty()
            && self.advances.is_empty()
    }

    /// Only facts and closed flights: the healthy path.
    pub(super) fn is_plain(&self) -> bool {
        self.unpark.is_empty()
            && self.ends.is_empty()
            && self.parks.is_empty()
            && self.starts.is_empty()
            && self.lags.is_empty()
            && self.advances.is_empty()
    }
}

impl CloseRow {
    /// Whether everything the flight depends on was accepted.
    pub(super) fn holds(&self, refused: &Refused) -> bool {
        !refused.shards.contains(&self.shard) && self.parks.iter().all(|park| !refused.parks.contains(park))
    }
}
