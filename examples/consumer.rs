//! An HTTP consumer that makes each effect once: axum and the consumer kit of this crate.
//!
//!     DATABASE_URL=postgresql://... [WEBHOOK_SECRET=whsec_...] [PORT=8080] cargo run --example consumer
//!
//! The inbox decides inside the transaction that makes the effect: the key first, the epoch second.

use std::env;
use std::sync::Arc;

use anyhow::Context;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::{Router, routing};
use fencepost::inbox::{Answer, Inbox, Verdict};
use fencepost::model::key::EffectKey;
use standardwebhooks::Webhook;
use tokio_postgres::NoTls;

struct Consumer {
    pool: deadpool_postgres::Pool,
    inbox: Inbox,
    /// Verifies bodies that are text.
    webhook: Option<Webhook>,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let database = env::var("DATABASE_URL").context("DATABASE_URL names this service's own database")?;
    let manager = deadpool_postgres::Manager::new(database.parse()?, NoTls);
    let pool = deadpool_postgres::Pool::builder(manager).build()?;
    // Our name for the fencepost database that sends to us.
    let inbox = Inbox::new("inbox", "billing")?;
    let client = pool.get().await?;
    inbox.install(&**client).await?;
    client.batch_execute("create table if not exists payments (key text not null, body bytea not null)").await?;
    drop(client);

    let webhook = env::var("WEBHOOK_SECRET").ok().map(|secret| Webhook::new(&secret)).transpose()?;
    let consumer = Arc::new(Consumer { pool, inbox, webhook });
    let app = Router::new().route("/", routing::post(receive)).layer(DefaultBodyLimit::max(16 << 20));
    let port = env::var("PORT").unwrap_or_else(|_| "8080".into());
    let listener = tokio::net::TcpListener::bind(format!("127.0.0.1:{port}")).await?;
    println!("listening on {}", listener.local_addr()?);
    Ok(axum::serve(listener, app.with_state(consumer)).await?)
}

async fn receive(State(consumer): State<Arc<Consumer>>, headers: HeaderMap, body: Bytes) -> Response {
    if consumer.webhook.as_ref().is_some_and(|webhook| webhook.verify(&body, &headers).is_err()) {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    let key = headers.get("webhook-id").and_then(|value| value.to_str().ok()).and_then(|text| text.parse().ok());
    let Some(key) = key else { return StatusCode::BAD_REQUEST.into_response() };
    match apply(&consumer, &key, &body).await {
        Ok(Answer { status, outbox_ack }) => {
            let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            (status, [("Outbox-Ack", outbox_ack)]).into_response()
        }
        Err(error) => {
            // Whether it committed is unknown: the relay comes again with the same key.
            println!("{key}: {error:#}");
            StatusCode::SERVICE_UNAVAILABLE.into_response()
        }
    }
}

/// The verdict, and the effect if it is ours to make, in one transaction.
async fn apply(consumer: &Consumer, key: &EffectKey, body: &[u8]) -> anyhow::Result<Answer> {
    let mut client = consumer.pool.get().await?;
    let tx = client.transaction().await?;
    let verdict = consumer.inbox.apply(&tx, key, body).await?;
    if verdict == Verdict::Applied {
        tx.execute("insert into payments (key, body) values ($1, $2)", &[&key.to_string(), &body]).await?;
    }
    tx.commit().await?;
    Ok(consumer.inbox.answer(verdict, key))
}
