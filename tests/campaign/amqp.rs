//! A consumer over AMQP: receipt, work, reply (confirmed), and only then the broker's ack.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use fencepost::edge::amqp::message::reply_queue;
use fencepost::model::key::Shard;
use futures_util::StreamExt;
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicNackOptions, BasicPublishOptions, BasicQosOptions, ConfirmSelectOptions,
    ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties, ExchangeKind};
use sha2::{Digest, Sha256};
use tokio_util::task::AbortOnDropHandle;

use crate::consumers::{
    Damage, Desk, EXCHANGE, LATE, Mood, PROFILES, Profile, REFUSED, Receipt, SORTED, Said, Speech, Transport, VERSIONS,
    hex, odd,
};
use crate::history::now;

/// The queue that takes nothing.
const FULL: &str = "full";
/// How long a binding is gone, and there, in turn.
const UNBOUND: Duration = Duration::from_millis(200);
const BOUND: Duration = Duration::from_millis(30);
pub const SHARDS: i16 = 8;
/// Longer than `ack_timeout`.
const LATE_REPLY: Duration = Duration::from_secs(7);
/// An epoch that no task of a run reaches.
const NO_EPOCH: &str = "1000000";

/// Everything a broker must have before a relay starts: exchange, queues, bindings, queues for replies.
pub async fn declare(url: &str, deployment: &str) -> anyhow::Result<()> {
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    let durable = ExchangeDeclareOptions { durable: true, ..ExchangeDeclareOptions::default() };
    for (exchange, kind) in [(EXCHANGE, ExchangeKind::Direct), (SORTED, ExchangeKind::Headers)] {
        channel.exchange_declare(exchange.into(), kind, durable, FieldTable::default()).await?;
    }
    for profile in PROFILES.iter().filter(|profile| profile.transport == Transport::Amqp) {
        queue(&channel, profile.name, FieldTable::default()).await?;
        for arguments in bindings(profile) {
            bind_queue(&channel, profile, arguments).await?;
        }
    }
    let mut arguments = FieldTable::default();
    arguments.insert("x-max-length".into(), AMQPValue::LongInt(0));
    arguments.insert("x-overflow".into(), AMQPValue::LongString("reject-publish".into()));
    queue(&channel, FULL, arguments).await?;
    channel.queue_bind(FULL.into(), SORTED.into(), "".into(), Default::default(), of_version(REFUSED)).await?;
    connection.close(200, "done".into()).await?;
    declare_replies(url, deployment).await
}

/// The queues for replies, those that are missing.
pub async fn declare_replies(url: &str, deployment: &str) -> anyhow::Result<()> {
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    for shard in 0..SHARDS {
        queue(&channel, &reply_queue(deployment, Shard(shard)), FieldTable::default()).await?;
    }
    connection.close(200, "done".into()).await?;
    Ok(())
}

pub async fn delete_replies(url: &str, deployment: &str, shard: i16) -> anyhow::Result<()> {
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    channel.queue_delete(reply_queue(deployment, Shard(shard)).into(), Default::default()).await?;
    connection.close(200, "done".into()).await?;
    Ok(())
}

/// Takes the waiting replies of all shards away.
pub async fn purge_replies(url: &str, deployment: &str) -> anyhow::Result<()> {
    for shard in 0..SHARDS {
        purge(url, &reply_queue(deployment, Shard(shard))).await?;
    }
    Ok(())
}

/// Whether somebody may connect.
pub async fn answers(url: &str) -> bool {
    let connecting = Connection::connect(url, ConnectionProperties::default());
    let Ok(Ok(connection)) = tokio::time::timeout(Duration::from_secs(20), connecting).await else { return false };
    // It answered: how this ends says no more.
    let _ = connection.close(200, "done".into()).await;
    true
}

async fn queue(channel: &Channel, name: &str, arguments: FieldTable) -> anyhow::Result<()> {
    let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
    channel.queue_declare(name.into(), durable, arguments).await?;
    Ok(())
}

/// What a consumer's queue takes: everything under its name, or each version by a binding of its own.
fn bindings(profile: &Profile) -> Vec<FieldTable> {
    if profile.exchange() == EXCHANGE {
        return vec![FieldTable::default()];
    }
    VERSIONS.iter().map(|version| of_version(version)).collect()
}

fn of_version(version: &str) -> FieldTable {
    let mut arguments = FieldTable::default();
    arguments.insert("x-match".into(), AMQPValue::LongString("all".into()));
    arguments.insert("outbox-schema-version".into(), AMQPValue::LongString(version.into()));
    arguments
}

/// Whether what is sent in the versions [`LATE`] and [`REFUSED`] finds a queue that takes it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Bindings {
    WithoutLate,
    WithLate,
}

/// Makes every binding that is missing.
pub async fn bind(url: &str, wanted: Bindings) -> anyhow::Result<()> {
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    for profile in PROFILES.iter().filter(|profile| profile.transport == Transport::Amqp) {
        for arguments in bindings(profile) {
            bind_queue(&channel, profile, arguments).await?;
        }
        if wanted == Bindings::WithLate && profile.exchange() == SORTED {
            channel.queue_unbind(FULL.into(), SORTED.into(), "".into(), of_version(REFUSED)).await?;
            bind_queue(&channel, profile, of_version(LATE)).await?;
            bind_queue(&channel, profile, of_version(REFUSED)).await?;
        }
    }
    connection.close(200, "done".into()).await?;
    Ok(())
}

async fn bind_queue(channel: &Channel, profile: &Profile, arguments: FieldTable) -> anyhow::Result<()> {
    let (name, exchange) = (profile.name, profile.exchange());
    let options = QueueBindOptions::default();
    Ok(channel.queue_bind(name.into(), exchange.into(), name.into(), options, arguments).await?)
}

/// Takes a queue's last binding away and brings it back, again and again for so long. Of a queue with several the rest
/// stay: there, what is returned comes back amid what is not.
pub async fn flap(url: &str, profile: &Profile, lasts: Duration) -> anyhow::Result<()> {
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    let (name, exchange) = (profile.name, profile.exchange());
    let arguments = bindings(profile).pop().context("a binding")?;
    let end = tokio::time::Instant::now() + lasts;
    let flapping = async {
        while tokio::time::Instant::now() < end {
            channel.queue_unbind(name.into(), exchange.into(), name.into(), arguments.clone()).await?;
            tokio::time::sleep(UNBOUND).await;
            bind_queue(&channel, profile, arguments.clone()).await?;
            tokio::time::sleep(BOUND).await;
        }
        anyhow::Ok(())
    };
    let flapped = flapping.await;
    bind_queue(&channel, profile, arguments).await?;
    flapped
}

/// Takes a queue's waiting messages away, though they were confirmed.
pub async fn purge(url: &str, name: &str) -> anyhow::Result<()> {
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    channel.queue_purge(name.into(), Default::default()).await?;
    Ok(())
}

/// Reads its queue, connecting again whenever it must.
pub fn start(desk: Arc<Desk>, url: String) -> AbortOnDropHandle<()> {
    AbortOnDropHandle::new(tokio::spawn(async move {
        loop {
            // Whatever ended it: the broker brings again what was not acked.
            let _ = read(&desk, &url).await;
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }))
}

async fn read(desk: &Desk, url: &str) -> anyhow::Result<()> {
    let connecting = Connection::connect(url, ConnectionProperties::default());
    let connection = tokio::time::timeout(Duration::from_secs(5), connecting).await??;
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    channel.basic_qos(10, BasicQosOptions::default()).await?;
    let (name, options) = (desk.profile.name, BasicConsumeOptions::default());
    let mut messages = channel.basic_consume(name.into(), "campaign".into(), options, FieldTable::default()).await?;
    while let Some(message) = messages.next().await {
        let message = message?;
        if !serve(desk, &channel, &message).await? {
            // The connection goes, with what was not acked.
            break;
        }
    }
    // Without a word to the broker.
    drop(messages);
    let _ = connection.close(200, "gone".into()).await;
    Ok(())
}

/// `false`: it loses its connection over this one.
async fn serve(desk: &Desk, channel: &Channel, message: &Delivery) -> anyhow::Result<bool> {
    let (number, mood, coin) = desk.take(receipt_of(message, desk.profile.name));
    let speaks = desk.profile.speech == Speech::Words;
    let damage = if speaks { desk.damage() } else { None };
    if damage == Some(Damage::Forged) {
        for forged in forged(message)? {
            send(channel, forged).await?;
        }
    }
    // What was forged is to be believed while the work is still to be done.
    let returns = coin && (mood == Mood::Errors || damage == Some(Damage::Forged) && !message.redelivered);
    let said = match mood {
        _ if returns => {
            desk.says(number, Said::Returned);
            tokio::time::sleep(Duration::from_millis(50)).await;
            message.acker.nack(BasicNackOptions { requeue: true, multiple: false }).await?;
            return Ok(true);
        }
        Mood::ResetsBefore | Mood::Refuses | Mood::Gone => {
            desk.says(number, Said::Returned);
            return Ok(false);
        }
        Mood::BlackHole => {
            desk.says(number, Said::Returned);
            while desk.mood() == Mood::BlackHole {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            return Ok(false);
        }
        Mood::NotApplied | Mood::Throttles if speaks => Said::NotApplied,
        Mood::ResetsAfter => {
            desk.apply(number);
            desk.says(number, Said::Returned);
            return Ok(false);
        }
        // Its reply is lost: it works, and says nothing.
        Mood::Garbage | Mood::InProgress => {
            desk.apply(number);
            Said::Nothing
        }
        Mood::Slow => {
            tokio::time::sleep(Duration::from_millis(500)).await;
            desk.apply(number)
        }
        Mood::Crawls => {
            tokio::time::sleep(Duration::from_millis(150)).await;
            desk.apply(number)
        }
        _ => desk.apply(number),
    };
    desk.says(number, said);
    if speaks && let Some(word) = desk.word(number, said) {
        let reply = reply_to(message, &word)?;
        match damage {
            Some(Damage::Late) => {
                let channel = channel.clone();
                tokio::spawn(async move {
                    tokio::time::sleep(LATE_REPLY).await;
                    // Over a channel that is gone by then it is lost.
                    let _ = send(&channel, reply).await;
                });
            }
            Some(Damage::Doubled) => {
                send(channel, reply.clone()).await?;
                send(channel, reply).await?;
            }
            Some(Damage::Forged) | None => send(channel, reply).await?,
        }
    }
    message.acker.ack(BasicAckOptions::default()).await?;
    Ok(true)
}

#[derive(Clone)]
struct Reply {
    queue: ShortString,
    properties: BasicProperties,
}

/// The consumer's honest word about a message.
fn reply_to(to: &Delivery, word: &str) -> anyhow::Result<Reply> {
    let echoed = to.properties.headers().as_ref().context("headers")?;
    let mut headers = FieldTable::default();
    for name in ["outbox-consumer", "outbox-ack-token"] {
        headers.insert(name.into(), echoed.inner().get(name).context("a header")?.clone());
    }
    let (word, current) = match word.split_once("; current=") {
        Some((word, current)) => (word, Some(current)),
        None => (word, None),
    };
    headers.insert("outbox-ack".into(), AMQPValue::LongString(word.into()));
    if let Some(current) = current {
        headers.insert("outbox-ack-current".into(), AMQPValue::LongString(current.into()));
    }
    let correlation = to.properties.correlation_id().clone().context("a correlation id")?;
    let queue = to.properties.reply_to().clone().context("a queue for replies")?;
    let properties =
        BasicProperties::default().with_correlation_id(correlation).with_headers(headers).with_delivery_mode(2);
    Ok(Reply { queue, properties })
}

/// Words that must not count: one under a token that was never given out, and one that its task's epochs give the lie.
fn forged(to: &Delivery) -> anyhow::Result<[Reply; 2]> {
    let mut unproven = reply_to(to, "applied")?;
    let mut headers = unproven.properties.headers().clone().context("headers")?;
    headers.insert("outbox-ack-token".into(), AMQPValue::LongString("bm90IGEgdG9rZW4".into()));
    unproven.properties = unproven.properties.with_headers(headers);
    Ok([unproven, reply_to(to, &format!("stale; current={NO_EPOCH}"))?])
}

async fn send(channel: &Channel, reply: Reply) -> anyhow::Result<()> {
    let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
    let confirm = channel.basic_publish("".into(), reply.queue, options, b"", reply.properties).await?.await?;
    anyhow::ensure!(confirm.is_ack(), "the broker did not take a reply");
    Ok(())
}

fn receipt_of(message: &Delivery, me: &str) -> Receipt {
    let text = |name: &str| match message.properties.headers().as_ref().and_then(|h| h.inner().get(name).cloned()) {
        Some(AMQPValue::LongString(text)) => text.to_string(),
        Some(AMQPValue::LongLongInt(number)) => number.to_string(),
        _ => String::new(),
    };
    let short = |text: &Option<lapin::types::ShortString>| text.as_ref().map(ToString::to_string).unwrap_or_default();
    let key = short(message.properties.message_id());
    let digest = Sha256::digest(&message.data);
    let mut parts = key.split(':').map(str::to_owned);
    let pairs = [
        ("correlation_id", short(message.properties.correlation_id()), format!("{me}/{key}")),
        ("outbox-task-id", text("outbox-task-id"), parts.next().unwrap_or_default()),
        ("outbox-lease-epoch", text("outbox-lease-epoch"), parts.next().unwrap_or_default()),
        ("outbox-consumer", text("outbox-consumer"), me.to_owned()),
        ("content-digest", text("content-digest"), format!("sha-256=:{}:", STANDARD.encode(digest))),
    ];
    Receipt {
        at: now(),
        attempt: text("outbox-attempt").parse().unwrap_or(0),
        sha256: hex(&digest),
        again: message.redelivered,
        odd: odd(&pairs),
        key,
        applied: None,
        said: None,
        answered: None,
    }
}
