//! Alarms: an ERROR line, a counter and a row that stays until it is resolved.

use std::time::Duration;

use tokio_postgres::Client;

use super::Result;

/// What went wrong, by a name that dashboards can rely on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Alarm {
    /// A consumer said: same key, other payload.
    Conflict,
    /// A delivery of a closed flight had neither fact nor parked row.
    Unaccounted,
    /// A delivery was being attempted at the death of three relays.
    Poison,
    /// A consumer's declaration or secret cannot be used.
    ConsumerUnusable,
    /// A delivery's outcome could not be written.
    Unwritable,
    /// Nothing can be sent to a consumer: its broker is away or blocks.
    EdgeShut,
    /// A consumer said two things about one key that cannot both be true. The success stands.
    AckConflict,
    /// Replies over AMQP cannot be read.
    RepliesUnread,
    /// What is older than the retention cannot be dropped.
    Retention,
}

impl Alarm {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Conflict => "conflict",
            Self::Unaccounted => "unaccounted",
            Self::Poison => "poison",
            Self::ConsumerUnusable => "consumer_unusable",
            Self::Unwritable => "unwritable",
            Self::EdgeShut => "edge_shut",
            Self::AckConflict => "ack_conflict",
            Self::RepliesUnread => "replies_unread",
            Self::Retention => "retention",
        }
    }
}

/// Raises an alarm, or counts it once more.
pub async fn raise(client: &Client, alarm: Alarm, object: &str, detail: &str) -> Result<()> {
    tracing::error!(alarm = alarm.as_str(), object, detail, "alarm");
    metrics::counter!("fencepost_alarms_total", "alarm" => alarm.as_str()).increment(1);
    client
        .execute(
            "-- store::raise_alarm
             insert into fencepost.alarms (name, object, detail) values ($1, $2, $3)
             on conflict (name, object) do update
             set count = alarms.count + 1, last_at = clock_timestamp(), detail = excluded.detail, resolved_at = null",
            &[&alarm.as_str(), &object, &detail],
        )
        .await?;
    Ok(())
}

/// The cause goes on: raises an alarm that was resolved meanwhile, by whoever could not know better.
pub async fn keep_up(client: &Client, alarm: Alarm, object: &str, detail: &str) -> Result<()> {
    let standing = client
        .query_opt(
            "-- store::standing_alarm
             select from fencepost.alarms where name = $1 and object = $2 and resolved_at is null",
            &[&alarm.as_str(), &object],
        )
        .await?;
    match standing {
        Some(_) => Ok(()),
        None => raise(client, alarm, object, detail).await,
    }
}

/// The cause is gone.
pub async fn resolve(client: &Client, alarm: Alarm, object: &str) -> Result<()> {
    client
        .execute(
            "-- store::resolve_alarm
             update fencepost.alarms set resolved_at = clock_timestamp() where name = $1 and object = $2 and resolved_at is null",
            &[&alarm.as_str(), &object],
        )
        .await?;
    Ok(())
}

/// Resolves what only relays that are gone have said of their ways: no relay that has ticked `within` that time calls the
/// edge shut. Gives how many alarms that were.
pub async fn resolve_forsaken(client: &Client, within: Duration) -> Result<u64> {
    let resolved = client
        .execute(
            "-- store::resolve_forsaken_alarms
             update fencepost.alarms a set resolved_at = clock_timestamp()
             where a.name = $1 and a.resolved_at is null
               and not exists (select from fencepost.relays r
                               where r.stopped_at is null and r.at > clock_timestamp() - make_interval(secs => $2)
                                 and r.shut_edges ? a.object)",
            &[&Alarm::EdgeShut.as_str(), &within.as_secs_f64()],
        )
        .await?;
    Ok(resolved)
}
