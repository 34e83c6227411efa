//! Going over flights behind the relay's back: closed ones that say nothing of a delivery, open ones that nobody has in
//! hand.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_postgres::Client;
use tokio_util::sync::CancellationToken;

use super::lease::ShardLease;
use super::outage;
use super::router::Router;
use crate::edge::error::report;
use crate::model::key::{FlightSeq, Shard, ShardEpoch};
use crate::store::reconcile::{self, Unreconciled};
use crate::store::session::Session;
use crate::store::{Database, Error, Result, alarms, flights};

/// How often closed flights are gone over.
const EVERY: Duration = Duration::from_secs(5);
/// After a statement that looks at many it rests so many times as long: whoever takes a busy shard has an hour to go over.
const REST: u32 = 3;

pub struct Reconciler {
    pub database: Database,
    pub router: Arc<Router>,
    /// How far each shard was gone over, under the epoch it is held.
    pub reached: HashMap<Shard, (ShardEpoch, FlightSeq)>,
    /// Open flights that nobody had in hand at the last look: their opening may have been under way.
    pub adrift: HashSet<(Shard, ShardEpoch, FlightSeq)>,
}

impl Reconciler {
    pub async fn run(mut self, stop: CancellationToken) {
        while let Some(session) = outage::reconnect(&self.database, "reconciler", &stop).await {
            tokio::select! {
                () = stop.cancelled() => return,
                error = self.rounds(&session) => match error {
                    error if error.is_disconnect() => {
                        tracing::debug!(error = %report(&error), "reconciling waits for the database")
                    }
                    error => tracing::warn!(error = %report(&error), "flights could not be gone over"),
                }
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(EVERY) => {}
            }
        }
    }

    /// Goes over the flights again and again; gives why it could not any more.
    async fn rounds(&mut self, session: &Session) -> Error {
        loop {
            tokio::time::sleep(EVERY).await;
            let leases = self.router.leases();
            if let Err(error) = self.closed(session, &leases).await {
                return error;
            }
            if let Err(error) = self.open(session.client(), &leases).await {
                return error;
            }
        }
    }

    /// Every closed flight up to the newest, or the first that is open.
    async fn closed(&mut self, session: &Session, leases: &[Arc<ShardLease>]) -> Result<()> {
        let client = session.client();
        let mut shards = Vec::new();
        for lease in leases {
            let after = match self.reached.get(&lease.shard) {
                Some((epoch, seq)) if *epoch == lease.epoch => *seq,
                _ => reconcile::start(client, lease.shard).await?,
            };
            self.reached.insert(lease.shard, (lease.epoch, after));
            shards.push((Unreconciled { shard: lease.shard, epoch: lease.epoch, after }, lease.newest_flight()));
        }
        loop {
            shards.retain(|(shard, newest)| shard.after < *newest);
            let asked: Vec<Unreconciled> = shards.iter().map(|(shard, _)| *shard).collect();
            if asked.is_empty() {
                return Ok(());
            }
            let began = Instant::now();
            let done = reconcile::reconcile(session, &asked).await?;
            let took = began.elapsed();
            shards.retain_mut(|(shard, _)| match done.get(&shard.shard) {
                Some(reconciled) => {
                    shard.after = reconciled.up_to;
                    true
                }
                None => false,
            });
            for (shard, reconciled) in done {
                self.reached.entry(shard).and_modify(|(_, seq)| *seq = reconciled.up_to);
                if reconciled.found > 0 {
                    let detail = format!(
                        "{} deliveries of closed flights up to {} had neither fact nor parked row; they are tried again",
                        reconciled.found, reconciled.up_to
                    );
                    unaccounted(client, shard, reconciled.found, &detail).await?;
                }
            }
            tokio::time::sleep(REST * took).await;
        }
    }

    /// Open flights that have been in nobody's hands since the last look.
    async fn open(&mut self, client: &Client, leases: &[Arc<ShardLease>]) -> Result<()> {
        let known = std::mem::take(&mut self.adrift);
        for lease in leases {
            let Some((_, reached)) = self.reached.get(&lease.shard) else { continue };
            if *reached >= lease.newest_flight() {
                continue;
            }
            for seq in flights::open_under(client, lease.shard, lease.epoch, *reached).await? {
                let (flight, in_air) = ((lease.shard, lease.epoch, seq), lease.is_in_air(seq));
                // Asked afterwards: with a lease everything under it is let go of, and whoever takes the shard sees to it.
                if !lease.is_alive() {
                    break;
                }
                match (in_air, known.contains(&flight)) {
                    (true, _) => {}
                    (false, false) => {
                        self.adrift.insert(flight);
                    }
                    (false, true) => end_adrift(client, lease, seq).await?,
                }
            }
        }
        Ok(())
    }
}

/// A flight that is open in the database and in nobody's hands: an outcome of it could not be written, or was written
/// and forgotten by a database that failed over. What it has neither fact nor parked row of is tried again.
async fn end_adrift(client: &Client, lease: &ShardLease, seq: FlightSeq) -> Result<()> {
    let lost = flights::close_lost(client, lease.shard, seq, lease.epoch).await?;
    let found = lost.retried + lost.in_doubt;
    if found == 0 {
        return Ok(());
    }
    let detail = format!(
        "flight {} was open and in nobody's hands; {} deliveries are tried again, {} are in doubt",
        seq.0, lost.retried, lost.in_doubt
    );
    unaccounted(client, lease.shard, found, &detail).await
}

async fn unaccounted(client: &Client, shard: Shard, found: u64, detail: &str) -> Result<()> {
    metrics::counter!("fencepost_unaccounted_total").increment(found);
    alarms::raise(client, alarms::Alarm::Unaccounted, &format!("shard {shard}"), detail).await
}
