//! The configuration file as serde structs. Each section is complete by default; `config/fencepost.toml` documents
//! every key, and a test holds the two together.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::brokers::BrokerSection;
use crate::edge::egress::PrivateNetworks;
use crate::model::consumer::ConsumerEntry;
use crate::relay::options::{BreakerOptions, Options, RetryOptions};

/// The whole file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Sections {
    pub revision: i64,
    pub database: DatabaseSection,
    pub relay: RelaySection,
    pub retry: RetrySection,
    pub breaker: BreakerSection,
    pub http: HttpSection,
    pub brokers: BTreeMap<String, BrokerSection>,
    pub admin: AdminSection,
    pub log: LogSection,
    pub consumers: Vec<ConsumerEntry>,
}

/// Where the database's URL comes from: one of the three.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DatabaseSection {
    pub url: Option<String>,
    pub url_env: Option<String>,
    pub url_file: Option<PathBuf>,
}

/// [`Options`] as a person writes them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RelaySection {
    pub name: String,
    #[serde(with = "duration_text")]
    pub shard_lease: Duration,
    #[serde(with = "duration_text")]
    pub renew_every: Duration,
    pub flight_deliveries: u32,
    pub flight_bytes: u64,
    pub bytes_in_flight: u64,
    #[serde(with = "duration_text")]
    pub sleep_after: Duration,
    #[serde(with = "duration_text")]
    pub awake_after: Duration,
    #[serde(with = "duration_text")]
    pub poll_min: Duration,
    #[serde(with = "duration_text")]
    pub poll_max: Duration,
    #[serde(with = "duration_text")]
    pub park_after: Duration,
    #[serde(with = "duration_text")]
    pub shutdown_grace: Duration,
}

/// [`RetryOptions`] as a person writes them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RetrySection {
    #[serde(with = "duration_text")]
    pub base: Duration,
    #[serde(with = "duration_text")]
    pub cap: Duration,
    #[serde(with = "duration_text")]
    pub budget: Duration,
    pub short_budget: u32,
    #[serde(with = "duration_text")]
    pub in_progress_max: Duration,
    #[serde(with = "duration_text")]
    pub retry_after_max: Duration,
}

/// [`BreakerOptions`] as a person writes them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BreakerSection {
    pub consecutive: u32,
    pub ratio_of: u32,
    #[serde(with = "duration_text")]
    pub window: Duration,
    #[serde(with = "duration_text")]
    pub probe: Duration,
    #[serde(with = "duration_text")]
    pub probe_max: Duration,
}

/// Where HTTP consumers may be.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HttpSection {
    pub private: PrivateNetworks,
    pub allow: Vec<String>,
    pub deny: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdminSection {
    pub listen: SocketAddr,
    pub allow_remote: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogSection {
    pub format: LogFormat,
    pub level: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogFormat {
    #[default]
    Text,
    Json,
}

impl Default for RelaySection {
    fn default() -> Self {
        let options = Options::default();
        Self {
            name: options.name,
            shard_lease: options.shard_lease,
            renew_every: options.renew_every,
            flight_deliveries: options.flight_deliveries,
            flight_bytes: options.flight_bytes,
            bytes_in_flight: options.bytes_in_flight,
            sleep_after: options.sleep_after,
            awake_after: options.awake_after,
            poll_min: options.poll_min,
            poll_max: options.poll_max,
            park_after: options.park_after,
            shutdown_grace: options.shutdown_grace,
        }
    }
}

impl Default for RetrySection {
    fn default() -> Self {
        let retry = RetryOptions::default();
        Self {
            base: retry.base,
            cap: retry.cap,
            budget: retry.budget,
            short_budget: retry.short_budget,
            in_progress_max: retry.in_progress_max,
            retry_after_max: retry.retry_after_max,
        }
    }
}

impl Default for BreakerSection {
    fn default() -> Self {
        let breaker = BreakerOptions::default();
        Self {
            consecutive: breaker.consecutive,
            ratio_of: breaker.ratio_of,
            window: breaker.window,
            probe: breaker.probe,
            probe_max: breaker.probe_max,
        }
    }
}

impl Default for AdminSection {
    fn default() -> Self {
        Self { listen: SocketAddr::from(([127, 0, 0, 1], 9187)), allow_remote: false }
    }
}

impl Default for LogSection {
    fn default() -> Self {
        Self { format: LogFormat::Text, level: "info".into() }
    }
}

impl Sections {
    /// The relay's options, `[relay]`, `[retry]` and `[breaker]` together.
    pub fn options(&self) -> Options {
        let (relay, retry, breaker) = (self.relay.clone(), self.retry.clone(), self.breaker.clone());
        Options {
            name: relay.name,
            shard_lease: relay.shard_lease,
            renew_every: relay.renew_every,
            flight_deliveries: relay.flight_deliveries,
            flight_bytes: relay.flight_bytes,
            bytes_in_flight: relay.bytes_in_flight,
            sleep_after: relay.sleep_after,
            awake_after: relay.awake_after,
            poll_min: relay.poll_min,
            poll_max: relay.poll_max,
            park_after: relay.park_after,
            shutdown_grace: relay.shutdown_grace,
            retry: RetryOptions {
                base: retry.base,
                cap: retry.cap,
                budget: retry.budget,
                short_budget: retry.short_budget,
                in_progress_max: retry.in_progress_max,
                retry_after_max: retry.retry_after_max,
            },
            breaker: BreakerOptions {
                consecutive: breaker.consecutive,
                ratio_of: breaker.ratio_of,
                window: breaker.window,
                probe: breaker.probe,
                probe_max: breaker.probe_max,
            },
        }
    }
}

/// Durations as text with a unit, never zero.
pub(super) mod duration_text {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    use crate::model::consumer::parse_duration;

    pub fn serialize<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&format!("{}ms", duration.as_millis()))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        let text = String::deserialize(deserializer)?;
        parse_duration(&text).filter(|duration| !duration.is_zero()).ok_or_else(|| {
            D::Error::custom(format!(
                "{text:?} is not a duration: a number from 1 and a unit, such as 500ms, 15s, 5m, 2h, 7d"
            ))
        })
    }
}
