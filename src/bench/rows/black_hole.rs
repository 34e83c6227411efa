//! One of 20 consumers takes connections and never answers: the other 19 must not notice.

use super::latency;
use crate::bench::bodies::Size;
use crate::bench::ceiling::Ceiling;
use crate::bench::figure::{Figure, Must};
use crate::bench::openloop::{self, Schedule};
use crate::bench::relay::Relay;
use crate::bench::rig::Stage;
use crate::bench::sink::{BlackHole, Sink};
use crate::bench::{Bench, Error, Result, backlog};
use crate::model::key::ConsumerId;

const CONSUMERS: u32 = 20;
const RATE: Must = Must::RatioAtLeast(0.90);
const P99: Must = Must::RatioAtMost(1.3);

/// What the first of the consumers is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum First {
    Healthy,
    BlackHoled,
}

/// Whether a delivery is one of the other 19's.
fn is_others(n: u32) -> bool {
    !n.is_multiple_of(CONSUMERS)
}

pub async fn measure(bench: &Bench) -> Result<Vec<Figure>> {
    let before = (rate(bench, First::Healthy).await?, p99(bench, First::Healthy).await?);
    let holed = (rate(bench, First::BlackHoled).await?, p99(bench, First::BlackHoled).await?);
    let after = (rate(bench, First::Healthy).await?, p99(bench, First::Healthy).await?);
    let (rate_name, p99_name) = ("one of 20 black-holed: the others' rate", "one of 20 black-holed: the others' p99");
    Ok(vec![
        Figure::between(rate_name, "/s", holed.0, Ceiling { before: before.0, after: after.0 }, RATE),
        Figure::between(p99_name, "ms", holed.1, Ceiling { before: before.1, after: after.1 }, P99),
    ])
}

/// The 20 consumers, as edges of their own to one service.
async fn declare(stage: &Stage, sink: &Sink, hole: &BlackHole, first: First) -> Result<Vec<ConsumerId>> {
    let mut consumers = Vec::new();
    for n in 0..CONSUMERS {
        let url = if n == 0 && first == First::BlackHoled { hole.url() } else { sink.url() };
        consumers.push(stage.declare(&format!("sink-{n}"), &url).await?);
    }
    Ok(consumers)
}

async fn rate(bench: &Bench, first: First) -> Result<f64> {
    let count = bench.sized(100_000, 200_000);
    let stage = bench.rig.stage().await?;
    let (sink, hole) = (Sink::start(count).await?, BlackHole::start().await?);
    let consumers = declare(&stage, &sink, &hole, first).await?;
    backlog::fill(&stage, 0, count, &bench.bodies.of(Size::Small), &consumers).await?;
    backlog::calm(&stage).await?;
    let others = (0..count).filter(|n| is_others(*n)).count();
    let relay = Relay::start(&bench.rig, &stage)?;
    let expected = if first == First::BlackHoled { others as u64 } else { u64::from(count) };
    sink.wait_for(expected).await?;
    relay.kill().await?;
    sink.verify_where(count, |n| first == First::Healthy || is_others(n))?;
    bench.rig.clear().await?;
    let last = (0..count).filter(|n| is_others(*n)).filter_map(|n| sink.arrived(n as usize)).max();
    match (sink.first_arrival(), last) {
        (Some(start), Some(end)) => Ok(others as f64 / (end - start).as_secs_f64()),
        _ => Err(Error::Untrue("nothing arrived".into())),
    }
}

async fn p99(bench: &Bench, first: First) -> Result<f64> {
    let schedule = Schedule { per_second: 400.0, count: bench.sized(4_000, 12_000), connections: 8 };
    let stage = bench.rig.stage().await?;
    let (sink, hole) = (Sink::start(schedule.count).await?, BlackHole::start().await?);
    declare(&stage, &sink, &hole, first).await?;
    let mut relay = Relay::start(&bench.rig, &stage)?;
    relay.attached(&stage, 1).await?;
    let commits = latency::emit(&stage, bench, schedule, |n| format!("sink-{}", n % CONSUMERS)).await?;
    let others = (0..schedule.count).filter(|n| is_others(*n)).count();
    let expected = if first == First::BlackHoled { others as u64 } else { u64::from(schedule.count) };
    sink.wait_for(expected).await?;
    relay.kill().await?;
    sink.verify_where(schedule.count, |n| first == First::Healthy || is_others(n))?;
    bench.rig.clear().await?;
    Ok(openloop::delays(&commits, &sink, is_others).at(0.99))
}
