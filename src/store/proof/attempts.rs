//! No attempt is without a token: every one that was counted or started has its end, or is under way now.

use super::Check;

pub const BY_TOKEN: &str = "select a.token, count(*) from fencepost.attempts a
where a.ended and a.at >= $1::text::timestamptz and a.at < $2::text::timestamptz group by a.token";

pub fn checks() -> Vec<Check> {
    vec![
        // A start is under way while it is the delivery's last and the relay that wrote it still holds the shard.
        Check {
            kind: "attempt_without_token",
            sql: "with found as (
    select coalesce(e.key, 'effect ' || s.effect_id) || ' to ' || coalesce(c.name, '?') || ', attempt ' || s.attempt as object,
           'started at ' || s.at || ' by relay ' || coalesce(s.relay::text, '?') || ', which '
           || case when h.relay = s.relay then 'has gone on without ending it' else 'does not hold the shard any more' end as detail
    from fencepost.attempts s
    left join deliveries e on e.id = s.effect_id and e.consumer_id = s.consumer_id
    left join fencepost.shards h on h.shard = e.shard and h.lease_expires_at > clock_timestamp()
    left join fencepost.consumers c on c.consumer_id = s.consumer_id
    where not s.ended and s.at >= $1::text::timestamptz and s.at < $2::text::timestamptz
      and not exists (select from fencepost.attempts z where z.effect_id = s.effect_id and z.consumer_id = s.consumer_id
                      and z.attempt = s.attempt and z.ended)
      and not exists (select from fencepost.ledger l where l.effect_id = s.effect_id and l.consumer_id = s.consumer_id
                      and l.attempt = s.attempt)
      and not (coalesce(h.relay = s.relay, false)
               and not exists (select from fencepost.attempts z where z.effect_id = s.effect_id
                               and z.consumer_id = s.consumer_id and z.attempt > s.attempt))
) {found}"
                .into(),
        },
        // The number of an attempt is one more than that of the one before: none between may be missing.
        Check {
            kind: "attempt_missing",
            sql: "with last as (
    select d.id, d.consumer_id, d.key, greatest(
               (select max(l.attempt) from fencepost.ledger l where l.effect_id = d.id and l.consumer_id = d.consumer_id),
               (select p.attempts from fencepost.parked p where p.effect_id = d.id and p.consumer_id = d.consumer_id)) as attempt
    from deliveries d
), found as (
    select d.key || ' to ' || coalesce(c.name, '?') || ', attempt ' || n.attempt as object,
           'attempt ' || d.attempt || ' is known, and nothing of this one' as detail
    from last d
    cross join lateral generate_series(1, d.attempt) n (attempt)
    left join fencepost.consumers c on c.consumer_id = d.consumer_id
    where not exists (select from fencepost.attempts z where z.effect_id = d.id and z.consumer_id = d.consumer_id and z.attempt = n.attempt)
      and not exists (select from fencepost.ledger l where l.effect_id = d.id and l.consumer_id = d.consumer_id and l.attempt = n.attempt)
) {found}"
                .into(),
        },
    ]
}
