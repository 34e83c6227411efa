//! An edge whose way is shut for every delivery alike (a broker away or blocking): nothing is attempted, no budget is
//! spent, whoever asks is told at once, and what lasts becomes an alarm.

use std::sync::Arc;
use std::time::Duration;

use deadpool_postgres::Pool;
use tokio::time::Instant;

use super::health::Health;
use crate::edge::error::report;
use crate::store::alarms::{self, Alarm};

/// A way that is shut for longer is an alarm; shorter ones are restarts.
const ALARM_AFTER: Duration = Duration::from_secs(10);

/// What was last told about one consumer's way.
#[derive(Debug, Default)]
pub struct Way {
    /// `None` before the first look.
    seen: Option<Option<Arc<str>>>,
    shut_since: Option<Instant>,
    told: Told,
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
        let Some(why) = shut else {
            self.shut_since = None;
            if self.told != Told::AllClear {
                self.told = Told::AllClear;
                tell(pool.clone(), consumer.to_string(), None);
            }
            return;
        };
        let since = *self.shut_since.get_or_insert_with(Instant::now);
        if since.elapsed() >= ALARM_AFTER && self.told != Told::Alarm {
            self.told = Told::Alarm;
            tell(pool.clone(), consumer.to_string(), Some(why));
        }
    }
}

fn tell(pool: Pool, consumer: String, why: Option<Arc<str>>) {
    tokio::spawn(async move {
        let Ok(client) = pool.get().await else { return };
        let told = match why {
            Some(why) => alarms::raise(&client, Alarm::EdgeShut, &consumer, &why).await,
            None => alarms::resolve(&client, Alarm::EdgeShut, &consumer).await,
        };
        if let Err(error) = told {
            tracing::warn!(error = %report(&error), "an alarm could not be written");
        }
    });
}
