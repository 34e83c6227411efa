//! Draining a backlog over HTTP.

use std::time::Duration;

use serde_json::json;

use super::bare;
use crate::bench::backlog;
use crate::bench::bodies::Size;
use crate::bench::ceiling::Ceiling;
use crate::bench::figure::{Figure, Must};
use crate::bench::relay::Relay;
use crate::bench::rig::Stage;
use crate::bench::sink::Sink;
use crate::bench::{Bench, Error, Result};
use crate::model::consumer::DEFAULT_CONCURRENCY;

const BACKLOG: u32 = 200_000;
/// What a ceiling is measured with.
const BARE: u32 = 60_000;

pub async fn measure(bench: &Bench, size: Size) -> Result<Vec<Figure>> {
    let (name, must) = match size {
        Size::Small => ("HTTP drain, 400-byte bodies", Must::RatioAtLeast(0.60)),
        Size::Real => ("HTTP drain, real bodies", Must::RatioAtLeast(0.60)),
    };
    let bodies = bench.bodies.of(size);
    let before = bare::http(bench.size(BARE), &bodies).await?;
    let drained = http(bench, bench.size(BACKLOG), &bodies).await?;
    let after = bare::http(bench.size(BARE), &bodies).await?;
    Ok(vec![Figure::between(name, "/s", drained.rate, Ceiling { before, after }, must).noting(drained.cost())])
}

/// What a drain came to.
#[derive(Clone, Copy, Debug)]
pub struct Drained {
    /// Deliveries a second, from the opening of the first flight to the closing of the last.
    pub rate: f64,
    /// Bytes of WAL per delivery, everything the server wrote meanwhile.
    pub wal: f64,
    /// The relay's processor time per delivery.
    pub cpu: Duration,
    pub memory: u64,
}

impl Drained {
    pub fn cost(&self) -> String {
        format!("relay: {} µs of processor a delivery, {} MiB at most", self.cpu.as_micros(), self.memory >> 20)
    }
}

/// Drains a fresh backlog through one relay.
pub async fn http(bench: &Bench, count: u32, bodies: &[Vec<u8>]) -> Result<Drained> {
    let stage = bench.rig.stage().await?;
    let drained = of(bench, &stage, count, bodies).await;
    bench.rig.clear().await?;
    drained
}

/// Fills `stage` and drains it.
pub async fn of(bench: &Bench, stage: &Stage, count: u32, bodies: &[Vec<u8>]) -> Result<Drained> {
    within(DEFAULT_CONCURRENCY, bench, stage, count, bodies).await
}

/// The same with so many requests in flight.
pub async fn within(window: u32, bench: &Bench, stage: &Stage, count: u32, bodies: &[Vec<u8>]) -> Result<Drained> {
    let sink = Sink::start(count).await?;
    let spec = json!({ "kind": "http", "url": sink.url(), "ack": "required", "concurrency": window });
    let consumer = stage.declare_spec("sink", spec).await?;
    backlog::fill(stage, 0, count, bodies, &[consumer]).await?;
    backlog::calm(stage).await?;
    through(bench, stage, &sink, count).await
}

/// Drains what is there.
pub async fn through(bench: &Bench, stage: &Stage, sink: &Sink, count: u32) -> Result<Drained> {
    let wal = stage.wal().await?;
    let mut relay = Relay::start(&bench.rig, stage)?;
    sink.wait_for(u64::from(count)).await?;
    landed(stage).await?;
    relay.check()?;
    let (cpu, memory) = (relay.cpu()?, relay.peak_memory()?);
    let wal = stage.wal().await? - wal;
    let drained = Drained { rate: rate(stage).await?, wal: wal as f64 / f64::from(count), cpu: cpu / count, memory };
    relay.stop().await?;
    sink.verify(count)?;
    settled(stage, count).await?;
    Ok(drained)
}

/// Waits until every flight is closed: the verdicts are written.
pub async fn landed(stage: &Stage) -> Result<()> {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
    while stage.open_flights().await? > 0 {
        if tokio::time::Instant::now() > deadline {
            return Err(Error::Untrue("flights stay open although everything arrived".into()));
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

/// Deliveries a second by the database's own clock: from the first flight that was opened to the last that was closed.
pub async fn rate(stage: &Stage) -> Result<f64> {
    let row = stage
        .client
        .query_one(
            "-- bench::rate
             select (sum(deliveries) / extract(epoch from max(closed_at) - min(opened_at)))::float8
             from fencepost.flights where token = 'done' and deliveries > 0",
            &[],
        )
        .await?;
    Ok(row.get::<_, Option<f64>>(0).unwrap_or(0.0))
}

/// Whether the ledger holds one fact for each delivery.
pub async fn settled(stage: &Stage, count: u32) -> Result<()> {
    match stage.settled().await? {
        (facts, 0) if facts == i64::from(count) => Ok(()),
        (facts, open) => Err(Error::Untrue(format!("{facts} facts for {count} deliveries, {open} flights open"))),
    }
}
