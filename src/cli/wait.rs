//! `fencepost wait --until-drained`: for tests and deployments, returns when nothing waits any more.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::global::{self, Global};
use super::output::{Table, span};
use super::{Exit, logging};
use crate::config::LogFormat;
use crate::model::duration;
use crate::model::token::Waiting;
use crate::store::Database;
use crate::store::inspect::backlog::{self, Backlog};
use crate::store::inspect::status::Edge;

/// How often it looks.
const LOOK: Duration = Duration::from_millis(200);

#[derive(clap::Args, Debug)]
pub struct Args {
    /// Until every committed effect has ended. What only a person can end (dead, in doubt) is named: exit code 1.
    #[arg(long, required = true)]
    until_drained: bool,
    /// Also until no task is ready or running.
    #[arg(long)]
    tasks: bool,
    /// How long at most; what waits then is named: exit code 1. A database that is not there yet is waited for too.
    #[arg(long, default_value = "60s", value_parser = timeout, value_name = "TIME")]
    timeout: Duration,
}

fn timeout(text: &str) -> Result<Duration, String> {
    duration::parse(text).ok_or_else(|| "a number and a unit: 500ms, 60s, 5m".into())
}

/// How it ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum Outcome {
    Drained,
    /// Nothing moves any more; what is left waits for a person.
    NeedsAPerson,
    TimedOut,
}

#[derive(Serialize)]
struct Report {
    outcome: Outcome,
    seconds: f64,
    /// Consumers for which something waits.
    waiting: Vec<Waits>,
    /// Flights a relay has not closed yet, with their deliveries, finished or not.
    flights_open: i64,
    deliveries_in_flight: i64,
    /// Tasks that are ready or running, where they were asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    tasks: Option<i64>,
    /// The last look failed: why.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

#[derive(Serialize)]
struct Waits {
    consumer: String,
    token: String,
    count: i64,
}

pub async fn run(global: &Global, args: Args) -> anyhow::Result<Exit> {
    logging::init(LogFormat::Text, "warn");
    let database = global.database()?;
    let report = wait(&database, &args).await?;
    global.output().print(&report, || render(&report))?;
    Ok(if report.outcome == Outcome::Drained { Exit::Done } else { Exit::Found })
}

async fn wait(database: &Database, args: &Args) -> anyhow::Result<Report> {
    let started = Instant::now();
    let mut client = None;
    loop {
        let late = started.elapsed() >= args.timeout;
        let left = args.timeout.saturating_sub(started.elapsed()).max(LOOK);
        let look = async {
            let session = match &mut client {
                Some(session) => session,
                None => client.insert(global::open(database).await?),
            };
            anyhow::Ok(backlog::load(session).await?)
        };
        let looked = tokio::time::timeout(left, look).await;
        let looked = looked.unwrap_or_else(|_| Err(anyhow::anyhow!("no answer from {}", database.places())));
        let report = match looked {
            Ok(backlog) => report_of(&backlog, args),
            Err(error) => {
                client = None;
                Report {
                    outcome: Outcome::TimedOut,
                    seconds: 0.0,
                    waiting: Vec::new(),
                    flights_open: 0,
                    deliveries_in_flight: 0,
                    tasks: None,
                    error: Some(format!("{error:#}")),
                }
            }
        };
        if late || report.outcome != Outcome::TimedOut {
            return Ok(Report { seconds: started.elapsed().as_secs_f64(), ..report });
        }
        tokio::time::sleep(LOOK).await;
    }
}

fn report_of(backlog: &Backlog, args: &Args) -> Report {
    let waiting: Vec<Waits> = backlog.edges.iter().flat_map(waits).collect();
    let stuck = |wait: &Waits| [Waiting::Dead, Waiting::InDoubt].iter().any(|token| token.as_str() == wait.token);
    let tasks = args.tasks.then_some(backlog.tasks);
    let moving = backlog.flights.count > 0 || tasks.is_some_and(|tasks| tasks > 0) || !waiting.iter().all(stuck);
    let outcome = match (moving, waiting.is_empty()) {
        (true, _) => Outcome::TimedOut,
        (false, false) => Outcome::NeedsAPerson,
        (false, true) => Outcome::Drained,
    };
    Report {
        outcome,
        seconds: 0.0,
        waiting,
        flights_open: backlog.flights.count,
        deliveries_in_flight: backlog.flights.deliveries,
        tasks,
        error: None,
    }
}

fn waits(edge: &Edge) -> Vec<Waits> {
    let one = |token: &str, count: i64| Waits { consumer: edge.name.clone(), token: token.into(), count };
    let mut all: Vec<Waits> = edge.waiting.iter().map(|(token, count)| one(token, *count)).collect();
    all.push(one("lagging", edge.lagging_at_most));
    all.push(one("unread", edge.unread));
    all.retain(|wait| wait.count > 0);
    all
}

fn render(report: &Report) -> String {
    let took = span(report.seconds);
    let mut text = match report.outcome {
        Outcome::Drained => return format!("drained after {took}\n"),
        Outcome::NeedsAPerson => format!("after {took} nothing moves any more, and a person is needed:\n"),
        Outcome::TimedOut => format!("after {took} there still waits:\n"),
    };
    let mut table = Table::new(&["consumer", "what waits", "deliveries"]);
    for wait in &report.waiting {
        table.row([wait.consumer.clone(), wait.token.clone(), wait.count.to_string()]);
    }
    text.push_str(&table.render(""));
    if report.flights_open > 0 {
        let _ = writeln!(text, "{} open flights with {} deliveries", report.flights_open, report.deliveries_in_flight);
    }
    if let Some(tasks) = report.tasks.filter(|tasks| *tasks > 0) {
        let _ = writeln!(text, "{tasks} tasks that are ready or running");
    }
    if let Some(error) = &report.error {
        let _ = writeln!(text, "the database could not be asked: {error}");
    }
    text
}
