//! `/livez`: restart me if this fails. `/readyz`: I can do my work.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use super::{Admin, PROBE_TIMEOUT, service};
use crate::relay::health::ShutEdges;
use crate::store::schema;

/// A reader that has not come round for so long hangs, unless the database is away: then it waits for it.
const TURN_MAX: Duration = Duration::from_secs(60);

#[derive(Serialize)]
struct Live {
    alive: bool,
    uptime_seconds: u64,
    last_turn_seconds: f64,
}

#[derive(Serialize)]
struct Ready {
    ready: bool,
    /// What stands in the way; empty when ready.
    faults: Vec<String>,
    shards: u64,
    /// Consumers that need a look. They do not make a relay unready: the others are served.
    unhealthy_consumers: BTreeSet<String>,
    /// Those of them whose way is shut for this relay now, a broker away or blocking, and why. Told from memory, at once.
    shut_edges: ShutEdges,
}

pub async fn livez(State(admin): State<Arc<Admin>>) -> Response {
    let since = admin.health.since_turn();
    let alive = since <= TURN_MAX || database(&admin).await.is_err();
    let live = Live { alive, uptime_seconds: admin.health.uptime().as_secs(), last_turn_seconds: since.as_secs_f64() };
    answer(alive, &live)
}

pub async fn readyz(State(admin): State<Arc<Admin>>) -> Response {
    let mut faults = Vec::new();
    if admin.stop.is_cancelled() {
        faults.push("the relay stops".into());
    }
    let reached = database(&admin).await;
    let reachable = reached.is_ok();
    faults.extend(reached.err());
    match admin.health.since_renewal() {
        None => faults.push("no lease was asked for yet".into()),
        Some(since) if since > admin.lease => {
            faults.push(format!("the last answered renewal was {}s ago", since.as_secs()));
        }
        Some(_) => {}
    }
    let mut unhealthy_consumers = if reachable { service::unhealthy(&admin).await } else { BTreeSet::new() };
    let shut_edges = admin.health.shut_edges().borrow().clone();
    unhealthy_consumers.extend(shut_edges.keys().cloned());
    let ready = faults.is_empty();
    answer(ready, &Ready { ready, faults, shards: admin.health.shards(), unhealthy_consumers, shut_edges })
}

fn answer(good: bool, body: &impl Serialize) -> Response {
    let status = if good { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    match serde_json::to_string(body) {
        Ok(body) => (status, [(header::CONTENT_TYPE, "application/json")], body).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// Whether the database answers and has this build's schema; else what is wrong, without anything secret.
async fn database(admin: &Admin) -> Result<(), String> {
    let look = async {
        let client = admin.pool.get().await.map_err(crate::store::Error::from)?;
        schema::check(&client).await
    };
    match tokio::time::timeout(PROBE_TIMEOUT, look).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(crate::store::Error::Schema(error))) => Err(error.to_string()),
        Ok(Err(_)) => Err("the database cannot be reached".into()),
        Err(_) => Err("the database does not answer".into()),
    }
}
