//! The consumers: what is declared, what a file would change, and the state all relays share.

use std::time::{Duration, SystemTime};

use serde::Serialize;
use serde_json::{Map, Value, json};
use tokio_postgres::{Client, GenericClient, Transaction};

use super::audit::{self, Reason};
use super::{Error, Result};
use crate::model::consumer::ConsumerEntry;
use crate::model::key::ConsumerId;

/// A consumer as the database has it.
#[derive(Clone, Debug)]
pub struct Stored {
    pub id: ConsumerId,
    pub name: String,
    pub spec: Value,
    pub paused: bool,
    pub paused_reason: Option<String>,
    /// No attempt before this moment of the database's clock.
    pub not_before: Option<SystemTime>,
    pub retired: bool,
}

impl Stored {
    /// The entry it was declared with.
    pub fn entry(&self) -> Result<ConsumerEntry> {
        serde_json::from_value(self.spec.clone())
            .map_err(|error| Error::Corrupt(format!("spec of consumer {:?}: {error}", self.name)))
    }
}

/// What applying a file does to one consumer.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "change", rename_all = "snake_case")]
pub enum Change {
    Add {
        name: String,
    },
    Alter {
        name: String,
        keys: Vec<KeyChange>,
    },
    Same {
        name: String,
    },
    /// Declared in the file, retired in the database: left alone until it is resumed.
    Retired {
        name: String,
    },
    /// In the database only: left alone.
    Absent {
        name: String,
    },
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct KeyChange {
    pub key: String,
    pub before: Value,
    pub after: Value,
}

/// What came, or would come, of applying a file.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum Applied {
    Changes {
        revision: i64,
        changes: Vec<Change>,
    },
    /// The database has seen a newer file.
    Older {
        revision: i64,
        stored: i64,
    },
}

impl Change {
    pub fn changes_something(&self) -> bool {
        matches!(self, Self::Add { .. } | Self::Alter { .. })
    }
}

pub async fn load(client: &impl GenericClient) -> Result<Vec<Stored>> {
    let rows = client
        .query(
            "-- store::consumers
             select consumer_id, name, spec, paused, paused_reason, not_before, retired_at is not null
             from fencepost.consumers order by name",
            &[],
        )
        .await?;
    Ok(rows
        .iter()
        .map(|row| Stored {
            id: ConsumerId(row.get(0)),
            name: row.get(1),
            spec: row.get(2),
            paused: row.get(3),
            paused_reason: row.get(4),
            not_before: row.get(5),
            retired: row.get(6),
        })
        .collect())
}

/// The longest that an attempt at any consumer may take, as they are declared now.
pub async fn longest_attempt(client: &Client) -> Result<Duration> {
    let mut longest = Duration::ZERO;
    for consumer in load(client).await? {
        longest = longest.max(consumer.entry()?.attempt_timeout());
    }
    Ok(longest)
}

/// What applying these entries would do now.
pub async fn preview(client: &impl GenericClient, revision: i64, entries: &[ConsumerEntry]) -> Result<Applied> {
    let stored = stored_revision(client, "").await?;
    if revision < stored {
        return Ok(Applied::Older { revision, stored });
    }
    Ok(Applied::Changes { revision, changes: diff(&load(client).await?, entries)? })
}

/// Adds and changes consumers, in one transaction with the audit entry. An older revision changes nothing, and
/// nothing is ever removed.
pub async fn apply(client: &mut Client, revision: i64, entries: &[ConsumerEntry], reason: &Reason) -> Result<Applied> {
    let tx = client.transaction().await?;
    let stored = stored_revision(&tx, "for update").await?;
    if revision < stored {
        return Ok(Applied::Older { revision, stored });
    }
    let changes = diff(&load(&tx).await?, entries)?;
    let changed: Vec<&Change> = changes.iter().filter(|change| change.changes_something()).collect();
    for change in &changed {
        let (Change::Add { name } | Change::Alter { name, .. }) = change else { continue };
        if let Some(entry) = entries.iter().find(|entry| entry.name == *name) {
            declare(&tx, entry).await?;
        }
    }
    if !changed.is_empty() || revision > stored {
        tx.execute(
            "-- store::consumers_revision
             update fencepost.settings set value = $1 where name = 'consumers_revision'",
            &[&revision.to_string()],
        )
        .await?;
        let detail = json!({ "revision": revision, "before": stored, "changes": changed });
        audit::record(&tx, "consumers apply", &format!("revision {revision}"), reason, &detail).await?;
    }
    tx.commit().await?;
    Ok(Applied::Changes { revision, changes })
}

async fn stored_revision(client: &impl GenericClient, lock: &str) -> Result<i64> {
    let sql = format!(
        "-- store::consumers_revision\nselect value::bigint from fencepost.settings where name = 'consumers_revision' {lock}"
    );
    let row = client.query_opt(&sql, &[]).await?;
    row.map(|row| row.get(0)).ok_or_else(|| Error::Corrupt("no setting consumers_revision".into()))
}

/// Declares one consumer and makes its subscriptions those of the entry.
async fn declare(tx: &Transaction<'_>, entry: &ConsumerEntry) -> Result<()> {
    let spec = spec_of(entry)?;
    tx.execute("-- store::declare_consumer\nselect fencepost.declare_consumer($1, $2)", &[&entry.name, &spec]).await?;
    resubscribe(tx, &entry.name, &entry.topics).await
}

async fn resubscribe(tx: &Transaction<'_>, name: &str, topics: &[String]) -> Result<()> {
    tx.execute(
        "-- store::unsubscribe
         delete from fencepost.subscriptions s using fencepost.consumers c
         where c.name = $1 and s.consumer_id = c.consumer_id and s.topic <> all ($2)",
        &[&name, &topics],
    )
    .await?;
    for topic in topics {
        tx.execute("-- store::subscribe\nselect fencepost.subscribe($1, $2)", &[&topic, &name]).await?;
    }
    Ok(())
}

fn spec_of(entry: &ConsumerEntry) -> Result<Value> {
    serde_json::to_value(entry).map_err(|error| Error::Corrupt(format!("consumer {:?}: {error}", entry.name)))
}

fn diff(stored: &[Stored], entries: &[ConsumerEntry]) -> Result<Vec<Change>> {
    let mut changes = Vec::new();
    for entry in entries {
        let name = entry.name.clone();
        changes.push(match stored.iter().find(|s| s.name == name) {
            None => Change::Add { name },
            Some(s) if s.retired => Change::Retired { name },
            Some(s) => match keys_changed(&s.spec, &spec_of(entry)?) {
                keys if keys.is_empty() => Change::Same { name },
                keys => Change::Alter { name, keys },
            },
        });
    }
    let absent = stored.iter().filter(|s| !s.retired && entries.iter().all(|entry| entry.name != s.name));
    changes.extend(absent.map(|s| Change::Absent { name: s.name.clone() }));
    Ok(changes)
}

fn keys_changed(before: &Value, after: &Value) -> Vec<KeyChange> {
    let empty = Map::new();
    let (before, after) = (before.as_object().unwrap_or(&empty), after.as_object().unwrap_or(&empty));
    let keys: std::collections::BTreeSet<&String> = before.keys().chain(after.keys()).collect();
    let of = |map: &Map<String, Value>, key: &str| map.get(key).cloned().unwrap_or(Value::Null);
    keys.into_iter()
        .map(|key| KeyChange { key: key.clone(), before: of(before, key), after: of(after, key) })
        .filter(|change| change.before != change.after)
        .collect()
}

/// A change of the state that all relays share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateChange {
    /// Attempts stop within a second; its deliveries are kept.
    Pause,
    /// Attempts go on at once; a retired consumer comes back.
    Resume,
    /// Takes no new effects; what waits is kept and still delivered.
    Retire,
}

impl StateChange {
    pub fn verb(self) -> &'static str {
        match self {
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::Retire => "retire",
        }
    }

    /// Whether the consumer is not yet in the state asked for.
    pub fn applies_to(self, consumer: &Stored) -> bool {
        match self {
            Self::Pause => !consumer.paused,
            Self::Resume => consumer.paused || consumer.retired || consumer.not_before.is_some(),
            Self::Retire => !consumer.retired,
        }
    }
}

/// Changes the named consumers that are not yet in that state, and says which.
pub async fn change_state(
    client: &mut Client,
    change: StateChange,
    names: &[String],
    reason: &Reason,
) -> Result<Vec<String>> {
    let sql = match change {
        StateChange::Pause => {
            "-- store::pause_consumer
             update fencepost.consumers set paused = true, paused_reason = $2, updated_at = clock_timestamp() where consumer_id = $1"
        }
        StateChange::Resume => {
            "-- store::resume_consumer
             update fencepost.consumers
             set paused = false, paused_reason = null, not_before = null, retired_at = null, updated_at = clock_timestamp()
             where consumer_id = $1 and $2::text is not null"
        }
        StateChange::Retire => {
            "-- store::retire_consumer
             update fencepost.consumers set retired_at = clock_timestamp(), updated_at = clock_timestamp()
             where consumer_id = $1 and $2::text is not null"
        }
    };
    let tx = client.transaction().await?;
    tx.execute(
        "-- store::lock_consumers\nselect from fencepost.consumers where name = any ($1) order by consumer_id for update",
        &[&names],
    )
    .await?;
    let mut changed = Vec::new();
    for consumer in load(&tx).await?.into_iter().filter(|c| names.contains(&c.name) && change.applies_to(c)) {
        tx.execute(sql, &[&consumer.id.0, &reason.as_str()]).await?;
        if change == StateChange::Resume {
            tx.execute(
                "-- store::resolve_gone
                 update fencepost.alarms set resolved_at = clock_timestamp()
                 where name = 'consumer_gone' and object = $1 and resolved_at is null",
                &[&consumer.name],
            )
            .await?;
        }
        match change {
            StateChange::Retire => resubscribe(&tx, &consumer.name, &[]).await?,
            StateChange::Resume if consumer.retired => {
                resubscribe(&tx, &consumer.name, &consumer.entry()?.topics).await?;
            }
            _ => {}
        }
        let before = json!({ "paused": consumer.paused, "retired": consumer.retired });
        audit::record(&tx, &format!("consumers {}", change.verb()), &consumer.name, reason, &before).await?;
        changed.push(consumer.name);
    }
    tx.commit().await?;
    Ok(changed)
}
