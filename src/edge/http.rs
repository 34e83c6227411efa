//! One HTTP attempt: request out, head back, body drained, and the evidence of how far it got.

use std::fmt;
use std::time::Duration;

use http::{HeaderMap, StatusCode};
use reqwest::redirect::Policy;
use tokio::time::{Instant, timeout_at};
use url::Url;

use super::body::{Progress, Tracked};
use super::egress::EgressPolicy;
use super::error::{EdgeError, report};
use super::request::Template;
use super::sign::Secret;
use super::{ack, retry_after};
use crate::model::consumer::{AckMode, Consumer, EdgeSpec, SecretSource};
use crate::model::effect::AttemptContext;
use crate::model::outcome::{AckReading, End, Evidence, Outcome, Phase};

/// The largest response head whose acknowledgement is read, in bytes; far larger ones break the answer off.
pub const HEAD_LIMIT: usize = 16 * 1024;
/// How much of a response body is read before the connection is dropped, in bytes.
pub const BODY_LIMIT: usize = 64 * 1024;
/// Below the 5 s after which common servers close idle connections: a request must not meet their FIN.
const POOL_IDLE: Duration = Duration::from_secs(4);

/// Whom a TLS edge trusts.
#[derive(Clone, Debug)]
pub enum Trust {
    /// The system's certificates, or those that `SSL_CERT_FILE` or `SSL_CERT_DIR` name.
    System,
    /// Only these, in PEM.
    Only(Vec<u8>),
}

/// The way to one HTTP consumer: its connections, its secrets, its deadline.
pub struct HttpEdge {
    client: reqwest::Client,
    url: Url,
    template: Template,
    timeout: Duration,
    connect_timeout: Duration,
    ack: AckMode,
}

impl HttpEdge {
    /// Reads the consumer's secrets (files and environment, blocking) and checks its URL against `egress`.
    pub fn new(consumer: &Consumer, egress: &EgressPolicy) -> Result<Self, EdgeError> {
        Self::trusting(consumer, egress, &Trust::System)
    }

    /// The same with certificates of one's own.
    pub fn trusting(consumer: &Consumer, egress: &EgressPolicy, trust: &Trust) -> Result<Self, EdgeError> {
        let EdgeSpec::Http { url } = &consumer.edge else {
            return Err(EdgeError::NotHttp { consumer: consumer.name.clone() });
        };
        egress.check_url(url).map_err(|source| EdgeError::Egress { consumer: consumer.name.clone(), source })?;
        let mut secrets = Vec::new();
        for (key, source) in [("secret", &consumer.secret), ("previous_secret", &consumer.previous_secret)] {
            if let Some(source) = source {
                secrets.push(read_secret(&consumer.name, key, source)?);
            }
        }
        let template = Template::new(&consumer.name, &consumer.pass_headers, secrets)
            .map_err(|source| EdgeError::Headers { consumer: consumer.name.clone(), source })?;
        let client = client(consumer, url, egress, trust)
            .map_err(|error| EdgeError::Client { consumer: consumer.name.clone(), source: error.without_url() })?;
        Ok(Self {
            client,
            url: url.clone(),
            template,
            timeout: consumer.timeout,
            connect_timeout: consumer.connect_timeout,
            ack: consumer.contract.ack,
        })
    }

    /// Sends the effect once and reads what comes back, within the consumer's timeout. Never sends it twice: what
    /// follows from the outcome is decided elsewhere.
    pub async fn attempt(&self, ctx: AttemptContext<'_>) -> Outcome {
        let started = Instant::now();
        let deadline = started + self.timeout;
        let progress = Progress::default();
        let headers = match self.template.headers(&ctx) {
            Ok(headers) => headers,
            Err(error) => return ended(End::NotDelivered, Phase::Prepare, started, Some(report(&error))),
        };
        let body = reqwest::Body::wrap(Tracked::new(ctx.effect.payload.clone(), progress.clone()));
        let request = self.client.post(self.url.clone()).headers(headers).body(body);
        let answer = match timeout_at(deadline, request.send()).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) => {
                // Proven by the connector; the other proof is that the body was never touched.
                let phase = if error.is_connect() { Phase::Connect } else { progress.phase() };
                let late = error.is_connect() && error.is_timeout();
                let error = report(&error.without_url());
                let error =
                    if late { format!("no connection within {:?}: {error}", self.connect_timeout) } else { error };
                return unanswered(phase, started, error);
            }
            Err(_) => {
                let error = format!("no answer within {:?}", self.timeout);
                return unanswered(progress.phase(), started, error);
            }
        };
        let status = answer.status();
        let ack = read_head(&ctx, status, answer.headers());
        let retry_after = match self.is_final(status, &ack) {
            true => None,
            false => retry_after::read(answer.headers(), ctx.now + started.elapsed()),
        };
        let (phase, error) = self.drain(answer, deadline).await;
        Outcome { retry_after, ..ended(End::Answered { status: status.as_u16(), ack }, phase, started, error) }
    }

    /// Whether nothing will be sent again, so that a hint when to come back means nothing.
    fn is_final(&self, status: StatusCode, ack: &AckReading) -> bool {
        match ack {
            AckReading::Word { ack, .. } => ack.fact().is_some(),
            AckReading::Contradicted { .. } => false,
            AckReading::Silent | AckReading::Malformed { .. } => status.is_success() && self.ack != AckMode::Required,
        }
    }

    /// Reads the body so that the connection can be used again. The head has already said everything: whatever goes
    /// wrong from here on is evidence and changes nothing.
    async fn drain(&self, mut answer: reqwest::Response, deadline: Instant) -> (Phase, Option<String>) {
        let mut room = BODY_LIMIT;
        loop {
            match timeout_at(deadline, answer.chunk()).await {
                Ok(Ok(None)) => return (Phase::Done, None),
                Ok(Ok(Some(chunk))) if chunk.len() <= room => room -= chunk.len(),
                Ok(Ok(Some(_))) => return (Phase::Body, Some(format!("the answer's body exceeds {BODY_LIMIT} bytes"))),
                Ok(Err(error)) => return (Phase::Body, Some(report(&error.without_url()))),
                Err(_) => {
                    return (Phase::Body, Some(format!("the answer's body did not end within {:?}", self.timeout)));
                }
            }
        }
    }
}

/// Without the URL, which may carry credentials, and without the secrets.
impl fmt::Debug for HttpEdge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpEdge").field("timeout", &self.timeout).finish_non_exhaustive()
    }
}

fn client(consumer: &Consumer, url: &Url, egress: &EgressPolicy, trust: &Trust) -> reqwest::Result<reqwest::Client> {
    let mut builder = reqwest::Client::builder()
        .http1_only()
        .redirect(Policy::none())
        .no_proxy()
        .referer(false)
        .retry(reqwest::retry::never())
        .dns_resolver(egress.clone())
        .connect_timeout(consumer.connect_timeout)
        .pool_idle_timeout(POOL_IDLE)
        .pool_max_idle_per_host(consumer.concurrency.get() as usize)
        .tcp_nodelay(true);
    match trust {
        // Loading the system's certificates takes time, and fails where there are none.
        _ if url.scheme() == "http" => builder = builder.tls_certs_only([]),
        Trust::System => {}
        Trust::Only(pem) => builder = builder.tls_certs_only(reqwest::Certificate::from_pem_bundle(pem)?),
    }
    builder.build()
}

fn read_head(ctx: &AttemptContext<'_>, status: StatusCode, headers: &HeaderMap) -> AckReading {
    let size: usize = headers.iter().map(|(name, value)| name.as_str().len() + value.len() + ": \r\n".len()).sum();
    if size > HEAD_LIMIT {
        return AckReading::Malformed { raw: String::new(), why: "the answer's head exceeds 16 KiB" };
    }
    ack::of_answer(status, headers, &ctx.effect.key)
}

fn unanswered(phase: Phase, started: Instant, error: String) -> Outcome {
    let end = if phase <= Phase::Connect { End::NotDelivered } else { End::Ambiguous };
    ended(end, phase, started, Some(error))
}

fn ended(end: End, phase: Phase, started: Instant, error: Option<String>) -> Outcome {
    let evidence = Evidence { phase, bytes_left: phase > Phase::Connect, took: started.elapsed(), error };
    Outcome { end, evidence, retry_after: None }
}

fn read_secret(consumer: &str, key: &'static str, source: &SecretSource) -> Result<Secret, EdgeError> {
    let consumer = || consumer.to_owned();
    let text = match source {
        SecretSource::File(path) => std::fs::read_to_string(path).map_err(|source| EdgeError::SecretFile {
            consumer: consumer(),
            key,
            path: path.clone(),
            source,
        })?,
        SecretSource::Env(variable) => std::env::var(variable).map_err(|_| EdgeError::SecretVariable {
            consumer: consumer(),
            key,
            variable: variable.clone(),
        })?,
    };
    Secret::parse(&text).map_err(|source| EdgeError::Secret { consumer: consumer(), key, source })
}
