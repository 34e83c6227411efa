//! `fencepost demo`: the main job on a private PostgreSQL, with consumers, workers, crashes, and a checked report.

use super::global::Global;
use super::{Exit, Usage, logging};
use crate::demo::{self, DemoOptions};

pub async fn run(global: &Global, mut options: DemoOptions) -> anyhow::Result<Exit> {
    // Only where it was asked for in so many words: a DATABASE_URL that lies about must not receive a demo.
    let asked = |arg: String| arg == "--database-url" || arg.starts_with("--database-url=");
    if std::env::args().any(asked) {
        options.database_url = global.database_url().cloned();
    }
    let output = global.output();
    let show = |report: &demo::Report| {
        if let Err(error) = output.print(report, || report.to_string()) {
            eprintln!("fencepost: the report cannot be printed: {error}");
        }
    };
    match demo::run(options, show).await {
        Ok(report) if report.is_good() => Ok(Exit::Done),
        Ok(_) => Ok(Exit::Found),
        Err(error) if error.exit_code() == 2 => Err(Usage(logging::report(&error)).into()),
        Err(error) => Err(error.into()),
    }
}
