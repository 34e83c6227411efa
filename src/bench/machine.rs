//! Where a bench ran: figures without it say nothing.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::rig::Rig;
use super::{Error, Result};

#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    pub fencepost: &'static str,
    pub build: &'static str,
    pub cores: usize,
    pub processor: String,
    pub memory_gb: u64,
    pub kernel: String,
    pub postgres: String,
    /// How often a second this disk takes 8 kB and says that it has them.
    pub fsyncs: u64,
    /// Processes that wanted to run when the bench began, averaged over a minute.
    pub load: String,
}

impl Machine {
    pub async fn look(rig: &Rig) -> Result<Self> {
        let version = rig.admin().query_one("-- bench::version\nselect current_setting('server_version')", &[]).await?;
        let first = |path: &str, key: &str| {
            let text = fs::read_to_string(path).unwrap_or_default();
            text.lines()
                .find_map(|line| line.strip_prefix(key))
                .map(|rest| rest.trim_start_matches([' ', '\t', ':']).to_owned())
        };
        let memory = first("/proc/meminfo", "MemTotal").and_then(|text| text.split(' ').next()?.parse::<u64>().ok());
        Ok(Self {
            fencepost: env!("CARGO_PKG_VERSION"),
            build: if cfg!(debug_assertions) { "debug: figures mean nothing" } else { "release" },
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            processor: first("/proc/cpuinfo", "model name").unwrap_or_else(|| std::env::consts::ARCH.into()),
            memory_gb: memory.unwrap_or(0) / 1_000_000,
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().into(),
            postgres: version.get(0),
            fsyncs: fsyncs(&rig.folder)?,
            load: fs::read_to_string("/proc/loadavg").unwrap_or_default().split(' ').next().unwrap_or("?").into(),
        })
    }
}

impl std::fmt::Display for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "fencepost {} ({}), PostgreSQL {}, {} cores ({}), {} GB, Linux {}, {} fsyncs/s, load {}",
            self.fencepost,
            self.build,
            self.postgres,
            self.cores,
            self.processor,
            self.memory_gb,
            self.kernel,
            self.fsyncs,
            self.load
        )
    }
}

fn fsyncs(folder: &Path) -> Result<u64> {
    let path = folder.join("fsync");
    let what = || Error::io(format!("cannot write {}", path.display()));
    let mut file = File::create(&path).map_err(what())?;
    let (started, mut count) = (Instant::now(), 0);
    while started.elapsed() < Duration::from_millis(500) {
        file.write_all(&[0; 8_192]).and_then(|()| file.sync_data()).map_err(what())?;
        count += 1;
    }
    fs::remove_file(&path).map_err(what())?;
    Ok((f64::from(count) / started.elapsed().as_secs_f64()) as u64)
}
