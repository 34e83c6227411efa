//! Doing the faults, each in a task of its own, and healing them all at the end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fencepost::demo::embedded::guardian::Signal;
use fencepost::demo::embedded::rabbitmq::PrivateRabbitmq;
use serde_json::json;
use tokio::task::JoinSet;
use tokio_postgres::error::SqlState;

use crate::amqp::{self, Bindings};
use crate::consumers::{FIGURES, HTTP, Mood, PROFILES};
use crate::database;
use crate::fault_proxy::{Direction, Fault as Wire};
use crate::history::now;
use crate::operator;
use crate::pace::Outage;
use crate::plan::{Fault, Planned};
use crate::postgres_proxy::PostgresProxy;
use crate::producers::MARK;
use crate::stage::Stage;

/// A pause is longer than the lease of three seconds.
const PAST_THE_LEASE: Duration = Duration::from_millis(3_500);
/// What a busy machine may take on top to start the broker.
const SLOW_BOOT: Duration = Duration::from_secs(120);
/// How long one consumer is down, and effects of the late version still come back, when all else is healed.
const OUTAGE: Duration = Duration::from_secs(8);

/// Does everything planned, then heals. At the end, when nothing else is wrong, one consumer is down for a while.
pub async fn run(
    stage: Arc<Stage>,
    producers: Arc<PostgresProxy>,
    plan: Vec<Planned>,
    seed: u64,
    patience: Duration,
) -> anyhow::Result<Outage> {
    let started = tokio::time::Instant::now();
    let mut faults = JoinSet::new();
    for planned in plan {
        let (stage, producers) = (Arc::clone(&stage), Arc::clone(&producers));
        faults.spawn(async move {
            tokio::time::sleep_until(started + planned.at).await;
            stage.history.note("fault", json!(planned));
            if let Err(error) = harm(&stage, &producers, planned).await {
                // A fault may meet another, such as a session to end on a server that is down.
                stage.history.note("fault missed", json!({ "fault": planned.fault, "error": format!("{error:#}") }));
            }
            stage.history.note("healed", json!(planned.fault));
        });
    }
    while let Some(done) = faults.join_next().await {
        done?;
    }
    heal(&stage).await?;
    // Nothing else is wrong now, and the load goes on: what comes back does so amid much that does not.
    let down = usize::try_from(seed)? % HTTP;
    let outage = outage(&stage, down, patience).await?;
    amqp::bind(&stage.broker.url, Bindings::WithLate).await?;
    Ok(outage)
}

/// One consumer hears and never answers until the others have all that was theirs when it had lasted for a while, or get
/// nothing more. Nothing else is wrong but that each relay once is not told that it has opened a flight.
async fn outage(stage: &Stage, down: usize, patience: Duration) -> anyhow::Result<Outage> {
    let desk = &stage.consumers[down].desk;
    let (of, from) = (desk.profile.name, now());
    stage.history.note("outage", json!(of));
    stage.consumers.iter().for_each(|link| link.desk.calm(true));
    desk.feel(Mood::BlackHole);
    // No relay is lost after this: what one of them forgets now nobody sweeps up.
    for replica in &stage.replicas {
        replica.answers.swallow(MARK.as_bytes());
        replica.answers.swallow_answer_to("-- store::write_ahead");
    }
    let client = stage.connect().await?;
    let mut due = Vec::new();
    while due.is_empty() {
        tokio::time::sleep(OUTAGE).await;
        // Some of what the figures are sent comes back until all is over.
        due = database::due(&client, from).await?;
        due.retain(|due| due.consumer != of && due.consumer != FIGURES);
    }
    let (mut waiting, mut progress) = (due.clone(), Instant::now());
    while !waiting.is_empty() && progress.elapsed() < patience {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let before = waiting.len();
        waiting.retain(|due| !stage.link(&due.consumer).desk.has_received(&due.key));
        let effects: Vec<i64> = waiting.iter().map(|due| due.effect).collect();
        let ended = database::ended(&client, &effects).await?;
        waiting.retain(|due| !ended.contains(&(due.effect, due.consumer.clone())));
        if waiting.len() < before {
            progress = Instant::now();
        }
    }
    let until = now();
    desk.feel(Mood::Well);
    stage.consumers.iter().for_each(|link| link.desk.calm(false));
    let due = due.into_iter().map(|due| (due.key, due.consumer)).collect();
    Ok(Outage { of, until, due })
}

/// Ends every fault.
pub async fn heal(stage: &Stage) -> anyhow::Result<()> {
    for link in &stage.consumers {
        link.desk.feel(Mood::Well);
        link.desk.suffer(None);
        link.proxy.heal();
    }
    stage.broker.wire.heal();
    revive(stage).await?;
    amqp::bind(&stage.broker.url, Bindings::WithoutLate).await?;
    amqp::declare_replies(&stage.broker.url, &stage.broker.deployment).await?;
    for replica in &stage.replicas {
        replica.wire.heal();
        replica.spawn(&mut *replica.process.lock().await)?;
    }
    operator::command(stage, &["consumers", "resume", "--all"]).await?;
    stage.history.note("all healed", json!({}));
    Ok(())
}

/// A server whose fault met a machine too busy to start it in time is started again.
async fn revive(stage: &Stage) -> anyhow::Result<()> {
    let mut postgres = stage.postgres.lock().await;
    if stage.connect().await.is_err() {
        stage.history.note("database started again", json!({}));
        postgres.restart().await?;
    }
    let mut node = stage.broker.node.lock().await;
    if !amqp::answers(&stage.broker.url).await {
        stage.history.note("broker started again", json!({}));
        boot(&mut node, &stage.broker.url).await?;
    }
    Ok(())
}

/// Starts the broker. One that takes longer than is thought long is waited for: it would take no less a second time.
async fn boot(node: &mut PrivateRabbitmq, url: &str) -> anyhow::Result<()> {
    let Err(slow) = node.boot().await else { return Ok(()) };
    let late = Instant::now() + SLOW_BOOT;
    while Instant::now() < late {
        if amqp::answers(url).await {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    Err(slow.into())
}

async fn harm(stage: &Stage, producers: &PostgresProxy, planned: Planned) -> anyhow::Result<()> {
    let lasts = planned.lasts;
    match planned.fault {
        Fault::RelayKilled(n) => {
            let replica = &stage.replicas[n];
            let mut running = replica.process.lock().await;
            running.kill().await?;
            tokio::time::sleep(lasts).await;
            replica.spawn(&mut running)?;
        }
        Fault::RelayPaused(n) => {
            let running = stage.replicas[n].process.lock().await;
            running.signal(Signal::Stop);
            tokio::time::sleep(PAST_THE_LEASE + lasts / 2).await;
            running.signal(Signal::Continue);
        }
        Fault::RelayStopped(n) => {
            let replica = &stage.replicas[n];
            let mut running = replica.process.lock().await;
            running.signal(Signal::Term);
            running.wait().await?;
            tokio::time::sleep(lasts / 2).await;
            replica.spawn(&mut running)?;
        }
        Fault::RelayStoppedAndKilled(n) => {
            let replica = &stage.replicas[n];
            let mut running = replica.process.lock().await;
            running.signal(Signal::Term);
            if !running.ends_within(lasts.min(Duration::from_millis(1_500))).await {
                running.signal(Signal::Kill);
            }
            running.wait().await?;
            replica.spawn(&mut running)?;
        }
        Fault::RelayStarved(n) => {
            let running = stage.replicas[n].process.lock().await;
            for _ in 0..10 {
                running.signal(Signal::Stop);
                tokio::time::sleep(Duration::from_millis(450)).await;
                running.signal(Signal::Continue);
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        Fault::BackendsKilled(count) => {
            let client = stage.connect().await?;
            let sql = "select count(pg_terminate_backend(pid)) from (
                           select pid from pg_stat_activity
                           where backend_type = 'client backend' and pid <> pg_backend_pid()
                             and application_name like 'fencepost%' and application_name not like '%campaign%'
                           order by state = 'idle', random() limit $1) s";
            client.query_one(sql, &[&i64::from(count)]).await?;
        }
        Fault::DatabaseCrash => {
            let mut postgres = stage.postgres.lock().await;
            postgres.stop_immediate().await?;
            tokio::time::sleep(lasts.min(Duration::from_secs(3))).await;
            postgres.restart().await?;
        }
        Fault::CommitUnanswered(n) => {
            let proxy = &stage.replicas[n].answers;
            for _ in 0..3 {
                proxy.swallow(b"COMMIT\0");
                tokio::time::sleep(lasts / 4).await;
            }
        }
        Fault::FlightUnanswered(n) => {
            let proxy = &stage.replicas[n].answers;
            for _ in 0..3 {
                proxy.swallow(MARK.as_bytes());
                proxy.swallow_answer_to("-- store::write_ahead");
                tokio::time::sleep(lasts / 4).await;
            }
        }
        Fault::ProducerUnanswered => {
            for _ in 0..5 {
                producers.swallow(b"COMMIT\0");
                tokio::time::sleep(lasts / 5).await;
            }
        }
        Fault::DatabaseCut(n) => stage.replicas[n].wire.reset_all(),
        Fault::DatabaseRefused(n) => {
            let wire = &stage.replicas[n].wire;
            wire.refuse();
            tokio::time::sleep(lasts).await;
            wire.heal();
        }
        Fault::DatabaseSwallowsRequests(n) => swallow(stage, n, &[Direction::ToServer], lasts).await,
        Fault::DatabaseSwallowsAnswers(n) => swallow(stage, n, &[Direction::ToClient], lasts).await,
        Fault::DatabaseBlackHole(n) => swallow(stage, n, &[Direction::ToServer, Direction::ToClient], lasts).await,
        Fault::DatabaseSlow(n) => {
            let wire = &stage.replicas[n].wire;
            wire.set(Direction::ToClient, Wire::Delay(Duration::from_millis(150)));
            tokio::time::sleep(lasts).await;
            wire.set(Direction::ToClient, Wire::None);
        }
        Fault::ConsumerCut(n) => stage.consumers[n].proxy.reset_all(),
        Fault::ConsumerRefused(n) => {
            let proxy = &stage.consumers[n].proxy;
            proxy.refuse();
            tokio::time::sleep(lasts).await;
            proxy.heal();
        }
        Fault::ConsumerSwallowsRequests(n) => consumer_wire(stage, n, Direction::ToServer, Wire::Swallow, lasts).await,
        Fault::ConsumerSwallowsAnswers(n) => consumer_wire(stage, n, Direction::ToClient, Wire::Swallow, lasts).await,
        Fault::ConsumerCutAfter(n, bytes) => {
            consumer_wire(stage, n, Direction::ToServer, Wire::CutAfter(bytes), lasts).await;
        }
        Fault::ConsumerMood(n, mood) => {
            let desk = &stage.consumers[n].desk;
            desk.feel(mood);
            tokio::time::sleep(lasts).await;
            desk.feel(Mood::Well);
        }
        Fault::ConsumerPaused(n) => {
            let name = stage.consumers[n].desk.profile.name;
            operator::command(stage, &["consumers", "pause", name]).await?;
            tokio::time::sleep(lasts).await;
            operator::command(stage, &["consumers", "resume", name]).await?;
        }
        Fault::BrokerKilled => {
            let mut node = stage.broker.node.lock().await;
            node.kill().await?;
            tokio::time::sleep(lasts / 2).await;
            boot(&mut node, &stage.broker.url).await?;
        }
        Fault::BrokerRestarted => {
            let mut node = stage.broker.node.lock().await;
            node.stop().await?;
            boot(&mut node, &stage.broker.url).await?;
        }
        Fault::BrokerAlarm => {
            let mut node = stage.broker.node.lock().await;
            let alarm = node.ctl(&["set_vm_memory_high_watermark", "0.000001"]).await;
            tokio::time::sleep(lasts).await;
            let relief = node.ctl(&["set_vm_memory_high_watermark", "0.4"]).await;
            if alarm.is_err() || relief.is_err() {
                // On a busy machine the tool may not end in time. A fresh start knows of no alarm.
                boot(&mut node, &stage.broker.url).await?;
            }
        }
        Fault::BrokerCut => stage.broker.wire.reset_all(),
        Fault::BrokerRefused => {
            stage.broker.wire.refuse();
            tokio::time::sleep(lasts).await;
            stage.broker.wire.heal();
        }
        Fault::BrokerBlackHole => {
            stage.broker.wire.blackhole();
            tokio::time::sleep(lasts).await;
            stage.broker.wire.heal();
        }
        Fault::BrokerSwallowsAnswers => {
            stage.broker.wire.set(Direction::ToClient, Wire::Swallow);
            tokio::time::sleep(lasts).await;
            stage.broker.wire.heal();
        }
        Fault::BrokerUnbound(n) => {
            amqp::flap(&stage.broker.url, &PROFILES[n], lasts.min(Duration::from_secs(5))).await?
        }
        Fault::BrokerPurged(n) => {
            let desk = &stage.consumers[n].desk;
            desk.feel(Mood::BlackHole);
            tokio::time::sleep(lasts / 2).await;
            let purged = amqp::purge(&stage.broker.url, PROFILES[n].name).await;
            desk.feel(Mood::Well);
            purged?;
        }
        Fault::RepliesPurged => {
            let broker = &stage.broker;
            broker.wire.refuse();
            tokio::time::sleep(lasts / 2).await;
            let purged = amqp::purge_replies(&broker.url, &broker.deployment).await;
            broker.wire.heal();
            purged?;
        }
        Fault::RepliesDeleted(shard) => {
            let broker = &stage.broker;
            amqp::delete_replies(&broker.url, &broker.deployment, shard).await?;
            tokio::time::sleep(lasts).await;
            amqp::declare_replies(&broker.url, &broker.deployment).await?;
        }
        Fault::RepliesDamaged(n, damage) => {
            let desk = &stage.consumers[n].desk;
            desk.suffer(Some(damage));
            tokio::time::sleep(lasts).await;
            desk.suffer(None);
        }
        Fault::Skipped => operator::skip_one(stage).await?,
        Fault::EffectsLocked => {
            let mut client = stage.connect().await?;
            let tx = client.transaction().await?;
            // A transaction that its producer left prepared holds the table until the end of the run: then waiting for the lock,
            // behind which everybody queues, is the fault.
            let lock = "set local lock_timeout = '3s'; lock table fencepost.effects in access exclusive mode";
            match tx.batch_execute(lock).await {
                Err(error) if error.code() == Some(&SqlState::LOCK_NOT_AVAILABLE) => return Ok(()),
                locked => locked?,
            }
            tokio::time::sleep(lasts.min(Duration::from_secs(5))).await;
            tx.commit().await?;
        }
    }
    Ok(())
}

async fn swallow(stage: &Stage, n: usize, directions: &[Direction], lasts: Duration) {
    let wire = &stage.replicas[n].wire;
    directions.iter().for_each(|direction| wire.set(*direction, Wire::Swallow));
    tokio::time::sleep(lasts).await;
    wire.heal();
}

async fn consumer_wire(stage: &Stage, n: usize, direction: Direction, fault: Wire, lasts: Duration) {
    let proxy = &stage.consumers[n].proxy;
    proxy.set(direction, fault);
    tokio::time::sleep(lasts).await;
    proxy.heal();
}
