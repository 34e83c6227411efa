//! Keeping shards: renewing leases on a connection of its own, taking over what has expired, and saying what was lost.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::clock::DatabaseClock;
use super::doorbell::Doorbell;
use super::health::Health;
use super::lease::ShardLease;
use super::outage;
use super::reader;
use super::router::Router;
use super::settler::Settler;
use crate::edge::error::report;
use crate::model::key::{Shard, ShardEpoch};
use crate::model::token::TickToken;
use crate::mutant::{self, Mutant};
use crate::store::session::Session;
use crate::store::shards::{Leaving, Roster};
use crate::store::{self, Database, Result, alarms, consumers, flights, lags, parking, relays, shards};

/// How often a relay looks for shards while others hold some.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How often it looks whether a shard it gives way in is free of deliveries.
const YIELD_LOOK: Duration = Duration::from_millis(20);

/// So many leases after its deadline an attempt's end is written down, or its relay has left the shard.
const TO_SETTLE: u32 = 4;

pub struct Keeper {
    pub database: Database,
    pub relay: Uuid,
    pub name: String,
    pub lease: Duration,
    pub renew_every: Duration,
    pub clock: DatabaseClock,
    pub router: Arc<Router>,
    pub settler: Settler,
    pub bell: Arc<Doorbell>,
    pub health: Arc<Health>,
    pub relays: Arc<AtomicUsize>,
    pub reader: mpsc::UnboundedSender<reader::Command>,
    pub held: HashMap<Shard, Arc<ShardLease>>,
    /// The relays that were there when it was last looked what those that are gone have left.
    pub peers: Vec<Uuid>,
}

impl Keeper {
    /// Keeps shards until `stop`; then nothing more is taken, and what is held is renewed until `release`.
    pub async fn run(mut self, stop: CancellationToken, release: CancellationToken) {
        while let Some(mut session) = outage::reconnect(&self.database, "shards", &release).await {
            match self.hold(&mut session, &stop, &release).await {
                Ok(()) => {
                    self.give_up(&session).await;
                    return;
                }
                Err(error) if error.is_disconnect() => {
                    tracing::debug!(error = %report(&error), "leases wait for the database")
                }
                Err(error) => {
                    tracing::error!(error = %report(&error), "keeping shards failed");
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            }
        }
    }

    async fn hold(
        &mut self,
        session: &mut Session,
        stop: &CancellationToken,
        release: &CancellationToken,
    ) -> Result<()> {
        relays::register(session.client(), self.relay, &self.name).await?;
        self.peers.clear();
        let mut shut_edges = self.health.shut_edges();
        // This session has told nothing of them yet.
        shut_edges.mark_changed();
        // Until then others may not have ticked again after an outage that we shared.
        let began = Instant::now();
        let mut renew_at = began;
        loop {
            self.renew_if_due(&mut renew_at, session).await?;
            self.release_lost(session).await?;
            // The health they belong to is ours, and so is its sender.
            if shut_edges.has_changed().unwrap_or(false) {
                let shut = shut_edges.borrow_and_update().clone();
                relays::edges(session.client(), self.relay, &shut).await?;
            }
            let mut wait_for_more = false;
            if !stop.is_cancelled() {
                let roster = shards::roster(session.client(), self.lease).await?;
                self.relays.store(roster.relays.len().max(1), Ordering::Relaxed);
                if began.elapsed() >= 2 * self.lease {
                    self.greet(session, &roster).await?;
                }
                let share = roster.share_of(self.relay);
                self.yield_above(share, session).await?;
                self.take_over(session, &roster, share, &mut renew_at).await?;
                wait_for_more = self.held.len() < roster.shards;
            }
            let mut look_at = renew_at;
            if wait_for_more {
                look_at = look_at.min(Instant::now() + LOOK_EVERY);
            }
            if self.held.values().any(|lease| lease.gives_way()) {
                look_at = look_at.min(Instant::now() + YIELD_LOOK);
            }
            tokio::select! {
                () = release.cancelled() => return Ok(()),
                () = tokio::time::sleep_until(look_at) => {}
                () = self.bell.shards.notified() => {}
                _ = shut_edges.changed() => shut_edges.mark_changed(),
            }
        }
    }

    /// When relays have come or gone: what those that are gone said of their ways stands for nobody any more.
    async fn greet(&mut self, session: &Session, roster: &Roster) -> Result<()> {
        if self.peers == roster.relays {
            return Ok(());
        }
        let resolved = alarms::resolve_forsaken(session.client(), self.lease).await?;
        if resolved > 0 {
            tracing::info!(alarms = resolved, "resolved: only relays that are gone called these edges shut");
        }
        self.peers.clone_from(&roster.relays);
        Ok(())
    }

    /// Above its share a relay stops reading, lets what is out come back, and gives the shard up. Never is an unexpired
    /// lease taken from anybody.
    async fn yield_above(&mut self, share: usize, session: &Session) -> Result<()> {
        let staying = self.held.values().filter(|lease| !lease.gives_way()).count();
        let too_many: Vec<Shard> = self
            .held
            .values()
            .filter(|lease| !lease.gives_way())
            .map(|lease| lease.shard)
            .take(staying.saturating_sub(share))
            .collect();
        for shard in too_many {
            self.held[&shard].give_way();
            let _ = self.reader.send(reader::Command::LetGo(shard));
            self.router.yield_shard(shard);
        }
        let free: Vec<(Shard, ShardEpoch)> = self
            .held
            .values()
            .filter(|lease| lease.gives_way() && lease.is_free())
            .map(|lease| (lease.shard, lease.epoch))
            .collect();
        if free.is_empty() {
            return Ok(());
        }
        for (shard, _) in &free {
            self.forget(*shard);
        }
        shards::release(session.client(), self.relay, &free, Leaving::InOrder).await?;
        tracing::info!(shards = free.len(), "shards handed over");
        Ok(())
    }

    async fn renew_if_due(&mut self, renew_at: &mut Instant, session: &Session) -> Result<()> {
        if Instant::now() < *renew_at {
            return Ok(());
        }
        *renew_at = Instant::now() + self.renew_every;
        self.renew(session).await
    }

    async fn renew(&mut self, session: &Session) -> Result<()> {
        // Taken before the renewal is sent: it can only be earlier than the database's.
        let until = Instant::now() + self.lease;
        let held: Vec<(Shard, ShardEpoch)> = self.held.values().map(|lease| (lease.shard, lease.epoch)).collect();
        let renewed = shards::renew(session.client(), self.relay, &held, self.lease).await?;
        self.clock.set(renewed.now);
        for (shard, _) in held {
            if renewed.kept.contains(&shard) {
                self.held[&shard].extend(until);
            } else {
                self.lose(shard);
            }
        }
        self.health.renewed(self.held.len());
        let token = if self.held.is_empty() { TickToken::Idle } else { TickToken::Worked };
        relays::tick(session.client(), self.relay, token).await
    }

    /// The reader may have found a shard lost that the database still calls ours: nobody would work on it for as long as
    /// we renew it.
    async fn release_lost(&mut self, session: &Session) -> Result<()> {
        let lost: Vec<(Shard, ShardEpoch)> =
            self.held.values().filter(|lease| lease.is_lost()).map(|lease| (lease.shard, lease.epoch)).collect();
        if lost.is_empty() {
            return Ok(());
        }
        shards::release(session.client(), self.relay, &lost, Leaving::Lost).await?;
        for (shard, _) in lost {
            self.lose(shard);
        }
        Ok(())
    }

    fn lose(&mut self, shard: Shard) {
        if let Some(lease) = self.forget(shard) {
            tracing::warn!(%shard, epoch = lease.epoch.0, "the shard's lease was lost");
            metrics::counter!("fencepost_shards_lost_total").increment(1);
        }
    }

    fn forget(&mut self, shard: Shard) -> Option<Arc<ShardLease>> {
        let lease = self.held.remove(&shard)?;
        lease.lose();
        self.router.lost(shard, lease.epoch);
        let _ = self.reader.send(reader::Command::Lost(shard));
        Some(lease)
    }

    async fn take_over(
        &mut self,
        session: &mut Session,
        roster: &Roster,
        share: usize,
        renew_at: &mut Instant,
    ) -> Result<()> {
        for shard in &roster.claimable {
            self.lose(*shard);
        }
        let room = share.saturating_sub(self.held.len());
        let claimable: Vec<Shard> = roster.claimable.iter().copied().take(room).collect();
        if claimable.is_empty() {
            return Ok(());
        }
        // Outcomes of our own, from before an outage, come before the sweep that would call them lost.
        self.settler.flush().await;
        for shard in claimable {
            // Many shards with much to sweep take longer than a lease: those held already must not run out meanwhile.
            self.renew_if_due(renew_at, session).await?;
            let until = Instant::now() + self.lease;
            let taken = match shards::take(session.client_mut(), shard, self.relay, self.lease).await {
                Ok(Some(taken)) => taken,
                Ok(None) => continue,
                // The other shards do not wait for this one.
                Err(error @ store::Error::Corrupt(_)) => {
                    tracing::error!(%shard, error = %report(&error), "a shard cannot be taken");
                    continue;
                }
                Err(error) => return Err(error),
            };
            let lease = Arc::new(ShardLease::new(shard, taken.epoch, until));
            lease.reached(taken.position.seq);
            self.sweep(session, &lease).await?;
            let blocked = parking::blocked_keys(session.client(), &[shard]).await?;
            let lags = lags::ranges(session.client(), shard).await?;
            self.router.acquired(&lease, blocked, lags).await;
            tracing::info!(%shard, epoch = taken.epoch.0, "shard taken");
            self.held.insert(shard, Arc::clone(&lease));
            // Without a reader the relay is stopping.
            let _ = self.reader.send(reader::Command::Acquired { lease, position: taken.position });
        }
        self.health.renewed(self.held.len());
        // The sweep may have parked something.
        self.bell.parked.notify_one();
        Ok(())
    }

    /// Ends what the predecessor left open: its flights, and its attempts from the parking lot.
    async fn sweep(&self, session: &Session, lease: &ShardLease) -> Result<()> {
        if mutant::is(Mutant::NoTakeoverSweep) {
            return Ok(());
        }
        let client = session.client();
        let mut swept = flights::end_interrupted(client, lease.shard, lease.epoch).await?;
        if swept.dead > 0 {
            let object = format!("shard {}", lease.shard);
            alarms::raise(
                client,
                alarms::Alarm::Poison,
                &object,
                "a delivery was being attempted when three relays died",
            )
            .await?;
        }
        swept.retried += lags::end_pages(client, lease.shard, lease.epoch).await?;
        for seq in flights::left_open(client, lease.shard, lease.epoch).await? {
            let lost = flights::close_lost(client, lease.shard, seq, lease.epoch).await?;
            swept.retried += lost.retried;
            swept.in_doubt += lost.in_doubt;
            metrics::counter!("fencepost_flights_lost_total").increment(1);
        }
        let longest = consumers::longest_attempt(client).await? + TO_SETTLE * self.lease;
        swept.overtaken = flights::end_overtaken(client, lease.shard, lease.epoch, longest).await?;
        parking::mend(client, &[(lease.shard, lease.epoch)]).await?;
        if swept != flights::Swept::default() {
            tracing::warn!(shard = %lease.shard, retried = swept.retried, in_doubt = swept.in_doubt, dead = swept.dead, overtaken = swept.overtaken, "a predecessor's attempts were lost");
        }
        Ok(())
    }

    /// Gives the shards up in order, so that others need not wait for the leases to run out.
    async fn give_up(&mut self, session: &Session) {
        let (mut written, mut ahead) = (Vec::new(), Vec::new());
        for (shard, lease) in self.held.drain() {
            let held = if lease.is_read_ahead() { &mut ahead } else { &mut written };
            held.push((shard, lease.epoch));
        }
        let said = async {
            shards::release(session.client(), self.relay, &written, Leaving::InOrder).await?;
            if !ahead.is_empty() {
                shards::release(session.client(), self.relay, &ahead, Leaving::Lost).await?;
            }
            relays::stopped(session.client(), self.relay).await
        };
        if let Err(error) = said.await {
            tracing::warn!(error = %report(&error), "the shards could not be given up; their leases will run out");
        }
    }
}
