//! Which history of which database a session speaks to. What a relay remembers is true of one only: after a failover
//! ids may be drawn again for other effects, and an outcome written late would be another delivery's.

use tokio_postgres::Client;
use tokio_util::sync::CancellationToken;

use super::{Error, Result};

/// A database on one WAL timeline of one server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct History {
    pub system_identifier: i64,
    pub timeline: i32,
    pub database: u32,
}

/// A history to hold on to, and what to cancel when a session finds itself in another.
#[derive(Clone, Debug)]
pub struct Pin {
    pub history: History,
    pub over: CancellationToken,
}

impl Pin {
    pub(super) fn check(&self, found: History) -> Result<()> {
        if found == self.history {
            return Ok(());
        }
        self.over.cancel();
        Err(Error::OtherHistory)
    }
}

/// The history this session is in.
///
/// # Errors
/// A standby has none of its own yet: [`Error::Standby`].
pub async fn of(client: &Client) -> Result<History> {
    let row = client
        .query_one(
            "-- store::history
             select pg_is_in_recovery(), c.system_identifier, d.oid,
                    case when not pg_is_in_recovery()
                         then ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::integer end
             from pg_control_system() c, pg_database d where d.datname = current_database()",
            &[],
        )
        .await?;
    match row.get(3) {
        Some(timeline) => Ok(History { system_identifier: row.get(1), timeline, database: row.get(2) }),
        None => Err(Error::Standby),
    }
}

/// Raises the epoch base where the history recorded is not this one, as every claim does; true if it was raised now.
pub async fn note(client: &Client) -> Result<bool> {
    let base = "-- store::recorded_base\nselect epoch_base from fencepost.history";
    let before: i64 = client.query_one(base, &[]).await?.get(0);
    let after: i64 = client.query_one("-- store::note_history\nselect fencepost.epoch_base()", &[]).await?.get(0);
    Ok(after > before)
}
