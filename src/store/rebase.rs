//! Where the log's transaction ids are not this server's: reading starts anew from a snapshot of this server, and what
//! had not ended by then is parked.
//!
//! Positions are snapshots of the server they were taken on. After a dump was restored elsewhere, or rows were copied,
//! they say nothing any more; neither do the transaction ids the effects carry. So effects up to a floor are accounted
//! for one by one, and only effects above it are read from the log.

use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Transaction};

use super::audit::{self, Reason};
use super::segments::{self, Acting, Parent, Step};
use super::{Error, Result};

/// Why positions are not valid here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Need {
    OtherServer {
        recorded: i64,
        found: i64,
    },
    /// A snapshot from the future: it was taken on a server that had gone further.
    Ahead {
        shard: i16,
        stored: u64,
        current: u64,
    },
}

impl std::fmt::Display for Need {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::OtherServer { recorded, found } => write!(
                f,
                "the log was written on the server with system identifier {recorded}, and this one is {found}: a dump was restored, or rows were copied"
            ),
            Self::Ahead { shard, stored, current } => write!(
                f,
                "shard {shard} was read up to transaction {stored}, and this server has only come to {current}"
            ),
        }
    }
}

/// A transaction that had begun to write into the log before the floor was set.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Writer {
    virtual_id: String,
    /// The backend's process id, or the name of a prepared transaction.
    pub who: String,
}

#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Rebased {
    pub floor: i64,
    /// Deliveries that will be tried, again or for the first time: nobody knows.
    pub retried: u64,
    /// Those at edges that cannot absorb a duplicate.
    pub in_doubt: u64,
}

/// Whether the positions stored are another server's.
pub async fn need(client: &Client) -> Result<Option<Need>> {
    let row = client
        .query_one(
            "-- store::rebase_need
             select h.log_system, c.system_identifier, f.shard, f.stored::text::bigint, f.current::text::bigint
             from fencepost.history h cross join pg_control_system() c
             left join lateral (
                 select n.shard, pg_snapshot_xmax(n.target) as stored, pg_snapshot_xmax(pg_current_snapshot()) as current
                 from fencepost.shards s
                 cross join lateral (select f.shard, f.target from fencepost.flights f where f.shard = s.shard order by f.seq desc limit 1) n
                 where pg_snapshot_xmax(n.target) > pg_snapshot_xmax(pg_current_snapshot())
                 order by n.shard limit 1
             ) f on true",
            &[],
        )
        .await?;
    let (recorded, found): (i64, i64) = (row.get(0), row.get(1));
    if recorded != found {
        return Ok(Some(Need::OtherServer { recorded, found }));
    }
    let count = |n| row.get::<_, Option<i64>>(n).unwrap_or_default().unsigned_abs();
    Ok(row.get::<_, Option<i16>>(2).map(|shard| Need::Ahead { shard, stored: count(3), current: count(4) }))
}

/// Refuses an identity that would give out ids of effects that exist: sequences are not always copied with their rows.
pub async fn check_identity(client: &Client) -> Result<()> {
    let row = client
        .query_one(
            "-- store::greatest_effect
             select greatest((select e.id from fencepost.effects e order by e.id desc limit 1),
                             (select k.id from fencepost.effects_kept k order by k.id desc limit 1))",
            &[],
        )
        .await?;
    // In this order: producers go on.
    let last = segments::last_id(client).await?;
    match row.get::<_, Option<i64>>(0) {
        Some(newest) if newest > last => Err(Error::Identity { last, newest }),
        _ => Ok(()),
    }
}

/// Sets the floor: the identity's last value, moved on to the next segment where that can be done, so that reading
/// above the floor touches no old segment.
pub async fn set_floor(client: &Client) -> Result<i64> {
    client.batch_execute("-- store::lock_timeout\nset lock_timeout = '5s'").await?;
    if segments::become_owner(client).await? == Acting::AsOwner {
        let mut room = Step::Done;
        for parent in Parent::ALL {
            if let waits @ Step::Waits(_) = segments::make_room(client, parent).await? {
                room = waits;
            }
        }
        if room == Step::Done {
            segments::move_on(client).await?;
        }
        client.batch_execute("-- store::end_owner\nreset role").await?;
    }
    segments::last_id(client).await
}

/// Transactions that hold a lock as writers of the log have it, on the log or on its identity. Prepared ones too.
pub async fn writers(client: &Client) -> Result<Vec<Writer>> {
    let rows = client
        .query(
            "-- store::log_writers
             select distinct l.virtualtransaction, coalesce(l.pid::text, (select 'prepared ' || quote_literal(p.gid) from pg_prepared_xacts p
                                                                          where '-1/' || p.transaction = l.virtualtransaction), 'unknown')
             from pg_locks l
             where l.locktype = 'relation' and l.granted and l.pid is distinct from pg_backend_pid()
               and l.database = (select d.oid from pg_database d where d.datname = current_database())
               and l.mode not in ('AccessShareLock', 'RowShareLock', 'ShareUpdateExclusiveLock')
               and (l.relation = 'fencepost.effects_id_seq'::regclass
                    or l.relation in (select t.relid from pg_partition_tree('fencepost.effects') t))",
            &[],
        )
        .await?;
    Ok(rows.iter().map(|row| Writer { virtual_id: row.get(0), who: row.get(1) }).collect())
}

/// Those of `before` that have not ended.
pub async fn still_writing(client: &Client, before: &[Writer]) -> Result<Vec<Writer>> {
    let now = writers(client).await?;
    Ok(before.iter().filter(|writer| now.iter().any(|w| w.virtual_id == writer.virtual_id)).cloned().collect())
}

/// Unfinished deliveries: of every effect that is there, those with neither fact nor parked row.
const UNFINISHED: &str = "unfinished as (
    select e.id, e.shard, t.consumer_id, e.deliver_after > clock_timestamp() as later, e.deliver_after,
           case when c.spec->>'ordering' = 'key' then e.ordering_key end as ordering_key,
           coalesce(c.spec->>'on_ambiguous' = 'hold', false) as hold
    from (select id, shard, targets, ordering_key, deliver_after from fencepost.effects
          union all
          select k.id, k.shard, k.targets, k.ordering_key, k.deliver_after from fencepost.effects_kept k
          where not exists (select from fencepost.effects x where x.id = k.id)) e
    cross join lateral unnest(e.targets) t (consumer_id)
    left join fencepost.consumers c on c.consumer_id = t.consumer_id
    where not exists (select from fencepost.ledger l where l.effect_id = e.id and l.consumer_id = t.consumer_id)
      and not exists (select from fencepost.parked p where p.effect_id = e.id and p.consumer_id = t.consumer_id)
)";

/// How many deliveries a rebase would park: those that would be tried, and those that would be in doubt.
pub async fn unfinished(client: &Client) -> Result<(u64, u64)> {
    let sql = format!(
        "-- store::unfinished\nwith {UNFINISHED}
         select count(*) filter (where not hold or later), count(*) filter (where hold and later is not true) from unfinished"
    );
    let row = client.query_one(&sql, &[]).await?;
    Ok((row.get::<_, i64>(0).unsigned_abs(), row.get::<_, i64>(1).unsigned_abs()))
}

/// Relays that hold shards now, by the leases.
pub async fn holders(client: &Client) -> Result<Vec<String>> {
    let rows = client
        .query(
            "-- store::holders
             select distinct coalesce(r.name, s.relay::text) from fencepost.shards s left join fencepost.relays r on r.relay = s.relay
             where s.lease_expires_at > clock_timestamp() order by 1",
            &[],
        )
        .await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

/// One statement, one snapshot: parks what is unfinished, and lets every shard begin after that snapshot. Whoever held
/// a shard holds it no more. Where another relay opens a flight at the same moment it is done again.
pub async fn perform(client: &mut Client, floor: i64, reason: &Reason) -> Result<Rebased> {
    let sql = format!(
        "-- store::rebase
with {UNFINISHED}, turn as (
    select u.id, u.shard, u.consumer_id, u.later, u.deliver_after, u.ordering_key, u.hold,
           coalesce((select max(a.attempt) from fencepost.attempts a where a.effect_id = u.id and a.consumer_id = u.consumer_id), 0) as attempts,
           u.ordering_key is not null and u.later is not true and (
               row_number() over (partition by u.consumer_id, u.ordering_key, u.later is true order by u.id) > 1
               or exists (select from fencepost.parked q where q.consumer_id = u.consumer_id and q.ordering_key = u.ordering_key
                          and q.state <> 'scheduled' and q.effect_id < u.id)) as waits
    from unfinished u
), parked as (
    insert into fencepost.parked (effect_id, consumer_id, shard, ordering_key, state, attempts, sent, next_attempt_at, reason, first_doubt_at)
    select t.id, t.consumer_id, t.shard, t.ordering_key,
           case when t.later then 'scheduled' when t.hold then 'in_doubt' when t.waits then 'blocked' else 'retry' end,
           t.attempts, t.attempts,
           case when t.later then t.deliver_after when not t.hold and not t.waits then clock_timestamp() end,
           'unfinished when the log was rebased; whether it was sent before is not known',
           case when t.later is not true then clock_timestamp() end
    from turn t
    returning state
), lost as (
    update fencepost.flights set token = 'lost', closed_at = clock_timestamp() where token is null
), flights as (
    insert into fencepost.flights (shard, seq, epoch, base, target, last_id, token, closed_at)
    select s.shard, coalesce((select max(f.seq) from fencepost.flights f where f.shard = s.shard), -1) + 1, s.epoch + 1,
           pg_current_snapshot(), pg_current_snapshot(), $1, 'rebase', clock_timestamp()
    from fencepost.shards s
), lags as (
    delete from fencepost.lags
), shards as (
    {RELEASED}
), history as (
    update fencepost.history set log_floor = $1, log_system = (select c.system_identifier from pg_control_system() c)
)
select count(*) filter (where state <> 'in_doubt'), count(*) filter (where state = 'in_doubt') from parked"
    );
    loop {
        let tx = client.transaction().await?;
        tx.batch_execute("-- store::rebase_time\nset local statement_timeout = 0").await?;
        let row = match tx.query_one(&sql, &[&floor]).await {
            Err(error) if error.code() == Some(&SqlState::UNIQUE_VIOLATION) => continue,
            row => row?,
        };
        let count = |n| row.get::<_, i64>(n).unsigned_abs();
        let rebased = Rebased { floor, retried: count(0), in_doubt: count(1) };
        record(&tx, "rebase", reason, &rebased).await?;
        tx.commit().await?;
        return Ok(rebased);
    }
}

/// Whoever held a shard holds it no more.
const RELEASED: &str = "update fencepost.shards set epoch = epoch + 1, relay = null, lease_expires_at = null,
    left_at = coalesce(left_at, lease_expires_at)";

async fn record(tx: &Transaction<'_>, action: &str, reason: &Reason, rebased: &Rebased) -> Result<()> {
    let detail =
        serde_json::json!({ "floor": rebased.floor, "retried": rebased.retried, "in_doubt": rebased.in_doubt });
    audit::record(tx, action, "log", reason, &detail).await
}

/// The operator's word that this database was set back in place, which looks like nothing at all: epochs go on above
/// any that can have been given out, and whoever held a shard holds it no more.
pub async fn new_history(client: &mut Client, reason: &Reason) -> Result<i64> {
    let tx = client.transaction().await?;
    let base: i64 = tx
        .query_one(
            &format!(
                "-- store::new_history
             with shards as (
                 {RELEASED}
             )
             update fencepost.history set epoch_base = epoch_base + 1048576 returning epoch_base"
            ),
            &[],
        )
        .await?
        .get(0);
    audit::record(&tx, "rebase --new-history", "epochs", reason, &serde_json::json!({ "epoch_base": base })).await?;
    tx.commit().await?;
    Ok(base)
}

/// One at a time: true where this session may.
pub async fn lead(client: &Client) -> Result<bool> {
    const LOCK: i64 = 0x6665_6e63_6570_6f75;
    Ok(client.query_one("-- store::lead_rebase\nselect pg_try_advisory_lock($1)", &[&LOCK]).await?.get(0))
}
