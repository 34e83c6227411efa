//! Going over closed flights behind the relay's back.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use deadpool_postgres::Pool;
use tokio_util::sync::CancellationToken;

use super::router::Router;
use crate::edge::error::report;
use crate::model::key::{FlightSeq, Shard, ShardEpoch};
use crate::store::{Result, alarms, reconcile};

/// How often closed flights are gone over.
const EVERY: Duration = Duration::from_secs(5);

pub struct Reconciler {
    pub pool: Pool,
    pub router: Arc<Router>,
    /// How far each shard was gone over, under the epoch it is held.
    pub reached: HashMap<Shard, (ShardEpoch, FlightSeq)>,
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
        }
        Ok(())
    }
}
