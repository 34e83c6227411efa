//! The guided run (`fencepost demo`): a private PostgreSQL, consumers and workers in this process, the relay as a child
//! that is killed on the way, and a report checked against what producers and consumers themselves wrote down.
//!
//! Everything a run makes bears its id, so that runs in one database do not meet. The demo is a user of the product:
//! it goes through `producer`, `inbox` and the stable views, and reads fencepost's own tables only to explain.

mod broker;
mod consumers;
pub mod embedded;
pub(crate) mod input;
pub mod parts;
mod progress;
mod relay;
mod report;
mod shipping;
mod site;
mod stage;
mod workers;

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use secrecy::SecretString;

use consumers::Consumers;
use input::Bodies;
use progress::Progress;
use relay::Relay;
pub use report::Report;
use stage::Stage;
use workers::{Crew, Until};

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// At these shares of the deliveries the relay is killed.
const KILL_AT: [f64; 2] = [0.25, 0.6];
/// And at this share a private broker is restarted.
const RESTART_AT: f64 = 0.45;
/// Nothing settles for so long: the run is given up and reported as it stands.
const STALLED: Duration = Duration::from_secs(120);
const TICK: Duration = Duration::from_millis(100);

/// What the demo is asked for.
#[derive(clap::Args, Clone, Debug)]
pub struct DemoOptions {
    /// How many tasks to run.
    #[arg(long, default_value = "2000", value_name = "N")]
    pub tasks: NonZeroU32,
    /// Bodies to send: one JSON value per line, or {"type": ..., "payload": ...}. Used in turn.
    #[arg(long, value_name = "FILE.jsonl")]
    pub payloads: Option<PathBuf>,
    /// Stay after the report, with everything running, until Ctrl-C.
    #[arg(long)]
    pub keep: bool,
    /// Be one part of a demo that runs as several services, on a database that they share.
    #[arg(long, value_enum, conflicts_with = "keep")]
    pub role: Option<parts::Role>,
    /// Where the role http-consumer listens.
    #[arg(long, default_value = "127.0.0.1:8080", value_name = "ADDRESS", requires = "role")]
    pub listen: SocketAddr,
    /// A database of yours to run in; without one, a private PostgreSQL is started.
    #[arg(skip)]
    pub database_url: Option<SecretString>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Setup(#[from] embedded::Error),
    #[error("{}: {what}", path.display())]
    Payloads { path: PathBuf, what: String },
    #[error(transparent)]
    Store(#[from] crate::store::Error),
    #[error("the demo's database")]
    Postgres(#[from] tokio_postgres::Error),
    #[error("a worker")]
    Producer(#[from] crate::producer::Error),
    #[error("the inbox of a consumer")]
    Inbox(#[from] crate::inbox::Error),
    #[error("{what}")]
    Io { what: String, source: std::io::Error },
    #[error("the relay ended by itself ({status}); its last words:\n{log}")]
    RelayEnded { status: String, log: String },
}

impl Error {
    /// 2 where something has to be written or installed differently, else 1 (contract, section 7).
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Setup(embedded::Error::Missing { .. } | embedded::Error::NotAServer(_))
            | Self::Payloads { .. }
            | Self::Store(crate::store::Error::Url(_)) => 2,
            _ => 1,
        }
    }

    fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}

/// Runs the demo. `show` is given the report as soon as it is there: with `--keep` this returns only after Ctrl-C.
pub async fn run(options: DemoOptions, show: impl FnOnce(&Report)) -> Result<Report> {
    let bodies = Arc::new(Bodies::load(options.payloads.as_deref())?);
    let tasks = options.tasks.get();
    let (stage, mut node) = Stage::set(options.database_url.as_ref()).await?;
    let consumers = Consumers::start(&stage.site).await?;
    stage.declare(&consumers).await?;
    let mut relay = Relay::start(&stage)?;
    workers::submit(&stage.site, &(0..tasks).collect::<Vec<_>>()).await?;
    let started = Instant::now();
    let mut crew = Crew::start(&stage.site, &bodies, Until::NothingLeft);
    let mut progress = Progress::new(tasks);
    let subscribers = stage.site.subscribers().len();
    eprintln!("{tasks} tasks, {} workers, {subscribers} consumers, 1 relay; {}", workers::WORKERS, stage.describe());

    let mut last = ((0, 0, 0), Instant::now());
    let open = loop {
        tokio::time::sleep(TICK).await;
        crew.check()?;
        relay.check()?;
        let (completed, received, promised) = (crew.tally().completed(), consumers.received(), crew.tally().promised());
        progress.show(completed, received, relay.kills());
        let expected = if crew.is_done() { promised } else { u64::from(tasks) * subscribers as u64 };
        if KILL_AT.get(relay.kills() as usize).is_some_and(|share| received as f64 >= share * expected as f64) {
            relay.kill_and_restart().await?;
        }
        if received as f64 >= RESTART_AT * expected as f64 {
            node.restart();
        }
        node.check().await?;
        let stalled = last.1.elapsed() > STALLED;
        let all_there = crew.is_done() && received >= promised;
        let (settled, open) = if all_there || stalled { stage.site.settled().await? } else { (0, 1) };
        if stalled || (open == 0 && relay.kills() as usize == KILL_AT.len() && node.is_done()) {
            break open;
        }
        let now = (completed, received, settled);
        if now != last.0 {
            last = (now, Instant::now());
        }
    };
    progress.done();

    let broker = stage.broker.told(&node);
    let report =
        Report::collect(&stage, &consumers, crew.tally(), relay.kills(), broker, open, started.elapsed()).await?;
    show(&report);
    if !report.is_good() {
        eprintln!("the relay's last words:\n{}", relay.last_words());
    }
    if options.keep {
        eprintln!("\n{}", stage.how_to_look_around(&relay));
        tokio::signal::ctrl_c().await.map_err(Error::io("cannot wait for Ctrl-C"))?;
    }
    relay.stop().await?;
    drop(consumers);
    stage.strike().await?;
    Ok(report)
}
