//! Metrics of the whole service, the same from every relay: one look at the database at scrape time, kept a few
//! seconds so that probes and scrapers cannot wear it out.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::Admin;
use crate::model::token::Waiting;
use crate::store::inspect::leases::{self, Kind, Leases};
use crate::store::inspect::status::{self, Alarm, Edge};
use crate::store::{Error, Result, alarms};

/// How long a look at the database serves.
const KEPT: Duration = Duration::from_secs(5);
/// Raised for a consumer whose broker is away or blocks.
const ALARM_SHUT: alarms::Alarm = alarms::Alarm::EdgeShut;
/// The longest a scrape waits for it.
const TIMEOUT: Duration = Duration::from_secs(8);

/// What the database said, and when.
pub struct Cached {
    at: Instant,
    service: Arc<Service>,
}

struct Service {
    edges: Vec<Edge>,
    alarms: Vec<Alarm>,
    leases: Leases,
}

/// The gauges as Prometheus text. Without a database only the gauge that says so.
pub async fn render(admin: &Admin) -> String {
    let service = look(admin).await;
    let up = if service.is_some() { 1.0 } else { 0.0 };
    let help = "Whether the database answered, at most a few seconds ago.";
    gauge("fencepost_database_up", help, [(String::new(), up)]) + &service.map(|s| gauges(&s)).unwrap_or_default()
}

/// Consumers that are paused, asked to be left alone, have deliveries in trouble, or cannot be reached by any.
pub async fn unhealthy(admin: &Admin) -> BTreeSet<String> {
    let Some(service) = look(admin).await else { return BTreeSet::new() };
    let is_unhealthy = |edge: &&Edge| {
        edge.paused
            || edge.not_before_in.is_some()
            || [Waiting::Retry, Waiting::Dead, Waiting::InDoubt].iter().any(|token| edge.waiting_of(token.as_str()) > 0)
    };
    let shut =
        service.alarms.iter().filter(|alarm| alarm.name == ALARM_SHUT.as_str()).map(|alarm| alarm.object.clone());
    let unhealthy = service.edges.iter().filter(is_unhealthy).map(|edge| edge.name.clone());
    unhealthy.chain(shut).collect()
}

/// One look at a time; who comes meanwhile gets its result.
async fn look(admin: &Admin) -> Option<Arc<Service>> {
    let mut cached = admin.cached.lock().await;
    if let Some(cached) = cached.as_ref().filter(|cached| cached.at.elapsed() < KEPT) {
        return Some(Arc::clone(&cached.service));
    }
    match tokio::time::timeout(TIMEOUT, load(admin)).await {
        Ok(Ok(service)) => {
            let service = Arc::new(service);
            *cached = Some(Cached { at: Instant::now(), service: Arc::clone(&service) });
            Some(service)
        }
        Ok(Err(error)) => {
            tracing::debug!(%error, "no service gauges: the database cannot be read");
            None
        }
        Err(_) => None,
    }
}

async fn load(admin: &Admin) -> Result<Service> {
    let mut client = admin.pool.get().await.map_err(Error::from)?;
    let tx = client.build_transaction().read_only(true).start().await?;
    Ok(Service {
        edges: status::edges(&tx).await?,
        alarms: status::alarms(&*tx).await?,
        leases: leases::load(&tx).await?,
    })
}

fn gauges(service: &Service) -> String {
    let edges = &service.edges;
    let consumer = |edge: &Edge| label("consumer", &edge.name);
    let waiting = edges.iter().flat_map(|edge| {
        Waiting::ALL.iter().map(move |token| {
            let labels = format!("{},{}", label("consumer", &edge.name), label("token", token.as_str()));
            (labels, edge.waiting_of(token.as_str()) as f64)
        })
    });
    let mut alarms: BTreeMap<&str, f64> = BTreeMap::new();
    for alarm in &service.alarms {
        *alarms.entry(&alarm.name).or_default() += 1.0;
    }
    [
        gauge(
            "fencepost_oldest_waiting_seconds",
            "Age of the oldest effect that waits for a consumer, those scheduled for later left out; 0: none waits.",
            edges.iter().map(|edge| (consumer(edge), edge.oldest_waiting_seconds.unwrap_or(0.0))),
        ),
        gauge("fencepost_waiting", "Parked deliveries by what they wait for.", waiting),
        gauge(
            "fencepost_lagging",
            "Deliveries of flights that a consumer's lanes have still to read, an upper bound.",
            edges.iter().map(|edge| (consumer(edge), edge.lagging_at_most as f64)),
        ),
        gauge(
            "fencepost_unread",
            "Deliveries that no relay has read yet, counted up to a bound.",
            edges.iter().map(|edge| (consumer(edge), edge.unread as f64)),
        ),
        gauge(
            "fencepost_consumer_paused",
            "1 where a consumer is paused.",
            edges.iter().map(|edge| (consumer(edge), f64::from(u8::from(edge.paused)))),
        ),
        gauge(
            "fencepost_alarms",
            "Alarms that nobody has resolved.",
            alarms.into_iter().map(|(name, count)| (label("alarm", name), count)),
        ),
    ]
    .concat()
        + &tasks(&service.leases)
}

fn tasks(leases: &Leases) -> String {
    let by_kind =
        |of: fn(&Kind) -> i64| leases.kinds.iter().map(move |kind| (label("kind", &kind.kind), of(kind) as f64));
    let one = |value: f64| [(String::new(), value)];
    [
        gauge("fencepost_tasks_running", "Tasks under a lease.", by_kind(|kind| kind.running)),
        gauge(
            "fencepost_tasks_stuck",
            "Tasks whose lease ran out and that nobody has taken since.",
            by_kind(|kind| kind.stuck),
        ),
        gauge(
            "fencepost_oldest_stuck_task_seconds",
            "For how long the lease of the task that is stuck longest has been over; 0: none is.",
            one(leases.oldest_stuck_seconds().unwrap_or(0.0)),
        ),
        counter(
            "fencepost_leases_lost_total",
            "Leases that ran out and whose task somebody else took.",
            one(leases.lost as f64),
        ),
        counter(
            "fencepost_completions_refused_total",
            "Completions refused because the lease was lost, as workers reported them.",
            one(leases.refused as f64),
        ),
    ]
    .concat()
}

fn gauge(name: &str, help: &str, values: impl IntoIterator<Item = (String, f64)>) -> String {
    metric("gauge", name, help, values)
}

fn counter(name: &str, help: &str, values: impl IntoIterator<Item = (String, f64)>) -> String {
    metric("counter", name, help, values)
}

/// One metric in the text format; an empty label set stands for one without labels.
fn metric(kind: &str, name: &str, help: &str, values: impl IntoIterator<Item = (String, f64)>) -> String {
    let mut text = format!("# HELP {name} {help}\n# TYPE {name} {kind}\n");
    for (labels, value) in values {
        let labels = if labels.is_empty() { labels } else { format!("{{{labels}}}") };
        let _ = writeln!(text, "{name}{labels} {value}");
    }
    text
}

/// A label with its value escaped as the text format asks.
fn label(name: &str, value: &str) -> String {
    format!("{name}=\"{}\"", value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_values_are_escaped() {
        assert_eq!(label("a", "x\"\\\ny"), "a=\"x\\\"\\\\\\ny\"");
        let text = gauge("g", "help", [(label("a", "b"), 1.5)]);
        assert_eq!(text, "# HELP g help\n# TYPE g gauge\ng{a=\"b\"} 1.5\n");
        assert!(gauge("g", "h", [(String::new(), 1.0)]).ends_with("g 1\n"));
    }
}
