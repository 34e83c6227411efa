//! An AMQP broker as configured: where it is and how to log in. Secrets stay behind their sources until a connection is
//! made, so that a rotated password is picked up by the next one.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use secrecy::SecretString;

use super::consumer::SecretSource;

/// The ports of AMQP 0-9-1, plain and over TLS.
pub const PORTS: (u16, u16) = (5672, 5671);
/// A silent peer is noticed after at most twice this.
pub const DEFAULT_HEARTBEAT: Duration = Duration::from_secs(10);
/// How long a broker may block publishing before its connection is given up and what is on it becomes ambiguous.
pub const DEFAULT_BLOCKED_MAX: Duration = Duration::from_secs(300);

/// A broker that can be connected to.
#[derive(Clone, Debug)]
pub struct Broker {
    pub name: String,
    /// Tried in random order; never empty.
    pub hosts: Vec<Host>,
    pub transport: Transport,
    pub vhost: String,
    pub login: Login,
    pub heartbeat: Duration,
    pub blocked_max: Duration,
}

/// A name or address, without brackets, and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    pub name: String,
    pub port: u16,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Transport {
    Plain,
    /// Always verified: against the system's certificates and those of `ca_file`.
    Tls {
        ca_file: Option<PathBuf>,
        identity: Option<Identity>,
    },
}

/// A client certificate with its key, both PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    pub cert_file: PathBuf,
    pub key_file: PathBuf,
}

#[derive(Clone, Debug)]
pub enum Login {
    Password {
        username: String,
        password: Password,
    },
    /// SASL EXTERNAL: the broker takes the name from the client certificate.
    Certificate,
}

#[derive(Clone, Debug)]
pub enum Password {
    Source(SecretSource),
    /// From a URL.
    Given(SecretString),
}

/// Why a text is no broker's address. Never repeats the text, which may hold a password.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum AddressError {
    #[error("not a host: write \"broker.example\", \"broker.example:5672\", \"192.0.2.1\" or \"[2001:db8::1]:5672\"")]
    Host,
    #[error("not an AMQP URL: write amqp://user:password@host:5672/vhost, or amqps://")]
    Url,
}

impl Host {
    /// Reads `host`, `host:port`, `[v6]` or `[v6]:port`; a bare IPv6 address needs its brackets.
    pub fn parse(text: &str, default_port: u16) -> Result<Self, AddressError> {
        let (name, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (address, rest) = rest.split_once(']').ok_or(AddressError::Host)?;
                address.parse::<std::net::Ipv6Addr>().map_err(|_| AddressError::Host)?;
                let port = if rest.is_empty() { None } else { Some(rest.strip_prefix(':').ok_or(AddressError::Host)?) };
                (address, port)
            }
            None => match text.split_once(':') {
                Some((name, port)) => (name, Some(port)),
                None => (text, None),
            },
        };
        let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_' | b':');
        if name.is_empty() || !name.bytes().all(allowed) {
            return Err(AddressError::Host);
        }
        let port = match port {
            None => default_port,
            Some(port) => port.parse().ok().filter(|port| *port != 0).ok_or(AddressError::Host)?,
        };
        Ok(Self { name: name.into(), port })
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.name.contains(':') {
            write!(f, "[{}]:{}", self.name, self.port)
        } else {
            write!(f, "{}:{}", self.name, self.port)
        }
    }
}

impl Broker {
    /// Reads an AMQP URL (RabbitMQ's URI specification). Without a path the virtual host is `/`; `amqp://host/` names
    /// the empty one, which no broker has by default, and is refused.
    pub fn from_url(name: &str, text: &str) -> Result<Self, AddressError> {
        let url = url::Url::parse(text.trim()).map_err(|_| AddressError::Url)?;
        let (transport, default_port) = match url.scheme() {
            "amqp" => (Transport::Plain, PORTS.0),
            "amqps" => (Transport::Tls { ca_file: None, identity: None }, PORTS.1),
            _ => return Err(AddressError::Url),
        };
        let host = match url.host_str() {
            Some(host) if !host.is_empty() => Host::parse(host, url.port().unwrap_or(default_port))?,
            _ => return Err(AddressError::Url),
        };
        let vhost = match url.path() {
            "" => "/".into(),
            path => decode(path.strip_prefix('/').unwrap_or(path))?,
        };
        if vhost.is_empty() || vhost.len() > 255 || url.query().is_some() || url.fragment().is_some() {
            return Err(AddressError::Url);
        }
        let username = if url.username().is_empty() { "guest".into() } else { decode(url.username())? };
        let password = decode(url.password().unwrap_or("guest"))?;
        Ok(Self {
            name: name.into(),
            hosts: vec![host],
            transport,
            vhost,
            login: Login::Password { username, password: Password::Given(password.into()) },
            heartbeat: DEFAULT_HEARTBEAT,
            blocked_max: DEFAULT_BLOCKED_MAX,
        })
    }

    pub fn default_port(transport: &Transport) -> u16 {
        match transport {
            Transport::Plain => PORTS.0,
            Transport::Tls { .. } => PORTS.1,
        }
    }
}

/// Percent-decoding (RFC 3986, 2.1).
fn decode(text: &str) -> Result<String, AddressError> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || rest.next().and_then(|b| char::from(b).to_digit(16));
        let (high, low) = (digit().ok_or(AddressError::Url)?, digit().ok_or(AddressError::Url)?);
        bytes.push(u8::try_from(high * 16 + low).map_err(|_| AddressError::Url)?);
    }
    String::from_utf8(bytes).map_err(|_| AddressError::Url)
}

#[cfg(test)]
mod tests {
    use super::*;
    use secrecy::ExposeSecret;

    fn host(text: &str) -> Option<(String, u16)> {
        Host::parse(text, 5672).ok().map(|host| (host.name, host.port))
    }

    #[test]
    fn hosts_with_and_without_ports() {
        assert_eq!(host("mq.example"), Some(("mq.example".into(), 5672)));
        assert_eq!(host("mq.example:5673"), Some(("mq.example".into(), 5673)));
        assert_eq!(host("[::1]"), Some(("::1".into(), 5672)));
        assert_eq!(host("[2001:db8::1]:5671"), Some(("2001:db8::1".into(), 5671)));
        for bad in ["", ":5672", "::1", "[::1", "[::1]5672", "[x]:1", "h:0", "h:99999", "h:", "u@h", "h/v"] {
            assert_eq!(host(bad), None, "{bad:?}");
        }
        assert_eq!(Host::parse("[::1]:1", 2).unwrap().to_string(), "[::1]:1");
    }

    #[test]
    fn urls_keep_ipv6_and_name_their_virtual_host() {
        let broker = Broker::from_url("b", "amqp://u%40x:p%2Fw@[::1]:5673/orders%2Feu").unwrap();
        assert_eq!((broker.hosts[0].name.as_str(), broker.hosts[0].port), ("::1", 5673));
        assert_eq!(broker.vhost, "orders/eu");
        let Login::Password { username, password: Password::Given(password) } = &broker.login else { panic!() };
        assert_eq!((username.as_str(), password.expose_secret()), ("u@x", "p/w"));
        assert!(!format!("{broker:?}").contains("p/w"));
        assert_eq!(Broker::from_url("b", "amqp://h").unwrap().vhost, "/");
        assert_eq!(Broker::from_url("b", "amqps://h/%2f").unwrap().hosts[0].port, 5671);
        for bad in ["amqp://h/", "http://h", "amqp:///v", "amqp://u:hunter2@h/v?x=1", "hunter2", "amqp://h/%zz"] {
            let error = Broker::from_url("b", bad).unwrap_err().to_string();
            assert!(!error.contains("hunter2"));
        }
    }
}
