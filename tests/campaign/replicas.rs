//! One relay: a `fencepost run` of its own, with its own way to the database.

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context;
use fencepost::demo::embedded::guardian::{Guarded, Guardian, Signal};
use tokio::sync::Mutex;

use crate::fault_proxy::FaultProxy;
use crate::postgres_proxy::{PostgresProxy, Upstream};

/// Longer than a relay's grace and its last words.
const ENDS_WITHIN: Duration = Duration::from_secs(20);

pub struct Replica {
    pub number: usize,
    /// Swallows answers.
    pub answers: PostgresProxy,
    /// Cuts, delays, swallows everything. Behind `answers`.
    pub wire: FaultProxy,
    pub log: PathBuf,
    start: Start,
    /// Held through a fault, so that faults of one relay do not meet.
    pub process: Mutex<Running>,
}

struct Start {
    program: PathBuf,
    url: String,
    env: Vec<(String, String)>,
    config: PathBuf,
}

pub struct Running {
    child: Option<Guarded>,
    guardian: Guardian,
}

impl Replica {
    pub async fn start(
        number: usize,
        url: &str,
        config: &Path,
        folder: &Path,
        env: &[(&str, &str)],
    ) -> anyhow::Result<Self> {
        let database: tokio_postgres::Config = url.parse()?;
        let port = *database.get_ports().first().context("a port")?;
        let wire = FaultProxy::start(SocketAddr::from(([127, 0, 0, 1], port))).await;
        let answers = PostgresProxy::start(Upstream::Tcp(SocketAddr::from(([127, 0, 0, 1], wire.port())))).await;
        let url = url.replace(&format!(":{port}/"), &format!(":{}/", answers.address().port()));
        let replica = Self {
            number,
            answers,
            wire,
            log: folder.join(format!("relay-{number}.log")),
            start: Start {
                program: folder.join("fencepost"),
                url,
                env: env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
                config: config.to_owned(),
            },
            process: Mutex::new(Running { child: None, guardian: Guardian::new(&[])? }),
        };
        replica.spawn(&mut *replica.process.lock().await)?;
        Ok(replica)
    }

    /// Where it answers to `/metrics`, by its log.
    pub fn admin(&self) -> anyhow::Result<SocketAddr> {
        let log = std::fs::read_to_string(&self.log)?;
        let line = log.lines().rfind(|line| line.contains("admin endpoints")).context("the relay has not started")?;
        let (_, address) = line.split_once("127.0.0.1:").context("an address")?;
        let port: String = address.chars().take_while(char::is_ascii_digit).collect();
        Ok(SocketAddr::from(([127, 0, 0, 1], port.parse()?)))
    }

    /// Starts the relay, unless it runs.
    pub fn spawn(&self, running: &mut Running) -> anyhow::Result<()> {
        if running.child.is_some() {
            return Ok(());
        }
        let log = File::options().create(true).append(true).open(&self.log)?;
        let mut command = Guardian::command(&self.start.program);
        command
            .arg("run")
            .env("DATABASE_URL", &self.start.url)
            .env("FENCEPOST_CONFIG", &self.start.config)
            .env("FENCEPOST__RELAY__NAME", format!("relay-{}", self.number))
            .env("FENCEPOST__ADMIN__LISTEN", "127.0.0.1:0")
            .envs(self.start.env.iter().cloned())
            .stderr(log.try_clone()?)
            .stdout(Stdio::from(log));
        running.child = Some(running.guardian.spawn(command, Signal::Kill)?);
        Ok(())
    }
}

impl Running {
    pub fn signal(&self, signal: Signal) {
        if let Some(child) = &self.child {
            // One that ended by itself is found out by `ended_by_itself`.
            let _ = child.signal(signal);
        }
    }

    pub async fn kill(&mut self) -> anyhow::Result<()> {
        self.signal(Signal::Kill);
        self.wait().await
    }

    /// Waits for an end that was asked for.
    pub async fn wait(&mut self) -> anyhow::Result<()> {
        if let Some(mut child) = self.child.take() {
            child.wait(ENDS_WITHIN).await.context("the relay does not end")?;
            self.guardian.forget(&child)?;
        }
        Ok(())
    }

    /// Whether it ends within `limit`.
    pub async fn ends_within(&mut self, limit: Duration) -> bool {
        match &mut self.child {
            Some(child) => child.wait(limit).await.is_ok(),
            None => true,
        }
    }

    /// A relay that nobody asked to end must run.
    pub fn ended_by_itself(&mut self) -> Option<String> {
        let status = self.child.as_mut()?.ended().ok()??;
        self.child = None;
        Some(status.to_string())
    }
}
