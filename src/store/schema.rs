//! The schema: numbered migrations compiled into the binary, applied once, by whoever comes first.

use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};
use tokio_postgres::Client;

use super::{Error, Result};

/// One migration, as compiled in.
#[derive(Clone, Copy, Debug)]
pub struct Migration {
    pub version: i32,
    pub name: &'static str,
    pub sql: &'static str,
}

macro_rules! migrations {
    ($($version:literal $name:literal),+ $(,)?) => {
        &[$(Migration { version: $version, name: $name, sql: include_str!(concat!("../../migrations/", $name, ".sql")) }),+]
    };
}

/// In order. A migration that was released is never edited: its checksum is in the databases that have it.
pub const MIGRATIONS: &[Migration] = migrations![
    1 "001_tables",
    2 "002_log",
    3 "003_tasks",
    4 "004_effects",
    5 "005_consumers",
    6 "006_views",
    7 "007_rights",
];

/// The first half of the advisory lock that lets one process migrate at a time.
const MIGRATION_LOCK: i64 = 0x6665_6e63_6570_6f73;
/// How long to wait for another process that migrates.
const LOCK_WAIT: Duration = Duration::from_secs(120);

#[derive(Debug, thiserror::Error)]
pub enum SchemaError {
    #[error("the schema has version {found}, this build knows up to {known}: use a newer fencepost")]
    Newer { found: i32, known: i32 },
    #[error("the schema has version {found}, this build needs {known}: run `fencepost migrate`")]
    Older { found: i32, known: i32 },
    #[error("the database has no fencepost schema: run `fencepost migrate`")]
    Missing,
    #[error("migration {0} was applied with other contents than this build's: it was edited after its release")]
    Edited(String),
    #[error("another process has been migrating for {0:?}")]
    Busy(Duration),
    #[error("the database's encoding is {0}; fencepost needs UTF8")]
    Encoding(String),
    #[error("PostgreSQL {0} is too old; fencepost needs 14 or later")]
    Server(String),
}

/// Applies what is missing. Any number of processes may call it at once; returns the names it applied itself.
pub async fn migrate(client: &mut Client) -> Result<Vec<&'static str>> {
    check_server(client).await?;
    lock(client).await?;
    let applied = apply(client).await;
    // The session may be gone; then the lock went with it.
    let _ = client.execute("select pg_advisory_unlock($1)", &[&MIGRATION_LOCK]).await;
    applied
}

/// Refuses a schema this build does not match exactly.
pub async fn check(client: &Client) -> Result<()> {
    let known = MIGRATIONS.last().map_or(0, |m| m.version);
    match version(client).await? {
        None => Err(SchemaError::Missing.into()),
        Some(found) if found > known => Err(SchemaError::Newer { found, known }.into()),
        Some(found) if found < known => Err(SchemaError::Older { found, known }.into()),
        Some(_) => Ok(()),
    }
}

/// The schema's version, if there is a schema.
pub async fn version(client: &Client) -> Result<Option<i32>> {
    let sql = "-- store::schema_version\nselect to_regclass('fencepost.schema_migrations') is not null";
    if !client.query_one(sql, &[]).await?.get::<_, bool>(0) {
        return Ok(None);
    }
    let row =
        client.query_one("-- store::schema_version\nselect max(version) from fencepost.schema_migrations", &[]).await?;
    Ok(row.get(0))
}

async fn check_server(client: &Client) -> Result<()> {
    let row = client
        .query_one(
            "-- store::check_server
             select current_setting('server_version_num')::int, current_setting('server_version'),
                    (select pg_encoding_to_char(encoding)::text from pg_database where datname = current_database())",
            &[],
        )
        .await?;
    if row.get::<_, i32>(0) < 140_000 {
        return Err(SchemaError::Server(row.get(1)).into());
    }
    match row.get::<_, String>(2) {
        encoding if encoding == "UTF8" => Ok(()),
        encoding => Err(SchemaError::Encoding(encoding).into()),
    }
}

/// A try-lock, polled: a blocking one would be a snapshot that others' CREATE INDEX CONCURRENTLY waits for.
async fn lock(client: &Client) -> Result<()> {
    let started = Instant::now();
    loop {
        let sql = "-- store::migration_lock\nselect pg_try_advisory_lock($1)";
        if client.query_one(sql, &[&MIGRATION_LOCK]).await?.get(0) {
            return Ok(());
        }
        if started.elapsed() > LOCK_WAIT {
            return Err(SchemaError::Busy(LOCK_WAIT).into());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn apply(client: &mut Client) -> Result<Vec<&'static str>> {
    client
        .batch_execute(
            "-- store::schema_migrations
             set client_min_messages = warning;
             create schema if not exists fencepost;
             revoke all on schema fencepost from public;
             create table if not exists fencepost.schema_migrations (
                 version    integer primary key,
                 name       text not null,
                 checksum   text not null,
                 applied_at timestamptz not null default clock_timestamp()
             );",
        )
        .await?;
    let rows = client
        .query("-- store::applied\nselect version, checksum from fencepost.schema_migrations order by version", &[])
        .await?;
    let known = MIGRATIONS.last().map_or(0, |m| m.version);
    for row in &rows {
        let (found, checksum): (i32, String) = (row.get(0), row.get(1));
        match MIGRATIONS.iter().find(|m| m.version == found) {
            None => return Err(SchemaError::Newer { found, known }.into()),
            Some(m) if checksum_of(m) != checksum => return Err(SchemaError::Edited(m.name.into()).into()),
            Some(_) => {}
        }
    }
    let mut done = Vec::new();
    for migration in MIGRATIONS.iter().filter(|m| rows.iter().all(|r| r.get::<_, i32>(0) != m.version)) {
        let tx = client.transaction().await?;
        tx.batch_execute(migration.sql).await?;
        tx.execute(
            "-- store::record_migration\ninsert into fencepost.schema_migrations (version, name, checksum) values ($1, $2, $3)",
            &[&migration.version, &migration.name, &checksum_of(migration)],
        )
        .await?;
        tx.commit().await.map_err(Error::from)?;
        done.push(migration.name);
    }
    Ok(done)
}

fn checksum_of(migration: &Migration) -> String {
    Sha256::digest(migration.sql.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_count_up_from_one() {
        for (n, migration) in MIGRATIONS.iter().enumerate() {
            assert_eq!(migration.version as usize, n + 1);
            assert!(migration.name.starts_with(&format!("{:03}_", n + 1)));
        }
    }
}
