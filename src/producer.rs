//! The Rust client of the SQL functions (contract, section 3): submit, claim, heartbeat, complete, fail, release, emit.
//!
//! Everything runs in the caller's transaction, so that business rows and effects commit together or not at all. Each
//! call is one round trip with an unnamed statement, which also works behind a transaction pooler.
//!
//! Call [`Lease::complete`] last in its transaction and let an error roll back the *outermost* one: an error that is
//! caught in a savepoint would commit the business rows without their effect.

mod effect;
mod error;

use std::time::{Duration, SystemTime};

use serde_json::Value;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{GenericClient, Row, Transaction};

use crate::model::key::{LeaseEpoch, TaskId};
use crate::model::token::CompletionToken;

pub use effect::{Effect, Payload};
pub use error::{Error, ErrorKind};

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The lease of a claim that does not ask for another.
pub const DEFAULT_LEASE: Duration = Duration::from_secs(30);

/// A task to be worked on.
#[derive(Clone, Debug)]
pub struct NewTask<'a> {
    pub kind: &'a str,
    pub payload: Value,
    /// None: the database makes a UUIDv7. With one, submitting the same task again changes nothing.
    pub task_id: Option<TaskId>,
    /// None: at once.
    pub run_at: Option<SystemTime>,
    /// The claim after the last allowed one ends the task as failed.
    pub max_claims: u32,
}

impl<'a> NewTask<'a> {
    pub fn new(kind: &'a str, payload: Value) -> Self {
        Self { kind, payload, task_id: None, run_at: None, max_claims: 25 }
    }

    pub fn id(mut self, task_id: TaskId) -> Self {
        self.task_id = Some(task_id);
        self
    }
}

/// Submits a task; returns its id. One with the same id, kind and payload is returned as it is.
pub async fn submit(client: &impl GenericClient, task: &NewTask<'_>) -> Result<TaskId> {
    let row = call(
        client,
        "-- producer::submit\nselect fencepost.submit_task($1, $2, $3, $4, $5)",
        &[
            (&task.kind, Type::TEXT),
            (&task.payload, Type::JSONB),
            (&task.task_id.as_ref().map(TaskId::as_str), Type::TEXT),
            (&task.run_at, Type::TIMESTAMPTZ),
            (&i32::try_from(task.max_claims).unwrap_or(i32::MAX), Type::INT4),
        ],
    )
    .await?;
    TaskId::new(row.try_get::<_, String>(0)?).map_err(Error::unexpected)
}

/// Effects of a service that has no tasks: a completion of a new task id, epoch 1. Returns that id.
pub async fn emit(tx: &Transaction<'_>, effects: &[Effect], task_id: Option<&TaskId>) -> Result<TaskId> {
    let row = call(
        tx,
        "-- producer::emit\nselect fencepost.emit($1, $2)",
        &[(&effect::array(effects), Type::JSONB), (&task_id.map(TaskId::as_str), Type::TEXT)],
    )
    .await?;
    TaskId::new(row.try_get::<_, String>(0)?).map_err(Error::unexpected)
}

/// Who works: the owner of the leases it claims.
#[derive(Clone, Debug)]
pub struct Worker {
    owner: String,
    lease: Duration,
    kinds: Option<Vec<String>>,
}

impl Worker {
    /// `owner` names this worker among all others, at every moment: host, process and a number, as a rule.
    pub fn new(owner: impl Into<String>) -> Self {
        Self { owner: owner.into(), lease: DEFAULT_LEASE, kinds: None }
    }

    /// How long its leases last unless a heartbeat extends them.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// The only kinds of task it takes; without this, all.
    pub fn kinds(mut self, kinds: &[&str]) -> Self {
        self.kinds = Some(kinds.iter().map(|kind| (*kind).to_owned()).collect());
        self
    }

    pub fn owner(&self) -> &str {
        &self.owner
    }

    /// Claims up to `max_tasks` that are ready, or whose lease has expired. In a transaction of its own.
    pub async fn claim(&self, client: &impl GenericClient, max_tasks: u32) -> Result<Vec<Lease>> {
        let rows = client
            .query_typed(
                "-- producer::claim
                 select task_id, lease_epoch, kind, payload, lease_expires_at, previous
                 from fencepost.claim_tasks($1, $2, $3, make_interval(secs => $4))",
                &[
                    (&self.owner, Type::TEXT),
                    (&self.kinds, Type::TEXT_ARRAY),
                    (&i32::try_from(max_tasks).unwrap_or(i32::MAX), Type::INT4),
                    (&self.lease.as_secs_f64(), Type::FLOAT8),
                ],
            )
            .await?;
        rows.iter().map(|row| Lease::read(&self.owner, row)).collect()
    }

    /// Reports that a turn of this worker failed, for `fencepost status`. In a transaction of its own, since the one
    /// that failed leaves nothing behind.
    pub async fn report_failure(&self, client: &impl GenericClient) -> Result<()> {
        self.failed(client, false).await
    }

    /// The same after [`ErrorKind::LeaseLost`]: the completion that was refused is counted, and the metrics tell it.
    pub async fn report_lease_lost(&self, client: &impl GenericClient) -> Result<()> {
        self.failed(client, true).await
    }

    async fn failed(&self, client: &impl GenericClient, lease_lost: bool) -> Result<()> {
        let sql = "-- producer::worker_failed\nselect fencepost.worker_failed($1, $2)";
        call(client, sql, &[(&self.owner, Type::TEXT), (&lease_lost, Type::BOOL)]).await.map(drop)
    }
}

/// The right to work on one task, until it expires or the epoch ends.
#[derive(Clone, Debug)]
pub struct Lease {
    pub task_id: TaskId,
    pub epoch: LeaseEpoch,
    pub owner: String,
    pub kind: String,
    pub payload: Value,
    /// By the database's clock.
    pub expires_at: SystemTime,
    /// How the epoch before ended; None for the first.
    pub previous: Option<CompletionToken>,
}

impl Lease {
    /// Extends the lease to `extend` from now; returns when it expires. In a transaction of its own.
    pub async fn heartbeat(&self, client: &impl GenericClient, extend: Duration) -> Result<SystemTime> {
        let row = self
            .call(
                client,
                "-- producer::heartbeat\nselect fencepost.heartbeat($1, $2, $3, make_interval(secs => $4))",
                &[(&extend.as_secs_f64(), Type::FLOAT8)],
            )
            .await?;
        Ok(row.try_get(0)?)
    }

    /// Completes the task with its effects, in the transaction of its business rows. Returns how many were stored.
    ///
    /// [`ErrorKind::LeaseLost`]: somebody else holds a newer epoch; roll back and drop the work.
    /// [`ErrorKind::AlreadyCompleted`]: a COMMIT whose answer was lost had committed.
    pub async fn complete(&self, tx: &Transaction<'_>, effects: &[Effect], result: Option<&Value>) -> Result<u32> {
        let row = self
            .call(
                tx,
                "-- producer::complete\nselect fencepost.complete_task($1, $2, $3, $4, $5)",
                &[(&effect::array(effects), Type::JSONB), (&result, Type::JSONB)],
            )
            .await?;
        u32::try_from(row.try_get::<_, i32>(0)?).map_err(Error::unexpected)
    }

    /// Completes the task with nothing to say, and says why.
    pub async fn complete_no_action(&self, tx: &impl GenericClient, reason: &str) -> Result<()> {
        let sql = "-- producer::complete_no_action\nselect fencepost.complete_task_no_action($1, $2, $3, $4)";
        self.call(tx, sql, &[(&reason, Type::TEXT)]).await.map(drop)
    }

    /// Ends the epoch as failed; the task runs again after `retry_in`, or never where that is None.
    pub async fn fail(&self, client: &impl GenericClient, error: &str, retry_in: Option<Duration>) -> Result<()> {
        let sql = "-- producer::fail\nselect fencepost.fail_task($1, $2, $3, $4, make_interval(secs => $5))";
        let seconds = retry_in.map(|wait| wait.as_secs_f64());
        self.call(client, sql, &[(&error, Type::TEXT), (&seconds, Type::FLOAT8)]).await.map(drop)
    }

    /// Gives the task back unworked.
    pub async fn release(&self, client: &impl GenericClient, reason: &str) -> Result<()> {
        let sql = "-- producer::release\nselect fencepost.release_task($1, $2, $3, $4)";
        self.call(client, sql, &[(&reason, Type::TEXT)]).await.map(drop)
    }

    /// A call whose first three parameters say which lease is meant.
    async fn call(&self, client: &impl GenericClient, sql: &str, more: &[(&(dyn ToSql + Sync), Type)]) -> Result<Row> {
        let (task, epoch) = (self.task_id.as_str(), self.epoch.get());
        let mut params: Vec<(&(dyn ToSql + Sync), Type)> =
            vec![(&task, Type::TEXT), (&epoch, Type::INT8), (&self.owner, Type::TEXT)];
        params.extend(more.iter().cloned());
        call(client, sql, &params).await
    }

    fn read(owner: &str, row: &Row) -> Result<Self> {
        let previous: Option<String> = row.try_get(5)?;
        Ok(Self {
            task_id: TaskId::new(row.try_get::<_, String>(0)?).map_err(Error::unexpected)?,
            epoch: LeaseEpoch::new(row.try_get(1)?).map_err(Error::unexpected)?,
            owner: owner.into(),
            kind: row.try_get(2)?,
            payload: row.try_get(3)?,
            expires_at: row.try_get(4)?,
            previous: previous.map(|word| word.parse().map_err(Error::unexpected)).transpose()?,
        })
    }
}

async fn call(client: &impl GenericClient, sql: &str, params: &[(&(dyn ToSql + Sync), Type)]) -> Result<Row> {
    Ok(client.query_typed_one(sql, params).await?)
}
