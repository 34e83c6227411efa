//! Confirmed messages whose consumer has not replied in time. They are published again only where that can help: not
//! while the queue still holds messages or nobody reads it, since then the first one is still on its way.

use std::time::Duration;

use deadpool_postgres::Pool;
use tokio_util::sync::CancellationToken;

use super::replies::Replies;
use crate::edge::amqp::link::{Link, Purpose};
use crate::edge::amqp::{message, topology};
use crate::edge::error::report;
use crate::model::consumer::{AckMode, AmqpSpec, Consumer, EdgeSpec};
use crate::model::key::{Shard, ShardEpoch};
use crate::store::overdue::{self, Terms};
use crate::store::{Result, database::Error};

const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Looks every few seconds until `stop`.
pub async fn watch(replies: Replies, pool: Pool, stop: CancellationToken) {
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(LOOK_EVERY) => {}
        }
        let held: Vec<(Shard, ShardEpoch)> =
            replies.router.leases().iter().map(|lease| (lease.shard, lease.epoch)).collect();
        if held.is_empty() {
            continue;
        }
        for consumer in replies.router.consumers() {
            let EdgeSpec::Amqp(spec) = &consumer.edge else { continue };
            if consumer.contract.ack != AckMode::Required {
                continue;
            }
            let looked = async {
                let client = pool.get().await.map_err(Error::from)?;
                look(&replies, &client, &consumer, spec, &held).await
            };
            match looked.await {
                Ok(()) => {}
                Err(error) if error.is_disconnect() => break,
                Err(error) => {
                    tracing::warn!(consumer = %consumer.name, error = %report(&error), "overdue replies could not be looked for")
                }
            }
        }
    }
}

async fn look(
    replies: &Replies,
    client: &tokio_postgres::Client,
    consumer: &Consumer,
    spec: &AmqpSpec,
    held: &[(Shard, ShardEpoch)],
) -> Result<()> {
    let terms = Terms {
        consumer: consumer.id,
        on_ambiguous: consumer.contract.on_ambiguous,
        ack_timeout: consumer.ack_timeout,
        republishes: spec.republishes,
    };
    let waiting = overdue::count(client, &terms, held).await?;
    metrics::gauge!("fencepost_overdue_acks", "consumer" => consumer.name.clone()).set(waiting as f64);
    if waiting == 0 {
        return Ok(());
    }
    if let Some(why) = pointless(replies, consumer, spec).await {
        tracing::info!(consumer = %consumer.name, waiting, %why, "no reply in time, and not published again yet");
        return overdue::explain(client, &terms, held, &why).await;
    }
    let turned = overdue::turn(client, &terms, held).await?;
    tracing::warn!(consumer = %consumer.name, republished = turned.republished, in_doubt = turned.in_doubt, "no reply in time");
    metrics::counter!("fencepost_republished_total", "consumer" => consumer.name.clone()).increment(turned.republished);
    if turned.republished > 0 {
        replies.bell.parked.notify_one();
    }
    Ok(())
}

/// Why another copy would help nobody now.
async fn pointless(replies: &Replies, consumer: &Consumer, spec: &AmqpSpec) -> Option<String> {
    let queue = message::short("queue", spec.queue.as_ref()?).ok()?;
    let broker = replies.reach.broker(&spec.broker)?;
    let depth = async {
        let link = Link::open(broker, Purpose::Look, consumer.connect_timeout).await?;
        let depth = topology::queue_depth(&link, queue, &broker.vhost).await;
        link.close().await;
        depth
    };
    match depth.await {
        Err(error) => Some(format!("no reply yet, and its queue cannot be looked at: {}", report(&error))),
        Ok(depth) if depth.consumers == 0 => Some("no reply yet, and nobody reads its queue".into()),
        Ok(depth) if depth.messages > 0 => {
            Some(format!("no reply yet, and its queue still holds {} messages", depth.messages))
        }
        Ok(_) => None,
    }
}
