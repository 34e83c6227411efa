//! `fencepost deliveries tail`: what is settled and what fails, as it is written.

use std::time::Duration;

use crate::cli::global::Global;
use crate::cli::output::{self, Output, plain};
use crate::cli::{Exit, deliveries::consumer_id};
use crate::model::duration;
use crate::store::inspect::deliveries::{self, Happening};

#[derive(clap::Args, Debug)]
pub struct Args {
    /// Only this consumer.
    #[arg(long, value_name = "NAME")]
    consumer: Option<String>,
    /// Begin with what happened so long ago.
    #[arg(long, default_value = "10s", value_parser = duration, value_name = "TIME")]
    since: Duration,
    /// End when everything up to now has been told.
    #[arg(long)]
    once: bool,
}

/// How often the database is asked.
const EVERY: Duration = Duration::from_millis(500);

fn duration(text: &str) -> Result<Duration, String> {
    duration::parse(text).ok_or_else(|| "a number and a unit: 10s, 5m, 2h".into())
}

pub async fn run(global: &Global, args: Args) -> anyhow::Result<Exit> {
    let client = global.session().await?;
    let consumer = match &args.consumer {
        Some(name) => Some(consumer_id(&client, name).await?),
        None => None,
    };
    let mut mark = deliveries::mark(&client, args.since.as_secs_f64()).await?;
    loop {
        let (happenings, next) = deliveries::since(&client, &mark, consumer).await?;
        for happening in &happenings {
            let line = match global.output() {
                Output::Json => serde_json::to_string(happening)?,
                Output::Text => line(happening),
            };
            output::write(&format!("{line}\n"))?;
        }
        if args.once {
            return Ok(Exit::Done);
        }
        mark = next;
        tokio::select! {
            () = tokio::time::sleep(EVERY) => {}
            _ = tokio::signal::ctrl_c() => return Ok(Exit::Done),
        }
    }
}

fn line(h: &Happening) -> String {
    let status = h.status.map(|status| format!(" {status}")).unwrap_or_default();
    let detail = h.detail.as_ref().map(|detail| format!("  {detail}")).unwrap_or_default();
    let key = h.key.as_deref().unwrap_or("-");
    plain(&format!("{}  {key}  {}  {}{status}  attempt {}{detail}", h.at, h.consumer, h.token, h.attempt))
}
