//! One consumer's work: its lanes, its gate, its attempts in flight. One task per consumer, so that no consumer waits
//! for another.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};

use super::attempt::{self, Ended, Served, Shared};
use super::breaker::Report;
use super::delivery::Delivery;
use super::gate::{Class, Competing, Gate, Shut};
use super::lane::{Lane, Offer, WasParked};
use super::lease::ShardLease;
use super::options::BreakerOptions;
use super::settle::{Next, Parking, Signal, outlived_retain};
use super::settler::{Settlement, Verdict};
use super::tally::Tally;
use super::way::Way;
use super::words::Words;
use crate::edge::error::report;
use crate::model::consumer::Ordering;
use crate::model::key::{ConsumerId, FlightSeq, Shard, ShardEpoch};
use crate::model::outcome::{AckReading, End, Outcome};
use crate::model::token::{Fact, Waiting};
use crate::store::alarms;
use crate::store::lags::{LaneId, Range};
use crate::store::parking::Room;
use crate::store::settle::{Durability, Moment};

/// Deliveries from the parking lot that one lane takes in hand at once.
const RETRIES_IN_HAND: usize = 256;
/// A lane with more than this waiting for longer than [`LAGGING_AFTER`] lags.
const QUEUE_KEPT: usize = 500;
const LAGGING_AFTER: Duration = Duration::from_secs(4);
const SWEEP_EVERY: Duration = Duration::from_millis(250);

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
        shared: Shared,
        park_after: Duration,
        breaker: BreakerOptions,
    ) -> (Self, tokio::task::JoinHandle<()>) {
        let (sender, commands) = mpsc::unbounded_channel();
        let gate = Gate::new(served.consumer.concurrency, served.consumer.rate, breaker, Instant::now());
        let state = State {
            served,
            shared,
            park_after,
            gate,
            words: Words::default(),
            way: Way::default(),
            tally: Tally::default(),
            lanes: HashMap::new(),
            attempts: JoinSet::new(),
            draining: false,
        };
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

struct State {
    served: Arc<Served>,
    shared: Shared,
    park_after: Duration,
    gate: Gate,
    words: Words,
    way: Way,
    tally: Tally,
    lanes: HashMap<Shard, (Arc<ShardLease>, Lane)>,
    attempts: JoinSet<(Class, Ended)>,
    draining: bool,
}

impl State {
    async fn run(mut self, mut commands: mpsc::UnboundedReceiver<Command>) {
        let mut sweep = tokio::time::interval(SWEEP_EVERY);
        sweep.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            self.note_way();
            let wake = if self.draining { None } else { self.start_attempts() };
            if self.draining && self.attempts.is_empty() {
                self.shared.health.edge(&self.served.consumer.name, None);
                return;
            }
            let served = Arc::clone(&self.served);
            let pause = wake.unwrap_or_else(|| Instant::now() + Duration::from_secs(3_600));
            tokio::select! {
                biased;
                Some(done) = self.attempts.join_next(), if !self.attempts.is_empty() => match done {
                    Ok((class, ended)) => self.came_back(class, ended),
                    // The flight stays open: the reconciler parks the delivery.
                    Err(error) => tracing::error!(error = %report(&error), "an attempt's task failed"),
                },
                command = commands.recv() => match command {
                    Some(command) => self.obey(command),
                    None => self.drain(),
                },
                _ = sweep.tick() => self.sweep(),
                () = served.edge.turned() => {}
                () = tokio::time::sleep_until(pause), if wake.is_some() => {}
            }
        }
    }

    fn consumer_id(&self) -> ConsumerId {
        self.served.consumer.id
    }

    fn ordering(&self) -> Ordering {
        self.served.consumer.contract.ordering
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Acquired { lease, blocked, lag } => {
                let lane = Lane::new(self.ordering(), blocked).with_lag(lag);
                self.lanes.insert(lease.shard, (lease, lane));
            }
            Command::Lost { shard, epoch } => {
                // What waited was never sent: the flight or the parked row is the new owner's now.
                if self.lanes.get(&shard).is_some_and(|(lease, _)| lease.epoch == epoch) {
                    self.lanes.remove(&shard);
                }
            }
            Command::Yield { shard } => {
                self.leave_queued(shard);
            }
            Command::Offer(deliveries) => deliveries.into_iter().for_each(|delivery| self.offer(delivery)),
            Command::State { asked, paused, shut_for } => {
                let floor = shut_for.map(|wait| Instant::now() + wait);
                let current = self.words.known_to(asked);
                match paused {
                    true => self.gate.pause(),
                    false if current => self.gate.resume(),
                    false => {}
                }
                match floor {
                    floor if current => self.gate.set_not_before(floor),
                    Some(floor) => self.gate.not_before(floor),
                    None => {}
                }
            }
            Command::Serve(served) => {
                let before = self.ordering();
                self.served = served;
                self.share_rate();
                if self.ordering() != before {
                    self.reorder();
                }
            }
            Command::Rooms(reply) => {
                let _ = reply.send(self.rooms());
            }
            Command::Page { shard, epoch, up_to, deliveries } => {
                if let Some(lane) = self.lane_of(shard, epoch) {
                    lane.page_read(up_to);
                    deliveries.into_iter().for_each(|delivery| self.offer(delivery));
                }
            }
            Command::Changes(reply) => {
                let _ = reply.send(self.lanes.iter().map(|(shard, (_, lane))| (*shard, lane.changes())).collect());
            }
            Command::Recount { shard, asked, counted } => {
                if let Some((_, lane)) = self.lanes.get_mut(&shard) {
                    lane.recount(asked, &counted);
                }
            }
            Command::Drain => self.drain(),
        }
    }

    /// The lane a delivery belongs to; `None` where its shard was lost since, be it ours again.
    fn lane_of(&mut self, shard: Shard, epoch: ShardEpoch) -> Option<&mut Lane> {
        self.lanes.get_mut(&shard).filter(|(lease, _)| lease.epoch == epoch).map(|(_, lane)| lane)
    }

    fn offer(&mut self, delivery: Delivery) {
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
                self.park(delivery, waiting(Waiting::Blocked, None, "an earlier delivery of its key waits"));
            }
        }
    }

    /// Starts what may start. Returns when to look again, where only time will open the gate.
    fn start_attempts(&mut self) -> Option<Instant> {
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
    fn lane_with(&self, class: Class) -> Option<Shard> {
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

    fn start_one(&mut self, shard: Shard, class: Class) {
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
            let (served, shared) = (Arc::clone(&self.served), self.shared.clone());
            self.attempts.spawn(async move { (class, Box::pin(attempt::attempt(delivery, served, shared)).await) });
        } else {
            self.gate.leave(class);
            self.gate.withdrawn(Instant::now());
        }
    }

    /// Deliveries that must not be sent any more: expired, or retried beyond the consumer's memory.
    fn ended_before_its_attempt(&mut self, delivery: Delivery) -> Option<Delivery> {
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
        self.park_in_order(delivery, waiting(Waiting::InDoubt, None, why));
        None
    }

    fn came_back(&mut self, class: Class, ended: Ended) {
        self.gate.leave(class);
        let (delivery, outcome) = match ended {
            Ended::With { delivery, outcome } => (delivery, outcome),
            Ended::NotStarted(delivery) => {
                // Its shard is lost, or it has ended elsewhere: dropped, and its key is free.
                self.free(&delivery);
                self.gate.withdrawn(Instant::now());
                return;
            }
        };
        self.report(&outcome);
        let (shard, epoch) = (delivery.lease.shard, delivery.lease.epoch);
        let was_parked = WasParked::of(&delivery);
        let name = self.served.consumer.name.clone();
        let key = self.lane_of(shard, epoch).and_then(|lane| lane.key(&delivery).map(ToString::to_string));
        let effect_key = delivery.effect.key.to_string();
        let (decision, settlement) = attempt::conclude(delivery, &outcome, &self.served, &self.shared.retry);
        self.tally.count(&name, decision.attempt);
        if outcome.ack_is_malformed() {
            metrics::counter!("fencepost_malformed_acks_total", "consumer" => name.clone()).increment(1);
        }
        let mut behind = Vec::new();
        match &decision.next {
            Next::Fact { fact, .. } => {
                if *fact == Fact::Conflict {
                    self.raise(alarms::Alarm::Conflict, format!("{name}/{effect_key}"), "same key, other payload");
                }
                if let Some(lane) = self.lane_of(shard, epoch) {
                    lane.ended(key.as_deref(), was_parked);
                }
            }
            Next::Park(parking) => {
                tracing::info!(consumer = %name, key = %effect_key, attempt = %decision.attempt, next = %parking.state, reason = %parking.reason, "parked");
                if let Some(lane) = self.lane_of(shard, epoch) {
                    behind = lane.parked(key.as_deref(), was_parked, parking.state);
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
    fn report(&mut self, outcome: &Outcome) {
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

    fn heed(&mut self, signal: Signal) {
        match signal {
            Signal::Gone => self.gate.pause(),
            Signal::NotBefore(wait) => self.gate.not_before(Instant::now() + wait),
        }
        self.words.pass_on(self.shared.pool.clone(), self.consumer_id(), signal);
    }

    fn raise(&self, alarm: alarms::Alarm, object: String, detail: &'static str) {
        let pool = self.shared.pool.clone();
        tokio::spawn(async move {
            if let Ok(client) = pool.get().await
                && let Err(error) = alarms::raise(&client, alarm, &object, detail).await
            {
                tracing::error!(error = %report(&error), "an alarm could not be written");
            }
        });
    }

    /// The rate is a promise of the consumer over all relays: each takes its share.
    fn share_rate(&mut self) {
        let relays = u32::try_from(self.shared.relays.load(Relaxed)).unwrap_or(u32::MAX);
        let consumer = &self.served.consumer;
        let share = |rate: NonZeroU32| NonZeroU32::new(rate.get() / relays.max(1)).unwrap_or(NonZeroU32::MIN);
        self.gate.set_limits(consumer.concurrency, consumer.rate.map(share), Instant::now());
    }

    fn note_way(&mut self) {
        let Shared { health, pool, .. } = &self.shared;
        self.way.note(&self.served.consumer.name, self.served.edge.shut(), health, pool);
    }

    /// What waits too long leaves its flight: its lane lags, and other consumers do not wait for it.
    fn sweep(&mut self) {
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

    fn fall_behind(&mut self, shard: Shard) {
        let unread = self.lanes.get_mut(&shard).map(|(_, lane)| lane.fall_behind()).unwrap_or_default();
        if !unread.is_empty() {
            tracing::debug!(consumer = %self.served.consumer.name, %shard, deliveries = unread.len(), "the lane lags");
        }
        unread.into_iter().for_each(|delivery| self.leave_unread(delivery));
    }

    fn leave_unread(&mut self, delivery: Delivery) {
        self.settle(Settlement { delivery, verdict: Verdict::Lag, end: None, durability: Durability::Lazy });
    }

    fn rooms(&mut self) -> Rooms {
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

    fn drain(&mut self) {
        if self.draining {
            return;
        }
        self.draining = true;
        let shards: Vec<Shard> = self.lanes.keys().copied().collect();
        shards.into_iter().for_each(|shard| self.leave_queued(shard));
    }

    /// What waits in a lane is left: fresh deliveries in its lag range, those from the parking lot in their rows.
    fn leave_queued(&mut self, shard: Shard) {
        self.fall_behind(shard);
        if let Some((_, lane)) = self.lanes.get_mut(&shard) {
            lane.drop_retries();
        }
    }

    /// The lanes begin anew: what waits is left and read again, and the new order holds from here on.
    fn reorder(&mut self) {
        let ordering = self.ordering();
        for shard in self.lanes.keys().copied().collect::<Vec<_>>() {
            self.leave_queued(shard);
            if let Some((_, lane)) = self.lanes.get_mut(&shard) {
                lane.reorder(ordering);
            }
        }
    }

    fn free(&mut self, delivery: &Delivery) {
        if let Some(lane) = self.lane_of(delivery.lease.shard, delivery.lease.epoch) {
            let key = lane.key(delivery).map(ToString::to_string);
            lane.ended(key.as_deref(), WasParked::of(delivery));
        }
    }

    /// Parks a delivery that was on its way, and those behind it.
    fn park_in_order(&mut self, delivery: Delivery, parking: Parking) {
        let mut behind = Vec::new();
        if let Some(lane) = self.lane_of(delivery.lease.shard, delivery.lease.epoch) {
            let key = lane.key(&delivery).map(ToString::to_string);
            behind = lane.parked(key.as_deref(), WasParked::of(&delivery), parking.state);
        }
        self.park(delivery, parking);
        self.park_behind(behind);
    }

    fn park_behind(&mut self, behind: Vec<Delivery>) {
        for delivery in behind {
            self.park(delivery, waiting(Waiting::Blocked, None, "an earlier delivery of its key waits"));
        }
    }

    fn park(&mut self, delivery: Delivery, parking: Parking) {
        let row = attempt::park_row(&delivery, self.ordering(), parking);
        self.settle(Settlement { delivery, verdict: Verdict::Park(row), end: None, durability: Durability::Lazy });
    }

    fn settle(&self, settlement: Settlement) {
        self.shared.settler.settle(settlement);
    }
}

/// A delivery that waits without having been attempted now.
pub fn waiting(state: Waiting, due_in: Option<Duration>, reason: &str) -> Parking {
    Parking {
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
