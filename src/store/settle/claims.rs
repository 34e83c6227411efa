//! Claims: they hold only under the shard's present epoch, and what was refused is told back.

use std::collections::HashSet;

use tokio_postgres::{Row, Transaction};
use uuid::Uuid;

use super::batch::{AdvanceRow, DeliveryId, LagRow, Moment, ParkRow, StartRow};
use crate::model::key::{ConsumerId, EffectId, Shard};
use crate::mutant::{self, Mutant};
use crate::store::Result;

/// `held`: those shards of `wanted` whose epoch is the present one, kept from a takeover until the claim is committed.
fn held() -> String {
    let present = match mutant::is(Mutant::NoEpochPredicate) {
        false => "(s.shard, s.epoch) in (select shard, epoch from wanted)",
        true => "s.shard in (select shard from wanted)",
    };
    format!("held as (select s.shard, s.epoch, s.relay from fencepost.shards s where {present} for key share)")
}

/// The rows of `wanted` whose claim holds.
fn holding() -> &'static str {
    match mutant::is(Mutant::NoEpochPredicate) {
        false => "wanted w join held h on h.shard = w.shard and h.epoch = w.epoch",
        true => "wanted w join held h on h.shard = w.shard",
    }
}

/// Extends the lanes' ranges. Returns the shards that have another owner.
pub(super) async fn lags(tx: &Transaction<'_>, rows: &[LagRow]) -> Result<Vec<Shard>> {
    let shards: Vec<i16> = rows.iter().map(|r| r.lane.shard.0).collect();
    let epochs: Vec<i64> = rows.iter().map(|r| r.lane.epoch.0).collect();
    let consumers: Vec<i32> = rows.iter().map(|r| r.lane.consumer.0).collect();
    let froms: Vec<i64> = rows.iter().map(|r| r.range.from.0).collect();
    let tos: Vec<i64> = rows.iter().map(|r| r.range.to.0).collect();
    let (held, holding) = (held(), holding());
    let sql = format!(
        "-- store::lag
with wanted as (
    select w.shard, w.epoch, w.consumer_id, w.from_seq, w.to_seq
    from unnest($1::smallint[], $2::bigint[], $3::integer[], $4::bigint[], $5::bigint[]) as w (shard, epoch, consumer_id, from_seq, to_seq)
), {held}
insert into fencepost.lags as g (shard, consumer_id, from_seq, to_seq)
select w.shard, w.consumer_id, w.from_seq, w.to_seq from {holding}
on conflict (shard, consumer_id) do update
set from_seq = least(g.from_seq, excluded.from_seq), to_seq = greatest(g.to_seq, excluded.to_seq)
returning g.shard"
    );
    let done = tx.query(&sql, &[&shards, &epochs, &consumers, &froms, &tos]).await?;
    let held: Vec<i16> = done.iter().map(|row| row.get(0)).collect();
    Ok(rows.iter().map(|r| r.lane.shard).filter(|shard| !held.contains(&shard.0)).collect())
}

pub(super) async fn advances(tx: &Transaction<'_>, rows: &[AdvanceRow]) -> Result<()> {
    let shards: Vec<i16> = rows.iter().map(|r| r.lane.shard.0).collect();
    let epochs: Vec<i64> = rows.iter().map(|r| r.lane.epoch.0).collect();
    let consumers: Vec<i32> = rows.iter().map(|r| r.lane.consumer.0).collect();
    let up_to: Vec<i64> = rows.iter().map(|r| r.up_to.0).collect();
    tx.execute(
        "-- store::advance_lags
with done as (
    select d.shard, d.consumer_id, d.up_to
    from unnest($1::smallint[], $2::bigint[], $3::integer[], $4::bigint[]) as d (shard, epoch, consumer_id, up_to)
    join fencepost.shards s on s.shard = d.shard and s.epoch = d.epoch
), ended as (
    delete from fencepost.lags g using done d
    where g.shard = d.shard and g.consumer_id = d.consumer_id and g.to_seq <= d.up_to
)
update fencepost.lags g set from_seq = greatest(g.from_seq, d.up_to + 1), draining_to = null
from done d where g.shard = d.shard and g.consumer_id = d.consumer_id and g.to_seq > d.up_to",
        &[&shards, &epochs, &consumers, &up_to],
    )
    .await?;
    Ok(())
}

pub(super) fn moment(moment: Moment) -> i16 {
    match moment {
        Moment::Keep => 0,
        Moment::Set => 1,
        Moment::Clear => 2,
    }
}

pub(super) async fn parks(tx: &Transaction<'_>, rows: &[ParkRow]) -> Result<Vec<DeliveryId>> {
    let effects: Vec<i64> = rows.iter().map(|r| r.delivery.effect.0).collect();
    let consumers: Vec<i32> = rows.iter().map(|r| r.delivery.consumer.0).collect();
    let shards: Vec<i16> = rows.iter().map(|r| r.shard.0).collect();
    let epochs: Vec<i64> = rows.iter().map(|r| r.epoch.0).collect();
    let keys: Vec<Option<&str>> = rows.iter().map(|r| r.ordering_key.as_deref()).collect();
    let states: Vec<&str> = rows.iter().map(|r| r.parking.state.as_str()).collect();
    let attempts: Vec<i32> = rows.iter().map(|r| r.attempts as i32).collect();
    let sent: Vec<i32> = rows.iter().map(|r| r.sent as i32).collect();
    let due: Vec<Option<f64>> = rows.iter().map(|r| r.parking.due_in.map(|d| d.as_secs_f64())).collect();
    let reasons: Vec<&str> = rows.iter().map(|r| r.parking.reason.as_str()).collect();
    let refusals: Vec<i32> = rows.iter().map(|r| r.parking.refusals as i32).collect();
    let moments: Vec<Vec<i16>> = [
        |r: &ParkRow| r.parking.first_failed,
        |r: &ParkRow| r.parking.first_doubt,
        |r: &ParkRow| r.parking.in_progress,
    ]
    .iter()
    .map(|of| rows.iter().map(|r| moment(of(r))).collect())
    .collect();
    let retains: Vec<Option<i64>> = rows.iter().map(|r| r.parking.retain.map(|d| d.as_secs() as i64)).collect();
    let (held, holding) = (held(), holding());
    let sql = format!(
        "-- store::park
with wanted as (
    select w.effect_id, w.consumer_id, w.shard, w.epoch, w.ordering_key, w.state, w.attempts, w.due_in, w.reason, w.refusals,
           w.failed, w.doubt, w.progress, w.retain, w.sent
    from unnest($1::bigint[], $2::integer[], $3::smallint[], $4::bigint[], $5::text[], $6::text[], $7::integer[], $8::float8[],
                $9::text[], $10::integer[], $11::smallint[], $12::smallint[], $13::smallint[], $14::bigint[], $15::integer[])
        as w (effect_id, consumer_id, shard, epoch, ordering_key, state, attempts, due_in, reason, refusals, failed, doubt, progress, retain, sent)
), {held}, parked as (
insert into fencepost.parked as p (effect_id, consumer_id, shard, ordering_key, state, attempts, next_attempt_at, reason, refusals,
                                   first_failed_at, first_doubt_at, in_progress_since, retain_seconds, sent)
select w.effect_id, w.consumer_id, w.shard, w.ordering_key, w.state, w.attempts,
       clock_timestamp() + make_interval(secs => w.due_in), w.reason, w.refusals,
       case when w.failed = 1 then clock_timestamp() end, case when w.doubt = 1 then clock_timestamp() end,
       case when w.progress = 1 then clock_timestamp() end, w.retain, w.sent
from {holding}
where not exists (select 1 from fencepost.ledger l where l.effect_id = w.effect_id and l.consumer_id = w.consumer_id offset 0)
   or exists (select 1 from fencepost.parked r where r.effect_id = w.effect_id and r.consumer_id = w.consumer_id and r.replay offset 0)
on conflict (effect_id, consumer_id) do update set
    ordering_key = excluded.ordering_key, state = excluded.state, attempts = excluded.attempts, next_attempt_at = excluded.next_attempt_at, reason = excluded.reason,
    refusals = excluded.refusals, sent = excluded.sent, retain_seconds = coalesce(excluded.retain_seconds, p.retain_seconds),
    first_failed_at = coalesce(p.first_failed_at, excluded.first_failed_at),
    first_doubt_at = case when (select w.doubt from wanted w where w.effect_id = p.effect_id and w.consumer_id = p.consumer_id) = 2
                          then null else coalesce(p.first_doubt_at, excluded.first_doubt_at) end,
    in_progress_since = case when (select w.progress from wanted w where w.effect_id = p.effect_id and w.consumer_id = p.consumer_id) = 2
                          then null else coalesce(p.in_progress_since, excluded.in_progress_since) end
returning p.effect_id, p.consumer_id
)
select effect_id, consumer_id from parked
union
-- A reply overtook its confirm: the delivery has ended, and needs no row.
select w.effect_id, w.consumer_id from wanted w
where exists (select 1 from fencepost.ledger l where l.effect_id = w.effect_id and l.consumer_id = w.consumer_id offset 0)"
    );
    let done = tx
        .query(
            &sql,
            &[
                &effects,
                &consumers,
                &shards,
                &epochs,
                &keys,
                &states,
                &attempts,
                &due,
                &reasons,
                &refusals,
                &moments[0],
                &moments[1],
                &moments[2],
                &retains,
                &sent,
            ],
        )
        .await?;
    Ok(refused(rows.iter().map(|r| r.delivery), &done))
}

/// What became of starts that were asked for.
#[derive(Default)]
pub(super) struct Started {
    /// Another relay has the shard.
    pub refused: Vec<DeliveryId>,
    /// A fact was there already.
    pub ended: Vec<DeliveryId>,
}

pub(super) async fn starts(tx: &Transaction<'_>, rows: &[StartRow], relay: Uuid) -> Result<Started> {
    let effects: Vec<i64> = rows.iter().map(|r| r.delivery.effect.0).collect();
    let consumers: Vec<i32> = rows.iter().map(|r| r.delivery.consumer.0).collect();
    let attempts: Vec<i32> = rows.iter().map(|r| r.attempt as i32).collect();
    let shards: Vec<i16> = rows.iter().map(|r| r.shard.0).collect();
    let epochs: Vec<i64> = rows.iter().map(|r| r.epoch.0).collect();
    // Its own epoch is over for a relay that has given the shard up.
    let own = if mutant::is(Mutant::NoEpochPredicate) { "" } else { " and h.relay = $6" };
    let (held, holding) = (held(), holding());
    let sql = format!(
        "-- store::start_attempts
with wanted as (
    select w.effect_id, w.consumer_id, w.attempt, w.shard, w.epoch
    from unnest($1::bigint[], $2::integer[], $3::integer[], $4::smallint[], $5::bigint[]) as w (effect_id, consumer_id, attempt, shard, epoch)
), {held}, allowed as (
    select w.effect_id, w.consumer_id, w.attempt,
           exists (select 1 from fencepost.ledger l where l.effect_id = w.effect_id and l.consumer_id = w.consumer_id offset 0)
           and not exists (select 1 from fencepost.parked r where r.effect_id = w.effect_id and r.consumer_id = w.consumer_id
                           and r.replay offset 0) as ended
    from {holding}{own}
), counted as (
    update fencepost.parked p set attempts = a.attempt
    from allowed a where p.effect_id = a.effect_id and p.consumer_id = a.consumer_id and not a.ended
), started as (
    insert into fencepost.attempts as attempts (effect_id, consumer_id, attempt, ended, relay)
    select effect_id, consumer_id, attempt, false, $6 from allowed where not ended
    on conflict (effect_id, consumer_id, attempt, ended) do update set relay = excluded.relay
        where attempts.relay = excluded.relay
    returning effect_id, consumer_id
)
select effect_id, consumer_id, false as ended from started
union all
select effect_id, consumer_id, ended from allowed where ended"
    );
    let answered = tx.query(&sql, &[&effects, &consumers, &attempts, &shards, &epochs, &relay]).await?;
    let ended = answered.iter().filter(|row| row.get("ended")).map(delivery).collect();
    Ok(Started { refused: refused(rows.iter().map(|r| r.delivery), &answered), ended })
}

fn delivery(row: &Row) -> DeliveryId {
    DeliveryId { effect: EffectId(row.get(0)), consumer: ConsumerId(row.get(1)) }
}

/// Of those that were asked for, the ones without an answer.
fn refused(wanted: impl Iterator<Item = DeliveryId>, answered: &[Row]) -> Vec<DeliveryId> {
    let answered: HashSet<DeliveryId> = answered.iter().map(delivery).collect();
    wanted.filter(|delivery| !answered.contains(delivery)).collect()
}
