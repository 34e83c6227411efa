//! What no key shows alone: values out of range, and combinations that cannot work.

use std::collections::BTreeMap;
use std::sync::Arc;

use secrecy::SecretString;

use super::fault::{Fault, Origin};
use super::read::{Reading, entry_place};
use crate::edge::egress::EgressPolicy;
use crate::model::broker::Broker;
use crate::model::consumer::{AckMode, EdgeSpec, Kind};
use crate::model::key::ConsumerId;

/// The database's URL from the one place that names it. A password is never written in the file.
pub(super) fn database_url(reading: &mut Reading) -> Option<SecretString> {
    let database = reading.sections.database.clone();
    let named = [database.url.is_some(), database.url_env.is_some(), database.url_file.is_some()];
    if named.iter().filter(|is| **is).count() > 1 {
        reading.fault("database", "url, url_env and url_file: more than one is set", "one of the three");
        return None;
    }
    if let Some(url) = database.url {
        if matches!(reading.origin("database.url"), Origin::File(_)) && has_password(&url) {
            reading.fault(
                "database.url",
                "holds a password",
                "the url without it and PostgreSQL's own means (peer, certificate), or url_file / url_env",
            );
            return None;
        }
        return Some(url.into());
    }
    if let Some(name) = database.url_env {
        return match std::env::var(&name) {
            Ok(url) => Some(url.into()),
            Err(_) => {
                reading.fault("database.url_env", format!("{name} is not set in the environment"), "");
                None
            }
        };
    }
    let path = database.url_file?;
    match std::fs::read_to_string(&path) {
        Ok(url) => Some(url.trim().into()),
        Err(error) => {
            reading.fault("database.url_file", format!("{} cannot be read: {error}", path.display()), "");
            None
        }
    }
}

fn has_password(text: &str) -> bool {
    match url::Url::parse(text) {
        Ok(url) => url.password().is_some() || url.query_pairs().any(|(key, _)| key == "password"),
        Err(_) => {
            text.to_ascii_lowercase().split(|c: char| c == '=' || c.is_whitespace()).any(|word| word == "password")
        }
    }
}

pub(super) fn egress(reading: &mut Reading) -> EgressPolicy {
    let http = reading.sections.http.clone();
    for (key, list) in [("http.allow", &http.allow), ("http.deny", &http.deny)] {
        // One at a time, since only the first of a list would be named.
        for text in list {
            if let Err(wrong) = EgressPolicy::new(http.private, std::slice::from_ref(text), &[]) {
                reading.fault(key, wrong.to_string(), "");
            }
        }
    }
    EgressPolicy::new(http.private, &http.allow, &http.deny).unwrap_or_default()
}

pub(super) fn combinations(reading: &mut Reading) {
    let (relay, retry) = (reading.sections.relay.clone(), reading.sections.retry.clone());
    let breaker = reading.sections.breaker.clone();
    let revision = reading.sections.revision;
    // Each rule: what breaks it, the key, what is wrong, what to write.
    let rules = [
        (
            relay.name.is_empty() || relay.name.len() > 64 || relay.name.chars().any(char::is_control),
            "relay.name",
            format!("{:?} is not a name", relay.name),
            "1 to 64 bytes without control characters".into(),
        ),
        (
            relay.renew_every * 3 > relay.shard_lease,
            "relay.renew_every",
            format!("{:?} is more than a third of shard_lease ({:?})", relay.renew_every, relay.shard_lease),
            format!("at most {:?}, or a longer shard_lease", relay.shard_lease / 3),
        ),
        (
            relay.poll_min > relay.poll_max,
            "relay.poll_min",
            format!("{:?} is more than poll_max ({:?})", relay.poll_min, relay.poll_max),
            "poll_min at most poll_max".into(),
        ),
        (
            relay.flight_bytes > relay.bytes_in_flight,
            "relay.flight_bytes",
            format!("{} is more than bytes_in_flight ({})", relay.flight_bytes, relay.bytes_in_flight),
            "at most bytes_in_flight: one flight must fit".into(),
        ),
        (
            retry.base > retry.cap,
            "retry.base",
            format!("{:?} is more than cap ({:?})", retry.base, retry.cap),
            "base at most cap".into(),
        ),
        (
            retry.cap > retry.budget,
            "retry.cap",
            format!("{:?} is more than budget ({:?})", retry.cap, retry.budget),
            "cap at most budget".into(),
        ),
        (
            revision < 0,
            "revision",
            format!("{} is negative", revision),
            "a whole number from 0 that grows with every change".into(),
        ),
    ];
    for (broken, key, wrong, write) in rules {
        if broken {
            reading.fault(key, wrong, write);
        }
    }
    let counts = [
        ("relay.flight_deliveries", u64::from(relay.flight_deliveries), 10_000),
        ("relay.flight_bytes", relay.flight_bytes, 1 << 30),
        ("relay.bytes_in_flight", relay.bytes_in_flight, 1 << 36),
        ("retry.short_budget", u64::from(retry.short_budget), 1_000),
        ("breaker.consecutive", u64::from(breaker.consecutive), 100_000),
        ("breaker.ratio_of", u64::from(breaker.ratio_of), 100_000),
    ];
    for (key, value, most) in counts {
        if value == 0 || value > most {
            reading.fault(key, format!("{value} is out of range"), format!("1 to {most}"));
        }
    }
    let admin = reading.sections.admin.clone();
    if !admin.listen.ip().is_loopback() && !admin.allow_remote {
        reading.fault(
            "admin.listen",
            format!("{} is reachable from other machines, and the endpoints ask for no credentials", admin.listen),
            "127.0.0.1:PORT, or allow_remote = true",
        );
    }
    if let Some(fault) = level_fault(&reading.sections.log.level) {
        reading.fault(
            "log.level",
            fault,
            "error, warn, info, debug or trace, also per module: \"info,fencepost::edge=debug\"",
        );
    }
}

/// A word that is no level would be read as a module's name, and silence everything else.
fn level_fault(text: &str) -> Option<String> {
    if let Err(error) = tracing_subscriber::EnvFilter::try_new(text) {
        return Some(error.to_string());
    }
    let stray = text.split(',').map(str::trim).find(|part| {
        !part.is_empty()
            && !part.contains('=')
            && !part.contains("::")
            && part.parse::<tracing::level_filters::LevelFilter>().is_err()
    })?;
    Some(format!("{stray:?} is not a level"))
}

pub(super) fn consumers(reading: &mut Reading, brokers: &[Arc<Broker>]) {
    let lease = reading.sections.relay.shard_lease;
    let mut seen = BTreeMap::new();
    let mut faults = Vec::new();
    let origin = reading.origin("consumers");
    for (&n, entry) in reading.entries.iter().zip(&reading.sections.consumers) {
        let place = entry_place(n, Some(&entry.name));
        let mut add = |key: &str, wrong: String, write: String| {
            faults.push(Fault { origin: origin.clone(), key: format!("{place}.{key}"), wrong, write });
        };
        if let Some(first) = seen.insert(entry.name.clone(), n) {
            add("name", format!("consumers[{first}] has the same name"), "a name of its own".into());
        }
        match entry.check(ConsumerId(0)) {
            Ok(consumer) if entry.kind == Kind::Http && consumer.timeout > lease => add(
                "timeout",
                format!(
                    "{:?} is longer than relay.shard_lease ({lease:?}): an attempt could outlive its lease",
                    consumer.timeout
                ),
                "a shorter timeout, or a longer shard_lease".into(),
            ),
            Ok(consumer) => {
                let EdgeSpec::Amqp(spec) = &consumer.edge else { continue };
                let Some(broker) = brokers.iter().find(|broker| broker.name == spec.broker) else {
                    add(
                        "broker",
                        format!("there is no [brokers.{}]", spec.broker),
                        format!("[brokers.{}], or set AMQP_URL for \"default\"", spec.broker),
                    );
                    continue;
                };
                let least = (lease + broker.heartbeat * 2) * 3;
                if consumer.contract.ack == AckMode::Required && consumer.ack_timeout < least {
                    add(
                        "ack_timeout",
                        format!("{:?} is less than 3 x (relay.shard_lease + 2 x heartbeat)", consumer.ack_timeout),
                        format!("at least {least:?}: a reply must survive a takeover before it counts as lost"),
                    );
                }
            }
            Err(wrong) => wrong.into_iter().for_each(|fault| add(&fault.key, fault.wrong, fault.write)),
        }
    }
    reading.faults.append(&mut faults);
}
