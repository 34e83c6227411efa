//! What a login may not do at the broker is told with the object and the remedy, and costs nothing once it may.

use fencepost::demo::embedded::rabbitmq::PrivateRabbitmq;
use fencepost::model::key::Shard;

use super::rig::AmqpRig;
use crate::support::eventually;

const REQUIRED: &str = "ack = 'required'";
const USER: &str = "modest";

#[tokio::test(flavor = "multi_thread")]
async fn refused_rights_are_told_with_their_remedy() {
    let node = PrivateRabbitmq::start().await.unwrap();
    node.ctl(&["add_user", USER, "secret"]).await.unwrap();
    let may = async |configure: &str, write: &str, read: &str| {
        node.ctl(&["set_permissions", USER, configure, write, read]).await.unwrap();
    };
    may("^$", "^$", "^$").await;
    let amqp = AmqpRig::on(&node.url(), REQUIRED).await;
    amqp.configure(&format!("amqp://{USER}:secret@127.0.0.1:{}/%2f", node.port()), REQUIRED);

    let queue = amqp.replies(Shard(0));
    amqp.client.delete_queue(&queue).await;
    let (code, said) = amqp.fencepost(&["amqp", "init", "--yes", "--reason", "test"]).await;
    assert_eq!(code, 1, "{said}");
    for part in [&queue, "needs configure", "rabbitmqctl set_permissions"] {
        assert!(said.contains(part), "{part:?} is not in {said}");
    }
    amqp.client.queue(&queue, &[]).await;

    let mut relay = amqp.relay().await;
    let key = amqp.rig.emit("pay-1", "billing").await;
    let told = relay.says("needs write on exchange").await;
    assert!(told.contains("amq.default") && told.contains("rabbitmqctl set_permissions"), "{told}");
    let first = eventually("an attempt", async || amqp.rig.attempts(&key, "billing").await.into_iter().next()).await;
    assert_eq!(first.token.as_deref(), Some("not_delivered"), "{first:?}");
    assert!(first.error.as_ref().is_some_and(|why| why.contains("needs write on exchange")), "{first:?}");
    // Every shard's queue.
    eventually("alarms", async || (amqp.alarms("replies_unread").await == 8).then_some(())).await;
    let remedy = "select count(*) from fencepost.alarms where name = 'replies_unread' and detail like '%takes read there: rabbitmqctl set_permissions%'";
    assert_eq!(amqp.rig.count(remedy).await, 8);

    may("^$", "^amq\\.default$", "^fencepost\\.acks\\..*").await;
    let message = amqp.receive(1).await.remove(0);
    amqp.reply(&message, "applied").await;
    amqp.rig.becomes(&key, "billing", "applied").await;
    eventually("no alarms", async || (amqp.alarms("replies_unread").await == 0).then_some(())).await;
    amqp.rig.rests().await;
}
