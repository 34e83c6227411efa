//! Python and Node for the examples, with the packages these name. What is fetched stays under the target folder: once
//! for all tests and all runs.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Output;

use tokio::process::Command;

/// A file of the repository.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The interpreter of a virtual environment that has what `examples/consumers/requirements.txt` names.
pub async fn python() -> PathBuf {
    let _alone = alone("venv");
    let venv = scratch("venv");
    let python = venv.join("bin/python");
    let requirements = repository("examples/consumers/requirements.txt");
    let wanted = fs::read(&requirements).expect("a file of the repository");
    if fs::read(venv.join("ready")).ok().as_ref() != Some(&wanted) {
        finish(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv)).await;
        finish(Command::new(&python).args(["-m", "pip", "install", "--quiet", "-r"]).arg(&requirements)).await;
        fs::write(venv.join("ready"), wanted).expect("a writable target folder");
    }
    python
}

/// `node SCRIPT` for a script of the repository that has a package.json beside it, and needs these other files of it.
pub async fn node(script: &str, others: &[&str]) -> Command {
    let _alone = alone("node");
    // Node looks for packages beside and above the file it runs: a copy of the tree's shape keeps the sources clean.
    let root = scratch("node");
    let folder = Path::new(script).parent().expect("a script in a folder");
    let files = ["package.json", "package-lock.json"].map(|name| folder.join(name));
    for file in files.iter().map(PathBuf::as_path).chain([Path::new(script)]).chain(others.iter().map(Path::new)) {
        let copy = root.join(file);
        fs::create_dir_all(copy.parent().expect("a folder")).expect("a writable target folder");
        fs::copy(repository(file.to_str().expect("a plain name")), copy).expect("a file of the repository");
    }
    if !root.join(folder).join("node_modules/pg").exists() {
        let npm = ["ci", "--silent", "--no-audit", "--no-fund"];
        finish(Command::new("npm").args(npm).current_dir(root.join(folder))).await;
    }
    let mut command = Command::new("node");
    command.arg(root.join(script));
    command
}

/// An example in Rust, which `cargo test` builds beside the tests.
pub fn rust(name: &str) -> Command {
    // target/<profile>/deps/it-... beside target/<profile>/examples/<name>
    let this = std::env::current_exe().expect("a path");
    let example = this.ancestors().nth(2).expect("a target folder").join("examples").join(name);
    assert!(example.exists(), "{} is missing: cargo build --example {name}", example.display());
    Command::new(example)
}

/// A place under the target folder that outlives the run.
pub fn scratch(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("examples");
    fs::create_dir_all(&folder).expect("a writable target folder");
    folder.join(name)
}

/// Tests run side by side, in one process or in many: one of them fetches, the others wait.
fn alone(what: &str) -> File {
    let lock = File::create(scratch(&format!("{what}.lock"))).expect("a writable target folder");
    lock.lock().expect("a lock");
    lock
}

/// Runs a command to its end; it must succeed.
pub async fn finish(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().await.unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let said = String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned();
    assert!(status.success(), "{command:?}: {status}\n{said}");
    said
}
