//! The workers: they claim, work under their leases, and complete; some hang past their lease and some die.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use futures_util::future::try_join_all;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::task::JoinSet;
use tokio_postgres::{Client, Transaction};

use super::consumers::BILLING;
use super::input::Bodies;
use super::site::Site;
use super::{Error, Result};
use crate::model::key::{EffectKey, KeyError, TaskId};
use crate::producer::{self, Effect, ErrorKind, Lease, NewTask, Payload, Worker};
use crate::store::Database;

pub const WORKERS: u32 = 8;
const LEASE: Duration = Duration::from_secs(2);
const BATCH: u32 = 8;
const IDLE: Duration = Duration::from_millis(50);

/// What the workers did, by their own count.
#[derive(Default)]
pub struct Tally {
    completed: AtomicU64,
    promised: AtomicU64,
    paused: AtomicU64,
    killed: AtomicU64,
    lease_losses: AtomicU64,
}

impl Tally {
    pub fn completed(&self) -> u64 {
        self.completed.load(Relaxed)
    }

    /// Deliveries that committed.
    pub fn promised(&self) -> u64 {
        self.promised.load(Relaxed)
    }

    pub fn paused(&self) -> u64 {
        self.paused.load(Relaxed)
    }

    pub fn killed(&self) -> u64 {
        self.killed.load(Relaxed)
    }

    /// Completions that were refused because somebody else held a newer epoch.
    pub fn lease_losses(&self) -> u64 {
        self.lease_losses.load(Relaxed)
    }
}

/// Submits the tasks of these numbers.
pub async fn submit(site: &Site, numbers: &[u32]) -> Result<()> {
    let mut client = site.database.connect().await?;
    let tx = client.transaction().await?;
    let kind = site.kind();
    for chunk in numbers.chunks(200) {
        let new = |n: &u32| {
            let id = TaskId::new(site.task_id(*n))?;
            Ok::<_, KeyError>(NewTask::new(&kind, json!({ "n": n })).id(id))
        };
        let new: Vec<_> = chunk.iter().map(new).collect::<Result<_, _>>().map_err(bug)?;
        try_join_all(new.iter().map(|task| producer::submit(&tx, task))).await?;
    }
    Ok(tx.commit().await?)
}

/// A pool of workers that replaces those that die.
pub struct Crew {
    job: Arc<Job>,
    workers: JoinSet<Result<End>>,
    born: u32,
}

/// What each worker needs.
struct Job {
    database: Database,
    /// What its workers' names begin with: several crews may work for one run.
    name: String,
    kind: String,
    schema: String,
    bodies: Arc<Bodies>,
    /// Whom the topic of the run reaches.
    subscribers: Vec<&'static str>,
    until: Until,
    tally: Tally,
}

/// When the work is over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Until {
    /// No task of the run is ready or running.
    NothingLeft,
    /// The crew is dropped.
    Stopped,
}

/// How a worker's life ended.
enum End {
    NothingLeft,
    Killed,
}

/// What befalls a task when it is claimed for the first time.
enum Fate {
    Complete,
    NoAction,
    FailOnce,
    Release,
    /// The worker hangs until its lease has expired, and then completes as if nothing had happened.
    Pause,
    /// The worker dies with the completion made and not committed.
    Die,
}

impl Fate {
    fn of(n: u32, lease: &Lease) -> Self {
        let first = lease.previous.is_none();
        match n {
            n if n % 25 == 3 => Self::NoAction,
            n if first && n % 40 == 7 => Self::FailOnce,
            n if first && n % 50 == 11 => Self::Release,
            n if first && n % 400 == 13 => Self::Pause,
            n if first && n % 500 == 38 => Self::Die,
            _ => Self::Complete,
        }
    }
}

impl Crew {
    pub fn start(site: &Site, bodies: &Arc<Bodies>, until: Until) -> Self {
        let job = Arc::new(Job {
            database: site.database.clone(),
            name: format!("{}worker-{:04x}", site.prefix(), rand::random::<u16>()),
            kind: site.kind(),
            schema: site.schema(),
            bodies: bodies.clone(),
            subscribers: site.subscribers(),
            until,
            tally: Tally::default(),
        });
        let mut crew = Self { job, workers: JoinSet::new(), born: 0 };
        (0..WORKERS).for_each(|_| crew.hire());
        crew
    }

    pub fn tally(&self) -> &Tally {
        &self.job.tally
    }

    pub fn is_done(&self) -> bool {
        self.workers.is_empty()
    }

    /// Replaces the dead; an error of a worker is the run's.
    pub fn check(&mut self) -> Result<()> {
        while let Some(ended) = self.workers.try_join_next() {
            match ended.map_err(|e| bug(std::io::Error::other(e)))?? {
                End::NothingLeft => {}
                End::Killed => self.hire(),
            }
        }
        Ok(())
    }

    /// Replaces the dead and those that failed; tells how they failed.
    pub fn tend(&mut self) -> Vec<Error> {
        let mut failed = Vec::new();
        while let Some(ended) = self.workers.try_join_next() {
            failed.extend(ended.map_err(|e| bug(std::io::Error::other(e))).and_then(|end| end.map(|_| ())).err());
            self.hire();
        }
        failed
    }

    fn hire(&mut self) {
        let owner = format!("{}-{}", self.job.name, self.born);
        self.born += 1;
        let job = self.job.clone();
        self.workers.spawn(async move { job.work(owner).await });
    }
}

impl Job {
    async fn work(&self, owner: String) -> Result<End> {
        let mut client = self.database.connect().await?;
        let worker = Worker::new(owner).lease(LEASE).kinds(&[&self.kind]);
        loop {
            let leases = worker.claim(&client, BATCH).await?;
            if leases.is_empty() {
                if self.until == Until::NothingLeft && self.unfinished(&client).await? == 0 {
                    return Ok(End::NothingLeft);
                }
                tokio::time::sleep(IDLE).await;
            }
            for lease in &leases {
                match self.turn(&mut client, lease).await {
                    Ok(Some(end)) => return Ok(end),
                    Ok(None) => {}
                    // The transaction is rolled back; whoever holds the newer epoch does the work.
                    Err(Error::Producer(refused)) if refused.kind() == ErrorKind::LeaseLost => {
                        self.tally.lease_losses.fetch_add(1, Relaxed);
                        worker.report_lease_lost(&client).await?;
                    }
                    Err(error) => return Err(error),
                }
            }
        }
    }

    async fn turn(&self, client: &mut Client, lease: &Lease) -> Result<Option<End>> {
        let n = lease.payload.get("n").and_then(Value::as_u64).and_then(|n| u32::try_from(n).ok()).unwrap_or(0);
        let fate = Fate::of(n, lease);
        match fate {
            Fate::NoAction => {
                lease.complete_no_action(client, "the demo has nothing to say about this one").await?;
                self.tally.completed.fetch_add(1, Relaxed);
                return Ok(None);
            }
            Fate::FailOnce => {
                lease.fail(client, "the demo fails this one once", Some(Duration::from_millis(200))).await?;
                return Ok(None);
            }
            Fate::Release => {
                lease.release(client, "the demo gives this one back once").await?;
                return Ok(None);
            }
            Fate::Pause => {
                self.tally.paused.fetch_add(1, Relaxed);
                tokio::time::sleep(LEASE + LEASE / 4).await;
            }
            Fate::Complete | Fate::Die => {}
        }
        let tx = client.transaction().await?;
        let promised = self.complete(&tx, lease, n).await?;
        if let Fate::Die = fate {
            self.tally.killed.fetch_add(1, Relaxed);
            return Ok(Some(End::Killed));
        }
        tx.commit().await?;
        self.tally.promised.fetch_add(promised, Relaxed);
        self.tally.completed.fetch_add(1, Relaxed);
        Ok(None)
    }

    /// The business rows (here: what is promised to whom) and, last, the completion. Returns the deliveries.
    async fn complete(&self, tx: &Transaction<'_>, lease: &Lease, n: u32) -> Result<u64> {
        let body = self.bodies.of(n);
        let effect = |effect: Effect| effect.kind(&body.kind).content_type("application/json");
        let payload = || Payload::Text(body.text.clone());
        let mut effects = vec![effect(Effect::on(&self.kind, payload()))];
        let mut promised: Vec<(u32, &str)> = self.subscribers.iter().map(|consumer| (1, *consumer)).collect();
        if n.is_multiple_of(10) {
            effects.push(effect(Effect::to(BILLING, payload())));
            promised.push((2, BILLING));
        }
        let (mut keys, mut consumers) = (Vec::new(), Vec::new());
        for (position, consumer) in &promised {
            keys.push(EffectKey::new(lease.task_id.clone(), lease.epoch, *position).map_err(bug)?.to_string());
            consumers.push(*consumer);
        }
        let sql = format!(
            "-- demo::promise
             insert into {}.promised (key, consumer, body_sha256)
             select p.key, p.consumer, $3 from unnest($1::text[], $2::text[]) p (key, consumer)",
            self.schema
        );
        tx.execute(&sql, &[&keys, &consumers, &Sha256::digest(&body.text).as_slice()]).await?;
        lease.complete(tx, &effects, None).await?;
        Ok(promised.len() as u64)
    }

    async fn unfinished(&self, client: &Client) -> Result<i64> {
        let sql = "-- demo::unfinished
                   select count(*) from fencepost.tasks where kind = $1 and status in ('ready', 'running')";
        Ok(client.query_one(sql, &[&self.kind]).await?.get(0))
    }
}

/// Something of the demo's own that cannot be.
fn bug(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::Io { what: "the demo itself".into(), source: std::io::Error::other(error) }
}
