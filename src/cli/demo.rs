//! `fencepost demo`: the main job on an embedded default, with a report.

use tokio_util::sync::CancellationToken;

use super::global::Global;
use super::output::Output;
use super::run::stop_on_signal;
use super::{Exit, logging};
use crate::config::LogFormat;
use crate::demo::parts::{self, Part, Role};
use crate::demo::{self, DemoOptions};

pub async fn run(global: &Global, mut options: DemoOptions) -> anyhow::Result<Exit> {
    logging::init(LogFormat::Text, "warn");
    if let Some(role) = options.role {
        return play(global, role, options).await;
    }
    // Only where it was typed: a DATABASE_URL that happens to be set must not be filled with a demo.
    options.database_url = global.typed_database_url();
    let output = global.output();
    let show = |report: &demo::Report| {
        let shown = match output {
            Output::Json => serde_json::to_string_pretty(report).unwrap_or_else(|error| error.to_string()),
            Output::Text => report.to_string(),
        };
        // The report is also the exit code; a reader that went away misses only the words.
        let _ = super::output::write(&format!("{shown}\n"));
    };
    let report = demo::run(options, show).await?;
    Ok(if report.is_good() { Exit::Done } else { Exit::Found })
}

async fn play(global: &Global, role: Role, options: DemoOptions) -> anyhow::Result<Exit> {
    let stop = CancellationToken::new();
    tokio::spawn(stop_on_signal(stop.clone())?);
    let part = Part {
        role,
        database: global.database()?,
        tasks: options.tasks.get(),
        payloads: options.payloads,
        listen: options.listen,
    };
    let said = parts::play(part, stop).await?;
    global.output().print(&said, || said.to_string())?;
    Ok(if said.is_good() { Exit::Done } else { Exit::Found })
}
