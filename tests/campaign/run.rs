//! One run: load and faults, healing, settling, judgement.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::SeedableRng;
use rand::rngs::StdRng;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::accounts::{self, Accounts};
use crate::checker::{self, Case, Tally, Violation};
use crate::database::{self, Database};
use crate::history::History;
use crate::operator::{self, Temper};
use crate::plan::plan;
use crate::postgres_proxy::PostgresProxy;
use crate::producers::{self, Log};
use crate::stage::Stage;
use crate::{nemesis, workers};

const RELAYS: usize = 3;
/// After the last heal what is left must grow less within so long, again and again,
pub const SETTLES_WITHIN: Duration = Duration::from_secs(60);
/// and be nothing after so many times that: a machine that is busy with other things is slower, and not wrong.
const TURNS: u32 = 5;
/// Shown of each invariant.
const SHOWN: usize = 5;

/// What a run came to.
pub struct Report {
    pub seed: u64,
    pub violations: Vec<Violation>,
    pub tally: Tally,
    pub faults: usize,
    pub lasted: Duration,
    pub settled_after: Duration,
    folder: String,
}

/// Runs the campaign of `seed`, with `env` added to the relays' environment.
pub async fn run(seed: u64, length: Duration, env: &[(&str, &str)], patience: Duration) -> anyhow::Result<Report> {
    let started = Instant::now();
    let name = match env.first() {
        Some((_, mutant)) => format!("{mutant}-{seed}"),
        None => seed.to_string(),
    };
    let history = Arc::new(History::new(&name)?);
    println!("campaign: seed {seed}, {} s of faults; history in {}", length.as_secs(), history.folder().display());
    let stage = Arc::new(Stage::set(Arc::clone(&history), seed, RELAYS, env).await?);
    let mut rng = StdRng::seed_from_u64(seed);
    let plan = plan(&mut rng, length, RELAYS);
    let faults = plan.len();

    let log = Arc::new(Log::new(Arc::clone(&history))?);
    let (proxy, url) = PostgresProxy::before_postgres(&stage.url).await;
    let proxy = Arc::new(proxy);
    let (stop, rest) = (CancellationToken::new(), CancellationToken::new());
    let producing = tokio::spawn(producers::run(Arc::clone(&log), url.clone(), seed, stop.clone()));
    let working = tokio::spawn(workers::run(Arc::clone(&log), url, seed, stop.clone()));
    let operating = tokio::spawn(operator::watch(Arc::clone(&stage), rest.clone()));
    let outage = nemesis::run(Arc::clone(&stage), Arc::clone(&proxy), plan, seed, patience).await?;
    stop.cancel();
    producing.await?;
    working.await?;
    rest.cancel();
    operating.await?;

    let healed = Instant::now();
    let settled = settle(&stage, patience).await?;
    let settled_after = healed.elapsed();
    history.note("settled", json!({ "after_ms": settled_after.as_millis(), "left": settled }));
    anyhow::ensure!(env.is_empty() || mutates(&stage), "this build has no mutants: make campaign-mutants");
    let mut violations = self_ended(&stage).await;
    let client = stage.connect().await?;
    let case = Case {
        parts: log.parts(),
        claims: log.claims(),
        database: Database::read(&client).await?,
        receipts: stage
            .consumers
            .iter()
            .map(|link| (link.desk.profile.name, link.desk.receipts()))
            .collect::<BTreeMap<_, _>>(),
        outages: vec![outage],
        // Only once all has settled do the figures keep still.
        accounts: match settled.is_empty() && violations.is_empty() {
            true => accounts::take(&stage).await?,
            false => Accounts::default(),
        },
    };
    let (found, tally) = checker::check(&case);
    violations.extend(found);
    for violation in &violations {
        history.note("violation", json!({ "invariant": violation.invariant, "what": violation.what }));
    }
    let folder = history.folder().display().to_string();
    Ok(Report { seed, violations, tally, faults, lasted: started.elapsed(), settled_after, folder })
}

/// Waits until nothing is left to do, with an operator at hand, while there is progress. Returns what is left at the end
/// of patience.
async fn settle(stage: &Stage, patience: Duration) -> anyhow::Result<Vec<(String, i64)>> {
    let (started, mut progress, mut least) = (Instant::now(), Instant::now(), i64::MAX);
    loop {
        let client = stage.connect().await?;
        let left = database::unsettled(&client).await?;
        let sum = left.iter().map(|(_, count)| count).sum();
        if sum < least {
            (progress, least) = (Instant::now(), sum);
        }
        if left.is_empty() || progress.elapsed() > patience || started.elapsed() > patience * TURNS {
            return Ok(left);
        }
        operator::decide(stage, Temper::Final).await?;
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

/// A mistake that no relay makes is caught by nobody.
fn mutates(stage: &Stage) -> bool {
    let says = |log: &std::path::PathBuf| std::fs::read_to_string(log).is_ok_and(|log| log.contains("on purpose"));
    stage.replicas.iter().any(|replica| says(&replica.log))
}

/// Relays that ended though nobody asked them to, and panics.
async fn self_ended(stage: &Stage) -> Vec<Violation> {
    let mut found = Vec::new();
    for replica in &stage.replicas {
        let mut running = replica.process.lock().await;
        if let Some(status) = running.ended_by_itself() {
            let what = format!("relay {} ended by itself: {status}", replica.number);
            found.push(Violation { invariant: "I0", what });
        }
        let log = std::fs::read_to_string(&replica.log).unwrap_or_default();
        if let Some(line) = log.lines().find(|line| line.contains("panicked at")) {
            found.push(Violation { invariant: "I0", what: format!("relay {}: {line}", replica.number) });
        }
    }
    found
}

impl Report {
    pub fn is_good(&self) -> bool {
        self.violations.is_empty()
    }

    /// How many violations of each invariant.
    pub fn broken(&self) -> BTreeMap<&'static str, usize> {
        let mut broken = BTreeMap::new();
        self.violations.iter().for_each(|violation| *broken.entry(violation.invariant).or_default() += 1);
        broken
    }

    /// Prints it, and says whether all promises were kept.
    pub fn print(&self) -> bool {
        let t = &self.tally;
        println!(
            "seed {}: {} faults in {:.0?}; {} effects, {} deliveries, {} receipts ({} beyond the first), {} commits answered to nobody, {} takeovers (after {} ms and {} ticks at most); settled {:.1?} after the last fault",
            self.seed,
            self.faults,
            self.lasted,
            t.effects,
            t.deliveries,
            t.receipts,
            t.duplicates,
            t.unknown,
            t.takeovers,
            t.longest.millis,
            t.longest.ticks,
            self.settled_after,
        );
        println!(
            "  deliveries: {:?}\n  attempts that ended otherwise or again: {:?}\n  replies that were not believed: {:?}",
            t.tokens, t.ends, t.orphans
        );
        for (invariant, count) in self.broken() {
            println!("  BROKEN {invariant}: {count} times");
            for violation in self.violations.iter().filter(|v| v.invariant == invariant).take(SHOWN) {
                println!("    {}", violation.what);
            }
        }
        let verdict = if self.is_good() { "every promise was kept" } else { "FAILED" };
        println!("  {verdict}; {}\n", self.folder);
        self.is_good()
    }
}
