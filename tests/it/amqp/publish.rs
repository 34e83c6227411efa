//! What the broker said about each message, and that it is never taken for another's.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use fencepost::model::outcome::{End, Outcome};
use futures_util::StreamExt;
use futures_util::stream;
use lapin::ExchangeKind;
use lapin::options::QueueBindOptions;
use lapin::types::AMQPValue;

use super::{attempt, consumer, edge, effect, open_edge, opens, shuts};
use crate::support::broker::{self, Client, broker, fresh, id};

/// One unroutable in twenty among routable ones, at a wide window: what the client library alone gets wrong.
#[tokio::test(flavor = "multi_thread")]
async fn unroutable_messages_are_told_from_routable_ones() {
    const MESSAGES: usize = 50_000;
    let url = broker::url().await;
    let client = Client::new(url).await;
    let (exchange, queue) = (fresh("mix"), fresh("mix"));
    // Routed by a header of ours: one edge, one channel, one routing key. (Those that begin with x- are not matched.)
    client.exchange(&exchange, ExchangeKind::Headers).await;
    client.queue(&queue, &[]).await;
    let bound = client.channel().queue_bind(
        queue.as_str().into(),
        exchange.as_str().into(),
        "".into(),
        QueueBindOptions::default(),
        broker::table(&[
            ("x-match", AMQPValue::LongString("all".into())),
            ("outbox-schema-version", AMQPValue::LongString("good".into())),
        ]),
    );
    bound.await.unwrap();
    let consumer = consumer(&format!("exchange = '{exchange}'\nrouting_key = ''\nconcurrency = 512\nack = 'optional'"));
    let edge = Arc::new(open_edge(&consumer, &broker(url)).await);
    let outcomes: Vec<(usize, Outcome)> = stream::iter(0..MESSAGES)
        .map(|n| {
            let edge = Arc::clone(&edge);
            async move {
                let mut effect = effect(&format!("m{n}:1"));
                effect.schema_version = Some(if n % 20 == 7 { "nowhere" } else { "good" }.into());
                (n, attempt(&edge, &effect).await)
            }
        })
        .buffer_unordered(512)
        .collect()
        .await;
    let mut told: HashMap<String, bool> = HashMap::new();
    for (n, outcome) in outcomes {
        let confirmed = match outcome.end {
            End::Confirmed => true,
            End::Unroutable => false,
            other => panic!("message {n}: {other:?} {:?}", outcome.evidence),
        };
        told.insert(format!("m{n}:1"), confirmed);
    }
    let expected = MESSAGES - MESSAGES / 20;
    let arrived: HashSet<String> = client.read(&queue, |read| read.len() == expected).await.iter().map(id).collect();
    let wrong = told.iter().filter(|(key, confirmed)| arrived.contains(*key) != **confirmed).count();
    assert_eq!((told.len(), arrived.len(), wrong), (MESSAGES, expected, 0));
    client.delete_queue(&queue).await;
}

#[tokio::test]
async fn a_missing_exchange_shuts_the_way_until_it_appears() {
    let url = broker::url().await;
    let client = Client::new(url).await;
    let (exchange, queue) = (fresh("late"), fresh("late"));
    let consumer = consumer(&format!("exchange = '{exchange}'\nrouting_key = 'k'"));
    let edge = edge(&consumer, &broker(url));
    let why = crate::support::eventually("the exchange is missed", async || {
        edge.shut().filter(|why| why.contains("does not exist"))
    })
    .await;
    assert!(why.contains(&exchange), "{why}");
    let early = attempt(&edge, &effect("t:1")).await;
    assert_eq!((early.end, early.evidence.bytes_left), (End::Shut, false));
    client.exchange(&exchange, ExchangeKind::Direct).await;
    opens(&edge).await;
    assert_eq!(attempt(&edge, &effect("t:1")).await.end, End::Unroutable, "an exchange without a queue");
    client.queue(&queue, &[]).await;
    client.bind(&queue, &exchange, "k").await;
    assert_eq!(attempt(&edge, &effect("t:1")).await.end, End::Confirmed);
    assert_eq!(client.read(&queue, |read| read.len() == 1).await.iter().map(id).collect::<Vec<_>>(), ["t:1"]);
    // Deleted under the edge: the channel dies, and with it only this connection.
    client.channel().exchange_delete(exchange.as_str().into(), Default::default()).await.unwrap();
    let alone = attempt(&edge, &effect("t:2")).await;
    assert_eq!(alone.end, End::NotDelivered, "alone on the channel: {:?}", alone.evidence);
    shuts(&edge).await;
    client.delete_queue(&queue).await;
}

/// RabbitMQ routes a message to the queues its CC and BCC headers name as well: an effect's own headers never become those.
#[tokio::test]
async fn a_users_headers_route_nothing() {
    let url = broker::url().await;
    let client = Client::new(url).await;
    let (queue, other) = (fresh("own"), fresh("other"));
    client.queue(&queue, &[]).await;
    client.queue(&other, &[]).await;
    let edge = open_edge(&consumer(&format!("routing_key = '{queue}'")), &broker(url)).await;
    let mut sly = effect("sly:1");
    sly.headers = ["CC", "BCC", "cc", "x-match"].map(|name| (name.to_string(), other.clone())).into();
    assert_eq!(attempt(&edge, &sly).await.end, End::Confirmed);
    let message = client.read(&queue, |read| read.len() == 1).await.remove(0);
    let headers = message.properties.headers().as_ref().unwrap().inner();
    let own: Vec<&str> = headers.keys().map(|name| name.as_str()).filter(|name| !name.starts_with("x-meta-")).collect();
    assert!(own.iter().all(|name| name.starts_with("outbox-") || *name == "content-digest"), "{own:?}");
    assert_eq!(headers["x-meta-bcc"], AMQPValue::LongString(other.as_str().into()));
    assert_eq!(client.depth(&other).await, 0, "a copy went where a header said");
    client.delete_queue(&queue).await;
    client.delete_queue(&other).await;
}
