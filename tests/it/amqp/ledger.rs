//! A consumer as the guide wants it, which writes down what it was given before it dedups: the witness of what arrived.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use fencepost::inbox::{Inbox, Verdict};
use fencepost::model::key::EffectKey;
use futures_util::StreamExt;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions, ConfirmSelectOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Connection, ConnectionProperties};
use tokio::task::JoinHandle;

use super::rig::{AmqpRig, header};
use crate::support::broker::{id, table};

const LEDGER: &str = "
    create table public.receipts (n bigint generated always as identity, key text, attempt int, redelivered boolean, verdict text);
    create table public.payments (key text);";

/// The consumer's tables and its inbox, in the rig's database.
pub async fn install(amqp: &AmqpRig) {
    amqp.rig.client.batch_execute(LEDGER).await.unwrap();
    Inbox::new("inbox", "billing").unwrap().install(&amqp.rig.client).await.unwrap();
}

/// Consumes the rig's queue until it is dropped, over a new connection whenever one fails.
pub struct Consumer {
    task: JoinHandle<()>,
    failures: Arc<AtomicUsize>,
}

impl Consumer {
    pub async fn start(amqp: &AmqpRig) -> Self {
        let (url, queue) = (amqp.url().to_owned(), amqp.queue.clone());
        let mut database = amqp.rig.connect().await;
        let failures = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&failures);
        let task = tokio::spawn(async move {
            loop {
                if consume(&url, &queue, &mut database).await.is_err() {
                    count.fetch_add(1, Ordering::SeqCst);
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        });
        Self { task, failures }
    }

    /// Connections that failed, a reply that was not taken included.
    pub fn failures(&self) -> usize {
        self.failures.load(Ordering::SeqCst)
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Consumes and replies until its connection fails.
async fn consume(url: &str, queue: &str, database: &mut tokio_postgres::Client) -> anyhow::Result<()> {
    let inbox = Inbox::new("inbox", "billing")?;
    let broker = Connection::connect(url, ConnectionProperties::default()).await?;
    let (incoming, replies) = (broker.create_channel().await?, broker.create_channel().await?);
    replies.confirm_select(ConfirmSelectOptions::default()).await?;
    incoming.basic_qos(50, BasicQosOptions::default()).await?;
    let consumed =
        incoming.basic_consume(queue.into(), "".into(), BasicConsumeOptions::default(), FieldTable::default());
    let mut messages = consumed.await?;
    while let Some(message) = messages.next().await {
        let message = message?;
        let key: EffectKey = id(&message).parse()?;
        let tx = database.transaction().await?;
        let verdict = inbox.apply(&tx, &key, &message.data).await?;
        if verdict == Verdict::Applied {
            tx.execute("insert into public.payments values ($1)", &[&key.to_string()]).await?;
        }
        let attempt: i32 = header(&message, "outbox-attempt").unwrap().parse()?;
        tx.execute(
            "insert into public.receipts (key, attempt, redelivered, verdict) values ($1, $2, $3, $4)",
            &[&key.to_string(), &attempt, &message.redelivered, &verdict.ack().wire()],
        )
        .await?;
        tx.commit().await?;
        let echoed = message.properties.headers().as_ref().unwrap().inner();
        let headers = table(&[
            ("outbox-consumer", echoed["outbox-consumer"].clone()),
            ("outbox-ack-token", echoed["outbox-ack-token"].clone()),
            ("outbox-ack", AMQPValue::LongString(verdict.ack().wire().into())),
        ]);
        let correlation = message.properties.correlation_id().clone().unwrap();
        let properties =
            BasicProperties::default().with_correlation_id(correlation).with_headers(headers).with_delivery_mode(2);
        let queue = message.properties.reply_to().clone().unwrap();
        let options = BasicPublishOptions { mandatory: true, ..BasicPublishOptions::default() };
        let confirm = replies.basic_publish("".into(), queue, options, b"", properties).await?.await?;
        anyhow::ensure!(confirm.is_ack() && confirm.take_message().is_none(), "the reply was not taken");
        message.acker.ack(BasicAckOptions::default()).await?;
    }
    Ok(())
}
