//! Workers on leased tasks: some hang past their lease, some die, some complete twice, some come with an old epoch.

use std::sync::Arc;
use std::time::Duration;

use fencepost::model::key::TaskId;
use fencepost::producer::{self, ErrorKind, Lease, NewTask, Worker};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::json;
use tokio::task::JoinSet;
use tokio_postgres::Client;
use tokio_util::sync::CancellationToken;

use crate::producers::{Claimed, Log, Part, Told, loose_effect, told};
use crate::stage::connect;

const WORKERS: u64 = 3;
const LEASE: Duration = Duration::from_millis(1_500);

/// Submits tasks and works on them until `stop`.
pub async fn run(log: Arc<Log>, url: String, seed: u64, stop: CancellationToken) {
    let mut workers = JoinSet::new();
    for number in 0..WORKERS {
        let hand = Hand {
            log: Arc::clone(&log),
            url: url.clone(),
            number,
            submitted: 0,
            rng: StdRng::seed_from_u64(seed ^ (0xbee5 + number)),
        };
        workers.spawn(hand.run(stop.clone()));
    }
    workers.join_all().await;
}

struct Hand {
    log: Arc<Log>,
    url: String,
    number: u64,
    submitted: u64,
    rng: StdRng,
}

impl Hand {
    async fn run(mut self, stop: CancellationToken) {
        // Two of them share a name: the epoch alone tells them apart.
        let worker = Worker::new(format!("worker-{}", self.number / 2)).lease(LEASE);
        while !stop.is_cancelled() {
            let Ok(mut client) = connect(&self.url).await else {
                tokio::time::sleep(Duration::from_millis(200)).await;
                continue;
            };
            while !stop.is_cancelled() && !client.is_closed() {
                // Every failure is the database's to undo.
                let _ = self.turn(&mut client, &worker).await;
            }
        }
    }

    async fn turn(&mut self, client: &mut Client, worker: &Worker) -> anyhow::Result<()> {
        self.submitted += 1;
        let id = TaskId::new(format!("w{}-{}", self.number, self.submitted))?;
        producer::submit(client, &NewTask::new("campaign", json!({})).id(id)).await?;
        for lease in worker.claim(client, 2).await? {
            let (task, epoch) = (lease.task_id.as_str().to_owned(), lease.epoch.get());
            self.log.claimed(Claimed { task, epoch, at: self.log.history.tick() });
            self.work(client, &lease).await?;
        }
        tokio::time::sleep(Duration::from_millis(self.rng.random_range(50..250))).await;
        Ok(())
    }

    async fn work(&mut self, client: &mut Client, lease: &Lease) -> anyhow::Result<()> {
        match self.rng.random_range(0..100) {
            0..=4 => lease.fail(client, "the campaign fails it", Some(Duration::from_millis(100))).await?,
            5..=9 => lease.release(client, "the campaign gives it back").await?,
            // Never heard of again.
            10..=14 => {}
            15..=22 => {
                tokio::time::sleep(LEASE + Duration::from_millis(self.rng.random_range(0..1_500))).await;
                self.complete(client, lease).await?;
            }
            23..=27 => {
                self.complete(client, lease).await?;
                self.complete(client, lease).await?;
            }
            28..=33 => {
                if self.complete(client, lease).await? == Told::Committed {
                    // The same task does something else, under the next epoch.
                    let sql = "select fencepost.reopen_task($1, 'campaign', true)";
                    client.execute(sql, &[&lease.task_id.as_str()]).await?;
                }
            }
            _ => drop(self.complete(client, lease).await?),
        }
        Ok(())
    }

    async fn complete(&mut self, client: &mut Client, lease: &Lease) -> anyhow::Result<Told> {
        let key = format!("{}:{}", lease.task_id.as_str(), lease.epoch);
        let (effect, intent) = loose_effect(&mut self.rng, key);
        let part = format!("{}-{}-{}", lease.task_id.as_str(), lease.epoch, self.rng.random::<u32>());
        let begun = self.log.history.tick();
        let tx = client.transaction().await?;
        tx.execute("insert into campaign.business (part) values ($1)", &[&part]).await?;
        let lease_of = Some((lease.task_id.as_str().to_owned(), lease.epoch.get()));
        let ticket = self.log.intend(Part { part, intents: vec![intent], told: None, lease: lease_of, begun });
        let end = match lease.complete(&tx, &[effect], None).await {
            Ok(_) => told(tx.commit().await),
            Err(error) => {
                let refused = matches!(error.kind(), ErrorKind::LeaseLost | ErrorKind::AlreadyCompleted);
                self.log.history.note("completion refused", json!({ "lost": refused, "error": error.to_string() }));
                let _ = tx.rollback().await;
                Told::Aborted
            }
        };
        self.log.told(ticket, end);
        Ok(end)
    }
}
