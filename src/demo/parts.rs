//! The demo's parts as services of their own, for a run on several machines (`docker-compose.yml`): they share one
//! database, and each ends at SIGTERM. The consumers are declared by the relay's configuration.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use secrecy::SecretString;
use serde::Serialize;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::broker;
use super::consumers::{self, Service};
use super::input::Bodies;
use super::report::{self, Check};
use super::shipping;
use super::site::Site;
use super::workers::{self, Crew, Until};
use super::{Error, Result};
use crate::store::Database;

/// The name of the run that all parts belong to.
const RUN: &str = "shared";
/// Names a file that holds the broker's URL.
const URL_FILE: &str = "AMQP_URL_FILE";
/// How often the worker pool looks after its workers, and how long it waits once one has failed.
const TICK: Duration = Duration::from_secs(1);

/// Which part.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Role {
    /// Make the demo's own tables, once; fencepost's must be there.
    Stage,
    /// Submit --tasks tasks.
    Submit,
    /// A pool of workers, until SIGTERM.
    Worker,
    /// Both HTTP consumers on --listen, as /demo-billing and /demo-analytics, until SIGTERM.
    HttpConsumer,
    /// The AMQP consumer on the broker of AMQP_URL, or of the file in AMQP_URL_FILE, until SIGTERM. Where workers and
    /// `check` are told of a broker too, it is counted on.
    AmqpConsumer,
    /// Hold the producers' word against the consumers'; exit code 1 where they differ.
    Check,
}

/// What a part is asked for.
pub struct Part {
    pub role: Role,
    pub database: Database,
    pub tasks: u32,
    pub payloads: Option<PathBuf>,
    pub listen: SocketAddr,
}

/// What a part has to say at its end.
#[derive(Serialize)]
#[serde(untagged)]
pub enum Said {
    Done,
    Submitted { submitted: usize },
    Checked(Check),
}

impl Said {
    pub fn is_good(&self) -> bool {
        match self {
            Self::Checked(check) => check.is_good(),
            Self::Done | Self::Submitted { .. } => true,
        }
    }
}

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done => Ok(()),
            Self::Submitted { submitted } => writeln!(f, "{submitted} tasks submitted"),
            Self::Checked(check) => writeln!(f, "{check}"),
        }
    }
}

/// Plays the part to its end.
pub async fn play(part: Part, stop: CancellationToken) -> Result<Said> {
    let site = Site::new(RUN.into(), part.database, broker_url()?);
    match part.role {
        Role::Stage => stage(&site).await.map(|()| Said::Done),
        Role::Submit => submit(&site, part.tasks).await,
        Role::Worker => {
            let bodies = Arc::new(Bodies::load(part.payloads.as_deref())?);
            work(&site, &bodies, stop).await;
            Ok(Said::Done)
        }
        Role::HttpConsumer => {
            let what = || format!("cannot listen on {}", part.listen);
            let listener = TcpListener::bind(part.listen).await.map_err(Error::io(what()))?;
            let address = listener.local_addr().map_err(Error::io(what()))?;
            eprintln!("listening on {address}");
            let router = consumers::router(&site)?;
            let served = axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned()).await;
            served.map(|()| Said::Done).map_err(Error::io(what()))
        }
        Role::AmqpConsumer => {
            let missing = Error::io(format!("no broker: set {} or {URL_FILE}", broker::URL));
            let way = site.broker.clone().ok_or_else(|| missing(std::io::ErrorKind::NotFound.into()))?;
            declare(&way.url, &way.queue, &stop).await;
            stop.run_until_cancelled(shipping::serve(Service::shipping(&site)?, way.url, way.queue)).await;
            Ok(Said::Done)
        }
        Role::Check => {
            let client = site.database.connect().await?;
            let (_, unfinished) = site.settled().await?;
            Ok(Said::Checked(report::check(&client, &site.schema(), unfinished).await?))
        }
    }
}

/// The broker's URL from its variable, or from the file that another names: a secret need not be in the environment.
fn broker_url() -> Result<Option<SecretString>> {
    if let Ok(url) = std::env::var(broker::URL) {
        return Ok(Some(url.into()));
    }
    let Ok(path) = std::env::var(URL_FILE) else { return Ok(None) };
    let url = std::fs::read_to_string(&path).map_err(Error::io(format!("{URL_FILE}: cannot read {path}")))?;
    Ok(Some(url.trim().into()))
}

/// The parts may run as roles of their own: what is the demo's own is open to all of them.
async fn stage(site: &Site) -> Result<()> {
    site.prepare().await?;
    let sql = "-- demo::open
               grant usage on schema {schema} to public;
               grant select, insert, update, delete on all tables in schema {schema} to public;
               grant usage on all sequences in schema {schema} to public";
    let client = site.database.connect().await?;
    Ok(client.batch_execute(&sql.replace("{schema}", &site.schema())).await?)
}

/// Declares the consumer's queue as soon as the broker is there.
async fn declare(url: &SecretString, queue: &str, stop: &CancellationToken) {
    while let Err(error) = shipping::declare(url, queue).await {
        tracing::info!(%error, "the broker is not there yet");
        if stop.run_until_cancelled(tokio::time::sleep(TICK)).await.is_none() {
            return;
        }
    }
}

async fn submit(site: &Site, tasks: u32) -> Result<Said> {
    let client = site.database.connect().await?;
    let sql = "-- demo::numbers
               select nextval('{schema}.task_numbers')::integer from generate_series(1, $1::bigint)";
    let rows = client.query(&sql.replace("{schema}", &site.schema()), &[&i64::from(tasks)]).await?;
    let numbers: Vec<u32> = rows.iter().map(|row| row.get::<_, i32>(0).unsigned_abs()).collect();
    workers::submit(site, &numbers).await?;
    Ok(Said::Submitted { submitted: numbers.len() })
}

/// Whatever befalls a worker, another takes its place: its tasks are claimed again when its leases have run out.
async fn work(site: &Site, bodies: &Arc<Bodies>, stop: CancellationToken) {
    let mut crew = Crew::start(site, bodies, Until::Stopped);
    while stop.run_until_cancelled(tokio::time::sleep(TICK)).await.is_some() {
        for error in crew.tend() {
            tracing::warn!(
                error = format!("{:#}", anyhow::Error::from(error)),
                "a worker failed; another takes its place"
            );
        }
    }
}
