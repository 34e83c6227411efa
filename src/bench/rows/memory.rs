//! The relay's memory beside a large backlog, with a consumer that takes everything and with one that is not there.

use std::time::{Duration, Instant};

use super::drain;
use crate::bench::bodies::Size;
use crate::bench::figure::{Figure, Must};
use crate::bench::relay::Relay;
use crate::bench::rig::Stage;
use crate::bench::{Bench, Error, Result, backlog};

const MUST: Must = Must::ValueAtMost(96.0);
/// How long a relay may take to have seen the whole backlog of a dead consumer.
const PATIENCE: Duration = Duration::from_secs(600);
/// How long it is watched once it has.
const WATCHED: Duration = Duration::from_secs(15);

pub async fn measure(bench: &Bench) -> Result<Vec<Figure>> {
    let waiting = bench.sized(100_000, 1_000_000);
    let healthy = drain::http(bench, waiting, &bench.bodies.of(Size::Small)).await?;
    let dead = dead(bench, waiting).await?;
    let mebibytes = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    Ok(vec![
        Figure::alone(format!("memory, {waiting} waiting, healthy"), "MiB", mebibytes(healthy.memory), MUST),
        Figure::alone(format!("memory, {waiting} waiting, dead consumer"), "MiB", mebibytes(dead), MUST),
    ])
}

async fn dead(bench: &Bench, waiting: u32) -> Result<u64> {
    let stage = bench.rig.stage().await?;
    // Port 9 (discard): nobody listens there.
    let consumer = stage.declare("dead", "http://127.0.0.1:9/").await?;
    backlog::fill(&stage, 0, waiting, &bench.bodies.of(Size::Small), &[consumer]).await?;
    backlog::calm(&stage).await?;
    let mut relay = Relay::start(&bench.rig, &stage)?;
    let deadline = Instant::now() + PATIENCE;
    while read(&stage).await? < i64::from(waiting) {
        relay.check()?;
        if Instant::now() > deadline {
            return Err(Error::Untrue(format!("only {} of {waiting} were read", read(&stage).await?)));
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    tokio::time::sleep(WATCHED).await;
    let peak = relay.peak_memory()?;
    relay.stop().await?;
    bench.rig.clear().await?;
    Ok(peak)
}

/// Deliveries of all flights.
async fn read(stage: &Stage) -> Result<i64> {
    let sql = "-- bench::read\nselect coalesce(sum(deliveries), 0)::bigint from fencepost.flights";
    Ok(stage.client.query_one(sql, &[]).await?.get(0))
}
