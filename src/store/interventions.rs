//! What an operator does to deliveries. Each is one transaction: the rows are looked at again under their locks,
//! changed, written to the audit log, and their shards are woken.

use serde_json::json;
use tokio_postgres::{Client, Row, Transaction};

use super::Result;
use super::audit::{self, Reason};
use super::settle::DeliveryId;
use crate::model::key::{ConsumerId, EffectId};
use crate::model::token::{Fact, Waiting};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intervention {
    /// Attempt now, with the same key and a fresh budget.
    Retry,
    /// The operator's word on what became of it.
    Resolve(Resolution),
    /// Give it up and release its key.
    Skip,
    /// Send a delivery that has ended again, same key and bytes.
    Replay,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resolution {
    Applied,
    NotApplied,
}

impl Intervention {
    pub fn verb(self) -> &'static str {
        match self {
            Self::Retry => "retry",
            Self::Resolve(Resolution::Applied) => "resolve as applied",
            Self::Resolve(Resolution::NotApplied) => "resolve as not applied",
            Self::Skip => "skip",
            Self::Replay => "replay",
        }
    }

    /// The waiting tokens it can be done to; none: it is for deliveries that have ended.
    pub fn applies_to(self) -> &'static [Waiting] {
        match self {
            Self::Retry => &[Waiting::Retry, Waiting::Backlog, Waiting::Unacked, Waiting::InDoubt, Waiting::Dead],
            Self::Resolve(_) => &[Waiting::Retry, Waiting::Unacked, Waiting::InDoubt, Waiting::Dead],
            Self::Skip => Waiting::ALL,
            Self::Replay => &[],
        }
    }
}

/// Does it to those of `wanted` that still wait with one of `tokens` (for a replay: that have ended), and says which.
pub async fn perform(
    client: &mut Client,
    what: Intervention,
    wanted: &[DeliveryId],
    tokens: &[Waiting],
    reason: &Reason,
) -> Result<Vec<DeliveryId>> {
    let tx = client.transaction().await?;
    let rows = match what {
        Intervention::Retry => retry(&tx, &lock(&tx, wanted, tokens).await?).await?,
        Intervention::Resolve(Resolution::Applied) => {
            end(&tx, &lock(&tx, wanted, tokens).await?, Fact::OperatorApplied, reason).await?
        }
        Intervention::Resolve(Resolution::NotApplied) => {
            end(&tx, &lock(&tx, wanted, tokens).await?, Fact::OperatorNotApplied, reason).await?
        }
        Intervention::Skip => end(&tx, &lock(&tx, wanted, tokens).await?, Fact::Skipped, reason).await?,
        Intervention::Replay => replay(&tx, wanted).await?,
    };
    if !rows.is_empty() {
        record(&tx, what, &rows, reason).await?;
        ring(&tx, &rows).await?;
    }
    tx.commit().await?;
    Ok(rows)
}

/// The columns of a list of deliveries.
fn columns(rows: &[DeliveryId]) -> (Vec<i64>, Vec<i32>) {
    rows.iter().map(|row| (row.effect.0, row.consumer.0)).unzip()
}

/// Locks the rows that are still as they were asked for, in the order of their keys.
async fn lock(tx: &Transaction<'_>, wanted: &[DeliveryId], tokens: &[Waiting]) -> Result<Vec<DeliveryId>> {
    let (effects, consumers) = columns(wanted);
    let tokens: Vec<&str> = tokens.iter().map(|token| token.as_str()).collect();
    let rows = tx
        .query(
            "-- store::lock_parked
             select p.effect_id, p.consumer_id from fencepost.parked p
             where (p.effect_id, p.consumer_id) in (select e, c from unnest($1::bigint[], $2::integer[]) as w (e, c))
               and p.state = any ($3)
               and (p.replay or not exists (select from fencepost.ledger l
                                            where l.effect_id = p.effect_id and l.consumer_id = p.consumer_id))
             order by p.effect_id, p.consumer_id for update of p",
            &[&effects, &consumers, &tokens],
        )
        .await?;
    Ok(rows.iter().map(delivery_id).collect())
}

fn delivery_id(row: &Row) -> DeliveryId {
    DeliveryId { effect: EffectId(row.get(0)), consumer: ConsumerId(row.get(1)) }
}

/// The budgets begin anew; that an earlier attempt is in doubt stays known.
async fn retry(tx: &Transaction<'_>, rows: &[DeliveryId]) -> Result<Vec<DeliveryId>> {
    let (effects, consumers) = columns(rows);
    tx.execute(
        "-- store::retry_parked
         update fencepost.parked p
         set state = 'retry', next_attempt_at = clock_timestamp(), reason = 'an operator asked for an attempt',
             refusals = 0, deaths = 0, republished = 0, first_failed_at = null, in_progress_since = null,
             first_doubt_at = case when p.first_doubt_at is not null then clock_timestamp() end
         from unnest($1::bigint[], $2::integer[]) as w (effect_id, consumer_id)
         where p.effect_id = w.effect_id and p.consumer_id = w.consumer_id",
        &[&effects, &consumers],
    )
    .await?;
    Ok(rows.to_vec())
}

/// Writes the fact and removes the row; a trigger releases the next of its key.
async fn end(tx: &Transaction<'_>, rows: &[DeliveryId], fact: Fact, reason: &Reason) -> Result<Vec<DeliveryId>> {
    let (effects, consumers) = columns(rows);
    tx.execute(
        "-- store::end_parked
         with ended as (
             delete from fencepost.parked p using unnest($1::bigint[], $2::integer[]) as w (effect_id, consumer_id)
             where p.effect_id = w.effect_id and p.consumer_id = w.consumer_id
             returning p.effect_id, p.consumer_id, p.attempts
         )
         insert into fencepost.ledger (effect_id, consumer_id, token, attempt, note)
         select effect_id, consumer_id, $3::text::fencepost.fact, attempts, $4 from ended
         on conflict do nothing",
        &[&effects, &consumers, &fact.as_str(), &reason.as_str()],
    )
    .await?;
    Ok(rows.to_vec())
}

/// Parks deliveries that have ended once more, but for those whose effect has expired since. They stand outside their
/// key's order: that turn has passed.
async fn replay(tx: &Transaction<'_>, wanted: &[DeliveryId]) -> Result<Vec<DeliveryId>> {
    let (effects, consumers) = columns(wanted);
    let rows = tx
        .query(
            "-- store::replay
             insert into fencepost.parked (effect_id, consumer_id, shard, state, attempts, sent, next_attempt_at, reason, replay)
             select w.effect_id, w.consumer_id, e.shard, 'retry', l.attempts, l.attempts, clock_timestamp(), 'an operator sends it again', true
             from unnest($1::bigint[], $2::integer[]) as w (effect_id, consumer_id)
             join lateral (select shard, expires_at from fencepost.effects where id = w.effect_id
                           union all
                           select shard, expires_at from fencepost.effects_kept where id = w.effect_id
                           limit 1) e on e.expires_at is null or e.expires_at > clock_timestamp()
             cross join lateral (
                 select greatest(max(l.attempt), (select max(a.attempt) from fencepost.attempts a
                                                  where a.effect_id = w.effect_id and a.consumer_id = w.consumer_id)) as attempts
                 from fencepost.ledger l
                 where l.effect_id = w.effect_id and l.consumer_id = w.consumer_id and l.token <> 'unrouted'
                 having count(*) > 0) l
             on conflict do nothing
             returning effect_id, consumer_id",
            &[&effects, &consumers],
        )
        .await?;
    Ok(rows.iter().map(delivery_id).collect())
}

/// One entry, with the key of every delivery it was done to.
async fn record(tx: &Transaction<'_>, what: Intervention, rows: &[DeliveryId], reason: &Reason) -> Result<()> {
    let (effects, consumers) = columns(rows);
    let keys = tx
        .query(
            "-- store::keys
             select k.key, k.consumer
             from unnest($1::bigint[], $2::integer[]) with ordinality as w (effect_id, consumer_id, n)
             join fencepost.deliveries_by_id k on k.effect_id = w.effect_id and k.consumer_id = w.consumer_id order by w.n",
            &[&effects, &consumers],
        )
        .await?;
    let keys: Vec<String> =
        keys.iter().map(|row| format!("{} {}", row.get::<_, &str>(0), row.get::<_, &str>(1))).collect();
    let object = match keys.as_slice() {
        [one] => one.clone(),
        _ => format!("{} deliveries", rows.len()),
    };
    audit::record(tx, &format!("deliveries {}", what.verb()), &object, reason, &json!({ "deliveries": keys })).await
}

async fn ring(tx: &Transaction<'_>, rows: &[DeliveryId]) -> Result<()> {
    let (effects, _) = columns(rows);
    tx.execute(
        "-- store::ring
         select fencepost.ring(s.shard)
         from (select distinct e.shard from fencepost.effects e where e.id = any ($1)
               union
               select distinct k.shard from fencepost.effects_kept k where k.id = any ($1)) s",
        &[&effects],
    )
    .await?;
    Ok(())
}

/// Takes note of alarms of this name (about one object, or all) and says how many there were.
pub async fn acknowledge(client: &mut Client, name: &str, object: Option<&str>, reason: &Reason) -> Result<u64> {
    let tx = client.transaction().await?;
    let rows = tx
        .query(
            "-- store::acknowledge_alarms
             update fencepost.alarms set resolved_at = clock_timestamp()
             where name = $1 and ($2::text is null or object = $2) and resolved_at is null returning object",
            &[&name, &object],
        )
        .await?;
    let objects: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
    if !objects.is_empty() {
        audit::record(&tx, "alarms resolve", name, reason, &json!({ "objects": objects })).await?;
    }
    tx.commit().await?;
    Ok(objects.len() as u64)
}
