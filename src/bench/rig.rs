//! The servers of a bench: a private PostgreSQL with durable settings, a private RabbitMQ where a row needs one, and a
//! fresh database for every measurement.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use secrecy::SecretString;
use serde_json::json;
use tokio_postgres::Client;

use super::{Error, Result};
use crate::demo::embedded::guardian::Guardian;
use crate::demo::embedded::postgres::{Durability, PrivatePostgres};
use crate::model::key::ConsumerId;
use crate::store::{Database, schema};

/// What a server of this size would be given; durability is left as it comes.
const SETTINGS: [&str; 5] = [
    "alter system set shared_buffers = '1GB'",
    "alter system set max_wal_size = '8GB'",
    "alter system set checkpoint_timeout = '15min'",
    "alter system set wal_compression = off",
    "alter system set log_checkpoints = off",
];
/// A migrated database that every other one is a copy of.
const TEMPLATE: &str = "bench_template";

pub struct Rig {
    server: PrivatePostgres,
    admin: Client,
    /// Configuration and logs of relays.
    pub folder: PathBuf,
    pub guardian: Mutex<Guardian>,
    made: AtomicU32,
}

/// A fresh database with fencepost's schema.
pub struct Stage {
    pub name: String,
    pub url: SecretString,
    pub database: Database,
    pub client: Client,
}

impl Rig {
    pub async fn start() -> Result<Self> {
        let mut server = PrivatePostgres::start(Durability::Full).await?;
        let admin = connect(&server.url("postgres")).await?;
        for setting in SETTINGS {
            admin.batch_execute(setting).await?;
        }
        drop(admin);
        server.restart().await?;
        let admin = connect(&server.url("postgres")).await?;
        admin.batch_execute(&format!("create database {TEMPLATE}")).await?;
        let mut client = connect(&server.url(TEMPLATE)).await?;
        schema::migrate(&mut client).await?;
        drop(client);
        let folder = std::env::temp_dir().join(format!("fencepost-bench-{:08x}", rand::random::<u32>()));
        let what = || Error::io(format!("cannot make {}", folder.display()));
        fs::create_dir(&folder).map_err(what())?;
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).map_err(what())?;
        let guardian = Mutex::new(Guardian::new(&[&folder]).map_err(Error::io("cannot start sh"))?);
        Ok(Self { server, admin, folder, guardian, made: AtomicU32::new(0) })
    }

    /// A fresh database. Copying the template waits until nobody is connected to it.
    pub async fn stage(&self) -> Result<Stage> {
        let name = format!("bench_{}", self.made.fetch_add(1, Ordering::Relaxed));
        self.admin.batch_execute(&format!("create database {name} template {TEMPLATE}")).await?;
        let url: SecretString = self.server.url(&name).into();
        let database = Database::new(&url, "fencepost-bench")?;
        let client = database.connect().await?;
        Ok(Stage { name, url, database, client })
    }

    /// Drops what the last row used.
    pub async fn clear(&self) -> Result<()> {
        for n in 0..self.made.load(Ordering::Relaxed) {
            self.admin.batch_execute(&format!("drop database if exists bench_{n} with (force)")).await?;
        }
        Ok(())
    }

    pub fn admin(&self) -> &Client {
        &self.admin
    }

    /// The server's log, for counting what it was asked.
    pub fn server_log(&self) -> PathBuf {
        self.server.log()
    }
}

impl Stage {
    /// Declares an HTTP consumer whose own word is required.
    pub async fn declare(&self, name: &str, url: &str) -> Result<ConsumerId> {
        self.declare_spec(name, json!({ "kind": "http", "url": url, "ack": "required" })).await
    }

    pub async fn declare_spec(&self, name: &str, spec: serde_json::Value) -> Result<ConsumerId> {
        self.client.execute("-- bench::declare\nselect fencepost.declare_consumer($1, $2)", &[&name, &spec]).await?;
        let row = self
            .client
            .query_one("-- bench::consumer\nselect consumer_id from fencepost.consumers where name = $1", &[&name])
            .await?;
        Ok(ConsumerId(row.get(0)))
    }

    /// Bytes of WAL written so far.
    pub async fn wal(&self) -> Result<i64> {
        let sql = "-- bench::wal\nselect pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint";
        Ok(self.client.query_one(sql, &[]).await?.get(0))
    }

    /// Facts in the ledger, and flights that are still open.
    pub async fn settled(&self) -> Result<(i64, i64)> {
        let row = self
            .client
            .query_one(
                "-- bench::settled
                 select (select count(*) from fencepost.ledger), (select count(*) from fencepost.flights where token is null)",
                &[],
            )
            .await?;
        Ok((row.get(0), row.get(1)))
    }

    /// Whether every flight has landed, without counting the ledger.
    pub async fn open_flights(&self) -> Result<i64> {
        let sql = "-- bench::open_flights\nselect count(*) from fencepost.flights where token is null";
        Ok(self.client.query_one(sql, &[]).await?.get(0))
    }
}

async fn connect(url: &str) -> Result<Client> {
    Ok(Database::new(&url.to_owned().into(), "fencepost-bench")?.connect().await?)
}
