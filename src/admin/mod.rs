//! What a relay answers on loopback: `/livez`, `/readyz` and `/metrics`. Read-only, without credentials, and never
//! with a payload, a secret or a URL in it.

pub mod metrics;
mod probes;
mod service;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use axum::routing::get;
use deadpool_postgres::Pool;
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::net::TcpListener;
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;

use crate::relay::Health;
use crate::store::Database;
use service::Cached;

/// How often histograms are folded; without it they grow.
const UPKEEP: Duration = Duration::from_secs(5);
/// The longest a probe waits for the database.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

/// What the endpoints look at.
pub struct Admin {
    health: Arc<Health>,
    pool: Pool,
    metrics: PrometheusHandle,
    /// A lease that was renewed within this time is held.
    lease: Duration,
    /// Once cancelled, the relay stops and is not ready any more.
    stop: CancellationToken,
    cached: Mutex<Option<Cached>>,
}

impl Admin {
    pub fn new(
        database: &Database,
        health: Arc<Health>,
        metrics: PrometheusHandle,
        lease: Duration,
        stop: CancellationToken,
    ) -> Self {
        // One connection for probes, one for a scrape that takes its time.
        Self { health, pool: database.pool(2), metrics, lease, stop, cached: Mutex::new(None) }
    }
}

/// Answers until `ended` is cancelled, which is after the relay's own end: it can be watched while it stops.
pub async fn serve(listener: TcpListener, admin: Admin, ended: CancellationToken) -> io::Result<()> {
    let admin = Arc::new(admin);
    let folding = tokio::spawn(fold(admin.metrics.clone(), ended.clone()));
    let router = Router::new()
        .route("/livez", get(probes::livez))
        .route("/readyz", get(probes::readyz))
        .route("/metrics", get(scrape))
        .with_state(admin);
    let served = axum::serve(listener, router).with_graceful_shutdown(ended.cancelled_owned()).await;
    folding.abort();
    served
}

async fn scrape(State(admin): State<Arc<Admin>>) -> impl IntoResponse {
    let text = admin.metrics.render() + &service::render(&admin).await;
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text)
}

async fn fold(metrics: PrometheusHandle, ended: CancellationToken) {
    loop {
        tokio::select! {
            () = ended.cancelled() => return,
            () = tokio::time::sleep(UPKEEP) => metrics.run_upkeep(),
        }
    }
}
