//! The database path alone: the relay in this process, with an edge that answers at once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use super::{bare, drain};
use crate::bench::backlog;
use crate::bench::bodies::Size;
use crate::bench::ceiling::Ceiling;
use crate::bench::figure::{Figure, Must};
use crate::bench::rig::Stage;
use crate::bench::{Bench, Error, Result};
use crate::edge::{Edges, Reach};
use crate::relay::{self, Health, Options};

const BACKLOG: u32 = 200_000;
const BARE: u32 = 100_000;
const NAME: &str = "database path alone";
const MUST: Must = Must::RatioAtLeast(0.60);

pub async fn measure(bench: &Bench) -> Result<Vec<Figure>> {
    let before = bare_loop(bench).await?;
    let rate = relayed(bench).await?;
    let after = bare_loop(bench).await?;
    Ok(vec![Figure::between(NAME, "/s", rate, Ceiling { before, after }, MUST)])
}

async fn filled(bench: &Bench, count: u32) -> Result<Stage> {
    bench.rig.clear().await?;
    let stage = bench.rig.stage().await?;
    let consumer = stage.declare("sink", "http://127.0.0.1:9/").await?;
    backlog::fill(&stage, 0, count, &bench.bodies.of(Size::Small), &[consumer]).await?;
    backlog::calm(&stage).await?;
    Ok(stage)
}

async fn relayed(bench: &Bench) -> Result<f64> {
    let count = bench.size(BACKLOG);
    let stage = filled(bench, count).await?;
    let stop = CancellationToken::new();
    let (database, told) = (stage.database.clone(), stop.clone());
    let relay = bare::elsewhere(move || async move {
        let reach = Reach { edges: Edges::AtOnce, ..Reach::default() };
        Ok(relay::run(database, Options::default(), reach, Arc::new(Health::default()), told).await?)
    });
    let watched = async {
        let watched = all_settled(&stage, count).await;
        stop.cancel();
        watched
    };
    let (ended, watched) = tokio::join!(relay, watched);
    ended?;
    watched?;
    drain::settled(&stage, count).await?;
    drain::rate(&stage).await
}

async fn all_settled(stage: &Stage, count: u32) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(120);
    loop {
        let row = stage
            .client
            .query_one(
                "-- bench::read
                 select coalesce(sum(deliveries), 0)::bigint, count(*) filter (where token is null) from fencepost.flights",
                &[],
            )
            .await?;
        if (row.get::<_, i64>(0), row.get::<_, i64>(1)) == (i64::from(count), 0) {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(Error::Untrue("the relay does not settle what it reads".into()));
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// One connection, over and over: read 500 effects by id, append their 500 ledger rows, commit. As many flushes as the
/// relay has: one for each 500.
async fn bare_loop(bench: &Bench) -> Result<f64> {
    let count = bench.size(BARE);
    let stage = filled(bench, count).await?;
    let read = stage
        .client
        .prepare(
            "-- bench::bare_read
             select id, shard, task_id, lease_epoch, position, targets, topic, type, schema_version, content_type, headers,
                    ordering_key, traceparent, payload, sha256, committed_at, deliver_after, expires_at
             from fencepost.effects where id > $1 order by id limit 500",
        )
        .await?;
    let append = stage
        .client
        .prepare(
            "-- bench::bare_append
             insert into fencepost.ledger (effect_id, consumer_id, token, attempt, status)
             select u, 1, 'applied', 1, 200 from unnest($1::bigint[]) u",
        )
        .await?;
    let started = Instant::now();
    let (mut last, mut done) = (0_i64, 0_u32);
    while done < count {
        let rows = stage.client.query(&read, &[&last]).await?;
        let ids: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
        let Some(newest) = ids.last() else {
            return Err(Error::Untrue(format!("only {done} of {count} effects are there")));
        };
        last = *newest;
        done += ids.len() as u32;
        stage.client.execute(&append, &[&ids]).await?;
    }
    Ok(f64::from(done) / started.elapsed().as_secs_f64())
}
