//! `fencepost migrate`: the schema. Its record is `fencepost.schema_migrations`, so it asks for no reason.

use anyhow::Context;
use serde::Serialize;

use super::global::Global;
use super::{Exit, logging};
use crate::config::LogFormat;
use crate::store::schema;

#[derive(clap::Args, Debug)]
pub struct Args {
    /// Only say what would be applied.
    #[arg(long)]
    dry_run: bool,
}

#[derive(Serialize)]
struct Report {
    version: i32,
    applied: Vec<&'static str>,
    pending: Vec<&'static str>,
}

pub async fn run(global: &Global, args: Args) -> anyhow::Result<Exit> {
    logging::init(LogFormat::Text, "warn");
    let mut client = global.database()?.connect().await.context("cannot reach the database")?;
    let known = schema::MIGRATIONS.last().map_or(0, |m| m.version);
    let report = if args.dry_run {
        let version = schema::version(&client).await?.unwrap_or(0);
        let pending = schema::MIGRATIONS.iter().filter(|m| m.version > version).map(|m| m.name).collect();
        Report { version, applied: Vec::new(), pending }
    } else {
        let applied = schema::migrate(&mut client).await?;
        Report { version: known, applied, pending: Vec::new() }
    };
    global.output().print(&report, || match (report.applied.as_slice(), report.pending.as_slice()) {
        ([], []) => format!("the schema is up to date (version {})", report.version),
        ([], pending) => format!("would apply {}", pending.join(", ")),
        (applied, _) => format!("applied {}; the schema has version {}", applied.join(", "), report.version),
    })?;
    Ok(Exit::Done)
}
