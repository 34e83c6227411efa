//! Consumers' words that are no end (`in-progress`, `not-applied`) and overtook the confirm of their message: kept until the
//! attempt has ended, then acted upon. Whoever writes the word and whoever writes the attempt's end calls [`act`] after
//! its commit: they may not have seen each other, and the later one finds both.

use std::time::Duration;

use tokio_postgres::{Client, Row, Transaction};

use super::settle::DeliveryId;
use super::{Error, Result};
use crate::model::key::{ConsumerId, EffectId};
use crate::model::token::{Ack, AttemptToken};

/// A word that is no end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Deferral {
    InProgress,
    NotApplied,
}

/// How long a word that is no end lets a delivery wait.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    pub base: Duration,
    pub cap: Duration,
    pub budget: Duration,
    pub in_progress_max: Duration,
}

/// How long one `in-progress` lets the consumer be.
const IN_PROGRESS_FOR: Duration = Duration::from_secs(300);

/// The condition under which a word `w` is too early: nothing says yet how the attempt ended.
const IN_FLIGHT: &str = "
    not exists (select from fencepost.parked p where p.effect_id = w.effect_id and p.consumer_id = w.consumer_id)
    and not exists (select from fencepost.ledger l where l.effect_id = w.effect_id and l.consumer_id = w.consumer_id)
    or exists (
        select from fencepost.attempts s
        where s.effect_id = w.effect_id and s.consumer_id = w.consumer_id and not s.ended
          and not exists (select from fencepost.attempts e where e.effect_id = s.effect_id and e.consumer_id = s.consumer_id
                          and e.attempt = s.attempt and e.ended))";

impl Deferral {
    /// Reads a word that is no fact.
    pub fn of(word: Ack) -> Self {
        match word {
            Ack::InProgress => Self::InProgress,
            _ => Self::NotApplied,
        }
    }

    fn token(self) -> AttemptToken {
        match self {
            Self::InProgress => AttemptToken::InProgress,
            Self::NotApplied => AttemptToken::NotApplied,
        }
    }

    /// As the consumer wrote it (contract, section 5).
    fn word(self) -> &'static str {
        match self {
            Self::InProgress => "in-progress",
            Self::NotApplied => "not-applied",
        }
    }

    fn parse(text: &str) -> Result<Self> {
        [Self::InProgress, Self::NotApplied]
            .into_iter()
            .find(|word| word.token().as_str() == text)
            .ok_or_else(|| Error::Corrupt(format!("early_acks: {text:?}")))
    }
}

/// What became of a word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Deferred {
    /// The delivery goes on waiting, or is tried again.
    Acted,
    /// It may be too early: [`act`] finds out.
    Kept,
}

/// Acts on a word whose delivery waits for one; any other is kept for [`act`].
pub async fn defer(tx: &Transaction<'_>, delivery: DeliveryId, word: Deferral, pace: Pace) -> Result<Deferred> {
    if apply(tx, delivery, word, pace).await? > 0 {
        return Ok(Deferred::Acted);
    }
    tx.execute(
        "-- store::keep_early
         insert into fencepost.early_acks (effect_id, consumer_id, word) values ($1, $2, $3)
         on conflict (effect_id, consumer_id) do update set word = excluded.word, at = excluded.at",
        &[&delivery.effect.0, &delivery.consumer.0, &word.token().as_str()],
    )
    .await?;
    Ok(Deferred::Kept)
}

/// Acts on the words whose attempt has ended by now. A delivery that has ended, or is to be tried again anyway, needs none.
/// Gives how many deliveries they moved.
pub async fn act(client: &mut Client, pace: Pace) -> Result<u64> {
    let any = "-- store::any_early\nselect exists (select from fencepost.early_acks)";
    if !client.query_one(any, &[]).await?.get::<_, bool>(0) {
        return Ok(0);
    }
    let tx = client.transaction().await?;
    let sql = format!(
        "-- store::take_early
         delete from fencepost.early_acks w where not ({IN_FLIGHT}) returning w.effect_id, w.consumer_id, w.word"
    );
    let taken = tx.query(&sql, &[]).await?;
    let mut moved = 0;
    for row in &taken {
        let (delivery, word) = of_row(row)?;
        moved += apply(&tx, delivery, word, pace).await?;
    }
    tx.commit().await?;
    Ok(moved)
}

fn of_row(row: &Row) -> Result<(DeliveryId, Deferral)> {
    let delivery = DeliveryId { effect: EffectId(row.get(0)), consumer: ConsumerId(row.get(1)) };
    Ok((delivery, Deferral::parse(row.get(2))?))
}

async fn apply(tx: &Transaction<'_>, delivery: DeliveryId, word: Deferral, pace: Pace) -> Result<u64> {
    let (effect, consumer) = (delivery.effect.0, delivery.consumer.0);
    let moved = match word {
        Deferral::InProgress => {
            tx.query_opt(
                "-- store::reply_in_progress
                 update fencepost.parked p
                 set in_progress_since = coalesce(p.in_progress_since, clock_timestamp()),
                     next_attempt_at = greatest(p.next_attempt_at, least(
                         clock_timestamp() + make_interval(secs => $3),
                         coalesce(p.in_progress_since, clock_timestamp()) + make_interval(secs => $4)))
                 where p.effect_id = $1 and p.consumer_id = $2 and p.state = 'unacked'
                 returning p.attempts",
                &[&effect, &consumer, &IN_PROGRESS_FOR.as_secs_f64(), &pace.in_progress_max.as_secs_f64()],
            )
            .await?
        }
        Deferral::NotApplied => {
            tx.query_opt(
                "-- store::reply_not_applied
                 update fencepost.parked p
                 set state = case when p.first_failed_at < clock_timestamp() - make_interval(secs => $5) then 'dead' else 'retry' end,
                     next_attempt_at = clock_timestamp() + make_interval(secs => least($3 * power(2, least(p.attempts, 30) - 1), $4)),
                     first_failed_at = coalesce(p.first_failed_at, clock_timestamp()), first_doubt_at = null,
                     in_progress_since = null, reason = 'the consumer replied not-applied'
                 where p.effect_id = $1 and p.consumer_id = $2 and p.state in ('unacked', 'in_doubt')
                 returning p.attempts",
                &[&effect, &consumer, &pace.base.as_secs_f64(), &pace.cap.as_secs_f64(), &pace.budget.as_secs_f64()],
            )
            .await?
        }
    };
    let Some(row) = moved else { return Ok(0) };
    say(tx, delivery, row.get(0), word).await?;
    Ok(1)
}

/// Adds the word to the attempt it was said of, whose end is the broker's confirm: each word once, in the order they came.
async fn say(tx: &Transaction<'_>, delivery: DeliveryId, attempt: i32, word: Deferral) -> Result<()> {
    tx.execute(
        "-- store::say_reply
         update fencepost.attempts a set ack_raw = concat_ws(', ', a.ack_raw, $4::text)
         where a.effect_id = $1 and a.consumer_id = $2 and a.attempt = $3 and a.ended
           and (a.ack_raw is null or a.ack_raw not like '%' || $4::text)",
        &[&delivery.effect.0, &delivery.consumer.0, &attempt, &word.word()],
    )
    .await?;
    Ok(())
}
