//! A relay on a database and a broker, and a consumer of its queue that the test puts words in the mouth of.

use std::time::Duration;

use fencepost::edge::amqp::message::reply_queue;
use fencepost::edge::amqp::token::AckKey;
use fencepost::model::key::{EffectKey, Shard};
use fencepost::store::replies;
use lapin::BasicProperties;
use lapin::message::Delivery;
use lapin::types::{AMQPValue, ShortString};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::support::broker::{self, Client, fresh, table};
use crate::support::process::{self, Process};
use crate::truth::rig::Rig;

/// The shards of an installation.
const SHARDS: i16 = 8;

pub struct AmqpRig {
    pub rig: Rig,
    pub client: Client,
    pub queue: String,
    pub deployment: String,
    url: String,
}

impl AmqpRig {
    /// A consumer `billing` on a fresh queue of the shared broker; `more` is added to its entry.
    pub async fn new(more: &str) -> Self {
        Self::on(broker::url().await, more).await
    }

    pub async fn on(url: &str, more: &str) -> Self {
        let rig = Rig::new("").await;
        // Test databases are copies of one template: each gets a name of its own.
        let deployment = format!("t{:08x}", rand::random::<u32>());
        let sql = "update fencepost.settings set value = $1 where name = 'deployment'";
        rig.client.execute(sql, &[&deployment]).await.expect("a deployment");
        let client = Client::new(url).await;
        let this = Self { rig, client, queue: fresh("acks"), deployment, url: url.into() };
        this.client.queue(&this.queue, &[]).await;
        for shard in 0..SHARDS {
            this.client.queue(&this.replies(Shard(shard)), &[]).await;
        }
        this.configure(url, more);
        this
    }

    /// Writes the configuration; `url` is where relays find the broker.
    pub fn configure(&self, url: &str, more: &str) {
        let file = self.file("amqp-url", url);
        self.configure_broker(&format!("url_file = '{file}'\nheartbeat = '1s'"), more);
    }

    /// The same with these lines under `[brokers.default]`.
    pub fn configure_broker(&self, broker: &str, more: &str) {
        let consumer =
            format!("[[consumers]]\nname = 'billing'\nkind = 'amqp'\nrouting_key = '{}'\n{more}", self.queue);
        self.rig.configure("base = '50ms'\ncap = '200ms'", &format!("[brokers.default]\n{broker}\n{consumer}\n"));
    }

    /// A file that goes with the rig; gives its path.
    pub fn file(&self, name: &str, text: &str) -> String {
        let path = self.rig.folder().join(name);
        std::fs::write(&path, text).expect("a file");
        path.to_str().expect("a path").to_owned()
    }

    /// `fencepost ARGS` with the rig's configuration: exit code, and all it said.
    pub async fn fencepost(&self, args: &[&str]) -> (i32, String) {
        let config = self.rig.folder().join("fencepost.toml");
        let env = [("DATABASE_URL", self.rig.url()), ("FENCEPOST_CONFIG", config.to_str().expect("a path"))];
        let (code, out, err) = process::run(args, &env).await;
        (code, out + &err)
    }

    pub async fn relay(&self) -> Process {
        self.rig.relay().await
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    pub fn replies(&self, shard: Shard) -> String {
        reply_queue(&self.deployment, shard)
    }

    /// The installation's own keys, which no consumer has.
    pub async fn keys(&self) -> AckKey {
        let identity = replies::identity(&self.rig.client).await.expect("an identity");
        AckKey::new(identity.deployment, identity.secret)
    }

    /// The next `count` messages of the consumer's queue, acked to the broker.
    pub async fn receive(&self, count: usize) -> Vec<Delivery> {
        self.client.read(&self.queue, |read| read.len() == count).await
    }

    /// The consumer's reply to a message.
    pub async fn reply(&self, to: &Delivery, word: &str) {
        self.reply_with(to, &[("outbox-ack", AMQPValue::LongString(word.into()))]).await;
    }

    /// The same with these headers, beside the echoed ones.
    pub async fn reply_with(&self, to: &Delivery, headers: &[(&str, AMQPValue)]) {
        let echoed = to.properties.headers().as_ref().expect("headers");
        let mut all = table(headers);
        for name in ["outbox-consumer", "outbox-ack-token"] {
            if !all.contains_key(name) {
                all.insert(name.into(), echoed.inner()[name].clone());
            }
        }
        let correlation = to.properties.correlation_id().clone().expect("a correlation id");
        let queue = to.properties.reply_to().clone().expect("a queue for replies");
        let properties =
            BasicProperties::default().with_correlation_id(correlation).with_headers(all).with_delivery_mode(2);
        self.client.publish(queue.as_str(), properties, b"").await;
    }

    /// A reply to a message that may never have been sent, with a good token.
    pub async fn reply_unasked(&self, key: &str, shard: Shard, word: &str) {
        let token = self.keys().await.token("billing", key);
        let headers = table(&[
            ("outbox-consumer", AMQPValue::LongString("billing".into())),
            ("outbox-ack-token", AMQPValue::LongString(token.into())),
            ("outbox-ack", AMQPValue::LongString(word.into())),
        ]);
        let correlation: ShortString = format!("billing/{key}").as_str().into();
        let properties = BasicProperties::default().with_correlation_id(correlation).with_headers(headers);
        self.client.publish(&self.replies(shard), properties, b"").await;
    }

    /// The shard of an effect.
    pub async fn shard(&self, key: &str) -> Shard {
        let sql = "select shard from fencepost.effects where id = fencepost.effect_id_of($1)";
        Shard(self.rig.client.query_one(sql, &[&key]).await.expect("an effect").get(0))
    }

    /// Waits until every reply was taken and told off.
    pub async fn replies_are_taken(&self) {
        crate::support::eventually("every reply is acked", async || (self.replies_waiting().await == 0).then_some(()))
            .await;
    }

    /// Replies that nobody has in hand.
    pub async fn replies_waiting(&self) -> u32 {
        let mut waiting = 0;
        for shard in 0..SHARDS {
            waiting += self.client.depth(&self.replies(Shard(shard))).await;
        }
        waiting
    }

    pub async fn orphans(&self) -> Vec<(Option<String>, String)> {
        let kept = replies::orphans(&self.rig.client, 100).await.expect("orphans");
        kept.into_iter().map(|orphan| (orphan.correlation_id, orphan.why)).collect()
    }

    pub async fn alarms(&self, name: &str) -> i64 {
        self.rig
            .count(&format!("select count(*) from fencepost.alarms where name = '{name}' and resolved_at is null"))
            .await
    }

    /// Commits so many effects for `billing`, pauses, and goes on, until `stop`. Gives how many it committed.
    pub async fn produce(&self, at_once: i32, pause: Duration, stop: &CancellationToken) -> JoinHandle<i32> {
        let (producer, ended) = (self.rig.connect().await, stop.clone());
        tokio::spawn(async move {
            let mut committed = 0;
            while !ended.is_cancelled() {
                let sql =
                    "select fencepost.record_completion('job-' || n, 1, '[{\"consumer\": \"billing\", \"payload\": 1}]')
                     from generate_series($1::int, $1 + $2 - 1) n";
                producer.execute(sql, &[&committed, &at_once]).await.expect("a commit");
                committed += at_once;
                tokio::time::sleep(pause).await;
            }
            committed
        })
    }

    /// Attempts of any delivery that do not have exactly one token.
    pub async fn endless_attempts(&self) -> i64 {
        self.rig
            .count("select count(*) from (select from fencepost.attempts group by effect_id, consumer_id, attempt having count(token) <> 1) a")
            .await
    }

    /// Makes what waits for a reply overdue.
    pub async fn let_time_pass(&self) {
        let sql = "update fencepost.parked set next_attempt_at = clock_timestamp() - interval '1 day' where state = 'unacked'";
        let aged = self.rig.client.execute(sql, &[]).await.expect("an update");
        assert!(aged > 0, "nothing waits for a reply");
    }
}

/// A header as text.
pub fn header(delivery: &Delivery, name: &str) -> Option<String> {
    match delivery.properties.headers().as_ref()?.inner().get(name)? {
        AMQPValue::LongString(text) => Some(text.to_string()),
        AMQPValue::LongLongInt(number) => Some(number.to_string()),
        _ => None,
    }
}

pub fn key(delivery: &Delivery) -> EffectKey {
    broker::id(delivery).parse().expect("a key")
}
