//! The demo's services. `demo-billing` (HTTP) and `demo-shipping` (AMQP) dedup and fence through the consumer kit and say
//! so; `demo-analytics` is any endpoint that answers 2xx. All write down each request before they think about it, and those
//! over HTTP have bad moments.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use deadpool_postgres::Pool;
use serde::Serialize;
use sha2::{Digest, Sha256};
use tokio::net::TcpListener;
use tokio_util::task::AbortOnDropHandle;

use super::shipping;
use super::site::Site;
use super::stage::CONSUMER_TIMEOUT;
use super::{Error, Result};
use crate::inbox::{Inbox, Verdict};
use crate::model::key::EffectKey;

pub const BILLING: &str = "demo-billing";
pub const ANALYTICS: &str = "demo-analytics";
/// Only where there is a broker.
pub const SHIPPING: &str = "demo-shipping";
/// Those that apply each key once.
pub const DEDUPING: [&str; 2] = [BILLING, SHIPPING];

/// The running services, with their URLs. Dropped, they stop.
pub struct Consumers {
    all: Vec<(Arc<Service>, String)>,
    shipping: Option<Arc<Service>>,
    _servers: Vec<AbortOnDropHandle<()>>,
}

pub struct Service {
    name: &'static str,
    manner: Manner,
    pool: Pool,
    schema: String,
    prefix: String,
    seen: Mutex<Seen>,
}

/// What a service does beyond writing a receipt.
enum Manner {
    Dedups(Inbox),
    Plain,
}

#[derive(Default)]
struct Seen {
    keys: HashSet<String>,
    answers: BTreeMap<&'static str, u64>,
}

/// What a service remembers of the run.
#[derive(Clone, Debug, Serialize)]
pub struct Ledger {
    pub consumer: &'static str,
    pub requests: u64,
    pub keys: u64,
    /// What it answered, by word; `2xx`, `500` and `503` where it said none.
    pub answers: BTreeMap<&'static str, u64>,
}

/// The moods of a service, each at the first request for some keys.
enum Mood {
    Well,
    /// Does nothing and says so.
    Busy,
    /// Does its work, and answers when nobody listens any more.
    Slow,
}

/// Both services behind one listener, each under its name, and `/healthz`.
pub fn router(site: &Site) -> Result<Router> {
    let mut router = Router::new().route("/healthz", get(async || "ok"));
    for service in Service::all(site)? {
        router = router.route(&format!("/{}", service.name), post(receive).with_state(service));
    }
    Ok(router)
}

impl Consumers {
    pub async fn start(site: &Site) -> Result<Self> {
        let mut this = Self { all: Vec::new(), shipping: None, _servers: Vec::new() };
        for service in Service::all(site)? {
            let listener = TcpListener::bind("127.0.0.1:0").await.map_err(Error::io("no port for a consumer"))?;
            let address = listener.local_addr().map_err(Error::io("no port for a consumer"))?;
            let router = Router::new().route("/", post(receive)).with_state(service.clone());
            this.all.push((service, format!("http://{address}/")));
            this._servers.push(AbortOnDropHandle::new(tokio::spawn(async move {
                // It only ends with the process.
                let _ = axum::serve(listener, router).await;
            })));
        }
        if let Some(broker) = &site.broker {
            let service = Service::shipping(site)?;
            let consuming = shipping::serve(service.clone(), broker.url.clone(), broker.queue.clone());
            this._servers.push(AbortOnDropHandle::new(tokio::spawn(consuming)));
            this.shipping = Some(service);
        }
        Ok(this)
    }

    pub fn services(&self) -> impl Iterator<Item = &Arc<Service>> {
        self.all.iter().map(|(service, _)| service).chain(&self.shipping)
    }

    /// Those over HTTP, with their URLs.
    pub fn all(&self) -> &[(Arc<Service>, String)] {
        &self.all
    }

    /// Deliveries that reached their consumer at least once.
    pub fn received(&self) -> u64 {
        self.services().map(|service| service.seen().keys.len() as u64).sum()
    }
}

impl Service {
    fn all(site: &Site) -> Result<[Arc<Self>; 2]> {
        let billing = Self::new(site, BILLING, Manner::Dedups(site.inbox(BILLING)?));
        Ok([billing, Self::new(site, ANALYTICS, Manner::Plain)])
    }

    /// The service over AMQP.
    pub fn shipping(site: &Site) -> Result<Arc<Self>> {
        Ok(Self::new(site, SHIPPING, Manner::Dedups(site.inbox(SHIPPING)?)))
    }

    fn new(site: &Site, name: &'static str, manner: Manner) -> Arc<Self> {
        let (pool, schema, prefix) = (site.pool.clone(), site.schema(), site.prefix());
        Arc::new(Self { name, manner, pool, schema, prefix, seen: Mutex::default() })
    }

    /// One message: the receipt, then the effect. What comes back is the word for the reply.
    pub async fn receive(&self, key: &EffectKey, body: &[u8]) -> Result<Verdict> {
        self.write_receipt(key, body).await?;
        self.seen().keys.insert(key.to_string());
        let verdict = match &self.manner {
            Manner::Dedups(inbox) => self.apply(inbox, key, body).await?,
            Manner::Plain => Verdict::Applied,
        };
        *self.seen().answers.entry(verdict.ack().wire()).or_default() += 1;
        Ok(verdict)
    }

    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Its declared `ack`.
    pub fn ack(&self) -> &'static str {
        match self.manner {
            Manner::Dedups(_) => "required",
            Manner::Plain => "optional",
        }
    }

    pub fn ledger(&self) -> Ledger {
        let seen = self.seen();
        Ledger {
            consumer: self.name,
            requests: seen.answers.values().sum(),
            keys: seen.keys.len() as u64,
            answers: seen.answers.clone(),
        }
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The receipt: first of all, in a transaction of its own.
    async fn write_receipt(&self, key: &EffectKey, body: &[u8]) -> Result<()> {
        let client = self.pool.get().await.map_err(crate::store::Error::from)?;
        let sql = format!(
            "-- demo::receipt\ninsert into {}.receipts (consumer, key, body_sha256) values ($1, $2, $3)",
            self.schema
        );
        let statement = client.prepare_cached(&sql).await?;
        client.execute(&statement, &[&self.name, &key.to_string(), &Sha256::digest(body).as_slice()]).await?;
        Ok(())
    }

    /// The effect and its key in one transaction.
    async fn apply(&self, inbox: &Inbox, key: &EffectKey, body: &[u8]) -> Result<Verdict> {
        let mut client = self.pool.get().await.map_err(crate::store::Error::from)?;
        let tx = client.transaction().await?;
        let verdict = inbox.apply(&tx, key, body).await?;
        if verdict == Verdict::Applied {
            let sql = format!("-- demo::apply\ninsert into {}.applied (consumer, key) values ($1, $2)", self.schema);
            let statement = tx.prepare_cached(&sql).await?;
            tx.execute(&statement, &[&self.name, &key.to_string()]).await?;
        }
        tx.commit().await?;
        Ok(verdict)
    }

    fn mood(&self, key: &EffectKey, first: bool) -> Mood {
        let number = key.task_id().as_str().strip_prefix(&self.prefix).and_then(|n| n.parse::<u32>().ok());
        match number.unwrap_or(0) % 100 {
            17 if first => Mood::Busy,
            39 | 89 if first && matches!(self.manner, Manner::Dedups(_)) => Mood::Slow,
            _ => Mood::Well,
        }
    }
}

async fn receive(State(service): State<Arc<Service>>, headers: HeaderMap, body: Bytes) -> Response {
    let key = headers.get("webhook-id").and_then(|id| id.to_str().ok()).and_then(|id| id.parse::<EffectKey>().ok());
    let Some(key) = key.filter(|key| key.task_id().as_str().starts_with(&service.prefix)) else {
        // Of an earlier run in the same database, or of somebody else.
        return (StatusCode::UNPROCESSABLE_ENTITY, [("outbox-ack", "rejected")]).into_response();
    };
    match answer(&service, &key, &body).await {
        Ok((word, response)) => {
            *service.seen().answers.entry(word).or_default() += 1;
            response
        }
        Err(error) => {
            *service.seen().answers.entry("500").or_default() += 1;
            eprintln!("{}: {}: {error:?}", service.name, key);
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

async fn answer(service: &Service, key: &EffectKey, body: &[u8]) -> Result<(&'static str, Response)> {
    service.write_receipt(key, body).await?;
    let first = service.seen().keys.insert(key.to_string());
    let mood = service.mood(key, first);
    match &service.manner {
        Manner::Plain => Ok(match mood {
            Mood::Busy => ("503", StatusCode::SERVICE_UNAVAILABLE.into_response()),
            _ => ("2xx", StatusCode::OK.into_response()),
        }),
        Manner::Dedups(_) if matches!(mood, Mood::Busy) => {
            let ack = format!("not-applied; key=\"{key}\"");
            Ok(("not-applied", (StatusCode::SERVICE_UNAVAILABLE, [("outbox-ack", ack)]).into_response()))
        }
        Manner::Dedups(inbox) => {
            let verdict = service.apply(inbox, key, body).await?;
            if matches!(mood, Mood::Slow) {
                // Counted here, since nobody waits for the answer.
                *service.seen().answers.entry("applied, but answered too late").or_default() += 1;
                tokio::time::sleep(CONSUMER_TIMEOUT + Duration::from_secs(1)).await;
            }
            let answer = inbox.answer(verdict, key);
            let status = StatusCode::from_u16(answer.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            Ok((verdict.ack().wire(), (status, [("outbox-ack", answer.outbox_ack)]).into_response()))
        }
    }
}
