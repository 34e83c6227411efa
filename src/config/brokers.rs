//! `[brokers.<name>]`: where AMQP consumers' brokers are and how to log in.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::read::Reading;
use crate::model::broker::{
    Broker, DEFAULT_BLOCKED_MAX, DEFAULT_HEARTBEAT, Host, Identity, Login, Password, Transport,
};
use crate::model::consumer::SecretSource;
use crate::model::duration;

/// The variable that stands in for `[brokers.default]` where the file has none.
pub const URL_VARIABLE: &str = "AMQP_URL";

/// One broker as a person writes it: a URL from elsewhere, or its parts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BrokerSection {
    pub url_env: Option<String>,
    pub url_file: Option<PathBuf>,
    pub hosts: Vec<String>,
    pub tls: bool,
    pub ca_file: Option<PathBuf>,
    pub cert_file: Option<PathBuf>,
    pub key_file: Option<PathBuf>,
    pub vhost: String,
    pub login: LoginKind,
    pub username: Option<String>,
    pub password_env: Option<String>,
    pub password_file: Option<PathBuf>,
    #[serde(with = "duration::text")]
    pub heartbeat: Duration,
    #[serde(with = "duration::text")]
    pub blocked_max: Duration,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LoginKind {
    #[default]
    Password,
    /// SASL EXTERNAL.
    Certificate,
}

impl Default for BrokerSection {
    fn default() -> Self {
        Self {
            url_env: None,
            url_file: None,
            hosts: Vec::new(),
            tls: false,
            ca_file: None,
            cert_file: None,
            key_file: None,
            vhost: "/".into(),
            login: LoginKind::default(),
            username: None,
            password_env: None,
            password_file: None,
            heartbeat: DEFAULT_HEARTBEAT,
            blocked_max: DEFAULT_BLOCKED_MAX,
        }
    }
}

/// Every broker that can be connected to. `url` is the value of [`URL_VARIABLE`].
pub(super) fn brokers(reading: &mut Reading, url: Option<&str>) -> Vec<Arc<Broker>> {
    let sections: BTreeMap<String, BrokerSection> = reading.sections.brokers.clone();
    let mut brokers: Vec<Arc<Broker>> =
        sections.iter().filter_map(|(name, section)| broker(reading, name, section)).map(Arc::new).collect();
    if let (Some(url), false) = (url, sections.contains_key("default")) {
        match Broker::from_url("default", url) {
            Ok(broker) => brokers.push(Arc::new(broker)),
            Err(error) => reading.fault(URL_VARIABLE, error.to_string(), ""),
        }
    }
    brokers
}

fn broker(reading: &mut Reading, name: &str, section: &BrokerSection) -> Option<Broker> {
    let before = reading.faults.len();
    let mut fault =
        |key: &str, wrong: String, write: &str| reading.fault(&format!("brokers.{name}.{key}"), wrong, write);
    let form = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-');
    if name.is_empty() || name.len() > 64 || !name.bytes().all(form) {
        fault("(name)", format!("{name:?} is not a broker's name"), "1 to 64 characters of A-Z a-z 0-9 _ -");
    }
    let transport = transport(section, &mut fault);
    let url = url(section, &mut fault);
    let broker = match url {
        Some(text) => {
            let parts = !section.hosts.is_empty() || section.username.is_some() || section.vhost != "/";
            if parts || section.password_env.is_some() || section.password_file.is_some() {
                fault(
                    "hosts",
                    "the URL says this already".into(),
                    "either the URL or hosts, vhost, username, password",
                );
            }
            match Broker::from_url(name, &text) {
                Ok(broker) => Some(broker),
                Err(error) => {
                    fault("url", error.to_string(), "");
                    None
                }
            }
        }
        None => parts(name, section, &transport, &mut fault),
    };
    if !(Duration::from_secs(1)..=Duration::from_secs(120)).contains(&section.heartbeat) {
        fault("heartbeat", format!("{:?} is out of range", section.heartbeat), "1s to 120s");
    }
    let broker = broker?;
    let transport = match (&broker.transport, transport) {
        // amqps in the URL, the files in their own keys.
        (Transport::Tls { .. }, Transport::Plain) => Transport::Tls { ca_file: None, identity: None },
        (_, transport) => transport,
    };
    let (heartbeat, blocked_max) = (section.heartbeat, section.blocked_max);
    (reading.faults.len() == before).then_some(Broker { transport, heartbeat, blocked_max, ..broker })
}

fn transport(section: &BrokerSection, fault: &mut impl FnMut(&str, String, &str)) -> Transport {
    let identity = match (&section.cert_file, &section.key_file) {
        (Some(cert_file), Some(key_file)) => {
            Some(Identity { cert_file: cert_file.clone(), key_file: key_file.clone() })
        }
        (None, None) => None,
        _ => {
            fault(
                "cert_file",
                "a client certificate needs its key, and a key its certificate".into(),
                "cert_file and key_file",
            );
            None
        }
    };
    let files = section.ca_file.is_some() || identity.is_some();
    if section.tls || files {
        return Transport::Tls { ca_file: section.ca_file.clone(), identity };
    }
    Transport::Plain
}

fn url(section: &BrokerSection, fault: &mut impl FnMut(&str, String, &str)) -> Option<String> {
    match (&section.url_env, &section.url_file) {
        (Some(_), Some(_)) => {
            fault("url_env", "url_env and url_file: both are set".into(), "one of the two");
            None
        }
        (Some(name), None) => match std::env::var(name) {
            Ok(url) => Some(url),
            Err(_) => {
                fault("url_env", format!("{name} is not set in the environment"), "");
                None
            }
        },
        (None, Some(path)) => match std::fs::read_to_string(path) {
            Ok(url) => Some(url),
            Err(error) => {
                fault("url_file", format!("{} cannot be read: {error}", path.display()), "");
                None
            }
        },
        (None, None) => None,
    }
}

fn parts(
    name: &str,
    section: &BrokerSection,
    transport: &Transport,
    fault: &mut impl FnMut(&str, String, &str),
) -> Option<Broker> {
    if section.url_env.is_some() || section.url_file.is_some() {
        return None;
    }
    if section.hosts.is_empty() {
        fault("hosts", "no host is named".into(), "hosts = [\"mq.example:5672\"], or url_env / url_file");
    }
    let mut hosts = Vec::new();
    for text in &section.hosts {
        match Host::parse(text, Broker::default_port(transport)) {
            Ok(host) => hosts.push(host),
            Err(error) => fault("hosts", format!("{text:?} is {error}"), ""),
        }
    }
    if section.vhost.is_empty() || section.vhost.len() > 255 {
        fault("vhost", format!("{:?} is not a virtual host", section.vhost), "vhost = \"/\"");
    }
    let password = match (&section.password_env, &section.password_file) {
        (Some(name), None) => Some(SecretSource::Env(name.clone())),
        (None, Some(path)) => Some(SecretSource::File(path.clone())),
        (None, None) => None,
        (Some(_), Some(_)) => {
            fault("password_env", "password_env and password_file: both are set".into(), "one of the two");
            None
        }
    };
    let with_certificate = matches!(transport, Transport::Tls { identity: Some(_), .. });
    let login = match (section.login, password) {
        (LoginKind::Certificate, None) if with_certificate && section.username.is_none() => Some(Login::Certificate),
        (LoginKind::Certificate, _) => {
            fault(
                "login",
                "logs in by certificate alone".into(),
                "cert_file and key_file, without username and password",
            );
            None
        }
        (LoginKind::Password, Some(source)) => Some(Login::Password {
            username: section.username.clone().unwrap_or_else(|| "guest".into()),
            password: Password::Source(source),
        }),
        (LoginKind::Password, None) => {
            fault("password_file", "missing".into(), "password_file or password_env, or login = \"certificate\"");
            None
        }
    };
    Some(Broker {
        name: name.into(),
        hosts,
        transport: transport.clone(),
        vhost: section.vhost.clone(),
        login: login?,
        heartbeat: section.heartbeat,
        blocked_max: section.blocked_max,
    })
}
