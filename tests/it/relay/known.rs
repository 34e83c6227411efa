//! Facts that come from elsewhere while a delivery is in hand: a consumer's late word, an operator's. The flight needs
//! nothing more of it, and closes at once; left to the reconciler it would be closed as `lost`.

use serde_json::json;
use tokio_postgres::Client;

use super::{Relay, declare, emit};
use crate::support::db::TestDb;
use crate::support::eventually;
use crate::support::receiver::Receiver;
use crate::support::script::{Gate, Script};

/// Says of the delivery with this payload how it ended.
async fn learn(client: &Client, payload: &str) {
    let sql = "insert into fencepost.ledger (effect_id, consumer_id, token, attempt)
               select id, 1, 'duplicate', 0 from fencepost.effects where payload = convert_to($1, 'UTF8')";
    assert_eq!(client.execute(sql, &[&payload]).await.expect("a fact"), 1);
}

async fn count(client: &Client, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.unwrap_or_else(|e| panic!("{sql}: {e}")).get(0)
}

/// Waits until the only flight with effects is closed, and gives how.
async fn closed(client: &Client) -> String {
    eventually("the flight closes", async || {
        let sql = "select token from fencepost.flights where first_id is not null";
        let rows = client.query(sql, &[]).await.expect("flights");
        assert!(rows.len() <= 1, "one flight is all there is");
        rows.first()?.get::<_, Option<String>>(0)
    })
    .await
}

#[tokio::test]
async fn a_flight_closes_over_an_attempt_that_was_not_started_because_its_end_was_known() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let receiver = Receiver::start().await;
    let gate = Gate::shut();
    // One at a time, each with a start row of its own.
    declare(&client, "c", &receiver, json!({"on_ambiguous": "hold", "concurrency": 1, "timeout": "14s"})).await;
    receiver.always(Script::answer(200).ack("applied").behind(&gate));
    let _relay = Relay::of(&db).start();
    emit(&client, &json!([{"consumer": "c", "payload_text": "first"}, {"consumer": "c", "payload_text": "second"}]))
        .await;
    receiver.wait_until(1).await;
    learn(&client, "second").await;
    gate.open();
    assert_eq!(closed(&client).await, "done");
    assert_eq!(receiver.requests().len(), 1, "what has ended is not sent");
    assert_eq!(count(&client, "select count(*) from fencepost.attempts where not ended").await, 1);
    assert_eq!(count(&client, "select count(*) from fencepost.parked").await, 0);

    // And the consumer is served as before.
    emit(&client, &json!([{"consumer": "c", "payload_text": "third"}])).await;
    receiver.wait_until(2).await;
}

#[tokio::test]
async fn a_flight_closes_over_a_delivery_that_needs_no_row_because_its_end_was_known() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let receiver = Receiver::start().await;
    let gate = Gate::shut();
    declare(&client, "c", &receiver, json!({"ordering": "key", "timeout": "14s"})).await;
    receiver.always(Script::answer(503).ack("not-applied").behind(&gate));
    let _relay = Relay::of(&db).start();
    emit(&client, &json!([{"consumer": "c", "payload_text": "first"}])).await;
    receiver.wait_until(1).await;
    learn(&client, "first").await;
    gate.open();
    assert_eq!(closed(&client).await, "done");
    assert_eq!(count(&client, "select count(*) from fencepost.parked").await, 0);
    assert_eq!(receiver.requests().len(), 1);
}
