//! Flat as it grows: ten times the backlog, and ten million old effects retained.

use super::drain;
use crate::bench::bodies::Size;
use crate::bench::ceiling::Ceiling;
use crate::bench::figure::{Figure, Must};
use crate::bench::rig::Stage;
use crate::bench::sink::Sink;
use crate::bench::{Bench, Result, backlog};

const MUST: Must = Must::RatioAtLeast(0.95);

pub async fn backlog(bench: &Bench) -> Result<Vec<Figure>> {
    let (plain, bodies) = (bench.sized(20_000, 100_000), bench.bodies.of(Size::Small));
    let before = drain::http(bench, plain, &bodies).await?.rate;
    let tenfold = drain::http(bench, plain * 10, &bodies).await?;
    let after = drain::http(bench, plain, &bodies).await?.rate;
    let name = format!("drain of {} beside {plain}", plain * 10);
    Ok(vec![Figure::between(name, "/s", tenfold.rate, Ceiling { before, after }, MUST).noting(tenfold.cost())])
}

pub async fn retained(bench: &Bench) -> Result<Vec<Figure>> {
    let (count, old, bodies) = (bench.size(200_000), bench.size(10_000_000), bench.bodies.of(Size::Small));
    let before = drain::http(bench, count, &bodies).await?.rate;
    let stage = bench.rig.stage().await?;
    let sink = Sink::start(count).await?;
    let consumer = stage.declare("sink", &sink.url()).await?;
    retain(&stage, old, consumer.0).await?;
    backlog::fill(&stage, 0, count, &bodies, &[consumer]).await?;
    backlog::calm(&stage).await?;
    let wal = stage.wal().await?;
    let relay = crate::bench::relay::Relay::start(&bench.rig, &stage)?;
    sink.wait_for(u64::from(count)).await?;
    drain::landed(&stage).await?;
    let rate = drain::rate(&stage).await?;
    let wal = (stage.wal().await? - wal) as f64 / f64::from(count);
    relay.stop().await?;
    sink.verify(count)?;
    bench.rig.clear().await?;
    let after = drain::http(bench, count, &bodies).await?.rate;
    let name = format!("drain with {old} old effects retained");
    Ok(vec![
        Figure::between(name, "/s", rate, Ceiling { before, after }, MUST)
            .noting(format!("{wal:.0} B of WAL a delivery")),
    ])
}

/// `old` effects that were delivered long ago, and the flights that say so.
async fn retain(stage: &Stage, old: u32, consumer: i32) -> Result<()> {
    let step = 100_000;
    for first in (0..old).step_by(step as usize) {
        let last = (first + step).min(old) - 1;
        stage
            .client
            .execute(
                "-- bench::retain
                 with effects as (
                     insert into fencepost.effects (lease_epoch, position, size, shard, targets, task_id, type, content_type, ordering_key, sha256, payload)
                     select 1, 1, 400, n % 8, array[$3::int], 'old-' || n, 'bench.effect', 'application/json', 'old-' || n, s.sha256, s.payload
                     from generate_series($1::int, $2::int) n
                     cross join (select p.payload, sha256(p.payload) as sha256 from (select convert_to(repeat('o', 400), 'UTF8') as payload) p) s
                     returning id
                 )
                 insert into fencepost.ledger (effect_id, consumer_id, token, attempt, status)
                 select id, $3::int, 'applied', 1, 200 from effects",
                &[&(first as i32), &(last as i32), &consumer],
            )
            .await?;
    }
    stage
        .client
        .batch_execute(
            "-- bench::retained
             insert into fencepost.flights (shard, seq, epoch, base, target, last_id, token, closed_at)
             select f.shard, f.seq + 1, f.epoch, f.target, pg_current_snapshot(), (select max(id) from fencepost.effects), 'done', clock_timestamp()
             from (select distinct on (shard) shard, seq, epoch, target from fencepost.flights order by shard, seq desc) f",
        )
        .await?;
    stage.client.batch_execute("-- bench::retained\nvacuum (analyze) fencepost.effects, fencepost.ledger").await?;
    Ok(())
}
