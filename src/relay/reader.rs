//! Reading the log: opens flights over what is new in the shards held, and hands their deliveries out.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::attempt;
use super::clock::DatabaseClock;
use super::delivery::{ByteBudget, Delivery, Flight, FlightKind, Origin};
use super::doorbell::{Armed, Doorbell};
use super::health::Health;
use super::lease::{InAir, LeaseHold, ShardLease};
use super::options::Options;
use super::outage;
use super::router::Router;
use super::settler::{Settlement, Settler, Verdict};
use super::traffic::Traffic;
use crate::edge::error::report;
use crate::failpoint;
use crate::model::consumer::Ordering;
use crate::model::key::Shard;
use crate::model::token::Waiting;
use crate::mutant::{self, Mutant};
use crate::store::log::{self, Held, OpenedFlight, Opener, PageLimits, Position, Reached, Reading};
use crate::store::pages::{self, Manifest};
use crate::store::parking::Trouble;
use crate::store::session::Session;
use crate::store::settle::{CloseRow, Durability, Parking};
use crate::store::{Database, Result};

/// Effects of a large difference that are read ahead per shard, sixteen bytes each.
const MANIFEST_MAX: i64 = 100_000;
/// While a producer keeps the doorbell from hanging, the relay polls at least this often.
const POLL_UNARMED: Duration = Duration::from_millis(20);
/// Flights' worth of deliveries that may be in hand at once.
const FLIGHTS_IN_HAND: usize = 16;

pub enum Command {
    Acquired {
        lease: Arc<ShardLease>,
        position: Position,
    },
    Lost(Shard),
    /// The shard is to be handed over: nothing more of it is read.
    LetGo(Shard),
}

pub struct Reader {
    pub database: Database,
    pub relay: Uuid,
    pub options: Options,
    pub clock: DatabaseClock,
    pub router: Arc<Router>,
    pub settler: Settler,
    pub bell: Arc<Doorbell>,
    pub health: Arc<Health>,
    pub budget: ByteBudget,
    pub shards: BTreeMap<Shard, ShardReading>,
    /// Of the last opening whose answer did not come.
    pub unanswered: Option<Uuid>,
    pub traffic: Traffic,
    pub poll: Duration,
}

/// What a turn found.
#[derive(Clone, Copy, Default)]
struct Found {
    flights: usize,
    deliveries: usize,
}

/// Where the reading of one shard stands.
pub struct ShardReading {
    lease: Arc<ShardLease>,
    position: Position,
    /// What of a large difference is still to be opened over.
    manifest: Manifest,
}

impl Reader {
    /// Reads until `stop`. Ends without closing anything: what is in the air lands by itself.
    pub async fn run(mut self, mut commands: mpsc::UnboundedReceiver<Command>, stop: CancellationToken) {
        while let Some(session) = outage::reconnect(&self.database, "reader", &stop).await {
            if let Err(error) = self.read(&session, &mut commands, &stop).await {
                if !error.is_disconnect() {
                    tracing::error!(error = %report(&error), "reading the log failed");
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            } else {
                return;
            }
        }
    }

    async fn read(
        &mut self,
        session: &Session,
        commands: &mut mpsc::UnboundedReceiver<Command>,
        stop: &CancellationToken,
    ) -> Result<()> {
        self.reposition(session).await?;
        loop {
            while let Ok(command) = commands.try_recv() {
                self.obey(command);
            }
            if stop.is_cancelled() {
                return Ok(());
            }
            self.health.turned();
            if !self.has_room() || self.alive().is_empty() {
                tokio::select! {
                    () = stop.cancelled() => return Ok(()),
                    command = commands.recv() => if let Some(command) = command { self.obey(command) },
                    () = self.budget.freed() => {}
                    () = tokio::time::sleep(Duration::from_millis(500)) => {}
                }
                continue;
            }
            let began = Instant::now();
            let rings = self.bell.hangs(&self.held()).await;
            let found = self.turn(session).await?;
            if found.flights > 0 {
                self.found();
            }
            if self.traffic.found(found.deliveries, Instant::now()) {
                self.bell.disarm().await;
                if !self.is_behind() {
                    tokio::time::sleep(Traffic::pause(began.elapsed(), self.options.poll_min)).await;
                }
            } else if found.flights == 0 || (rings && !self.is_behind()) {
                // What this turn was too early to see has rung, or will.
                self.rest(commands, stop).await;
            }
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Acquired { lease, position } => {
                self.shards.insert(lease.shard, ShardReading { lease, position, manifest: Manifest::default() });
                self.found();
            }
            Command::Lost(shard) => {
                self.shards.remove(&shard);
            }
            Command::LetGo(shard) => {
                if let Some(reading) = self.shards.remove(&shard) {
                    reading.lease.let_go();
                }
            }
        }
    }

    fn has_room(&self) -> bool {
        self.budget.has_room() && self.budget.deliveries() < self.options.flight_deliveries as usize * FLIGHTS_IN_HAND
    }

    /// Whether what was found is more than was opened over.
    fn is_behind(&self) -> bool {
        self.shards.values().any(|shard| matches!(shard.position.reached, Reached::Partial { .. }))
    }

    fn held(&self) -> Vec<Shard> {
        self.shards.keys().copied().collect()
    }

    fn alive(&self) -> Vec<Held> {
        self.shards
            .values()
            .filter(|reading| reading.lease.is_alive())
            .map(|reading| Held {
                shard: reading.lease.shard,
                epoch: reading.lease.epoch,
                position: reading.position.clone(),
            })
            .collect()
    }

    /// One reading of all shards.
    async fn turn(&mut self, session: &Session) -> Result<Found> {
        let opener = Opener { relay: self.relay, nonce: Uuid::now_v7() };
        let held = self.alive();
        let bytes = self.options.flight_bytes.min(self.budget.room() / held.len().max(1) as u64).max(1);
        let limits = PageLimits { deliveries: self.options.flight_deliveries, bytes };
        self.unanswered = Some(opener.nonce);
        failpoint::reach("before_flight", &[]).await;
        let reading = log::open_flights(session, &held, opener, limits).await?;
        if !reading.opened.is_empty() {
            failpoint::reach("flight_opened", &[]).await;
        }
        let new = self.launch(reading);
        let partial: Vec<Held> =
            held.into_iter().filter(|h| matches!(h.position.reached, Reached::Partial { .. })).collect();
        let paged = self.pages(session, partial, opener, limits).await?;
        self.unanswered = None;
        Ok(Found { flights: new.flights + paged.flights, deliveries: new.deliveries + paged.deliveries })
    }

    /// The next flight of each difference too large for one.
    async fn pages(
        &mut self,
        session: &Session,
        partial: Vec<Held>,
        opener: Opener,
        limits: PageLimits,
    ) -> Result<Found> {
        let (mut pages, mut ended) = (Vec::new(), 0);
        for held in partial {
            let Some(shard) = self.shards.get_mut(&held.shard) else { continue };
            if shard.manifest.is_empty() {
                shard.manifest = Manifest::read(session, held.shard, &held.position.reached, MANIFEST_MAX).await?;
            }
            if let Some(page) = shard.manifest.page(limits) {
                pages.push((held, page));
                continue;
            }
            ended += 1;
            match pages::finish_difference(session, &held, opener).await? {
                Some(position) => shard.position = position,
                None => self.lose(held.shard),
            }
        }
        let reading = pages::open_pages(session, &pages::aligned(pages), opener).await?;
        for flight in &reading.opened {
            if let (Some(shard), Some(last)) = (self.shards.get_mut(&flight.shard), flight.effects.last()) {
                shard.manifest.opened(last.effect.id);
            }
        }
        let found = self.launch(reading);
        Ok(Found { flights: found.flights + ended, ..found })
    }

    fn launch(&mut self, reading: Reading) -> Found {
        if let Some(now) = reading.now {
            self.clock.set(now);
        }
        for shard in reading.lost {
            self.lose(shard);
        }
        let flights = reading.opened.len();
        let deliveries = reading.opened.into_iter().map(|flight| self.launch_one(flight)).sum();
        Found { flights, deliveries }
    }

    /// Hands the deliveries of an opened flight out. From here on the flight, not this reader, knows of them.
    /// Gives how many they are.
    fn launch_one(&mut self, opened: OpenedFlight) -> usize {
        let Some(reading) = self.shards.get_mut(&opened.shard) else { return 0 };
        let seq = opened.position.seq;
        reading.position = opened.position;
        reading.lease.reached(seq);
        let lease = Arc::clone(&reading.lease);
        let count: usize = opened.effects.iter().map(|read| read.effect.targets.len()).sum();
        metrics::counter!("fencepost_flights_total").increment(1);
        metrics::counter!("fencepost_deliveries_read_total").increment(count as u64);
        if count == 0 {
            self.settler.close_empty(CloseRow { shard: lease.shard, seq, epoch: lease.epoch, parks: Vec::new() });
            return 0;
        }
        let flight = Arc::new(Flight {
            kind: FlightKind::Log,
            seq,
            outstanding: AtomicUsize::new(count),
            place: Some(InAir::of(&lease, seq)),
        });
        let now = Instant::now();
        let (mut due, mut later) = (Vec::with_capacity(count), Vec::new());
        for read in opened.effects {
            let effect = Arc::new(read.effect);
            let shares = self.budget.shares(&effect);
            for (consumer, share) in effect.targets.iter().zip(shares) {
                let delivery = Delivery {
                    effect: Arc::clone(&effect),
                    consumer: *consumer,
                    lease: LeaseHold::of(&lease),
                    trouble: Trouble::default(),
                    expired: read.expired,
                    origin: Origin::Flight(Arc::clone(&flight)),
                    since: now,
                    lane: None,
                    share,
                };
                match read.due_in {
                    Some(wait) => later.push((delivery, wait)),
                    None => due.push(delivery),
                }
            }
        }
        for (delivery, wait) in later {
            self.schedule(delivery, wait);
        }
        self.router.route(due);
        count
    }

    /// A scheduled effect waits in the parking lot and takes its place in its key's order when it is due.
    fn schedule(&self, delivery: Delivery, wait: Duration) {
        let row = attempt::park_row(
            &delivery,
            Ordering::Key,
            Parking::waiting(Waiting::Scheduled, Some(wait), "deliver_after lies ahead"),
        );
        self.settler.settle(Settlement {
            delivery,
            verdict: Verdict::Park(row),
            end: None,
            durability: Durability::Lazy,
        });
    }

    fn lose(&mut self, shard: Shard) {
        if let Some(reading) = self.shards.remove(&shard) {
            tracing::warn!(%shard, "another relay has opened a flight of this shard: it is lost");
            reading.lease.lose();
            self.router.lost(shard, reading.lease.epoch);
            // The keeper gives up what is left of it.
            self.bell.shards.notify_one();
        }
    }

    /// After a reconnect the position is read from the database, never from memory. A flight of ours whose opening was
    /// answered to nobody is adopted.
    async fn reposition(&mut self, session: &Session) -> Result<()> {
        for shard in self.held() {
            let Some(reading) = self.shards.get_mut(&shard) else { continue };
            reading.manifest = Manifest::default();
            let newest = log::position(session, shard).await?;
            if newest.seq == reading.position.seq || mutant::is(Mutant::UnansweredFlightSkipped) {
                reading.position = newest;
                continue;
            }
            let held = Held { shard, epoch: reading.lease.epoch, position: reading.position.clone() };
            let adopted = match self.unanswered {
                Some(nonce) => log::adopt(session, &held, Opener { relay: self.relay, nonce }).await?,
                None => None,
            };
            match adopted {
                Some(flight) => {
                    tracing::info!(%shard, seq = flight.position.seq.0, "a flight whose opening was answered to nobody was adopted");
                    self.launch_one(flight);
                }
                None => self.lose(shard),
            }
        }
        self.unanswered = None;
        Ok(())
    }

    fn found(&mut self) {
        self.poll = self.options.poll_min;
    }

    /// Nothing was new: sleeps until the doorbell rings, or polls where it does not hang.
    async fn rest(&mut self, commands: &mut mpsc::UnboundedReceiver<Command>, stop: &CancellationToken) {
        let mut wait = self.poll;
        match self.bell.arm(&self.held()).await {
            // What was committed before the bell hung rings for nobody: one more look, then sleep.
            Armed::JustNow => return,
            Armed::All => wait = self.options.poll_max,
            Armed::Partly => wait = wait.min(POLL_UNARMED),
        }
        self.poll = (self.poll * 2).min(self.options.poll_max);
        tokio::select! {
            () = stop.cancelled() => {}
            command = commands.recv() => if let Some(command) = command { self.obey(command) },
            () = self.bell.rung.notified() => self.found(),
            () = tokio::time::sleep(wait) => {}
        }
    }
}
