//! Which dispatcher serves which consumer, and keeping it as the database says, within a second.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::attempt::{Served, Shared};
use super::delivery::Delivery;
use super::dispatcher::{Command, Dispatcher};
use super::lease::ShardLease;
use super::options::BreakerOptions;
use super::settler::{Settlement, Verdict};
use super::{attempt, outage};
use crate::edge::amqp::token::AckKey;
use crate::edge::error::report;
use crate::edge::sign::Fingerprint;
use crate::edge::{Edge, Reach};
use crate::model::consumer::{Consumer, ConsumerEntry, Ordering};
use crate::model::key::{ConsumerId, Shard, ShardEpoch};
use crate::model::token::Waiting;
use crate::store::gates::ConsumerState;
use crate::store::lags::{self, Range};
use crate::store::settle::{Durability, Parking};
use crate::store::{self, Database, alarms, gates, parking};

/// How often the consumers' shared state is read again.
const REFRESH_EVERY: Duration = Duration::from_secs(1);

pub struct Router {
    shared: Arc<Shared>,
    reach: Reach,
    keys: Arc<AckKey>,
    park_after: Duration,
    breaker: BreakerOptions,
    table: Mutex<Table>,
    /// Held while a shard or a consumer joins, so that each new lane meets every shard and each shard every lane.
    roster: tokio::sync::Mutex<()>,
    /// Rung when a consumer was declared or changed.
    pub changed: Notify,
}

#[derive(Default)]
struct Table {
    dispatchers: HashMap<ConsumerId, Entry>,
    leases: HashMap<Shard, Arc<ShardLease>>,
    tasks: Vec<JoinHandle<()>>,
}

struct Entry {
    known: ConsumerState,
    /// Of its secrets when its edge was built, or could not be.
    secrets: Fingerprint,
    /// `None` until its declaration and its secrets can be used.
    dispatcher: Option<Dispatcher>,
}

impl Router {
    pub fn new(
        shared: Arc<Shared>,
        reach: Reach,
        keys: Arc<AckKey>,
        park_after: Duration,
        breaker: BreakerOptions,
    ) -> Self {
        Self {
            shared,
            reach,
            keys,
            park_after,
            breaker,
            table: Mutex::default(),
            roster: tokio::sync::Mutex::default(),
            changed: Notify::new(),
        }
    }

    fn table(&self) -> std::sync::MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands deliveries to their consumers. Those nobody serves yet are parked until somebody does.
    pub fn route(&self, deliveries: Vec<Delivery>) {
        let mut by_consumer: HashMap<ConsumerId, Vec<Delivery>> = HashMap::new();
        for delivery in deliveries {
            by_consumer.entry(delivery.consumer).or_default().push(delivery);
        }
        for (consumer, deliveries) in by_consumer {
            match self.dispatcher(consumer) {
                Some(dispatcher) => dispatcher.tell(Command::Offer(deliveries)),
                None => deliveries.into_iter().for_each(|delivery| self.park_unserved(delivery)),
            }
        }
    }

    fn park_unserved(&self, delivery: Delivery) {
        // Parked by key: should the consumer turn out to order, its order is kept.
        let parking = Parking::waiting(Waiting::Backlog, Some(Duration::ZERO), "its consumer cannot be served now");
        let row = attempt::park_row(&delivery, Ordering::Key, parking);
        let durability = Durability::Lazy;
        self.shared.settler.settle(Settlement { delivery, verdict: Verdict::Park(row), end: None, durability });
    }

    fn dispatcher(&self, consumer: ConsumerId) -> Option<Dispatcher> {
        self.table().dispatchers.get(&consumer)?.dispatcher.clone()
    }

    pub fn dispatchers(&self) -> Vec<(ConsumerId, Dispatcher)> {
        let table = self.table();
        table.dispatchers.iter().filter_map(|(id, entry)| Some((*id, entry.dispatcher.clone()?))).collect()
    }

    /// The consumers served now, as they are declared.
    pub fn consumers(&self) -> Vec<Consumer> {
        let table = self.table();
        let served = table.dispatchers.values().filter(|entry| entry.dispatcher.is_some());
        served.filter_map(|entry| declared(&entry.known).ok()).collect()
    }

    /// A shard is ours: every lane begins, before anything of the shard is read.
    pub async fn acquired(
        &self,
        lease: &Arc<ShardLease>,
        blocked: Vec<(Shard, ConsumerId, String, u64)>,
        lags: Vec<(ConsumerId, Range)>,
    ) {
        let mut lags: HashMap<ConsumerId, Range> = lags.into_iter().collect();
        let _joining = self.roster.lock().await;
        let mut table = self.table();
        table.leases.insert(lease.shard, Arc::clone(lease));
        let mut keys: HashMap<ConsumerId, Vec<(String, u64)>> = HashMap::new();
        for (_, consumer, key, count) in blocked.into_iter().filter(|(shard, ..)| *shard == lease.shard) {
            keys.entry(consumer).or_default().push((key, count));
        }
        for (id, entry) in &table.dispatchers {
            if let Some(dispatcher) = &entry.dispatcher {
                let blocked = keys.remove(id).unwrap_or_default();
                dispatcher.tell(Command::Acquired { lease: Arc::clone(lease), blocked, lag: lags.remove(id) });
            }
        }
    }

    /// A shard is no longer ours under this epoch. One that was taken again meanwhile is not touched.
    pub fn lost(&self, shard: Shard, epoch: ShardEpoch) {
        let mut table = self.table();
        if table.leases.get(&shard).is_some_and(|lease| lease.epoch == epoch) {
            table.leases.remove(&shard);
        }
        for entry in table.dispatchers.values() {
            if let Some(dispatcher) = &entry.dispatcher {
                dispatcher.tell(Command::Lost { shard, epoch });
            }
        }
    }

    pub fn lease(&self, shard: Shard) -> Option<Arc<ShardLease>> {
        self.table().leases.get(&shard).cloned()
    }

    pub fn leases(&self) -> Vec<Arc<ShardLease>> {
        self.table().leases.values().cloned().collect()
    }

    /// The shard is to be handed over.
    pub fn yield_shard(&self, shard: Shard) {
        for entry in self.table().dispatchers.values() {
            if let Some(dispatcher) = &entry.dispatcher {
                dispatcher.tell(Command::Yield { shard });
            }
        }
    }

    /// Reads the consumers once and makes the dispatchers agree.
    pub async fn refresh(&self, client: &tokio_postgres::Client) -> store::Result<()> {
        let asked = Instant::now();
        for state in gates::states(client).await? {
            let (paused, shut_for) = (state.paused, state.shut_for);
            let shared_state = || Command::State { asked, paused, shut_for };
            let secrets = Fingerprint::of(secret_files(&state.spec));
            let known =
                self.table().dispatchers.get(&state.id).map(|entry| {
                    (entry.known.spec == state.spec && entry.secrets == secrets, entry.dispatcher.clone())
                });
            match known {
                Some((true, dispatcher)) => dispatcher.iter().for_each(|dispatcher| dispatcher.tell(shared_state())),
                Some((false, dispatcher)) => self.serve(client, state, dispatcher, secrets, asked).await?,
                None => self.serve(client, state, None, secrets, asked).await?,
            }
        }
        Ok(())
    }

    /// Starts or changes a consumer's dispatcher by its declaration and its secrets.
    async fn serve(
        &self,
        client: &tokio_postgres::Client,
        state: ConsumerState,
        running: Option<Dispatcher>,
        secrets: Fingerprint,
        asked: Instant,
    ) -> store::Result<()> {
        let _joining = self.roster.lock().await;
        let command = Command::State { asked, paused: state.paused, shut_for: state.shut_for };
        let served = match self.build(&state) {
            Ok(served) => served,
            Err(why) => {
                alarms::raise(client, alarms::Alarm::ConsumerUnusable, &state.name, &why).await?;
                // What runs goes on with the declaration that worked, until either changes again.
                if let Some(dispatcher) = &running {
                    dispatcher.tell(command);
                }
                self.table().dispatchers.insert(state.id, Entry { known: state, secrets, dispatcher: running });
                return Ok(());
            }
        };
        alarms::resolve(client, alarms::Alarm::ConsumerUnusable, &state.name).await?;
        let dispatcher = match running {
            Some(dispatcher) => {
                dispatcher.tell(Command::Serve(Arc::new(served)));
                dispatcher
            }
            None => self.start(client, &state, served).await?,
        };
        dispatcher.tell(command);
        self.table().dispatchers.insert(state.id, Entry { known: state, secrets, dispatcher: Some(dispatcher) });
        Ok(())
    }

    async fn start(
        &self,
        client: &tokio_postgres::Client,
        state: &ConsumerState,
        served: Served,
    ) -> store::Result<Dispatcher> {
        let leases: Vec<_> = self.table().leases.values().cloned().collect();
        let shards: Vec<Shard> = leases.iter().map(|lease| lease.shard).collect();
        let blocked = parking::blocked_keys(client, &shards).await?;
        let (dispatcher, task) =
            Dispatcher::start(Arc::new(served), Arc::clone(&self.shared), self.park_after, self.breaker.clone());
        for lease in leases {
            let mine = blocked.iter().filter(|(shard, consumer, ..)| *shard == lease.shard && *consumer == state.id);
            let blocked = mine.map(|(_, _, key, count)| (key.clone(), *count)).collect();
            let lag = lags::ranges(client, lease.shard).await?.into_iter().find(|(consumer, _)| *consumer == state.id);
            dispatcher.tell(Command::Acquired { lease, blocked, lag: lag.map(|(_, range)| range) });
        }
        self.table().tasks.push(task);
        Ok(dispatcher)
    }

    fn build(&self, state: &ConsumerState) -> Result<Served, String> {
        let consumer = declared(state)?;
        let edge = Edge::new(&consumer, &self.reach, &self.keys).map_err(|error| report(&error))?;
        Ok(Served { consumer, edge })
    }

    /// Tells every dispatcher to start nothing more, and waits for what is out.
    pub async fn drain(&self) {
        let tasks = {
            let mut table = self.table();
            for entry in table.dispatchers.values() {
                if let Some(dispatcher) = &entry.dispatcher {
                    dispatcher.tell(Command::Drain);
                }
            }
            std::mem::take(&mut table.tasks)
        };
        for task in tasks {
            if let Err(error) = task.await {
                tracing::error!(error = %report(&error), "a dispatcher failed");
            }
        }
    }
}

/// The consumer a declaration makes.
fn declared(state: &ConsumerState) -> Result<Consumer, String> {
    let entry: ConsumerEntry = serde_json::from_value(state.spec.clone()).map_err(|error| error.to_string())?;
    entry.check(state.id).map_err(|faults| {
        let faults = faults.iter().map(|fault| format!("{}: {}; write {}", fault.key, fault.wrong, fault.write));
        faults.collect::<Vec<_>>().join("; ")
    })
}

/// The files a declaration reads its secrets from. What comes from the environment cannot change.
fn secret_files(spec: &serde_json::Value) -> impl Iterator<Item = &Path> {
    ["secret_file", "previous_secret_file"].into_iter().filter_map(|key| spec.get(key)?.as_str()).map(Path::new)
}

/// Keeps the consumers as the database says until `stop`.
pub async fn watch(router: Arc<Router>, database: Database, stop: CancellationToken) {
    while let Some(session) = outage::reconnect(&database, "consumers", &stop).await {
        loop {
            if let Err(error) = router.refresh(session.client()).await {
                if !error.is_disconnect() {
                    tracing::warn!(error = %report(&error), "the consumers could not be read");
                }
                break;
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = router.changed.notified() => {}
                () = tokio::time::sleep(REFRESH_EVERY) => {}
            }
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
