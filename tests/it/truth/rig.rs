//! A database, a configuration and `fencepost run` on it, and what the database says about deliveries.

use std::fs;
use std::path::{Path, PathBuf};

use fencepost::demo::embedded::postgres::PrivatePostgres;
use serde_json::Value;
use tokio_postgres::{Client, NoTls, Row};

use crate::support::db::TestDb;
use crate::support::process::{self, Process};
use crate::support::receiver::Receiver;
use crate::support::{PATIENCE, eventually};

/// A database with the relays a test starts on it.
pub struct Rig {
    pub client: Client,
    url: String,
    folder: PathBuf,
    _db: Option<TestDb>,
}

/// What the database says about one delivery now.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Delivery {
    /// Terminal or waiting; `None`: it did not finish, and nothing is known of it.
    pub token: Option<String>,
    pub attempts: i32,
    pub reason: String,
    pub ack_raw: Option<String>,
    pub doubt: bool,
}

/// One attempt's rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Attempt {
    pub number: i32,
    pub started: bool,
    /// `None`: it was started and nobody knows its end.
    pub token: Option<String>,
    pub status: Option<i16>,
    pub phase: Option<String>,
    pub bytes_left: Option<bool>,
    pub error: Option<String>,
    pub ack_raw: Option<String>,
}

impl Rig {
    /// `more` is added to a configuration whose waits are short: consumers, and sections that are not in it yet.
    pub async fn new(more: &str) -> Self {
        Self::with_retry("base = '50ms'\ncap = '200ms'", more).await
    }

    pub async fn with_retry(retry: &str, more: &str) -> Self {
        let db = TestDb::new().await;
        Self::on(db.url().to_owned(), Some(db), retry, more).await
    }

    /// On a server of the test's own (`own_server`), which it may harm.
    pub async fn on_server(server: &PrivatePostgres, more: &str) -> Self {
        Self::on(server.url("postgres"), None, "base = '50ms'\ncap = '200ms'", more).await
    }

    async fn on(url: String, db: Option<TestDb>, retry: &str, more: &str) -> Self {
        let client = connect(&url).await;
        let folder = std::env::temp_dir().join(format!("fencepost-rig-{:016x}", rand::random::<u64>()));
        fs::create_dir(&folder).expect("a folder");
        let rig = Self { client, url, folder, _db: db };
        rig.configure(retry, more);
        rig
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    /// A connection of its own, as superuser.
    pub async fn connect(&self) -> Client {
        connect(&self.url).await
    }

    /// Waits until the server takes connections again, and makes a new one.
    pub async fn reconnect(&mut self) {
        let url = self.url.clone();
        self.client = eventually("the server takes connections", async || {
            let (client, connection) = tokio_postgres::connect(&url, NoTls).await.ok()?;
            tokio::spawn(connection);
            Some(client)
        })
        .await;
    }

    /// Writes the configuration again, for relays and commands that start from now on.
    pub fn configure(&self, retry: &str, more: &str) {
        let relay = "shard_lease = '3s'\nrenew_every = '1s'\nshutdown_grace = '1s'";
        let text = format!("[relay]\n{relay}\n[retry]\n{retry}\n[admin]\nlisten = '127.0.0.1:0'\n{more}");
        fs::write(self.folder.join("fencepost.toml"), text).expect("a configuration");
    }

    /// A folder that goes with the rig.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn config(&self) -> String {
        self.folder.join("fencepost.toml").to_str().expect("a path").to_owned()
    }

    /// A relay that holds every shard.
    pub async fn relay(&self) -> Process {
        let mut relay = self.relay_with(&[]);
        self.holds_all(&mut relay).await;
        relay
    }

    /// A relay that dies or stops where `fail` says.
    pub fn failing_relay(&self, fail: &str) -> Process {
        self.relay_with(&[("FENCEPOST_FAIL", fail)])
    }

    pub fn relay_with(&self, env: &[(&str, &str)]) -> Process {
        self.relay_on(&self.url, env)
    }

    /// A relay that reaches the database by another way, such as a proxy.
    pub fn relay_on(&self, url: &str, env: &[(&str, &str)]) -> Process {
        let config = self.config();
        let mut all = vec![("DATABASE_URL", url), ("FENCEPOST_CONFIG", config.as_str())];
        all.extend(env);
        Process::start(&["run"], &all)
    }

    /// Waits until this relay has taken every shard.
    pub async fn holds_all(&self, relay: &mut Process) {
        for shard in 0..8 {
            relay.says(&format!("shard taken shard={shard} ")).await;
        }
    }

    /// `fencepost ARGS --yes --reason test`, which must succeed.
    pub async fn change(&self, args: &[&str]) {
        let config = self.config();
        let args: Vec<&str> = args.iter().copied().chain(["--yes", "--reason", "test"]).collect();
        let env = [("DATABASE_URL", self.url()), ("FENCEPOST_CONFIG", config.as_str())];
        let (code, out, err) = process::run(&args, &env).await;
        assert_eq!(code, 0, "{args:?}: {out}{err}");
    }

    /// Declares the configured consumers without starting a relay.
    pub async fn apply(&self) {
        self.change(&["consumers", "apply"]).await;
    }

    /// Commits one effect for `consumer` under the key `<task>:1`.
    pub async fn emit(&self, task: &str, consumer: &str) -> String {
        self.emit_with(task, serde_json::json!([{ "consumer": consumer, "payload": { "task": task } }])).await
    }

    pub async fn emit_with(&self, task: &str, effects: Value) -> String {
        let sql = "select fencepost.record_completion($1, 1, $2)";
        self.client.execute(sql, &[&task, &effects]).await.expect("a completion");
        format!("{task}:1")
    }

    /// Opens every task of kind `kind` again and claims it: it has known epoch 2, which a consumer's `stale` may name.
    pub async fn second_epochs(&self) {
        self.client
            .batch_execute(
                "select fencepost.reopen_task(task_id, 'test', true) from fencepost.tasks where kind = 'kind';
                 select task_id from fencepost.claim_tasks('owner', array['kind'], 100)",
            )
            .await
            .expect("a second epoch");
    }

    pub async fn delivery(&self, key: &str, consumer: &str) -> Delivery {
        let sql = "select d.token, d.attempts, coalesce(d.reason, '') as reason, d.ack_raw,
                          coalesce((select bool_or(l.doubt) from fencepost.ledger l where l.effect_id = fencepost.effect_id_of($1)
                                    and l.consumer_id = c.consumer_id), false) as doubt
                   from fencepost.deliveries_of($1) d join fencepost.consumers c on c.name = d.consumer where d.consumer = $2";
        let row = self.client.query_opt(sql, &[&key, &consumer]).await.expect("deliveries");
        let row = row.unwrap_or_else(|| panic!("{key} was never meant for {consumer}"));
        Delivery {
            token: row.get("token"),
            attempts: row.get("attempts"),
            reason: row.get("reason"),
            ack_raw: row.get("ack_raw"),
            doubt: row.get("doubt"),
        }
    }

    /// Waits until the delivery has this token.
    pub async fn becomes(&self, key: &str, consumer: &str, token: &str) -> Delivery {
        let started = std::time::Instant::now();
        loop {
            let delivery = self.delivery(key, consumer).await;
            if delivery.token.as_deref() == Some(token) {
                return delivery;
            }
            let late = started.elapsed() > PATIENCE;
            assert!(
                !late,
                "{key} at {consumer} is {delivery:?}, not {token}: {:?}",
                self.attempts(key, consumer).await
            );
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    }

    pub async fn attempts(&self, key: &str, consumer: &str) -> Vec<Attempt> {
        let sql = "select a.attempt, bool_or(not a.ended) as started, max(a.token) as token, max(a.status) as status, max(a.phase) as phase,
                          bool_or(a.bytes_left) as bytes_left, max(a.error) as error, max(a.ack_raw) as ack_raw
                   from fencepost.attempts a join fencepost.consumers c on c.consumer_id = a.consumer_id
                   where a.effect_id = fencepost.effect_id_of($1) and c.name = $2 group by a.attempt order by a.attempt";
        let rows = self.client.query(sql, &[&key, &consumer]).await.expect("attempts");
        rows.iter().map(attempt).collect()
    }

    /// The tokens of its attempts, in order; `-` for one without an end.
    pub async fn tokens(&self, key: &str, consumer: &str) -> Vec<String> {
        let token = |attempt: Attempt| attempt.token.unwrap_or_else(|| "-".into());
        self.attempts(key, consumer).await.into_iter().map(token).collect()
    }

    /// One number the database can count.
    pub async fn count(&self, sql: &str) -> i64 {
        self.client.query_one(sql, &[]).await.unwrap_or_else(|e| panic!("{sql}: {e}")).get(0)
    }

    /// Waits until `sql` counts `wanted`.
    pub async fn counts(&self, sql: &str, wanted: i64) {
        let what = format!("{wanted} = {sql}");
        eventually(&what, async || (self.count(sql).await == wanted).then_some(())).await;
    }

    /// Waits until every flight is closed and nothing is parked: all is accounted for.
    pub async fn rests(&self) {
        self.counts("select count(*) from fencepost.flights where token is null", 0).await;
        self.counts("select count(*) from fencepost.parked", 0).await;
    }

    /// Attempts on record that left this machine, of one delivery: those with an end, and a first try that succeeded.
    pub async fn recorded(&self, key: &str, consumer: &str) -> i64 {
        let sql = "with d as (select fencepost.effect_id_of($1) as effect_id, (select consumer_id from fencepost.consumers where name = $2) as consumer_id)
                   select (select count(*) from fencepost.attempts a join d using (effect_id, consumer_id) where a.ended and a.bytes_left)
                        + (select count(*) from fencepost.ledger l join d using (effect_id, consumer_id) where l.attempt > 0
                           and not exists (select 1 from fencepost.attempts a where a.effect_id = d.effect_id and a.consumer_id = d.consumer_id
                                           and a.attempt = l.attempt and a.ended))";
        self.client.query_one(sql, &[&key, &consumer]).await.expect("a count").get(0)
    }

    /// No hidden request and no invented attempt: the wire saw what the database has, numbered from 1.
    pub async fn wire_agrees(&self, receiver: &Receiver, key: &str, consumer: &str) {
        let mine = |request: &&_| consumer_of(request) == consumer;
        let numbers: Vec<u32> = receiver.requests_for(key).iter().filter(mine).map(|r| r.attempt()).collect();
        assert_eq!(numbers, (1..=numbers.len() as u32).collect::<Vec<_>>(), "{key} at {consumer}");
        assert_eq!(numbers.len() as i64, self.recorded(key, consumer).await, "{key} at {consumer}");
    }

    /// Ends the lease of every shard as if its relay had not renewed for long: another may take them now.
    pub async fn expire_leases(&self) {
        self.client
            .execute("update fencepost.shards set lease_expires_at = clock_timestamp() - interval '1 s' where relay is not null", &[])
            .await
            .expect("shards");
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn consumer_of(request: &crate::support::receiver::Request) -> String {
    request.header("outbox-consumer").unwrap_or_default()
}

fn attempt(row: &Row) -> Attempt {
    Attempt {
        number: row.get("attempt"),
        started: row.get("started"),
        token: row.get("token"),
        status: row.get("status"),
        phase: row.get("phase"),
        bytes_left: row.get("bytes_left"),
        error: row.get("error"),
        ack_raw: row.get("ack_raw"),
    }
}

async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("a connection to the test database");
    tokio::spawn(connection);
    client
}

/// A consumer's entry; it gives up soon.
pub fn http(name: &str, url: &str, more: &str) -> String {
    format!(
        "[[consumers]]\nname = '{name}'\nkind = 'http'\nurl = '{url}'\ntimeout = '1s'\nconnect_timeout = '300ms'\n{more}\n"
    )
}
