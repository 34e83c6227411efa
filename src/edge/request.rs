//! The request's headers (contract, section 4). The producer's travel as `Outbox-Meta-<Name>`, or under their own name
//! where the consumer's configuration lists it; ours always win.

use std::time::UNIX_EPOCH;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::header::{ACCEPT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, USER_AGENT};

use super::sign::{Secret, sign};
use crate::model::effect::AttemptContext;
use crate::model::header::is_reserved;
use crate::mutant::{self, Mutant};

const WEBHOOK_ID: HeaderName = HeaderName::from_static("webhook-id");
const WEBHOOK_TIMESTAMP: HeaderName = HeaderName::from_static("webhook-timestamp");
const WEBHOOK_SIGNATURE: HeaderName = HeaderName::from_static("webhook-signature");
const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
const TASK_ID: HeaderName = HeaderName::from_static("outbox-task-id");
const LEASE_EPOCH: HeaderName = HeaderName::from_static("outbox-lease-epoch");
const TYPE: HeaderName = HeaderName::from_static("outbox-type");
const SCHEMA_VERSION: HeaderName = HeaderName::from_static("outbox-schema-version");
const CONSUMER: HeaderName = HeaderName::from_static("outbox-consumer");
const ATTEMPT: HeaderName = HeaderName::from_static("outbox-attempt");
const CONTENT_DIGEST: HeaderName = HeaderName::from_static("content-digest");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// Why a request cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    #[error("{0:?} cannot be a header's name")]
    Name(String),
    #[error("the value of {0} cannot be sent in a header")]
    Value(String),
    #[error("the database's clock is before 1970")]
    Clock,
}

/// What is the same for every request to one consumer.
#[derive(Debug)]
pub struct Template {
    base: HeaderMap,
    pass: Vec<HeaderName>,
    /// The current secret, then the previous one.
    secrets: Vec<Secret>,
}

impl Template {
    pub fn new(consumer: &str, pass_headers: &[String], secrets: Vec<Secret>) -> Result<Self, RequestError> {
        let mut base = HeaderMap::new();
        base.insert(USER_AGENT, HeaderValue::from_static(concat!("fencepost/", env!("CARGO_PKG_VERSION"))));
        base.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        base.insert(CONSUMER, value(&CONSUMER, consumer)?);
        let mut pass = pass_headers.iter().map(|text| name(text)).collect::<Result<Vec<_>, _>>()?;
        pass.retain(|name| !is_reserved(name));
        Ok(Self { base, pass, secrets })
    }

    /// All headers of one attempt.
    pub fn headers(&self, ctx: &AttemptContext<'_>) -> Result<HeaderMap, RequestError> {
        let effect = ctx.effect;
        let mut key = effect.key.to_string();
        if mutant::is(Mutant::NewKeyOnRetry) && ctx.number > 1 {
            key = format!("{key}:{}", ctx.number + 1_000);
        }
        let now = ctx.now.duration_since(UNIX_EPOCH).map_err(|_| RequestError::Clock)?.as_secs();

        let mut headers = HeaderMap::new();
        for (text, content) in &effect.headers {
            let name = self.producers_name(name(text)?)?;
            headers.append(&name, value(&name, content)?);
        }
        for (name, content) in &self.base {
            headers.insert(name, content.clone());
        }
        let mut ours = |name: HeaderName, content: &str| {
            let content = value(&name, content)?;
            headers.insert(name, content);
            Ok(())
        };
        ours(CONTENT_TYPE, &effect.content_type)?;
        ours(CONTENT_LENGTH, &effect.payload.len().to_string())?;
        ours(WEBHOOK_ID, &key)?;
        ours(WEBHOOK_TIMESTAMP, &now.to_string())?;
        if !self.secrets.is_empty() {
            ours(WEBHOOK_SIGNATURE, &sign(&key, now, &effect.payload, &self.secrets))?;
        }
        // A structured-field string: the quotes are part of the value, and a key has nothing to escape.
        ours(IDEMPOTENCY_KEY, &format!("\"{key}\""))?;
        ours(TASK_ID, effect.key.task_id().as_str())?;
        ours(LEASE_EPOCH, &effect.key.lease_epoch().to_string())?;
        if let Some(kind) = &effect.kind {
            ours(TYPE, kind)?;
        }
        if let Some(version) = &effect.schema_version {
            ours(SCHEMA_VERSION, version)?;
        }
        ours(ATTEMPT, &ctx.number.to_string())?;
        ours(CONTENT_DIGEST, &format!("sha-256=:{}:", STANDARD.encode(effect.sha256)))?;
        if let Some(parent) = effect.traceparent.as_deref().and_then(child_of) {
            ours(TRACEPARENT, &parent)?;
        }
        Ok(headers)
    }

    fn producers_name(&self, name: HeaderName) -> Result<HeaderName, RequestError> {
        if self.pass.contains(&name) {
            return Ok(name);
        }
        let meta = format!("outbox-meta-{name}");
        HeaderName::from_bytes(meta.as_bytes()).map_err(|_| RequestError::Name(meta))
    }
}

fn name(text: &str) -> Result<HeaderName, RequestError> {
    HeaderName::from_bytes(text.as_bytes()).map_err(|_| RequestError::Name(text.into()))
}

fn value(name: &HeaderName, text: &str) -> Result<HeaderValue, RequestError> {
    HeaderValue::from_bytes(text.as_bytes()).map_err(|_| RequestError::Value(name.to_string()))
}

/// The producer's trace with a span of our own (W3C Trace Context). `None`: it gave no valid parent.
pub(super) fn child_of(parent: &str) -> Option<String> {
    let hex = |text: &str| text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    let mut fields = parent.splitn(5, '-');
    let (version, trace, span, flags) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
    let extended = fields.next().is_some();
    let lengths = [version.len(), trace.len(), span.len(), flags.len()] == [2, 32, 16, 2];
    let valid = lengths && [version, trace, span, flags].into_iter().all(hex);
    let zero = |text: &str| text.bytes().all(|b| b == b'0');
    if !valid || zero(trace) || zero(span) || version == "ff" || (extended && version == "00") {
        return None;
    }
    // An all-zero span id is invalid.
    let span = rand::random_range(1..=u64::MAX);
    Some(format!("00-{trace}-{span:016x}-{flags}"))
}
