//! The configuration file as serde structs. Each section is complete by default; `config/fencepost.toml` documents
//! every key, and a test holds the two together.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

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
    pub relay: Options,
    pub retry: RetryOptions,
    pub breaker: BreakerOptions,
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
        Options { retry: self.retry.clone(), breaker: self.breaker.clone(), ..self.relay.clone() }
    }
}
