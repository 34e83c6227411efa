//! Effects as rows. Every statement that reads effects selects `EFFECT_COLUMNS` first, so that each has its place and
//! nobody looks for a column's name row by row.

use std::time::Duration;

use bytes::Bytes;
use tokio_postgres::Row;

use super::{Error, Result};
use crate::model::effect::Effect;
use crate::model::key::{ConsumerId, EffectId, EffectKey, LeaseEpoch, Shard, TaskId};

/// The columns of [`read_effect`], of an effect called `e`. The clock is asked only where an effect has a time.
pub(super) const EFFECT_COLUMNS: &str = "e.id, e.shard, e.task_id, e.lease_epoch, e.position, e.targets, e.topic, \
    e.type, e.schema_version, e.content_type, e.headers, e.ordering_key, e.traceparent, e.payload, e.sha256, \
    e.committed_at, e.deliver_after, e.expires_at, \
    case when e.deliver_after is not null then extract(epoch from e.deliver_after - clock_timestamp())::float8 end as due_in, \
    case when e.expires_at is not null then e.expires_at <= clock_timestamp() end as expired";

/// How many they are: the place of the first column after them.
pub(super) const EFFECT_WIDTH: usize = 20;

/// The effect with the id of `m`, wherever it is: its segment may have been dropped, or be about to be.
pub(super) const EFFECT_OF_M: &str = "select * from fencepost.effects x where x.id = m.id
    union all select * from fencepost.effects_kept k where k.id = m.id limit 1";

/// An effect with what the database's clock said of it when it was read.
#[derive(Clone, Debug)]
pub struct ReadEffect {
    pub effect: Effect,
    /// How long it still has to wait for its `deliver_after`.
    pub due_in: Option<Duration>,
    pub expired: bool,
}

pub(super) fn read_effect(row: &Row) -> Result<ReadEffect> {
    let id: i64 = row.get(0);
    let corrupt = |what: &str| Error::Corrupt(format!("effect {id}: {what}"));
    let key = TaskId::new(row.get::<_, &str>(2))
        .and_then(|task| {
            let epoch = LeaseEpoch::new(row.get(3))?;
            EffectKey::new(task, epoch, row.get::<_, i32>(4).max(0).unsigned_abs())
        })
        .map_err(|e| corrupt(&e.to_string()))?;
    let headers = match row.get::<_, Option<serde_json::Value>>(10) {
        Some(serde_json::Value::Object(map)) => {
            map.into_iter().map(|(name, value)| (name, value.as_str().unwrap_or_default().to_string())).collect()
        }
        _ => Vec::new(),
    };
    let effect = Effect {
        id: EffectId(id),
        shard: Shard(row.get(1)),
        key,
        targets: row.get::<_, Vec<i32>>(5).into_iter().map(ConsumerId).collect(),
        topic: row.get(6),
        kind: row.get(7),
        schema_version: row.get(8),
        content_type: row.get(9),
        headers,
        ordering_key: row.get(11),
        traceparent: row.get(12),
        payload: Bytes::copy_from_slice(row.get(13)),
        sha256: row.get::<_, &[u8]>(14).try_into().map_err(|_| corrupt("its digest is not 32 bytes"))?,
        committed_at: row.get(15),
        deliver_after: row.get(16),
        expires_at: row.get(17),
    };
    let due_in: Option<f64> = row.get(18);
    let expired = row.get::<_, Option<bool>>(19).unwrap_or(false);
    Ok(ReadEffect { effect, due_in: due_in.filter(|s| *s > 0.0).map(Duration::from_secs_f64), expired })
}
