//! Keeping the tables bounded, behind the relay's back: one relay at a time, no lock that a producer could feel.

use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::outage;
use crate::edge::error::report;
use crate::store::retention::{self, Part, Policy};
use crate::store::segments::{self, Acting, Link, Parent, Segment, Step};
use crate::store::session::Session;
use crate::store::{Database, Result, alarms, expiry};

/// How often, at most and at least; else a thousandth of the retention.
const EVERY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// The longest a statement waits for a lock. None of those it waits for makes a writer queue behind it.
const LOCK_TIMEOUT: &str = "2s";
/// What the alarm is about.
const SEGMENTS: &str = "segments";

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

/// Ends when other relays do it.
async fn rounds(session: &mut Session) -> Result<()> {
    let Some(mut retention) = Retention::begin(session).await? else { return Ok(()) };
    loop {
        let policy = retention::policy(session).await?;
        retention.round(session, policy).await?;
        tokio::time::sleep((policy.retention / 1_000).clamp(EVERY.0, EVERY.1)).await;
    }
}

/// What one relay does of it, and what it knows meanwhile.
pub struct Retention {
    rows: bool,
    segments: Segments,
    /// Since when a segment could not be dropped.
    stuck: Option<Stuck>,
}

enum Segments {
    Ours,
    /// Another relay sees to them.
    Others,
    /// This role may not: why, and the remedy.
    Forbidden(String),
}

struct Stuck {
    since: Instant,
    said: bool,
}

impl Retention {
    /// `None` where others do all of it.
    pub async fn begin(session: &Session) -> Result<Option<Self>> {
        session.client().batch_execute(&format!("-- store::lock_timeout\nset lock_timeout = '{LOCK_TIMEOUT}'")).await?;
        let segments = match segments::become_owner(session.client()).await? {
            Acting::AsOwner => Segments::Others,
            Acting::AsItself { role, owner } => Segments::Forbidden(format!(
                "the role {role} may neither add nor drop segments of the log, as it is no member of {owner}, the tables' owner: \
                 grant {owner} to {role}, and restart the relay; or run another as {owner}"
            )),
        };
        let mut this = Self { rows: false, segments, stuck: None };
        this.lead(session).await?;
        if !this.rows && !matches!(this.segments, Segments::Ours) {
            return Ok(None);
        }
        if let Segments::Forbidden(why) = &this.segments {
            tracing::warn!("{why}");
        }
        Ok(Some(this))
    }

    /// Takes over what nobody does.
    async fn lead(&mut self, session: &Session) -> Result<()> {
        self.rows = self.rows || retention::lead(session, Part::Rows).await?;
        if matches!(self.segments, Segments::Others) && retention::lead(session, Part::Segments).await? {
            self.segments = Segments::Ours;
        }
        Ok(())
    }

    /// One round: room ahead, the next segment where the time has come, what is expired dropped, rows deleted.
    pub async fn round(&mut self, session: &mut Session, policy: Policy) -> Result<()> {
        self.lead(session).await?;
        match &self.segments {
            Segments::Ours => {
                let waits = self.segments(session).await?;
                self.watch(session, policy, waits).await?;
            }
            Segments::Others => {}
            Segments::Forbidden(why) => match (is_neglected(session).await?, &self.stuck) {
                (false, _) => self.stuck = None,
                (true, Some(_)) => {}
                (true, None) => {
                    alarms::raise(session.client(), alarms::Alarm::Retention, SEGMENTS, why).await?;
                    self.stuck = Some(Stuck { since: Instant::now(), said: true });
                }
            },
        }
        if !self.rows {
            return Ok(());
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
            alarms::resolve(session.client(), alarms::Alarm::Retention, SEGMENTS).await?;
            self.stuck = None;
            return Ok(());
        };
        tracing::info!(why, "retention waits");
        let stuck = self.stuck.get_or_insert_with(|| Stuck { since: Instant::now(), said: false });
        if stuck.since.elapsed() > policy.span && !stuck.said {
            alarms::raise(session.client(), alarms::Alarm::Retention, SEGMENTS, &why).await?;
            stuck.said = true;
        }
        Ok(())
    }
}

/// Whether the log should have gone on in a new segment, and nobody is there who could see to it.
async fn is_neglected(session: &Session) -> Result<bool> {
    Ok(retention::is_due_to_move_on(session).await? && !retention::is_led(session, Part::Segments).await?)
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
