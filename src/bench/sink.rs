//! The consumers of a bench: HTTP services that answer `applied` at once and count what they receive, and one that
//! takes connections and never answers. They run in the bench's own process, behind the same axum server that the
//! ceilings are measured against.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use tokio::net::TcpListener;
use tokio_util::task::AbortOnDropHandle;

use super::{Error, Result};

/// Nothing arrives for so long: the run is given up.
const STALLED: Duration = Duration::from_secs(60);
const ACK: HeaderName = HeaderName::from_static("outbox-ack");
const ID: &str = "webhook-id";

/// A consumer of deliveries numbered from 0, whose keys read `bench-<n>:1`. Dropped, it stops.
pub struct Sink {
    seen: Arc<Seen>,
    address: SocketAddr,
    _server: AbortOnDropHandle<()>,
}

pub struct Seen {
    base: Instant,
    times: Vec<AtomicU8>,
    /// Microseconds after `base`; 0 where it never came.
    arrived: Vec<AtomicU64>,
    count: AtomicU64,
    strangers: AtomicU64,
    bytes: AtomicU64,
}

impl Sink {
    /// A consumer of `capacity` deliveries.
    pub async fn start(capacity: u32) -> Result<Self> {
        let seen = Arc::new(Seen {
            base: Instant::now(),
            times: (0..capacity).map(|_| AtomicU8::new(0)).collect(),
            arrived: (0..capacity).map(|_| AtomicU64::new(0)).collect(),
            count: AtomicU64::new(0),
            strangers: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.map_err(Error::io("no port for a consumer"))?;
        let address = listener.local_addr().map_err(Error::io("no port for a consumer"))?;
        let router = Router::new().route("/", post(receive)).with_state(Arc::clone(&seen));
        let server = tokio::spawn(async move {
            // It only ends with the process.
            let _ = axum::serve(listener, router).await;
        });
        Ok(Self { seen, address, _server: AbortOnDropHandle::new(server) })
    }

    pub fn url(&self) -> String {
        format!("http://{}/", self.address)
    }

    /// Different deliveries so far.
    pub fn count(&self) -> u64 {
        self.seen.count.load(Ordering::Acquire)
    }

    /// When delivery `n` arrived.
    pub fn arrived(&self, n: usize) -> Option<Instant> {
        let micros = self.seen.arrived[n].load(Ordering::Acquire);
        (micros > 0).then(|| self.seen.base + Duration::from_micros(micros))
    }

    /// When the first of all arrived.
    pub fn first_arrival(&self) -> Option<Instant> {
        (0..self.seen.arrived.len()).filter_map(|n| self.arrived(n)).min()
    }

    /// Waits until `wanted` different deliveries are there.
    pub async fn wait_for(&self, wanted: u64) -> Result<()> {
        let mut last = (self.count(), Instant::now());
        loop {
            let count = self.count();
            if count >= wanted {
                return Ok(());
            }
            if count > last.0 {
                last = (count, Instant::now());
            }
            if last.1.elapsed() > STALLED {
                return Err(Error::Untrue(format!("only {count} of {wanted} deliveries arrived")));
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Whether each of the first `expected` deliveries came exactly once, and nothing else.
    pub fn verify(&self, expected: u32) -> Result<()> {
        self.verify_where(expected, |_| true)
    }

    /// The same for those that `mine` names.
    pub fn verify_where(&self, expected: u32, mine: impl Fn(u32) -> bool) -> Result<()> {
        let (mut missing, mut twice) = (0, 0);
        for n in 0..expected {
            match (self.seen.times[n as usize].load(Ordering::Acquire), mine(n)) {
                (1, true) | (0, false) => {}
                (0, true) => missing += 1,
                _ => twice += 1,
            }
        }
        let strangers = self.seen.strangers.load(Ordering::Acquire);
        if missing + twice > 0 || strangers > 0 {
            return Err(Error::Untrue(format!(
                "of {expected} deliveries {missing} are missing and {twice} came too often; {strangers} requests were not ours"
            )));
        }
        Ok(())
    }
}

impl Seen {
    fn note(&self, id: &str, bytes: usize) -> Option<()> {
        let n: usize = id.strip_prefix("bench-")?.strip_suffix(":1")?.parse().ok()?;
        let times = self.times.get(n)?;
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        if times.fetch_add(1, Ordering::AcqRel) == 0 {
            self.arrived[n].store((self.base.elapsed().as_micros() as u64).max(1), Ordering::Release);
            self.count.fetch_add(1, Ordering::AcqRel);
        }
        Some(())
    }
}

async fn receive(State(seen): State<Arc<Seen>>, headers: HeaderMap, body: Bytes) -> Response {
    match headers.get(ID).and_then(|id| id.to_str().ok()).and_then(|id| seen.note(id, body.len())) {
        Some(()) => (StatusCode::OK, [(ACK, HeaderValue::from_static("applied"))]).into_response(),
        None => {
            seen.strangers.fetch_add(1, Ordering::AcqRel);
            StatusCode::UNPROCESSABLE_ENTITY.into_response()
        }
    }
}

/// A consumer that takes every connection and never answers.
pub struct BlackHole {
    address: SocketAddr,
    _server: AbortOnDropHandle<()>,
}

impl BlackHole {
    pub async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.map_err(Error::io("no port for a consumer"))?;
        let address = listener.local_addr().map_err(Error::io("no port for a consumer"))?;
        let server = tokio::spawn(async move {
            let mut held = Vec::new();
            while let Ok((socket, _)) = listener.accept().await {
                held.push(socket);
            }
        });
        Ok(Self { address, _server: AbortOnDropHandle::new(server) })
    }

    pub fn url(&self) -> String {
        format!("http://{}/", self.address)
    }
}
