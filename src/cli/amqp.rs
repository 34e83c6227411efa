//! `fencepost amqp check | init`: what exists at the brokers, and declaring what fencepost itself needs there.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use serde::Serialize;
use serde_json::json;

use super::consent::Consent;
use super::global::{self, Global};
use super::logging::{self, report};
use super::output::{Table, plain};
use super::{Exit, Usage};
use crate::config::{Config, LogFormat};
use crate::edge::amqp::link::{Link, Purpose};
use crate::edge::amqp::message::{reply_queue, short};
use crate::edge::amqp::topology;
use crate::model::broker::Broker;
use crate::model::consumer::{AckMode, AmqpSpec, Consumer, ConsumerEntry, EdgeSpec};
use crate::model::key::ConsumerId;
use crate::store::consumers::Stored;
use crate::store::replies::{self, Installation};
use crate::store::{self, audit};

/// The longest one answer of a broker may take.
const LIMIT: Duration = Duration::from_secs(10);

#[derive(clap::Subcommand, Debug)]
pub enum Command {
    /// Connect to every broker and look whether what is needed exists; declares nothing.
    Check,
    /// Declare the reply queues, and with --queues those of consumers on the default exchange.
    Init(Init),
}

#[derive(clap::Args, Debug)]
pub struct Init {
    /// Also declare (durable, without arguments) the queues of consumers that name only a routing key.
    #[arg(long)]
    queues: bool,
    #[command(flatten)]
    consent: Consent,
}

pub async fn run(global: &Global, command: Command) -> anyhow::Result<Exit> {
    logging::init(LogFormat::Text, "error");
    let config = global.config()?;
    if config.brokers.is_empty() {
        return Err(Usage("no broker is configured: write [brokers.default], or set AMQP_URL".into()).into());
    }
    match command {
        Command::Check => check(global, &config).await,
        Command::Init(args) => init(global, &config, args).await,
    }
}

/// One thing that was looked at.
#[derive(Serialize)]
struct Finding {
    broker: String,
    object: String,
    /// How it is, where it is in order.
    state: Option<String>,
    wrong: Option<String>,
}

struct Findings<'a> {
    broker: &'a Broker,
    all: Vec<Finding>,
}

impl Findings<'_> {
    fn add(&mut self, object: String, result: Result<String, String>) {
        let (state, wrong) = match result {
            Ok(state) => (Some(state), None),
            Err(wrong) => (None, Some(wrong)),
        };
        self.all.push(Finding { broker: self.broker.name.clone(), object, state, wrong });
    }
}

/// The consumers of the file and, where they are not in it, of the database.
fn entries(config: &Config, stored: &[Stored]) -> Vec<ConsumerEntry> {
    let known = |name: &str| config.consumers.iter().any(|entry| entry.name == name);
    let others = stored.iter().filter(|stored| !stored.retired && !known(&stored.name));
    config.consumers.iter().cloned().chain(others.filter_map(|stored| stored.entry().ok())).collect()
}

/// The consumers of a broker.
fn consumers(entries: &[ConsumerEntry], broker: &Broker) -> Vec<(Consumer, AmqpSpec)> {
    let checked = entries.iter().filter_map(|entry| entry.check(ConsumerId(0)).ok());
    checked
        .filter_map(|consumer| match consumer.edge.clone() {
            EdgeSpec::Amqp(spec) if spec.broker == broker.name => Some((consumer, spec)),
            _ => None,
        })
        .collect()
}

async fn check(global: &Global, config: &Config) -> anyhow::Result<Exit> {
    // Without a database the brokers are looked at all the same.
    let installation = async {
        let client = global::open(&global.database_of(config)?).await?;
        anyhow::Ok((replies::installation(&client).await?, store::consumers::load(&client).await?))
    };
    let known = installation.await;
    let (installation, stored) = match &known {
        Ok((installation, stored)) => (Some(installation), stored.as_slice()),
        Err(_) => (None, [].as_slice()),
    };
    let entries = entries(config, stored);
    let mut findings = Vec::new();
    for broker in &config.brokers {
        findings.extend(look(broker, &consumers(&entries, broker), installation).await);
    }
    let failed = findings.iter().any(|finding| finding.wrong.is_some());
    global.output().print(&findings, || {
        let mut table = Table::new(&["broker", "object", "result"]);
        for finding in &findings {
            let result = finding.wrong.as_ref().or(finding.state.as_ref()).cloned().unwrap_or_default();
            table.row([finding.broker.clone(), finding.object.clone(), result]);
        }
        let mut text = table.render("");
        if let Err(error) = &known {
            text.push_str(&format!("reply queues were not looked at: {}\n", report(error.as_ref())));
        }
        text.push_str(
            "An alternate exchange hides messages without a route from their sender, and AMQP does not show it:\n\
             rabbitmqctl list_exchanges name arguments policy\n",
        );
        text
    })?;
    Ok(if failed || known.is_err() { Exit::Found } else { Exit::Done })
}

async fn look(
    broker: &Arc<Broker>,
    consumers: &[(Consumer, AmqpSpec)],
    installation: Option<&Installation>,
) -> Vec<Finding> {
    let mut findings = Findings { broker, all: Vec::new() };
    let mut open = None;
    for host in &broker.hosts {
        match Link::open_at(broker, host, Purpose::Look, LIMIT).await {
            Ok(link) => {
                findings.add(format!("host {host}"), Ok(format!("connected, virtual host {:?}", broker.vhost)));
                open = Some(link);
            }
            Err(error) => findings.add(format!("host {host}"), Err(report(&error))),
        }
    }
    let Some(link) = open else { return findings.all };
    for (consumer, spec) in consumers {
        if !spec.exchange.is_empty() {
            let found = match short("exchange", &spec.exchange) {
                Ok(name) => topology::exchange_exists(&link, name, &broker.vhost).await.map_err(|e| report(&e)),
                Err(error) => Err(report(&error)),
            };
            let object = format!("exchange {} of {}", spec.exchange, consumer.name);
            findings.add(object, found.map(|()| "exists".into()));
        }
        if let Some(queue) = &spec.queue {
            findings.add(format!("queue {queue} of {}", consumer.name), depth(&link, queue, broker).await);
        }
    }
    if let (true, Some(installation)) = (replying(consumers), installation) {
        for shard in &installation.shards {
            let queue = reply_queue(&installation.deployment, *shard);
            let found = depth(&link, &queue, broker).await;
            findings.add(format!("queue {queue}"), found.map_err(|wrong| format!("{wrong} (fencepost amqp init)")));
        }
    }
    link.close().await;
    findings.all
}

async fn depth(link: &Link, queue: &str, broker: &Broker) -> Result<String, String> {
    let name = short("queue", queue).map_err(|error| report(&error))?;
    let depth = topology::queue_depth(link, name, &broker.vhost).await.map_err(|error| report(&error))?;
    Ok(format!("{} messages, {} consumers", depth.messages, depth.consumers))
}

fn replying(consumers: &[(Consumer, AmqpSpec)]) -> bool {
    consumers.iter().any(|(consumer, _)| consumer.contract.ack != AckMode::None)
}

/// A queue to be declared.
#[derive(Serialize)]
struct Wanted {
    broker: String,
    queue: String,
    why: String,
}

async fn init(global: &Global, config: &Config, args: Init) -> anyhow::Result<Exit> {
    let mut client = global::open(&global.database_of(config)?).await?;
    let installation = replies::installation(&client).await?;
    let entries = entries(config, &store::consumers::load(&client).await?);
    let mut wanted = Vec::new();
    for broker in &config.brokers {
        let consumers = consumers(&entries, broker);
        let mut want = |queue: String, why: String| wanted.push(Wanted { broker: broker.name.clone(), queue, why });
        if replying(&consumers) {
            for shard in &installation.shards {
                want(reply_queue(&installation.deployment, *shard), format!("replies for shard {shard}"));
            }
        }
        let own = consumers.iter().filter(|(_, spec)| args.queues && spec.exchange.is_empty());
        own.for_each(|(consumer, spec)| want(spec.routing_key.clone(), format!("messages for {}", consumer.name)));
    }
    global.output().print(&wanted, || match wanted.as_slice() {
        [] => "nothing to declare: no AMQP consumer replies".into(),
        wanted => wanted
            .iter()
            .map(|w| {
                format!(
                    "declare queue {} at broker {} (durable): {}\n",
                    plain(&w.queue),
                    plain(&w.broker),
                    plain(&w.why)
                )
            })
            .collect(),
    })?;
    if wanted.is_empty() {
        return Ok(Exit::Done);
    }
    let reason = args.consent.given()?;
    for broker in &config.brokers {
        let queues: Vec<&str> = wanted.iter().filter(|w| w.broker == broker.name).map(|w| w.queue.as_str()).collect();
        if queues.is_empty() {
            continue;
        }
        let link = Link::open(broker, Purpose::Look, LIMIT).await?;
        for queue in &queues {
            topology::declare_queue(&link, short("queue", queue)?).await.with_context(|| format!("queue {queue}"))?;
        }
        link.close().await;
        let tx = client.transaction().await?;
        audit::record(&tx, "amqp init", &broker.name, &reason, &json!({ "queues": queues })).await?;
        tx.commit().await?;
    }
    Ok(Exit::Done)
}
