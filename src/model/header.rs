//! Names of headers.

use http::HeaderName;

/// Names that are ours, a protocol's or the connection's own: no producer's header travels under one of them. The database
/// refuses them to producers (`fencepost.is_reserved_header`); what is configured or stored otherwise is held to the same.
pub fn is_reserved(name: &HeaderName) -> bool {
    const FAMILIES: [&str; 7] = ["outbox", "proxy", "webhook", "x-death", "x-first-death", "x-last-death", "x-meta"];
    let name = name.as_str();
    let belongs = |family: &str| name.strip_prefix(family).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'));
    FAMILIES.into_iter().any(belongs)
        || matches!(
            name,
            "accept-encoding"
                | "authorization"
                | "bcc"
                | "cc"
                | "connection"
                | "content-digest"
                | "content-encoding"
                | "content-length"
                | "content-type"
                | "cookie"
                | "date"
                | "expect"
                | "host"
                | "idempotency-key"
                | "idempotent-replayed"
                | "keep-alive"
                | "te"
                | "traceparent"
                | "tracestate"
                | "trailer"
                | "transfer-encoding"
                | "upgrade"
                | "user-agent"
                | "via"
                | "x-deduplication-header"
                | "x-delay"
                | "x-match"
        )
}
