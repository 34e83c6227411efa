//! The anti-join over closed flights: whatever of them has neither fact nor parked row is parked. Its count must stay
//! 0; it is how a mistake of ours costs latency and not a lost effect.

use tokio_postgres::Client;

use super::Result;
use super::effects::EFFECT_OF_M;
use super::log::FLIGHT_EFFECTS;
use crate::model::key::{FlightSeq, Shard, ShardEpoch};

/// Flights looked at in one statement.
const FLIGHTS: i64 = 20;

/// How far a shard's flights were looked at, and what was found missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reconciled {
    /// Every flight up to this one was looked at.
    pub up_to: FlightSeq,
    pub found: u64,
}

/// The last flight that is older than what a fresh holder looks at again.
pub async fn start(client: &Client, shard: Shard) -> Result<FlightSeq> {
    let row = client
        .query_one(
            "-- store::reconcile_from
             select coalesce(max(seq), -1) from fencepost.flights
             where shard = $1 and closed_at < clock_timestamp() - interval '1 hour'",
            &[&shard.0],
        )
        .await?;
    Ok(FlightSeq(row.get(0)))
}

/// Looks at the next closed flights after `after`, up to the first that is still open. What is missing is parked: at a
/// `hold` edge in doubt, since it may have been sent.
pub async fn reconcile(client: &Client, shard: Shard, epoch: ShardEpoch, after: FlightSeq) -> Result<Reconciled> {
    let sql = format!(
        "-- store::reconcile
with guard as (
    select 1 from fencepost.shards where shard = $1 and epoch = $2 for key share
), f as materialized (
    select shard, seq, base, target, first_id, last_id, partial, deliveries from fencepost.flights
    where shard = $1 and seq > $3 and exists (select 1 from guard)
      and seq < coalesce((select min(o.seq) from fencepost.flights o where o.shard = $1 and o.seq > $3 and o.token is null),
                         9223372036854775807)
    order by seq limit $4
), silent as materialized (
    select f.seq, m.id, t.consumer_id
    from f cross join lateral ({FLIGHT_EFFECTS}) m cross join lateral unnest(m.targets) as t (consumer_id)
    where f.first_id is not null
      and not exists (select 1 from fencepost.ledger l where l.effect_id = m.id and l.consumer_id = t.consumer_id offset 0)
      and not exists (select 1 from fencepost.parked p where p.effect_id = m.id and p.consumer_id = t.consumer_id offset 0)
), missing as (
    select e.id, e.shard, m.consumer_id,
           case when c.spec->>'ordering' = 'key' then e.ordering_key end as ordering_key,
           coalesce(c.spec->>'on_ambiguous' = 'hold', false) as hold
    from silent m cross join lateral ({EFFECT_OF_M}) e
    left join fencepost.consumers c on c.consumer_id = m.consumer_id
    where not exists (select 1 from fencepost.lags g where g.shard = e.shard and g.consumer_id = m.consumer_id
                      and m.seq between g.from_seq and g.to_seq offset 0)
), parked as (
    insert into fencepost.parked (effect_id, consumer_id, shard, ordering_key, state, next_attempt_at, reason, first_doubt_at)
    select id, consumer_id, shard, ordering_key, case when hold then 'in_doubt' else 'retry' end,
           case when not hold then clock_timestamp() end, 'its flight was closed without a word about it', clock_timestamp()
    from missing
    on conflict do nothing
    returning 1
)
select (select max(seq) from f), (select count(*) from parked)"
    );
    let row = client.query_one(&sql, &[&shard.0, &epoch.0, &after.0, &FLIGHTS]).await?;
    let up_to = row.get::<_, Option<i64>>(0).map_or(after, FlightSeq);
    Ok(Reconciled { up_to, found: row.get::<_, i64>(1).unsigned_abs() })
}
