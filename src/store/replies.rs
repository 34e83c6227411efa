//! Consumers' replies over AMQP, written down before the broker is told (contract, section 5).

use std::collections::HashMap;

use secrecy::SecretString;
use serde::Serialize;
use serde_json::Value;
use tokio_postgres::{Client, Transaction};

use super::early::{self, Deferral, Deferred, Pace};
use super::settle::{DeliveryId, drop_settled};
use super::{Error, Result};
use crate::model::key::{ConsumerId, EffectId, EffectKey, Shard};
use crate::model::token::{Ack, Fact};

/// What an installation's AMQP names and tokens are made of.
#[derive(Debug)]
pub struct Identity {
    pub deployment: String,
    pub secret: SecretString,
}

/// The installation's name and the secret of its ack tokens, the same for all its relays.
pub async fn identity(client: &Client) -> Result<Identity> {
    let row = client
        .query_opt(
            "-- store::identity
             select d.value, s.value from fencepost.settings d join fencepost.settings s on s.name = 'ack_secret'
             where d.name = 'deployment'",
            &[],
        )
        .await?;
    let row = row.ok_or_else(|| Error::Corrupt("the settings lack deployment or ack_secret".into()))?;
    Ok(Identity { deployment: row.get(0), secret: SecretString::from(row.get::<_, String>(1)) })
}

/// What the names of an installation's reply queues are made of.
#[derive(Clone, Debug)]
pub struct Installation {
    pub deployment: String,
    pub shards: Vec<Shard>,
}

pub async fn installation(client: &Client) -> Result<Installation> {
    let deployment = identity(client).await?.deployment;
    let rows = client.query("-- store::shards\nselect shard from fencepost.shards order by shard", &[]).await?;
    Ok(Installation { deployment, shards: rows.iter().map(|row| Shard(row.get(0))).collect() })
}

/// A consumer's word about a key, whose token was verified.
#[derive(Clone, Debug)]
pub struct Word {
    pub consumer: String,
    pub key: EffectKey,
    pub ack: Ack,
    pub raw: Option<String>,
    /// What is kept of it should it match nothing.
    pub properties: Value,
}

/// A reply that is kept and counted, and changes nothing.
#[derive(Clone, Debug)]
pub struct Orphan {
    pub correlation_id: Option<String>,
    pub why: String,
    pub properties: Value,
}

/// What became of a word.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Recorded {
    /// The fact is in the ledger; `contradicts` what another reply said.
    Fact {
        fact: Fact,
        contradicts: Option<Fact>,
    },
    /// Not done yet: the delivery goes on waiting, or is tried again.
    Deferred(Deferred),
    Orphan(&'static str),
}

/// Writes replies down, all or none, in the order they came. Facts are unconditional: whoever published, whoever holds
/// the shard. To be called again with the same replies after an error: nothing is written twice.
pub async fn record(
    client: &mut Client,
    shard: Shard,
    words: &[Word],
    orphans: &[Orphan],
    pace: Pace,
) -> Result<Vec<Recorded>> {
    let tx = client.transaction().await?;
    let matches = find(&tx, words).await?;
    let mut recorded = Vec::with_capacity(words.len());
    let mut said: HashMap<DeliveryId, Vec<Fact>> = HashMap::new();
    let (mut facts, mut unmatched) = (Vec::new(), orphans.to_vec());
    for (word, found) in words.iter().zip(&matches) {
        let outcome = match judge(word, found) {
            Err(why) => {
                unmatched.push(Orphan {
                    correlation_id: Some(format!("{}/{}", word.consumer, word.key)),
                    why: why.into(),
                    properties: word.properties.clone(),
                });
                Recorded::Orphan(why)
            }
            Ok(delivery) => match word.ack.fact() {
                Some(fact) => {
                    let known = said.entry(delivery).or_insert_with(|| found.facts.clone());
                    let contradicts =
                        known.iter().copied().find(|other| other.is_applied() != fact.is_applied() && is_word(*other));
                    known.push(fact);
                    facts.push((delivery, fact, word.raw.as_deref()));
                    Recorded::Fact { fact, contradicts }
                }
                None => {
                    let deferral = Deferral::of(word.ack);
                    Recorded::Deferred(early::defer(&tx, delivery, deferral, pace).await?)
                }
            },
        };
        recorded.push(outcome);
    }
    append(&tx, &facts).await?;
    keep(&tx, shard, &unmatched).await?;
    tx.commit().await?;
    let ended: Vec<DeliveryId> = facts.iter().map(|(delivery, ..)| *delivery).collect();
    if !ended.is_empty() {
        drop_settled(client, &ended).await?;
    }
    Ok(recorded)
}

/// Whether a fact is a consumer's own word about the key.
fn is_word(fact: Fact) -> bool {
    matches!(fact, Fact::Applied | Fact::Duplicate | Fact::Conflict | Fact::Rejected | Fact::Stale)
}

/// What the database knows of the delivery a word names.
struct Found {
    consumer: Option<i32>,
    /// `None`: no such effect, or it was never routed to that consumer.
    effect: Option<i64>,
    /// The highest epoch its task has had.
    epoch: Option<i64>,
    facts: Vec<Fact>,
}

fn judge(word: &Word, found: &Found) -> Result<DeliveryId, &'static str> {
    let consumer = found.consumer.ok_or("no consumer has this name")?;
    let effect = found.effect.ok_or("no effect with this key was ever routed to this consumer")?;
    match word.ack {
        Ack::Stale { current } if found.epoch.is_none_or(|epoch| epoch < current) => {
            Err("stale names an epoch its task has never had")
        }
        _ => Ok(DeliveryId { effect: EffectId(effect), consumer: ConsumerId(consumer) }),
    }
}

async fn find(tx: &Transaction<'_>, words: &[Word]) -> Result<Vec<Found>> {
    if words.is_empty() {
        return Ok(Vec::new());
    }
    let consumers: Vec<&str> = words.iter().map(|w| w.consumer.as_str()).collect();
    let keys: Vec<String> = words.iter().map(|w| w.key.to_string()).collect();
    let tasks: Vec<&str> = words.iter().map(|w| w.key.task_id().as_str()).collect();
    let rows = tx
        .query(
            "-- store::find_replied
             select c.consumer_id, e.id, t.lease_epoch,
                    array(select l.token::text from fencepost.ledger l where l.effect_id = e.id and l.consumer_id = c.consumer_id)
             from unnest($1::text[], $2::text[], $3::text[]) with ordinality as w (consumer, key, task_id, n)
             left join fencepost.consumers c on c.name = w.consumer
             left join fencepost.tasks t on t.task_id = w.task_id
             left join lateral (select fencepost.effect_id_of(w.key) as id) k on true
             left join lateral (
                 select f.id from fencepost.effects f where f.id = k.id and c.consumer_id = any (f.targets)
                 union all
                 select f.id from fencepost.effects_kept f where f.id = k.id and c.consumer_id = any (f.targets)
                 limit 1
             ) e on true
             order by w.n",
            &[&consumers, &keys, &tasks],
        )
        .await?;
    let facts = |texts: Vec<String>| {
        let parsed = texts.iter().map(|text| text.parse().map_err(|error| Error::Corrupt(format!("ledger: {error}"))));
        parsed.collect::<Result<Vec<Fact>>>()
    };
    rows.iter()
        .map(|row| Ok(Found { consumer: row.get(0), effect: row.get(1), epoch: row.get(2), facts: facts(row.get(3))? }))
        .collect()
}

/// Facts into the ledger, their parked rows gone in the same transaction. A replay is ended by the reply it waits for,
/// never by one to an earlier attempt.
async fn append(tx: &Transaction<'_>, facts: &[(DeliveryId, Fact, Option<&str>)]) -> Result<()> {
    if facts.is_empty() {
        return Ok(());
    }
    let effects: Vec<i64> = facts.iter().map(|(d, ..)| d.effect.0).collect();
    let consumers: Vec<i32> = facts.iter().map(|(d, ..)| d.consumer.0).collect();
    let tokens: Vec<&str> = facts.iter().map(|(_, fact, _)| fact.as_str()).collect();
    let raws: Vec<Option<&str>> = facts.iter().map(|(.., raw)| *raw).collect();
    tx.execute(
        "-- store::record_replies
         insert into fencepost.ledger (effect_id, consumer_id, token, attempt, doubt, ack_raw)
         select f.effect_id, f.consumer_id, f.token::fencepost.fact, greatest(p.attempts, 1),
                case when f.token not in ('applied', 'duplicate') and p.first_doubt_at is not null then true end, f.ack_raw
         from unnest($1::bigint[], $2::integer[], $3::text[], $4::text[]) as f (effect_id, consumer_id, token, ack_raw)
         left join fencepost.parked p on p.effect_id = f.effect_id and p.consumer_id = f.consumer_id
         on conflict do nothing",
        &[&effects, &consumers, &tokens, &raws],
    )
    .await?;
    tx.execute(
        "-- store::unpark_replied
         delete from fencepost.parked p using unnest($1::bigint[], $2::integer[]) as d (effect_id, consumer_id)
         where p.effect_id = d.effect_id and p.consumer_id = d.consumer_id and (not p.replay or p.state = 'unacked')",
        &[&effects, &consumers],
    )
    .await?;
    Ok(())
}

async fn keep(tx: &Transaction<'_>, shard: Shard, orphans: &[Orphan]) -> Result<()> {
    if orphans.is_empty() {
        return Ok(());
    }
    let correlations: Vec<Option<&str>> = orphans.iter().map(|o| o.correlation_id.as_deref()).collect();
    let whys: Vec<&str> = orphans.iter().map(|o| o.why.as_str()).collect();
    let properties: Vec<&Value> = orphans.iter().map(|o| &o.properties).collect();
    tx.execute(
        "-- store::keep_orphans
         insert into fencepost.orphan_acks (shard, correlation_id, why, properties)
         select $1, o.correlation_id, o.why, o.properties
         from unnest($2::text[], $3::text[], $4::jsonb[]) as o (correlation_id, why, properties)",
        &[&shard.0, &correlations, &whys, &properties],
    )
    .await?;
    Ok(())
}

/// A reply kept as an orphan.
#[derive(Debug, Serialize)]
pub struct Kept {
    pub id: i64,
    pub at: String,
    pub shard: Option<i16>,
    pub correlation_id: Option<String>,
    pub why: String,
    pub properties: Value,
}

/// The newest orphans first.
pub async fn orphans(client: &Client, limit: u32) -> Result<Vec<Kept>> {
    let rows = client
        .query(
            "-- store::orphans
             select id, to_char(at at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"Z\"'), shard, correlation_id, why, properties
             from fencepost.orphan_acks order by id desc limit $1",
            &[&i64::from(limit)],
        )
        .await?;
    let kept = |row: &tokio_postgres::Row| Kept {
        id: row.get(0),
        at: row.get(1),
        shard: row.get(2),
        correlation_id: row.get(3),
        why: row.get(4),
        properties: row.get(5),
    };
    Ok(rows.iter().map(kept).collect())
}
