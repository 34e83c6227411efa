//! The crash matrix of `docs/guarantees.md`: each line a test that shows the crash happening and what it leaves.

mod database;
mod producer;
mod relay;

use std::os::unix::process::ExitStatusExt;

use crate::support::process::Process;

/// Waits until a relay has died at its fail point.
async fn died(relay: &mut Process) {
    let status = relay.ended().await;
    assert_eq!(status.signal(), Some(6), "it died where it was told to: {}", relay.log());
}
