//! One connection to a broker. It is opened with a deadline, watched for what the broker says about it, and when it is
//! given up its socket is shut down: what the client library still holds back is then never sent.

use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::Stream;
use lapin::protocol::AMQPErrorKind;
use lapin::tcp::{AsyncTcpStream, OwnedIdentity, OwnedTLSConfig};
use lapin::uri::{AMQPAuthority, AMQPQueryString, AMQPScheme, AMQPUri, AMQPUserInfo, SASLMechanism};
use lapin::{Channel, Connection, ConnectionProperties, Event};
use rand::seq::SliceRandom;
use secrecy::{ExposeSecret, SecretString};
use tokio::time::timeout;

use crate::edge::error::report;
use crate::model::broker::{Broker, Host, Login, Password, Transport};
use crate::model::consumer::SecretSource;

/// The longest an orderly goodbye may take.
const GOODBYE: Duration = Duration::from_secs(2);

#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    #[error("cannot read {what}: {error}")]
    Secret { what: String, error: std::io::Error },
    #[error("the variable {0} is not set")]
    Variable(String),
    #[error("{host} did not open a connection within {limit:?}")]
    Timeout { host: Host, limit: Duration },
    #[error("{host}: {text}")]
    Refused { host: Host, text: String },
    #[error("none of the broker's hosts can be talked to: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Everywhere(Vec<LinkError>),
    #[error("no answer to {what} within {limit:?}")]
    Silent { what: &'static str, limit: Duration },
    #[error("{0}")]
    Protocol(String),
}

/// What a connection is for; its name at the broker ends with it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purpose {
    Publish,
    Replies,
    Look,
}

/// An open connection. Dropped, its socket is shut down.
pub struct Link {
    connection: Connection,
    socket: Socket,
    limit: Duration,
}

impl Link {
    /// Connects to one of the broker's hosts, in random order. `limit` is for each host: resolving, TCP, TLS, login.
    pub async fn open(broker: &Broker, purpose: Purpose, limit: Duration) -> Result<Self, LinkError> {
        let mut hosts = broker.hosts.clone();
        hosts.shuffle(&mut rand::rng());
        let mut errors = Vec::new();
        for host in hosts {
            match Self::open_at(broker, &host, purpose, limit).await {
                Ok(link) => return Ok(link),
                Err(error) => errors.push(error),
            }
        }
        match errors.pop() {
            Some(only) if errors.is_empty() => Err(only),
            Some(last) => {
                errors.push(last);
                Err(LinkError::Everywhere(errors))
            }
            // A checked broker has at least one host.
            None => Err(LinkError::Protocol("no host is configured".into())),
        }
    }

    /// Connects to this host.
    pub async fn open_at(broker: &Broker, host: &Host, purpose: Purpose, limit: Duration) -> Result<Self, LinkError> {
        let uri = uri(broker, host)?;
        let tls = tls(&broker.transport)?;
        let name = match purpose {
            Purpose::Publish => "fencepost publish",
            Purpose::Replies => "fencepost replies",
            Purpose::Look => "fencepost",
        };
        let options = ConnectionProperties::default().with_connection_name(name.into());
        let socket = Arc::new(Mutex::new(None));
        let kept = Arc::clone(&socket);
        let runtime = lapin::runtime::default_runtime().map_err(protocol)?;
        let connect = Connection::connector(
            uri,
            runtime,
            async move |uri: AMQPUri, runtime| {
                let host = (uri.authority.host.as_str(), uri.authority.port);
                let addresses: Vec<SocketAddr> = tokio::net::lookup_host(host).await?.collect();
                let stream = AsyncTcpStream::connect(&runtime, addresses).await?;
                if let AsyncTcpStream::Plain(plain) = &stream {
                    plain.get_ref().set_nodelay(true)?;
                    let copy = plain.get_ref().as_fd().try_clone_to_owned()?;
                    *kept.lock().unwrap_or_else(PoisonError::into_inner) = Some(TcpStream::from(copy));
                }
                match uri.scheme {
                    AMQPScheme::AMQP => Ok(stream),
                    AMQPScheme::AMQPS => Ok(stream.into_tls(&uri.authority.host, tls.as_ref()).await?),
                }
            },
            options,
        );
        // A connect that is given up must not go on behind our back.
        let socket = Socket(socket);
        match timeout(limit, connect).await {
            Ok(Ok(connection)) => Ok(Self { connection, socket, limit }),
            Ok(Err(error)) => Err(LinkError::Refused { host: host.clone(), text: explain(&error, broker, host) }),
            Err(_) => Err(LinkError::Timeout { host: host.clone(), limit }),
        }
    }

    /// Opens a channel.
    pub async fn channel(&self) -> Result<Channel, LinkError> {
        self.answer("channel.open", self.connection.create_channel()).await
    }

    /// Waits for one answer of the broker's, no longer than the connection's limit.
    pub async fn answer<T>(
        &self,
        what: &'static str,
        asked: impl Future<Output = lapin::Result<T>>,
    ) -> Result<T, LinkError> {
        match timeout(self.limit, asked).await {
            Ok(answer) => answer.map_err(|error| LinkError::Protocol(report(&error))),
            Err(_) => Err(LinkError::Silent { what, limit: self.limit }),
        }
    }

    pub fn is_up(&self) -> bool {
        self.connection.status().connected()
    }

    /// Whether the broker has told us to publish nothing.
    pub fn is_blocked(&self) -> bool {
        self.connection.status().blocked()
    }

    /// What the broker says about the connection from now on. Events go to one listener only: call it once.
    pub fn events(&self) -> Pin<Box<dyn Stream<Item = Event> + Send>> {
        Box::pin(self.connection.events_listener())
    }

    /// Ends the connection at once: nothing that was not written yet will be.
    pub fn kill(&self) {
        self.socket.shut();
    }

    /// Says goodbye, within a bounded time.
    pub async fn close(self) {
        let said = timeout(GOODBYE, self.connection.close(200, "OK".into())).await;
        if let Ok(Err(error)) = said {
            tracing::debug!(error = %report(&error), "closing a broker's connection");
        }
    }
}

/// A copy of the connection's socket, to shut it down with.
struct Socket(Arc<Mutex<Option<TcpStream>>>);

impl Socket {
    fn shut(&self) {
        if let Some(socket) = self.0.lock().unwrap_or_else(PoisonError::into_inner).take() {
            // The peer may have been faster.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.shut();
    }
}

/// The broker's reply code, where the error is the broker's word.
pub fn reply_code(error: &lapin::Error) -> Option<u16> {
    match error.kind() {
        lapin::ErrorKind::ProtocolError(error) => Some(error.get_id()),
        _ => None,
    }
}

/// Whether the error closed a channel only.
pub fn is_channels(error: &lapin::Error) -> bool {
    matches!(error.kind(), lapin::ErrorKind::ProtocolError(error) if matches!(error.kind(), AMQPErrorKind::Soft(_)))
}

/// The broker's words, with what to do about the commonest of them.
fn explain(error: &lapin::Error, broker: &Broker, host: &Host) -> String {
    let words = report(error);
    let (name, login) = (&broker.name, &broker.login);
    let remedy = match (reply_code(error), tls_error(error)) {
        (Some(403), _) => match login {
            Login::Password { .. } => {
                format!("the login of [brokers.{name}] was refused: check username and password")
            }
            Login::Certificate => format!(
                "the certificate of [brokers.{name}] was accepted, but no user has its name: rabbitmqctl add_user, clear_password; \
                 the broker's ssl_cert_login_from says which name"
            ),
        },
        (Some(530), _) => format!(
            "does virtual host {:?} exist, and may the user enter it? rabbitmqctl add_vhost, set_permissions",
            broker.vhost
        ),
        (_, Some(rustls::Error::InvalidCertificate(_))) => format!(
            "the broker's certificate is not trusted: has ca_file of [brokers.{name}] the authority that signed it, and was it made for {:?}?",
            host.name
        ),
        (_, Some(rustls::Error::AlertReceived(_))) => {
            format!(
                "the broker refused our side of TLS: does it trust cert_file of [brokers.{name}], and is one configured?"
            )
        }
        // What RabbitMQ answers to a mechanism it does not have; and a refusal of TLS is lost where its reset overtakes it.
        (None, None) if matches!(login, Login::Certificate) && is_hung_up(error) => {
            format!(
                "it hung up: does it trust cert_file of [brokers.{name}], and let anybody log in by certificate? enable \
                 rabbitmq_auth_mechanism_ssl there, and EXTERNAL in auth_mechanisms"
            )
        }
        _ => return words,
    };
    format!("{words} ({remedy})")
}

fn is_hung_up(error: &lapin::Error) -> bool {
    use std::io::ErrorKind::{ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), lapin::ErrorKind::IOError(error) if matches!(error.kind(), ConnectionAborted | ConnectionReset | UnexpectedEof))
}

/// What TLS failed with, if it did.
fn tls_error(error: &lapin::Error) -> Option<&rustls::Error> {
    match error.kind() {
        lapin::ErrorKind::IOError(error) => error.get_ref()?.downcast_ref(),
        _ => None,
    }
}

fn protocol(error: lapin::Error) -> LinkError {
    LinkError::Protocol(report(&error))
}

fn uri(broker: &Broker, host: &Host) -> Result<AMQPUri, LinkError> {
    let (userinfo, mechanism) = match &broker.login {
        Login::Password { username, password } => {
            let password = match password {
                Password::Given(password) => password.clone(),
                Password::Source(source) => read(source, "the broker's password")?,
            };
            let password = password.expose_secret().to_string();
            (AMQPUserInfo { username: username.clone(), password }, SASLMechanism::Plain)
        }
        Login::Certificate => {
            (AMQPUserInfo { username: String::new(), password: String::new() }, SASLMechanism::External)
        }
    };
    Ok(AMQPUri {
        scheme: match broker.transport {
            Transport::Plain => AMQPScheme::AMQP,
            Transport::Tls { .. } => AMQPScheme::AMQPS,
        },
        authority: AMQPAuthority { userinfo, host: host.name.clone(), port: host.port },
        vhost: broker.vhost.clone(),
        query: AMQPQueryString {
            heartbeat: Some(u16::try_from(broker.heartbeat.as_secs()).unwrap_or(u16::MAX).max(1)),
            auth_mechanism: Some(mechanism),
            ..AMQPQueryString::default()
        },
    })
}

fn tls(transport: &Transport) -> Result<OwnedTLSConfig, LinkError> {
    let Transport::Tls { ca_file, identity } = transport else { return Ok(OwnedTLSConfig::default()) };
    // A second installation is refused, which is what is wanted.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let file = |path: &Path| std::fs::read(path).map_err(|error| secret(path.display().to_string(), error));
    let cert_chain = ca_file.as_deref().map(file).transpose()?;
    let identity = match identity {
        None => None,
        Some(identity) => {
            Some(OwnedIdentity::PKCS8 { pem: file(&identity.cert_file)?, key: file(&identity.key_file)? })
        }
    };
    Ok(OwnedTLSConfig { identity, cert_chain: cert_chain.map(|pem| String::from_utf8_lossy(&pem).into_owned()) })
}

fn read(source: &SecretSource, what: &str) -> Result<SecretString, LinkError> {
    match source {
        SecretSource::File(path) => std::fs::read_to_string(path)
            .map(|text| text.trim_end_matches(['\r', '\n']).into())
            .map_err(|error| secret(format!("{what} in {}", path.display()), error)),
        SecretSource::Env(name) => std::env::var(name).map(Into::into).map_err(|_| LinkError::Variable(name.clone())),
    }
}

fn secret(what: String, error: std::io::Error) -> LinkError {
    LinkError::Secret { what, error }
}
