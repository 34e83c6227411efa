//! An effect that cannot be delivered, or that kills relays, harms nobody else.

use serde_json::json;

use super::{Relay, declare, emit, emit_many, tokens};
use crate::support::db::TestDb;
use crate::support::eventually;
use crate::support::receiver::Receiver;
use crate::support::script::Script;

#[tokio::test]
async fn a_consumer_that_fails_or_hangs_and_an_effect_that_always_fails_delay_nobody() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (good, failing, hanging) = (Receiver::start().await, Receiver::start().await, Receiver::start().await);
    declare(&client, "good", &good, json!({})).await;
    declare(&client, "ordered", &good, json!({"ordering": "key"})).await;
    declare(&client, "failing", &failing, json!({})).await;
    declare(&client, "hanging", &hanging, json!({"timeout": "60s", "concurrency": 4})).await;
    failing.always(Script::answer(500));
    hanging.always(Script::stall());
    let poison = emit(&client, &json!([{"consumer": "good", "payload_text": "poison"}])).await;
    good.on_key(&format!("{poison}:1"), Script::answer(500));
    let blocker =
        emit(&client, &json!([{"consumer": "ordered", "payload_text": "blocker", "ordering_key": "k"}])).await;
    good.on_key(&format!("{blocker}:1"), Script::answer(500));
    let _relay = Relay::of(&db).start();
    for round in 1..=4 {
        for (consumer, count) in [("failing", 30), ("hanging", 30), ("good", 30), ("ordered", 30)] {
            emit_many(&client, consumer, "x", count).await;
        }
        emit(&client, &json!([{"consumer": "ordered", "payload_text": "behind", "ordering_key": "k"}])).await;
        eventually("everybody else's are delivered", async || {
            (tokens(&client).await.get("applied") == Some(&(60 * round))).then_some(())
        })
        .await;
    }
    // While the bad ones were really tried, again and again, and only what is behind the blocker in its key waits.
    eventually("the bad effects are retried", async || {
        let sql = "select min(attempts) from fencepost.parked join fencepost.consumers using (consumer_id)
                   where name in ('good', 'ordered') and state <> 'blocked'";
        (client.query_one(sql, &[]).await.unwrap().get::<_, Option<i32>>(0) >= Some(3)).then_some(())
    })
    .await;
    assert!(failing.requests().len() >= 10);
    let tokens = tokens(&client).await;
    assert_eq!(tokens.get("blocked"), Some(&4), "{tokens:?}");
    assert!(good.requests().iter().all(|request| request.body != b"behind"));
    assert_eq!(hanging.requests().len(), 4);
}

#[tokio::test]
async fn effects_that_always_fail_do_not_hold_an_open_breaker_against_the_others() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let receiver = Receiver::start().await;
    declare(&client, "c", &receiver, json!({})).await;
    receiver.choose(|request| request.header("outbox-type").map(|_| Script::answer(500).into()));
    let mut relay = Relay::of(&db)
        .set("breaker.consecutive", "5")
        .set("breaker.probe", "400ms")
        .set("breaker.probe_max", "800ms")
        .set("relay.park_after", "300ms")
        .start();
    for _ in 0..20 {
        emit(&client, &json!([{"consumer": "c", "payload_text": "x", "type": "poison"}])).await;
    }
    relay.says("its breaker opens").await;
    for round in 1..=3 {
        // While nothing but poison is there, it is open or opens again.
        eventually("the breaker is open", async || {
            let said = |word: &str| relay.log().matches(word).count();
            (said("its breaker opens") > said("its breaker closes")).then_some(())
        })
        .await;
        emit_many(&client, "c", "good", 20).await;
        eventually("the others are delivered", async || {
            (tokens(&client).await.get("applied") == Some(&(20 * round))).then_some(())
        })
        .await;
    }
}

#[cfg(feature = "failpoints")]
#[tokio::test]
async fn a_payload_that_kills_relays_is_dead_after_three_deaths_and_all_others_are_delivered() {
    use fencepost::demo::embedded::guardian::Signal;

    let db = TestDb::new().await;
    let client = db.client().await;
    let receiver = Receiver::start().await;
    declare(&client, "c", &receiver, json!({})).await;
    emit_many(&client, "c", "harmless", 40).await;
    let poison = emit(&client, &json!([{"consumer": "c", "payload_text": "a poisonous payload"}])).await;
    emit_many(&client, "c", "harmless", 40).await;
    let relay = Relay::of(&db)
        .set("relay.shard_lease", "600ms")
        .set("relay.renew_every", "150ms")
        .env("FENCEPOST_FAIL", "attempt_started=abort:poisonous");
    let mut deaths = 0;
    let mut running = relay.start();
    loop {
        // Until it dies, or nothing waits any more.
        let died = eventually("a death, or the end of all work", async || {
            if running.has_ended() {
                return Some(true);
            }
            let tokens = tokens(&client).await;
            (tokens.get("applied") == Some(&80) && tokens.get("dead") == Some(&1)).then_some(false)
        })
        .await;
        if !died {
            break;
        }
        deaths += 1;
        assert!(deaths <= 5, "it kills on and on: {:?}", tokens(&client).await);
        running = relay.start();
    }
    // The first death is the flight's, which says nothing about a single delivery; three are its own.
    assert_eq!(deaths, 4);
    let sql = "select p.deaths, e.task_id from fencepost.parked p join fencepost.effects e on e.id = p.effect_id";
    let row = client.query_one(sql, &[]).await.unwrap();
    assert_eq!((row.get::<_, i32>(0), row.get::<_, String>(1)), (3, poison));
    assert!(receiver.requests().iter().all(|request| request.body != b"a poisonous payload"));
    let alarm = "select 1 from fencepost.alarms where name = 'poison' and resolved_at is null";
    assert!(client.query_opt(alarm, &[]).await.unwrap().is_some());
    super::all_landed(&client).await;
    running.signal(Signal::Term);
    assert!(running.ended().await.success());
}

#[cfg(feature = "failpoints")]
#[tokio::test]
async fn what_a_lost_flight_had_scheduled_for_later_waits_for_its_time() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let receiver = Receiver::start().await;
    declare(&client, "c", &receiver, json!({})).await;
    let relay = Relay::of(&db).short_leases();
    emit(&client, &json!([{"consumer": "c", "payload_text": "later", "deliver_in": "1 hour"}])).await;
    let mut dying = relay.clone().env("FENCEPOST_FAIL", "settle=abort").start();
    dying.ended().await;
    let open = "select count(*) from fencepost.flights where token is null";
    assert_eq!(
        client.query_one(open, &[]).await.unwrap().get::<_, i64>(0),
        1,
        "it died between flight and parking lot"
    );
    let _relay = relay.start();
    super::all_landed(&client).await;
    let row = client
        .query_one("select token, attempts, next_attempt_at > clock_timestamp() + interval '50 minutes' from fencepost.deliveries", &[])
        .await
        .unwrap();
    let found: (String, i32, bool) = (row.get(0), row.get(1), row.get(2));
    assert_eq!(found, ("scheduled".into(), 0, true));
    emit_many(&client, "c", "now", 5).await;
    receiver.wait_until(5).await;
    assert!(receiver.requests().iter().all(|request| request.body != b"later"));
}

#[cfg(feature = "failpoints")]
#[tokio::test]
async fn an_attempt_that_breaks_within_the_relay_ends_with_a_token_and_harms_no_other() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let receiver = Receiver::start().await;
    declare(&client, "c", &receiver, json!({"concurrency": 2, "ordering": "key"})).await;
    for n in 0..3 {
        let effects = json!([{"consumer": "c", "payload_text": format!("unlucky {n}"), "ordering_key": "k"}]);
        emit(&client, &effects).await;
    }
    let mut breaking = Relay::of(&db).env("FENCEPOST_FAIL", "sending=panic:unlucky 0").start();
    emit_many(&client, "c", "harmless", 10).await;
    // More of them than places, or a place lost would not be noticed.
    eventually("the broken attempts have ended, and the others are delivered", async || {
        let sql = "select count(*) from fencepost.attempts where ended and token = 'ambiguous' and error like '%failed within%'";
        let broken: i64 = client.query_one(sql, &[]).await.unwrap().get(0);
        (broken >= 3 && tokens(&client).await.get("applied") == Some(&10)).then_some(())
    })
    .await;
    breaking.kill().await;
    let _mended = Relay::of(&db).start();
    super::all_settled(&client, 13).await;
    let order: Vec<_> =
        receiver.requests().into_iter().filter(|request| request.body.starts_with(b"unlucky")).collect();
    let bodies: Vec<_> = order.iter().map(|request| String::from_utf8_lossy(&request.body).into_owned()).collect();
    assert_eq!(bodies, ["unlucky 0", "unlucky 1", "unlucky 2"], "in their key's order");
}
