//! The relay as it runs in production: the real binary as a child process, a real PostgreSQL, a scripted consumer. What
//! only the database can show (plans, snapshots, fences) is tested on the store's own functions.

mod ahead;
mod clock;
mod doorbell;
mod frozen;
mod gap;
mod known;
mod log;
mod long_transactions;
mod migrations;
mod openings;
mod outage;
mod poison;
mod shutdown;
mod standby;
mod takeover;

use std::collections::{BTreeMap, HashMap};

use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::support::db::TestDb;
use crate::support::eventually;
use crate::support::process::Process;
use crate::support::receiver::{Receiver, Request};

/// A relay's configuration, as the environment gives it. May be started any number of times.
#[derive(Clone)]
pub struct Relay {
    env: Vec<(String, String)>,
}

impl Relay {
    pub fn of(db: &TestDb) -> Self {
        Self::at(db.url())
    }

    pub fn at(url: &str) -> Self {
        let relay = Self { env: vec![("DATABASE_URL".into(), url.into())] };
        relay.set("admin.listen", "127.0.0.1:0").set("retry.base", "50ms").set("retry.cap", "200ms")
    }

    /// A key of the configuration, such as `relay.shard_lease`.
    pub fn set(self, key: &str, value: &str) -> Self {
        let name = format!("FENCEPOST__{}", key.replace('.', "__").to_uppercase());
        self.env(&name, value)
    }

    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.retain(|(known, _)| known != name);
        self.env.push((name.into(), value.into()));
        self
    }

    /// Leases that run out within the patience of a test.
    pub fn short_leases(self) -> Self {
        self.set("relay.shard_lease", "2s").set("relay.renew_every", "500ms")
    }

    pub fn start(&self) -> Process {
        let env: Vec<(&str, &str)> = self.env.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
        Process::start(&["run"], &env)
    }
}

/// Declares an HTTP consumer at this receiver; `more` is added to its spec.
pub async fn declare(client: &Client, name: &str, receiver: &Receiver, more: Value) {
    let mut spec = json!({"kind": "http", "url": receiver.url(), "timeout": "2s"});
    let fields = more.as_object().expect("an object").clone();
    spec.as_object_mut().expect("an object").extend(fields);
    client.query("select fencepost.declare_consumer($1, $2)", &[&name, &spec]).await.expect("a consumer");
}

/// Commits one completion with these effects. Returns its task id.
pub async fn emit(client: &Client, effects: &Value) -> String {
    client.query_one("select fencepost.emit($1)", &[effects]).await.expect("emit").get(0)
}

/// Commits `count` completions of one effect each to a consumer, with payloads `<label>-<n>`. Returns the keys.
pub async fn emit_many(client: &Client, consumer: &str, label: &str, count: usize) -> Vec<String> {
    let sql = "select fencepost.emit(jsonb_build_array(jsonb_build_object('consumer', $1::text, 'payload_text', $2::text || '-' || n)))
               from generate_series(1, $3::int) n order by n";
    let rows = client.query(sql, &[&consumer, &label, &(count as i32)]).await.expect("emit");
    rows.iter().map(|row| format!("{}:1", row.get::<_, String>(0))).collect()
}

/// How many deliveries have each token; those of which nothing is known are called `none`.
pub async fn tokens(client: &Client) -> BTreeMap<String, i64> {
    let sql = "select coalesce(token, 'none'), count(*) from fencepost.deliveries group by 1";
    let rows = client.query(sql, &[]).await.expect("deliveries");
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

/// Waits until every delivery has ended, `count` of them. Returns how, and leaves no flight open.
pub async fn all_settled(client: &Client, count: usize) -> BTreeMap<String, i64> {
    let sql = "select count(distinct (effect_id, consumer_id)) from fencepost.ledger";
    eventually(&format!("{count} deliveries are settled"), async || {
        let settled: i64 = client.query_one(sql, &[]).await.expect("the ledger").get(0);
        (settled >= count as i64).then_some(())
    })
    .await;
    let tokens = tokens(client).await;
    assert_eq!(tokens.values().sum::<i64>(), count as i64, "{tokens:?}");
    tokens
}

/// Waits until nothing is in the air any more.
pub async fn all_landed(client: &Client) {
    eventually("every flight is closed", async || {
        let sql = "select count(*) from fencepost.flights where token is null";
        (client.query_one(sql, &[]).await.expect("flights").get::<_, i64>(0) == 0).then_some(())
    })
    .await;
}

/// How often each key was sent to a consumer.
pub fn sent(requests: &[Request]) -> HashMap<(String, String), usize> {
    let mut sent = HashMap::new();
    for request in requests {
        *sent.entry((request.header("outbox-consumer").expect("a consumer"), request.key())).or_default() += 1;
    }
    sent
}
