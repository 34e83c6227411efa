//! One effect: what was intended, what happened to each of its deliveries, and why one has not ended.

use serde::Serialize;
use tokio_postgres::{GenericClient, Row};

use super::why::{Circumstances, Place};
use crate::model::key::{ConsumerId, EffectId};
use crate::store::Result;
use crate::store::alarms::Alarm;

/// An effect as it was committed. Its payload is not read.
#[derive(Clone, Debug, Serialize)]
pub struct EffectStory {
    pub key: String,
    #[serde(rename = "effect_id")]
    pub id: i64,
    pub shard: i16,
    pub topic: Option<String>,
    #[serde(rename = "type")]
    pub kind: Option<String>,
    pub content_type: String,
    pub size: i32,
    pub sha256: String,
    pub ordering_key: String,
    pub amends: Option<String>,
    pub committed_at: String,
    pub deliver_after: Option<String>,
    pub expires_at: Option<String>,
    pub deliveries: Vec<DeliveryStory>,
}

/// One delivery, with everything that was written about it.
#[derive(Clone, Debug, Serialize)]
pub struct DeliveryStory {
    pub consumer: String,
    /// None: nothing is known yet, it did not finish.
    pub token: Option<String>,
    pub attempts: i32,
    pub events: Vec<Event>,
    /// Present unless it has ended.
    #[serde(skip)]
    pub circumstances: Option<Circumstances>,
}

/// Something that happened, in the order it was written.
#[derive(Clone, Debug, Serialize)]
pub struct Event {
    pub at: String,
    pub what: String,
    pub detail: String,
}

/// The story of one effect, at all its consumers or at one.
pub async fn load(
    client: &impl GenericClient,
    id: EffectId,
    consumer: Option<ConsumerId>,
) -> Result<Option<EffectStory>> {
    let row = client
        .query_opt(
            "-- store::effect
             select e.task_id || ':' || e.lease_epoch || case when e.position > 1 then ':' || e.position else '' end,
                    e.shard, e.topic, e.type, e.content_type, e.size, encode(e.sha256, 'hex'), e.ordering_key, e.amends,
                    e.committed_at::text, e.deliver_after::text, e.expires_at::text
             from (select task_id, lease_epoch, position, shard, topic, type, content_type, size, sha256, ordering_key, amends,
                          committed_at, deliver_after, expires_at from fencepost.effects where id = $1
                   union all
                   select task_id, lease_epoch, position, shard, topic, type, content_type, size, sha256, ordering_key, amends,
                          committed_at, deliver_after, expires_at from fencepost.effects_kept where id = $1
                   limit 1) e",
            &[&id.0],
        )
        .await?;
    let Some(row) = row else { return Ok(None) };
    Ok(Some(EffectStory {
        key: row.get(0),
        id: id.0,
        shard: row.get(1),
        topic: row.get(2),
        kind: row.get(3),
        content_type: row.get(4),
        size: row.get(5),
        sha256: row.get(6),
        ordering_key: row.get(7),
        amends: row.get(8),
        committed_at: row.get(9),
        deliver_after: row.get(10),
        expires_at: row.get(11),
        deliveries: deliveries(client, id, consumer).await?,
    }))
}

async fn deliveries(
    client: &impl GenericClient,
    id: EffectId,
    consumer: Option<ConsumerId>,
) -> Result<Vec<DeliveryStory>> {
    let rows = client
        .query(
            "-- store::effect_deliveries
             select d.consumer_id, coalesce(d.consumer, '-'), d.token, d.attempts,
                    d.settled_at is null or exists (select from fencepost.parked p
                        where p.effect_id = d.effect_id and p.consumer_id = d.consumer_id and p.replay)
             from fencepost.deliveries_by_id d
             where d.effect_id = $1 and ($2::integer is null or d.consumer_id = $2) order by d.consumer_id",
            &[&id.0, &consumer.map(|c| c.0)],
        )
        .await?;
    let mut stories = Vec::new();
    for row in &rows {
        let consumer = ConsumerId(row.get(0));
        stories.push(DeliveryStory {
            consumer: row.get(1),
            token: row.get(2),
            attempts: row.get(3),
            events: events(client, id, consumer).await?,
            circumstances: match row.get(4) {
                true => circumstances(client, id, consumer).await?,
                false => None,
            },
        });
    }
    Ok(stories)
}

/// Attempts, parking and facts of one delivery, and what operators did to it, oldest first.
async fn events(client: &impl GenericClient, id: EffectId, consumer: ConsumerId) -> Result<Vec<Event>> {
    let rows = client
        .query(
            "-- store::delivery_events
             select at::text, what, concat_ws(', ', variadic details)
             from (
                 select a.at, 0 as rank, case when a.ended then 'attempt ' || a.attempt || ': ' || a.token else 'attempt ' || a.attempt || ' started' end as what,
                        array['status ' || a.status, 'until ' || a.phase, case when a.bytes_left then 'bytes may have left' when not a.bytes_left then 'nothing left' end,
                              a.took_ms || ' ms', a.error, 'said ' || a.ack_raw, 'relay ' || a.relay] as details
                 from fencepost.attempts a where a.effect_id = $1 and a.consumer_id = $2
                 union all
                 select p.parked_at, 1, 'left the fast path', array[case when p.replay then 'a replay' end]
                 from fencepost.parked p where p.effect_id = $1 and p.consumer_id = $2
                 union all
                 select l.at, 2, 'ended: ' || l.token, array['attempt ' || nullif(l.attempt, 0), 'status ' || l.status,
                        case when l.doubt then 'an earlier attempt is unresolved' end, 'said ' || l.ack_raw, l.note]
                 from fencepost.ledger l where l.effect_id = $1 and l.consumer_id = $2
                 union all
                 select g.at, 3, g.action, array['by ' || g.actor, g.reason]
                 from fencepost.audit_log g
                 where g.detail -> 'deliveries' ? (select d.key || ' ' || d.consumer from fencepost.deliveries_by_id d
                                                   where d.effect_id = $1 and d.consumer_id = $2)
             ) t order by t.at, t.rank",
            &[&id.0, &consumer.0],
        )
        .await?;
    Ok(rows.iter().map(event_from_row).collect())
}

pub(super) fn event_from_row(row: &Row) -> Event {
    Event { at: row.get(0), what: row.get(1), detail: row.get(2) }
}

/// What bears on a delivery now; none once its effect's row is gone.
async fn circumstances(
    client: &impl GenericClient,
    id: EffectId,
    consumer: ConsumerId,
) -> Result<Option<Circumstances>> {
    let row = client
        .query_opt(
            "-- store::circumstances
             select c.paused, c.paused_reason,
                    case when c.not_before > clock_timestamp() then extract(epoch from c.not_before - clock_timestamp())::float8 end,
                    e.shard, coalesce(s.lease_expires_at > clock_timestamp(), false),
                    p.state, extract(epoch from p.next_attempt_at - clock_timestamp())::float8, p.reason, p.replay,
                    f.seq, f.open, extract(epoch from clock_timestamp() - f.opened_at)::float8,
                    exists (select from fencepost.lags l where l.shard = e.shard and l.consumer_id = $2 and f.seq between l.from_seq and l.to_seq),
                    h.key, h.state,
                    (select a.detail from fencepost.alarms a where a.name = $3 and a.object = c.name and a.resolved_at is null),
                    (select a.detail from fencepost.alarms a where a.name = $4 and a.object = c.name and a.resolved_at is null)
             from (select id, shard, xid from fencepost.effects where id = $1
                   union all select id, shard, xid from fencepost.effects_kept where id = $1 limit 1) e
             join fencepost.shards s on s.shard = e.shard
             join fencepost.consumers c on c.consumer_id = $2
             left join fencepost.parked p on p.effect_id = e.id and p.consumer_id = $2
             left join lateral (
                 select f.seq, f.token is null as open, f.opened_at from fencepost.flights f
                 where p.state is null and f.shard = e.shard and e.id between f.first_id and f.last_id
                   and pg_visible_in_snapshot(e.xid, f.target) and not pg_visible_in_snapshot(e.xid, f.base)
                 order by f.seq desc limit 1
             ) f on true
             left join lateral (
                 select d.key, q.state from fencepost.parked q
                 join fencepost.deliveries_by_id d on d.effect_id = q.effect_id and d.consumer_id = q.consumer_id
                 where q.consumer_id = $2 and q.ordering_key = p.ordering_key and q.effect_id < e.id
                   and not (q.state = 'scheduled' and q.next_attempt_at > clock_timestamp())
                 order by q.effect_id limit 1
             ) h on true",
            &[&id.0, &consumer.0, &Alarm::ConsumerUnusable.as_str(), &Alarm::EdgeShut.as_str()],
        )
        .await?;
    let Some(row) = row else { return Ok(None) };
    let place = match (row.get::<_, Option<String>>(5), row.get::<_, Option<i64>>(9)) {
        (Some(state), _) => Place::Parked { state, next_in: row.get(6), reason: row.get(7), replay: row.get(8) },
        (None, None) => Place::Unread,
        (None, Some(seq)) if row.get::<_, bool>(10) => Place::InFlight { seq, seconds: row.get(11) },
        (None, Some(seq)) if row.get::<_, bool>(12) => Place::Lagging { seq },
        (None, Some(seq)) => Place::Unaccounted { seq },
    };
    Ok(Some(Circumstances {
        place,
        paused: row.get(0),
        paused_reason: row.get(1),
        not_before_in: row.get(2),
        shard: row.get(3),
        shard_is_held: row.get(4),
        head: row.get::<_, Option<String>>(13).zip(row.get(14)),
        unusable: row.get(15),
        shut: row.get(16),
    }))
}
