//! Deleting rows that have outlived the retention, in pages, from tables that are not dropped in segments.

use tokio_postgres::Client;

use super::Result;
use super::segments::{self, Parent};

/// Rows that go in one statement, and statements of one round: the rest waits for the next.
const PAGE: i64 = 5_000;
const PAGES: u32 = 200;

const CUT: &str = "clock_timestamp() - (select s.value::interval from fencepost.settings s where s.name = 'retention')";

/// Rows that were deleted, by table.
pub type Swept = Vec<(&'static str, u64)>;

/// One round over all tables. Never touches what a delivery that still waits may need.
pub async fn sweep(client: &Client) -> Result<Swept> {
    let oldest = segments::list(client, Parent::Effects).await?.first().map_or(0, |segment| segment.from);
    let mut swept = Swept::new();
    for (table, sql) in statements(oldest) {
        let sql = format!("-- store::expire_{table}\n{sql}");
        let mut rows = 0;
        for _ in 0..PAGES {
            let page = client.execute(&sql, &[]).await?;
            rows += page;
            if page < PAGE.unsigned_abs() {
                break;
            }
        }
        if rows > 0 {
            swept.push((table, rows));
        }
    }
    Ok(swept)
}

/// Each deletes a page. `oldest`: effects below this id are gone, but for those that are kept.
fn statements(oldest: i64) -> Vec<(&'static str, String)> {
    // A kept effect's story is told for as long as any other's: from its last fact on.
    let ended = "not exists (
            select from unnest(k.targets) t (consumer_id)
            where not exists (select from fencepost.ledger l where l.effect_id = k.id and l.consumer_id = t.consumer_id)
               or exists (select from fencepost.parked p where p.effect_id = k.id and p.consumer_id = t.consumer_id))";
    // The effects of a completion `c`, if any, are neither in the log nor kept.
    let gone = format!(
        "(c.last_effect_id is null or c.last_effect_id < {oldest} and not exists (
            select from fencepost.effects_kept k where k.id between c.first_effect_id and c.last_effect_id and k.task_id = c.task_id))"
    );
    vec![
        (
            "effects_kept",
            format!(
                "delete from fencepost.effects_kept where id in (
                     select k.id from fencepost.effects_kept k where {ended}
                     and coalesce((select max(l.at) from fencepost.ledger l where l.effect_id = k.id), k.committed_at) < {CUT}
                     limit {PAGE})"
            ),
        ),
        (
            // The newest of a shard is where its reading stands; a lag range still has to be read.
            "flights",
            format!(
                "delete from fencepost.flights f using (
                     select g.shard, g.seq from fencepost.shards s cross join lateral (
                         select x.shard, x.seq from fencepost.flights x
                         where x.shard = s.shard and x.token is not null and x.closed_at < {CUT}
                           and x.seq < (select max(n.seq) from fencepost.flights n where n.shard = s.shard)
                           and x.seq < coalesce((select min(r.from_seq) from fencepost.lags r where r.shard = s.shard), x.seq + 1)
                         order by x.seq limit {PAGE}
                     ) g limit {PAGE}) old
                 where f.shard = old.shard and f.seq = old.seq"
            ),
        ),
        (
            "attempts",
            format!(
                "delete from fencepost.attempts where ctid = any (array(
                     select a.ctid from fencepost.attempts a
                     where a.at < {CUT} and a.effect_id < {oldest}
                       and not exists (select from fencepost.parked p where p.effect_id = a.effect_id and p.consumer_id = a.consumer_id)
                       and not exists (select from fencepost.effects_kept k where k.id = a.effect_id)
                     limit {PAGE}))"
            ),
        ),
        (
            // The last epoch of a task that is ready is what its next claim calls `previous`.
            "task_epochs",
            format!(
                "with gone as (
                     delete from fencepost.task_epochs where ctid = any (array(
                         select c.ctid from fencepost.task_epochs c
                         where c.ended_at < {CUT} and {gone}
                           and not exists (select from fencepost.tasks t where t.task_id = c.task_id and t.lease_epoch = c.lease_epoch)
                         limit {PAGE}))
                     returning (token = 'lost')::integer as counted
                 ), {}",
                tally("leases_lost")
            ),
        ),
        (
            // Last of all that is known of a task: its id may be used again, and so may its epochs.
            "tasks",
            format!(
                "delete from fencepost.tasks where task_id in (
                     select c.task_id from fencepost.tasks c
                     where c.status in ('completed', 'failed') and c.ended_at < {CUT} and {gone}
                       and not exists (select from fencepost.task_epochs e where e.task_id = c.task_id)
                     order by c.ended_at limit {PAGE})
                   and status in ('completed', 'failed')"
            ),
        ),
        (
            "audit_log",
            format!(
                "delete from fencepost.audit_log where id in (
                     select a.id from fencepost.audit_log a
                     where a.at < clock_timestamp() - (select s.value::interval from fencepost.settings s where s.name = 'audit_retention')
                     order by a.id limit {PAGE})"
            ),
        ),
        (
            "orphan_acks",
            format!(
                "delete from fencepost.orphan_acks where id in (
                     select o.id from fencepost.orphan_acks o where o.at < {CUT} order by o.id limit {PAGE})"
            ),
        ),
        ("early_acks", format!("delete from fencepost.early_acks where at < {CUT}")),
        ("alarms", format!("delete from fencepost.alarms where resolved_at < {CUT}")),
        ("relays", format!("delete from fencepost.relays where at < {CUT}")),
        (
            "workers",
            format!(
                "with gone as (
                     delete from fencepost.workers where at < {CUT} returning refused as counted
                 ), {}",
                tally("completions_refused")
            ),
        ),
    ]
}

/// What goes of a figure that is counted for ever is added to its tally. Ends a statement whose `gone` has the rows.
fn tally(name: &str) -> String {
    format!(
        "tallied as (
             update fencepost.tallies set gone = tallies.gone + more.n
             from (select sum(counted)::bigint as n from gone) more where name = '{name}' and more.n > 0
         )
         select from gone"
    )
}
