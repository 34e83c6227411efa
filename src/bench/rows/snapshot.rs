//! Drain while another session holds a snapshot open throughout: what stops others from cleaning up must not stop us.

use super::drain;
use crate::bench::bodies::Size;
use crate::bench::ceiling::Ceiling;
use crate::bench::figure::{Figure, Must};
use crate::bench::sink::Sink;
use crate::bench::{Bench, Error, Result, backlog};

const NAME: &str = "drain beside a held snapshot";
const MUST: Must = Must::RatioAtLeast(0.90);

pub async fn measure(bench: &Bench) -> Result<Vec<Figure>> {
    let (count, bodies) = (bench.sized(100_000, 200_000), bench.bodies.of(Size::Small));
    let before = drain::http(bench, count, &bodies).await?.rate;
    let held = held(bench, count, &bodies).await?;
    let after = drain::http(bench, count, &bodies).await?.rate;
    Ok(vec![Figure::between(NAME, "/s", held, Ceiling { before, after }, MUST)])
}

async fn held(bench: &Bench, count: u32, bodies: &[Vec<u8>]) -> Result<f64> {
    let stage = bench.rig.stage().await?;
    let holder = stage.database.connect().await?;
    let sink = Sink::start(count).await?;
    let consumer = stage.declare("sink", &sink.url()).await?;
    holder.batch_execute("begin isolation level repeatable read").await?;
    holder.query_one("-- bench::hold\nselect count(*) from fencepost.settings", &[]).await?;
    backlog::fill(&stage, 0, count, bodies, &[consumer]).await?;
    backlog::calm(&stage).await?;
    let drained = drain::through(bench, &stage, &sink, count).await?;
    let seen: i64 = holder.query_one("-- bench::held\nselect count(*) from fencepost.effects", &[]).await?.get(0);
    if seen > 0 {
        return Err(Error::Untrue("the snapshot was not held".into()));
    }
    holder.batch_execute("rollback").await?;
    bench.rig.clear().await?;
    Ok(drained.rate)
}
