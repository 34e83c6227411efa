//! `fencepost demo`: the main job on an embedded default, with a report.

use super::global::Global;
use super::output::Output;
use super::{Exit, logging};
use crate::config::LogFormat;
use crate::demo::{self, DemoOptions};

pub async fn run(global: &Global, mut options: DemoOptions) -> anyhow::Result<Exit> {
    logging::init(LogFormat::Text, "warn");
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
