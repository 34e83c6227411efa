//! A consumer: a named destination with a declared contract (contract, sections 2 and 7).
//!
//! [`ConsumerEntry`] is what a person writes in `[[consumers]]` and what `fencepost.consumers.spec` holds;
//! [`Consumer`] is what is left once it has been checked, and the only form the relay works with.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::duration;
use super::header::is_reserved;
use super::key::ConsumerId;

/// Whether the consumer's own word about the key is needed to end a delivery.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AckMode {
    /// Without the consumer's word the attempt is ambiguous.
    Required,
    /// Its word is recorded where it comes; a bare 2xx is `accepted`.
    Optional,
    /// It will never say anything about the key.
    None,
}

/// What to do when an attempt may or may not have taken effect.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnAmbiguous {
    /// Send the same key and bytes again: the consumer absorbs duplicates.
    Retry,
    /// Wait for an operator: a duplicate would cost more than a delay.
    Hold,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ordering {
    /// Effects of one ordering key arrive one after the other.
    Key,
    None,
}

/// What an edge can enforce.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Contract {
    pub ack: AckMode,
    pub on_ambiguous: OnAmbiguous,
    pub ordering: Ordering,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    Http,
    Amqp,
}

/// One `[[consumers]]` entry, as written. Secrets are only named here, never held.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConsumerEntry {
    pub name: String,
    pub kind: Kind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exchange: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub routing_key: Option<String>,
    /// The queue behind the exchange: a re-publish waits while it holds messages or nobody reads it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<String>,
    /// How long a confirmed message may go without the consumer's reply, such as "5m".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ack_timeout: Option<String>,
    /// How often a message without a reply is published again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub republishes: Option<u32>,
    /// The name of a `[brokers.<name>]` table.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub broker: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ack: Option<AckMode>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_ambiguous: Option<OnAmbiguous>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ordering: Option<Ordering>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub topics: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_file: Option<PathBuf>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_env: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous_secret_file: Option<PathBuf>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub previous_secret_env: Option<String>,
    /// Total deadline of one attempt, such as "15s".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connect_timeout: Option<String>,
    /// Attempts in flight, per relay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub concurrency: Option<u32>,
    /// Attempts per second over all relays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<u32>,
    /// Producers' headers that travel under their own name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pass_headers: Vec<String>,
    /// How long the consumer remembers keys, such as "7d".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dedup_retain: Option<String>,
    /// 5xx statuses by which this edge says it did nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub definite_statuses: Vec<u16>,
}

/// A checked consumer.
#[derive(Clone, Debug)]
pub struct Consumer {
    pub id: ConsumerId,
    pub name: String,
    pub contract: Contract,
    pub edge: EdgeSpec,
    pub concurrency: NonZeroU32,
    pub rate: Option<NonZeroU32>,
    pub timeout: Duration,
    pub connect_timeout: Duration,
    /// How long a confirmed message may go without the consumer's reply.
    pub ack_timeout: Duration,
    pub dedup_retain: Option<Duration>,
    pub pass_headers: Vec<String>,
    pub definite_statuses: Vec<u16>,
    pub secret: Option<SecretSource>,
    pub previous_secret: Option<SecretSource>,
    pub topics: Vec<String>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum EdgeSpec {
    Http { url: url::Url },
    Amqp(AmqpSpec),
}

/// Where an AMQP consumer's messages go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AmqpSpec {
    pub broker: String,
    /// Empty: the default exchange.
    pub exchange: String,
    pub routing_key: String,
    /// The queue behind them, where it is known: always on the default exchange.
    pub queue: Option<String>,
    /// How often a message without a reply is published again.
    pub republishes: u32,
}

/// Where a secret is read from. The secret itself stays out of the configuration and the database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SecretSource {
    File(PathBuf),
    Env(String),
}

/// One thing wrong with an entry: the key, what is wrong, and what to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub key: String,
    pub wrong: String,
    pub write: String,
}

/// The default number of attempts in flight for one consumer, per relay.
pub const DEFAULT_CONCURRENCY: u32 = 32;
/// The same over AMQP: the window of unconfirmed messages.
pub const DEFAULT_WINDOW: u32 = 128;
/// The default total deadline of one HTTP attempt.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(15);
/// The default deadline for a broker's confirm.
pub const DEFAULT_CONFIRM_TIMEOUT: Duration = Duration::from_secs(30);
/// The default wait for a consumer's reply over AMQP.
pub const DEFAULT_ACK_TIMEOUT: Duration = Duration::from_secs(300);
/// The default number of re-publishes after it.
pub const DEFAULT_REPUBLISHES: u32 = 3;
/// The default deadline for DNS, TCP and TLS together.
pub const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The same for a broker, with the opening of the connection and its channel.
pub const DEFAULT_AMQP_CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

impl ConsumerEntry {
    /// The total deadline of one attempt.
    pub fn attempt_timeout(&self) -> Duration {
        let default = match self.kind {
            Kind::Http => DEFAULT_TIMEOUT,
            Kind::Amqp => DEFAULT_CONFIRM_TIMEOUT,
        };
        self.timeout.as_deref().and_then(duration::parse).unwrap_or(default)
    }

    /// Checks the entry on its own and names every fault at once.
    pub fn check(&self, id: ConsumerId) -> Result<Consumer, Vec<Fault>> {
        let mut faults = Faults::default();
        let name_ok = !self.name.is_empty()
            && self.name.len() <= 64
            && self.name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-'));
        if !name_ok {
            faults.add(
                "name",
                format!("{:?} is not a consumer's name", self.name),
                "1 to 64 characters of A-Z a-z 0-9 _ . -",
            );
        }
        let edge = self.edge(&mut faults);
        let ack = self.ack.unwrap_or(AckMode::Optional);
        let on_ambiguous = match (self.on_ambiguous, ack) {
            (Some(choice), _) => choice,
            (None, AckMode::None) => {
                faults.add(
                    "on_ambiguous",
                    "with ack = \"none\" there is no default: nobody absorbs a duplicate there",
                    "on_ambiguous = \"retry\" (a duplicate is harmless) or \"hold\" (an operator decides)",
                );
                OnAmbiguous::Hold
            }
            (None, _) => OnAmbiguous::Retry,
        };
        let (in_flight, connect) = match self.kind {
            Kind::Http => (DEFAULT_CONCURRENCY, DEFAULT_CONNECT_TIMEOUT),
            Kind::Amqp => (DEFAULT_WINDOW, DEFAULT_AMQP_CONNECT_TIMEOUT),
        };
        let concurrency = NonZeroU32::new(self.concurrency.unwrap_or(in_flight)).filter(|n| n.get() <= 4096);
        if concurrency.is_none() {
            faults.add("concurrency", "out of range", "a whole number from 1 to 4096");
        }
        if self.rate == Some(0) {
            faults.add("rate", "0 would never send anything", "attempts per second, or pause the consumer instead");
        }
        faults.duration("timeout", self.timeout.as_deref());
        let timeout = self.attempt_timeout();
        let connect_timeout =
            faults.duration("connect_timeout", self.connect_timeout.as_deref()).unwrap_or(connect.min(timeout / 2));
        if connect_timeout >= timeout {
            faults.add(
                "connect_timeout",
                "not shorter than timeout: a slow connect would read as ambiguous",
                "less than timeout",
            );
        }
        let ack_timeout = faults.duration("ack_timeout", self.ack_timeout.as_deref()).unwrap_or(DEFAULT_ACK_TIMEOUT);
        let dedup_retain = faults.duration("dedup_retain", self.dedup_retain.as_deref());
        for status in self.definite_statuses.iter().filter(|s| !(500..=599).contains(*s)) {
            faults.add("definite_statuses", format!("{status} is not a 5xx status"), "statuses from 500 to 599");
        }
        for header in self.pass_headers.iter().filter(|h| http::HeaderName::from_bytes(h.as_bytes()).is_err()) {
            faults.add("pass_headers", format!("{header:?} is not a header name"), "RFC 9110 tokens");
        }
        let reserved =
            |header: &&String| http::HeaderName::from_bytes(header.as_bytes()).is_ok_and(|h| is_reserved(&h));
        for header in self.pass_headers.iter().filter(reserved) {
            faults.add("pass_headers", format!("{header:?} is reserved: no producer can give it"), "other headers");
        }
        for topic in self.topics.iter().filter(|t| t.is_empty() || t.len() > 256) {
            faults.add("topics", format!("{topic:?} is not a topic"), "1 to 256 bytes");
        }
        let secret = faults.secret("secret", self.secret_file.as_ref(), self.secret_env.as_ref());
        let previous_secret =
            faults.secret("previous_secret", self.previous_secret_file.as_ref(), self.previous_secret_env.as_ref());
        if previous_secret.is_some() && secret.is_none() {
            faults.add("previous_secret_file", "a previous secret without a current one", "secret_file as well");
        }
        match (edge, concurrency) {
            (Some(edge), Some(concurrency)) if faults.0.is_empty() => Ok(Consumer {
                id,
                name: self.name.clone(),
                contract: Contract { ack, on_ambiguous, ordering: self.ordering.unwrap_or(Ordering::None) },
                edge,
                concurrency,
                rate: self.rate.and_then(NonZeroU32::new),
                timeout,
                connect_timeout,
                ack_timeout,
                dedup_retain,
                pass_headers: self.pass_headers.clone(),
                definite_statuses: self.definite_statuses.clone(),
                secret,
                previous_secret,
                topics: self.topics.clone(),
            }),
            _ => Err(faults.0),
        }
    }

    fn edge(&self, faults: &mut Faults) -> Option<EdgeSpec> {
        let stray = |faults: &mut Faults, key: &str, present: bool, kind: &str| {
            if present {
                faults.add(key, format!("means nothing for kind = \"{kind}\""), "remove it");
            }
        };
        match self.kind {
            Kind::Http => {
                stray(faults, "exchange", self.exchange.is_some(), "http");
                stray(faults, "routing_key", self.routing_key.is_some(), "http");
                stray(faults, "queue", self.queue.is_some(), "http");
                stray(faults, "ack_timeout", self.ack_timeout.is_some(), "http");
                stray(faults, "republishes", self.republishes.is_some(), "http");
                stray(faults, "broker", self.broker.is_some(), "http");
                let Some(text) = &self.url else {
                    faults.add("url", "missing", "url = \"https://host/path\"");
                    return None;
                };
                match url::Url::parse(text) {
                    Ok(url) if matches!(url.scheme(), "http" | "https") && url.has_host() => {
                        Some(EdgeSpec::Http { url })
                    }
                    // The text itself may carry a secret: it is not repeated.
                    _ => {
                        faults.add("url", "not an http or https URL with a host", "url = \"https://host/path\"");
                        None
                    }
                }
            }
            Kind::Amqp => {
                stray(faults, "url", self.url.is_some(), "amqp");
                stray(faults, "definite_statuses", !self.definite_statuses.is_empty(), "amqp");
                stray(faults, "pass_headers", !self.pass_headers.is_empty(), "amqp");
                for (key, set) in [
                    ("secret_file", self.secret_file.is_some()),
                    ("secret_env", self.secret_env.is_some()),
                    ("previous_secret_file", self.previous_secret_file.is_some()),
                    ("previous_secret_env", self.previous_secret_env.is_some()),
                ] {
                    stray(faults, key, set, "amqp");
                }
                let short = |faults: &mut Faults, key: &str, text: Option<&String>| {
                    let text = text.cloned().unwrap_or_default();
                    if text.len() > 255 {
                        faults.add(key, "longer than 255 bytes", "an AMQP short string");
                    }
                    text
                };
                if self.exchange.is_none() && self.routing_key.is_none() {
                    faults.add(
                        "exchange",
                        "missing",
                        "exchange = \"name\", or routing_key = \"queue\" for the default exchange",
                    );
                }
                let exchange = short(faults, "exchange", self.exchange.as_ref());
                let routing_key = short(faults, "routing_key", self.routing_key.as_ref());
                let queue = self.queue.as_ref().map(|queue| short(faults, "queue", Some(queue)));
                let queue = queue.or_else(|| exchange.is_empty().then(|| routing_key.clone()));
                if self.republishes.is_some_and(|n| n > 100) {
                    faults.add("republishes", "out of range", "a whole number from 0 to 100");
                }
                Some(EdgeSpec::Amqp(AmqpSpec {
                    broker: self.broker.clone().unwrap_or_else(|| "default".into()),
                    exchange,
                    routing_key,
                    queue,
                    republishes: self.republishes.unwrap_or(DEFAULT_REPUBLISHES),
                }))
            }
        }
    }
}

#[derive(Default)]
struct Faults(Vec<Fault>);

impl Faults {
    fn add(&mut self, key: &str, wrong: impl Into<String>, write: impl Into<String>) {
        self.0.push(Fault { key: key.into(), wrong: wrong.into(), write: write.into() });
    }

    fn duration(&mut self, key: &str, text: Option<&str>) -> Option<Duration> {
        let text = text?;
        match duration::parse(text) {
            Some(duration) if !duration.is_zero() => Some(duration),
            _ => {
                self.add(key, format!("{text:?} is not a duration"), "a number and a unit: 500ms, 15s, 5m, 2h, 7d");
                None
            }
        }
    }

    fn secret(&mut self, key: &str, file: Option<&PathBuf>, env: Option<&String>) -> Option<SecretSource> {
        match (file, env) {
            (Some(_), Some(_)) => {
                self.add(key, format!("both {key}_file and {key}_env are set"), "one of the two");
                None
            }
            (Some(file), None) => Some(SecretSource::File(file.clone())),
            (None, Some(env)) => Some(SecretSource::Env(env.clone())),
            (None, None) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(text: &str) -> ConsumerEntry {
        toml::from_str(text).unwrap()
    }

    #[test]
    fn every_fault_is_named_at_once() {
        let bad = entry("name = 'a b'\nkind = 'http'\nack = 'none'\nconcurrency = 0\ntimeout = '15'\nexchange = 'x'");
        let keys: Vec<_> = bad.check(ConsumerId(1)).unwrap_err().into_iter().map(|f| f.key).collect();
        assert_eq!(keys, ["name", "exchange", "url", "on_ambiguous", "concurrency", "timeout"]);
    }

    #[test]
    fn a_header_that_no_producer_can_give_is_not_passed() {
        let passing = |names: &str| {
            let text = format!("name = 'a'\nkind = 'http'\nurl = 'http://h/'\npass_headers = [{names}]");
            entry(&text).check(ConsumerId(1)).map_err(|faults| faults.len())
        };
        assert!(passing("'X-Tenant', 'x-metadata'").is_ok());
        assert_eq!(passing("'Authorization', 'x-tenant', 'Outbox-Key', 'x-death'").unwrap_err(), 3);
    }

    #[test]
    fn an_edge_without_acks_must_choose() {
        let text = "name = 'a'\nkind = 'http'\nurl = 'http://h/'\nack = 'none'";
        assert!(entry(text).check(ConsumerId(1)).is_err());
        let held = entry(&format!("{text}\non_ambiguous = 'hold'")).check(ConsumerId(1)).unwrap();
        assert_eq!(held.contract.on_ambiguous, OnAmbiguous::Hold);
    }

    #[test]
    fn a_fault_never_repeats_the_url() {
        let faults =
            entry("name = 'a'\nkind = 'http'\nurl = 'ftp://user:hunter2@h/'").check(ConsumerId(1)).unwrap_err();
        assert!(!format!("{faults:?}").contains("hunter2"));
    }
}
