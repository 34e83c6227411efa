//! A RabbitMQ for tests, and a plain client of it that shares nothing with the product's edge.

use std::sync::Arc;
use std::time::Duration;

use fencepost::demo::embedded::rabbitmq::PrivateRabbitmq;
use fencepost::model::broker::Broker;
use futures_util::StreamExt;
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions, ConfirmSelectOptions,
    ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties, ExchangeKind};
use tokio::sync::OnceCell;

/// Names the broker the tests share: a URL. Tests that break their broker start one of their own.
pub const URL: &str = "FENCEPOST_TEST_AMQP_URL";

static SHARED: OnceCell<(String, Option<PrivateRabbitmq>)> = OnceCell::const_new();

/// The URL of the shared broker; one of our own where none is named.
pub async fn url() -> &'static str {
    let (url, _) = SHARED
        .get_or_init(|| async {
            match std::env::var(URL) {
                Ok(url) => (url, None),
                Err(_) => {
                    let broker = PrivateRabbitmq::start().await.expect("a private RabbitMQ");
                    (broker.url(), Some(broker))
                }
            }
        })
        .await;
    url
}

/// The product's view of a broker.
pub fn broker(url: &str) -> Arc<Broker> {
    let mut broker = Broker::from_url("default", url).expect("a broker's url");
    broker.heartbeat = Duration::from_secs(2);
    Arc::new(broker)
}

/// A name nobody else uses on the shared broker.
pub fn fresh(what: &str) -> String {
    format!("test.{what}.{:012x}", rand::random::<u64>() >> 16)
}

/// A client with one channel.
pub struct Client {
    _connection: Connection,
    channel: Channel,
}

/// Arguments of a queue.
pub type Arguments<'a> = &'a [(&'a str, AMQPValue)];

impl Client {
    pub async fn new(url: &str) -> Self {
        Self::try_new(url).await.expect("a connection to the broker")
    }

    pub async fn try_new(url: &str) -> lapin::Result<Self> {
        let connection = Connection::connect(url, ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        Ok(Self { _connection: connection, channel })
    }

    pub async fn queue(&self, name: &str, arguments: Arguments<'_>) {
        let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        self.channel.queue_declare(name.into(), options, table(arguments)).await.expect("a queue");
    }

    pub async fn exchange(&self, name: &str, kind: ExchangeKind) {
        let options = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
        self.channel.exchange_declare(name.into(), kind, options, FieldTable::default()).await.expect("an exchange");
    }

    pub async fn bind(&self, queue: &str, exchange: &str, key: &str) {
        let bound = self.channel.queue_bind(
            queue.into(),
            exchange.into(),
            key.into(),
            QueueBindOptions::default(),
            FieldTable::default(),
        );
        bound.await.expect("a binding");
    }

    pub async fn delete_queue(&self, name: &str) {
        self.channel.queue_delete(name.into(), QueueDeleteOptions::default()).await.expect("a deleted queue");
    }

    pub async fn depth(&self, queue: &str) -> u32 {
        let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        let queue = self.channel.queue_declare(queue.into(), options, FieldTable::default()).await.expect("a queue");
        queue.message_count()
    }

    /// Publishes to a queue and waits for the confirm.
    pub async fn publish(&self, queue: &str, properties: BasicProperties, body: &[u8]) {
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let published = self.channel.basic_publish("".into(), queue.into(), options, body, properties).await;
        let confirm = published.expect("a publish").await.expect("a confirm");
        assert!(confirm.is_ack() && confirm.take_message().is_none(), "{queue} did not take it");
    }

    /// Reads a queue until `enough` of what came is enough, acking all.
    pub async fn read(&self, queue: &str, mut enough: impl FnMut(&[Delivery]) -> bool) -> Vec<Delivery> {
        self.channel.basic_qos(500, BasicQosOptions::default()).await.expect("qos");
        let tag = fresh("reader");
        let mut stream = self
            .channel
            .basic_consume(queue.into(), tag.as_str().into(), BasicConsumeOptions::default(), FieldTable::default())
            .await
            .expect("a consumer");
        let mut read = Vec::new();
        while !enough(&read) {
            let next = tokio::time::timeout(super::PATIENCE, stream.next()).await;
            let delivery = next.unwrap_or_else(|_| panic!("{queue} went silent after {} messages", read.len()));
            let delivery = delivery.expect("a message").expect("a message");
            read.push(delivery);
            if read.len() % 100 == 0 || enough(&read) {
                let acker = &read[read.len() - 1].acker;
                acker.ack(BasicAckOptions { multiple: true }).await.expect("an ack");
            }
        }
        read
    }

    pub fn channel(&self) -> &Channel {
        &self.channel
    }
}

pub fn table(arguments: Arguments<'_>) -> FieldTable {
    let mut table = FieldTable::default();
    for (name, value) in arguments {
        table.insert((*name).into(), value.clone());
    }
    table
}

/// The message's id, which is the idempotency key.
pub fn id(delivery: &Delivery) -> String {
    delivery.properties.message_id().as_ref().map(|id| id.as_str().to_string()).unwrap_or_default()
}
