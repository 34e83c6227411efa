//! What goes over the wire: the whole header set, the bytes as they were frozen, and no secret where none belongs.

use std::path::PathBuf;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use fencepost::edge::request::Template;
use fencepost::edge::sign::{Secret, sign};
use fencepost::model::outcome::Phase;
use proptest::prelude::*;
use secrecy::ExposeSecret;

use super::*;
use crate::support::receiver::{Cut, Receiver, Request, Script};

/// A secret in a file of its own, as the configuration names it.
struct SecretFile {
    path: PathBuf,
    secret: Secret,
}

impl SecretFile {
    fn new(name: &str) -> Self {
        let secret = Secret::generate();
        let path = std::env::temp_dir().join(format!("fencepost-{}-{name}", std::process::id()));
        std::fs::write(&path, format!("{}\n", secret.printed().expose_secret())).unwrap();
        Self { path, secret }
    }
}

impl Drop for SecretFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

async fn sent(edge: &HttpEdge, receiver: &Receiver, effect: &Effect, number: u32) -> Request {
    assert_eq!(answered(&attempt_number(edge, effect, number).await).0, 200);
    receiver.requests().pop().expect("a request")
}

#[tokio::test]
async fn the_whole_header_set() {
    let receiver = Receiver::start().await;
    let edge = edge(&receiver.url(), "pass_headers = ['X-Tenant']");
    let mut effect = effect(r#"{"a": 1}"#);
    effect.key = "task-1:3:2".parse().unwrap();
    effect.kind = Some("order.paid".into());
    effect.schema_version = Some("2".into());
    effect.content_type = "application/vnd.order+json; charset=utf-8".into();
    effect.headers = [
        ("X-Tenant", "acme"),
        ("Region", "eu"),
        ("Host", "evil.example"),
        ("Content-Length", "0"),
        ("Webhook-Id", "other"),
        ("Transfer-Encoding", "chunked"),
        ("User-Agent", "other"),
    ]
    .map(|(n, v)| (n.to_owned(), v.to_owned()))
    .to_vec();
    let before = clock();
    let request = sent(&edge, &receiver, &effect, 7).await;
    assert_eq!(request.line(), "POST /hook HTTP/1.1");
    let timestamp: u64 = request.header("webhook-timestamp").unwrap().parse().unwrap();
    let unix = |at: SystemTime| at.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    assert!((unix(before)..=unix(clock())).contains(&timestamp));

    let mut headers = request.headers();
    headers.retain(|(name, _)| name != "webhook-timestamp");
    headers.sort();
    let digest = format!("sha-256=:{}:", STANDARD.encode(effect.sha256));
    let agent = concat!("fencepost/", env!("CARGO_PKG_VERSION"));
    let host = format!("127.0.0.1:{}", receiver.port());
    let expected = [
        ("accept", "*/*"),
        ("accept-encoding", "identity"),
        ("content-digest", &digest),
        ("content-length", "8"),
        ("content-type", "application/vnd.order+json; charset=utf-8"),
        ("host", &host),
        ("idempotency-key", "\"task-1:3:2\""),
        ("outbox-attempt", "7"),
        ("outbox-consumer", "billing"),
        ("outbox-lease-epoch", "3"),
        ("outbox-meta-content-length", "0"),
        ("outbox-meta-host", "evil.example"),
        ("outbox-meta-region", "eu"),
        ("outbox-meta-transfer-encoding", "chunked"),
        ("outbox-meta-user-agent", "other"),
        ("outbox-meta-webhook-id", "other"),
        ("outbox-schema-version", "2"),
        ("outbox-task-id", "task-1"),
        ("outbox-type", "order.paid"),
        ("user-agent", agent),
        ("webhook-id", "task-1:3:2"),
        ("x-tenant", "acme"),
    ];
    assert_eq!(headers, expected.map(|(n, v)| (n.to_owned(), v.to_owned())));
}

#[tokio::test]
async fn bodies_arrive_byte_for_byte_and_never_chunked() {
    let receiver = Receiver::start().await;
    let edge = edge(&receiver.url(), "");
    let binary: Vec<u8> = (0..=255).cycle().take(1 << 20).collect();
    for payload in [Vec::new(), b"{ \"a\":1.0,  \"a\":2 }\r\n\0".to_vec(), binary.clone(), binary.repeat(16)] {
        let request = sent(&edge, &receiver, &effect(payload.clone()), 1).await;
        assert!(request.body == payload, "{} bytes came as {}", payload.len(), request.body.len());
        assert_eq!(request.header("content-length"), Some(payload.len().to_string()));
        assert_eq!(request.header("transfer-encoding"), None);
    }
}

#[tokio::test]
async fn signatures_verify_with_the_published_library_for_one_and_two_secrets() {
    let receiver = Receiver::start().await;
    let (new, old) = (SecretFile::new("new"), SecretFile::new("old"));
    let current = format!("secret_file = '{}'", new.path.display());
    let rotating = format!("{current}\nprevious_secret_file = '{}'", old.path.display());
    let verifies = |request: &Request, secret: &Secret| {
        let mut headers = http::HeaderMap::new();
        for name in ["webhook-id", "webhook-timestamp", "webhook-signature"] {
            headers.insert(name, request.header(name).unwrap().parse().unwrap());
        }
        let oracle = standardwebhooks::Webhook::new(secret.printed().expose_secret()).unwrap();
        oracle.verify(&request.body, &headers).is_ok()
    };
    let plain = sent(&edge(&receiver.url(), ""), &receiver, &effect("{}"), 1).await;
    assert_eq!(plain.header("webhook-signature"), None);
    let one = sent(&edge(&receiver.url(), &current), &receiver, &effect("{}"), 1).await;
    assert!(verifies(&one, &new.secret) && !verifies(&one, &old.secret));
    let two = sent(&edge(&receiver.url(), &rotating), &receiver, &effect("{}"), 2).await;
    assert!(verifies(&two, &new.secret) && verifies(&two, &old.secret));

    // The library reads text only; a binary body is signed by the same rule.
    let binary = effect(vec![0u8, 255, 128]);
    let request = sent(&edge(&receiver.url(), &current), &receiver, &binary, 1).await;
    let timestamp = request.header("webhook-timestamp").unwrap().parse().unwrap();
    let expected = sign(KEY, timestamp, &binary.payload, std::slice::from_ref(&new.secret));
    assert_eq!(request.header("webhook-signature"), Some(expected));
}

#[tokio::test]
async fn time_and_signature_are_fresh_on_every_attempt_and_nothing_else_changes() {
    let receiver = Receiver::start().await;
    let file = SecretFile::new("fresh");
    let edge = edge(&receiver.url(), &format!("secret_file = '{}'", file.path.display()));
    let mut effect = effect("{}");
    effect.traceparent = Some("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".into());
    let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    for (number, now) in [(1, at(1_700_000_000)), (2, at(1_700_000_060))] {
        edge.attempt(AttemptContext { effect: &effect, number, now }).await;
    }
    let requests = receiver.requests();
    let pairs = requests[0].headers().into_iter().zip(requests[1].headers());
    let changed: Vec<_> = pairs.filter(|(a, b)| a != b).map(|(a, _)| a.0).collect();
    assert_eq!(changed, ["webhook-timestamp", "webhook-signature", "outbox-attempt", "traceparent"]);
    assert_eq!(requests[0].body, requests[1].body);
    assert_eq!(requests[1].header("webhook-timestamp"), Some("1700000060".into()));
}

#[tokio::test]
async fn a_trace_goes_on_with_a_span_of_our_own() {
    let receiver = Receiver::start().await;
    let edge = edge(&receiver.url(), "");
    let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
    let span = "00f067aa0ba902b7";
    let zeros = "0".repeat(32);
    let mut effect = effect("{}");
    for (given, goes_on) in [
        (format!("00-{trace}-{span}-01"), true),
        (format!("cc-{trace}-{span}-01-what-the-future-brings"), true),
        (format!("00-{trace}-{span}-01-more"), false),
        (format!("ff-{trace}-{span}-01"), false),
        (format!("00-{zeros}-{span}-01"), false),
        (format!("00-{trace}-{}-01", &zeros[..16]), false),
        (format!("00-{}-{span}-01", trace.to_uppercase()), false),
        (format!("00-{trace}-{span}"), false),
        ("nonsense".into(), false),
        (String::new(), false),
    ] {
        effect.traceparent = Some(given.clone());
        let sent = sent(&edge, &receiver, &effect, 1).await.header("traceparent");
        assert_eq!(sent.is_some(), goes_on, "{given}");
        if let Some(sent) = sent {
            let fields: Vec<_> = sent.split('-').collect();
            assert_eq!((fields[0], fields[1], fields[3]), ("00", trace, "01"));
            assert!(fields[2] != span && fields[2].len() == 16, "{sent}");
        }
    }
}

#[tokio::test]
async fn headers_that_cannot_be_built_stop_the_attempt_before_any_socket() {
    let receiver = Receiver::start().await;
    let edge = edge(&receiver.url(), "");
    let spoilt: [fn(&mut Effect); 4] = [
        |effect| effect.content_type = "text/plain\r\nX-Evil: 1".into(),
        |effect| effect.kind = Some("a\nb".into()),
        |effect| effect.headers = vec![("X-Ok".into(), "a\r\nX-Evil: 1".into())],
        |effect| effect.headers = vec![("not a token".into(), "a".into())],
    ];
    for spoil in spoilt {
        let mut effect = effect("{}");
        spoil(&mut effect);
        let outcome = attempt(&edge, &effect).await;
        assert_eq!((&outcome.end, outcome.evidence.phase), (&End::NotDelivered, Phase::Prepare));
        let error = outcome.evidence.error.expect("an error");
        assert!(!outcome.evidence.bytes_left && !error.contains('\n'), "{error}");
    }
    assert_eq!(receiver.connections(), 0);
}

#[tokio::test]
async fn credentials_in_the_url_are_sent_and_win_and_never_show() {
    let receiver = Receiver::start().await;
    let secret_url = receiver.url().replace("127.0.0.1", "user:p%40ss@127.0.0.1") + "?token=hunter2";
    let edge = edge(&secret_url, "timeout = '500ms'\nconnect_timeout = '200ms'");
    let mut effect = effect("{}");
    effect.headers = vec![("Authorization".into(), "Bearer other".into())];
    let request = sent(&edge, &receiver, &effect, 1).await;
    assert_eq!(request.header("authorization"), Some(format!("Basic {}", STANDARD.encode("user:p@ss"))));
    assert_eq!(request.header("outbox-meta-authorization"), Some("Bearer other".into()));
    assert_eq!(request.line(), "POST /hook?token=hunter2 HTTP/1.1");

    let shows = |text: &str| {
        ["hunter2", "p@ss", "p%40ss", "user", "whsec"].into_iter().find(|s| text.contains(s)).map(str::to_owned)
    };
    for script in [Script::stall(), Script::cut(Cut::Rst), Script::raw("garbage\r\n\r\n").then_cut(Cut::Fin)] {
        receiver.next(script);
        let error = attempt(&edge, &effect).await.evidence.error.expect("an error");
        assert_eq!(shows(&error), None, "{error}");
    }
    assert_eq!(shows(&format!("{edge:?}")), None);
    drop(receiver);
    let error = attempt(&edge, &effect).await.evidence.error.expect("an error");
    assert_eq!(shows(&error), None, "{error}");
}

proptest! {
    #[test]
    fn headers_never_panic_and_ours_always_win(
        extra in proptest::collection::vec((".{0,12}", ".{0,12}"), 0..6),
        listed in proptest::collection::vec("[a-z-]{1,12}", 0..4),
        content_type in ".{0,20}",
        kind in proptest::option::of(".{0,20}"),
        traceparent in proptest::option::of(".{0,60}"),
        number in any::<u32>(),
    ) {
        let mut effect = effect("{}");
        effect.headers = extra.into_iter().chain([("Webhook-Id".to_owned(), "x".to_owned())]).collect();
        effect.content_type = content_type;
        effect.kind = kind;
        effect.traceparent = traceparent;
        let listed: Vec<_> = listed.into_iter().chain(["webhook-id".to_owned()]).collect();
        let template = Template::new("billing", &listed, Vec::new()).unwrap();
        let ctx = AttemptContext { effect: &effect, number, now: clock() };
        if let Ok(headers) = template.headers(&ctx) {
            for (name, value) in [("webhook-id", KEY.to_owned()), ("outbox-attempt", number.to_string()), ("content-length", "2".into())] {
                let all: Vec<_> = headers.get_all(name).iter().collect();
                prop_assert_eq!(all, [value.as_str()]);
            }
        }
    }
}
