//! The example consumers, each run as it is and put through the same script: applied once, whatever arrives.

use std::process::Stdio;
use std::sync::Arc;

use fencepost::edge::amqp::AmqpEdge;
use fencepost::edge::amqp::message::reply_queue;
use fencepost::edge::amqp::replies::parse;
use fencepost::edge::amqp::token::AckKey;
use fencepost::model::consumer::EdgeSpec;
use fencepost::model::key::Shard;
use fencepost::model::outcome::End;
use fencepost::model::token::Ack;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use super::{attempt, consumer, effect, opens};
use crate::support::PATIENCE;
use crate::support::broker::{self, Client, broker, fresh};
use crate::support::db::TestDb;
use crate::support::languages;

#[tokio::test]
async fn the_rust_consumer_survives_the_script() {
    script(&|| languages::rust("amqp_consumer")).await;
}

#[tokio::test]
async fn the_python_consumer_survives_the_script() {
    let python = languages::python().await;
    script(&|| {
        let mut command = Command::new(&python);
        command.arg(languages::repository("examples/consumers/amqp_consumer.py"));
        command
    })
    .await;
}

/// The consumer's queue, the queue it replies to, and the product's own edge that leads to it.
struct Scene {
    client: Client,
    edge: AmqpEdge,
    keys: Arc<AckKey>,
    replies: String,
}

impl Scene {
    /// Delivers and waits for the reply.
    async fn deliver(&self, key: &str, body: &'static str) -> Ack {
        self.send(key, body).await;
        self.word(key).await
    }

    async fn send(&self, key: &str, body: &'static str) {
        let mut effect = effect(key);
        effect.payload = body.into();
        assert_eq!(attempt(&self.edge, &effect).await.end, End::Confirmed);
    }

    async fn word(&self, key: &str) -> Ack {
        let (named, word) = self.reply().await;
        assert_eq!(named, key);
        word
    }

    async fn reply(&self) -> (String, Ack) {
        let reply = self.client.read(&self.replies, |read| read.len() == 1).await.remove(0);
        let reply = parse(&reply, &self.keys).expect("a reply of the contract's");
        assert_eq!(reply.consumer, "billing");
        (reply.key.to_string(), reply.word)
    }
}

async fn script(command: &dyn Fn() -> Command) {
    let (db, url) = (TestDb::empty().await, broker::url().await);
    let (queue, keys) = (fresh("example"), Arc::new(AckKey::new(fresh("x").replace('.', "-"), "secret".into())));
    let replies = reply_queue(keys.deployment(), Shard(0));
    let client = Client::new(url).await;
    client.queue(&queue, &[]).await;
    client.queue(&replies, &[]).await;
    let consumer = consumer(&format!("routing_key = '{queue}'\nack = 'required'"));
    let EdgeSpec::Amqp(spec) = &consumer.edge else { panic!("not an AMQP consumer") };
    let edge = AmqpEdge::new(&consumer, spec, &broker(url), &keys).expect("an edge");
    opens(&edge).await;
    let scene = Scene { client, edge, keys, replies };
    let mut running = consuming(command(), &db, url, &queue).await;

    for (key, body, ack) in [
        ("t:1", "a", Ack::Applied),
        ("t:1", "a", Ack::Duplicate),
        ("t:1", "b", Ack::Conflict),
        ("t:1:2", "a", Ack::Applied),
        ("t:5", "c", Ack::Applied),
        ("t:3", "d", Ack::Stale { current: 5 }),
        ("t:1", "a", Ack::Duplicate), // a late retry of something applied is not stale
        ("u:1", "", Ack::Applied),
    ] {
        assert_eq!(scene.deliver(key, body).await, ack, "{key} {body:?}");
    }

    // A database that refuses: no word, and nothing half done; it comes again by itself.
    let database = db.client().await;
    database.batch_execute("alter table payments add constraint closed check (key <> 'w:1')").await.unwrap();
    scene.send("w:1", "f").await;
    let refused = "select count(*) from pg_stat_database where datname = current_database() and xact_rollback > 0";
    crate::support::eventually("a refused transaction", async || {
        (database.query_one(refused, &[]).await.unwrap().get::<_, i64>(0) > 0).then_some(())
    })
    .await;
    database.batch_execute("alter table payments drop constraint closed").await.unwrap();
    assert_eq!(scene.word("w:1").await, Ack::Applied);

    // It dies with messages waiting; the next one finds them.
    running.kill().await.unwrap();
    scene.send("x:1", "g").await;
    let _next = consuming(command(), &db, url, &queue).await;
    let mut said = scene.reply().await;
    if said.0 == "w:1" {
        // It had replied and died before its ack reached the broker.
        assert_eq!(said.1, Ack::Duplicate);
        said = scene.reply().await;
    }
    assert_eq!(said, ("x:1".to_owned(), Ack::Applied));

    let rows = database.query("select key, body from payments order by key", &[]).await.unwrap();
    let made: Vec<(String, Vec<u8>)> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    let expected = [("t:1", "a"), ("t:1:2", "a"), ("t:5", "c"), ("u:1", ""), ("w:1", "f"), ("x:1", "g")];
    assert_eq!(made, expected.map(|(key, body)| (key.to_owned(), body.as_bytes().to_vec())));
}

async fn consuming(mut command: Command, db: &TestDb, url: &str, queue: &str) -> Child {
    command.env("DATABASE_URL", db.url()).env("AMQP_URL", url).env("QUEUE", queue);
    let mut child = command.stdout(Stdio::piped()).kill_on_drop(true).spawn().expect("the consumer starts");
    let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
    let first = tokio::time::timeout(PATIENCE, lines.next_line()).await.expect("in time").expect("a line");
    assert_eq!(first.as_deref(), Some(format!("consuming {queue}").as_str()));
    // Whoever reads nothing any more would make the consumer's next line fail.
    tokio::spawn(async move {
        while let Ok(Some(line)) = lines.next_line().await {
            eprintln!("consumer: {line}")
        }
    });
    child
}
