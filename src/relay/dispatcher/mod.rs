//! One consumer's work: its lanes, its gate, its attempts in flight. One task per consumer, so that no consumer waits
//! for another. Here is the task's handle and what it can be told; its parts share the task's state and no other module
//! sees it.

mod lanes;
mod outcome;
mod sending;
mod task;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use self::task::State;
use super::attempt::{Served, Shared};
use super::delivery::Delivery;
use super::lease::ShardLease;
use super::options::BreakerOptions;
use crate::model::key::{FlightSeq, Shard, ShardEpoch};
use crate::store::lags::{LaneId, Range};
use crate::store::parking::Room;

/// What a dispatcher is told.
pub enum Command {
    /// The shard is ours: its lane begins, with the keys that wait in the parking lot.
    Acquired {
        lease: Arc<ShardLease>,
        blocked: Vec<(String, u64)>,
        lag: Option<Range>,
    },
    Lost {
        shard: Shard,
        epoch: ShardEpoch,
    },
    /// The shard is to be handed over: what waits is parked, what is out is waited for.
    Yield {
        shard: Shard,
    },
    Offer(Vec<Delivery>),
    /// The state all relays share, by a reading that began at `asked`.
    State {
        asked: Instant,
        paused: bool,
        shut_for: Option<Duration>,
    },
    /// The declaration changed.
    Serve(Arc<Served>),
    /// How much can be taken from the parking lot, and which lanes want a page of what they left unread.
    Rooms(oneshot::Sender<Rooms>),
    /// A page of the lane's lag range, up to this flight.
    Page {
        shard: Shard,
        epoch: ShardEpoch,
        up_to: FlightSeq,
        deliveries: Vec<Delivery>,
    },
    /// What to compare a count of blocked keys with.
    Changes(oneshot::Sender<HashMap<Shard, u64>>),
    Recount {
        shard: Shard,
        asked: u64,
        counted: HashMap<String, u64>,
    },
    /// Start nothing more, park what waits, and end when what is out has come back.
    Drain,
}

/// What a consumer's lanes can take.
#[derive(Default)]
pub struct Rooms {
    pub parked: Vec<Room>,
    pub pages: Vec<LaneId>,
}

/// The handle of a consumer's task.
#[derive(Clone)]
pub struct Dispatcher(mpsc::UnboundedSender<Command>);

impl Dispatcher {
    pub fn start(
        served: Arc<Served>,
        shared: Arc<Shared>,
        park_after: Duration,
        breaker: BreakerOptions,
    ) -> (Self, tokio::task::JoinHandle<()>) {
        let (sender, commands) = mpsc::unbounded_channel();
        let state = State::new(served, shared, park_after, breaker);
        (Self(sender), tokio::spawn(state.run(commands)))
    }

    pub fn tell(&self, command: Command) {
        // A dispatcher that has ended drained everything; what is told later belongs to nobody.
        let _ = self.0.send(command);
    }

    pub async fn rooms(&self) -> Rooms {
        let (reply, rooms) = oneshot::channel();
        self.tell(Command::Rooms(reply));
        rooms.await.unwrap_or_default()
    }

    pub async fn changes(&self) -> HashMap<Shard, u64> {
        let (reply, changes) = oneshot::channel();
        self.tell(Command::Changes(reply));
        changes.await.unwrap_or_default()
    }
}
