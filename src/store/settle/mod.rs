//! Writing down what became of deliveries, many at a time.
//!
//! Facts are unconditional: whoever learns one appends it, whatever its epoch. Claims (parked rows, attempt starts)
//! hold only under the shard's present epoch; what was refused is told back.

mod batch;
mod claims;
mod facts;

use tokio_postgres::Client;
use uuid::Uuid;

use self::claims::{advances, lags, parks, starts};
use self::facts::{FactColumns, Known, ends, facts_sql, unpark, write_plain};
use super::Result;
use super::session::Session;
use crate::model::token::Waiting;

pub use self::batch::*;

/// How far the database's log is written, and how far it is on disk, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Wal {
    pub inserted: u64,
    pub flushed: u64,
}

/// From now on commits of this session are answered before they are on disk, but for those that ask for it.
pub async fn commit_lazily(session: &Session) -> Result<()> {
    session.client().batch_execute("-- store::commit_lazily\nset synchronous_commit = off").await?;
    Ok(())
}

pub async fn wal(session: &Session) -> Result<Wal> {
    let statement = session
        .prepared(
            "-- store::wal
             select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint, pg_wal_lsn_diff(pg_current_wal_flush_lsn(), '0/0')::bigint",
        )
        .await?;
    let row = session.client().query_one(&statement, &[]).await?;
    let at = |n: usize| row.get::<_, i64>(n).max(0).unsigned_abs();
    Ok(Wal { inserted: at(0), flushed: at(1) })
}

/// Writes a batch: all of it or nothing. May be repeated after an error whose cause was the connection: a start that
/// was written by the same relay is not refused the second time.
pub async fn write(session: &mut Session, batch: &Batch, relay: Uuid) -> Result<Written> {
    if batch.is_plain() {
        write_plain(session, batch).await?;
        return Ok(Written::default());
    }
    let facts = session.prepared(&facts_sql(Known::Perhaps)).await?;
    let tx = session.client_mut().transaction().await?;
    tx.batch_execute(&format!("set local synchronous_commit = {}", batch.durability.level())).await?;
    let (mut refused, mut ended) = (Refused::default(), Vec::new());
    if !batch.parks.is_empty() {
        refused.parks = parks(&tx, &batch.parks).await?;
    }
    if !batch.lags.is_empty() {
        refused.shards = lags(&tx, &batch.lags).await?;
    }
    if !batch.advances.is_empty() {
        advances(&tx, &batch.advances).await?;
    }
    if !batch.starts.is_empty() {
        let started = starts(&tx, &batch.starts, relay).await?;
        (refused.starts, ended) = (started.refused, started.ended);
    }
    if !batch.ends.is_empty() {
        ends(&tx, &batch.ends, relay).await?;
    }
    if !batch.facts.is_empty() || !batch.closes.is_empty() {
        tx.execute(&facts, &FactColumns::of(batch, &refused).params()).await?;
    }
    if !batch.unpark.is_empty() {
        unpark(&tx, &batch.unpark).await?;
    }
    tx.commit().await?;
    // Those a consumer's word may have overtaken.
    let spoken_of = |park: &&ParkRow| matches!(park.parking.state, Waiting::Unacked | Waiting::InDoubt);
    let overtaken: Vec<DeliveryId> = batch.parks.iter().filter(spoken_of).map(|park| park.delivery).collect();
    let early = match overtaken.is_empty() {
        true => Early::None,
        false => drop_settled(session.client(), &overtaken).await?,
    };
    Ok(Written { refused, ended, early })
}

/// Removes the parked rows of deliveries that have a fact, and says whether a word waits for any of them. A row and a word
/// that were committed at the same moment did not see each other: whoever of the two writes calls this after its commit,
/// and the later one finds both.
pub async fn drop_settled(client: &Client, rows: &[DeliveryId]) -> Result<Early> {
    let effects: Vec<i64> = rows.iter().map(|d| d.effect.0).collect();
    let consumers: Vec<i32> = rows.iter().map(|d| d.consumer.0).collect();
    let row = client
        .query_one(
            "-- store::drop_settled
             with d as (
                 select * from unnest($1::bigint[], $2::integer[]) as d (effect_id, consumer_id)
             ), dropped as (
                 delete from fencepost.parked p using d
                 where p.effect_id = d.effect_id and p.consumer_id = d.consumer_id and not p.replay
                   and exists (select 1 from fencepost.ledger l where l.effect_id = d.effect_id and l.consumer_id = d.consumer_id offset 0)
             )
             select exists (select from d join fencepost.early_acks using (effect_id, consumer_id))",
            &[&effects, &consumers],
        )
        .await?;
    Ok(if row.get(0) { Early::Some } else { Early::None })
}
