//! What every command takes: where the configuration and the database are, and how to print.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::parser::ValueSource;
use secrecy::SecretString;
use tokio_postgres::Client;

use super::output::Output;
use super::{Usage, logging};
use crate::config::{Config, Faults, LogFormat};
use crate::relay::options::Options;
use crate::store::{Database, schema};

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Every command")]
pub struct Global {
    /// The configuration file [default: config/fencepost.toml, else /etc/fencepost/fencepost.toml].
    #[arg(long, global = true, env = "FENCEPOST_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// The database, before whatever the configuration says.
    #[arg(long, global = true, env = "DATABASE_URL", hide_env_values = true, value_name = "URL")]
    database_url: Option<SecretString>,
    #[arg(skip)]
    database_url_is_typed: bool,
    /// Print JSON.
    #[arg(long, global = true)]
    json: bool,
}

impl Global {
    /// Keeps what clap knows besides the values.
    pub(super) fn note_sources(&mut self, matches: &clap::ArgMatches) {
        self.database_url_is_typed = matches.value_source("database_url") == Some(ValueSource::CommandLine);
    }

    /// `--database-url` as typed, not as found in the environment.
    pub fn typed_database_url(&self) -> Option<SecretString> {
        self.database_url.clone().filter(|_| self.database_url_is_typed)
    }

    pub fn output(&self) -> Output {
        if self.json { Output::Json } else { Output::Text }
    }

    /// The configuration; its faults end the command with exit code 2.
    pub fn config(&self) -> Result<Config, Faults> {
        Config::load(self.config.as_deref())
    }

    /// The database the configuration, or the command line before it, names.
    pub fn database_of(&self, config: &Config) -> anyhow::Result<Database> {
        self.parse_url(self.database_url.as_ref().or(config.database_url.as_ref()))
    }

    /// The database. With `--database-url` no configuration is read: a broken file must not hide the state. One that is
    /// named and not there is a slip of the keyboard.
    pub fn database(&self) -> anyhow::Result<Database> {
        let slip = self.config.as_ref().is_some_and(|file| !file.exists());
        match &self.database_url {
            Some(url) if !slip => self.parse_url(Some(url)),
            _ => self.database_of(&self.config()?),
        }
    }

    /// How long relays hold their shards without renewing, as far as this machine's configuration tells.
    pub fn shard_lease(&self) -> anyhow::Result<Duration> {
        match (self.config(), &self.database_url) {
            (Ok(config), _) => Ok(config.options.shard_lease),
            (Err(_), Some(_)) => Ok(Options::default().shard_lease),
            (Err(faults), None) => Err(faults.into()),
        }
    }

    /// A session for one command, with a schema this build knows.
    pub async fn session(&self) -> anyhow::Result<Client> {
        logging::init(LogFormat::Text, "warn");
        open(&self.database()?).await
    }

    fn parse_url(&self, url: Option<&SecretString>) -> anyhow::Result<Database> {
        let url = url.ok_or_else(|| {
            Usage("no database is named: write --database-url URL, DATABASE_URL=URL, or [database] in the configuration file".into())
        })?;
        Database::new(url, "fencepost-cli").map_err(|error| Usage(error.to_string()).into())
    }
}

/// A session whose waits are bounded and whose times read as UTC, with a schema this build knows.
pub async fn open(database: &Database) -> anyhow::Result<Client> {
    let client = database.connect().await.context("cannot reach the database")?;
    client
        .batch_execute("-- cli::session\nset statement_timeout = '30s'; set lock_timeout = '10s'; set time zone 'UTC'; set jit = off")
        .await
        .map_err(crate::store::Error::from)?;
    schema::check(&client).await?;
    Ok(client)
}
