//! A consumer that is dead, deaf or slow, and the seventeen beside it.

use std::collections::BTreeSet;

use serde_json::json;

use super::{count, counts, facts_of};
use crate::relay::{Relay, declare};
use crate::support::db::TestDb;
use crate::support::receiver::{OnAccept, Receiver};
use crate::support::script::Script;

const HEALTHY: usize = 17;
const EFFECTS: usize = 150;

#[tokio::test]
async fn dead_deaf_and_slow_consumers_delay_nobody_else() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (good, dead, deaf, slow) =
        (Receiver::start().await, Receiver::start().await, Receiver::start().await, Receiver::start().await);
    deaf.always(Script::stall());
    slow.always(Script::drip("HTTP/1.1 200 OK\r\n").then_stall());
    for (name, receiver) in [("dead", &dead), ("deaf", &deaf), ("slow", &slow)] {
        // Each attempt outlives the test: what is in flight there never comes back by itself.
        declare(&client, name, receiver, json!({"timeout": "14s", "concurrency": 2, "topics": []})).await;
    }
    for n in 0..HEALTHY {
        declare(&client, &format!("good-{n}"), &good, json!({"timeout": "14s"})).await;
    }
    // Connections to the dead one are refused.
    drop(dead);
    deaf.next_connection(OnAccept::Stall);
    let all = "select fencepost.subscribe('all', name) from fencepost.consumers";
    client.query(all, &[]).await.unwrap();
    let _relay = Relay::of(&db).start();
    let sql = "select fencepost.emit(jsonb_build_array(jsonb_build_object('topic', 'all', 'payload_text', n::text)))
               from generate_series(1, $1::int) n";
    client.query(sql, &[&(EFFECTS as i32)]).await.unwrap();

    let healthy = "select count(*) from fencepost.ledger join fencepost.consumers using (consumer_id)
                   where name like 'good-%' and token = 'applied'";
    counts(&client, healthy, (EFFECTS * HEALTHY) as i64).await;
    for name in ["dead", "deaf", "slow"] {
        assert_eq!(count(&client, &facts_of(name)).await, 0, "{name} has taken nothing, and everybody else is through");
    }
    assert!(deaf.connections() > 0 && !slow.requests().is_empty(), "they were really tried");
    let sent: BTreeSet<_> = good.requests().iter().map(|r| (r.header("outbox-consumer"), r.key())).collect();
    assert_eq!((sent.len(), good.requests().len()), (EFFECTS * HEALTHY, EFFECTS * HEALTHY), "each once");
}

#[tokio::test]
async fn what_one_does_not_answer_holds_no_memory_of_anothers() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (good, deaf) = (Receiver::start().await, Receiver::start().await);
    deaf.always(Script::stall());
    declare(&client, "deaf", &deaf, json!({"timeout": "14s", "concurrency": 2})).await;
    declare(&client, "good", &good, json!({})).await;
    // Every flight of ten holds one that nobody answers, and sixteen flights fill the relay.
    let sql = "select fencepost.emit(jsonb_build_array(jsonb_build_object(
                   'consumer', case when n % 10 = 0 then 'deaf' else 'good' end, 'payload_text', n::text)))
               from generate_series(1, 1000) n";
    client.query(sql, &[]).await.unwrap();
    let _relay = Relay::of(&db).set("relay.flight_deliveries", "10").set("relay.park_after", "10m").start();

    counts(&client, &facts_of("good"), 900).await;
    let left = "select (select count(*) from fencepost.parked) + (select count(*) from fencepost.lags)";
    assert_eq!(count(&client, left).await, 0, "all of the deaf one's is still in hand");
    assert_eq!((deaf.requests().len(), good.requests().len()), (2, 900));
}
