//! `fencepost run`: the relay, until it is told to stop.

use std::sync::Arc;

use anyhow::Context;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::global::Global;
use super::{Exit, Usage, logging};
use crate::admin::{self, Admin};
use crate::config::Config;
use crate::relay::{self, Health, outage};
use crate::store::audit::Reason;
use crate::store::{Database, consumers, schema};

#[derive(clap::Args, Debug)]
pub struct Args {}

pub async fn run(global: &Global, _args: Args) -> anyhow::Result<Exit> {
    let config = global.config()?;
    logging::init(config.log.format, &config.log.level);
    let database = global.database_of(&config)?;
    let stop = CancellationToken::new();
    tokio::spawn(stop_on_signal(stop.clone())?);
    let metrics = admin::metrics::install().context("metrics")?;
    let listener = listen(&config).await?;
    let health = Arc::new(Health::default());
    let admin = Admin::new(&database, Arc::clone(&health), metrics, config.options.shard_lease, stop.clone());
    let ended = CancellationToken::new();
    let serving = tokio::spawn(admin::serve(listener, admin, ended.clone()));
    let reach = config.reach();
    let done = async {
        health.during(apply_consumers(&database, &config, &stop)).await?;
        relay::run(database, config.options, reach, health, stop).await?;
        anyhow::Ok(Exit::Done)
    };
    let done = done.await;
    ended.cancel();
    // A client that keeps its connection open does not hold up the end.
    serving.abort();
    done
}

/// The admin endpoints' socket: taken at the start, so that a wrong address is seen at once.
async fn listen(config: &Config) -> anyhow::Result<TcpListener> {
    let address = config.admin.listen;
    let listener = TcpListener::bind(address).await.map_err(|error| {
        Usage(format!("admin.listen: cannot listen on {address}: {error}; write another address, or port 0 for any"))
    })?;
    tracing::info!(address = %listener.local_addr()?, "admin endpoints: /livez /readyz /metrics");
    Ok(listener)
}

/// The file's consumers, where the file is not older than what the database has seen. A database that is away is
/// waited for.
async fn apply_consumers(database: &Database, config: &Config, stop: &CancellationToken) -> anyhow::Result<()> {
    if config.consumers.is_empty() {
        return Ok(());
    }
    let Some(mut session) = outage::reconnect(database, "consumers", stop).await else { return Ok(()) };
    let client = session.client_mut();
    schema::check(client).await?;
    let reason = "fencepost run at its start".parse::<Reason>()?;
    match consumers::apply(client, config.revision, &config.consumers, &reason).await? {
        consumers::Applied::Older { revision, stored } => {
            tracing::warn!(revision, stored, "the file's consumers are older than the database's and were not applied");
        }
        consumers::Applied::Changes { changes, .. } => {
            for change in changes.iter().filter(|change| change.changes_something()) {
                tracing::info!(?change, "consumer applied");
            }
        }
    }
    Ok(())
}

/// The first signal asks for an orderly end, the second ends at once.
pub(super) fn stop_on_signal(stop: CancellationToken) -> anyhow::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM cannot be handled")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT cannot be handled")?;
    Ok(async move {
        for _ in 0..2 {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            if stop.is_cancelled() {
                tracing::warn!("a second signal: ending at once; open flights say what is not known");
                std::process::exit(1);
            }
            stop.cancel();
        }
    })
}
