//! What holds for a whole consumer: its floor, its pause, its budgets, its secrets. Two relays know it alike.

use std::fs;

use fencepost::edge::sign::Secret;
use secrecy::ExposeSecret;
use serde_json::json;

use super::rig::{Rig, http};
use crate::support::eventually;
use crate::support::process::Process;
use crate::support::receiver::{Receiver, Request, Script};

/// Two relays with half of the shards each.
async fn two_relays(rig: &Rig) -> [Process; 2] {
    let relays = [rig.relay_with(&[]), rig.relay_with(&[])];
    let shared = "select count(*) from (select relay from fencepost.shards group by relay having count(*) = 4) s";
    rig.counts(shared, 2).await;
    relays
}

/// One effect in each of many tasks, so that every shard has some.
async fn emit_everywhere(rig: &Rig, name: &str, consumer: &str) -> Vec<String> {
    let mut keys = Vec::new();
    for n in 0..32 {
        keys.push(rig.emit(&format!("{name}-{n}"), consumer).await);
    }
    assert_eq!(rig.count("select count(distinct shard) from fencepost.effects").await, 8);
    keys
}

#[tokio::test]
async fn retry_after_is_a_floor_for_the_whole_consumer_on_every_relay() {
    let receiver = Receiver::start().await;
    let rig = Rig::new(&http("shop", &receiver.url(), "")).await;
    let _relays = two_relays(&rig).await;
    receiver.next(Script::answer(429).header("Retry-After", "3"));
    let first = rig.emit("first", "shop").await;
    rig.becomes(&first, "shop", "retry").await;
    rig.counts("select count(*) from fencepost.consumers where not_before > clock_timestamp()", 1).await;
    // By now both relays have read it, or hear of it within a second: what they send until then is not held against them.
    let asked = "select count(*) from fencepost.consumers where not_before > clock_timestamp() + interval '1.5 s'";
    rig.counts(asked, 0).await;
    emit_everywhere(&rig, "later", "shop").await;
    let mut looks = 0;
    loop {
        let sent = receiver.requests().len();
        if rig
            .count("select count(*) from fencepost.consumers where not_before > clock_timestamp() + interval '50 ms'")
            .await
            == 0
        {
            break;
        }
        assert_eq!(sent, 1, "nothing is sent before the floor");
        looks += 1;
    }
    assert!(looks > 1, "the floor held while effects were waiting");
    rig.counts("select count(*) from fencepost.ledger where token = 'applied'", 33).await;
    assert_eq!(receiver.requests().len(), 34);
}

#[tokio::test]
async fn a_retry_after_beyond_all_measure_is_capped() {
    let receiver = Receiver::start().await;
    let rig =
        Rig::with_retry("base = '50ms'\ncap = '200ms'\nretry_after_max = '300ms'", &http("shop", &receiver.url(), ""))
            .await;
    let _relay = rig.relay().await;
    receiver.next(Script::answer(503).header("Retry-After", "1000000"));
    let key = rig.emit("task", "shop").await;
    rig.becomes(&key, "shop", "applied").await;
    assert_eq!(rig.count("select count(*) from fencepost.consumers where not_before < clock_timestamp()").await, 1);
}

#[tokio::test]
async fn gone_pauses_the_consumer_and_keeps_its_deliveries() {
    let receiver = Receiver::start().await;
    let rig = Rig::new(&http("shop", &receiver.url(), "concurrency = 1")).await;
    let _relays = two_relays(&rig).await;
    receiver.next(Script::answer(410));
    let first = rig.emit("first", "shop").await;
    rig.counts("select count(*) from fencepost.consumers where paused and paused_reason like '%410%'", 1).await;
    rig.counts("select count(*) from fencepost.alarms where name = 'consumer_gone' and resolved_at is null", 1).await;
    rig.becomes(&first, "shop", "backlog").await;
    rig.change(&["consumers", "resume", "shop"]).await;
    let got = rig.becomes(&first, "shop", "applied").await;
    assert_eq!(got.attempts, 2);
    assert_eq!(rig.tokens(&first, "shop").await, ["refused", "applied"]);
    rig.wire_agrees(&receiver, &first, "shop").await;
}

#[tokio::test]
async fn pause_and_resume_reach_every_relay() {
    let receiver = Receiver::start().await;
    let rig = Rig::new(&http("shop", &receiver.url(), "")).await;
    let _relays = two_relays(&rig).await;
    rig.change(&["consumers", "pause", "shop"]).await;
    // A relay that knows of the pause leaves what comes unread: a lag range for each shard says that both know.
    let mut batches = 0;
    eventually("both relays know of the pause", async || {
        batches += 1;
        emit_everywhere(&rig, &format!("paused-{batches}"), "shop").await;
        all_read(&rig, batches * 32).await;
        (rig.count("select count(*) from fencepost.lags").await == 8).then_some(())
    })
    .await;
    let sent = receiver.requests().len();
    emit_everywhere(&rig, "later", "shop").await;
    all_read(&rig, (batches + 1) * 32).await;
    assert_eq!(receiver.requests().len(), sent, "nothing is sent once both know");
    assert_eq!(
        rig.count("select count(*) from fencepost.deliveries where key like 'later-%' and token = 'backlog'").await,
        32
    );
    rig.change(&["consumers", "resume", "shop"]).await;
    let all = (batches + 1) * 32;
    rig.counts("select count(*) from fencepost.ledger where token = 'applied'", all).await;
    assert_eq!(receiver.requests().len() as i64, all);
}

/// Waits until so many deliveries went through flights that are closed.
async fn all_read(rig: &Rig, deliveries: i64) {
    rig.counts("select coalesce(sum(deliveries), 0)::bigint from fencepost.flights where token = 'done'", deliveries)
        .await;
}

#[tokio::test]
async fn in_progress_spends_no_budget_until_it_has_lasted_too_long() {
    let receiver = Receiver::start().await;
    let consumers =
        [http("shop", &receiver.url(), ""), http("bank", &receiver.url(), "on_ambiguous = 'hold'")].concat();
    let rig = Rig::with_retry(
        "base = '50ms'\ncap = '100ms'\nshort_budget = 1\nbudget = '200ms'\nin_progress_max = '1s'",
        &consumers,
    )
    .await;
    let _relay = rig.relay().await;
    receiver.always(Script::answer(409));
    let held = rig.emit("held", "bank").await;
    rig.becomes(&held, "bank", "in_doubt").await;
    assert!(rig.tokens(&held, "bank").await.iter().all(|token| token == "in_progress"));
    assert!(rig.attempts(&held, "bank").await.len() > 3, "far more often than the budgets allow");
    let patient = rig.emit("patient", "shop").await;
    eventually("it outlives both budgets", async || (rig.attempts(&patient, "shop").await.len() > 4).then_some(()))
        .await;
    rig.becomes(&patient, "shop", "retry").await;
    receiver.on_key(&patient, Script::answer(200).ack("applied"));
    rig.becomes(&patient, "shop", "applied").await;
    rig.wire_agrees(&receiver, &patient, "shop").await;
}

#[tokio::test]
async fn a_spent_budget_ends_in_dead_and_nothing_is_dropped() {
    let receiver = Receiver::start().await;
    let rig =
        Rig::with_retry("base = '50ms'\ncap = '100ms'\nbudget = '500ms'", &http("shop", &receiver.url(), "")).await;
    let _relay = rig.relay().await;
    receiver.on_key("refused:1", Script::answer(404));
    receiver.on_key("throttled:1", Script::answer(429));
    receiver.on_key("unknown:1", Script::answer(500));
    for task in ["refused", "throttled", "unknown"] {
        rig.emit(task, "shop").await;
    }
    let short = rig.becomes("refused:1", "shop", "dead").await;
    assert_eq!((short.attempts, rig.tokens("refused:1", "shop").await.len()), (3, 3));
    let long = rig.becomes("throttled:1", "shop", "dead").await;
    assert!(long.attempts > 3, "{long:?}");
    // What may have been applied is not dead: nobody knows.
    rig.becomes("unknown:1", "shop", "in_doubt").await;
    let sent = receiver.requests().len();

    receiver.on_key("refused:1", Script::answer(200).ack("applied"));
    rig.change(&["deliveries", "retry", "refused:1"]).await;
    rig.becomes("refused:1", "shop", "applied").await;
    assert_eq!(receiver.requests().len(), sent + 1, "what is dead stays dead");
    for key in ["refused:1", "throttled:1", "unknown:1"] {
        rig.wire_agrees(&receiver, key, "shop").await;
    }
}

#[tokio::test]
async fn secrets_are_rotated_without_a_restart() {
    let receiver = Receiver::start().await;
    let rig = Rig::new("").await;
    let (old, new) = (Secret::generate(), Secret::generate());
    let (old_file, file) = (rig.folder().join("old"), rig.folder().join("new"));
    fs::write(&old_file, old.printed().expose_secret()).expect("a file");
    let retry = "base = '50ms'\ncap = '200ms'";
    let with = |keys: String| http("shop", &receiver.url(), &keys);
    rig.configure(retry, &with(format!("secret_file = '{}'", old_file.display())));
    let mut relay = rig.relay().await;
    rig.emit("before", "shop").await;
    assert_eq!(verified(&receiver.wait_until(1).await[0], &[&old, &new]), [true, false]);

    // First both sign, so that the consumer may change at any moment; then the old one goes.
    fs::write(&file, new.printed().expose_secret()).expect("a file");
    let both = format!("secret_file = '{}'\nprevious_secret_file = '{}'", file.display(), old_file.display());
    rig.configure(retry, &with(both));
    rig.apply().await;
    until_signed(&rig, &receiver, "both", &[&old, &new], &[true, true]).await;
    assert!(receiver.requests().iter().all(|request| verified(request, &[&old]) == [true]), "the old one never paused");
    rig.configure(retry, &with(format!("secret_file = '{}'", file.display())));
    rig.apply().await;
    until_signed(&rig, &receiver, "new", &[&old, &new], &[false, true]).await;

    // A file that changes in place is enough; a broken one is said and changes nothing.
    fs::write(&file, "whsec_broken").expect("a file");
    rig.counts("select count(*) from fencepost.alarms where name = 'consumer_unusable' and resolved_at is null", 1)
        .await;
    rig.emit("meanwhile", "shop").await;
    rig.becomes("meanwhile:1", "shop", "applied").await;
    assert_eq!(verified(&receiver.requests_for("meanwhile:1")[0], &[&new]), [true]);
    fs::write(&file, old.printed().expose_secret()).expect("a file");
    until_signed(&rig, &receiver, "back", &[&old, &new], &[true, false]).await;
    rig.counts("select count(*) from fencepost.alarms where name = 'consumer_unusable' and resolved_at is null", 0)
        .await;
    relay.kill().await;
}

/// Sends effects until one is signed like this: within a second each relay knows.
async fn until_signed(rig: &Rig, receiver: &Receiver, name: &str, secrets: &[&Secret], wanted: &[bool]) {
    let mut n = 0;
    eventually(&format!("{name} are signed as wanted"), async || {
        n += 1;
        let key = rig.emit_with(&format!("{name}-{n}"), json!([{ "consumer": "shop", "payload": n }])).await;
        rig.becomes(&key, "shop", "applied").await;
        (verified(&receiver.requests_for(&key)[0], secrets) == wanted).then_some(())
    })
    .await
}

/// Which of the secrets verify a request, by the reference library.
fn verified(request: &Request, secrets: &[&Secret]) -> Vec<bool> {
    let mut headers = http::HeaderMap::new();
    for name in ["webhook-id", "webhook-timestamp", "webhook-signature"] {
        headers.insert(name, request.header(name).expect("a signed request").parse().expect("a value"));
    }
    secrets
        .iter()
        .map(|secret| {
            let webhook = standardwebhooks::Webhook::new(secret.printed().expose_secret()).expect("a secret");
            webhook.verify(&request.body, &headers).is_ok()
        })
        .collect()
}
