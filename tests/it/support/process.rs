//! Real `fencepost` processes, which die with the test.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use fencepost::demo::embedded::guardian::{Guarded, Guardian, Signal};

use super::{PATIENCE, eventually_within};

/// A running `fencepost`, with all it says in one file.
pub struct Process {
    child: Guarded,
    _guardian: Guardian,
    folder: PathBuf,
}

impl Process {
    /// `fencepost ARGS` with these variables added to the environment.
    pub fn start(args: &[&str], env: &[(&str, &str)]) -> Self {
        let folder = scratch_folder();
        let mut guardian = Guardian::new(&[&folder]).expect("a guardian");
        let log = File::create(folder.join("log")).expect("a log");
        let mut command = Guardian::command(env!("CARGO_BIN_EXE_fencepost"));
        // Any free port, unless the test wants another: several relays run on this machine.
        command.env("FENCEPOST__ADMIN__LISTEN", "127.0.0.1:0");
        command.args(args).envs(env.iter().copied()).current_dir(&folder);
        command.stderr(log.try_clone().expect("a log")).stdout(Stdio::from(log));
        let child = guardian.spawn(command, Signal::Kill).expect("fencepost starts");
        Self { child, _guardian: guardian, folder }
    }

    pub fn pid(&self) -> u32 {
        self.child.pid()
    }

    /// A folder that goes with the process: its working directory.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Everything it has said so far, on stdout and stderr.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }

    /// Waits until the log has a line that contains `text`.
    pub async fn says(&mut self, text: &str) -> String {
        self.says_within(PATIENCE, text).await
    }

    /// The same for what takes its time.
    pub async fn says_within(&mut self, limit: Duration, text: &str) -> String {
        let what = format!("the process says {text:?}");
        eventually_within(limit, &what, async || {
            let log = self.log();
            let line = log.lines().find(|line| line.contains(text)).map(str::to_owned);
            if line.is_none() {
                assert!(self.child.ended().expect("its status").is_none(), "it ended before it said {text:?}:\n{log}");
            }
            line
        })
        .await
    }

    pub fn signal(&self, signal: Signal) {
        self.child.signal(signal).expect("the process takes a signal");
    }

    /// Whether it has ended by itself.
    pub fn has_ended(&mut self) -> bool {
        self.child.ended().expect("its status").is_some()
    }

    /// SIGKILL, and wait until it is gone.
    pub async fn kill(&mut self) {
        self.signal(Signal::Kill);
        self.ended().await;
    }

    /// Waits for its end.
    pub async fn ended(&mut self) -> ExitStatus {
        self.child.wait(PATIENCE).await.unwrap_or_else(|e| panic!("the process does not end: {e}\n{}", self.log()))
    }
}

/// Runs `fencepost ARGS` to its end: exit code, stdout, stderr.
pub async fn run(args: &[&str], env: &[(&str, &str)]) -> (i32, String, String) {
    run_within(PATIENCE, args, env).await
}

/// The same for what takes its time.
pub async fn run_within(limit: Duration, args: &[&str], env: &[(&str, &str)]) -> (i32, String, String) {
    let output = tokio::process::Command::new(env!("CARGO_BIN_EXE_fencepost"))
        .args(args)
        .envs(env.iter().copied())
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(limit, output).await.expect("fencepost ends").expect("fencepost runs");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    (output.status.code().expect("an exit code"), text(output.stdout), text(output.stderr))
}

fn scratch_folder() -> PathBuf {
    let folder = std::env::temp_dir().join(format!("fencepost-test-{:016x}", rand::random::<u64>()));
    fs::create_dir(&folder).expect("a folder");
    folder
}
