//! I14: the figures that fencepost gives of itself are those of its tables. They are compared when nothing moves any more
//! but much waits on purpose.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::Context;
use fencepost::producer::{self, Effect, Payload};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_postgres::Client;

use crate::checker::Violation;
use crate::consumers::PROFILES;
use crate::operator;
use crate::replicas::Replica;
use crate::stage::Stage;

/// By name and labels.
pub type Figures = BTreeMap<String, i64>;

/// What somebody says, beside what the tables hold. What is not named is zero.
#[derive(Clone, Default, Debug)]
pub struct Account {
    pub who: String,
    pub says: Figures,
    pub holds: Figures,
}

#[derive(Clone, Default, Debug)]
pub struct Accounts {
    pub gauges: Vec<Account>,
    /// Of attempts, since the relay's start.
    pub counters: Vec<Account>,
    /// Attempts that were called lost: an end that their relay counted nevertheless found its place in the table taken.
    pub lost: i64,
}

/// The consumer that is paused.
const PAUSED: &str = "search";
/// A look at the database serves a relay for some seconds.
const PATIENCE: Duration = Duration::from_secs(30);
/// Ends of attempts that have a row each, whatever came of the delivery.
const COUNTED: [&str; 7] =
    ["not_delivered", "unroutable", "throttled", "refused", "not_applied", "in_progress", "ambiguous"];

/// I14.
pub fn check(accounts: &Accounts) -> Vec<Violation> {
    let mut found = Vec::new();
    let mut compare = |account: &Account, most_above: i64| {
        let names: BTreeSet<&String> = account.says.keys().chain(account.holds.keys()).collect();
        for name in names {
            let of = |figures: &Figures| figures.get(name).copied().unwrap_or(0);
            let (says, holds) = (of(&account.says), of(&account.holds));
            if !(0..=most_above).contains(&(says - holds)) {
                let what = format!("{}: {name} is said to be {says}, and is {holds}", account.who);
                found.push(Violation { invariant: "I14", what });
            }
        }
    };
    accounts.gauges.iter().for_each(|account| compare(account, 0));
    accounts.counters.iter().for_each(|account| compare(account, accounts.lost));
    found
}

/// Leaves something behind for every consumer, and asks everybody what waits until they agree with the tables, or for as
/// long as there is patience.
pub async fn take(stage: &Stage) -> anyhow::Result<Accounts> {
    operator::command(stage, &["consumers", "pause", PAUSED]).await?;
    let mut client = stage.connect().await?;
    let scheduled = leave(&mut client).await?;
    let started = Instant::now();
    loop {
        let late = started.elapsed() > PATIENCE;
        if !kept_back(&client).await? {
            // What was committed before its relays knew of the pause, it got.
            emit(&mut client, &[left_for(PAUSED)]).await?;
        }
        let rest = at_rest(&client, scheduled).await?;
        match ask(stage, &client).await {
            Ok(accounts) if late || rest && check(&accounts).is_empty() => {
                stage.history.note("accounts", json!(accounts.gauges.first().map(|account| &account.holds)));
                return Ok(accounts);
            }
            Err(error) if late => return Err(error),
            Ok(_) | Err(_) => {}
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

/// Commits effects for tomorrow, more for each consumer than for the one before. Gives how many there are.
async fn leave(client: &mut Client) -> anyhow::Result<i64> {
    let mut effects = Vec::new();
    for (n, profile) in PROFILES.iter().enumerate() {
        effects.extend((0..=n).map(|_| left_for(profile.name).deliver_in(Duration::from_secs(86_400))));
    }
    emit(client, &effects).await?;
    Ok(i64::try_from(effects.len())?)
}

fn left_for(consumer: &str) -> Effect {
    Effect::to(consumer, Payload::Text(json!({ "left": consumer }).to_string()))
}

async fn emit(client: &mut Client, effects: &[Effect]) -> anyhow::Result<()> {
    let tx = client.transaction().await?;
    producer::emit(&tx, effects, None).await?;
    Ok(tx.commit().await?)
}

/// Something waits for the paused consumer that is not for tomorrow.
async fn kept_back(client: &Client) -> anyhow::Result<bool> {
    let sql = "select exists (select from fencepost.deliveries_by_id where consumer = $1 and settled_at is null
                                and token is distinct from 'scheduled')";
    Ok(client.query_one(sql, &[&PAUSED]).await?.get(0))
}

/// All of it has been read, and lies where it will lie: parked, or in a range that the paused consumer's lane left unread.
async fn at_rest(client: &Client, scheduled: i64) -> anyhow::Result<bool> {
    let sql = "select (select count(*) from fencepost.parked where state = 'scheduled') = $1
                  and not exists (select from fencepost.flights where token is null)
                  and exists (select from fencepost.lags)";
    Ok(client.query_one(sql, &[&scheduled]).await?.get(0))
}

async fn ask(stage: &Stage, client: &Client) -> anyhow::Result<Accounts> {
    let holds = held(client).await?;
    let mut accounts = Accounts { lost: lost(client).await?, ..Accounts::default() };
    accounts.gauges.push(Account { who: "status".into(), says: status(stage).await?, holds: holds.clone() });
    for replica in &stage.replicas {
        let who = format!("relay-{}", replica.number);
        let (gauges, counters) = metrics(replica).await?;
        accounts.counters.push(Account { who: who.clone(), says: counters, holds: attempts(client, &who).await? });
        accounts.gauges.push(Account { who, says: gauges, holds: holds.clone() });
    }
    Ok(accounts)
}

/// What the tables hold, counted without a word of the product's own SQL.
async fn held(client: &Client) -> anyhow::Result<Figures> {
    let sql = "select 'waiting ' || c.name || ' ' || p.state, count(*)
               from fencepost.parked p join fencepost.consumers c using (consumer_id) group by c.name, p.state
               union all
               select 'lagging ' || c.name, sum(f.deliveries)
               from fencepost.lags l join fencepost.consumers c using (consumer_id)
               join fencepost.flights f on f.shard = l.shard and f.seq >= l.from_seq and f.seq <= l.to_seq group by c.name
               union all
               select 'paused ' || name, count(*) from fencepost.consumers where paused group by name
               union all
               select 'alarms ' || name, count(*) from fencepost.alarms where resolved_at is null group by name";
    let rows = client.query(&format!("select w.what, w.n::bigint from ({sql}) as w (what, n)"), &[]).await?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}

async fn lost(client: &Client) -> anyhow::Result<i64> {
    Ok(client.query_one("select count(*) from fencepost.attempts where token = 'lost'", &[]).await?.get(0))
}

/// How the attempts of a relay ended, since it was started. One that was not made is not counted.
async fn attempts(client: &Client, relay: &str) -> anyhow::Result<Figures> {
    let sql = "select 'attempts ' || c.name || ' ' || a.token, count(*)
               from fencepost.attempts a join fencepost.consumers c using (consumer_id)
               where a.ended and a.token = any ($2) and a.error is distinct from $3
                 and a.relay = (select relay from fencepost.relays where name = $1 order by started_at desc limit 1)
               group by c.name, a.token";
    let not_made = "the shard's lease ended before the attempt could be made";
    let rows = client.query(sql, &[&relay, &COUNTED.as_slice(), &not_made]).await?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}

/// What `fencepost status --json` says.
async fn status(stage: &Stage) -> anyhow::Result<Figures> {
    let mut command = tokio::process::Command::new(stage.history.program());
    command.args(["status", "--json"]).env("DATABASE_URL", &stage.url).env("FENCEPOST_CONFIG", &stage.config);
    let output = tokio::time::timeout(PATIENCE, command.kill_on_drop(true).output()).await??;
    let status: Value = serde_json::from_slice(&output.stdout).context("status --json")?;
    let mut figures = Figures::new();
    for edge in status["edges"].as_array().context("edges")? {
        let name = edge["name"].as_str().context("a name")?;
        for (token, count) in edge["waiting"].as_object().context("waiting")? {
            figures.insert(format!("waiting {name} {token}"), count.as_i64().context("a count")?);
        }
        figures.insert(format!("lagging {name}"), edge["lagging_at_most"].as_i64().context("lagging_at_most")?);
        figures.insert(format!("unread {name}"), edge["unread"].as_i64().context("unread")?);
        figures.insert(format!("paused {name}"), i64::from(edge["paused"].as_bool().context("paused")?));
    }
    for alarm in status["alarms"].as_array().context("alarms")? {
        *figures.entry(format!("alarms {}", alarm["name"].as_str().context("a name")?)).or_default() += 1;
    }
    Ok(figures)
}

/// What a relay's `/metrics` says: gauges of the whole, and its own counters of attempts.
async fn metrics(replica: &Replica) -> anyhow::Result<(Figures, Figures)> {
    let mut socket = TcpStream::connect(replica.admin()?).await.context("the relay's admin endpoints")?;
    socket.write_all(b"GET /metrics HTTP/1.0\r\nhost: campaign\r\n\r\n").await?;
    let mut text = String::new();
    tokio::time::timeout(PATIENCE, socket.read_to_string(&mut text)).await??;
    let (mut gauges, mut counters) = (Figures::new(), Figures::new());
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let Some((name, labels, value)) = sample(line) else { continue };
        let (figures, name) = match name {
            "fencepost_waiting" => (&mut gauges, "waiting"),
            "fencepost_lagging" => (&mut gauges, "lagging"),
            "fencepost_unread" => (&mut gauges, "unread"),
            "fencepost_consumer_paused" => (&mut gauges, "paused"),
            "fencepost_alarms" => (&mut gauges, "alarms"),
            "fencepost_attempts_total" if labels.last().is_some_and(|token| COUNTED.contains(token)) => {
                (&mut counters, "attempts")
            }
            _ => continue,
        };
        figures.insert(format!("{name} {}", labels.join(" ")), value);
    }
    anyhow::ensure!(!gauges.is_empty(), "relay {} gives no gauges", replica.number);
    Ok((gauges, counters))
}

/// Name, values of the labels in their order, value.
fn sample(line: &str) -> Option<(&str, Vec<&str>, i64)> {
    let (series, value) = line.rsplit_once(' ')?;
    let (name, labels) = series.split_once('{').unwrap_or((series, ""));
    let value = value.parse::<f64>().ok()?;
    // Labels are of names without a quote in them.
    Some((name, labels.split('"').skip(1).step_by(2).collect(), value as i64))
}
