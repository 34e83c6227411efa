//! What has not ended, read in one snapshot: what a drained installation has none of.

use tokio_postgres::{Client, IsolationLevel};

use super::status::{self, Edge, OpenFlights};
use crate::store::Result;

#[derive(Clone, Debug)]
pub struct Backlog {
    pub edges: Vec<Edge>,
    pub flights: OpenFlights,
    /// Tasks that are ready or running.
    pub tasks: i64,
}

pub async fn load(client: &mut Client) -> Result<Backlog> {
    let tx = client.build_transaction().isolation_level(IsolationLevel::RepeatableRead).read_only(true).start().await?;
    let tasks = "-- store::open_tasks\nselect count(*) from fencepost.tasks where status in ('ready', 'running')";
    let backlog = Backlog {
        edges: status::edges(&tx).await?,
        flights: status::flights(&tx).await?,
        tasks: tx.query_one(tasks, &[]).await?.get(0),
    };
    tx.commit().await?;
    Ok(backlog)
}
