//! A wall clock that is wrong: libfaketime, preloaded into a child process.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Variables that put a child's wall clock off by so many seconds. Its monotonic clock stays as it is.
///
/// Panics where libfaketime is neither installed nor can be: a test that needs it has not been run then.
pub fn off_by(seconds: i64) -> Vec<(&'static str, String)> {
    let library = library().or_else(|| {
        install();
        library()
    });
    let library = library.unwrap_or_else(|| {
        panic!("libfaketime is missing and could not be installed: sudo apt-get install -y faketime")
    });
    vec![
        ("LD_PRELOAD", library.to_string_lossy().into_owned()),
        ("FAKETIME", format!("{seconds:+}")),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1".into()),
        ("DONT_FAKE_MONOTONIC", "1".into()),
    ]
}

fn library() -> Option<PathBuf> {
    let folders = std::fs::read_dir("/usr/lib").into_iter().flatten().flatten().map(|entry| entry.path());
    let found = folders.chain(["/usr/lib".into(), "/usr/local/lib".into()]);
    found.map(|folder: PathBuf| folder.join("faketime/libfaketimeMT.so.1")).find(|path| path.is_file())
}

fn install() {
    if !Path::new("/usr/bin/apt-get").exists() {
        return;
    }
    let line = "apt-get install -q -y -o DPkg::Lock::Timeout=120 --no-install-recommends faketime || \
                { apt-get update -q && apt-get install -q -y -o DPkg::Lock::Timeout=120 --no-install-recommends faketime; }";
    // With `sudo -n` where we are not root; it asks nothing.
    let root = if std::fs::metadata("/proc/self").is_ok_and(|m| m.uid() == 0) { &["env"][..] } else { &["sudo", "-n"] };
    let _ = Command::new(root[0])
        .args(&root[1..])
        .args(["env", "DEBIAN_FRONTEND=noninteractive", "sh", "-c", &format!("{{ {line}; }} >&2")])
        .status();
}
