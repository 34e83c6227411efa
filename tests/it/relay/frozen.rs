//! What a consumer sees of one effect over all its attempts: the same bytes, the same key, a fresh signature.

use fencepost::edge::sign::Secret;
use serde_json::json;

use super::{Relay, all_settled, declare, emit};
use crate::support::db::TestDb;
use crate::support::eventually;
use crate::support::receiver::Receiver;
use crate::support::script::Script;

#[tokio::test]
async fn body_and_key_are_the_same_over_retries_restart_and_takeover_and_every_signature_is_fresh() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let receiver = Receiver::start().await;
    let secret = crate::support::process::run(&["secret", "new"], &[]).await.1.trim().to_owned();
    assert!(Secret::parse(&secret).is_ok());
    declare(&client, "c", &receiver, json!({"timeout": "60s", "secret_env": "CONSUMER_SECRET"})).await;
    let relay =
        Relay::of(&db).short_leases().set("retry.base", "1s").set("retry.cap", "1s").env("CONSUMER_SECRET", &secret);
    // The second attempt of the first effect meets a restart, the fourth a takeover.
    receiver.choose(|request| match (request.key().matches(':').count(), request.attempt()) {
        (1, 2 | 4) => Some(Script::stall()),
        (1, 3) => Some(Script::answer(503).header("Retry-After", "0").into()),
        (_, 1..5) => Some(Script::answer(500).into()),
        _ => None,
    });
    let mut first = relay.start();
    let verbatim = "{ \"b\":1,\n\t\"a\": 1.10, \"ü\": \"\u{1f980}\" }";
    let binary: Vec<u8> = (0..=255).collect();
    let encoded: String = client.query_one("select encode($1, 'base64')", &[&binary]).await.unwrap().get(0);
    let task = emit(
        &client,
        &json!([
            {"consumer": "c", "payload_text": verbatim, "content_type": "application/json"},
            {"consumer": "c", "payload_base64": encoded},
            {"consumer": "c", "payload": {"b": 1, "a": [1.10, null]}, "headers": {"X-Tenant": "acme"}, "type": "paid"},
        ]),
    )
    .await;
    let keys = [format!("{task}:1"), format!("{task}:1:2"), format!("{task}:1:3")];
    let reached = async |attempt: u32| {
        eventually(&format!("attempt {attempt}"), async || {
            receiver.requests_for(&keys[0]).iter().any(|request| request.attempt() == attempt).then_some(())
        })
        .await;
    };
    reached(2).await;
    first.kill().await;
    let mut second = relay.start();
    reached(4).await;
    let _third = relay.start();
    second.kill().await;
    all_settled(&client, 3).await;

    let attempts: Vec<u32> = receiver.requests_for(&keys[0]).iter().map(|request| request.attempt()).collect();
    assert_eq!(attempts, [1, 2, 3, 4, 5]);
    let webhook = standardwebhooks::Webhook::new(&secret).unwrap();
    let jsonb: String =
        client.query_one("select $1::jsonb::text", &[&json!({"b": 1, "a": [1.10, null]})]).await.unwrap().get(0);
    let bodies = [verbatim.as_bytes().to_vec(), binary, jsonb.into_bytes()];
    for (key, body) in keys.iter().zip(&bodies) {
        let requests = receiver.requests_for(key);
        let attempts: Vec<u32> = requests.iter().map(|request| request.attempt()).collect();
        // A relay may die between the start of an attempt and its first byte: such a number never arrives.
        assert!(attempts.len() >= 4 && attempts.windows(2).all(|pair| pair[0] < pair[1]), "{key}: {attempts:?}");
        for request in &requests {
            assert_eq!(&request.body, body);
            assert_eq!(request.header("idempotency-key"), Some(format!("\"{key}\"")));
            // What may differ from attempt to attempt, and nothing else.
            let fixed = |request: &crate::support::receiver::Request| {
                let fresh = ["webhook-timestamp", "webhook-signature", "outbox-attempt", "traceparent"];
                request.headers().into_iter().filter(|(name, _)| !fresh.contains(&name.as_str())).collect::<Vec<_>>()
            };
            assert_eq!(fixed(request), fixed(&requests[0]));
            let headers: http::HeaderMap = request
                .headers()
                .into_iter()
                .map(|(name, value)| (name.parse::<http::HeaderName>().unwrap(), value.parse().unwrap()))
                .collect();
            // The published crate refuses bodies that are not UTF-8; those are checked by the specification's own words.
            match std::str::from_utf8(&request.body) {
                Ok(_) => webhook.verify(&request.body, &headers).unwrap_or_else(|e| panic!("{key}: {e}")),
                Err(_) => assert_eq!(request.header("webhook-signature"), Some(signature(&secret, request))),
            }
        }
        let stamps: Vec<u64> =
            requests.iter().map(|r| r.header("webhook-timestamp").unwrap().parse().unwrap()).collect();
        assert!(stamps.windows(2).all(|pair| pair[0] < pair[1]), "not fresh on every attempt: {stamps:?}");
    }
}

/// Standard Webhooks 1.0: HMAC-SHA256 over `<id>.<timestamp>.<body>`.
fn signature(secret: &str, request: &crate::support::receiver::Request) -> String {
    use base64::Engine as _;
    use hmac::{KeyInit as _, Mac as _};
    let base64 = base64::engine::general_purpose::STANDARD;
    let key = base64.decode(secret.strip_prefix("whsec_").unwrap()).unwrap();
    let mut mac = hmac::Hmac::<sha2::Sha256>::new_from_slice(&key).unwrap();
    mac.update(format!("{}.{}.", request.key(), request.header("webhook-timestamp").unwrap()).as_bytes());
    mac.update(&request.body);
    format!("v1,{}", base64.encode(mac.finalize().into_bytes()))
}
