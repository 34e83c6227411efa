//! The example consumers, each run as it is and put through the same script: applied once, whatever arrives.

use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use fencepost::edge::sign::Secret;
use fencepost::inbox::{Inbox, Verdict};
use fencepost::model::token::Ack;
use secrecy::ExposeSecret;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use super::*;
use crate::support::db::TestDb;

#[tokio::test]
async fn the_rust_consumer_survives_the_script() {
    // target/<profile>/deps/it-... beside target/<profile>/examples/consumer, which `cargo test` builds as well.
    let this = std::env::current_exe().expect("a path");
    let example = this.ancestors().nth(2).expect("a target folder").join("examples/consumer");
    assert!(example.exists(), "{} is missing: cargo build --example consumer", example.display());
    script(Command::new(example)).await;
}

#[tokio::test]
async fn the_python_consumer_survives_the_script() {
    let venv = scratch("venv");
    let python = venv.join("bin/python");
    let requirements = consumers().join("requirements.txt");
    if !venv.join("ready").exists() {
        finish(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&venv)).await;
        finish(Command::new(&python).args(["-m", "pip", "install", "--quiet", "-r"]).arg(&requirements)).await;
        std::fs::write(venv.join("ready"), "").expect("a writable target folder");
    }
    let mut command = Command::new(python);
    command.arg(consumers().join("consumer.py"));
    script(command).await;
}

#[tokio::test]
async fn the_node_consumer_survives_the_script() {
    // Node looks for packages beside and above the file it runs: a copy of the tree's shape keeps the sources clean.
    let root = scratch("node");
    let folder = root.join("examples/consumers");
    std::fs::create_dir_all(&folder).expect("a writable target folder");
    std::fs::create_dir_all(root.join("src/inbox")).expect("a writable target folder");
    for file in [
        "examples/consumers/consumer.mjs",
        "examples/consumers/package.json",
        "examples/consumers/package-lock.json",
        "src/inbox/schema.sql",
    ] {
        std::fs::copy(Path::new(env!("CARGO_MANIFEST_DIR")).join(file), root.join(file)).expect(file);
    }
    if !folder.join("node_modules/pg").exists() {
        finish(Command::new("npm").args(["ci", "--silent", "--no-audit", "--no-fund"]).current_dir(&folder)).await;
    }
    let mut command = Command::new("node");
    command.arg(folder.join("consumer.mjs"));
    script(command).await;
}

/// The duplicate, stale and conflict script of contract section 4, over the product's own edge.
async fn script(command: Command) {
    let db = TestDb::empty().await;
    let secret = Secret::generate();
    let file = scratch(&format!("secret-{}", db.name()));
    std::fs::write(&file, secret.printed().expose_secret()).expect("a writable target folder");
    let (_consumer, address) = listening(command, &db, &secret).await;
    let signing = edge(&format!("http://{address}/"), &format!("secret_file = '{}'", file.display()));
    std::fs::remove_file(&file).expect("a file");

    for (key, body, status, ack) in [
        ("t:1", "a", 200, Ack::Applied),
        ("t:1", "a", 200, Ack::Duplicate),
        ("t:1", "b", 422, Ack::Conflict),
        ("t:1:2", "a", 200, Ack::Applied),
        ("t:5", "c", 200, Ack::Applied),
        ("t:3", "d", 412, Ack::Stale { current: 5 }),
        ("t:1", "a", 200, Ack::Duplicate), // a late retry of something applied is not stale
        ("t:5", "c", 200, Ack::Duplicate),
        ("u:1", "", 200, Ack::Applied),
    ] {
        let (got, word) = deliver(&signing, key, body).await;
        assert_eq!((got, word), (status, Some(ack)), "{key} {body:?}");
    }

    // The first one is still running.
    let mut client = db.client().await;
    let tx = client.transaction().await.expect("a transaction");
    let inbox = Inbox::new("inbox", "billing").expect("an inbox");
    assert_eq!(inbox.apply(&tx, &"v:1".parse().expect("a key"), b"e").await.expect("a verdict"), Verdict::Applied);
    assert_eq!(deliver(&signing, "v:1", "e").await, (409, Some(Ack::InProgress)));
    tx.rollback().await.expect("a rollback");
    assert_eq!(deliver(&signing, "v:1", "e").await, (200, Some(Ack::Applied)));

    // A database that refuses: no word, and nothing half done.
    client
        .batch_execute("alter table payments add constraint closed check (key <> 'w:1')")
        .await
        .expect("a constraint");
    assert_eq!(deliver(&signing, "w:1", "f").await, (503, None));
    client.batch_execute("alter table payments drop constraint closed").await.expect("no constraint");
    assert_eq!(deliver(&signing, "w:1", "f").await, (200, Some(Ack::Applied)));

    let unsigned = edge(&format!("http://{address}/"), "");
    assert_eq!(deliver(&unsigned, "x:1", "g").await, (401, None));

    let rows = client.query("select key, body from payments order by key", &[]).await.expect("payments");
    let made: Vec<(String, Vec<u8>)> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    let expected = [("t:1", "a"), ("t:1:2", "a"), ("t:5", "c"), ("u:1", ""), ("v:1", "e"), ("w:1", "f")];
    assert_eq!(made, expected.map(|(key, body)| (key.to_owned(), body.as_bytes().to_vec())));
}

async fn deliver(edge: &HttpEdge, key: &str, body: &'static str) -> (u16, Option<Ack>) {
    let mut effect = effect(body);
    effect.key = key.parse().expect("a key");
    let outcome = attempt(edge, &effect).await;
    match answered(&outcome) {
        (status, AckReading::Word { ack, .. }) => (status, Some(*ack)),
        (status, AckReading::Silent) => (status, None),
        other => panic!("{other:?}"),
    }
}

/// Starts a consumer on a free port; returns it with the address it printed.
async fn listening(mut command: Command, db: &TestDb, secret: &Secret) -> (Child, String) {
    command.env("DATABASE_URL", db.url()).env("PORT", "0").env("WEBHOOK_SECRET", secret.printed().expose_secret());
    let mut child = command.stdout(Stdio::piped()).kill_on_drop(true).spawn().expect("the consumer starts");
    let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
    let first = tokio::time::timeout(PATIENCE, lines.next_line()).await.expect("in time").expect("a line");
    let line = first.expect("the consumer says where it listens");
    let address = line.strip_prefix("listening on ").unwrap_or_else(|| panic!("{line}")).to_owned();
    // Whoever reads nothing any more would make the consumer's next line fail.
    tokio::spawn(async move {
        while let Ok(Some(line)) = lines.next_line().await {
            eprintln!("consumer: {line}")
        }
    });
    (child, address)
}

fn consumers() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/consumers")
}

/// A place under the target folder that outlives the run: packages are fetched once.
fn scratch(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("consumers");
    std::fs::create_dir_all(&folder).expect("a writable target folder");
    folder.join(name)
}

async fn finish(command: &mut Command) {
    let Output { status, stdout, stderr } = command.output().await.unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let said = [stdout, stderr].concat();
    assert!(status.success(), "{command:?}: {status}\n{}", String::from_utf8_lossy(&said));
}
