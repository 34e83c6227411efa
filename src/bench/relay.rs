//! The relay as a child process of this very binary, and what it costs.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::PoisonError;
use std::time::Duration;

use secrecy::ExposeSecret;

use super::rig::{Rig, Stage};
use super::{Error, Result};
use crate::demo::embedded::guardian::{Guarded, Guardian, Signal};

/// Longer than the relay's own grace.
const STOP: Duration = Duration::from_secs(40);
/// How long a relay may take to hold its shards.
const ATTACH: Duration = Duration::from_secs(40);

pub struct Relay<'a> {
    rig: &'a Rig,
    child: Guarded,
    log: PathBuf,
}

impl<'a> Relay<'a> {
    /// `fencepost run` with its defaults.
    pub fn start(rig: &'a Rig, stage: &Stage) -> Result<Self> {
        Self::start_with(rig, stage, &[])
    }

    /// The same with more in its environment.
    pub fn start_with(rig: &'a Rig, stage: &Stage, environment: &[(&str, String)]) -> Result<Self> {
        let name = format!("{}-{:04x}", stage.name, rand::random::<u16>());
        let config = rig.folder.join(format!("{name}.toml"));
        let text = "[admin]\nlisten = \"127.0.0.1:0\"\n\n[log]\nlevel = \"warn\"\n";
        fs::write(&config, text).map_err(Error::io(format!("cannot write {}", config.display())))?;
        let log = rig.folder.join(format!("{name}.log"));
        let output = File::options().create(true).append(true).open(&log).map_err(Error::io("the relay's log"))?;
        let errors = output.try_clone().map_err(Error::io("the relay's log"))?;
        let program = std::env::current_exe().map_err(Error::io("cannot find this program"))?;
        let mut command = Guardian::command(program);
        command.arg("run").arg("--config").arg(&config).env("DATABASE_URL", stage.url.expose_secret());
        command.envs(environment.iter().map(|(name, value)| (name, value)));
        command.stdout(Stdio::from(output)).stderr(Stdio::from(errors));
        let mut guardian = rig.guardian.lock().unwrap_or_else(PoisonError::into_inner);
        let child = guardian.spawn(command, Signal::Kill).map_err(Error::io("cannot start the relay"))?;
        drop(guardian);
        Ok(Self { rig, child, log })
    }

    /// Waits until `relays` of them hold every shard between them.
    pub async fn attached(&mut self, stage: &Stage, relays: i64) -> Result<()> {
        let deadline = tokio::time::Instant::now() + ATTACH;
        loop {
            self.check()?;
            let row = stage
                .client
                .query_one(
                    "-- bench::attached
                     select coalesce(bool_and(relay is not null and lease_expires_at > clock_timestamp()), false),
                            count(distinct relay)
                     from fencepost.shards",
                    &[],
                )
                .await?;
            if row.get(0) && row.get::<_, i64>(1) == relays {
                return Ok(());
            }
            if tokio::time::Instant::now() > deadline {
                return Err(Error::Untrue(format!(
                    "the relay did not take its shards; its last words:\n{}",
                    self.last_words()
                )));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// An error where it ended by itself.
    pub fn check(&mut self) -> Result<()> {
        match self.child.ended().map_err(Error::io("cannot watch the relay"))? {
            None => Ok(()),
            Some(status) => {
                Err(Error::Untrue(format!("the relay ended ({status}); its last words:\n{}", self.last_words())))
            }
        }
    }

    /// Processor time used so far. Linux counts in hundredths of a second.
    pub fn cpu(&self) -> Result<Duration> {
        let path = format!("/proc/{}/stat", self.child.pid());
        let stat = fs::read_to_string(&path).map_err(Error::io(path))?;
        // The name in brackets may hold blanks; user and system time are fields 14 and 15.
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        let ticks: u64 = fields.iter().skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
        Ok(Duration::from_millis(ticks * 10))
    }

    /// The most memory it ever held, in bytes.
    pub fn peak_memory(&self) -> Result<u64> {
        let path = format!("/proc/{}/status", self.child.pid());
        let status = fs::read_to_string(&path).map_err(Error::io(path))?;
        let kilobytes = status
            .lines()
            .find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        Ok(kilobytes.unwrap_or(0) * 1024)
    }

    /// SIGTERM, and wait for its end.
    pub async fn stop(mut self) -> Result<()> {
        self.child.signal(Signal::Term).map_err(Error::io("cannot stop the relay"))?;
        self.end().await
    }

    /// SIGKILL: for rows that do not wait for what is out.
    pub async fn kill(mut self) -> Result<()> {
        self.child.signal(Signal::Kill).map_err(Error::io("cannot kill the relay"))?;
        self.end().await
    }

    async fn end(&mut self) -> Result<()> {
        self.child.wait(STOP).await.map_err(Error::io("the relay does not end"))?;
        let mut guardian = self.rig.guardian.lock().unwrap_or_else(PoisonError::into_inner);
        guardian.forget(&self.child).map_err(Error::io("cannot reach the guardian"))
    }

    pub fn last_words(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(10)..].join("\n")
    }
}
