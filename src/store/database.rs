//! How to reach the database: one parsed URL, TLS by default beyond this machine, every wait bounded.

use std::time::Duration;

use deadpool_postgres::{Manager, ManagerConfig, Pool, RecyclingMethod, Runtime};
use secrecy::{ExposeSecret, SecretString};
use tokio_postgres::config::{Host, SslMode};
use tokio_postgres::error::{DbError, Severity, SqlState};
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres::{AsyncMessage, Client, Config, Connection, Socket};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::history::Pin;

/// The longest a connect may take, TLS and authentication included.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest a pooled statement may take on the server.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(30);

pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("database url: {0}")]
    Url(String),
    #[error("database: {}", describe(.0))]
    Postgres(#[from] tokio_postgres::Error),
    /// No session: `at` is every host and port that was tried.
    #[error("database at {at}: {}", describe(.source))]
    Connect { at: String, source: tokio_postgres::Error },
    #[error("database at {at} did not answer within {limit:?}")]
    Silent { at: String, limit: Duration },
    #[error("database connection pool")]
    Pool(#[from] deadpool_postgres::PoolError),
    /// Something the schema rules out was read: the text says what.
    #[error("database holds something unexpected: {0}")]
    Corrupt(String),
    #[error(
        "the server is a standby and read-only: a relay works on the primary; waiting for its promotion, or for another address to answer"
    )]
    Standby,
    /// Not the server, timeline or database that this relay began on.
    #[error("the database has another history than the one this relay began on")]
    OtherHistory,
    #[error(
        "the identity of fencepost.effects stands at {last}, behind effect {newest}: it would give ids out twice; \
         stop the producers and run: select setval('fencepost.effects_id_seq', {newest})"
    )]
    Identity { last: i64, newest: i64 },
    #[error("{0}")]
    Schema(#[from] super::schema::SchemaError),
}

impl Error {
    /// The SQLSTATE, where the server gave one.
    pub fn sqlstate(&self) -> Option<&SqlState> {
        match self {
            Self::Postgres(error)
            | Self::Connect { source: error, .. }
            | Self::Pool(deadpool_postgres::PoolError::Backend(error)) => error.code(),
            _ => None,
        }
    }

    /// Whether the answer never came, so that the statement may or may not have taken effect.
    pub fn is_disconnect(&self) -> bool {
        match self {
            Self::Silent { .. } | Self::Pool(_) => true,
            Self::Postgres(error) | Self::Connect { source: error, .. } => {
                error.as_db_error().is_none_or(ends_the_session)
            }
            _ => false,
        }
    }
}

/// Whether the server said it in place of an answer and left: an administrator's word, a crash, or its own patience with
/// a client that was frozen amid a transaction (25P03).
fn ends_the_session(error: &DbError) -> bool {
    let code = error.code().code();
    matches!(error.parsed_severity(), Some(Severity::Fatal | Severity::Panic))
        || code.starts_with("08")
        || code.starts_with("57P")
}

/// "db error" alone helps nobody: the server's own words, with code, detail and hint.
fn describe(error: &tokio_postgres::Error) -> String {
    match error.as_db_error() {
        None => error.to_string(),
        Some(db) => {
            let mut text = format!("{} ({})", db.message(), db.code().code());
            for (name, part) in [("detail", db.detail()), ("hint", db.hint())] {
                if let Some(part) = part {
                    text.push_str(&format!("; {name}: {part}"));
                }
            }
            text
        }
    }
}

/// A database that can be connected to.
#[derive(Clone)]
pub struct Database {
    config: Config,
    tls: MakeRustlsConnect,
    pin: Option<Pin>,
}

impl Database {
    /// Reads a libpq URL or keyword string. Beyond this machine TLS with full verification is the default, and
    /// plaintext must be asked for with `sslmode=disable`.
    pub fn new(url: &SecretString, application_name: &str) -> Result<Self> {
        let text = url.expose_secret();
        let other_scheme = text.contains("://") && !is_url(text);
        if other_scheme || !(is_url(text) || text.contains('=')) {
            return Err(Error::Url("it is not one of PostgreSQL's: write postgresql://user@host/database".into()));
        }
        let (text, mode, root) = take_tls_options(text);
        let mut config: Config = text.parse().map_err(|e: tokio_postgres::Error| {
            // The message names the option, never its value.
            Error::Url(std::error::Error::source(&e).map_or_else(|| e.to_string(), ToString::to_string))
        })?;
        if config.get_hosts().is_empty() {
            return Err(Error::Url("no host: write postgresql://user@host/database".into()));
        }
        let local = config.get_hosts().iter().all(is_local);
        let mode = match mode.as_deref() {
            Some("disable") => SslMode::Disable,
            Some("prefer" | "allow") => SslMode::Prefer,
            Some("require" | "verify-ca" | "verify-full") => SslMode::Require,
            Some(other) => {
                return Err(Error::Url(format!(
                    "sslmode={other} is not known: write disable, prefer, require or verify-full"
                )));
            }
            None if local => SslMode::Disable,
            None => SslMode::Require,
        };
        config.ssl_mode(mode);
        if config.get_application_name().is_none() {
            config.application_name(application_name);
        }
        config
            .connect_timeout(Duration::from_secs(5))
            .keepalives_idle(Duration::from_secs(30))
            .keepalives_interval(Duration::from_secs(10))
            .keepalives_retries(3)
            .tcp_user_timeout(Duration::from_secs(30));
        Ok(Self { config, tls: MakeRustlsConnect::new(tls_config(root.as_deref())?), pin: None })
    }

    /// The same database, whose sessions must find themselves in this history.
    pub fn pinned(&self, pin: Pin) -> Self {
        Self { pin: Some(pin), ..self.clone() }
    }

    pub(super) fn pin(&self) -> Option<&Pin> {
        self.pin.as_ref()
    }

    /// Every host with its port, and nothing secret: where a connection is looked for.
    pub fn places(&self) -> String {
        places(&self.config)
    }

    /// A connection of its own for a session that keeps state, with the driver the caller must poll.
    pub async fn connect_raw(
        &self,
    ) -> Result<(Client, Connection<Socket, <MakeRustlsConnect as MakeTlsConnect<Socket>>::Stream>)> {
        let at = || self.places();
        tokio::time::timeout(CONNECT_TIMEOUT, self.config.connect(self.tls.clone()))
            .await
            .map_err(|_| Error::Silent { at: at(), limit: CONNECT_TIMEOUT })?
            .map_err(|source| Error::Connect { at: at(), source })
    }

    /// A connection of its own whose notices and notifications go to `on_message`. Ends when the client is dropped.
    pub async fn connect_with(&self, mut on_message: impl FnMut(AsyncMessage) + Send + 'static) -> Result<Client> {
        let (client, mut connection) = self.connect_raw().await?;
        tokio::spawn(async move {
            loop {
                match std::future::poll_fn(|cx| connection.poll_message(cx)).await {
                    Some(Ok(message)) => on_message(message),
                    Some(Err(error)) => {
                        tracing::debug!(error = %describe(&error), "database connection ended");
                        return;
                    }
                    None => return,
                }
            }
        });
        Ok(client)
    }

    /// A connection of its own.
    pub async fn connect(&self) -> Result<Client> {
        self.connect_with(|_| ()).await
    }

    /// A pool for calls that keep no session state. Every wait in it is bounded.
    pub fn pool(&self, size: usize) -> Pool {
        let mut config = self.config.clone();
        let options = config.get_options().unwrap_or_default().to_string();
        config.options(
            format!(
                "{options} -c statement_timeout={} -c jit=off -c enable_seqscan=off",
                STATEMENT_TIMEOUT.as_millis()
            )
            .trim(),
        );
        let manager = Manager::from_config(
            config,
            self.tls.clone(),
            // An empty query at each turn would be half of what an idle relay asks; an end of the connection is seen anyway.
            ManagerConfig { recycling_method: RecyclingMethod::Fast },
        );
        Pool::builder(manager)
            .max_size(size)
            .wait_timeout(Some(Duration::from_secs(5)))
            .create_timeout(Some(CONNECT_TIMEOUT))
            .recycle_timeout(Some(Duration::from_secs(1)))
            .runtime(Runtime::Tokio1)
            .build()
            // Unwrap safety: `build` only fails where timeouts are set without a runtime.
            .expect("a runtime is set")
    }
}

fn places(config: &Config) -> String {
    const PORT: u16 = 5432;
    let ports = config.get_ports();
    let port = |n: usize| ports.get(n).or(ports.first()).copied().unwrap_or(PORT);
    let place = |(n, host): (usize, &Host)| match host {
        Host::Tcp(name) if name.contains(':') => format!("[{name}]:{}", port(n)),
        Host::Tcp(name) => format!("{name}:{}", port(n)),
        Host::Unix(folder) => format!("{} (port {})", folder.display(), port(n)),
    };
    config.get_hosts().iter().enumerate().map(place).collect::<Vec<_>>().join(", ")
}

fn is_local(host: &Host) -> bool {
    match host {
        Host::Unix(_) => true,
        Host::Tcp(name) => name == "localhost" || name.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback()),
    }
}

fn is_url(text: &str) -> bool {
    text.starts_with("postgres://") || text.starts_with("postgresql://")
}

/// tokio-postgres does not know libpq's verifying modes: they are read here and taken out of the text.
fn take_tls_options(text: &str) -> (String, Option<String>, Option<String>) {
    let (head, options, separator) = match (is_url(text), text.split_once('?')) {
        (true, Some((head, query))) => (head, query, '&'),
        (true, None) => return (text.into(), None, None),
        (false, _) => ("", text, ' '),
    };
    let (mut mode, mut root, mut rest) = (None, None, Vec::new());
    for option in options.split(separator) {
        match option.split_once('=') {
            Some(("sslmode", value)) => mode = Some(value.to_string()),
            Some(("sslrootcert", value)) => root = Some(value.replace("%2F", "/")),
            _ => rest.push(option),
        }
    }
    let rest = rest.join(&separator.to_string());
    match (is_url(text), rest.is_empty()) {
        (true, true) => (head.into(), mode, root),
        (true, false) => (format!("{head}?{rest}"), mode, root),
        (false, _) => (rest, mode, root),
    }
}

fn tls_config(root: Option<&str>) -> Result<rustls::ClientConfig> {
    // A second installation is refused, which is what is wanted.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let mut roots = rustls::RootCertStore::empty();
    match root {
        Some(path) => {
            use rustls::pki_types::{CertificateDer, pem::PemObject};
            let bad = |e: &dyn std::fmt::Display| Error::Url(format!("sslrootcert {path}: {e}"));
            for cert in CertificateDer::pem_file_iter(path).map_err(|e| bad(&e))? {
                roots.add(cert.map_err(|e| bad(&e))?).map_err(|e| bad(&e))?;
            }
        }
        None => {
            let native = rustls_native_certs::load_native_certs();
            roots.add_parsable_certificates(native.certs);
        }
    }
    Ok(rustls::ClientConfig::builder().with_root_certificates(roots).with_no_client_auth())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(url: &str) -> SslMode {
        Database::new(&SecretString::from(url), "test").unwrap().config.get_ssl_mode()
    }

    #[test]
    fn plaintext_beyond_this_machine_must_be_asked_for() {
        assert_eq!(mode("postgresql://u@db.example/x"), SslMode::Require);
        assert_eq!(mode("postgresql://u@db.example/x?sslmode=disable"), SslMode::Disable);
        assert_eq!(mode("postgresql://u@db.example/x?sslmode=verify-full"), SslMode::Require);
        assert_eq!(mode("postgresql://u@127.0.0.1/x"), SslMode::Disable);
        assert_eq!(mode("host=/var/run/postgresql user=u dbname=x"), SslMode::Disable);
        assert_eq!(mode("host=db.example sslmode=require user=u"), SslMode::Require);
    }

    #[test]
    fn an_error_names_every_place() {
        let named = |url: &str| Database::new(&SecretString::from(url), "test").unwrap().places();
        assert_eq!(named("postgresql://u:hunter2@db.example/x"), "db.example:5432");
        assert_eq!(named("postgresql://u@a:1,b:2/x"), "a:1, b:2");
        assert_eq!(named("host=a,b port=7 user=u"), "a:7, b:7");
        assert_eq!(named("postgresql://u@[::1]:5433/x"), "[::1]:5433");
        assert_eq!(named("host=/run/postgresql user=u"), "/run/postgresql (port 5432)");
    }

    #[test]
    fn a_bad_url_is_refused_without_its_password() {
        for url in [
            "nonsense",
            "mysql://u:hunter2@h/x?a=b",
            "postgresql://u:hunter2@h/x?sslmode=maybe",
            "postgresql://u:hunter2@h/x?nonsense=1",
            "user=u password=hunter2",
        ] {
            let error = Database::new(&SecretString::from(url), "test").err().unwrap().to_string();
            assert!(!error.contains("hunter2"), "{error}");
        }
    }
}
