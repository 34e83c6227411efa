//! Replies that are no end and came before their message's confirm: acted upon as soon as the attempt has ended.

use std::time::Duration;

use deadpool_postgres::Pool;
use tokio_util::sync::CancellationToken;

use super::replies::Replies;
use crate::edge::error::report;
use crate::store::database::Error;
use crate::store::early;

/// How often it is looked where nobody rings: a relay that died may have left some.
const LOOK_EVERY: Duration = Duration::from_secs(30);
/// After a look that failed.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Acts when the settler or a reply rings, until `stop`.
pub async fn watch(replies: Replies, pool: Pool, stop: CancellationToken) {
    let mut wait = LOOK_EVERY;
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = replies.bell.early.notified() => {}
            () = tokio::time::sleep(wait) => {}
        }
        let acted = async {
            let mut client = pool.get().await.map_err(Error::from)?;
            early::act(&mut client, replies.pace()).await
        };
        wait = match acted.await {
            Ok(0) => LOOK_EVERY,
            Ok(moved) => {
                tracing::info!(moved, "replies that came before the confirm of their message");
                replies.bell.parked.notify_one();
                LOOK_EVERY
            }
            Err(error) => {
                if !error.is_disconnect() {
                    tracing::warn!(error = %report(&error), "replies that came before a confirm could not be acted upon");
                }
                LOOK_AGAIN
            }
        };
    }
}
