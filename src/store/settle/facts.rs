//! Facts and closed flights: unconditional, whoever learns them.

use tokio_postgres::Transaction;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::ToSql;
use uuid::Uuid;

use super::batch::{Batch, DeliveryId, EndRow, Refused};
use crate::store::Result;
use crate::store::session::Session;

/// The healthy path. That a fact is there already is rare, and looking for it costs every row a third of its time and a
/// record in the WAL: the rows are inserted as new, and once more with care where one was not.
pub(super) async fn write_plain(session: &Session, batch: &Batch) -> Result<()> {
    let columns = FactColumns::of(batch, &Refused::default());
    let statement = session.prepared(&facts_sql(Known::No)).await?;
    match session.client().execute(&statement, &columns.params()).await {
        Err(error) if error.code() == Some(&SqlState::UNIQUE_VIOLATION) => {
            let statement = session.prepared(&facts_sql(Known::Perhaps)).await?;
            session.client().execute(&statement, &columns.params()).await?;
        }
        done => {
            done?;
        }
    }
    Ok(())
}

/// Whether facts that are to be written may be there already.
#[derive(Clone, Copy)]
pub(super) enum Known {
    No,
    Perhaps,
}

/// How far the commit waits is said in the statement itself: so it is one transaction without a round trip of its own.
/// The flights are found by their keys and changed where they lie: a join would be planned while the table is all but
/// empty, as a walk over all of it.
pub(super) fn facts_sql(known: Known) -> String {
    let (name, conflict) = match known {
        Known::No => ("settle_new", ""),
        Known::Perhaps => ("settle", "on conflict do nothing"),
    };
    format!(
        "-- store::{name}
with facts as (
    insert into fencepost.ledger (effect_id, consumer_id, token, attempt, status, doubt, ack_raw, note)
    select f.effect_id, f.consumer_id, f.token::fencepost.fact, f.attempt, f.status, nullif(f.doubt, false), f.ack_raw, f.note
    from (select set_config('synchronous_commit', $12::text, true)) as level
    cross join unnest($1::bigint[], $2::integer[], $3::text[], $4::integer[], $5::smallint[], $6::boolean[], $7::text[], $8::text[])
        as f (effect_id, consumer_id, token, attempt, status, doubt, ack_raw, note)
    {conflict}
)
update fencepost.flights x set token = 'done', closed_at = clock_timestamp()
where x.token is null and x.ctid = any (array(
    select f.ctid from unnest($9::smallint[], $10::bigint[], $11::bigint[]) as c (shard, seq, epoch)
    cross join lateral (
        select y.ctid from fencepost.flights y where y.shard = c.shard and y.seq = c.seq and y.epoch = c.epoch offset 0
    ) f))"
    )
}

#[derive(Default)]
pub(super) struct FactColumns {
    effects: Vec<i64>,
    consumers: Vec<i32>,
    tokens: Vec<&'static str>,
    attempts: Vec<i32>,
    statuses: Vec<Option<i16>>,
    doubts: Vec<bool>,
    acks: Vec<Option<String>>,
    notes: Vec<Option<String>>,
    shards: Vec<i16>,
    seqs: Vec<i64>,
    epochs: Vec<i64>,
    /// `synchronous_commit` of their transaction.
    level: &'static str,
}

impl FactColumns {
    pub(super) fn of(batch: &Batch, refused: &Refused) -> Self {
        let mut columns = Self { level: batch.durability.level(), ..Self::default() };
        for row in &batch.facts {
            columns.effects.push(row.delivery.effect.0);
            columns.consumers.push(row.delivery.consumer.0);
            columns.tokens.push(row.fact.as_str());
            columns.attempts.push(row.attempt as i32);
            columns.statuses.push(row.status.map(|s| s as i16));
            columns.doubts.push(row.doubt);
            columns.acks.push(row.ack_raw.clone());
            columns.notes.push(row.note.clone());
        }
        for row in batch.closes.iter().filter(|close| close.holds(refused)) {
            columns.shards.push(row.shard.0);
            columns.seqs.push(row.seq.0);
            columns.epochs.push(row.epoch.0);
        }
        columns
    }

    pub(super) fn params(&self) -> [&(dyn ToSql + Sync); 12] {
        [
            &self.effects,
            &self.consumers,
            &self.tokens,
            &self.attempts,
            &self.statuses,
            &self.doubts,
            &self.acks,
            &self.notes,
            &self.shards,
            &self.seqs,
            &self.epochs,
            &self.level,
        ]
    }
}

pub(super) async fn unpark(tx: &Transaction<'_>, rows: &[DeliveryId]) -> Result<()> {
    let effects: Vec<i64> = rows.iter().map(|d| d.effect.0).collect();
    let consumers: Vec<i32> = rows.iter().map(|d| d.consumer.0).collect();
    tx.execute(
        "-- store::unpark
         delete from fencepost.parked p using unnest($1::bigint[], $2::integer[]) as d (effect_id, consumer_id)
         where p.effect_id = d.effect_id and p.consumer_id = d.consumer_id",
        &[&effects, &consumers],
    )
    .await?;
    Ok(())
}

pub(super) async fn ends(tx: &Transaction<'_>, rows: &[EndRow], relay: Uuid) -> Result<()> {
    let effects: Vec<i64> = rows.iter().map(|r| r.delivery.effect.0).collect();
    let consumers: Vec<i32> = rows.iter().map(|r| r.delivery.consumer.0).collect();
    let attempts: Vec<i32> = rows.iter().map(|r| r.attempt as i32).collect();
    let tokens: Vec<&str> = rows.iter().map(|r| r.token.as_str()).collect();
    let statuses: Vec<Option<i16>> = rows.iter().map(|r| r.status.map(|s| s as i16)).collect();
    let phases: Vec<&str> = rows.iter().map(|r| r.phase.as_str()).collect();
    let left: Vec<bool> = rows.iter().map(|r| r.bytes_left).collect();
    let took: Vec<i32> = rows.iter().map(|r| r.took.as_millis().min(i32::MAX as u128) as i32).collect();
    let acks: Vec<Option<&str>> = rows.iter().map(|r| r.ack_raw.as_deref()).collect();
    let errors: Vec<Option<&str>> = rows.iter().map(|r| r.error.as_deref()).collect();
    tx.execute(
        "-- store::end_attempts
         insert into fencepost.attempts (effect_id, consumer_id, attempt, ended, relay, token, status, phase, bytes_left, took_ms, ack_raw, error)
         select e.effect_id, e.consumer_id, e.attempt, true, $11, e.token, e.status, e.phase, e.bytes_left, e.took_ms, e.ack_raw, e.error
         from unnest($1::bigint[], $2::integer[], $3::integer[], $4::text[], $5::smallint[], $6::text[], $7::boolean[], $8::integer[], $9::text[], $10::text[])
             as e (effect_id, consumer_id, attempt, token, status, phase, bytes_left, took_ms, ack_raw, error)
         on conflict do nothing",
        &[&effects, &consumers, &attempts, &tokens, &statuses, &phases, &left, &took, &acks, &errors, &relay],
    )
    .await?;
    Ok(())
}
