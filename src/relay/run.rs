//! A relay from start to end.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::attempt::Shared;
use super::clock::DatabaseClock;
use super::delivery::{ByteBudget, Hand};
use super::doorbell::{self, Doorbell};
use super::health::Health;
use super::keeper::Keeper;
use super::launch::Launcher;
use super::loader::Loader;
use super::options::Options;
use super::outage;
use super::reader::Reader;
use super::reconciler::Reconciler;
use super::replies::Replies;
use super::retention;
use super::router::{self, Router};
use super::settler::Settler;
use super::traffic::Traffic;
use crate::edge::Reach;
use crate::edge::amqp::token::AckKey;
use crate::store::{Database, Result, replies, schema};

/// Connections for calls that keep no session state.
const POOL_SIZE: usize = 4;
/// What may be waited for at the end, beyond the grace.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// Runs a relay until `stop` is cancelled: then no flight is opened any more, what is out is waited for within
/// `shutdown_grace`, the rest is parked, and the shards are given up. Where its history is `over`, nothing is waited for
/// and nothing more is written.
///
/// # Errors
/// The schema is missing, older or newer than this build. A database that is away is waited for.
pub async fn run(
    database: Database,
    options: Options,
    reach: Reach,
    health: Arc<Health>,
    stop: CancellationToken,
    over: CancellationToken,
) -> Result<()> {
    let relay = Uuid::now_v7();
    let Some(session) = outage::reconnect(&database, "relay", &stop).await else { return Ok(()) };
    schema::check(session.client()).await?;
    let identity = replies::identity(session.client()).await?;
    let keys = Arc::new(AckKey::new(identity.deployment, identity.secret));
    let now = session.client().query_one("-- store::now\nselect clock_timestamp()", &[]).await?.get(0);
    tracing::info!(%relay, name = %options.name, version = env!("CARGO_PKG_VERSION"), "relay starts");

    let abandon = over.child_token();
    let bell = Arc::new(Doorbell::default());
    let (settler, writing) = Settler::start(database.clone(), relay, Arc::clone(&bell), abandon.clone());
    let shared = Arc::new(Shared {
        settler: settler.clone(),
        pool: database.pool(POOL_SIZE),
        health: Arc::clone(&health),
        clock: DatabaseClock::new(now),
        retry: options.retry.clone(),
        suspects: Semaphore::new(1),
        relays: Arc::new(AtomicUsize::new(1)),
        abandon: over.child_token(),
    });
    let router = Arc::new(Router::new(
        Arc::clone(&shared),
        reach.clone(),
        Arc::clone(&keys),
        options.park_after,
        options.breaker.clone(),
    ));
    router.refresh(session.client()).await?;
    drop(session);

    let (commands, told) = mpsc::unbounded_channel();
    let release = CancellationToken::new();
    let keeper = Keeper {
        database: database.clone(),
        relay,
        name: options.name.clone(),
        lease: options.shard_lease,
        renew_every: options.renew_every,
        clock: shared.clock.clone(),
        router: Arc::clone(&router),
        settler: settler.clone(),
        bell: Arc::clone(&bell),
        health: Arc::clone(&health),
        relays: Arc::clone(&shared.relays),
        reader: commands,
        held: HashMap::new(),
        peers: Vec::new(),
    };
    let budget = ByteBudget::new(options.bytes_in_flight);
    let reader = Reader {
        database: database.clone(),
        relay,
        options: options.clone(),
        clock: shared.clock.clone(),
        launcher: Launcher { router: Arc::clone(&router), settler: settler.clone(), budget: budget.clone() },
        bell: Arc::clone(&bell),
        health,
        shards: BTreeMap::new(),
        leaving: Vec::new(),
        unanswered: None,
        seen: None,
        traffic: Traffic::new(options.awake_after, Instant::now()),
        poll: options.poll_min,
    };
    let loader = Loader {
        pool: shared.pool.clone(),
        router: Arc::clone(&router),
        bell: Arc::clone(&bell),
        hand: Hand::default(),
        settler: settler.clone(),
        budget,
        empty_until: Instant::now(),
    };

    let keeping = tokio::spawn(keeper.run(stop.clone(), release.clone()));
    let reading = tokio::spawn(reader.run(told, stop.clone()));
    let loading = tokio::spawn(loader.run(stop.clone()));
    let reconciler = Reconciler {
        database: database.clone(),
        router: Arc::clone(&router),
        reached: HashMap::new(),
        adrift: HashSet::new(),
    };
    let reconciling = tokio::spawn(reconciler.run(stop.clone()));
    let replies = Replies {
        database: database.clone(),
        router: Arc::clone(&router),
        reach,
        keys,
        retry: options.retry.clone(),
        bell: Arc::clone(&bell),
    };
    let replying = tokio::spawn(replies.run(stop.clone()));
    let retaining = tokio::spawn(retention::run(database.clone(), stop.clone()));
    let watching = tokio::spawn(router::watch(Arc::clone(&router), database.clone(), stop.clone()));
    let listening = tokio::spawn(doorbell::keep(bell, Arc::clone(&router), database, stop.clone()));

    stop.cancelled().await;
    tracing::info!(grace = ?options.shutdown_grace, "relay stops: no new flights, what is out is waited for");
    for task in [reading, loading, reconciling, replying, retaining, watching, listening] {
        finish(task, "a task").await;
    }
    if tokio::time::timeout(options.shutdown_grace, router.drain()).await.is_err() {
        tracing::warn!("the grace is over; attempts that are still out end without an answer");
        shared.abandon.cancel();
        // The dispatchers end by themselves now; their outcomes reach the settler before it is asked to flush.
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    if tokio::time::timeout(LAST_WORDS, settler.flush()).await.is_err() {
        tracing::warn!(
            "the database is away: outcomes of open flights stay unwritten and their deliveries are tried again"
        );
        abandon.cancel();
    }
    release.cancel();
    finish(keeping, "shards").await;
    drop((router, settler, shared));
    finish(writing, "settler").await;
    tracing::info!(%relay, "relay stopped");
    Ok(())
}

async fn finish(task: tokio::task::JoinHandle<()>, who: &str) {
    match tokio::time::timeout(LAST_WORDS, task).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::error!(who, %error, "a task of the relay failed"),
        Err(_) => tracing::warn!(who, "a task of the relay did not end in time"),
    }
}
