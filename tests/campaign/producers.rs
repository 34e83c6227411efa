//! The producers, and the log each keeps of what it intended and what it was told: the first witness.

use std::sync::Arc;
use std::time::Duration;

use fencepost::model::key::TaskId;
use fencepost::producer::{Effect, Error, ErrorKind, Payload};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::Serialize;
use serde_json::json;
use sha2::{Digest, Sha256};
use std::sync::Mutex;
use tokio::task::JoinSet;
use tokio_postgres::{Client, Transaction};
use tokio_util::sync::CancellationToken;

use crate::consumers::{ALL, FIGURES, LATE, ORDERED, PROFILES, REFUSED, VERSIONS, hex};
use crate::history::{History, Lines};
use crate::plan::draw;
use crate::stage::connect;

/// The end of the large effects of a run, and of nothing else. They have their flight before they are handed out, and are in the
/// answer that opens it; the end of that leaves the server with the commit.
pub const MARK: &str = "the-end-of-something-large";

const PRODUCERS: u64 = 5;
/// The mean wait between two transactions of a producer.
const PACE: Duration = Duration::from_millis(60);

/// What a producer was told about its transaction.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub enum Told {
    Committed,
    Aborted,
    /// The answer never came: the database decides.
    Unknown,
}

/// An effect as its producer meant it.
#[derive(Clone, Debug, Serialize)]
pub struct Intent {
    pub key: String,
    pub targets: Vec<&'static str>,
    pub sha256: String,
    /// Its place among the effects of an ordering key, taken under a lock that it shares with them.
    pub order: Option<(String, i64)>,
    pub expires: bool,
}

/// What one part of a transaction intended.
#[derive(Clone, Debug, Serialize)]
pub struct Part {
    /// Names its business row.
    pub part: String,
    pub intents: Vec<Intent>,
    pub told: Option<Told>,
    /// Of a worker: which lease it completed under.
    pub lease: Option<(String, i64)>,
    /// Order among claims and completions of all workers.
    pub begun: u64,
}

/// A claim, as the worker was told.
#[derive(Clone, Debug, Serialize)]
pub struct Claimed {
    pub task: String,
    pub epoch: i64,
    pub at: u64,
}

/// Everything the producers know.
pub struct Log {
    pub history: Arc<History>,
    lines: Lines,
    parts: Mutex<Vec<Part>>,
    claims: Mutex<Vec<Claimed>>,
}

/// A part in the log, to be told its end.
#[derive(Clone, Copy)]
pub struct Ticket(usize);

impl Log {
    pub fn new(history: Arc<History>) -> anyhow::Result<Self> {
        let lines = history.lines("producer.jsonl")?;
        Ok(Self { history, lines, parts: Mutex::default(), claims: Mutex::default() })
    }

    /// Before the COMMIT.
    pub fn intend(&self, part: Part) -> Ticket {
        self.lines.write(&json!({ "intend": part }));
        let mut parts = self.parts.lock().expect("no holder panics");
        parts.push(part);
        Ticket(parts.len() - 1)
    }

    /// After it.
    pub fn told(&self, ticket: Ticket, told: Told) {
        let mut parts = self.parts.lock().expect("no holder panics");
        parts[ticket.0].told = Some(told);
        self.lines.write(&json!({ "part": parts[ticket.0].part, "told": told }));
    }

    pub fn claimed(&self, claimed: Claimed) {
        self.lines.write(&json!({ "claimed": claimed }));
        self.claims.lock().expect("no holder panics").push(claimed);
    }

    pub fn parts(&self) -> Vec<Part> {
        self.parts.lock().expect("no holder panics").clone()
    }

    pub fn claims(&self) -> Vec<Claimed> {
        self.claims.lock().expect("no holder panics").clone()
    }
}

/// What an answer to a COMMIT means.
pub fn told(answer: Result<(), tokio_postgres::Error>) -> Told {
    match answer.map_err(Error::from) {
        Ok(()) => Told::Committed,
        Err(error) if matches!(error.kind(), ErrorKind::Disconnected | ErrorKind::Unexpected) => Told::Unknown,
        Err(_) => Told::Aborted,
    }
}

/// How a transaction ends, and what is in it.
#[derive(Clone, Copy, Debug)]
enum Shape {
    Plain,
    /// Commits seconds later, with an id and an xid from before.
    Long,
    Aborted,
    /// A part is rolled back to a savepoint.
    Savepoint,
    TwoPhase,
    /// More effects than a flight takes.
    Large,
    /// As many as are sent at once, all to one consumer.
    Crowd,
}

impl Shape {
    fn draw(rng: &mut StdRng) -> Self {
        match rng.random_range(0..200) {
            0..=13 => Self::Long,
            14..=29 => Self::Aborted,
            30..=45 => Self::Savepoint,
            46..=55 => Self::TwoPhase,
            56 => Self::Large,
            57..=58 => Self::Crowd,
            _ => Self::Plain,
        }
    }
}

/// Everybody who writes effects, until `stop`.
pub async fn run(log: Arc<Log>, url: String, seed: u64, stop: CancellationToken) {
    let mut producers = JoinSet::new();
    for number in 0..PRODUCERS {
        let producer = Producer {
            log: Arc::clone(&log),
            url: url.clone(),
            number,
            parts: 0,
            rng: StdRng::seed_from_u64(seed ^ (0xf00d + number)),
        };
        producers.spawn(producer.run(stop.clone()));
    }
    producers.join_all().await;
}

struct Producer {
    log: Arc<Log>,
    url: String,
    number: u64,
    parts: u64,
    rng: StdRng,
}

impl Producer {
    async fn run(mut self, stop: CancellationToken) {
        while !stop.is_cancelled() {
            let Ok(mut client) = connect(&self.url).await else {
                tokio::time::sleep(Duration::from_millis(200)).await;
                continue;
            };
            while !stop.is_cancelled() && !client.is_closed() {
                // What failed before its COMMIT left nothing behind; its parts were told so.
                let _ = self.transaction(&mut client).await;
                let pause = draw(&mut self.rng, Duration::ZERO, PACE * 2);
                tokio::time::sleep(pause).await;
            }
        }
    }

    async fn transaction(&mut self, client: &mut Client) -> anyhow::Result<()> {
        let shape = Shape::draw(&mut self.rng);
        if matches!(shape, Shape::TwoPhase) {
            return self.two_phase(client).await;
        }
        let mut tx = client.transaction().await?;
        let mut tickets = Vec::new();
        let filled = self.fill(&mut tx, shape, &mut tickets).await;
        let told = match (filled, shape) {
            (Ok(()), Shape::Aborted) => {
                let _ = tx.rollback().await;
                Told::Aborted
            }
            (Ok(()), _) => told(tx.commit().await),
            (Err(_), _) => Told::Aborted,
        };
        tickets.into_iter().for_each(|ticket| self.log.told(ticket, told));
        Ok(())
    }

    async fn fill(&mut self, tx: &mut Transaction<'_>, shape: Shape, tickets: &mut Vec<Ticket>) -> anyhow::Result<()> {
        match shape {
            Shape::Savepoint => {
                let mut inner = tx.savepoint("part").await?;
                let lost = self.part(&mut inner, shape, 1).await?;
                self.log.told(lost, Told::Aborted);
                inner.rollback().await?;
                tickets.push(self.part(tx, shape, 1).await?);
            }
            Shape::Large => tickets.push(self.part(tx, shape, 170).await?),
            Shape::Crowd => tickets.push(self.part(tx, shape, 50).await?),
            Shape::Long => {
                tickets.push(self.part(tx, shape, 2).await?);
                let wait = draw(&mut self.rng, Duration::from_millis(500), Duration::from_secs(6));
                tokio::time::sleep(wait).await;
            }
            Shape::Plain | Shape::Aborted | Shape::TwoPhase => {
                let effects = self.rng.random_range(1..=3);
                tickets.push(self.part(tx, shape, effects).await?);
            }
        }
        Ok(())
    }

    /// Prepared now, committed or rolled back later, and perhaps by somebody else.
    async fn two_phase(&mut self, client: &mut Client) -> anyhow::Result<()> {
        let name = format!("campaign-{}-{}", self.number, self.parts);
        let mut tx = client.transaction().await?;
        tx.batch_execute("set local fencepost.doorbell = off").await?;
        let ticket = self.part(&mut tx, Shape::TwoPhase, 1).await?;
        let prepared = tx.batch_execute(&format!("prepare transaction '{name}'")).await;
        // The transaction has left this session, whatever the driver thinks of it.
        let _ = tx.rollback().await;
        let commits = self.rng.random_bool(0.7);
        if let Err(error) = prepared {
            self.log.told(ticket, told(Err(error)));
            return Ok(());
        }
        let wait = draw(&mut self.rng, Duration::from_millis(10), Duration::from_secs(2));
        tokio::time::sleep(wait).await;
        let end = if commits { "commit" } else { "rollback" };
        let told = match (told(client.batch_execute(&format!("{end} prepared '{name}'")).await), commits) {
            (Told::Committed, false) => Told::Aborted,
            (Told::Committed, true) => Told::Committed,
            // It is still prepared, or it has ended.
            _ => Told::Unknown,
        };
        self.log.told(ticket, told);
        Ok(())
    }

    /// A business row and a completion with its effects, in the log before it can commit.
    async fn part(&mut self, tx: &mut Transaction<'_>, shape: Shape, effects: usize) -> anyhow::Result<Ticket> {
        self.parts += 1;
        let task = format!("p{}-{}", self.number, self.parts);
        tx.execute("insert into campaign.business (part) values ($1)", &[&task]).await?;
        // Long transactions have keys of their own, or nobody else would get on.
        let keys = if matches!(shape, Shape::Long | Shape::TwoPhase) { 'l' } else { 'k' };
        let ordering_key = format!("{keys}{}", self.rng.random_range(0..12));
        let crowd = matches!(shape, Shape::Crowd);
        let ordered = !crowd && self.rng.random_bool(0.5);
        let mut intents = Vec::new();
        let mut array = Vec::new();
        for position in 1..=effects {
            let key = if position == 1 { format!("{task}:1") } else { format!("{task}:1:{position}") };
            let (effect, intent) = if ordered {
                let sql = "insert into campaign.keys as k (key, n) values ($1, 1)
                           on conflict (key) do update set n = k.n + 1 returning n";
                let n: i64 = tx.query_one(sql, &[&ordering_key]).await?.get(0);
                ordered_effect(&mut self.rng, key, &ordering_key, n)
            } else {
                loose(&mut self.rng, key, crowd.then_some(FIGURES))
            };
            array.push(effect);
            intents.push(intent);
        }
        fencepost::producer::emit(tx, &array, Some(&TaskId::new(task.clone())?)).await?;
        let begun = self.log.history.tick();
        Ok(self.log.intend(Part { part: task, intents, told: None, lease: None, begun }))
    }
}

/// To all who keep order, or to one of them.
fn ordered_effect(rng: &mut StdRng, key: String, ordering_key: &str, n: i64) -> (Effect, Intent) {
    let text = json!({ "campaign": key, "n": n }).to_string();
    let (effect, targets) = aimed(rng, ORDERED, &text);
    let order = Some((ordering_key.to_owned(), n));
    let intent = Intent { key, targets, sha256: hex(&Sha256::digest(&text)), order, expires: false };
    (effect.ordering_key(ordering_key), intent)
}

/// To all who keep no order, or to one of them.
pub fn loose_effect(rng: &mut StdRng, key: String) -> (Effect, Intent) {
    loose(rng, key, None)
}

/// In no order: some are scheduled, some expire.
fn loose(rng: &mut StdRng, key: String, to: Option<&'static str>) -> (Effect, Intent) {
    // Now and then one that is too large to be read ahead.
    let filler = match rng.random_ratio(1, 30) {
        true => "x".repeat(70_000) + MARK,
        false => "x".repeat(rng.random_range(0..400)),
    };
    let text = json!({ "campaign": key, "filler": filler }).to_string();
    let (effect, targets) = match to {
        Some(name) => (Effect::to(name, Payload::Text(text.clone())), vec![name]),
        None => aimed(rng, ALL, &text),
    };
    let version = match rng.random_range(0..24) {
        0 | 1 => LATE,
        2 => REFUSED,
        _ => VERSIONS[rng.random_range(0..VERSIONS.len())],
    };
    let mut effect = effect.schema_version(version);
    if rng.random_ratio(1, 10) {
        effect = effect.deliver_in(draw(rng, Duration::from_millis(100), Duration::from_secs(4)));
    }
    let expires = rng.random_ratio(1, 15);
    if expires {
        effect = effect.expires_in(draw(rng, Duration::from_millis(50), Duration::from_secs(5)));
    }
    let intent = Intent { key, targets, sha256: hex(&Sha256::digest(&text)), order: None, expires };
    (effect, intent)
}

fn aimed(rng: &mut StdRng, topic: &'static str, text: &str) -> (Effect, Vec<&'static str>) {
    let everyone: Vec<_> = PROFILES.iter().filter(|p| p.topic == topic).map(|p| p.name).collect();
    let payload = Payload::Text(text.to_owned());
    if rng.random_bool(0.3) {
        return (Effect::on(topic, payload), everyone);
    }
    let one = everyone[rng.random_range(0..everyone.len())];
    (Effect::to(one, payload), vec![one])
}
