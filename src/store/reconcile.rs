//! The anti-join over closed flights: whatever of them has neither fact nor parked row is parked. Its count must stay
//! 0; it is how a mistake of ours costs latency and not a lost effect.

use std::collections::BTreeMap;

use tokio_postgres::Client;

use super::Result;
use super::effects::EFFECT_OF_M;
use super::log::FLIGHT_EFFECTS;
use super::session::Session;
use crate::model::key::{FlightSeq, Shard, ShardEpoch};

/// Flights of a shard that are looked at in one statement, and deliveries of them after which no other is taken.
const FLIGHTS: i64 = 40;
const DELIVERIES: i64 = 2_500;

/// A shard to look at, and the flight after which to begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unreconciled {
    pub shard: Shard,
    pub epoch: ShardEpoch,
    pub after: FlightSeq,
}

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

/// Looks at the next closed flights of each shard, up to the first that is still open. What is missing is parked: at a
/// `hold` edge in doubt, since it may have been sent. Shards without a closed flight, and those that are lost, are left out.
///
/// Pages of large differences lie beside one another, shard by shard over the same ids, the last of each difference too,
/// which is not `partial`. Where flights do (`beside`), effects and facts of all of them are walked over once, and not once
/// for every shard; only of what nothing was said about (`quiet`) it is asked whose it is. What a lane has still to read
/// (`lagging`) is accounted for by that.
pub async fn reconcile(session: &Session, shards: &[Unreconciled]) -> Result<BTreeMap<Shard, Reconciled>> {
    let sql = format!(
        "-- store::reconcile
with held as materialized (
    select s.shard, a.after from fencepost.shards s
    join unnest($1::smallint[], $2::bigint[], $3::bigint[]) as a (shard, epoch, after) on a.shard = s.shard and a.epoch = s.epoch
    for key share of s
), f as materialized (
    select n.*, n.last_id - n.first_id <= 128 * n.deliveries as narrow
    from held h cross join lateral (
        select x.*, sum(x.deliveries) over w - x.deliveries as before, count(*) filter (where x.token is null) over w as open
        from (
            select shard, seq, base, target, first_id, last_id, partial, deliveries, token from fencepost.flights
            where shard = h.shard and seq > h.after order by seq limit $4
        ) x window w as (order by x.seq)
    ) n where n.before <= $5 and n.open = 0
), beside as materialized (
    select min(first_id) as lo, max(last_id) as hi from f where narrow having max(last_id) - min(first_id) <= 16 * sum(deliveries)
), walked as materialized (
    select e.id, e.shard, e.xid, e.targets from beside b cross join lateral (
        select e.id, e.shard, e.xid, e.targets from fencepost.effects e where e.id between b.lo and b.hi offset 0) e
), said as materialized (
    select l.effect_id, l.consumer_id from beside b cross join lateral (
        select l.effect_id, l.consumer_id from fencepost.ledger l where l.effect_id between b.lo and b.hi offset 0) l
), lagging as materialized (
    select g.shard, g.consumer_id from (select shard, min(seq) as first, max(seq) as last from f group by shard) s
    join fencepost.lags g on g.shard = s.shard and g.from_seq <= s.first and g.to_seq >= s.last
), quiet as materialized (
    select w.id, w.shard, w.xid, t.consumer_id from walked w cross join lateral unnest(w.targets) as t (consumer_id)
    where not exists (select from said s where s.effect_id = w.id and s.consumer_id = t.consumer_id)
      and not exists (select from lagging g where g.shard = w.shard and g.consumer_id = t.consumer_id)
), unsaid as materialized (
    select f.shard, f.seq, q.id, q.consumer_id
    from quiet q join f on f.shard = q.shard and f.narrow and q.id between f.first_id and f.last_id
    where pg_visible_in_snapshot(q.xid, f.target) and not pg_visible_in_snapshot(q.xid, f.base)
    union all
    select f.shard, f.seq, m.id, t.consumer_id
    from f cross join lateral ({FLIGHT_EFFECTS}) m cross join lateral unnest(m.targets) as t (consumer_id)
    where f.first_id is not null and not (f.narrow and exists (select from beside))
    union all
    select f.shard, f.seq, k.id, t.consumer_id
    from f join fencepost.effects_kept k on k.shard = f.shard and k.id between f.first_id and f.last_id
    cross join lateral unnest(k.targets) as t (consumer_id)
    where f.narrow and exists (select from beside)
      and pg_visible_in_snapshot(k.xid, f.target) and not pg_visible_in_snapshot(k.xid, f.base)
), silent as materialized (
    select u.id, u.consumer_id from unsaid u
    where not exists (select 1 from fencepost.lags g where g.shard = u.shard and g.consumer_id = u.consumer_id
                      and u.seq between g.from_seq and g.to_seq offset 0)
      and not exists (select 1 from fencepost.ledger l where l.effect_id = u.id and l.consumer_id = u.consumer_id offset 0)
      and not exists (select 1 from fencepost.parked p where p.effect_id = u.id and p.consumer_id = u.consumer_id offset 0)
), missing as (
    select e.id, e.shard, m.consumer_id,
           case when c.spec->>'ordering' = 'key' then e.ordering_key end as ordering_key,
           coalesce(c.spec->>'on_ambiguous' = 'hold', false) as hold
    from silent m cross join lateral ({EFFECT_OF_M}) e
    left join fencepost.consumers c on c.consumer_id = m.consumer_id
), parked as (
    insert into fencepost.parked (effect_id, consumer_id, shard, ordering_key, state, next_attempt_at, reason, first_doubt_at)
    select id, consumer_id, shard, ordering_key, case when hold then 'in_doubt' else 'retry' end,
           case when not hold then clock_timestamp() end, 'its flight was closed without a word about it', clock_timestamp()
    from missing
    on conflict do nothing
    returning shard
)
select f.shard, max(f.seq), (select count(*) from parked p where p.shard = f.shard) from f group by f.shard"
    );
    let column = |of: fn(&Unreconciled) -> i64| shards.iter().map(of).collect::<Vec<i64>>();
    let numbers: Vec<i16> = shards.iter().map(|s| s.shard.0).collect();
    let (epochs, after) = (column(|s| s.epoch.0), column(|s| s.after.0));
    let statement = session.prepared(&sql).await?;
    let rows = session.client().query(&statement, &[&numbers, &epochs, &after, &FLIGHTS, &DELIVERIES]).await?;
    let reconciled = |row: &tokio_postgres::Row| Reconciled {
        up_to: FlightSeq(row.get(1)),
        found: row.get::<_, i64>(2).unsigned_abs(),
    };
    Ok(rows.iter().map(|row| (Shard(row.get(0)), reconciled(row))).collect())
}
