//! From commit to received: the relay beside the barest thing that could work, INSERT + NOTIFY + SELECT + POST in one
//! process, which keeps no record of what it sent.

use std::sync::Arc;

use tokio::sync::Semaphore;

use super::{bare, drain};
use crate::bench::bodies::Size;
use crate::bench::ceiling::Ceiling;
use crate::bench::delays::Delays;
use crate::bench::figure::{Figure, Must};
use crate::bench::openloop::{self, Schedule};
use crate::bench::relay::Relay;
use crate::bench::rig::Stage;
use crate::bench::sink::Sink;
use crate::bench::{Bench, Error, Result};
use crate::store::session::Session;

const LOADED: f64 = 500.0;
const IDLE: f64 = 1.0;

pub async fn loaded(bench: &Bench) -> Result<Vec<Figure>> {
    let count = bench.sized(7_500, 15_000);
    let schedule = Schedule { per_second: LOADED, count, connections: 8 };
    let [p50, p99] = compared(bench, schedule).await?;
    Ok(vec![
        figure("commit to received at 500/s, p50", p50, Must::RatioAtMost(1.5)),
        figure("commit to received at 500/s, p99", p99, Must::RatioAtMost(2.0)),
    ])
}

pub async fn idle(bench: &Bench) -> Result<Vec<Figure>> {
    let count = (bench.sized(2_000, 4_000) / 100).max(5);
    let schedule = Schedule { per_second: IDLE, count, connections: 1 };
    let [p50, _] = compared(bench, schedule).await?;
    Ok(vec![figure("commit to received from idle, p50", p50, Must::RatioAtMost(1.5))])
}

/// Latency against offered load.
pub async fn against_load(bench: &Bench) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for per_second in [50.0, 100.0, 200.0, 400.0, 800.0, 1_600.0] {
        let count = bench.size((per_second * 10.0) as u32);
        let delays = relayed(bench, Schedule { per_second, count, connections: 16 }).await?;
        for (name, share) in [("p50", 0.50), ("p99", 0.99)] {
            let name = format!("commit to received at {per_second:.0}/s, {name}");
            figures.push(Figure::alone(name, "ms", delays.at(share), Must::Nothing));
        }
    }
    Ok(figures)
}

/// A value with its baseline before and after.
#[derive(Clone, Copy)]
struct Compared(f64, Ceiling);

fn figure(name: &str, Compared(value, baseline): Compared, must: Must) -> Figure {
    Figure::between(name, "ms", value, baseline, must)
}

/// p50 and p99.
async fn compared(bench: &Bench, schedule: Schedule) -> Result<[Compared; 2]> {
    let before = bare_process(bench, schedule).await?;
    let relayed = relayed(bench, schedule).await?;
    let after = bare_process(bench, schedule).await?;
    let at = |share| Compared(relayed.at(share), Ceiling { before: before.at(share), after: after.at(share) });
    Ok([at(0.50), at(0.99)])
}

async fn relayed(bench: &Bench, schedule: Schedule) -> Result<Delays> {
    let stage = bench.rig.stage().await?;
    let sink = Sink::start(schedule.count).await?;
    stage.declare("sink", &sink.url()).await?;
    let mut relay = Relay::start(&bench.rig, &stage)?;
    relay.attached(&stage, 1).await?;
    warm_up(&stage, schedule.count).await?;
    let commits = emit(&stage, bench, schedule, |_| "sink".into()).await?;
    sink.wait_for(u64::from(schedule.count)).await?;
    relay.stop().await?;
    sink.verify(schedule.count)?;
    bench.rig.clear().await?;
    Ok(openloop::delays(&commits, &sink, |_| true))
}

/// So many effects that each shard has some.
const WARM: u32 = 100;

/// A relay that has been at work for a while: the first effect of a shard waits for its flight, which the next do not.
/// Their numbers come after those of the schedule.
async fn warm_up(stage: &Stage, from: u32) -> Result<()> {
    let sink = Sink::start(from + WARM).await?;
    stage.declare("warm", &sink.url()).await?;
    let sql = "-- bench::warm_up
               select fencepost.emit('[{\"consumer\": \"warm\", \"payload\": 1}]', 'bench-' || n)
               from generate_series($1::int, $2::int - 1) n";
    stage.client.execute(sql, &[&(from as i32), &((from + WARM) as i32)]).await?;
    sink.wait_for(u64::from(WARM)).await?;
    drain::landed(stage).await
}

/// Emits on schedule, the n-th effect to the consumer that `consumer` names.
pub async fn emit(
    stage: &Stage,
    bench: &Bench,
    schedule: Schedule,
    consumer: impl Fn(u32) -> String + Send + Sync + 'static,
) -> Result<Vec<openloop::Committed>> {
    let body = String::from_utf8_lossy(&bench.bodies.of(Size::Small)[0]).into_owned();
    let effect = move |n: u32| {
        let effects = serde_json::json!([{ "consumer": consumer(n), "payload_text": body, "type": "bench.effect" }]);
        [effects.to_string(), format!("bench-{n}")]
    };
    openloop::commit(stage, schedule, "-- bench::emit\nselect fencepost.emit($1::text::jsonb, $2::text)", effect).await
}

/// INSERT and NOTIFY in one transaction; a listener that selects what it was told of and posts it.
async fn bare_process(bench: &Bench, schedule: Schedule) -> Result<Delays> {
    let stage = bench.rig.stage().await?;
    stage
        .client
        .batch_execute(
            "-- bench::bare_log
             create schema bare;
             create table bare.log (n integer primary key, at timestamptz not null default clock_timestamp(), payload bytea not null)",
        )
        .await?;
    let sink = Sink::start(schedule.count).await?;
    let (session, mut heard) = Session::open_listening(&stage.database).await?;
    session.client().batch_execute("listen bare").await?;
    let edge = Arc::new(bare::edge(&sink.url())?);
    let posting = tokio::spawn(bare::elsewhere(move || async move {
        let window = Arc::new(Semaphore::new(crate::model::consumer::DEFAULT_CONCURRENCY as usize));
        let mut done = 0;
        while done < schedule.count {
            let mut numbers = Vec::new();
            match heard.recv().await {
                Some(note) => numbers.push(note.payload),
                None => return Err(Error::Untrue("the bare process lost its connection".into())),
            }
            while let Ok(note) = heard.try_recv() {
                numbers.push(note.payload);
            }
            let numbers: Vec<i32> = numbers.iter().filter_map(|n| n.parse().ok()).collect();
            let statement =
                session.prepared("-- bench::bare_select\nselect n, payload from bare.log where n = any($1)").await?;
            for row in session.client().query(&statement, &[&numbers]).await? {
                done += 1;
                let effect = bare::Body::new(row.get::<_, Vec<u8>>(1)).effect(row.get::<_, i32>(0).unsigned_abs());
                // The semaphore is never closed.
                let permit = Arc::clone(&window).acquire_owned().await.ok();
                let edge = Arc::clone(&edge);
                tokio::spawn(async move {
                    let delivered = bare::deliver(&edge, &effect).await;
                    drop(permit);
                    delivered
                });
            }
        }
        // What is still out must be back before the runtime goes.
        let _all = window.acquire_many(crate::model::consumer::DEFAULT_CONCURRENCY).await;
        Ok(())
    }));
    let body = String::from_utf8_lossy(&bench.bodies.of(Size::Small)[0]).into_owned();
    let commits = openloop::commit(
        &stage,
        schedule,
        "-- bench::bare_commit
         with stored as (insert into bare.log (n, payload) values ($2::text::int, convert_to($1::text, 'UTF8')) returning n)
         select pg_notify('bare', n::text) from stored",
        move |n| [body.clone(), n.to_string()],
    )
    .await?;
    sink.wait_for(u64::from(schedule.count)).await?;
    posting.await??;
    sink.verify(schedule.count)?;
    bench.rig.clear().await?;
    Ok(openloop::delays(&commits, &sink, |_| true))
}
