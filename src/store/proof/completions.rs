//! What a completion said it intends is in the log, and what is in the log belongs to a completion.

use super::Check;

/// Every epoch that has ended, with the place of its effects.
const ENDED: &str = "with ended as (
    select task_id, lease_epoch, token, first_effect_id, last_effect_id, effect_count, ended_at from fencepost.tasks where token is not null
    union all
    select task_id, lease_epoch, token, first_effect_id, last_effect_id, effect_count, ended_at from fencepost.task_epochs
)";

pub const BY_TOKEN: &str = "select token, count(*) from fencepost.completions
where ended_at >= $1::text::timestamptz and ended_at < $2::text::timestamptz group by token";

pub fn checks() -> Vec<Check> {
    vec![
        Check {
            kind: "effects_missing",
            sql: format!(
                "{ENDED}, found as (
    select c.task_id || ':' || c.lease_epoch as object,
           'it completed with ' || c.effect_count || ' effects, and ' || n.found || ' of them are in the log' as detail
    from ended c
    cross join lateral (
        select count(*) as found
        from (select e.id, e.task_id, e.lease_epoch from fencepost.effects e where e.id between c.first_effect_id and c.last_effect_id
              union
              select k.id, k.task_id, k.lease_epoch from fencepost.effects_kept k where k.id between c.first_effect_id and c.last_effect_id) e
        where e.task_id = c.task_id and e.lease_epoch = c.lease_epoch
    ) n
    where c.token = 'effects' and c.ended_at >= $1::text::timestamptz and c.ended_at < $2::text::timestamptz
      -- Older ones went with their segment.
      and c.first_effect_id >= (select coalesce(min(id), 0) from fencepost.effects)
      and n.found <> c.effect_count
) {{found}}"
            ),
        },
        Check {
            kind: "effect_without_completion",
            sql: "with found as (
    select e.task_id || ':' || e.lease_epoch || case when e.position > 1 then ':' || e.position else '' end as object,
           'no completion of this epoch intends it' as detail
    from (select id, task_id, lease_epoch, position from fencepost.effects
          where committed_at >= $1::text::timestamptz and committed_at < $2::text::timestamptz
            -- Tasks are kept as long as this.
            and committed_at > clock_timestamp() - (select value::interval from fencepost.settings where name = 'retention')) e
    where not exists (select from fencepost.tasks t where t.task_id = e.task_id and t.lease_epoch = e.lease_epoch
                      and t.token = 'effects' and e.id between t.first_effect_id and t.last_effect_id)
      and not exists (select from fencepost.task_epochs t where t.task_id = e.task_id and t.lease_epoch = e.lease_epoch
                      and t.token = 'effects' and e.id between t.first_effect_id and t.last_effect_id)
) {found}"
                .into(),
        },
        Check {
            kind: "completion_without_token",
            sql: "with found as (
    select t.task_id || ':' || t.lease_epoch as object, 'the task is ' || t.status || ' and has no token' as detail
    from fencepost.tasks t
    where t.status in ('completed', 'failed') and t.token is null
      and coalesce(t.ended_at, t.created_at) >= $1::text::timestamptz and coalesce(t.ended_at, t.created_at) < $2::text::timestamptz
) {found}"
                .into(),
        },
    ]
}
