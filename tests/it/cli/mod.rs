//! The commands, each run as the real binary against a real database.

mod audit;
mod change;
mod consumers;
mod deliveries;
mod live;
mod parts;
mod run;
mod setup;
mod status;
mod story;

use serde_json::Value;

use crate::support::db::TestDb;
use crate::support::process;

/// Exit code, stdout, stderr of `fencepost ARGS` on this database, with a configuration of this text.
pub async fn fencepost(db: &TestDb, config: &str, args: &[&str]) -> (i32, String, String) {
    let folder = std::env::temp_dir().join(format!("{}.toml", db.name()));
    std::fs::write(&folder, config).expect("a configuration");
    let env = [("DATABASE_URL", db.url()), ("FENCEPOST_CONFIG", folder.to_str().expect("a path"))];
    let outcome = process::run(args, &env).await;
    std::fs::remove_file(folder).expect("the configuration goes");
    outcome
}

/// The same with `--json`, which must succeed with `code`.
pub async fn json(db: &TestDb, config: &str, code: i32, args: &[&str]) -> Value {
    let args: Vec<&str> = args.iter().copied().chain(["--json"]).collect();
    let (exit, out, err) = fencepost(db, config, &args).await;
    assert_eq!(exit, code, "{args:?}: {out}{err}");
    serde_json::from_str(&out).unwrap_or_else(|e| panic!("{args:?} printed no JSON ({e}): {out}"))
}

/// One HTTP consumer by this name.
pub fn http_consumer(name: &str) -> String {
    format!("[[consumers]]\nname = '{name}'\nkind = 'http'\nurl = 'http://127.0.0.1:1/x?token=hunter2'\n")
}

/// A database with HTTP consumers of these names.
pub async fn with_consumers(names: &[&str]) -> TestDb {
    let db = TestDb::new().await;
    let config: String = names.iter().map(|name| http_consumer(name)).collect();
    let (code, _, err) = fencepost(&db, &config, &["consumers", "apply", "--yes", "--reason", "test"]).await;
    assert_eq!(code, 0, "{err}");
    db
}

pub const NOTHING: &str = "";
