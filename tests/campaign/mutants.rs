//! Checking the checker: relays with a seeded mistake, each of which must make the campaign fail.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;

use crate::run;

/// A mistake that leaves something behind has left it by then.
const PATIENCE: Duration = Duration::from_secs(30);

#[cfg(feature = "mutants")]
fn names() -> Vec<&'static str> {
    fencepost::mutant::Mutant::ALL.iter().map(|mutant| mutant.as_str()).collect()
}

#[cfg(not(feature = "mutants"))]
fn names() -> Vec<&'static str> {
    Vec::new()
}

/// Of these one is run each day: the short form has caught each of them.
const ROTATION: &[&str] =
    &["ambiguous_dropped", "doubt_resent", "key_freed_by_doubt", "flight_closed_early", "nack_as_success"];
/// A seed may leave no opportunity for a mistake.
const SEEDS: usize = 2;

/// One mistake, another each day. Whether it was caught.
pub async fn of_the_day(length: Duration) -> anyhow::Result<bool> {
    let days = usize::try_from(crate::history::now() / 86_400_000_000)?;
    let name = ROTATION[days % ROTATION.len()];
    for _ in 0..SEEDS {
        println!("the mistake of the day: {name}");
        if run_all(length, None, Some(name)).await? == ExitCode::SUCCESS {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Runs each for `length` and reports what caught it.
pub async fn run_all(length: Duration, seed: Option<u64>, only: Option<&str>) -> anyhow::Result<ExitCode> {
    let names: Vec<_> = names().into_iter().filter(|name| only.is_none_or(|only| only == *name)).collect();
    if names.is_empty() {
        bail!("no such mutant; they are built with --features mutants (make campaign-mutants)");
    }
    let mut lines = Vec::new();
    let mut escaped = 0;
    for name in names {
        let seed = seed.unwrap_or_else(rand::random::<u64>) % 1_000_000_000;
        let report = run::run(seed, length, &[("FENCEPOST_MUTANT", name)], PATIENCE).await?;
        report.print();
        let caught = report.broken();
        let verdict = if caught.is_empty() { "ESCAPED" } else { "caught" };
        escaped += usize::from(caught.is_empty());
        lines.push(format!("{verdict:8} {name:28} by {caught:?}, seed {seed}, {:.0?}", report.lasted));
    }
    println!("{}", lines.join("\n"));
    Ok(if escaped == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
