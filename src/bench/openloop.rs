//! Producers that commit on a fixed schedule, whatever happens to them: a moment at which they should have committed and
//! could not counts as delay of what they should have committed (coordinated omission).

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::delays::Delays;
use super::rig::Stage;
use super::sink::Sink;
use super::{Error, Result};

/// What is offered, and how often.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    pub per_second: f64,
    pub count: u32,
    pub connections: u32,
}

/// A commit, and how much later than scheduled its connection was free for it.
#[derive(Clone, Copy, Debug)]
pub struct Committed {
    pub at: Instant,
    pub late: Duration,
}

impl Schedule {
    fn due(&self, start: Instant, n: u32) -> Instant {
        start + Duration::from_secs_f64(f64::from(n) / self.per_second)
    }
}

/// Executes `sql` for each number of the schedule, in a transaction of its own, with the parameters that `text` gives.
pub async fn commit(
    stage: &Stage,
    schedule: Schedule,
    sql: &str,
    text: impl Fn(u32) -> [String; 2] + Send + Sync + 'static,
) -> Result<Vec<Committed>> {
    let text = Arc::new(text);
    let start = Instant::now() + Duration::from_millis(300);
    let mut producers = Vec::new();
    for lane in 0..schedule.connections {
        let client = stage.database.connect().await?;
        let statement = client.prepare(sql).await?;
        let text = Arc::clone(&text);
        producers.push(tokio::spawn(async move {
            let mut commits = Vec::new();
            let mut free = start;
            for n in (lane..schedule.count).step_by(schedule.connections as usize) {
                let due = schedule.due(start, n);
                tokio::time::sleep_until(due.into()).await;
                let [first, second] = text(n);
                client.execute(&statement, &[&first, &second]).await?;
                let at = Instant::now();
                // A timer that fires late is the bench's fault; a connection that was not free is the database's.
                commits.push((n, Committed { at, late: free.saturating_duration_since(due) }));
                free = at;
            }
            Ok::<_, Error>(commits)
        }));
    }
    let mut all = Vec::new();
    for producer in producers {
        all.extend(producer.await??);
    }
    all.sort_unstable_by_key(|(n, _)| *n);
    Ok(all.into_iter().map(|(_, committed)| committed).collect())
}

/// From commit to arrival, for the deliveries that `mine` names.
pub fn delays(commits: &[Committed], sink: &Sink, mine: impl Fn(u32) -> bool) -> Delays {
    let delay = |(n, committed): (usize, &Committed)| {
        let arrived = sink.arrived(n).filter(|_| mine(n as u32))?;
        Some(arrived.saturating_duration_since(committed.at) + committed.late)
    };
    Delays::new(commits.iter().enumerate().filter_map(delay).collect())
}
