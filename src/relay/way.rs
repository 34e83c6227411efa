//! An edge whose way is shut for every delivery alike (a broker away or blocking): nothing is attempted, no budget is
//! spent, whoever asks is told at once, and what lasts becomes an alarm.

use std::sync::Arc;
use std::time::Duration;

use deadpool_postgres::Pool;
use futures_util::FutureExt;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::health::Health;
use crate::edge::error::report;
use crate::store::alarms::{self, Alarm};

/// A way that is shut for longer is an alarm; shorter ones are restarts.
const ALARM_AFTER: Duration = Duration::from_secs(10);
/// So often the alarm is said again. Others resolve it where they take this relay for dead.
const SAY_EVERY: Duration = Duration::from_secs(10);

/// What was last told about one consumer's way.
#[derive(Debug, Default)]
pub struct Way {
    /// `None` before the first look.
    seen: Option<Option<Arc<str>>>,
    shut_since: Option<Instant>,
    told: Told,
    told_at: Option<Instant>,
    /// What is being told, and whether it was written.
    telling: Option<JoinHandle<bool>>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Told {
    /// A relay before this one may have left an alarm.
    #[default]
    Nothing,
    Alarm,
    AllClear,
}

impl Way {
    /// Passes on what changed: to readiness, `status` and the gauge at once, as an alarm when it lasts.
    pub fn note(&mut self, consumer: &str, shut: Option<Arc<str>>, health: &Health, pool: &Pool) {
        if self.seen.as_ref() != Some(&shut) {
            let open = if shut.is_none() { 1.0 } else { 0.0 };
            metrics::gauge!("fencepost_edge_open", "consumer" => consumer.to_string()).set(open);
            health.edge(consumer, shut.as_deref());
            self.seen = Some(shut.clone());
        }
        match shut {
            None => {
                self.shut_since = None;
                self.tell(Told::AllClear, consumer, None, pool);
            }
            Some(why) => {
                let since = *self.shut_since.get_or_insert_with(Instant::now);
                if since.elapsed() >= ALARM_AFTER {
                    self.tell(Told::Alarm, consumer, Some(why), pool);
                }
            }
        }
    }

    /// One thing after the other, and what could not be written is told again at the next look.
    fn tell(&mut self, what: Told, consumer: &str, why: Option<Arc<str>>, pool: &Pool) {
        if let Some(telling) = &mut self.telling {
            let Some(written) = telling.now_or_never() else { return };
            self.telling = None;
            if !matches!(written, Ok(true)) {
                self.told = Told::Nothing;
            }
        }
        let again = what == Told::Alarm && self.told_at.is_some_and(|at| at.elapsed() >= SAY_EVERY);
        if self.told != what || again {
            self.told = what;
            self.told_at = Some(Instant::now());
            self.telling = Some(tell(pool.clone(), consumer.to_string(), why));
        }
    }
}

/// Gives whether it was written.
fn tell(pool: Pool, consumer: String, why: Option<Arc<str>>) -> JoinHandle<bool> {
    tokio::spawn(async move {
        let Ok(client) = pool.get().await else { return false };
        let told = match why {
            Some(why) => alarms::keep_up(&client, Alarm::EdgeShut, &consumer, &why).await,
            None => alarms::resolve(&client, Alarm::EdgeShut, &consumer).await,
        };
        if let Err(error) = &told {
            tracing::debug!(error = %report(error), "an alarm could not be written");
        }
        told.is_ok()
    })
}
