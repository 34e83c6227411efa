//! `make e2e` where no Docker engine can be had, or one Compose of two: it says why, and in CI that is a failure.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::Output;

use tokio::process::Command;

use crate::support::languages::repository;

/// A machine with these tools and no others: a folder that is all of PATH.
struct Machine(PathBuf);

impl Machine {
    fn new(name: &str) -> Machine {
        let path = std::env::temp_dir().join(format!("fencepost-{name}-{}", std::process::id()));
        fs::create_dir(&path).expect("a folder");
        // Not `id`: who runs the script is for the test to say.
        let tools = ["sh", "dirname", "mktemp", "rm", "tail", "sleep"];
        for tool in tools {
            let places = std::env::var("PATH").expect("a PATH");
            let place = places.split(':').map(|place| PathBuf::from(place).join(tool)).find(|file| file.exists());
            symlink(place.unwrap_or_else(|| panic!("{tool} is not installed")), path.join(tool)).expect("a link");
        }
        Machine(path)
    }

    fn with(self, tool: &str, script: &str) -> Machine {
        let file = self.0.join(tool);
        fs::write(&file, format!("#!/bin/sh\n{script}\n")).expect("a script");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).expect("a script that runs");
        self
    }

    /// Its exit code and the last line it says.
    async fn e2e(&self, ci: &str) -> (Option<i32>, String) {
        let mut command = Command::new(self.0.join("sh"));
        command.arg(repository("tests/compose/run.sh")).env_clear().env("PATH", &self.0).env("CI", ci);
        let Output { status, stdout, .. } = command.output().await.expect("a shell");
        let said = String::from_utf8_lossy(&stdout);
        (status.code(), said.lines().last().unwrap_or_default().to_owned())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

async fn is_skipped(machine: &Machine, why: &str) {
    for (ci, code) in [("", 0), ("false", 0), ("true", 1)] {
        let (exit, said) = machine.e2e(ci).await;
        assert_eq!((exit, said), (Some(code), format!("e2e: SKIPPED: {why}")), "CI={ci}");
    }
}

#[tokio::test]
async fn without_an_engine_the_run_is_skipped_and_says_why() {
    let nobody = Machine::new("nobody").with("id", "echo 1000");
    is_skipped(&nobody, "no Docker engine answers, and only root can start one").await;
    let root = Machine::new("root").with("id", "echo 0");
    is_skipped(&root, "no Docker engine answers, and docker.io cannot be installed").await;
}

#[tokio::test]
async fn an_engine_that_does_not_start_is_quoted() {
    let caged = Machine::new("caged").with("id", "echo 0").with("dockerd", "echo 'no rights to mount'; exit 1");
    is_skipped(&caged, "dockerd does not start: no rights to mount").await;
}

/// An engine that answers and knows no plugin, and no apt to get one with.
#[tokio::test]
async fn without_one_compose_of_the_two_ci_fails_and_names_it() {
    let engine = "case $1 in version) echo 20.10 ;; *) exit 1 ;; esac";
    let old = Machine::new("old").with("id", "echo 0").with("docker", engine).with("python3", "exit 1");
    let old = old.with("docker-compose", "echo 1.29.2");
    let (exit, said) = old.e2e("true").await;
    assert_eq!((exit, said), (Some(1), "e2e: FAILED: Compose v2 cannot be had".to_owned()));
}

#[tokio::test]
async fn without_any_compose_the_run_is_skipped() {
    let engine = "case $1 in version) echo 20.10 ;; *) exit 1 ;; esac";
    let bare = Machine::new("bare").with("id", "echo 1000").with("docker", engine);
    is_skipped(&bare, "there is neither docker compose nor docker-compose").await;
}
