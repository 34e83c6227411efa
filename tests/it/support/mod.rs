//! What tests share: databases, child processes, waiting. No assertions about the product live here.

// Not every helper is used by every selection of features.
#![allow(dead_code)]

pub mod broker;
pub mod copies;
pub mod db;
pub mod faketime;
pub mod fault_proxy;
pub mod languages;
pub mod postgres_proxy;
pub mod process;
pub mod receiver;
pub mod script;
pub mod tls;

use std::time::{Duration, Instant};

/// How long a condition may take on a busy machine before a test fails.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until `condition` gives a value; panics with `what` after [`PATIENCE`].
pub async fn eventually<T>(what: &str, condition: impl AsyncFnMut() -> Option<T>) -> T {
    eventually_within(PATIENCE, what, condition).await
}

/// The same for what takes its time.
pub async fn eventually_within<T>(limit: Duration, what: &str, mut condition: impl AsyncFnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(value) = condition().await {
            return value;
        }
        assert!(started.elapsed() < limit, "not within {limit:?}: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Sends a signal to a process that is no child of ours.
pub fn kill(signal: &str, pid: i32) {
    let status =
        std::process::Command::new("sh").args(["-c", &format!("kill -s {signal} {pid}")]).status().expect("sh");
    assert!(status.success(), "{signal} {pid}");
}
