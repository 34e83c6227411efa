//! Going over flights behind the relay's back: closed ones that say nothing of a delivery, open ones that nobody has in
//! hand.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use deadpool_postgres::Pool;
use tokio_util::sync::CancellationToken;

use super::lease::ShardLease;
use super::router::Router;
use crate::edge::error::report;
use crate::model::key::{FlightSeq, Shard, ShardEpoch};
use crate::store::{Result, alarms, flights, reconcile};

/// How often closed flights are gone over.
const EVERY: Duration = Duration::from_secs(5);

pub struct Reconciler {
    pub pool: Pool,
    pub router: Arc<Router>,
    /// How far each shard was gone over, under the epoch it is held.
    pub reached: HashMap<Shard, (ShardEpoch, FlightSeq)>,
    /// Open flights that nobody had in hand at the last look: their opening may have been under way.
    pub adrift: HashSet<(Shard, ShardEpoch, FlightSeq)>,
}

impl Reconciler {
    pub async fn run(mut self, stop: CancellationToken) {
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(EVERY) => {}
            }
            match self.go_over().await {
                Ok(()) => {}
                Err(error) if error.is_disconnect() => {
                    tracing::debug!(error = %report(&error), "reconciling waits for the database")
                }
                Err(error) => tracing::warn!(error = %report(&error), "closed flights could not be gone over"),
            }
        }
    }

    async fn go_over(&mut self) -> Result<()> {
        let client = self.pool.get().await?;
        let known = std::mem::take(&mut self.adrift);
        for lease in self.router.leases() {
            let mut reached = match self.reached.get(&lease.shard) {
                Some((epoch, seq)) if *epoch == lease.epoch => *seq,
                _ => reconcile::start(&client, lease.shard).await?,
            };
            while reached < lease.newest_flight() {
                let done = reconcile::reconcile(&client, lease.shard, lease.epoch, reached).await?;
                metrics::counter!("fencepost_unaccounted_total").increment(done.found);
                if done.found > 0 {
                    let detail = format!(
                        "{} deliveries of closed flights up to {} had neither fact nor parked row; they are tried again",
                        done.found, done.up_to
                    );
                    alarms::raise(&client, alarms::Alarm::Unaccounted, &format!("shard {}", lease.shard), &detail)
                        .await?;
                }
                if done.up_to == reached {
                    break;
                }
                reached = done.up_to;
            }
            self.reached.insert(lease.shard, (lease.epoch, reached));
            for seq in flights::open_under(&client, lease.shard, lease.epoch, reached).await? {
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
                    (false, true) => end_adrift(&client, &lease, seq).await?,
                }
            }
        }
        Ok(())
    }
}

/// A flight that is open in the database and in nobody's hands: an outcome of it could not be written, or was written
/// and forgotten by a database that failed over. What it has neither fact nor parked row of is tried again.
async fn end_adrift(client: &tokio_postgres::Client, lease: &ShardLease, seq: FlightSeq) -> Result<()> {
    let lost = flights::close_lost(client, lease.shard, seq, lease.epoch).await?;
    let found = lost.retried + lost.in_doubt;
    if found == 0 {
        return Ok(());
    }
    metrics::counter!("fencepost_unaccounted_total").increment(found);
    let detail = format!(
        "flight {} was open and in nobody's hands; {} deliveries are tried again, {} are in doubt",
        seq.0, lost.retried, lost.in_doubt
    );
    alarms::raise(client, alarms::Alarm::Unaccounted, &format!("shard {}", lease.shard), &detail).await
}
