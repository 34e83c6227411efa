//! One task: its lease, how each of its epochs ended, and the effects they left.

use serde::Serialize;
use tokio_postgres::GenericClient;

use super::effect::{self, EffectStory, Event, event_from_row};
use crate::model::key::{EffectId, TaskId};
use crate::store::Result;

/// At most so many effects of one task are told.
const EFFECTS_MAX: i64 = 1_000;

#[derive(Clone, Debug, Serialize)]
pub struct TaskStory {
    pub task_id: String,
    pub kind: String,
    pub status: String,
    pub owner: Option<String>,
    pub lease_epoch: i64,
    pub lease_expires_at: Option<String>,
    /// Negative: expired for so long.
    pub lease_seconds: Option<f64>,
    pub run_at: String,
    /// When it may be claimed at the earliest; none where that has come.
    pub ready_in_seconds: Option<f64>,
    pub claims_left: i32,
    pub token: Option<String>,
    pub reason: Option<String>,
    /// Created, each epoch's end, and what operators did, oldest first.
    pub events: Vec<Event>,
    pub effects: Vec<EffectStory>,
}

pub async fn load(client: &impl GenericClient, id: &TaskId) -> Result<Option<TaskStory>> {
    let row = client
        .query_opt(
            "-- store::task
             select kind, status, owner, lease_epoch,
                    case when status = 'running' then lease_expires_at::text end,
                    case when status = 'running' then extract(epoch from lease_expires_at - clock_timestamp())::float8 end,
                    run_at::text,
                    case when status = 'ready' and run_at > clock_timestamp() then extract(epoch from run_at - clock_timestamp())::float8 end,
                    claims_left, token, reason
             from fencepost.tasks where task_id = $1",
            &[&id.as_str()],
        )
        .await?;
    let Some(row) = row else { return Ok(None) };
    let mut effects = Vec::new();
    for effect in effect_ids(client, id).await? {
        effects.extend(effect::load(client, effect, None).await?);
    }
    Ok(Some(TaskStory {
        task_id: id.to_string(),
        kind: row.get(0),
        status: row.get(1),
        owner: row.get(2),
        lease_epoch: row.get(3),
        lease_expires_at: row.get(4),
        lease_seconds: row.get(5),
        run_at: row.get(6),
        ready_in_seconds: row.get(7),
        claims_left: row.get(8),
        token: row.get(9),
        reason: row.get(10),
        events: events(client, id).await?,
        effects,
    }))
}

async fn events(client: &impl GenericClient, id: &TaskId) -> Result<Vec<Event>> {
    let rows = client
        .query(
            "-- store::task_events
             select at::text, what, concat_ws(', ', variadic details)
             from (
                 select created_at as at, 0 as rank, 'submitted' as what, array['kind ' || kind] as details
                 from fencepost.tasks where task_id = $1
                 union all
                 select ended_at, 1, 'epoch ' || lease_epoch || ': ' || token,
                        array['owner ' || owner, case when late then 'late' end, nullif(effect_count, 0) || ' effects', reason]
                 from fencepost.task_epochs where task_id = $1
                 union all
                 select ended_at, 2, 'epoch ' || lease_epoch || ': ' || token,
                        array['owner ' || owner, case when late then 'late' end, nullif(effect_count, 0) || ' effects', reason]
                 from fencepost.tasks where task_id = $1 and token is not null and ended_at is not null
                 union all
                 select at, 3, action, array['by ' || actor, reason] from fencepost.audit_log where object = $1
             ) t order by t.at, t.rank",
            &[&id.as_str()],
        )
        .await?;
    Ok(rows.iter().map(event_from_row).collect())
}

/// Through the completions of its epochs: each knows the range of its effects' ids.
async fn effect_ids(client: &impl GenericClient, id: &TaskId) -> Result<Vec<EffectId>> {
    let rows = client
        .query(
            "-- store::task_effects
             with completion as (
                 select first_effect_id, last_effect_id from fencepost.tasks where task_id = $1
                 union all
                 select first_effect_id, last_effect_id from fencepost.task_epochs where task_id = $1
             )
             select e.id
             from completion c
             cross join lateral (
                 select f.id from fencepost.effects f where f.id between c.first_effect_id and c.last_effect_id and f.task_id = $1
                 union
                 select k.id from fencepost.effects_kept k where k.id between c.first_effect_id and c.last_effect_id and k.task_id = $1
             ) e
             order by e.id limit $2",
            &[&id.as_str(), &EFFECTS_MAX],
        )
        .await?;
    Ok(rows.iter().map(|row| EffectId(row.get(0))).collect())
}
