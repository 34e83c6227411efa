//! Losing the database and finding it again: one line when it goes, one when it is back.

use backoff::backoff::Backoff;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::retry;
use crate::edge::error::report;
use crate::store::Database;
use crate::store::session::{Notification, Session};

/// Keeps trying until a session is open, or `stop` is cancelled.
pub async fn reconnect(database: &Database, who: &str, stop: &CancellationToken) -> Option<Session> {
    reconnect_listening(database, who, stop).await.map(|(session, _)| session)
}

/// The same, with a receiver of notifications.
pub async fn reconnect_listening(
    database: &Database,
    who: &str,
    stop: &CancellationToken,
) -> Option<(Session, mpsc::UnboundedReceiver<Notification>)> {
    let mut waits = retry::reconnect();
    let started = Instant::now();
    let mut said = false;
    loop {
        let error = tokio::select! {
            biased;
            () = stop.cancelled() => return None,
            opened = Session::open_listening(database) => match opened {
                Ok(opened) => {
                    if said {
                        tracing::info!(who, after = ?started.elapsed(), "the database is back");
                    }
                    return Some(opened);
                }
                Err(error) => error,
            },
        };
        if !said {
            tracing::warn!(who, error = %report(&error), "the database is gone; trying until it is back");
            said = true;
        }
        let wait = waits.next_backoff().unwrap_or(std::time::Duration::from_secs(5));
        tokio::select! {
            () = stop.cancelled() => return None,
            () = tokio::time::sleep(wait) => {}
        }
    }
}
