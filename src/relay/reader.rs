//! Reading the log: opens flights over what is new in the shards held, and hands their deliveries out.
//!
//! What little comes at a moderate rate is read ahead: handed out at once, where the newest flight of its shard allows it, and
//! written into the next some milliseconds later (`store::ahead`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::clock::DatabaseClock;
use super::delivery::{Flight, FlightKind};
use super::doorbell::{Armed, Doorbell};
use super::health::Health;
use super::launch::{self, Launcher};
use super::lease::{InAir, ShardLease};
use super::options::Options;
use super::outage;
use super::tail::Tail;
use super::traffic::Traffic;
use crate::edge::error::report;
use crate::failpoint;
use crate::model::key::{Shard, ShardEpoch};
use crate::mutant::{self, Mutant};
use crate::store::ahead::{self, Ahead, Commits, New};
use crate::store::effects::ReadEffect;
use crate::store::log::{self, Held, OpenedFlight, Opener, PageLimits, Position, Reached, Reading, Snapshot};
use crate::store::pages::{self, Manifest};
use crate::store::session::Session;
use crate::store::settle::CloseRow;
use crate::store::{Database, Result};

/// Effects of a large difference that are known in advance per shard, sixteen bytes each.
const MANIFEST_MAX: i64 = 100_000;
/// While a producer keeps the doorbell from hanging, the relay polls at least this often.
const POLL_UNARMED: Duration = Duration::from_millis(20);
/// Flights' worth of deliveries that may be in hand at once.
const FLIGHTS_IN_HAND: usize = 16;
/// What was read ahead has its flight so long after the first of it was handed out.
const WRITTEN_AFTER: Duration = Duration::from_millis(100);

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

/// Everything visible in this snapshot was read of these shards, held under these epochs: what others read of a shard meanwhile
/// says nothing of it. Only of use over the connection it came from: after a crash of the server the same transaction ids
/// may come again.
pub struct Seen {
    snapshot: Snapshot,
    shards: Vec<(Shard, ShardEpoch)>,
    /// Since when something that was read has no flight.
    unwritten_since: Option<Instant>,
}

impl Seen {
    /// When what was read ahead is to have its flight.
    fn write_in(&self) -> Option<Duration> {
        self.unwritten_since.map(|since| WRITTEN_AFTER.saturating_sub(since.elapsed()))
    }
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
        if self.seen.as_ref().and_then(Seen::write_in) == Some(Duration::ZERO) {
            self.write_tails(session).await?;
        }
        if let Some(found) = self.read_ahead(session).await? {
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

    /// After a reading of the whole difference of `held`.
    fn has_seen(&mut self, snapshot: Option<Snapshot>, held: &[Held]) {
        let whole = !held.iter().any(|h| matches!(h.position.reached, Reached::Partial { .. })) && !self.is_behind();
        let shards = held.iter().map(|h| (h.shard, h.epoch)).collect();
        // What was read ahead over another connection has its flight now, or was not found any more.
        let forgotten: Vec<Shard> =
            self.shards.iter().filter(|(_, reading)| reading.tail.is_some()).map(|(shard, _)| *shard).collect();
        forgotten.into_iter().for_each(|shard| self.lose(shard));
        self.seen = snapshot.filter(|_| whole).map(|snapshot| Seen { snapshot, shards, unwritten_since: None });
    }

    /// Hands out what little is new, before it has a flight. `None` where it must have one first.
    async fn read_ahead(&mut self, session: &Session) -> Result<Option<Found>> {
        let Some(seen) = &self.seen else { return Ok(None) };
        let alive: Vec<(Shard, ShardEpoch)> = self
            .shards
            .values()
            .filter(|reading| reading.lease.is_alive())
            .map(|reading| (reading.lease.shard, reading.lease.epoch))
            .collect();
        let known = alive.iter().all(|shard| seen.shards.contains(shard));
        if !known || self.traffic.is_heavy() || mutant::is(Mutant::CursorById) {
            return Ok(None);
        }
        let shards: Vec<Shard> = alive.iter().map(|(shard, _)| *shard).collect();
        match ahead::read(session, &shards, &seen.snapshot).await? {
            Ahead::Nothing => Ok(Some(Found::default())),
            Ahead::New(new) => self.launch_ahead(session, new, alive).await.map(Some),
            Ahead::Much => Ok(None),
        }
    }

    async fn launch_ahead(&mut self, session: &Session, new: New, shards: Vec<(Shard, ShardEpoch)>) -> Result<Found> {
        self.clock.set(new.now);
        let found = Found { flights: 1, deliveries: launch::deliveries(&new.effects) };
        if let Some(seen) = &mut self.seen {
            (seen.snapshot, seen.shards) = (new.seen, shards);
            seen.unwritten_since.get_or_insert_with(Instant::now);
        }
        let mut by_shard: BTreeMap<Shard, Vec<_>> = BTreeMap::new();
        for read in new.effects {
            by_shard.entry(read.effect.shard).or_default().push(read);
        }
        let mut held_back = Vec::new();
        for (shard, effects) in by_shard {
            let Some(reading) = self.shards.get_mut(&shard) else { continue };
            let tail = reading.tail.get_or_insert_with(|| Tail::new(&reading.lease, reading.position.next_seq()));
            tail.takes(&effects);
            let licensed = effects.last().map(|read| read.effect.id) <= reading.position.ahead_to;
            match licensed && new.commits == Commits::OnDisk {
                true => self.launcher.hand_out(&reading.lease, &tail.flight, effects),
                false => held_back.push((Arc::clone(&reading.lease), Arc::clone(&tail.flight), effects)),
            }
        }
        if !held_back.is_empty() {
            let written = self.write_tails(session).await;
            for (lease, flight, effects) in held_back {
                match flight.is_written() {
                    true => self.launcher.hand_out(&lease, &flight, effects),
                    false => self.take_back(lease.shard, &effects),
                }
            }
            written?;
        }
        Ok(found)
    }

    /// What was not handed out is found again.
    fn take_back(&mut self, shard: Shard, effects: &[ReadEffect]) {
        let Some(reading) = self.shards.get_mut(&shard) else { return };
        reading.tail = reading.tail.take().and_then(|tail| tail.without(effects));
        if reading.tail.is_none() {
            reading.lease.has_written();
        }
    }

    /// Gives what was read ahead its flights.
    async fn write_tails(&mut self, session: &Session) -> Result<()> {
        let unwritten: Vec<_> =
            self.shards.values().filter_map(|reading| reading.tail.as_ref()?.unwritten(reading.held())).collect();
        let Some(snapshot) = self.seen.as_ref().map(|seen| seen.snapshot.clone()).filter(|_| !unwritten.is_empty())
        else {
            return Ok(());
        };
        let opener = self.opener();
        failpoint::reach("before_ahead", &[]).await;
        let written = ahead::write(session, &unwritten, &snapshot, opener).await?;
        failpoint::reach("ahead_written", &[]).await;
        self.unanswered = None;
        for (shard, position) in written {
            self.tail_written(shard, position);
        }
        for one in unwritten {
            if self.shards.get(&one.held.shard).is_some_and(|reading| reading.tail.is_some()) {
                self.lose(one.held.shard);
            }
        }
        if let Some(seen) = &mut self.seen {
            seen.unwritten_since = None;
        }
        Ok(())
    }

    fn tail_written(&mut self, shard: Shard, position: Position) {
        let Some(reading) = self.shards.get_mut(&shard) else { return };
        let Some(tail) = reading.tail.take() else { return };
        let seq = position.seq;
        reading.position = position;
        reading.lease.reached(seq);
        reading.lease.has_written();
        tail.flight.has_row();
        metrics::counter!("fencepost_flights_total").increment(1);
        self.launcher.settler.written(tail.flight, shard, reading.lease.epoch);
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
    fn launch_one(&mut self, mut opened: OpenedFlight) -> usize {
        let Some(reading) = self.shards.get_mut(&opened.shard) else { return 0 };
        if let Some(tail) = &mut reading.tail {
            if opened.effects.last().map(|read| read.effect.id) < tail.last() {
                self.lose(opened.shard);
                return 0;
            }
            // Read ahead before the connection was lost: it is in the lanes, and has its flight now.
            opened.effects.retain(|read| !tail.holds(read.effect.id));
            tail.takes(&opened.effects);
            let count = launch::deliveries(&opened.effects);
            self.launcher.hand_out(&reading.lease, &tail.flight, opened.effects);
            self.tail_written(opened.shard, opened.position);
            return count;
        }
        let seq = opened.position.seq;
        reading.position = opened.position;
        reading.lease.reached(seq);
        let lease = &reading.lease;
        let count = launch::deliveries(&opened.effects);
        metrics::counter!("fencepost_flights_total").increment(1);
        if count == 0 {
            let row = CloseRow { shard: lease.shard, seq, epoch: lease.epoch, parks: Vec::new() };
            self.launcher.settler.close_empty(row);
            return 0;
        }
        let flight = Arc::new(Flight::written(FlightKind::Log, seq, count, Some(InAir::of(lease, seq))));
        self.launcher.hand_out(lease, &flight, opened.effects);
        count
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
