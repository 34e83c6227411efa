//! The curves: rate against window and against the size of the backlog, latency against offered load. They have no limit
//! to reach; they show where the figures of the other rows come from.

use super::{drain, latency};
use crate::bench::bodies::Size;
use crate::bench::figure::{Figure, Must};
use crate::bench::{Bench, Result};

const WINDOWS: [u32; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
/// Deliveries for each place of a window, so that each point takes about as long.
const FOR_EACH_PLACE: u32 = 10_000;
const BACKLOG_MAX: u32 = 100_000;
const BACKLOGS: [u32; 5] = [10_000, 30_000, 100_000, 300_000, 1_000_000];

pub async fn measure(bench: &Bench) -> Result<Vec<Figure>> {
    let (mut figures, bodies) = (Vec::new(), bench.bodies.of(Size::Small));
    for window in WINDOWS {
        let count = bench.size((FOR_EACH_PLACE * window).min(BACKLOG_MAX));
        let stage = bench.rig.stage().await?;
        let drained = drain::within(window, bench, &stage, count, &bodies).await?;
        bench.rig.clear().await?;
        figures.push(Figure::alone(format!("HTTP drain, window of {window}"), "/s", drained.rate, Must::Nothing));
    }
    for count in BACKLOGS {
        let drained = drain::http(bench, bench.size(count), &bodies).await?;
        let figure = Figure::alone(format!("HTTP drain of {count}"), "/s", drained.rate, Must::Nothing);
        figures.push(figure.noting(drained.cost()));
    }
    figures.extend(latency::against_load(bench).await?);
    Ok(figures)
}
