//! What happened in a run, as JSON lines. Written at once, so that a run that is killed leaves its history.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use serde_json::{Value, json};

/// The folder of a run and its diary of faults.
pub struct History {
    folder: PathBuf,
    started: Instant,
    diary: Lines,
    order: AtomicU64,
}

/// A file of JSON lines.
pub struct Lines(Mutex<File>);

impl History {
    /// An empty folder `target/campaign/<name>`.
    pub fn new(name: &str) -> anyhow::Result<Self> {
        let target = Path::new(env!("CARGO_BIN_EXE_fencepost")).ancestors().nth(2).context("a target folder")?;
        let folder = target.join("campaign").join(name);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        // Whatever is built meanwhile: all runs of this process are of one program.
        let kept = target.join("campaign").join(format!("program-{}", std::process::id()));
        if !kept.exists() {
            fs::hard_link(env!("CARGO_BIN_EXE_fencepost"), &kept).context("cannot link the program")?;
        }
        fs::hard_link(&kept, folder.join("fencepost")).context("cannot link the program")?;
        let diary = Lines::create(&folder.join("history.jsonl"))?;
        Ok(Self { folder, started: Instant::now(), diary, order: AtomicU64::new(0) })
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The program under test.
    pub fn program(&self) -> PathBuf {
        self.folder.join("fencepost")
    }

    pub fn lines(&self, name: &str) -> anyhow::Result<Lines> {
        Lines::create(&self.folder.join(name))
    }

    pub fn note(&self, what: &str, detail: Value) {
        let at = self.started.elapsed().as_millis();
        self.diary.write(&json!({ "ms": at, "what": what, "detail": detail }));
    }

    /// A number larger than any given before: what happened earlier has a smaller one.
    pub fn tick(&self) -> u64 {
        self.order.fetch_add(1, Ordering::SeqCst) + 1
    }
}

/// Removes what [`History::new`] keeps for the runs of this process.
pub fn forget_program() {
    let target = Path::new(env!("CARGO_BIN_EXE_fencepost")).ancestors().nth(2).map(|target| target.join("campaign"));
    if let Some(folder) = target {
        let _ = fs::remove_file(folder.join(format!("program-{}", std::process::id())));
    }
}

impl Drop for History {
    fn drop(&mut self) {
        let _ = fs::remove_file(self.program());
    }
}

impl Lines {
    fn create(path: &Path) -> anyhow::Result<Self> {
        Ok(Self(Mutex::new(File::create(path).with_context(|| format!("cannot make {}", path.display()))?)))
    }

    pub fn write(&self, value: &Value) {
        let mut file = self.0.lock().expect("no holder panics");
        writeln!(file, "{value}").expect("the history can be written");
    }
}

/// Microseconds since 1970: databases and consumers of a run share this machine's clock.
#[allow(clippy::disallowed_methods)]
pub fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock after 1970");
    i64::try_from(since.as_micros()).expect("before the year 294247")
}
