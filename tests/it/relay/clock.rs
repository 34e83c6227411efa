//! The relay's own clock decides nothing: an hour off, everything is as ever.

use serde_json::json;

use super::{Relay, all_settled, declare, emit, emit_many};
use crate::support::db::TestDb;
use crate::support::receiver::Receiver;
use crate::support::script::Script;
use crate::support::{eventually, faketime, process};

#[tokio::test]
async fn a_relay_whose_clock_is_an_hour_ahead_does_as_ever() {
    does_as_ever(3_600).await;
}

#[tokio::test]
async fn a_relay_whose_clock_is_an_hour_behind_does_as_ever() {
    does_as_ever(-3_600).await;
}

async fn does_as_ever(off: i64) {
    let db = TestDb::new().await;
    let client = db.client().await;
    let receiver = Receiver::start().await;
    let secret = process::run(&["secret", "new"], &[]).await.1.trim().to_owned();
    declare(&client, "c", &receiver, json!({"secret_env": "CONSUMER_SECRET", "dedup_retain": "30m"})).await;
    let mut relay =
        Relay::of(&db).short_leases().set("retry.base", "2s").set("retry.cap", "2s").env("CONSUMER_SECRET", &secret);
    for (name, value) in faketime::off_by(off) {
        relay = relay.env(name, &value);
    }
    let mut relay = relay.start();
    let line = relay.says("relay starts").await;
    let stamp = line.split_whitespace().next().expect("a timestamp").to_owned();
    let sql = "select extract(epoch from $1::text::timestamptz - clock_timestamp())::bigint";
    let ahead: i64 = client.query_one(sql, &[&stamp]).await.unwrap().get(0);
    assert!((ahead - off).abs() < 120, "its clock is off by {ahead} s, not by {off} s");

    // Retries: between one and two times the base from the failure, by the database's clock.
    receiver.choose(|request| (request.attempt() == 1).then(|| Script::answer(503).into()));
    let retried = emit_many(&client, "c", "retried", 1).await;
    let wait: f64 = eventually("the first attempt failed", async || {
        let sql = "select extract(epoch from next_attempt_at - first_failed_at)::float8 from fencepost.parked where attempts = 1";
        client.query_opt(sql, &[]).await.unwrap().map(|row| row.get(0))
    })
    .await;
    assert!((1.99..4.01).contains(&wait), "the retry is due {wait} s after the failure");
    all_settled(&client, 1).await;
    assert_eq!(receiver.requests_for(&retried[0]).len(), 2);

    // Schedules and expiries.
    receiver.choose(|_| None);
    let effects = json!([
        {"consumer": "c", "payload": "due", "deliver_in": "1 second", "expires_in": "40 minutes"},
        {"consumer": "c", "payload": "far", "deliver_in": "40 minutes"},
        {"consumer": "c", "payload": "lasting", "expires_in": "40 minutes"},
        {"consumer": "c", "payload": "over", "expires_in": "1 millisecond"},
    ]);
    client.batch_execute("begin").await.unwrap();
    emit(&client, &effects).await;
    client.batch_execute("select pg_sleep(0.01); commit").await.unwrap();
    let settled = eventually("the schedule is kept", async || {
        let sql = "select string_agg(convert_from(e.payload, 'UTF8') || ' ' || l.token, ', ' order by e.id)
                   from fencepost.effects e join fencepost.ledger l on l.effect_id = e.id having count(*) = 4";
        client.query_opt(sql, &[]).await.unwrap().map(|row| row.get::<_, String>(0))
    })
    .await;
    assert_eq!(settled, "retried-1 applied, \"due\" applied, \"lasting\" applied, \"over\" expired");

    // Timestamps and signatures, against this machine's true clock.
    let webhook = standardwebhooks::Webhook::new(&secret).unwrap();
    for request in receiver.requests() {
        let headers: http::HeaderMap = request
            .headers()
            .into_iter()
            .map(|(name, value)| (name.parse::<http::HeaderName>().unwrap(), value.parse().unwrap()))
            .collect();
        webhook.verify(&request.body, &headers).unwrap();
    }

    // Leases: renewed again and again, never for longer than asked, none lost.
    eventually("it has renewed again and again", async || {
        let sql = "select 1 from fencepost.relays where tick > 5";
        client.query_opt(sql, &[]).await.unwrap().map(drop)
    })
    .await;
    let sql = "select count(*) filter (where epoch = 1 and lease_expires_at between clock_timestamp() and clock_timestamp() + interval '2 seconds')
               from fencepost.shards";
    assert_eq!(client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0), 8);
    assert!(!relay.log().contains("lost"), "{}", relay.log());
}
