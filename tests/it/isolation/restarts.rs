//! Relays that are told to stop: their shards pass on at once, and nothing of a rolling restart is felt outside.

use std::collections::HashMap;

use fencepost::demo::embedded::guardian::Signal;
use serde_json::json;

use super::counts;
use crate::relay::{Relay, declare, emit_many, sent};
use crate::support::PATIENCE;
use crate::support::db::TestDb;
use crate::support::postgres_proxy::PostgresProxy;
use crate::support::receiver::Receiver;

const HELD_BY: &str = "select count(*) from fencepost.shards join fencepost.relays using (relay) where name = ";

#[tokio::test]
async fn a_relay_told_to_stop_hands_its_shards_over_long_before_its_lease_ends() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // Nobody could wait for such a lease here.
    let relay = Relay::of(&db).set("relay.shard_lease", "600s").set("relay.renew_every", "1s");
    assert!(PATIENCE.as_secs() < 600);
    let mut leaving = relay.clone().set("relay.name", "leaving").start();
    counts(&client, &format!("{HELD_BY}'leaving'"), 8).await;
    let _staying = relay.set("relay.name", "staying").start();
    counts(&client, &format!("{HELD_BY}'leaving'"), 4).await;
    counts(&client, &format!("{HELD_BY}'staying'"), 4).await;
    leaving.signal(Signal::Term);
    counts(&client, &format!("{HELD_BY}'staying'"), 8).await;
    assert!(leaving.ended().await.success());
}

#[tokio::test]
async fn a_rolling_restart_of_three_relays_loses_nothing_and_sends_nothing_twice() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let receiver = Receiver::start().await;
    declare(&client, "c", &receiver, json!({"ordering": "key"})).await;
    let relay = Relay::of(&db).set("relay.shard_lease", "600s").set("relay.renew_every", "500ms");
    let start = |name: String| relay.clone().set("relay.name", &name).start();
    let mut relays: Vec<_> = (0..3).map(|n| start(format!("old-{n}"))).collect();
    counts(&client, "select count(distinct relay) from fencepost.shards", 3).await;
    let mut keys = Vec::new();
    for (n, relay) in relays.iter_mut().enumerate() {
        keys.extend(emit_many(&client, "c", "before", 200).await);
        relay.signal(Signal::Term);
        keys.extend(emit_many(&client, "c", "during", 200).await);
        assert!(relay.ended().await.success());
        *relay = start(format!("new-{n}"));
        counts(&client, &format!("{HELD_BY}'old-{n}'"), 0).await;
        keys.extend(emit_many(&client, "c", "after", 200).await);
    }
    counts(&client, "select count(*) from fencepost.ledger where token = 'applied'", keys.len() as i64).await;
    let sent = sent(&receiver.requests());
    let wanted: HashMap<_, _> = keys.into_iter().map(|key| (("c".to_owned(), key), 1)).collect();
    assert_eq!(sent, wanted);
}

#[tokio::test]
async fn a_relay_whose_database_goes_away_while_it_starts_waits_for_it() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let receiver = Receiver::start().await;
    declare(&client, "first-thing-it-reads", &receiver, json!({})).await;
    let (proxy, url) = PostgresProxy::before_postgres(db.url()).await;
    proxy.swallow(b"first-thing-it-reads");
    let mut relay = Relay::at(&url).start();
    relay.says("the database went away before the relay began").await;
    assert_eq!(proxy.cuts(), 1);
    emit_many(&client, "first-thing-it-reads", "x", 10).await;
    counts(&client, "select count(*) from fencepost.ledger where token = 'applied'", 10).await;
}
