//! A database session of our own: it keeps state (settings, LISTEN, advisory locks) and hears what the server says.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::mpsc;
use tokio_postgres::error::SqlState;
use tokio_postgres::{AsyncMessage, Client, Statement};

use super::{Database, Result, history};

/// A connection with its own server session.
pub struct Session {
    client: Client,
    warnings: Arc<AtomicU64>,
    prepared: Mutex<HashMap<String, Statement>>,
}

/// What arrived on a channel this session listens to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notification {
    pub channel: String,
    pub payload: String,
}

/// Settings of every session of the relay: the plans of the log's queries were chosen and tested under these. A relay that
/// is paused amid a transaction holds locks that a takeover waits for: the server ends it.
const SETTINGS: &str = "-- store::session_settings
set jit = off;
-- Each statement is planned once: its arrays are long, and planning for each anew costs more than running it.
set plan_cache_mode = force_generic_plan;
-- A plan made while the next segment was empty would go on reading it from end to end as it fills.
set enable_seqscan = off;
-- A hash table for a handful of groups is sized for the worst, and emptying that costs more than sorting them.
set enable_hashagg = off;
set max_parallel_workers_per_gather = 0;
set statement_timeout = 0;
set idle_in_transaction_session_timeout = '5s';
set default_transaction_isolation = 'read committed';
set client_min_messages = warning;
set synchronous_commit = on;";

impl Session {
    pub async fn open(database: &Database) -> Result<Self> {
        let (session, _) = Self::open_listening(database).await?;
        Ok(session)
    }

    /// With a receiver of the notifications the session will have asked for.
    pub async fn open_listening(database: &Database) -> Result<(Self, mpsc::UnboundedReceiver<Notification>)> {
        let warnings = Arc::new(AtomicU64::new(0));
        let seen = Arc::clone(&warnings);
        let (heard, notifications) = mpsc::unbounded_channel();
        let client = database
            .connect_with(move |message| match message {
                // Success with a warning: the wait for a synchronous standby was cancelled.
                AsyncMessage::Notice(notice) if *notice.code() == SqlState::WARNING => {
                    tracing::warn!(message = notice.message(), "database warning");
                    seen.fetch_add(1, Ordering::SeqCst);
                }
                AsyncMessage::Notification(n) => {
                    // Nobody listening any more is not an error of the connection.
                    let _ = heard.send(Notification { channel: n.channel().into(), payload: n.payload().into() });
                }
                _ => {}
            })
            .await?;
        client.batch_execute(SETTINGS).await?;
        let found = history::of(&client).await?;
        if let Some(pin) = database.pin() {
            pin.check(found)?;
        }
        Ok((Self { client, warnings, prepared: Mutex::default() }, notifications))
    }

    pub fn client(&self) -> &Client {
        &self.client
    }

    pub fn client_mut(&mut self) -> &mut Client {
        &mut self.client
    }

    /// A statement prepared once in this session.
    pub async fn prepared(&self, sql: &str) -> Result<Statement> {
        let known = self.prepared.lock().unwrap_or_else(PoisonError::into_inner).get(sql).cloned();
        if let Some(statement) = known {
            return Ok(statement);
        }
        let statement = self.client.prepare(sql).await?;
        self.prepared.lock().unwrap_or_else(PoisonError::into_inner).insert(sql.into(), statement.clone());
        Ok(statement)
    }

    /// How many warnings this session has been given so far.
    pub fn warnings(&self) -> u64 {
        self.warnings.load(Ordering::SeqCst)
    }
}
