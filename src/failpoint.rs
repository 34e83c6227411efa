//! Points where a test can make a relay die or stop. Compiled in only with the feature `failpoints`, and acting only in
//! a process whose environment has `FENCEPOST_FAIL`, such as `flight_opened=abort` or `answered=stop@3`.

/// What the environment asks for at a point.
#[cfg(feature = "failpoints")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Action {
    /// The process is gone at once, as by SIGKILL.
    Abort,
    /// The process stops itself, as by SIGSTOP, until it is continued.
    Stop,
    /// This task never goes on.
    Hang,
    /// This task breaks.
    Panic,
}

/// Reached the point `name`; `subject` is what it is about, for those that act on one subject only
/// (`attempt_started=abort:<text the payload contains>`).
#[cfg(feature = "failpoints")]
pub async fn reach(name: &str, subject: &[u8]) {
    use std::sync::atomic::{AtomicU64, Ordering};
    static HITS: AtomicU64 = AtomicU64::new(0);

    let Ok(wanted) = std::env::var("FENCEPOST_FAIL") else { return };
    for part in wanted.split(',') {
        let Some((point, action)) = part.split_once('=') else { continue };
        if point != name {
            continue;
        }
        let (action, needle) = action.split_once(':').map_or((action, None), |(action, needle)| (action, Some(needle)));
        if needle.is_some_and(|needle| !subject.windows(needle.len()).any(|window| window == needle.as_bytes())) {
            continue;
        }
        let (action, hit) = action.split_once('@').map_or((action, 1), |(action, n)| (action, n.parse().unwrap_or(1)));
        if HITS.fetch_add(1, Ordering::SeqCst) + 1 < hit {
            continue;
        }
        act(match action {
            "abort" => Action::Abort,
            "stop" => Action::Stop,
            "panic" => Action::Panic,
            _ => Action::Hang,
        })
        .await;
    }
}

#[cfg(feature = "failpoints")]
async fn act(action: Action) {
    match action {
        Action::Abort => std::process::abort(),
        Action::Stop => {
            let pid = std::process::id().to_string();
            // The shell's own `kill`: there is no /bin/kill on a bare Debian.
            let _ = std::process::Command::new("sh").args(["-c", "kill -STOP $0", &pid]).status();
            // The signal takes a moment to stop every thread; this one must not be the last.
            std::thread::sleep(std::time::Duration::from_millis(200));
        }
        Action::Hang => std::future::pending().await,
        #[allow(clippy::panic)]
        Action::Panic => panic!("as the test asked"),
    }
}

/// Nothing, in a build without the feature.
#[cfg(not(feature = "failpoints"))]
pub fn reach(_name: &str, _subject: &[u8]) -> std::future::Ready<()> {
    std::future::ready(())
}
