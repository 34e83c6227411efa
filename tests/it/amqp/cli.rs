//! `fencepost amqp check | init` and `fencepost acks orphans`, and what a relay says of a broker that is away.

use std::net::TcpListener;

use fencepost::demo::embedded::rabbitmq::PrivateRabbitmq;

use super::rig::AmqpRig;
use crate::support::broker::{Client, fresh};
use crate::support::{broker, eventually};

#[tokio::test]
async fn what_is_missing_is_named_and_declared_when_asked() {
    let url = broker::url().await;
    let amqp = AmqpRig::new("ack = 'required'").await;
    let (code, said) = amqp.fencepost(&["amqp", "check"]).await;
    assert_eq!(code, 0, "{said}");
    assert!(
        said.contains(&format!("queue {} of billing", amqp.queue)) && said.contains("alternate exchange"),
        "{said}"
    );
    // A new installation: none of its reply queues exists.
    let deployment = fresh("d").replace('.', "-");
    let sql = "update fencepost.settings set value = $1 where name = 'deployment'";
    amqp.rig.client.execute(sql, &[&deployment]).await.unwrap();
    let (code, said) = amqp.fencepost(&["amqp", "check"]).await;
    let queue = format!("fencepost.acks.{deployment}.3");
    assert_eq!(code, 1, "{said}");
    assert!(
        said.contains(&format!("queue \"{queue}\" does not exist")) && said.contains("fencepost amqp init"),
        "{said}"
    );
    let (code, said) = amqp.fencepost(&["amqp", "init"]).await;
    assert_eq!(code, 2, "{said}");
    assert!(said.contains(&format!("declare queue {queue} at broker default")), "{said}");
    let (code, said) = amqp.fencepost(&["amqp", "init", "--yes", "--reason", "a new installation"]).await;
    assert_eq!(code, 0, "{said}");
    assert_eq!(Client::new(url).await.depth(&queue).await, 0);
    assert_eq!(amqp.fencepost(&["amqp", "check"]).await.0, 0);
    assert_eq!(amqp.rig.count("select count(*) from fencepost.audit_log where action = 'amqp init'").await, 1);
}

#[tokio::test]
async fn a_wrong_address_login_or_virtual_host_is_told_with_its_remedy() {
    let url = broker::url().await;
    let amqp = AmqpRig::new("ack = 'none'\non_ambiguous = 'retry'").await;
    let (user, rest) = url.strip_prefix("amqp://").unwrap().split_once(':').unwrap();
    let (password, place) = rest.split_once('@').unwrap();
    let host = place.split_once('/').unwrap().0;
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    for (wrong, expected) in [
        (format!("amqp://{user}:hunter2@{host}"), "was refused: check username and password"),
        (format!("amqp://{user}:{password}@{host}/nowhere"), "rabbitmqctl add_vhost"),
        (format!("amqp://{user}:{password}@127.0.0.1:{free}"), "refused"),
        (format!("amqp://{user}:{password}@no-such-host.invalid"), "no-such-host.invalid:5672"),
        (format!("amqps://{user}:{password}@{host}"), "InvalidContentType"),
    ] {
        amqp.configure(&wrong, "ack = 'none'\non_ambiguous = 'retry'");
        let (code, said) = amqp.fencepost(&["amqp", "check"]).await;
        assert_eq!(code, 1, "{said}");
        assert!(said.contains(expected), "{expected:?} is not in {said}");
        assert!(!said.contains("hunter2") && !said.contains(password), "{said}");
    }
}

#[tokio::test]
async fn orphans_are_listed() {
    let amqp = AmqpRig::new("ack = 'required'").await;
    assert_eq!(amqp.fencepost(&["acks", "orphans"]).await.0, 0);
    let _relay = amqp.relay().await;
    amqp.reply_unasked("nobody:1", fencepost::model::key::Shard(2), "applied").await;
    eventually("an orphan", async || (amqp.orphans().await.len() == 1).then_some(())).await;
    let (code, said) = amqp.fencepost(&["acks", "orphans"]).await;
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("billing/nobody:1") && said.contains("no effect with this key"), "{said}");
    let (_, json) = amqp.fencepost(&["acks", "orphans", "--json"]).await;
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((json[0]["shard"].as_i64(), json[0]["properties"]["outbox-ack"].as_str()), (Some(2), Some("applied")));
}

/// While the broker is away nothing is attempted: no budget is spent, and an alarm says why. Then everything arrives.
#[tokio::test]
async fn a_broker_that_is_away_costs_no_attempts() {
    let mut process = PrivateRabbitmq::start().await.unwrap();
    let amqp = AmqpRig::on(&process.url(), "ack = 'none'\non_ambiguous = 'retry'").await;
    let _relay = amqp.relay().await;
    let first = amqp.rig.emit("first", "billing").await;
    amqp.rig.becomes(&first, "billing", "confirmed").await;
    process.kill().await.unwrap();
    eventually("an alarm", async || (amqp.alarms("edge_shut").await == 1).then_some(())).await;
    let mut keys = Vec::new();
    for n in 0..20 {
        keys.push(amqp.rig.emit(&format!("away-{n}"), "billing").await);
    }
    // Longer than any retry here.
    tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    for key in &keys {
        assert!(amqp.rig.attempts(key, "billing").await.is_empty());
    }
    process.boot().await.unwrap();
    for key in &keys {
        amqp.rig.becomes(key, "billing", "confirmed").await;
    }
    eventually("no alarm", async || (amqp.alarms("edge_shut").await == 0).then_some(())).await;
    let arrived = Client::new(&process.url()).await.read(&amqp.queue, |read| read.len() == 21).await;
    assert_eq!(arrived.len(), 21);
}
