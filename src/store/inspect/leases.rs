//! Tasks under a lease, those that are stuck, and leases that were lost: for `fencepost status` and the metrics.

use serde::Serialize;
use tokio_postgres::Transaction;

use crate::store::Result;

/// Tasks under a lease that are looked at, the first to expire first.
const TASKS: i64 = 100_000;
/// Kinds that are told by name. Their names are the producers': dashboards must not drown in them.
const KINDS: usize = 50;
/// What stands for all other kinds.
const OTHERS: &str = "(others)";

#[derive(Clone, Debug, Serialize)]
pub struct Leases {
    /// Stuck ones first.
    pub kinds: Vec<Kind>,
    /// There are more tasks under a lease than were looked at; those that are stuck come first.
    pub capped: bool,
    /// Leases that ran out and whose task somebody else took, since the beginning.
    pub lost: i64,
    pub lost_last_hour: i64,
    /// Completions refused for that, as far as workers reported them.
    pub refused: i64,
}

/// The tasks of one kind.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Kind {
    pub kind: String,
    /// Under a lease.
    pub running: i64,
    /// Whose lease ran out and that nobody has taken since.
    pub stuck: i64,
    /// For how long the lease of the one that ran out first has been over.
    pub oldest_stuck_seconds: Option<f64>,
}

impl Leases {
    pub fn oldest_stuck_seconds(&self) -> Option<f64> {
        self.kinds.iter().filter_map(|kind| kind.oldest_stuck_seconds).reduce(f64::max)
    }
}

pub async fn load(tx: &Transaction<'_>) -> Result<Leases> {
    let kinds = kinds(tx).await?;
    let seen: i64 = kinds.iter().map(|kind| kind.running + kind.stuck).sum();
    // The other half of a tally is what retention has not deleted yet.
    let row = tx
        .query_one(
            "-- store::leases_lost
             select (select t.gone from fencepost.tallies t where t.name = 'leases_lost')
                        + (select count(*) from fencepost.task_epochs e where e.token = 'lost'),
                    (select count(*) from fencepost.task_epochs e where e.token = 'lost' and e.ended_at > now() - interval '1 hour'),
                    (select t.gone from fencepost.tallies t where t.name = 'completions_refused')
                        + (select coalesce(sum(w.refused), 0)::bigint from fencepost.workers w)",
            &[],
        )
        .await?;
    Ok(Leases {
        kinds: fold(kinds, KINDS),
        capped: seen >= TASKS,
        lost: row.get(0),
        lost_last_hour: row.get(1),
        refused: row.get(2),
    })
}

async fn kinds(tx: &Transaction<'_>) -> Result<Vec<Kind>> {
    let rows = tx
        .query(
            "-- store::leased_tasks
             with moment as materialized (
                 select clock_timestamp() as now
             ), leased as (
                 select t.kind, t.lease_expires_at from fencepost.tasks t
                 where t.status = 'running' order by t.lease_expires_at limit $1
             ), counted as (
                 select l.kind, count(*) filter (where l.lease_expires_at > m.now) as running,
                        count(*) filter (where l.lease_expires_at <= m.now) as stuck,
                        extract(epoch from m.now - min(l.lease_expires_at) filter (where l.lease_expires_at <= m.now))::float8 as oldest
                 from leased l cross join moment m
                 group by l.kind, m.now
             )
             select c.kind, c.running, c.stuck, c.oldest from counted c order by c.stuck desc, c.running desc, c.kind",
            &[&TASKS],
        )
        .await?;
    Ok(rows
        .iter()
        .map(|row| Kind { kind: row.get(0), running: row.get(1), stuck: row.get(2), oldest_stuck_seconds: row.get(3) })
        .collect())
}

/// Adds up what is beyond the first `named` kinds.
fn fold(mut kinds: Vec<Kind>, named: usize) -> Vec<Kind> {
    let others = kinds.split_off(named.min(kinds.len()));
    let all = others.into_iter().reduce(|all, kind| Kind {
        kind: all.kind,
        running: all.running + kind.running,
        stuck: all.stuck + kind.stuck,
        oldest_stuck_seconds: [all.oldest_stuck_seconds, kind.oldest_stuck_seconds]
            .into_iter()
            .flatten()
            .reduce(f64::max),
    });
    kinds.extend(all.map(|all| Kind { kind: OTHERS.into(), ..all }));
    kinds
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(kind: &str, running: i64, stuck: i64, oldest: Option<f64>) -> Kind {
        Kind { kind: kind.into(), running, stuck, oldest_stuck_seconds: oldest }
    }

    #[test]
    fn kinds_without_number_are_told_together() {
        let kinds = vec![
            kind("a", 1, 2, Some(3.0)),
            kind("b", 1, 1, Some(9.0)),
            kind("c", 4, 1, Some(2.0)),
            kind("d", 5, 0, None),
        ];
        assert_eq!(fold(kinds.clone(), 4), kinds);
        assert_eq!(fold(kinds, 2)[1..], [kind("b", 1, 1, Some(9.0)), kind("(others)", 9, 1, Some(2.0))]);
        assert_eq!(fold(Vec::new(), 2), []);
    }
}
