//! What an operator does to a task; what workers do goes through the SQL functions themselves.

use serde_json::json;
use tokio_postgres::Client;

use super::Result;
use super::audit::{self, Reason};
use crate::model::key::TaskId;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskChange {
    /// End it, while nobody has claimed it.
    Cancel,
    /// Run it again under the next epoch; refused while a delivery of it waits.
    Reopen,
    /// The same beside deliveries that still wait.
    ReopenAnyway,
}

/// Changes the task; false where it is in no state for that.
pub async fn change(client: &mut Client, task: &TaskId, change: TaskChange, reason: &Reason) -> Result<bool> {
    let tx = client.transaction().await?;
    let done = match change {
        TaskChange::Cancel => {
            let sql = "-- store::cancel_task\nselect fencepost.cancel_task($1, $2)";
            let done = tx.query_one(sql, &[&task.as_str(), &reason.as_str()]).await?.get(0);
            if done {
                audit::record(&tx, "task cancel", task.as_str(), reason, &json!({})).await?;
            }
            done
        }
        // The function keeps its own audit entry: producers may call it as well.
        TaskChange::Reopen | TaskChange::ReopenAnyway => {
            let force = change == TaskChange::ReopenAnyway;
            let sql = "-- store::reopen_task\nselect fencepost.reopen_task($1, $2, $3)";
            tx.execute(sql, &[&task.as_str(), &reason.as_str(), &force]).await?;
            true
        }
    };
    tx.commit().await?;
    Ok(done)
}
