//! The state of consumers that all relays share: paused, floor, and what they were declared with.

use std::time::Duration;

use serde_json::Value;
use tokio_postgres::Client;

use super::Result;
use crate::model::key::ConsumerId;

/// A consumer as every relay must see it within a second.
#[derive(Clone, Debug, PartialEq)]
pub struct ConsumerState {
    pub id: ConsumerId,
    pub name: String,
    pub spec: Value,
    pub paused: bool,
    /// How long the consumer's floor still holds, by the database's clock.
    pub shut_for: Option<Duration>,
}

pub async fn states(client: &Client) -> Result<Vec<ConsumerState>> {
    let rows = client
        .query(
            "-- store::consumer_states
             select consumer_id, name, spec, paused, extract(epoch from not_before - clock_timestamp())::float8
             from fencepost.consumers order by consumer_id",
            &[],
        )
        .await?;
    Ok(rows
        .iter()
        .map(|row| ConsumerState {
            id: ConsumerId(row.get(0)),
            name: row.get(1),
            spec: row.get(2),
            paused: row.get(3),
            shut_for: row.get::<_, Option<f64>>(4).filter(|s| *s > 0.0).map(Duration::from_secs_f64),
        })
        .collect())
}

/// The consumer is gone: nothing more is sent until an operator resumes it. Its deliveries are kept.
pub async fn pause(client: &Client, id: ConsumerId, reason: &str) -> Result<()> {
    client
        .execute(
            "-- store::pause_consumer
             with paused as (
                 update fencepost.consumers set paused = true, paused_reason = $2, updated_at = clock_timestamp()
                 where consumer_id = $1 and not paused returning name
             )
             insert into fencepost.alarms (name, object, detail) select 'consumer_gone', name, $2 from paused
             on conflict (name, object) do update
             set count = alarms.count + 1, last_at = clock_timestamp(), detail = excluded.detail, resolved_at = null",
            &[&id.0, &reason],
        )
        .await?;
    Ok(())
}

/// Raises the consumer's floor for every relay; never lowers it.
pub async fn not_before(client: &Client, id: ConsumerId, wait: Duration) -> Result<()> {
    client
        .execute(
            "-- store::raise_floor
             update fencepost.consumers
             set not_before = greatest(not_before, clock_timestamp() + make_interval(secs => $2))
             where consumer_id = $1",
            &[&id.0, &wait.as_secs_f64()],
        )
        .await?;
    Ok(())
}

/// Whether a task has known an epoch that high: a consumer's `stale` is believed only then (contract, section 4).
pub async fn epoch_is_known(client: &Client, task_id: &str, epoch: i64) -> Result<bool> {
    let row = client
        .query_one(
            "-- store::epoch_is_known
             select exists (select 1 from fencepost.tasks where task_id = $1 and lease_epoch >= $2)",
            &[&task_id, &epoch],
        )
        .await?;
    Ok(row.get(0))
}
