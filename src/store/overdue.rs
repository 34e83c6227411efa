//! Confirmed messages that nobody acknowledged in time: published again, boundedly, or put in doubt. Never a success.

use std::time::Duration;

use tokio_postgres::Client;

use super::Result;
use crate::model::consumer::OnAmbiguous;
use crate::model::key::{ConsumerId, Shard, ShardEpoch};

/// The terms on which a consumer's unacknowledged messages are published again.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    pub consumer: ConsumerId,
    pub on_ambiguous: OnAmbiguous,
    pub ack_timeout: Duration,
    pub republishes: u32,
}

/// What one look came to.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Turned {
    pub republished: u64,
    pub in_doubt: u64,
}

/// The condition under which a row `p` is overdue; `$2` is the ack timeout in seconds. The n-th wait is 2^n timeouts.
const OVERDUE: &str = "p.state = 'unacked'
    and p.next_attempt_at + make_interval(secs => $2 * (power(2, least(p.republished, 20)) - 1)) <= clock_timestamp()
    and not exists (select 1 from fencepost.ledger l where l.effect_id = p.effect_id and l.consumer_id = p.consumer_id and not p.replay offset 0)";

/// How many of a consumer's deliveries in these shards are overdue.
pub async fn count(client: &Client, terms: &Terms, held: &[(Shard, ShardEpoch)]) -> Result<u64> {
    let shards: Vec<i16> = held.iter().map(|(shard, _)| shard.0).collect();
    let sql = format!(
        "-- store::count_overdue
         select count(*) from fencepost.parked p where p.consumer_id = $1 and p.shard = any ($3) and {OVERDUE}"
    );
    let row = client.query_one(&sql, &[&terms.consumer.0, &terms.ack_timeout.as_secs_f64(), &shards]).await?;
    Ok(row.get::<_, i64>(0).unsigned_abs())
}

/// Gives overdue deliveries another attempt, or, where that is not allowed or has been done often enough, to an
/// operator. Only under the shards' present epochs.
pub async fn turn(client: &Client, terms: &Terms, held: &[(Shard, ShardEpoch)]) -> Result<Turned> {
    let shards: Vec<i16> = held.iter().map(|(shard, _)| shard.0).collect();
    let epochs: Vec<i64> = held.iter().map(|(_, epoch)| epoch.0).collect();
    let most = match terms.on_ambiguous {
        OnAmbiguous::Retry => i32::try_from(terms.republishes).unwrap_or(i32::MAX),
        OnAmbiguous::Hold => 0,
    };
    let sql = format!(
        "-- store::turn_overdue
         with held as (
             select s.shard from fencepost.shards s
             join unnest($3::smallint[], $4::bigint[]) as h (shard, epoch) on s.shard = h.shard and s.epoch = h.epoch
             for key share of s
         ), turned as (
             update fencepost.parked p
             set state = case when p.republished < $5 then 'retry' else 'in_doubt' end,
                 next_attempt_at = case when p.republished < $5 then clock_timestamp() end,
                 republished = p.republished + case when p.republished < $5 then 1 else 0 end,
                 first_doubt_at = coalesce(p.first_doubt_at, clock_timestamp()),
                 reason = case when p.republished < $5 then 'no reply in time: published again'
                               else 'no reply in time, and it may have been applied' end
             where p.consumer_id = $1 and p.shard in (select shard from held) and {OVERDUE}
             returning p.state
         )
         select count(*) filter (where state = 'retry'), count(*) filter (where state = 'in_doubt') from turned"
    );
    let row =
        client.query_one(&sql, &[&terms.consumer.0, &terms.ack_timeout.as_secs_f64(), &shards, &epochs, &most]).await?;
    Ok(Turned { republished: row.get::<_, i64>(0).unsigned_abs(), in_doubt: row.get::<_, i64>(1).unsigned_abs() })
}

/// Says on the overdue rows why they are not published again yet.
pub async fn explain(client: &Client, terms: &Terms, held: &[(Shard, ShardEpoch)], why: &str) -> Result<()> {
    let shards: Vec<i16> = held.iter().map(|(shard, _)| shard.0).collect();
    let sql = format!(
        "-- store::explain_overdue
         update fencepost.parked p set reason = $4
         where p.consumer_id = $1 and p.shard = any ($3) and p.reason is distinct from $4 and {OVERDUE}"
    );
    client.execute(&sql, &[&terms.consumer.0, &terms.ack_timeout.as_secs_f64(), &shards, &why]).await?;
    Ok(())
}
