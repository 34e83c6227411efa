//! Keeping the tables bounded, behind the relay's back: one relay at a time, no lock that a producer could feel.

use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::outage;
use crate::edge::error::report;
use crate::store::retention::{self, Policy};
use crate::store::segments::{self, Link, Parent, Segment, Step};
use crate::store::session::Session;
use crate::store::{Database, Result, alarms, expiry};

/// How often, at most and at least; else a thousandth of the retention.
const EVERY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// The longest a statement waits for a lock. None of those it waits for makes a writer queue behind it.
const LOCK_TIMEOUT: &str = "2s";

/// Does rounds until `stop`.
pub async fn run(database: Database, stop: CancellationToken) {
    while let Some(mut session) = outage::reconnect(&database, "retention", &stop).await {
        tokio::select! {
            () = stop.cancelled() => return,
            ended = rounds(&mut session) => match ended {
                Err(error) if error.is_disconnect() => {
                    tracing::debug!(error = %report(&error), "retention waits for the database")
                }
                Err(error) => tracing::error!(error = %report(&error), "retention failed"),
                Ok(()) => {}
            }
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(EVERY.1) => {}
        }
    }
}

/// Ends when another relay does it.
async fn rounds(session: &mut Session) -> Result<()> {
    if !retention::lead(session).await? {
        return Ok(());
    }
    let mut keeper = Retention::new(session).await?;
    loop {
        let policy = retention::policy(session).await?;
        keeper.round(session, policy).await?;
        tokio::time::sleep((policy.retention / 1_000).clamp(EVERY.0, EVERY.1)).await;
    }
}

/// What one relay knows while it has the lead.
pub struct Retention {
    owner: bool,
    /// Since when a segment could not be dropped.
    stuck: Option<Stuck>,
}

struct Stuck {
    since: Instant,
    said: bool,
}

impl Retention {
    pub async fn new(session: &Session) -> Result<Self> {
        session.client().batch_execute(&format!("-- store::lock_timeout\nset lock_timeout = '{LOCK_TIMEOUT}'")).await?;
        let owner = segments::become_owner(session.client()).await?;
        if !owner {
            tracing::warn!(
                "this role does not own the tables of fencepost and is no member of their owner: no segment will be dropped; \
                 grant the owner's role to it, or run a relay as the owner"
            );
        }
        Ok(Self { owner, stuck: None })
    }

    /// One round: room ahead, the next segment where the time has come, what is expired dropped, rows deleted.
    pub async fn round(&mut self, session: &mut Session, policy: Policy) -> Result<()> {
        if self.owner {
            let waits = self.segments(session).await?;
            self.watch(session, policy, waits).await?;
        }
        for (table, rows) in expiry::sweep(session.client()).await? {
            tracing::info!(table, rows, "rows older than the retention deleted");
            metrics::counter!("fencepost_expired_rows_total", "table" => table).increment(rows);
        }
        Ok(())
    }

    /// Returns what stands in the way, if anything does; it holds up nothing that does not depend on it.
    async fn segments(&self, session: &mut Session) -> Result<Option<String>> {
        let mut waits = Vec::new();
        for segment in retention::expired(session).await? {
            if let Step::Waits(why) = drop_effects(session, &segment).await? {
                waits.push(why);
                break;
            }
        }
        for parent in Parent::ALL {
            if let Step::Waits(why) = segments::make_room(session.client(), parent).await? {
                waits.push(why);
            }
        }
        if retention::is_due_to_move_on(session).await?
            && let Some(from) = segments::move_on(session.client()).await?
        {
            tracing::info!(from, "the log goes on in a new segment");
        }
        while let Some(segment) = retention::expired_ledger(session).await? {
            if let Step::Waits(why) = retention::drop_ledger(session, &segment).await? {
                waits.push(why);
                break;
            }
            tracing::info!(segment = segment.table(), "segment dropped");
        }
        Ok(waits.into_iter().next())
    }

    /// Waiting is said at once, and is an alarm when it lasts as long as a segment should.
    async fn watch(&mut self, session: &Session, policy: Policy, waits: Option<String>) -> Result<()> {
        let Some(why) = waits else {
            // Whoever raised it: another relay may have looked after retention then.
            alarms::resolve(session.client(), alarms::Alarm::Retention, "segments").await?;
            self.stuck = None;
            return Ok(());
        };
        tracing::info!(why, "retention waits");
        let stuck = self.stuck.get_or_insert_with(|| Stuck { since: Instant::now(), said: false });
        if stuck.since.elapsed() > policy.span && !stuck.said {
            alarms::raise(session.client(), alarms::Alarm::Retention, "segments", &why).await?;
            stuck.said = true;
        }
        Ok(())
    }
}

/// Every delivery of the segment that still waits is kept; only then does it go.
async fn drop_effects(session: &Session, segment: &Segment) -> Result<Step> {
    let client = session.client();
    let mut kept = 0;
    if let Link::Bounded { .. } = segment.link {
        if let Some(why) = retention::obstacle(session, segment).await? {
            return Ok(Step::Waits(why));
        }
        kept = retention::keep(session, segment).await?;
        // Meanwhile something may have been committed that nobody has read.
        if let Some(why) = retention::obstacle(session, segment).await? {
            return Ok(Step::Waits(why));
        }
    }
    let detached = match segment.link {
        Link::Detached => Step::Done,
        Link::Pending => segments::finalize(client, segment).await?,
        Link::Bounded { .. } | Link::Open => segments::detach(client, segment).await?,
    };
    if let Step::Waits(_) = detached {
        return Ok(detached);
    }
    let again = retention::keep_late(session, segment).await?;
    if again.late > 0 {
        tracing::warn!(
            segment = segment.table(),
            deliveries = again.late,
            "effects were committed while their segment was being dropped; they are kept and will be delivered"
        );
    }
    let dropped = retention::drop_detached(session, segment).await?;
    if dropped == Step::Done {
        let kept = kept + again.effects;
        tracing::info!(segment = segment.table(), kept, "segment dropped; effects with a waiting delivery are kept");
        metrics::counter!("fencepost_segments_dropped_total").increment(1);
    }
    Ok(dropped)
}
