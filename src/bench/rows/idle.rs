//! What a relay costs that has nothing to do. The server itself writes down what it is asked.

use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::time::Duration;

use crate::bench::bodies::Size;
use crate::bench::figure::{Figure, Must};
use crate::bench::relay::Relay;
use crate::bench::sink::Sink;
use crate::bench::{Bench, Error, Result, backlog};

/// After its last delivery a relay has this long to fall asleep.
const SETTLE: Duration = Duration::from_secs(6);
const WATCHED: Duration = Duration::from_secs(30);

pub async fn measure(bench: &Bench) -> Result<Vec<Figure>> {
    let stage = bench.rig.stage().await?;
    let sink = Sink::start(1_000).await?;
    let consumer = stage.declare("sink", &sink.url()).await?;
    // One that has worked: an idle relay is rarely a new one.
    backlog::fill(&stage, 0, 1_000, &bench.bodies.of(Size::Small), &[consumer]).await?;
    let mut relay = Relay::start(&bench.rig, &stage)?;
    relay.attached(&stage, 1).await?;
    sink.wait_for(1_000).await?;
    tokio::time::sleep(SETTLE).await;
    log_statements(bench, "all").await?;
    let log = bench.rig.server_log();
    let (from, cpu) = (length(&log)?, relay.cpu()?);
    tokio::time::sleep(WATCHED).await;
    let cpu = relay.cpu()? - cpu;
    let queries = statements(&log, from)?;
    log_statements(bench, "none").await?;
    relay.stop().await?;
    sink.verify(1_000)?;
    let seconds = WATCHED.as_secs_f64();
    let most: Vec<String> = most_frequent(&queries)
        .into_iter()
        .take(12)
        .map(|(name, n)| format!("{name} {:.1}", f64::from(n) / seconds))
        .collect();
    Ok(vec![
        Figure::alone("idle relay, of one core", "%", 100.0 * cpu.as_secs_f64() / seconds, Must::ValueAtMost(1.0)),
        Figure::alone("idle relay, queries", "/s", queries.len() as f64 / seconds, Must::ValueAtMost(5.0))
            .noting(most.join(", ")),
    ])
}

async fn log_statements(bench: &Bench, what: &str) -> Result<()> {
    bench.rig.admin().batch_execute(&format!("alter system set log_statement = '{what}'")).await?;
    bench.rig.admin().batch_execute("select pg_reload_conf()").await?;
    tokio::time::sleep(Duration::from_millis(500)).await;
    Ok(())
}

fn length(log: &Path) -> Result<u64> {
    Ok(fs::metadata(log).map_err(Error::io("the server's log"))?.len())
}

/// Everything the server was asked since its log had `from` bytes, by name.
fn statements(log: &Path, from: u64) -> Result<Vec<String>> {
    let what = || Error::io("the server's log");
    let mut file = fs::File::open(log).map_err(what())?;
    file.seek(SeekFrom::Start(from)).map_err(what())?;
    let mut text = Vec::new();
    file.read_to_end(&mut text).map_err(what())?;
    let text = String::from_utf8_lossy(&text).into_owned();
    let asked = text.lines().filter_map(|line| {
        let statement = line.split_once("LOG:  statement:").or_else(|| line.split_once("LOG:  execute "))?.1;
        let name = statement.split_once("-- ").map_or(statement.trim(), |(_, name)| name.trim());
        Some(if name.is_empty() { "(empty)".to_owned() } else { name.to_owned() })
    });
    Ok(asked.collect())
}

fn most_frequent(names: &[String]) -> Vec<(String, u32)> {
    let mut counts = std::collections::HashMap::new();
    for name in names {
        *counts.entry(name.clone()).or_insert(0) += 1;
    }
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    counts
}
