//! The example consumers, each run as it is and put through the same script: applied once, whatever arrives.

use std::process::Stdio;

use fencepost::edge::sign::Secret;
use fencepost::inbox::{Inbox, Verdict};
use fencepost::model::token::Ack;
use secrecy::ExposeSecret;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use super::*;
use crate::support::db::TestDb;
use crate::support::languages;

#[tokio::test]
async fn the_rust_consumer_survives_the_script() {
    script(languages::rust("consumer")).await;
}

#[tokio::test]
async fn the_python_consumer_survives_the_script() {
    let mut command = Command::new(languages::python().await);
    command.arg(languages::repository("examples/consumers/consumer.py"));
    script(command).await;
}

#[tokio::test]
async fn the_node_consumer_survives_the_script() {
    script(languages::node("examples/consumers/consumer.mjs", &["src/inbox/schema.sql"]).await).await;
}

/// The duplicate, stale and conflict script of contract section 4, over the product's own edge.
async fn script(command: Command) {
    let db = TestDb::empty().await;
    let secret = Secret::generate();
    let file = languages::scratch(&format!("secret-{}", db.name()));
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
