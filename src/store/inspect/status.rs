//! `fencepost status`: the whole installation at one glance, read in one snapshot.

use std::collections::BTreeMap;

use serde::Serialize;
use tokio_postgres::{Client, GenericClient, IsolationLevel, Transaction};

use super::leases::{self, Leases};
use super::unread;
use crate::model::key::ConsumerId;
use crate::store::consumers;
use crate::store::{Error, Result};

#[derive(Clone, Debug, Serialize)]
pub struct Status {
    pub now: String,
    pub edges: Vec<Edge>,
    pub flights: OpenFlights,
    pub alarms: Vec<Alarm>,
    pub leases: Leases,
    pub relays: Vec<Relay>,
    pub workers: Vec<Worker>,
    pub shards: Vec<Shard>,
}

/// One consumer, with what waits for it.
#[derive(Clone, Debug, Serialize)]
pub struct Edge {
    #[serde(skip)]
    pub id: ConsumerId,
    pub name: String,
    pub spec: serde_json::Value,
    pub paused: bool,
    pub paused_reason: Option<String>,
    pub retired: bool,
    /// The consumer asked for no attempt before so many seconds from now.
    pub not_before_in: Option<f64>,
    /// Relays for which the way to it is shut now; none where it is open for all.
    pub shut: Vec<Shut>,
    /// Parked deliveries by waiting token.
    pub waiting: BTreeMap<String, i64>,
    /// Deliveries in flights that its lane has still to read: an upper bound, since they count for all consumers.
    pub lagging_at_most: i64,
    /// Deliveries no relay has read yet; `unread_capped`: at least so many.
    pub unread: i64,
    pub unread_capped: bool,
    /// Age of the oldest effect that waits, those scheduled for later left out.
    pub oldest_waiting_seconds: Option<f64>,
    pub settled_last_minute: i64,
}

/// A relay that cannot reach a consumer now: it attempts nothing there and spends no budget.
#[derive(Clone, Debug, Serialize)]
pub struct Shut {
    pub relay: String,
    pub why: String,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub struct OpenFlights {
    pub count: i64,
    /// Deliveries in them, finished or not.
    pub deliveries: i64,
    pub oldest_seconds: Option<f64>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Alarm {
    pub name: String,
    pub object: String,
    pub detail: String,
    pub count: i64,
    pub raised_at: String,
    pub last_at: String,
}

#[derive(Clone, Debug, Serialize)]
pub struct Relay {
    pub relay: String,
    pub name: String,
    pub version: String,
    pub tick: i64,
    pub token: String,
    /// Since its last tick.
    pub age_seconds: f64,
    /// Since its start.
    pub up_seconds: f64,
    pub shards: i64,
    pub stopped: bool,
}

#[derive(Clone, Debug, Serialize)]
pub struct Worker {
    pub owner: String,
    pub tick: i64,
    pub token: String,
    pub age_seconds: f64,
    /// Tasks it holds whose lease has expired.
    pub expired_leases: i64,
    /// Its completions that were refused because the lease was lost, as it said itself.
    pub refused: i64,
}

#[derive(Clone, Debug, Serialize)]
pub struct Shard {
    pub shard: i16,
    pub epoch: i64,
    pub relay: Option<String>,
    /// Negative: expired for so long.
    pub lease_seconds: Option<f64>,
    pub newest_flight: Option<i64>,
}

impl Edge {
    pub fn waiting_of(&self, token: &str) -> i64 {
        self.waiting.get(token).copied().unwrap_or(0)
    }

    /// Everything that waits here; where it is lagging or capped, an estimate.
    pub fn waiting_total(&self) -> i64 {
        self.waiting.values().sum::<i64>() + self.lagging_at_most + self.unread
    }

    /// What waits and would go by itself: neither an operator nor the time of a scheduled one stands in its way.
    pub fn moving(&self) -> i64 {
        let stuck = self.waiting_of("dead") + self.waiting_of("in_doubt") + self.waiting_of("scheduled");
        self.waiting_total() - stuck
    }

    /// Seconds until nothing waits, at the last minute's rate; none where nothing was settled in it.
    pub fn eta_seconds(&self) -> Option<f64> {
        let moving = self.moving();
        (moving > 0 && self.settled_last_minute > 0).then(|| moving as f64 * 60.0 / self.settled_last_minute as f64)
    }
}

pub async fn load(client: &mut Client) -> Result<Status> {
    let tx = client.build_transaction().isolation_level(IsolationLevel::RepeatableRead).read_only(true).start().await?;
    let now = tx.query_one("-- store::status_now\nselect clock_timestamp()::timestamptz(0)::text", &[]).await?.get(0);
    let status = Status {
        now,
        edges: edges(&tx).await?,
        flights: flights(&tx).await?,
        alarms: alarms(&tx).await?,
        leases: leases::load(&tx).await?,
        relays: relays(&tx).await?,
        workers: workers(&tx).await?,
        shards: shards(&tx).await?,
    };
    tx.commit().await?;
    Ok(status)
}

/// The consumers with what waits for each, read in the caller's transaction.
pub async fn edges(tx: &Transaction<'_>) -> Result<Vec<Edge>> {
    let stored = consumers::load(tx).await?;
    let not_before = not_before(tx).await?;
    let mut shut = shut(tx).await?;
    let mut edges: Vec<Edge> = stored
        .into_iter()
        .map(|consumer| Edge {
            id: consumer.id,
            spec: consumer.spec,
            paused: consumer.paused,
            paused_reason: consumer.paused_reason,
            retired: consumer.retired,
            not_before_in: not_before.get(&consumer.id).copied(),
            shut: shut.remove(&consumer.name).unwrap_or_default(),
            name: consumer.name,
            waiting: BTreeMap::new(),
            lagging_at_most: 0,
            unread: 0,
            unread_capped: false,
            oldest_waiting_seconds: None,
            settled_last_minute: 0,
        })
        .collect();
    let mut with = |id: ConsumerId, put: &mut dyn FnMut(&mut Edge)| match edges.iter_mut().find(|edge| edge.id == id) {
        Some(edge) => {
            put(edge);
            Ok(())
        }
        // Consumer 0 stands for "nobody subscribed": nothing waits there.
        None if id.0 == 0 => Ok(()),
        None => Err(Error::Corrupt(format!("a delivery to consumer {id}, which does not exist"))),
    };
    for (id, token, count, oldest) in parked(tx).await? {
        with(id, &mut |edge| {
            edge.waiting.insert(token.clone(), count);
            edge.oldest_waiting_seconds = older(edge.oldest_waiting_seconds, oldest);
        })?;
    }
    for (id, deliveries, oldest) in lagging(tx).await? {
        with(id, &mut |edge| {
            edge.lagging_at_most = deliveries;
            edge.oldest_waiting_seconds = older(edge.oldest_waiting_seconds, oldest);
        })?;
    }
    for unread in unread::load(tx).await? {
        with(unread.consumer, &mut |edge| {
            (edge.unread, edge.unread_capped) = (unread.count, unread.capped);
            edge.oldest_waiting_seconds = older(edge.oldest_waiting_seconds, Some(unread.oldest_seconds));
        })?;
    }
    for (id, settled) in settled(tx).await? {
        with(id, &mut |edge| edge.settled_last_minute = settled)?;
    }
    Ok(edges)
}

fn older(one: Option<f64>, other: Option<f64>) -> Option<f64> {
    [one, other].into_iter().flatten().reduce(f64::max)
}

async fn not_before(tx: &Transaction<'_>) -> Result<BTreeMap<ConsumerId, f64>> {
    let rows = tx
        .query(
            "-- store::not_before
             select consumer_id, extract(epoch from not_before - clock_timestamp())::float8
             from fencepost.consumers where not_before > clock_timestamp()",
            &[],
        )
        .await?;
    Ok(rows.iter().map(|row| (ConsumerId(row.get(0)), row.get(1))).collect())
}

/// By consumer, what relays that tick say of their ways. What a relay said that has died since says nothing.
async fn shut(tx: &Transaction<'_>) -> Result<BTreeMap<String, Vec<Shut>>> {
    let rows = tx
        .query(
            "-- store::shut_ways
             select e.key, r.name, e.value
             from fencepost.relays r cross join lateral jsonb_each_text(r.shut_edges) e
             where r.stopped_at is null and r.at > clock_timestamp() - interval '1 minute'
             order by e.key, r.name",
            &[],
        )
        .await?;
    let mut shut: BTreeMap<String, Vec<Shut>> = BTreeMap::new();
    for row in rows {
        shut.entry(row.get(0)).or_default().push(Shut { relay: row.get(1), why: row.get(2) });
    }
    Ok(shut)
}

async fn parked(tx: &Transaction<'_>) -> Result<Vec<(ConsumerId, String, i64, Option<f64>)>> {
    let rows = tx
        .query(
            "-- store::parked_by_token
             with counted as (
                 select p.consumer_id, p.state, count(*) as n, min(p.effect_id) filter (where p.state <> 'scheduled') as oldest
                 from fencepost.parked p
                 where p.replay or not exists (select from fencepost.ledger l
                                               where l.effect_id = p.effect_id and l.consumer_id = p.consumer_id offset 0)
                 group by p.consumer_id, p.state
             )
             select c.consumer_id, c.state, c.n,
                    extract(epoch from clock_timestamp() - coalesce(
                        (select e.committed_at from fencepost.effects e where e.id = c.oldest),
                        (select k.committed_at from fencepost.effects_kept k where k.id = c.oldest)))::float8
             from counted c",
            &[],
        )
        .await?;
    Ok(rows.iter().map(|row| (ConsumerId(row.get(0)), row.get(1), row.get(2), row.get(3))).collect())
}

async fn lagging(tx: &Transaction<'_>) -> Result<Vec<(ConsumerId, i64, Option<f64>)>> {
    let rows = tx
        .query(
            "-- store::lagging
             select l.consumer_id, coalesce(sum(f.deliveries), 0)::bigint,
                    extract(epoch from clock_timestamp() - min(f.opened_at))::float8
             from fencepost.lags l
             join fencepost.flights f on f.shard = l.shard and f.seq between l.from_seq and l.to_seq
             group by l.consumer_id",
            &[],
        )
        .await?;
    Ok(rows.iter().map(|row| (ConsumerId(row.get(0)), row.get(1), row.get(2))).collect())
}

async fn settled(tx: &Transaction<'_>) -> Result<Vec<(ConsumerId, i64)>> {
    let rows = tx
        .query(
            "-- store::settled_last_minute
             select consumer_id, count(distinct effect_id) from fencepost.ledger
             where at > now() - interval '1 minute' group by consumer_id",
            &[],
        )
        .await?;
    Ok(rows.iter().map(|row| (ConsumerId(row.get(0)), row.get(1))).collect())
}

/// How far back open flights are looked for: a relay's are bounded in bytes and lie at the end.
const FLIGHTS_BACK: i64 = 500;

/// Flights that are open, read in the caller's transaction.
pub async fn flights(tx: &Transaction<'_>) -> Result<OpenFlights> {
    let row = tx
        .query_one(
            "-- store::open_flights
             select count(*), coalesce(sum(f.deliveries), 0)::bigint,
                    extract(epoch from clock_timestamp() - min(f.opened_at))::float8
             from fencepost.shards s
             cross join lateral (select token, deliveries, opened_at from fencepost.flights
                                 where shard = s.shard order by seq desc limit $1) f
             where f.token is null",
            &[&FLIGHTS_BACK],
        )
        .await?;
    Ok(OpenFlights { count: row.get(0), deliveries: row.get(1), oldest_seconds: row.get(2) })
}

/// Alarms nobody has resolved.
pub async fn alarms(tx: &impl GenericClient) -> Result<Vec<Alarm>> {
    let rows = tx
        .query(
            "-- store::alarms
             select name, object, detail, count, raised_at::timestamptz(0)::text, last_at::timestamptz(0)::text
             from fencepost.alarms where resolved_at is null order by last_at desc limit 1000",
            &[],
        )
        .await?;
    Ok(rows
        .iter()
        .map(|row| Alarm {
            name: row.get(0),
            object: row.get(1),
            detail: row.get(2),
            count: row.get(3),
            raised_at: row.get(4),
            last_at: row.get(5),
        })
        .collect())
}

async fn relays(tx: &Transaction<'_>) -> Result<Vec<Relay>> {
    let rows = tx
        .query(
            "-- store::relays
             select r.relay::text, r.name, r.version, r.tick, r.token,
                    extract(epoch from clock_timestamp() - r.at)::float8,
                    (select count(*) from fencepost.shards s where s.relay = r.relay and s.lease_expires_at > clock_timestamp()),
                    r.stopped_at is not null, extract(epoch from clock_timestamp() - r.started_at)::float8
             from fencepost.relays r
             where r.at > clock_timestamp() - interval '1 day'
                or r.relay in (select relay from fencepost.shards)
             order by r.stopped_at is not null, r.started_at desc limit 100",
            &[],
        )
        .await?;
    Ok(rows
        .iter()
        .map(|row| Relay {
            relay: row.get(0),
            name: row.get(1),
            version: row.get(2),
            tick: row.get(3),
            token: row.get(4),
            age_seconds: row.get(5),
            shards: row.get(6),
            stopped: row.get(7),
            up_seconds: row.get(8),
        })
        .collect())
}

async fn workers(tx: &Transaction<'_>) -> Result<Vec<Worker>> {
    let rows = tx
        .query(
            "-- store::workers
             with expired as (
                 select owner, count(*) as n from fencepost.tasks
                 where status = 'running' and lease_expires_at < now() group by owner
             )
             select w.owner, w.tick, w.token, extract(epoch from clock_timestamp() - w.at)::float8, coalesce(x.n, 0), w.refused
             from fencepost.workers w left join expired x using (owner)
             where w.at > clock_timestamp() - interval '1 day' or x.n > 0
             order by w.at desc limit 100",
            &[],
        )
        .await?;
    Ok(rows
        .iter()
        .map(|row| Worker {
            owner: row.get(0),
            tick: row.get(1),
            token: row.get(2),
            age_seconds: row.get(3),
            expired_leases: row.get(4),
            refused: row.get(5),
        })
        .collect())
}

async fn shards(tx: &Transaction<'_>) -> Result<Vec<Shard>> {
    let rows = tx
        .query(
            "-- store::shards
             select s.shard, s.epoch, coalesce(r.name, s.relay::text),
                    extract(epoch from s.lease_expires_at - clock_timestamp())::float8,
                    (select max(f.seq) from fencepost.flights f where f.shard = s.shard)
             from fencepost.shards s left join fencepost.relays r on r.relay = s.relay
             order by s.shard",
            &[],
        )
        .await?;
    Ok(rows
        .iter()
        .map(|row| Shard {
            shard: row.get(0),
            epoch: row.get(1),
            relay: row.get(2),
            lease_seconds: row.get(3),
            newest_flight: row.get(4),
        })
        .collect())
}
