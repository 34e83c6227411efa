//! Replicas on one database: sharing must not cost. On one machine they cannot gain either.

use super::drain;
use crate::bench::bodies::Size;
use crate::bench::ceiling::Ceiling;
use crate::bench::figure::{Figure, Must};
use crate::bench::relay::Relay;
use crate::bench::sink::Sink;
use crate::bench::{Bench, Result, backlog};

/// No loss, as far as two runs of one relay can be told apart.
const MUST: Must = Must::RatioAtLeast(0.95);

pub async fn measure(bench: &Bench) -> Result<Vec<Figure>> {
    let before = rate(bench, 1).await?;
    let two = rate(bench, 2).await?;
    let four = rate(bench, 4).await?;
    let after = rate(bench, 1).await?;
    let figure = |replicas: u32, rate: f64| {
        Figure::between(format!("drain by {replicas} replicas"), "/s", rate, Ceiling { before, after }, MUST)
    };
    Ok(vec![figure(2, two), figure(4, four)])
}

/// All replicas hold their shares before one transaction commits the whole backlog.
async fn rate(bench: &Bench, replicas: u32) -> Result<f64> {
    let count = bench.sized(60_000, 200_000);
    let stage = bench.rig.stage().await?;
    let sink = Sink::start(count).await?;
    let consumer = stage.declare("sink", &sink.url()).await?;
    let mut relays = Vec::new();
    for _ in 0..replicas {
        relays.push(Relay::start(&bench.rig, &stage)?);
    }
    for relay in &mut relays {
        relay.attached(&stage, i64::from(replicas)).await?;
    }
    stage.client.batch_execute("begin").await?;
    backlog::fill(&stage, 0, count, &bench.bodies.of(Size::Small), &[consumer]).await?;
    stage.client.batch_execute("commit").await?;
    sink.wait_for(u64::from(count)).await?;
    drain::landed(&stage).await?;
    let rate = drain::rate(&stage).await?;
    for relay in relays {
        relay.stop().await?;
    }
    sink.verify(count)?;
    drain::settled(&stage, count).await?;
    bench.rig.clear().await?;
    Ok(rate)
}
