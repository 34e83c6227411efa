//! The task itself: it starts what may start, takes what comes back, and obeys what it is told.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, MissedTickBehavior};

use super::Command;
use crate::edge::error::report;
use crate::model::consumer::Ordering;
use crate::model::key::{ConsumerId, Shard, ShardEpoch};
use crate::relay::attempt::{Ended, Served, Shared};
use crate::relay::gate::{Class, Gate};
use crate::relay::lane::Lane;
use crate::relay::lease::ShardLease;
use crate::relay::options::BreakerOptions;
use crate::relay::tally::Tally;
use crate::relay::way::Way;
use crate::relay::words::Words;

const SWEEP_EVERY: Duration = Duration::from_millis(250);

pub(super) struct State {
    pub(super) served: Arc<Served>,
    pub(super) shared: Arc<Shared>,
    pub(super) park_after: Duration,
    pub(super) gate: Gate,
    pub(super) words: Words,
    pub(super) way: Way,
    pub(super) tally: Tally,
    pub(super) lanes: HashMap<Shard, (Arc<ShardLease>, Lane)>,
    pub(super) attempts: JoinSet<(Class, Ended)>,
    pub(super) draining: bool,
}

impl State {
    pub(super) fn new(served: Arc<Served>, shared: Arc<Shared>, park_after: Duration, breaker: BreakerOptions) -> Self {
        let gate = Gate::new(served.consumer.concurrency, served.consumer.rate, breaker, Instant::now());
        Self {
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
        }
    }

    pub(super) async fn run(mut self, mut commands: mpsc::UnboundedReceiver<Command>) {
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
                Some(done) = self.attempts.join_next(), if !self.attempts.is_empty() => {
                    self.joined(done);
                    while let Some(done) = self.attempts.try_join_next() {
                        self.joined(done);
                    }
                }
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

    fn joined(&mut self, done: Result<(Class, Ended), JoinError>) {
        match done {
            Ok((class, ended)) => self.came_back(class, ended),
            // The flight stays open: the reconciler parks the delivery.
            Err(error) => tracing::error!(error = %report(&error), "an attempt's task failed"),
        }
    }

    pub(super) fn obey(&mut self, command: Command) {
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

    /// The rate is a promise of the consumer over all relays: each takes its share.
    pub(super) fn share_rate(&mut self) {
        let relays = u32::try_from(self.shared.relays.load(Relaxed)).unwrap_or(u32::MAX);
        let consumer = &self.served.consumer;
        let share = |rate: NonZeroU32| NonZeroU32::new(rate.get() / relays.max(1)).unwrap_or(NonZeroU32::MIN);
        self.gate.set_limits(consumer.concurrency, consumer.rate.map(share), Instant::now());
    }

    pub(super) fn note_way(&mut self) {
        let Shared { health, pool, .. } = &*self.shared;
        self.way.note(&self.served.consumer.name, self.served.edge.shut(), health, pool);
    }

    pub(super) fn consumer_id(&self) -> ConsumerId {
        self.served.consumer.id
    }

    pub(super) fn ordering(&self) -> Ordering {
        self.served.consumer.contract.ordering
    }

    /// The lane a delivery belongs to; `None` where its shard was lost since, be it ours again.
    pub(super) fn lane_of(&mut self, shard: Shard, epoch: ShardEpoch) -> Option<&mut Lane> {
        self.lanes.get_mut(&shard).filter(|(lease, _)| lease.epoch == epoch).map(|(_, lane)| lane)
    }
}
