//! Reading has no gap: each flight begins where the one before ended, and an open one has somebody who flies it.

use super::Check;

pub fn checks() -> Vec<Check> {
    vec![
        Check {
            kind: "flight_gap",
            sql: "with chain as (
    select f.shard, f.seq, f.token, f.base::text as base, f.target::text as target, f.first_id, f.last_id, f.opened_at,
           lag(f.seq) over w as seq_before, lag(f.base::text) over w as base_before, lag(f.target::text) over w as target_before,
           lag(f.partial) over w as partial_before, lag(f.last_id) over w as last_before
    from fencepost.flights f
    window w as (partition by f.shard order by f.seq)
), found as (
    select 'flight ' || c.seq || ' of shard ' || c.shard as object,
           case
               when c.seq <> c.seq_before + 1 then 'the one before it is ' || c.seq_before
               else 'it does not begin where flight ' || c.seq_before || ' ended'
           end as detail
    from chain c
    where c.opened_at >= $1::text::timestamptz and c.opened_at < $2::text::timestamptz
      and c.seq_before is not null and c.token is distinct from 'rebase'
      and (c.seq <> c.seq_before + 1
           or case
                  -- A fence carries its predecessor's position on.
                  when c.token = 'fence' then (c.base, c.target, c.last_id) is distinct from (c.base_before, c.target_before, c.last_before)
                  when c.partial_before then (c.base, c.target) is distinct from (c.base_before, c.target_before) or c.first_id <= c.last_before
                  else c.base <> c.target_before
              end)
) {found}"
                .into(),
        },
        Check {
            kind: "flight_left_open",
            sql: "with found as (
    select 'flight ' || f.seq || ' of shard ' || f.shard as object,
           'open since ' || f.opened_at || '; its relay ' || coalesce(f.relay::text, '?')
           || ' does not hold the shard any more, and nobody has taken it over' as detail
    from fencepost.flights f left join fencepost.shards s on s.shard = f.shard
    where f.token is null and f.opened_at >= $1::text::timestamptz and f.opened_at < $2::text::timestamptz
      and (s.relay is distinct from f.relay or s.epoch is distinct from f.epoch
           or not coalesce(s.lease_expires_at > clock_timestamp(), false))
) {found}"
                .into(),
        },
        Check {
            kind: "shard_without_position",
            sql: "with found as (
    select 'shard ' || s.shard as object, 'it has no flight: where its reading stands is unknown' as detail
    from fencepost.shards s where not exists (select from fencepost.flights f where f.shard = s.shard)
) {found}"
                .into(),
        },
    ]
}
