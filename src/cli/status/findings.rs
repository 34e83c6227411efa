//! What of all that `status` shows needs a person, and what is worth a line although it does not, or not yet.

use std::time::Duration;

use crate::cli::output::span;
use crate::model::token::Waiting;
use crate::store::inspect::status::{Edge, Relay, Status, Worker};

/// The lease workers claim tasks with where they say nothing else (contract, section 3).
const WORKER_LEASE: Duration = Duration::from_secs(30);

/// Whether a tick is so old that nobody ticks any more.
fn silent(age_seconds: f64, lease: Duration) -> bool {
    age_seconds > 3.0 * lease.as_secs_f64()
}

fn runs(relay: &Relay, lease: Duration) -> bool {
    !relay.stopped && !silent(relay.age_seconds, lease)
}

/// Dead, in doubt, an alarm, a tick older than three leases, be it of the only relay there was.
pub fn findings(status: &Status, lease: Duration) -> Vec<String> {
    let mut found = Vec::new();
    for edge in &status.edges {
        for (token, meaning) in [(Waiting::Dead, "dead"), (Waiting::InDoubt, "in doubt")] {
            let count = edge.waiting_of(token.as_str());
            if count > 0 {
                let remedy = format!("fencepost deliveries list --consumer {} --token {token}", edge.name);
                found.push(format!("{}: {count} {meaning} ({remedy})", edge.name));
            }
        }
    }
    for alarm in &status.alarms {
        found.push(format!("alarm {} {}: {} (fencepost alarms resolve)", alarm.name, alarm.object, alarm.detail));
    }
    let came_back = |gone: &Relay| {
        let since = |r: &Relay| r.name == gone.name && r.up_seconds < gone.age_seconds;
        status.relays.iter().any(|r| runs(r, lease) && since(r))
    };
    // One that died and was started again under its name is no finding: it is served.
    for Relay { name, relay, age_seconds, .. } in
        status.relays.iter().filter(|r| !r.stopped && silent(r.age_seconds, lease) && !came_back(r))
    {
        found.push(format!("relay {name} ({relay}) has not ticked for {}", span(*age_seconds)));
    }
    // A worker that went away idle is no finding; one that still holds tasks is.
    for Worker { owner, age_seconds, expired_leases, .. } in
        status.workers.iter().filter(|w| w.expired_leases > 0 && silent(w.age_seconds, WORKER_LEASE))
    {
        found
            .push(format!("worker {owner} has not ticked for {} and holds {expired_leases} tasks", span(*age_seconds)));
    }
    found.extend(unserved(status, lease).filter(|it| it.lasts).map(|it| it.text));
    found
}

/// What waits for somebody who is not there, though not for long enough to be a finding, or by nobody's fault.
pub fn notices(status: &Status, lease: Duration) -> Vec<String> {
    let mut notices = Vec::new();
    notices.extend(unserved(status, lease).filter(|it| !it.lasts).map(|it| it.text));
    for kind in status.leases.kinds.iter().filter(|kind| kind.stuck > 0) {
        let since = kind.oldest_stuck_seconds.map(span).unwrap_or_default();
        notices.push(format!(
            "{} tasks of kind {} are stuck: the lease ran out, of the first {since} ago, and no worker has claimed them",
            kind.stuck, kind.kind
        ));
    }
    notices
}

/// Deliveries that wait while no relay runs.
struct Unserved {
    text: String,
    /// For longer than three leases nobody has ticked and something has waited.
    lasts: bool,
}

fn unserved(status: &Status, lease: Duration) -> Option<Unserved> {
    let waiting: i64 = status.edges.iter().map(Edge::moving).sum();
    if waiting == 0 || status.relays.iter().any(|relay| runs(relay, lease)) {
        return None;
    }
    let oldest = status.edges.iter().filter_map(|edge| edge.oldest_waiting_seconds).reduce(f64::max).unwrap_or(0.0);
    let last = status.relays.iter().map(|relay| relay.age_seconds).reduce(f64::min);
    let seen = last.map_or_else(|| "none has run here yet".into(), |age| format!("the last ticked {} ago", span(age)));
    Some(Unserved {
        text: format!(
            "no relay runs ({seen}), and deliveries wait: {waiting}, the oldest for {}; start one: fencepost run",
            span(oldest)
        ),
        lasts: silent(oldest, lease) && last.is_none_or(|age| silent(age, lease)),
    })
}
