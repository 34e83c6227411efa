//! A way that is shut is named at once: by readiness, by the gauge and by `status`, before it has lasted for an alarm.

use fencepost::demo::embedded::guardian::Signal;
use fencepost::demo::embedded::rabbitmq::PrivateRabbitmq;
use serde_json::Value;

use super::rig::AmqpRig;
use crate::support::eventually;
use crate::support::process::Process;

const WITHOUT_REPLIES: &str = "ack = 'none'\non_ambiguous = 'retry'";

/// The address of a relay's endpoints.
async fn endpoints(relay: &mut Process) -> String {
    let line = relay.says("admin endpoints").await;
    line.split_once("address=").unwrap().1.split_whitespace().next().unwrap().to_string()
}

async fn get(address: &str, path: &str) -> String {
    reqwest::get(format!("http://{address}{path}")).await.unwrap().text().await.unwrap()
}

async fn readiness(address: &str) -> Value {
    serde_json::from_str(&get(address, "/readyz").await).unwrap()
}

/// Waits until readiness gives a reason that contains `why`, and gives what it said.
async fn named(address: &str, why: &str) -> Value {
    eventually(&format!("readiness names billing: {why}"), async || {
        let ready = readiness(address).await;
        ready["shut_edges"]["billing"].as_str().is_some_and(|said| said.contains(why)).then_some(ready)
    })
    .await
}

async fn open(address: &str) {
    eventually("readiness names nobody", async || {
        readiness(address).await["shut_edges"].as_object().unwrap().is_empty().then_some(())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_alarm_of_a_relay_that_is_gone_is_resolved_by_one_that_lives() {
    let amqp = AmqpRig::new(WITHOUT_REPLIES).await;
    let standing = async || amqp.alarms("edge_shut").await;
    // Two relays find the broker, one of which is to have no broker to find.
    let mut living = amqp.relay().await;
    let named = endpoints(&mut living).await;
    open(&named).await;
    amqp.configure("amqp://guest:guest@127.0.0.1:1/%2f", WITHOUT_REPLIES);
    for end in [Signal::Kill, Signal::Term] {
        let mut blind = amqp.rig.relay_with(&[]);
        eventually("an alarm", async || (standing().await == 1).then_some(())).await;
        // The one that lives says nothing of it while the other may be right.
        assert_eq!(readiness(&named).await["shut_edges"], serde_json::json!({}));
        assert_eq!(standing().await, 1);
        blind.signal(end);
        blind.ended().await;
        eventually("no alarm", async || (standing().await == 0).then_some(())).await;
    }
    assert!(living.log().contains("only relays that are gone called these edges shut"), "{}", living.log());
}

/// Who was taken for dead and wakes says again what still holds.
#[tokio::test(flavor = "multi_thread")]
async fn an_alarm_of_a_relay_that_was_frozen_is_raised_again_when_it_wakes() {
    let amqp = AmqpRig::new(WITHOUT_REPLIES).await;
    let standing = async || amqp.alarms("edge_shut").await;
    let mut living = amqp.relay().await;
    open(&endpoints(&mut living).await).await;
    amqp.configure("amqp://guest:guest@127.0.0.1:1/%2f", WITHOUT_REPLIES);
    let blind = amqp.rig.relay_with(&[]);
    eventually("an alarm", async || (standing().await == 1).then_some(())).await;
    blind.signal(Signal::Stop);
    eventually("no alarm, with the other frozen past its lease", async || (standing().await == 0).then_some(())).await;
    blind.signal(Signal::Continue);
    eventually("the alarm again", async || (standing().await == 1).then_some(())).await;
}

/// All that tells of the way says that it is shut, and no alarm was needed for it.
async fn told(amqp: &AmqpRig, address: &str, ready: &Value, why: &str) {
    // A broker that is away leaves the relay as ready as before: others are served.
    assert_eq!((&ready["ready"], &ready["unhealthy_consumers"]), (&Value::Bool(true), &serde_json::json!(["billing"])));
    let gauge = "fencepost_edge_open{consumer=\"billing\"} 0";
    eventually("the gauge", async || get(address, "/metrics").await.contains(gauge).then_some(())).await;
    let edge = eventually("status", async || {
        let (_, said) = amqp.fencepost(&["status", "--json"]).await;
        let status: Value = serde_json::from_str(&said).unwrap();
        status["edges"][0]["shut"].get(0).is_some().then(|| status["edges"][0].clone())
    })
    .await;
    assert!(edge["shut"][0]["why"].as_str().unwrap().contains(why), "{edge}");
    let (_, text) = amqp.fencepost(&["status"]).await;
    assert!(text.contains("shut at relay: "), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shut_way_is_named_before_any_alarm() {
    let mut node = PrivateRabbitmq::start().await.unwrap();
    let amqp = AmqpRig::on(&node.url(), WITHOUT_REPLIES).await;
    let mut relay = amqp.relay().await;
    let address = endpoints(&mut relay).await;
    let first = amqp.rig.emit("first", "billing").await;
    amqp.rig.becomes(&first, "billing", "confirmed").await;
    open(&address).await;

    node.ctl(&["set_vm_memory_high_watermark", "0.0000001"]).await.unwrap();
    // RabbitMQ blocks a connection when it publishes.
    let held = amqp.rig.emit("held", "billing").await;
    let ready = named(&address, "blocked publishing").await;
    let raised = amqp.alarms("edge_shut").await;
    assert_eq!(raised, 0, "readiness waited for the alarm");
    told(&amqp, &address, &ready, "blocked publishing").await;
    let mut waiting = Vec::new();
    for n in 0..20 {
        waiting.push(amqp.rig.emit(&format!("waiting-{n}"), "billing").await);
    }
    // Long enough for the alarm, and for any retry here.
    eventually("an alarm", async || (amqp.alarms("edge_shut").await == 1).then_some(())).await;
    let (_, story) = amqp.fencepost(&["effect", &held]).await;
    assert!(story.contains("a relay cannot reach the consumer: "), "{story}");
    for key in waiting.iter().chain([&held]) {
        assert!(amqp.rig.attempts(key, "billing").await.is_empty(), "{key} was tried, or given up");
    }
    node.ctl(&["set_vm_memory_high_watermark", "0.4"]).await.unwrap();
    open(&address).await;
    for key in waiting.iter().chain([&held]) {
        amqp.rig.becomes(key, "billing", "confirmed").await;
    }
    eventually("no alarm", async || (amqp.alarms("edge_shut").await == 0).then_some(())).await;

    node.kill().await.unwrap();
    let ready = eventually("readiness names billing", async || {
        Some(readiness(&address).await).filter(|ready| ready["shut_edges"]["billing"].is_string())
    })
    .await;
    assert_eq!(amqp.alarms("edge_shut").await, 0, "readiness waited for the alarm");
    told(&amqp, &address, &ready, "").await;
    node.boot().await.unwrap();
    open(&address).await;
    let (_, text) = eventually("status says so as well", async || {
        Some(amqp.fencepost(&["status"]).await).filter(|(_, text)| !text.contains("shut at"))
    })
    .await;
    assert!(text.contains("active"), "{text}");
}
