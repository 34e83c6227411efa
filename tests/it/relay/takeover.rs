//! One relay works on a shard; when it is gone another takes over, and what comes of the old one later harms nothing.

use std::collections::HashMap;

use fencepost::demo::embedded::guardian::Signal;
use serde_json::json;
use tokio_postgres::Client;

use super::{Relay, all_landed, all_settled, declare, emit_many};
use crate::support::db::TestDb;
use crate::support::eventually;
use crate::support::process::Process;
use crate::support::receiver::Receiver;
use crate::support::script::{Gate, Script};

/// Two relays that share the shards. The first is named `first`.
async fn two_relays(client: &Client, relay: &Relay) -> (Process, Process) {
    let mut first = relay.clone().set("relay.name", "first").start();
    first.says("shard taken").await;
    let second = relay.clone().set("relay.name", "second").start();
    eventually("they share", async || {
        let sql = "select 1 from fencepost.shards where lease_expires_at > clock_timestamp() having count(distinct relay) = 2 and count(*) = 8";
        client.query_opt(sql, &[]).await.unwrap().map(drop)
    })
    .await;
    (first, second)
}

/// How many shards the relay of this name holds.
async fn held_by(client: &Client, name: &str) -> i64 {
    let sql = "select count(*) from fencepost.shards join fencepost.relays using (relay) where name = $1";
    client.query_one(sql, &[&name]).await.unwrap().get(0)
}

/// No flight was opened under an epoch whose fence was already there.
async fn nothing_slipped_in(client: &Client) {
    let sql = "select count(*) from fencepost.flights f join fencepost.flights fence
               on fence.shard = f.shard and fence.token = 'fence' and fence.epoch > f.epoch and f.seq > fence.seq";
    assert_eq!(client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0), 0);
}

fn per_key(receiver: &Receiver) -> HashMap<String, Vec<u32>> {
    let mut sent: HashMap<String, Vec<u32>> = HashMap::new();
    for request in receiver.requests() {
        sent.entry(request.key()).or_default().push(request.attempt());
    }
    sent
}

#[tokio::test]
async fn after_a_kill_another_relay_sends_again_what_was_out() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let receiver = Receiver::start().await;
    declare(&client, "c", &receiver, json!({"timeout": "60s", "concurrency": 64})).await;
    let relay = Relay::of(&db).short_leases();
    let (mut first, _second) = two_relays(&client, &relay).await;
    let gate = Gate::shut();
    receiver.always(Script::answer(200).ack("applied").behind(&gate));
    emit_many(&client, "c", "x", 40).await;
    receiver.wait_until(40).await;
    assert!(held_by(&client, "first").await > 0);
    first.kill().await;
    gate.open();

    let tokens = all_settled(&client, 40).await;
    assert_eq!(tokens["applied"], 40);
    all_landed(&client).await;
    let twice: HashMap<String, Vec<u32>> = per_key(&receiver).into_iter().filter(|(_, sent)| sent.len() > 1).collect();
    assert!(!twice.is_empty() && twice.len() < 40, "only what the first relay had out was sent again");
    assert!(twice.values().all(|sent| *sent == [1, 2]), "{twice:?}");
    let lost = "select count(*) from fencepost.attempts where token = 'lost'";
    assert_eq!(client.query_one(lost, &[]).await.unwrap().get::<_, i64>(0), twice.len() as i64);
    let lost = "select count(*) from fencepost.flights f join fencepost.relays r using (relay) where f.token = 'lost' and r.name = 'first'";
    assert!(client.query_one(lost, &[]).await.unwrap().get::<_, i64>(0) > 0);
    nothing_slipped_in(&client).await;

    let keys = emit_many(&client, "c", "y", 40).await;
    all_settled(&client, 80).await;
    assert_eq!(held_by(&client, "second").await, 8);
    assert!(keys.iter().all(|key| receiver.requests_for(key).len() == 1));
}

#[tokio::test]
async fn a_relay_stopped_past_its_lease_sends_nothing_more_and_its_late_facts_are_kept() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let receiver = Receiver::start().await;
    declare(&client, "c", &receiver, json!({"timeout": "60s", "concurrency": 2})).await;
    let relay = Relay::of(&db).short_leases();
    let (mut first, _second) = two_relays(&client, &relay).await;
    let gate = Gate::shut();
    let behind = gate.clone();
    receiver.choose(move |request| match request.attempt() {
        1 => Some(Script::answer(200).ack("applied").behind(&behind)),
        _ => Some(Script::answer(200).ack("duplicate").into()),
    });
    // Two are out at each relay, the others wait in its lanes.
    emit_many(&client, "c", "x", 60).await;
    receiver.wait_until(4).await;
    let first_id: uuid::Uuid =
        client.query_one("select relay from fencepost.relays where name = 'first'", &[]).await.unwrap().get(0);
    first.signal(Signal::Stop);
    gate.open();
    all_settled(&client, 60).await;
    all_landed(&client).await;
    assert_eq!(held_by(&client, "second").await, 8, "the second took over");
    let before = per_key(&receiver);

    first.signal(Signal::Continue);
    first.says("lease was lost").await;
    // Its two answers came while it was stopped: they are facts, whoever owns the shard now.
    let facts = "select e.task_id || ':1' from fencepost.effects e join fencepost.ledger a on a.effect_id = e.id and a.token = 'applied'
                 join fencepost.ledger d on d.effect_id = e.id and d.token = 'duplicate'";
    let late: Vec<String> = eventually("the late facts", async || {
        let rows = client.query(facts, &[]).await.unwrap();
        (rows.len() == 2).then(|| rows.iter().map(|row| row.get(0)).collect())
    })
    .await;
    assert!(late.iter().all(|key| before[key] == [1, 2]));
    let sql = "select count(*) from fencepost.deliveries where token = 'applied' and key = any($1)";
    let view = client.query_one(sql, &[&late]).await.unwrap();
    assert_eq!(view.get::<_, i64>(0), 2, "the stronger fact decides");

    // It works again under new epochs, beside the second; under the old ones it sent and opened nothing.
    eventually("it has a share again", async || (held_by(&client, "first").await > 0).then_some(())).await;
    let keys = emit_many(&client, "c", "y", 40).await;
    all_settled(&client, 100).await;
    let after = per_key(&receiver);
    assert!(before.iter().all(|(key, sent)| after[key] == *sent), "the resumed relay sent something");
    assert!(keys.iter().all(|key| after[key] == [1]));
    nothing_slipped_in(&client).await;
    let opened = "select count(*) from fencepost.flights where relay = $1 and deliveries > 0";
    assert!(client.query_one(opened, &[&first_id]).await.unwrap().get::<_, i64>(0) > 0);
}

#[tokio::test]
async fn a_relay_alone_takes_its_own_shards_again_after_a_pause() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let receiver = Receiver::start().await;
    declare(&client, "c", &receiver, json!({"timeout": "60s", "concurrency": 2, "ordering": "key"})).await;
    let relay = Relay::of(&db).short_leases().set("relay.name", "only").start();
    eventually("it holds every shard", async || (held_by(&client, "only").await == 8).then_some(())).await;
    let gate = Gate::shut();
    receiver.always(Script::answer(200).ack("applied").behind(&gate));
    emit_many(&client, "c", "x", 40).await;
    receiver.wait_until(2).await;
    relay.signal(Signal::Stop);
    eventually("every lease has run out", async || {
        let sql = "select 1 from fencepost.shards where lease_expires_at < clock_timestamp() having count(*) = 8";
        client.query_opt(sql, &[]).await.unwrap().map(drop)
    })
    .await;
    relay.signal(Signal::Continue);
    gate.open();
    all_settled(&client, 40).await;
    all_landed(&client).await;
    emit_many(&client, "c", "y", 40).await;
    all_settled(&client, 80).await;
    assert!(per_key(&receiver).values().all(|sent| sent.len() <= 2));
}
