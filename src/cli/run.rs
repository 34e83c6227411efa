//! `fencepost run`: the relay, until it is told to stop.

use std::sync::Arc;

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::global::Global;
use super::{Exit, logging};
use crate::relay::{self, Health};
use crate::store::audit::Reason;
use crate::store::{Database, consumers};

#[derive(clap::Args, Debug)]
pub struct Args {}

pub async fn run(global: &Global, _args: Args) -> anyhow::Result<Exit> {
    let config = global.config()?;
    logging::init(config.log.format, &config.log.level);
    let database = global.database_of(&config)?;
    let stop = CancellationToken::new();
    tokio::spawn(stop_on_signal(stop.clone())?);
    apply_consumers(&database, &config).await?;
    let reach = config.reach();
    relay::run(database, config.options, reach, Arc::new(Health::default()), stop).await?;
    Ok(Exit::Done)
}

/// The file's consumers, where the file is not older than what the database has seen.
async fn apply_consumers(database: &Database, config: &crate::config::Config) -> anyhow::Result<()> {
    if config.consumers.is_empty() {
        return Ok(());
    }
    let mut client = database.connect().await.context("cannot reach the database")?;
    let reason = "fencepost run at its start".parse::<Reason>()?;
    if let consumers::Applied::Older { revision, stored } =
        consumers::apply(&mut client, config.revision, &config.consumers, &reason).await?
    {
        tracing::warn!(revision, stored, "the file's consumers are older than the database's and were not applied");
    }
    Ok(())
}

/// The first signal asks for an orderly end, the second ends at once.
fn stop_on_signal(stop: CancellationToken) -> anyhow::Result<impl Future<Output = ()>> {
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
