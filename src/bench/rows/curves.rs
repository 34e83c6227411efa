//! The curves: rate against window and against the size of the backlog, latency against offered load. They have no limit
//! to reach; they show where the figures of the other rows come from.

use serde_json::json;

use super::{drain, latency};
use crate::bench::bodies::Size;
use crate::bench::figure::{Figure, Must};
use crate::bench::sink::Sink;
use crate::bench::{Bench, Result, backlog};

const WINDOWS: [u32; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
/// Deliveries for each place of a window, so that each point takes about as long.
const FOR_EACH_PLACE: u32 = 10_000;
const BACKLOG_MAX: u32 = 100_000;
const BACKLOGS: [u32; 5] = [10_000, 30_000, 100_000, 300_000, 1_000_000];

pub async fn measure(bench: &Bench) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for window in WINDOWS {
        let rate = within(bench, window).await?;
        figures.push(Figure::alone(format!("HTTP drain, window of {window}"), "/s", rate, Must::Nothing));
    }
    for count in BACKLOGS {
        let drained = drain::http(bench, bench.size(count), &bench.bodies.of(Size::Small)).await?;
        let figure = Figure::alone(format!("HTTP drain of {count}"), "/s", drained.rate, Must::Nothing);
        figures.push(figure.noting(drained.cost()));
    }
    figures.extend(latency::against_load(bench).await?);
    Ok(figures)
}

/// The rate of a drain with so many requests in flight.
async fn within(bench: &Bench, window: u32) -> Result<f64> {
    let stage = bench.rig.stage().await?;
    let count = bench.size((FOR_EACH_PLACE * window).min(BACKLOG_MAX));
    let sink = Sink::start(count).await?;
    let spec = json!({ "kind": "http", "url": sink.url(), "ack": "required", "concurrency": window });
    let consumer = stage.declare_spec("sink", spec).await?;
    backlog::fill(&stage, 0, count, &bench.bodies.of(Size::Small), &[consumer]).await?;
    backlog::calm(&stage).await?;
    let drained = drain::through(bench, &stage, &sink, count).await?;
    bench.rig.clear().await?;
    Ok(drained.rate)
}
