//! The relay as a child process, killed and started again.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use super::embedded::guardian::{Guarded, Guardian, Signal};
use super::stage::{Stage, environment, relay_config};
use super::{Error, Result};

/// Longer than the relay's own grace.
const STOP: Duration = Duration::from_secs(30);

pub struct Relay<'a> {
    stage: &'a Stage,
    config: PathBuf,
    child: Guarded,
    kills: u32,
}

impl<'a> Relay<'a> {
    /// `fencepost run`, from the very binary that runs the demo.
    pub fn start(stage: &'a Stage) -> Result<Self> {
        let config = relay_config(&stage.folder, &stage.site.run)?;
        let child = spawn(stage, &config)?;
        Ok(Self { stage, config, child, kills: 0 })
    }

    /// SIGKILL: nothing is written, nothing is released.
    pub async fn kill_and_restart(&mut self) -> Result<()> {
        self.child.signal(Signal::Kill).map_err(Error::io("cannot kill the relay"))?;
        self.end().await?;
        self.kills += 1;
        self.child = spawn(self.stage, &self.config)?;
        Ok(())
    }

    /// SIGTERM, and wait for its end.
    pub async fn stop(mut self) -> Result<()> {
        self.child.signal(Signal::Term).map_err(Error::io("cannot stop the relay"))?;
        self.end().await
    }

    /// An error where it ended by itself.
    pub fn check(&mut self) -> Result<()> {
        match self.child.ended().map_err(Error::io("cannot watch the relay"))? {
            None => Ok(()),
            Some(status) => Err(Error::RelayEnded { status: status.to_string(), log: self.last_words() }),
        }
    }

    pub fn kills(&self) -> u32 {
        self.kills
    }

    pub fn folder(&self) -> &Path {
        &self.stage.folder
    }

    /// The end of its log.
    pub fn last_words(&self) -> String {
        let log = std::fs::read_to_string(log_path(self.stage)).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }

    async fn end(&mut self) -> Result<()> {
        self.child.wait(STOP).await.map_err(Error::io("the relay does not end"))?;
        let mut guardian = self.stage.guardian.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        guardian.forget(&self.child).map_err(Error::io("cannot reach the guardian"))
    }
}

fn spawn(stage: &Stage, config: &Path) -> Result<Guarded> {
    let program = std::env::current_exe().map_err(Error::io("cannot find this program"))?;
    let log = File::options().create(true).append(true).open(log_path(stage));
    let log = log.map_err(Error::io("cannot write the relay's log"))?;
    let errors = log.try_clone().map_err(Error::io("cannot write the relay's log"))?;
    let mut command = Guardian::command(program);
    command.arg("run").arg("--config").arg(config).envs(environment(stage));
    command.stdout(Stdio::from(log)).stderr(Stdio::from(errors));
    let mut guardian = stage.guardian.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    guardian.spawn(command, Signal::Kill).map_err(Error::io("cannot start the relay"))
}

fn log_path(stage: &Stage) -> PathBuf {
    stage.folder.join("relay.log")
}
