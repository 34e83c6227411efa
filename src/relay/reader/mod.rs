//! Reading the log: opens flights over what is new in the shards held, and hands their deliveries out. What little comes at
//! a moderate rate is read ahead of its flight (`ahead`), everything else after it is open (`flights`).

mod ahead;
mod flights;
mod tail;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use self::ahead::Seen;
use self::tail::Tail;
use super::clock::DatabaseClock;
use super::doorbell::{Armed, Doorbell};
use super::health::Health;
use super::launch::Launcher;
use super::lease::ShardLease;
use super::options::Options;
use super::outage;
use super::traffic::Traffic;
use crate::edge::error::report;
use crate::failpoint;
use crate::model::key::Shard;
use crate::mutant::{self, Mutant};
use crate::store::log::{self, Held, Opener, PageLimits, Position, Reached};
use crate::store::pages::Manifest;
use crate::store::session::Session;
use crate::store::{Database, Result};

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
    pub launcher: Launcher,
    pub bell: Arc<Doorbell>,
    pub health: Arc<Health>,
    pub shards: BTreeMap<Shard, ShardReading>,
    /// Shards to be let go once all that was read has its flight.
    pub leaving: Vec<Shard>,
    /// Of the last opening whose answer did not come.
    pub unanswered: Option<Uuid>,
    pub seen: Option<Seen>,
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
    /// What was read ahead.
    tail: Option<Tail>,
}

impl ShardReading {
    fn held(&self) -> Held {
        Held { shard: self.lease.shard, epoch: self.lease.epoch, position: self.position.clone() }
    }

    /// A flight that reaches to `position` is on disk.
    fn has_flight(&mut self, position: Position) {
        self.lease.reached(position.seq);
        self.position = position;
        metrics::counter!("fencepost_flights_total").increment(1);
    }
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
            self.let_go(session).await?;
            if stop.is_cancelled() {
                return self.write_tails(session).await;
            }
            self.health.turned();
            if !self.has_room() || self.alive().is_empty() {
                self.write_tails(session).await?;
                tokio::select! {
                    () = stop.cancelled() => return Ok(()),
                    command = commands.recv() => if let Some(command) = command { self.obey(command) },
                    () = self.launcher.budget.freed() => {}
                    () = tokio::time::sleep(Duration::from_millis(500)) => {}
                }
                continue;
            }
            let began = Instant::now();
            let rings = self.bell.hangs(&self.held()).await;
            let found = self.turn(session).await?;
            if found.flights > 0 {
                self.launcher.settler.after_reading();
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
                let manifest = Manifest::default();
                self.shards.insert(lease.shard, ShardReading { lease, position, manifest, tail: None });
                self.found();
            }
            Command::Lost(shard) => {
                self.shards.remove(&shard);
            }
            Command::LetGo(shard) => self.leaving.push(shard),
        }
    }

    /// Nothing more is read of the shards that are leaving.
    async fn let_go(&mut self, session: &Session) -> Result<()> {
        if self.leaving.is_empty() {
            return Ok(());
        }
        self.write_tails(session).await?;
        for shard in std::mem::take(&mut self.leaving) {
            match self.shards.get(&shard).map(|reading| reading.tail.is_some()) {
                // Over another connection it cannot be written any more.
                Some(true) => self.lose(shard),
                Some(false) => {
                    if let Some(reading) = self.shards.remove(&shard) {
                        reading.lease.let_go();
                    }
                }
                None => {}
            }
        }
        Ok(())
    }

    fn has_room(&self) -> bool {
        let budget = &self.launcher.budget;
        budget.has_room() && budget.deliveries() < self.options.flight_deliveries as usize * FLIGHTS_IN_HAND
    }

    /// Whether what was found is more than was opened over.
    fn is_behind(&self) -> bool {
        self.shards.values().any(|shard| matches!(shard.position.reached, Reached::Partial { .. }))
    }

    fn held(&self) -> Vec<Shard> {
        self.shards.keys().copied().collect()
    }

    fn alive(&self) -> Vec<Held> {
        self.shards.values().filter(|reading| reading.lease.is_alive()).map(ShardReading::held).collect()
    }

    /// One reading of all shards.
    async fn turn(&mut self, session: &Session) -> Result<Found> {
        if let Some(found) = self.read_ahead(session).await? {
            // What is due for its flight has it now, when nobody waits for the reader.
            if self.seen.as_ref().and_then(Seen::write_in) == Some(Duration::ZERO) {
                self.write_tails(session).await?;
            }
            return Ok(found);
        }
        self.write_tails(session).await?;
        let opener = self.opener();
        let held = self.alive();
        let bytes = self.options.flight_bytes.min(self.launcher.budget.room() / held.len().max(1) as u64).max(1);
        let limits = PageLimits { deliveries: self.options.flight_deliveries, bytes };
        failpoint::reach("before_flight", &[]).await;
        let mut reading = log::open_flights(session, &held, opener, limits).await?;
        if !reading.opened.is_empty() {
            failpoint::reach("flight_opened", &[]).await;
        }
        let seen = reading.seen.take();
        let new = self.launch(reading);
        self.has_seen(seen, &held);
        let partial: Vec<Held> =
            held.into_iter().filter(|h| matches!(h.position.reached, Reached::Partial { .. })).collect();
        let paged = self.pages(session, partial, opener, limits).await?;
        self.unanswered = None;
        Ok(Found { flights: new.flights + paged.flights, deliveries: new.deliveries + paged.deliveries })
    }

    fn opener(&mut self) -> Opener {
        let nonce = Uuid::now_v7();
        self.unanswered = Some(nonce);
        Opener { relay: self.relay, nonce }
    }

    fn lose(&mut self, shard: Shard) {
        if let Some(reading) = self.shards.remove(&shard) {
            tracing::warn!(%shard, "another relay has opened a flight of this shard: it is lost");
            reading.lease.lose();
            self.launcher.router.lost(shard, reading.lease.epoch);
            // The keeper gives up what is left of it.
            self.bell.shards.notify_one();
        }
    }

    /// After a reconnect the position is read from the database, never from memory. A flight of ours whose opening was
    /// answered to nobody is adopted.
    async fn reposition(&mut self, session: &Session) -> Result<()> {
        self.seen = None;
        for shard in self.held() {
            let Some(reading) = self.shards.get_mut(&shard) else { continue };
            reading.manifest = Manifest::default();
            let newest = log::position(session, shard).await?;
            if newest.seq == reading.position.seq {
                reading.position = newest;
                continue;
            }
            if mutant::is(Mutant::UnansweredFlightSkipped) {
                (reading.position, reading.tail) = (newest, None);
                continue;
            }
            let held = reading.held();
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
        if let Some(write_in) = self.seen.as_ref().and_then(Seen::write_in) {
            wait = wait.min(write_in);
        }
        tokio::select! {
            () = stop.cancelled() => {}
            command = commands.recv() => if let Some(command) = command { self.obey(command) },
            () = self.bell.rung.notified() => self.found(),
            () = tokio::time::sleep(wait) => {}
        }
    }
}
