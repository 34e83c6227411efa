//! Dropping what is older than the retention: segments of effects whole, and never a delivery that still waits.
//!
//! An effect with a delivery that waits is copied, byte for byte and with its id, into `effects_kept` before its
//! segment is detached. A producer may commit into the segment while it is being detached, unseen by the relay, which
//! reads past it: so the detached table is gone over once more, and what came late is kept and parked.

use std::time::{Duration, SystemTime};

use super::Result;
use super::segments::{self, Link, Parent, Segment, Step};
use super::session::Session;

/// Rows of a segment that are looked at in one statement.
const PAGE: i64 = 20_000;
/// The longest a lock is waited for that others might queue behind.
const LEDGER_LOCK: &str = "20ms";
/// Tries to take it in one round, and the pause between them.
const LEDGER_TRIES: u32 = 50;
const LEDGER_PAUSE: Duration = Duration::from_millis(100);

const RETENTION: &str = "(select s.value::interval from fencepost.settings s where s.name = 'retention')";
/// Every column of an effect: what is kept is the row itself.
const COLUMNS: &str = "id, xid, committed_at, deliver_after, expires_at, lease_epoch, position, size, shard, targets, task_id, \
    topic, type, schema_version, content_type, ordering_key, traceparent, amends, headers, sha256, payload";
const LEDGER_COLUMNS: &str = "effect_id, at, consumer_id, token, attempt, status, doubt, ack_raw, note";

/// Effects that were copied, and deliveries that were parked because no relay can have read them.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Kept {
    pub effects: u64,
    pub late: u64,
}

/// How long things are kept, as the settings say.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Policy {
    pub retention: Duration,
    /// What one segment covers.
    pub span: Duration,
}

pub async fn policy(session: &Session) -> Result<Policy> {
    let row = session
        .client()
        .query_one(
            "-- store::retention_policy
             select extract(epoch from r.value::interval)::float8,
                    extract(epoch from greatest(r.value::interval / 6, m.value::interval))::float8
             from fencepost.settings r, fencepost.settings m where r.name = 'retention' and m.name = 'segment_span_min'",
            &[],
        )
        .await?;
    let span = |n| Duration::try_from_secs_f64(row.get(n)).unwrap_or_default();
    Ok(Policy { retention: span(0), span: span(1) })
}

/// What one relay at a time does: whoever has the lock of it, until its session ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Part {
    /// Deleting rows by age, for which a relay's own rights suffice.
    Rows,
    /// Adding and dropping segments, which only the tables' owner may.
    Segments,
}

impl Part {
    fn lock(self) -> i64 {
        match self {
            Self::Rows => 0x6665_6e63_6570_6f73,
            Self::Segments => 0x6665_6e63_6570_6f74,
        }
    }
}

/// Takes the lead, unless another session has it. To be asked once: one that has it gets it again.
pub async fn lead(session: &Session, part: Part) -> Result<bool> {
    let sql = "-- store::lead_retention\nselect pg_try_advisory_lock($1)";
    Ok(session.client().query_one(sql, &[&part.lock()]).await?.get(0))
}

/// Whether any session has the lead.
pub async fn is_led(session: &Session, part: Part) -> Result<bool> {
    // Free again with the statement's own transaction.
    let sql = "-- store::is_retention_led\nselect not pg_try_advisory_xact_lock($1)";
    Ok(session.client().query_one(sql, &[&part.lock()]).await?.get(0))
}

/// Whether the segment in use has covered its time: since its first effect.
pub async fn is_due_to_move_on(session: &Session) -> Result<bool> {
    let client = session.client();
    let last = segments::last_id(client).await?;
    let current = segments::list(client, Parent::Effects).await?;
    let Some(from) = current.iter().rfind(|s| s.from <= last).map(|s| s.from) else { return Ok(false) };
    let sql = "-- store::segment_age
        select coalesce((select e.committed_at < clock_timestamp() - greatest(r.value::interval / 6, m.value::interval)
                         from fencepost.effects e where e.id >= $1 order by e.id limit 1), false)
        from fencepost.settings r, fencepost.settings m where r.name = 'retention' and m.name = 'segment_span_min'";
    Ok(client.query_one(sql, &[&from]).await?.get(0))
}

/// Segments of effects below the one in use whose newest effect is older than the retention, oldest first, and those
/// whose dropping was begun.
pub async fn expired(session: &Session) -> Result<Vec<Segment>> {
    let client = session.client();
    let last = segments::last_id(client).await?;
    let mut expired = Vec::new();
    for segment in segments::list(client, Parent::Effects).await? {
        match segment.link {
            Link::Bounded { to } if to <= last + 1 => {
                let sql = format!(
                    "-- store::segment_expired
                     select coalesce((select e.committed_at < clock_timestamp() - {RETENTION} from {} e order by e.id desc limit 1), true)",
                    segment.table()
                );
                if !client.query_one(&sql, &[]).await?.get::<_, bool>(0) {
                    break;
                }
                expired.push(segment);
            }
            Link::Pending | Link::Detached if segment.from <= last => expired.push(segment),
            _ => break,
        }
    }
    Ok(expired)
}

/// Why the segment cannot be detached yet: a transaction is writing into it, or a shard has not been read through it.
pub async fn obstacle(session: &Session, segment: &Segment) -> Result<Option<String>> {
    let client = session.client();
    let table = segment.table();
    let writers = client
        .query_one(
            "-- store::segment_writers
             select count(*) from pg_locks l
             where l.locktype = 'relation' and l.relation = $1::text::regclass and l.mode = 'RowExclusiveLock' and l.granted
               and l.database = (select d.oid from pg_database d where d.datname = current_database())
               and l.pid is distinct from pg_backend_pid()",
            &[&table],
        )
        .await?
        .get::<_, i64>(0);
    if writers > 0 {
        return Ok(Some(format!("{writers} transactions that wrote into {table} have not ended")));
    }
    let sql = format!(
        "-- store::segment_unread
         select s.shard
         from fencepost.shards s
         cross join fencepost.history h
         cross join lateral (select f.base, f.target, f.partial, f.last_id from fencepost.flights f
                             where f.shard = s.shard order by f.seq desc limit 1) f
         where exists (select from {table} e
                       where e.shard = s.shard and e.id > h.log_floor
                         and e.xid >= pg_snapshot_xmin(f.target) and not pg_visible_in_snapshot(e.xid, f.target))
            or f.partial and exists (select from {table} e
                       where e.shard = s.shard and e.id > f.last_id and e.xid >= pg_snapshot_xmin(f.base)
                         and not pg_visible_in_snapshot(e.xid, f.base))
         order by s.shard limit 1"
    );
    let unread = client.query_opt(&sql, &[]).await?;
    Ok(unread.map(|row| format!("shard {} has not been read through {table}", row.get::<_, i16>(0))))
}

/// Copies every effect of an attached segment that still has a delivery to make.
pub async fn keep(session: &Session, segment: &Segment) -> Result<u64> {
    Ok(keep_pages(session, segment, "select 1 where false").await?.effects)
}

/// Goes over a detached segment once more: what was not kept before came late, and no relay will read it.
pub async fn keep_late(session: &Session, segment: &Segment) -> Result<Kept> {
    // A reading that was under way may have it in hand: its own outcome is waited for first.
    let park =
        "insert into fencepost.parked (effect_id, consumer_id, shard, ordering_key, state, next_attempt_at, reason)
         select k.id, t.consumer_id, k.shard, case when c.spec->>'ordering' = 'key' then k.ordering_key end,
                case when k.deliver_after > clock_timestamp() then 'scheduled' else 'retry' end,
                greatest(k.deliver_after, clock_timestamp() + interval '1 minute'),
                'committed while its segment was being dropped'
         from kept k cross join unnest(k.targets) t (consumer_id)
         left join fencepost.consumers c on c.consumer_id = t.consumer_id
         where not exists (select from fencepost.ledger l where l.effect_id = k.id and l.consumer_id = t.consumer_id)
         on conflict do nothing returning 1::bigint";
    keep_pages(session, segment, park).await
}

async fn keep_pages(session: &Session, segment: &Segment, park: &str) -> Result<Kept> {
    let table = segment.table();
    let page = format!(
        "-- store::segment_page
         select max(p.id) from (select e.id from {table} e where e.id > $1 order by e.id limit $2) p"
    );
    let keep = format!(
        "-- store::keep_effects
with kept as (
    insert into fencepost.effects_kept ({COLUMNS})
    select {COLUMNS} from {table} e
    where e.id > $1 and e.id <= $2 and exists (
        select from unnest(e.targets) t (consumer_id)
        where not exists (select from fencepost.ledger l where l.effect_id = e.id and l.consumer_id = t.consumer_id)
           or exists (select from fencepost.parked p where p.effect_id = e.id and p.consumer_id = t.consumer_id))
    on conflict do nothing
    returning id, shard, targets, ordering_key, deliver_after
), late as (
    {park}
)
select (select count(*) from kept), (select count(*) from late)"
    );
    let client = session.client();
    let mut total = Kept::default();
    let mut after = segment.from - 1;
    while let Some(up_to) = client.query_one(&page, &[&after, &PAGE]).await?.get::<_, Option<i64>>(0) {
        let row = client.query_one(&keep, &[&after, &up_to]).await?;
        total.effects += row.get::<_, i64>(0).unsigned_abs();
        total.late += row.get::<_, i64>(1).unsigned_abs();
        after = up_to;
    }
    Ok(total)
}

pub async fn drop_detached(session: &Session, segment: &Segment) -> Result<Step> {
    let sql = format!("-- store::drop_segment\ndrop table {}", segment.table());
    Step::of(session.client().batch_execute(&sql).await.map_err(Into::into), &format!("dropping {}", segment.table()))
}

/// The ledger's segments whose effects are gone: those below the oldest segment of effects.
pub async fn expired_ledger(session: &Session) -> Result<Option<Segment>> {
    let client = session.client();
    let oldest = segments::list(client, Parent::Effects).await?.first().map(|s| s.from);
    let ledger = segments::list(client, Parent::Ledger).await?;
    Ok(ledger
        .into_iter()
        .take_while(|s| matches!((s.link, oldest), (Link::Bounded { to }, Some(oldest)) if to <= oldest))
        .next())
}

/// Drops the oldest segment of the ledger and keeps, in a segment for everything before, the facts about effects that
/// are kept. The ledger is exchanged under a lock that is waited for no longer than nobody notices.
pub async fn drop_ledger(session: &mut Session, segment: &Segment) -> Result<Step> {
    let Link::Bounded { to } = segment.link else { return Ok(Step::Done) };
    let client = session.client();
    let old: String = client
        .query_one(
            "-- store::kept_ledger
             select c.oid::regclass::text from pg_inherits i join pg_class c on c.oid = i.inhrelid
             where i.inhparent = 'fencepost.ledger'::regclass and c.relname ~ '^ledger_kept_[0-9]+$'",
            &[],
        )
        .await?
        .get(0);
    let new = format!("fencepost.ledger_kept_{to}");
    client
        .batch_execute(&format!(
            "-- store::new_kept_ledger
             drop table if exists {new};
             create table {new} (like fencepost.ledger including defaults including constraints,
                                 primary key (effect_id, consumer_id, token), constraint kept check (effect_id < {to}));
             create index on {new} using brin (at) with (pages_per_range = 32, autosummarize = on);"
        ))
        .await?;
    let copy = |since: &str| {
        format!(
            "-- store::keep_facts
             insert into {new} ({LEDGER_COLUMNS})
             select {LEDGER_COLUMNS} from fencepost.ledger l
             where l.effect_id < {to} and {since} exists (select from fencepost.effects_kept k where k.id = l.effect_id)
             on conflict do nothing"
        )
    };
    let started: SystemTime = client.query_one("-- store::now\nselect clock_timestamp()", &[]).await?.get(0);
    client.execute(&copy(""), &[]).await?;
    for _ in 0..LEDGER_TRIES {
        let tx = session.client_mut().transaction().await?;
        let locked = tx
            .batch_execute(&format!(
                "-- store::lock_ledger
                 set local lock_timeout = '{LEDGER_LOCK}';
                 lock table only fencepost.ledger in access exclusive mode;
                 lock table {old}, {} in access exclusive mode",
                segment.table()
            ))
            .await;
        if let Step::Waits(_) = Step::of(locked.map_err(Into::into), "")? {
            drop(tx);
            tokio::time::sleep(LEDGER_PAUSE).await;
            continue;
        }
        // No fact's transaction is older than an hour: relays and commands end theirs within minutes.
        tx.execute(&copy("l.at > $1::timestamptz - interval '1 hour' and"), &[&started]).await?;
        tx.batch_execute(&format!(
            "-- store::exchange_ledger
             alter table fencepost.ledger detach partition {old};
             alter table fencepost.ledger detach partition {0};
             alter table fencepost.ledger attach partition {new} for values from (minvalue) to ({to});
             alter table {new} drop constraint kept;
             select fencepost.protect('{new}');
             drop table {old}, {0}",
            segment.table()
        ))
        .await?;
        tx.commit().await?;
        return Ok(Step::Done);
    }
    Ok(Step::Waits(format!("dropping {} waits for other transactions", segment.table())))
}
