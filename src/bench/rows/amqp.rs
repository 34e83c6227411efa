//! AMQP drain beside bare lapin: the same queue, window, message and confirms. What the queue holds afterwards is counted.

use std::collections::VecDeque;
use std::time::{Duration, Instant, SystemTime};

use futures_util::StreamExt;
use lapin::options::{
    BasicConsumeOptions, BasicPublishOptions, BasicQosOptions, ConfirmSelectOptions, QueueDeclareOptions,
};
use lapin::types::FieldTable;
use lapin::{Channel, Confirmation, Connection, ConnectionProperties};
use serde_json::json;

use super::{bare, drain};
use crate::bench::bodies::Size;
use crate::bench::ceiling::Ceiling;
use crate::bench::figure::{Figure, Must};
use crate::bench::relay::Relay;
use crate::bench::{Bench, Error, Result, backlog};
use crate::demo::embedded::rabbitmq::PrivateRabbitmq;
use crate::edge::amqp::message;
use crate::edge::amqp::token::AckKey;
use crate::model::consumer::{AckMode, DEFAULT_WINDOW};
use crate::model::effect::AttemptContext;

const NAME: &str = "AMQP drain, confirms";
const MUST: Must = Must::RatioAtLeast(0.85);
const QUEUE: &str = "bench";

pub async fn measure(bench: &Bench) -> Result<Vec<Figure>> {
    let broker = PrivateRabbitmq::start().await?;
    let url = broker.url();
    let (count, bodies) = (bench.sized(60_000, 200_000), bench.bodies.of(Size::Small));
    let before = bare_lapin(&url, count, bodies[0].clone()).await?;
    let (rate, cost) = relayed(bench, &url, count, &bodies).await?;
    let after = bare_lapin(&url, count, bodies[0].clone()).await?;
    Ok(vec![Figure::between(NAME, "/s", rate, Ceiling { before, after }, MUST).noting(cost)])
}

async fn relayed(bench: &Bench, url: &str, count: u32, bodies: &[Vec<u8>]) -> Result<(f64, String)> {
    let queue = Queue::open(url).await?;
    let stage = bench.rig.stage().await?;
    let spec = json!({
        "kind": "amqp", "broker": "default", "exchange": "", "routing_key": QUEUE, "ack": "none", "on_ambiguous": "retry",
    });
    let consumer = stage.declare_spec("queue", spec).await?;
    backlog::fill(&stage, 0, count, bodies, &[consumer]).await?;
    backlog::calm(&stage).await?;
    let mut relay = Relay::start_with(&bench.rig, &stage, &[("AMQP_URL", url.to_owned())])?;
    let deadline = Instant::now() + Duration::from_secs(120);
    while drained(&stage).await? < i64::from(count) {
        relay.check()?;
        if Instant::now() > deadline {
            return Err(Error::Untrue(format!(
                "the AMQP drain does not end; the relay's last words:\n{}",
                relay.last_words()
            )));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let cpu = relay.cpu()? / count;
    let rate = drain::rate(&stage).await?;
    let cost = format!("relay: {} µs of processor a delivery", cpu.as_micros());
    relay.stop().await?;
    drain::settled(&stage, count).await?;
    queue.verify(count).await?;
    bench.rig.clear().await?;
    Ok((rate, cost))
}

/// Deliveries of flights that have closed.
async fn drained(stage: &crate::bench::rig::Stage) -> Result<i64> {
    let sql =
        "-- bench::drained\nselect coalesce(sum(deliveries), 0)::bigint from fencepost.flights where token = 'done'";
    Ok(stage.client.query_one(sql, &[]).await?.get(0))
}

/// Publishes with a window of unconfirmed messages, in a runtime of its own.
#[expect(clippy::disallowed_methods, reason = "no database takes part here; the time is only an attempt's")]
async fn bare_lapin(url: &str, count: u32, body: Vec<u8>) -> Result<f64> {
    let queue = Queue::open(url).await?;
    let to = url.to_owned();
    let took = bare::elsewhere(move || async move {
        let connection = Connection::connect(&to, ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        let started = Instant::now();
        let (body, keys) = (bare::Body::new(body), AckKey::new("bench", "no reply is asked for".to_owned().into()));
        let mut unconfirmed = VecDeque::with_capacity(DEFAULT_WINDOW as usize);
        for n in 0..count {
            if unconfirmed.len() == DEFAULT_WINDOW as usize
                && let Some(oldest) = unconfirmed.pop_front()
            {
                confirmed(oldest).await?;
            }
            let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
            let effect = body.effect(n);
            let context = AttemptContext { effect: &effect, number: 1, now: SystemTime::now() };
            let message = message::build(&context, "queue", AckMode::None, &keys)
                .map_err(|why| Error::Untrue(why.to_string()))?;
            unconfirmed.push_back(
                channel.basic_publish("".into(), QUEUE.into(), options, &message.body, message.properties).await?,
            );
        }
        for oldest in unconfirmed {
            confirmed(oldest).await?;
        }
        let took = started.elapsed();
        connection.close(200, "done".into()).await?;
        Ok(took)
    })
    .await?;
    queue.verify(count).await?;
    Ok(f64::from(count) / took.as_secs_f64())
}

async fn confirmed(confirm: impl Future<Output = lapin::Result<Confirmation>>) -> Result<()> {
    match confirm.await? {
        Confirmation::Ack(None) => Ok(()),
        other => Err(Error::Untrue(format!("the bare client was not confirmed: {other:?}"))),
    }
}

/// A durable queue, empty at first.
struct Queue {
    connection: Connection,
    channel: Channel,
}

impl Queue {
    async fn open(url: &str) -> Result<Self> {
        let connection = Connection::connect(url, ConnectionProperties::default()).await?;
        let channel = connection.create_channel().await?;
        let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        channel.queue_declare(QUEUE.into(), options, FieldTable::default()).await?;
        channel.queue_purge(QUEUE.into(), Default::default()).await?;
        Ok(Self { connection, channel })
    }

    /// Takes everything out; each of `count` messages must be there once.
    async fn verify(self, count: u32) -> Result<()> {
        self.channel.basic_qos(1_000, BasicQosOptions::default()).await?;
        let options = BasicConsumeOptions { no_ack: true, ..BasicConsumeOptions::default() };
        let mut messages =
            self.channel.basic_consume(QUEUE.into(), "bench".into(), options, FieldTable::default()).await?;
        let (mut seen, mut different, mut too_many) = (vec![false; count as usize], 0, 0);
        while different < count {
            let next = tokio::time::timeout(Duration::from_secs(10), messages.next()).await;
            let Ok(Some(message)) = next else {
                return Err(Error::Untrue(format!("only {different} of {count} messages are in the queue")));
            };
            let message = message?;
            let id = message.properties.message_id().as_ref().map(|id| id.as_str().to_owned()).unwrap_or_default();
            let number =
                id.strip_prefix("bench-").and_then(|id| id.strip_suffix(":1")).and_then(|n| n.parse::<usize>().ok());
            match number.and_then(|n| seen.get_mut(n)) {
                Some(seen) if !*seen => {
                    *seen = true;
                    different += 1;
                }
                _ => too_many += 1,
            }
        }
        let left = tokio::time::timeout(Duration::from_millis(500), messages.next()).await.is_ok();
        if too_many > 0 || left {
            return Err(Error::Untrue(format!("of {count} messages {too_many} or more came too often")));
        }
        Ok(self.connection.close(200, "done".into()).await?)
    }
}
