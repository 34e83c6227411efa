//! The consumer kit, in a consumer's own database.

use fencepost::inbox::{Inbox, Verdict};
use fencepost::model::key::EffectKey;
use tokio_postgres::Client;

use crate::support::db::TestDb;

fn key(text: &str) -> EffectKey {
    text.parse().unwrap()
}

/// Decides about one delivery and makes its effect, as a consumer does.
async fn deliver(inbox: &Inbox, client: &mut Client, key_text: &str, body: &str) -> Verdict {
    let tx = client.transaction().await.unwrap();
    let verdict = inbox.apply(&tx, &key(key_text), body.as_bytes()).await.unwrap();
    if verdict == Verdict::Applied {
        tx.execute("insert into public.made (key) values ($1)", &[&key_text]).await.unwrap();
    }
    tx.commit().await.unwrap();
    verdict
}

async fn consumer() -> (TestDb, Client, Inbox) {
    let db = TestDb::empty().await;
    let client = db.client().await;
    client.batch_execute("create table public.made (key text)").await.unwrap();
    let inbox = Inbox::new("inbox", "orders").unwrap();
    inbox.install(&client).await.unwrap();
    (db, client, inbox)
}

async fn made(client: &Client) -> Vec<String> {
    let rows = client.query("select key from public.made order by key", &[]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

#[tokio::test]
async fn the_key_is_checked_before_the_epoch() {
    let (_db, mut client, inbox) = consumer().await;
    assert_eq!(deliver(&inbox, &mut client, "t:1", "a").await, Verdict::Applied);
    assert_eq!(deliver(&inbox, &mut client, "t:1:2", "b").await, Verdict::Applied, "same epoch, another effect");
    assert_eq!(deliver(&inbox, &mut client, "t:5", "c").await, Verdict::Applied);
    assert_eq!(deliver(&inbox, &mut client, "t:1", "a").await, Verdict::Duplicate, "not stale: it was applied");
    assert_eq!(deliver(&inbox, &mut client, "t:3", "d").await, Verdict::Stale { current: 5 });
    assert_eq!(deliver(&inbox, &mut client, "t:3", "d").await, Verdict::Stale { current: 5 });
    assert_eq!(deliver(&inbox, &mut client, "t:5", "other").await, Verdict::Conflict);
    assert_eq!(deliver(&inbox, &mut client, "u:1", "a").await, Verdict::Applied, "another task");
    let elsewhere = Inbox::new("inbox", "invoices").unwrap();
    assert_eq!(deliver(&elsewhere, &mut client, "t:1", "a").await, Verdict::Applied, "another scope");
    assert_eq!(made(&client).await, ["t:1", "t:1", "t:1:2", "t:5", "u:1"]);
}

#[tokio::test]
async fn what_rolls_back_was_never_applied() {
    let (_db, mut client, inbox) = consumer().await;
    let tx = client.transaction().await.unwrap();
    assert_eq!(inbox.apply(&tx, &key("t:7"), b"a").await.unwrap(), Verdict::Applied);
    tx.rollback().await.unwrap();
    assert_eq!(deliver(&inbox, &mut client, "t:2", "b").await, Verdict::Applied, "epoch 7 left no trace");
    assert_eq!(deliver(&inbox, &mut client, "t:7", "a").await, Verdict::Applied);
}

#[tokio::test]
async fn a_second_delivery_of_a_key_is_told_that_the_first_still_runs() {
    let (db, mut first, inbox) = consumer().await;
    let mut second = db.client().await;
    let tx = first.transaction().await.unwrap();
    assert_eq!(inbox.apply(&tx, &key("t:1"), b"a").await.unwrap(), Verdict::Applied);
    assert_eq!(deliver(&inbox, &mut second, "t:1", "a").await, Verdict::InProgress);
    tx.commit().await.unwrap();
    assert_eq!(deliver(&inbox, &mut second, "t:1", "a").await, Verdict::Duplicate);
}

#[tokio::test]
async fn an_old_epoch_waits_for_the_newer_one_and_is_stale() {
    let (db, mut first, inbox) = consumer().await;
    let mut second = db.client().await;
    let watcher = db.client().await;
    let tx = first.transaction().await.unwrap();
    assert_eq!(inbox.apply(&tx, &key("t:2"), b"a").await.unwrap(), Verdict::Applied);
    let old = deliver(&inbox, &mut second, "t:1", "b");
    let commit = async {
        let blocked =
            "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()";
        crate::support::eventually("the old epoch waits", async || {
            (watcher.query_one(blocked, &[]).await.unwrap().get::<_, i64>(0) == 1).then_some(())
        })
        .await;
        tx.commit().await.unwrap();
    };
    let (verdict, ()) = tokio::join!(old, commit);
    assert_eq!(verdict, Verdict::Stale { current: 2 });
}

#[tokio::test]
async fn a_storm_of_redeliveries_makes_each_effect_once() {
    let (db, client, inbox) = consumer().await;
    let mut senders = Vec::new();
    for _ in 0..8 {
        let (mut client, inbox) = (db.client().await, inbox.clone());
        senders.push(tokio::spawn(async move {
            for n in 0..40 {
                // Until the consumer has said so, as the relay does.
                while deliver(&inbox, &mut client, &format!("t-{n}:1"), "a").await == Verdict::InProgress {}
            }
        }));
    }
    for sender in senders {
        sender.await.unwrap();
    }
    let made = made(&client).await;
    assert_eq!(made.len(), 40);
}

#[tokio::test]
async fn pruning_keeps_to_what_was_promised() {
    let (_db, mut client, inbox) = consumer().await;
    let inbox = inbox.retaining(std::time::Duration::from_secs(3600));
    let _ = deliver(&inbox, &mut client, "old:1", "a").await;
    let _ = deliver(&inbox, &mut client, "new:1", "a").await;
    let age = "update inbox.keys set applied_at = applied_at - interval '2 hours' where key = 'old:1'";
    client.batch_execute(age).await.unwrap();
    assert_eq!(inbox.prune(&client).await.unwrap(), 1);
    assert_eq!(deliver(&inbox, &mut client, "new:1", "a").await, Verdict::Duplicate);
    assert_eq!(deliver(&inbox, &mut client, "old:1", "a").await, Verdict::Applied, "forgotten, as was promised");
    let answer = inbox.answer(Verdict::Applied, &key("old:1"));
    assert_eq!(answer.outbox_ack, "applied; key=\"old:1\"; retain=3600");
}

#[tokio::test]
async fn ten_replicas_install_at_once() {
    let db = TestDb::empty().await;
    let inbox = Inbox::new("inbox", "orders").unwrap();
    let mut replicas = Vec::new();
    for _ in 0..10 {
        let (client, inbox) = (db.client().await, inbox.clone());
        replicas.push(tokio::spawn(async move { inbox.install(&client).await }));
    }
    for replica in replicas {
        replica.await.unwrap().unwrap();
    }
}
