//! Every delivery has ended or waits with a reason, and nothing was said about a delivery that is none.

use super::Check;

/// Deliveries that have a fact, by the one that decides.
pub const ENDED: &str = "select f.token::text, count(*)
from (select (select l.token from fencepost.ledger l where l.effect_id = d.id and l.consumer_id = d.consumer_id
              order by l.token limit 1) as token
      from deliveries d) f
where f.token is not null group by f.token";

/// Deliveries that wait in the parking lot, by their waiting token.
pub const PARKED: &str = "select p.state, count(*)
from deliveries d join fencepost.parked p on p.effect_id = d.id and p.consumer_id = d.consumer_id
where p.replay or not exists (select from fencepost.ledger l where l.effect_id = d.id and l.consumer_id = d.consumer_id)
group by p.state";

/// Deliveries with neither fact nor parked row, and where they are; `place` is null where they are nowhere.
///
/// Nowhere is what no flight covers although reading has passed it, or what was in a flight that is closed.
pub const PLACED: &str = "with newest as materialized (
    select s.shard, f.base, f.target, f.partial, f.last_id
    from fencepost.shards s
    cross join lateral (select base, target, partial, last_id from fencepost.flights
                        where shard = s.shard order by seq desc limit 1) f
), airborne as materialized (
    select shard, base, target, first_id, last_id from fencepost.flights where token is null
), lagging as materialized (
    select l.consumer_id, f.shard, f.base, f.target, f.first_id, f.last_id
    from fencepost.lags l join fencepost.flights f on f.shard = l.shard and f.seq between l.from_seq and l.to_seq
), placed as materialized (
    select d.id, d.xid, d.shard, d.consumer_id, d.key,
           case
               when d.consumer_id = 0 then null
               when not pg_visible_in_snapshot(d.xid, n.target)
                    or (n.partial and d.id > n.last_id and not pg_visible_in_snapshot(d.xid, n.base)) then 'unread'
               when exists (select from airborne f where f.shard = d.shard and d.id between f.first_id and f.last_id
                            and pg_visible_in_snapshot(d.xid, f.target) and not pg_visible_in_snapshot(d.xid, f.base)) then 'in_flight'
               when exists (select from lagging f where f.shard = d.shard and f.consumer_id = d.consumer_id
                            and d.id between f.first_id and f.last_id
                            and pg_visible_in_snapshot(d.xid, f.target) and not pg_visible_in_snapshot(d.xid, f.base)) then 'lagging'
           end as place
    from deliveries d left join newest n on n.shard = d.shard
    where not exists (select from fencepost.ledger l where l.effect_id = d.id and l.consumer_id = d.consumer_id)
      and not exists (select from fencepost.parked p where p.effect_id = d.id and p.consumer_id = d.consumer_id)
)";

pub fn checks() -> Vec<Check> {
    vec![
        Check {
            kind: "delivery_without_end",
            sql: format!(
                "{PLACED}, found as (
    select p.key || ' to ' || coalesce(c.name, 'nobody') as object,
           case
               when p.consumer_id = 0 then 'nobody subscribed to it, and the ledger does not say unrouted'
               when f.seq is null then 'reading has passed it, and no flight covers it'
               else 'flight ' || f.seq || ' of shard ' || p.shard || ' is closed (' || f.token || ') and there is neither fact nor parked row'
           end as detail
    from placed p
    left join fencepost.consumers c on c.consumer_id = p.consumer_id
    left join lateral (
        select f.seq, f.token from fencepost.flights f
        where f.shard = p.shard and p.id between f.first_id and f.last_id
          and pg_visible_in_snapshot(p.xid, f.target) and not pg_visible_in_snapshot(p.xid, f.base)
        order by f.seq desc limit 1
    ) f on true
    where p.place is null
) {{found}}"
            ),
        },
        Check {
            kind: "waiting_without_reason",
            sql: "with found as (
    select d.key || ' to ' || coalesce(c.name, '?') as object,
           case
               when p.state in ('in_doubt', 'dead') then p.state || ' without a word why'
               else p.state || ' without a moment at which it is due'
           end as detail
    from deliveries d
    join fencepost.parked p on p.effect_id = d.id and p.consumer_id = d.consumer_id
    left join fencepost.consumers c on c.consumer_id = d.consumer_id
    where (p.state in ('in_doubt', 'dead') and coalesce(p.reason, '') = '')
       or (p.state in ('retry', 'scheduled', 'backlog') and p.next_attempt_at is null)
) {found}"
                .into(),
        },
        Check {
            kind: "fact_about_nothing",
            sql: format!(
                "with found as (
    select 'effect ' || l.effect_id || ' to ' || coalesce(c.name, 'consumer ' || l.consumer_id) as object,
           'the ledger says ' || l.token || ', and no such delivery was intended' as detail
    from fencepost.ledger l left join fencepost.consumers c on c.consumer_id = l.consumer_id
    where l.at >= $1::text::timestamptz and l.at < $2::text::timestamptz and {}
) {{found}}",
                intended("l", "l.effect_id >= (select coalesce(min(id), 0) from fencepost.effects) and not")
            ),
        },
        Check {
            kind: "parked_about_nothing",
            sql: format!(
                "with found as (
    select 'effect ' || p.effect_id || ' to ' || coalesce(c.name, 'consumer ' || p.consumer_id) as object,
           'parked as ' || p.state || ', and no such delivery was intended' as detail
    from fencepost.parked p left join fencepost.consumers c on c.consumer_id = p.consumer_id
    where p.parked_at >= $1::text::timestamptz and p.parked_at < $2::text::timestamptz and {}
) {{found}}",
                intended("p", "not")
            ),
        },
        Check {
            kind: "payload_changed",
            sql: "with found as (
    select 'effect ' || d.id as object, 'its payload is not what its SHA-256 was taken of' as detail
    from (select id, payload, sha256, committed_at from fencepost.effects
          union all select id, payload, sha256, committed_at from fencepost.effects_kept) d
    where d.committed_at >= $1::text::timestamptz and d.committed_at < $2::text::timestamptz and sha256(d.payload) <> d.sha256
) {found}"
                .into(),
        },
    ]
}

/// Whether the delivery a row of `table` is about was intended; consumer 0 stands for nobody.
fn intended(table: &str, prefix: &str) -> String {
    let one = |log: &str| {
        format!(
            "exists (select from fencepost.{log} e where e.id = {table}.effect_id
                     and {table}.consumer_id = any (case when e.targets = '{{}}' then array[0] else e.targets end))"
        )
    };
    format!("{prefix} ({} or {})", one("effects"), one("effects_kept"))
}
