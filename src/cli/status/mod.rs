//! `fencepost status`: the installation at one glance; exit code 1 when something needs a person.

mod findings;

use std::time::Duration;

use serde::Serialize;
use tokio_postgres::Client;

use super::Exit;
use super::alarms;
use super::consumers::contract;
use super::global::Global;
use super::output::{self, Table, or_dash, span};
use crate::model::consumer::ConsumerEntry;
use crate::model::duration;
use crate::store::inspect::leases::Leases;
use crate::store::inspect::status::{self, Edge, Relay, Shard, Status, Worker};

#[derive(clap::Args, Debug)]
pub struct Args {
    /// Show it again and again, until interrupted.
    #[arg(long, conflicts_with = "json")]
    watch: bool,
    /// How often, with --watch.
    #[arg(long, default_value = "2s", value_parser = interval, value_name = "TIME")]
    every: Duration,
}

fn interval(text: &str) -> Result<Duration, String> {
    duration::parse(text).filter(|d| !d.is_zero()).ok_or_else(|| "a number and a unit: 500ms, 2s, 1m".into())
}

#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    status: Status,
    /// What needs a person, in words; empty when all is well.
    findings: Vec<String>,
    /// What waits for somebody who is not there: tasks that are stuck, deliveries while no relay runs.
    notices: Vec<String>,
}

pub async fn run(global: &Global, args: Args) -> anyhow::Result<Exit> {
    let lease = global.shard_lease()?;
    let mut client = global.session().await?;
    loop {
        let report = load(&mut client, lease).await?;
        if !args.watch {
            global.output().print(&report, || render(&report))?;
            return Ok(if report.findings.is_empty() { Exit::Done } else { Exit::Found });
        }
        // Home and clear: the screen is redrawn from its top.
        output::write(&format!("\x1b[H\x1b[2J{}", render(&report)))?;
        tokio::select! {
            () = tokio::time::sleep(args.every) => {}
            _ = tokio::signal::ctrl_c() => return Ok(Exit::Done),
        }
    }
}

async fn load(client: &mut Client, lease: Duration) -> anyhow::Result<Report> {
    let status = status::load(client).await?;
    let (findings, notices) = (findings::findings(&status, lease), findings::notices(&status, lease));
    Ok(Report { status, findings, notices })
}

fn render(report: &Report) -> String {
    let status = &report.status;
    let mut text = format!("{}\n\n{}", status.now, edges(&status.edges));
    let flights = status.flights;
    if flights.count > 0 {
        let oldest = flights.oldest_seconds.map(span).unwrap_or_default();
        text.push_str(&format!(
            "\n{} flights open, {} deliveries, the oldest for {oldest}\n",
            flights.count, flights.deliveries
        ));
    }
    for section in [
        alarms::table(&status.alarms).render(""),
        leases(&status.leases),
        relays(&status.relays),
        workers(&status.workers),
        shards(&status.shards),
    ] {
        if !section.is_empty() {
            text.push_str(&format!("\n{section}"));
        }
    }
    if !report.notices.is_empty() {
        text.push('\n');
        report.notices.iter().for_each(|notice| text.push_str(&format!("{}\n", output::plain(notice))));
    }
    match report.findings.as_slice() {
        [] => text.push_str("\nnothing needs a person\n"),
        findings => {
            text.push_str("\nneeds a person:\n");
            findings.iter().for_each(|finding| text.push_str(&format!("  {}\n", output::plain(finding))));
        }
    }
    text
}

fn edges(edges: &[Edge]) -> String {
    let mut table =
        Table::new(&["edge", "kind", "contract", "state", "waiting", "oldest", "rate/min", "eta", "what waits"]);
    for edge in edges {
        let entry: Option<ConsumerEntry> = serde_json::from_value(edge.spec.clone()).ok();
        let mut what: Vec<String> = edge.waiting.iter().map(|(token, count)| format!("{token} {count}")).collect();
        if edge.lagging_at_most > 0 {
            what.push(format!("lagging <= {}", edge.lagging_at_most));
        }
        if edge.unread > 0 {
            what.push(format!("unread {}{}", edge.unread, if edge.unread_capped { "+" } else { "" }));
        }
        let kind = entry.as_ref().map_or_else(|| "?".into(), super::consumers::kind);
        let total = format!("{}{}", edge.waiting_total(), if edge.unread_capped { "+" } else { "" });
        table.row([
            edge.name.clone(),
            kind,
            contract(entry.as_ref()),
            state(edge),
            total,
            or_dash(edge.oldest_waiting_seconds.map(span)),
            edge.settled_last_minute.to_string(),
            or_dash(edge.eta_seconds().map(span)),
            what.join(", "),
        ]);
    }
    table.render("no consumers")
}

fn state(edge: &Edge) -> String {
    match (edge.retired, edge.paused, edge.not_before_in, edge.shut.first()) {
        (true, ..) => "retired".into(),
        (_, true, ..) => format!("paused: {}", edge.paused_reason.as_deref().unwrap_or("-")),
        (_, _, _, Some(first)) => {
            let relays: Vec<&str> = edge.shut.iter().map(|shut| shut.relay.as_str()).collect();
            format!("shut at {}: {}", relays.join(", "), first.why)
        }
        (_, _, Some(seconds), _) => format!("asked to wait {}", span(seconds)),
        _ => "active".into(),
    }
}

fn relays(relays: &[Relay]) -> String {
    let mut table = Table::new(&["relay", "id", "version", "shards", "tick", "token", "last tick"]);
    for r in relays {
        let last = format!("{} ago{}", span(r.age_seconds), if r.stopped { ", stopped" } else { "" });
        let cells = [&r.name, &r.relay, &r.version].map(Clone::clone).into_iter();
        table.row(cells.chain([r.shards.to_string(), r.tick.to_string(), r.token.clone(), last]));
    }
    table.render("no relay has run here: `fencepost run` delivers what waits")
}

fn leases(leases: &Leases) -> String {
    let mut table = Table::new(&["task kind", "running", "stuck", "oldest stuck"]);
    for kind in &leases.kinds {
        let cells = [kind.kind.clone(), kind.running.to_string(), kind.stuck.to_string()].into_iter();
        table.row(cells.chain([or_dash(kind.oldest_stuck_seconds.map(span))]));
    }
    let mut text = table.render("");
    if leases.capped {
        text.push_str("more tasks are running than were looked at\n");
    }
    if leases.lost > 0 || leases.refused > 0 {
        text.push_str(&format!(
            "leases lost: {}, {} of them in the last hour; completions refused for it: {}\n",
            leases.lost, leases.lost_last_hour, leases.refused
        ));
    }
    text
}

fn workers(workers: &[Worker]) -> String {
    let mut table = Table::new(&["worker", "tick", "token", "last tick", "expired leases", "refused"]);
    for w in workers {
        let last = format!("{} ago", span(w.age_seconds));
        let counts = [w.expired_leases, w.refused].map(|count| count.to_string());
        table.row([w.owner.clone(), w.tick.to_string(), w.token.clone(), last].into_iter().chain(counts));
    }
    table.render("")
}

fn shards(shards: &[Shard]) -> String {
    let mut table = Table::new(&["shard", "relay", "epoch", "lease", "newest flight"]);
    for s in shards {
        let lease = match s.lease_seconds {
            None => "nobody".into(),
            Some(seconds) if seconds < 0.0 => format!("expired {} ago", span(-seconds)),
            Some(seconds) => format!("{} left", span(seconds)),
        };
        table.row([
            s.shard.to_string(),
            or_dash(s.relay.clone()),
            s.epoch.to_string(),
            lease,
            or_dash(s.newest_flight),
        ]);
    }
    table.render("")
}
