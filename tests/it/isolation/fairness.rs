//! First tries and retries of one consumer.

use serde_json::json;

use super::{count, counts};
use crate::relay::{Relay, declare, emit_many};
use crate::support::db::TestDb;
use crate::support::eventually;
use crate::support::receiver::Receiver;
use crate::support::script::Script;

const FAILING: usize = 120;
const FRESH: usize = 200;

#[tokio::test]
async fn retries_without_end_do_not_starve_first_tries() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let receiver = Receiver::start().await;
    declare(&client, "c", &receiver, json!({"concurrency": 4, "timeout": "14s"})).await;
    // The consumer works; these effects it cannot apply yet. Each is due again at once.
    receiver.choose(|request| request.header("outbox-type").map(|_| Script::answer(503).ack("not-applied").into()));
    let _relay = Relay::of(&db).set("retry.base", "10ms").set("retry.cap", "20ms").start();
    let failing = "select fencepost.emit('[{\"consumer\": \"c\", \"type\": \"failing\", \"payload\": {}}]')
                   from generate_series(1, $1::int)";
    client.query(failing, &[&(FAILING as i32)]).await.unwrap();
    eventually("all of them are retried", async || {
        let sql = "select count(*) from fencepost.parked where attempts >= 2";
        (count(&client, sql).await == FAILING as i64).then_some(())
    })
    .await;
    let before = receiver.requests().len();
    emit_many(&client, "c", "fresh", FRESH).await;
    counts(&client, "select count(*) from fencepost.ledger where token = 'applied'", FRESH as i64).await;
    // Every fresh one went at its first try, and the retries went on beside them.
    assert_eq!(count(&client, "select count(*) from fencepost.ledger where attempt > 1").await, 0);
    assert_eq!(count(&client, "select count(*) from fencepost.parked").await, FAILING as i64);
    eventually("retries have a share of their own", async || {
        let retries = receiver.requests()[before..].iter().filter(|request| request.attempt() > 1).count();
        (retries > FRESH / 10).then_some(())
    })
    .await;
}
