//! A relay keeps to one history of the database. When a failover or a restore puts another in its place, everything in
//! memory is dropped, and the relay begins again as if it had just been started.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::health::Health;
use super::options::Options;
use super::{outage, run as one};
use crate::edge::Reach;
use crate::edge::error::report;
use crate::store::history::{self, Pin};
use crate::store::session::Session;
use crate::store::{Database, Result, rebase, schema};

/// How often it is looked whether what is waited for has ended, and how often that is said.
const LOOK_EVERY: Duration = Duration::from_millis(200);
const SAY_EVERY: u32 = 50;

/// Runs a relay until `stop` is cancelled, through any number of histories.
///
/// # Errors
/// The schema is missing, older or newer than this build, or its log cannot be read here. A database that is away, or
/// a standby, is waited for.
pub async fn run(
    database: Database,
    options: Options,
    reach: Reach,
    health: Arc<Health>,
    stop: CancellationToken,
) -> Result<()> {
    while !stop.is_cancelled() {
        let Some(pin) = health.during(begin(&database, &stop)).await? else { continue };
        let over = pin.over.clone();
        let ending = stop.child_token();
        let watch = {
            let (over, ending) = (over.clone(), ending.clone());
            tokio::spawn(async move {
                over.cancelled().await;
                ending.cancel();
            })
        };
        let ended =
            one::run(database.pinned(pin), options.clone(), reach.clone(), Arc::clone(&health), ending, over.clone())
                .await;
        watch.abort();
        match ended {
            // Only while it reads what it starts with: a relay that runs waits for its database by itself.
            Err(error) if error.is_disconnect() => {
                tracing::warn!(error = %report(&error), "the database went away before the relay began");
                continue;
            }
            ended => ended?,
        }
        if over.is_cancelled() {
            metrics::counter!("fencepost_histories_total").increment(1);
            tracing::error!(
                "the database is on another server, timeline or copy than before: all that was in memory is dropped, and the relay begins anew"
            );
        }
    }
    Ok(())
}

/// Makes sure that the log can be read here. `None` where the database went away meanwhile, or the relay is to stop.
async fn begin(database: &Database, stop: &CancellationToken) -> Result<Option<Pin>> {
    let Some(mut session) = outage::reconnect(database, "relay", stop).await else { return Ok(None) };
    match ready(&mut session, stop).await {
        Err(error) if error.is_disconnect() => {
            tracing::warn!(error = %report(&error), "the database went away before the relay began");
            Ok(None)
        }
        ready => ready,
    }
}

async fn ready(session: &mut Session, stop: &CancellationToken) -> Result<Option<Pin>> {
    schema::check(session.client()).await?;
    let history = history::of(session.client()).await?;
    if !settle(session, stop).await? {
        return Ok(None);
    }
    Ok(Some(Pin { history, over: CancellationToken::new() }))
}

/// False where the relay is to stop.
async fn settle(session: &mut Session, stop: &CancellationToken) -> Result<bool> {
    let client = session.client();
    rebase::check_identity(client).await?;
    if history::note(client).await? {
        tracing::error!(
            "the database has another history than before (failover, point-in-time recovery or restore): epochs go on above any given out until now"
        );
    }
    while let Some(need) = rebase::need(session.client()).await? {
        if stop.is_cancelled() {
            return Ok(false);
        }
        if !rebase::lead(session.client()).await? {
            tokio::time::sleep(LOOK_EVERY).await;
            continue;
        }
        // Another relay may have done it before it let go.
        if rebase::need(session.client()).await?.is_none() {
            break;
        }
        tracing::error!(%need, "the log must be rebased: reading starts anew here, unfinished deliveries are parked");
        let floor = rebase::set_floor(session.client()).await?;
        let before = rebase::writers(session.client()).await?;
        let mut looked = 0;
        loop {
            let waiting = rebase::still_writing(session.client(), &before).await?;
            if waiting.is_empty() {
                break;
            }
            if looked % SAY_EVERY == 0 {
                let who: Vec<&str> = waiting.iter().map(|writer| writer.who.as_str()).collect();
                tracing::warn!(transactions = who.join(", "), "the rebase waits for transactions that began before it");
            }
            looked += 1;
            tokio::select! {
                () = stop.cancelled() => return Ok(false),
                () = tokio::time::sleep(LOOK_EVERY) => {}
            }
        }
        // Unwrap safety: the text is neither empty nor long.
        let reason = need.to_string().parse().expect("a reason");
        let done = rebase::perform(session.client_mut(), floor, &reason).await?;
        metrics::counter!("fencepost_rebases_total").increment(1);
        tracing::error!(
            floor = done.floor,
            retried = done.retried,
            in_doubt = done.in_doubt,
            "the log was rebased: deliveries that had not ended are tried again, or wait for a person where a duplicate cannot be absorbed"
        );
    }
    Ok(true)
}
