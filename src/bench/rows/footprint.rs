//! What healthy deliveries leave in the database: WAL and dead tuples. Autovacuum is off meanwhile, so that it neither
//! adds the one nor takes away the other.

use super::drain;
use crate::bench::bodies::Size;
use crate::bench::figure::{Figure, Must};
use crate::bench::rig::Stage;
use crate::bench::{Bench, Result};

const DELIVERIES: u32 = 100_000;

pub async fn measure(bench: &Bench) -> Result<Vec<Figure>> {
    autovacuum(bench, "off").await?;
    let measured = measured(bench).await;
    autovacuum(bench, "on").await?;
    measured
}

async fn measured(bench: &Bench) -> Result<Vec<Figure>> {
    let stage = bench.rig.stage().await?;
    let drained = drain::of(bench, &stage, bench.size(DELIVERIES), &bench.bodies.of(Size::Small)).await?;
    let (all, log) = dead(&stage).await?;
    Ok(vec![
        Figure::alone("WAL per delivered effect", "B", drained.wal, Must::ValueAtMost(260.0)),
        Figure::alone("dead tuples of 100,000 deliveries", "tuples", all, Must::ValueAtMost(1_000.0)),
        Figure::alone("dead tuples in effects and ledger", "tuples", log, Must::ValueAtMost(0.0)),
    ])
}

async fn autovacuum(bench: &Bench, state: &str) -> Result<()> {
    bench.rig.admin().batch_execute(&format!("alter system set autovacuum = {state}")).await?;
    bench.rig.admin().batch_execute("select pg_reload_conf()").await?;
    Ok(())
}

/// Dead tuples in all tables, and in those of the log.
async fn dead(stage: &Stage) -> Result<(f64, f64)> {
    let row = stage
        .client
        .query_one(
            "-- bench::dead
             select coalesce(sum(n_dead_tup), 0)::float8,
                    coalesce(sum(n_dead_tup) filter (where relname ~ '^(effects|ledger)(_|$)'), 0)::float8
             from pg_stat_user_tables where schemaname = 'fencepost'",
            &[],
        )
        .await?;
    Ok((row.get(0), row.get(1)))
}
