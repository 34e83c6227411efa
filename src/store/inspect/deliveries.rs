//! Lists of deliveries: those that wait, and those that have ended.

use serde::Serialize;
use tokio_postgres::{GenericClient, Row};

use crate::model::key::{ConsumerId, EffectId, EffectKey};
use crate::model::token::{Fact, Waiting};
use crate::store::Result;
use crate::store::settle::DeliveryId;

/// Which deliveries; what is empty or absent restricts nothing.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    pub effects: Option<Vec<EffectId>>,
    pub consumer: Option<ConsumerId>,
}

/// One delivery as a list shows it.
#[derive(Clone, Debug, Serialize)]
pub struct Delivery {
    #[serde(skip)]
    pub id: DeliveryId,
    /// None: the effect's segment is gone.
    pub key: Option<String>,
    pub consumer: String,
    pub token: String,
    pub attempts: i32,
    /// Negative: due for so long.
    pub next_attempt_seconds: Option<f64>,
    /// Since it was parked, or since it ended.
    pub age_seconds: f64,
    pub reason: Option<String>,
    /// Sent again on an operator's word although it had ended.
    pub replay: bool,
}

/// The effect's key, where its row is still there.
pub(super) const KEY_OF: &str = "left join lateral (
    select e.task_id || ':' || e.lease_epoch || case when e.position > 1 then ':' || e.position else '' end as key
    from (select task_id, lease_epoch, position from fencepost.effects where id = d.effect_id
          union all
          select task_id, lease_epoch, position from fencepost.effects_kept where id = d.effect_id
          limit 1) e
) k on true";

/// Deliveries that wait with one of these tokens, oldest effect first.
pub async fn waiting(
    client: &impl GenericClient,
    filter: &Filter,
    tokens: &[Waiting],
    limit: i64,
) -> Result<Vec<Delivery>> {
    let sql = format!(
        "-- store::list_waiting
         select d.effect_id, d.consumer_id, k.key, c.name, d.state, d.attempts,
                extract(epoch from d.next_attempt_at - clock_timestamp())::float8,
                extract(epoch from clock_timestamp() - d.parked_at)::float8, d.reason, d.replay
         from (
             select p.effect_id, p.consumer_id, p.state, p.attempts, p.next_attempt_at, p.parked_at, p.reason, p.replay
             from fencepost.parked p
             where ($1::bigint[] is null or p.effect_id = any ($1)) and ($2::integer is null or p.consumer_id = $2) and p.state = any ($3)
               and (p.replay or not exists (select from fencepost.ledger l
                                            where l.effect_id = p.effect_id and l.consumer_id = p.consumer_id))
             order by p.effect_id, p.consumer_id limit $4
         ) d
         join fencepost.consumers c on c.consumer_id = d.consumer_id {KEY_OF}
         order by d.effect_id, d.consumer_id"
    );
    let tokens: Vec<&str> = tokens.iter().map(|token| token.as_str()).collect();
    let rows = client.query(&sql, &[&effects(filter), &consumer(filter), &tokens, &limit]).await?;
    Ok(rows.iter().map(delivery_from_row).collect())
}

/// Deliveries that ended with one of these tokens, newest effect first. The strongest fact is the token; a rare token
/// reads the whole ledger.
pub async fn settled(
    client: &impl GenericClient,
    filter: &Filter,
    tokens: &[Fact],
    limit: i64,
) -> Result<Vec<Delivery>> {
    let sql = format!(
        "-- store::list_settled
         select d.effect_id, d.consumer_id, k.key, coalesce(c.name, '-'), d.token::text, d.attempt, null::float8,
                extract(epoch from clock_timestamp() - d.at)::float8, d.note, false
         from (
             select l.effect_id, l.consumer_id, l.token, l.attempt, l.at, l.note
             from fencepost.ledger l
             where ($1::bigint[] is null or l.effect_id = any ($1)) and ($2::integer is null or l.consumer_id = $2)
               and l.token = any ($3::text[]::fencepost.fact[])
               and not exists (select from fencepost.ledger s where s.effect_id = l.effect_id and s.consumer_id = l.consumer_id
                                                               and s.token < l.token)
             order by l.effect_id desc, l.consumer_id limit $4
         ) d
         left join fencepost.consumers c on c.consumer_id = d.consumer_id {KEY_OF}
         order by d.effect_id desc, d.consumer_id"
    );
    let tokens: Vec<&str> = tokens.iter().map(|token| token.as_str()).collect();
    let rows = client.query(&sql, &[&effects(filter), &consumer(filter), &tokens, &limit]).await?;
    Ok(rows.iter().map(delivery_from_row).collect())
}

/// One thing that happened to a delivery, for `deliveries tail`.
#[derive(Clone, Debug, Serialize)]
pub struct Happening {
    pub at: String,
    pub key: Option<String>,
    pub consumer: String,
    pub token: String,
    pub attempt: i32,
    pub status: Option<i16>,
    pub detail: Option<String>,
}

/// Where a tail goes on: everything up to this moment of the database's clock was told.
#[derive(Clone, Debug, PartialEq)]
pub struct Mark(String);

/// The moment a tail begins with: `seconds` ago.
pub async fn mark(client: &impl GenericClient, seconds: f64) -> Result<Mark> {
    let sql = "-- store::tail_mark\nselect (clock_timestamp() - make_interval(secs => $1))::text";
    Ok(Mark(client.query_one(sql, &[&seconds]).await?.get(0)))
}

/// Facts and unsuccessful attempts written since `mark`, oldest first, and the next mark.
///
/// Rows bear the moment they were written, not that of their commit, so the newest 300 ms are left for the next call;
/// what takes longer to commit is not told. A tail is for watching; the ledger is the record.
pub async fn since(
    client: &impl GenericClient,
    mark: &Mark,
    consumer: Option<ConsumerId>,
) -> Result<(Vec<Happening>, Mark)> {
    let sql = format!(
        "-- store::tail
         with until as materialized (select clock_timestamp() - interval '300 milliseconds' as at)
         select d.at::text, k.key, coalesce(c.name, '-'), d.token, d.attempt, d.status, d.detail, (select at::text from until)
         from (select true) as always
         left join lateral (
             select l.effect_id, l.consumer_id, l.at, l.token::text as token, l.attempt, l.status, coalesce(l.ack_raw, l.note) as detail
             from fencepost.ledger l
             where l.at > $1::text::timestamptz and l.at <= (select at from until) and ($2::integer is null or l.consumer_id = $2)
             union all
             select a.effect_id, a.consumer_id, a.at, a.token, a.attempt, a.status, coalesce(a.error, a.ack_raw)
             from fencepost.attempts a
             where a.ended and a.at > $1::text::timestamptz and a.at <= (select at from until) and ($2::integer is null or a.consumer_id = $2)
               and a.token not in ('applied', 'duplicate', 'accepted', 'confirmed', 'stale', 'conflict', 'rejected')
         ) d on true
         left join fencepost.consumers c on c.consumer_id = d.consumer_id {KEY_OF}
         order by d.at"
    );
    let rows = client.query(&sql, &[&mark.0, &consumer.map(|c| c.0)]).await?;
    let next = rows.first().map_or_else(|| mark.clone(), |row| Mark(row.get(7)));
    let happenings = rows.iter().filter(|row| row.get::<_, Option<String>>(0).is_some()).map(|row| Happening {
        at: row.get(0),
        key: row.get(1),
        consumer: row.get(2),
        token: row.get(3),
        attempt: row.get(4),
        status: row.get(5),
        detail: row.get(6),
    });
    Ok((happenings.collect(), next))
}

/// The effect with this key, however large the log is.
pub async fn effect_id(client: &impl GenericClient, key: &EffectKey) -> Result<Option<EffectId>> {
    let row = client.query_one("-- store::effect_id\nselect fencepost.effect_id_of($1)", &[&key.to_string()]).await?;
    Ok(row.get::<_, Option<i64>>(0).map(EffectId))
}

fn effects(filter: &Filter) -> Option<Vec<i64>> {
    filter.effects.as_ref().map(|ids| ids.iter().map(|id| id.0).collect())
}

fn consumer(filter: &Filter) -> Option<i32> {
    filter.consumer.map(|id| id.0)
}

fn delivery_from_row(row: &Row) -> Delivery {
    Delivery {
        id: DeliveryId { effect: EffectId(row.get(0)), consumer: ConsumerId(row.get(1)) },
        key: row.get(2),
        consumer: row.get(3),
        token: row.get(4),
        attempts: row.get(5),
        next_attempt_seconds: row.get(6),
        age_seconds: row.get(7),
        reason: row.get(8),
        replay: row.get(9),
    }
}
