//! The end of the log: effects that no flight covers yet.

use tokio_postgres::GenericClient;

use crate::model::key::ConsumerId;
use crate::store::Result;

/// At most so many unread effects of one shard are looked at.
pub const CAP: i64 = 1_000;

/// Deliveries of one consumer that no relay has read yet.
#[derive(Clone, Debug)]
pub struct Unread {
    pub consumer: ConsumerId,
    pub count: i64,
    /// There are more: a shard has [`CAP`] unread effects.
    pub capped: bool,
    pub oldest_seconds: f64,
}

/// What lies beyond each shard's newest flight: committed after its snapshot, in progress in it, or on pages of a
/// large difference that are still to come.
pub async fn load(client: &impl GenericClient) -> Result<Vec<Unread>> {
    let rows = client
        .query(
            "-- store::unread
             with newest as (
                 select s.shard, f.base, f.target, f.partial, f.last_id
                 from fencepost.shards s
                 cross join lateral (select base, target, partial, last_id from fencepost.flights
                                     where shard = s.shard order by seq desc limit 1) f
             ), beyond as (
                 select n.shard, e.id, e.targets, e.committed_at
                 from newest n
                 cross join lateral (
                     (select id, targets, committed_at from fencepost.effects
                      where shard = n.shard and xid >= pg_snapshot_xmax(n.target)
                        and id + 0 > (select log_floor from fencepost.history) order by xid limit $1)
                     union all
                     (select t.id, t.targets, t.committed_at
                      from pg_snapshot_xip(n.target) as open(xid)
                      cross join lateral (select id, targets, committed_at from fencepost.effects
                                          where shard = n.shard and xid = open.xid
                                            and id + 0 > (select log_floor from fencepost.history) offset 0) t
                      limit $1)
                     union all
                     (select id, targets, committed_at from fencepost.effects
                      where n.partial and shard = n.shard and id > n.last_id
                        and pg_visible_in_snapshot(xid, n.target) and not pg_visible_in_snapshot(xid, n.base)
                      order by id limit $1)
                 ) e
             ), shards as (
                 select shard, count(*) >= $1 as capped from beyond group by shard
             )
             select consumer_id, count(*), bool_or(capped),
                    extract(epoch from clock_timestamp() - min(committed_at))::float8
             from beyond join shards using (shard) cross join lateral unnest(targets) as consumer_id
             group by consumer_id",
            &[&CAP],
        )
        .await?;
    Ok(rows
        .iter()
        .map(|row| Unread {
            consumer: ConsumerId(row.get(0)),
            count: row.get(1),
            capped: row.get(2),
            oldest_seconds: row.get(3),
        })
        .collect())
}
