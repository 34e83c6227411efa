//! The pure hot parts of a delivery: its headers, the reading of the answer, the decision, the key.

use std::hint::black_box;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use fencepost::edge::ack;
use fencepost::edge::request::Template;
use fencepost::edge::sign::Secret;
use fencepost::model::consumer::{AckMode, Contract, OnAmbiguous, Ordering};
use fencepost::model::effect::{AttemptContext, Effect};
use fencepost::model::key::{ConsumerId, EffectId, EffectKey, LeaseEpoch, Shard, TaskId};
use fencepost::model::outcome::{AckReading, End, Evidence, Outcome, Phase};
use fencepost::model::token::Ack;
use fencepost::relay::options::RetryOptions;
use fencepost::relay::settle::{Circumstances, decide};
use fencepost::store::parking::Trouble;
use http::{HeaderMap, HeaderValue, StatusCode};

/// A named piece of work, done once per call.
pub type Case = (&'static str, Box<dyn Fn()>);

pub fn all() -> Vec<Case> {
    vec![
        ("headers", headers(Vec::new())),
        ("headers, signed", headers(vec![Secret::generate()])),
        ("answer, bare token", answer("applied")),
        ("answer, with key", answer("applied; key=\"0190b3c4-7d5e-7abc-8def-0123456789ab:1\"; retain=604800")),
        ("decide, applied", decision(200, AckReading::Word { ack: Ack::Applied, retain: None, raw: "applied".into() })),
        ("decide, 503", decision(503, AckReading::Silent)),
        ("key, printed", printed()),
        ("key, parsed", parsed()),
    ]
}

fn effect() -> Effect {
    let task = TaskId::new("0190b3c4-7d5e-7abc-8def-0123456789ab").expect("a task id");
    Effect {
        id: EffectId(1),
        shard: Shard(0),
        ordering_key: task.as_str().into(),
        key: EffectKey::new(task, LeaseEpoch::new(1).expect("an epoch"), 1).expect("a key"),
        targets: vec![ConsumerId(1)],
        topic: None,
        kind: Some("order.paid".into()),
        schema_version: None,
        content_type: "application/json".into(),
        headers: Vec::new(),
        traceparent: None,
        payload: Bytes::from(vec![b'x'; 400]),
        sha256: [7; 32],
        committed_at: SystemTime::UNIX_EPOCH,
        deliver_after: None,
        expires_at: None,
    }
}

fn headers(secrets: Vec<Secret>) -> Box<dyn Fn()> {
    let template = Template::new("billing", &[], secrets).expect("a template");
    let effect = effect();
    Box::new(move || {
        let ctx =
            AttemptContext { effect: &effect, number: 1, now: SystemTime::UNIX_EPOCH + Duration::from_secs(1 << 31) };
        let _ = black_box(template.headers(black_box(&ctx)));
    })
}

fn answer(text: &'static str) -> Box<dyn Fn()> {
    let key = effect().key;
    let mut headers = HeaderMap::new();
    headers.insert("outbox-ack", HeaderValue::from_static(text));
    Box::new(move || {
        black_box(ack::of_answer(StatusCode::OK, black_box(&headers), &key));
    })
}

fn decision(status: u16, ack: AckReading) -> Box<dyn Fn()> {
    let (retry, trouble) = (RetryOptions::default(), Trouble::default());
    let evidence = Evidence { phase: Phase::Done, bytes_left: true, took: Duration::from_millis(1), error: None };
    let outcome = Outcome { end: End::Answered { status, ack }, evidence, retry_after: None };
    Box::new(move || {
        let at = Circumstances {
            contract: Contract { ack: AckMode::Required, on_ambiguous: OnAmbiguous::Retry, ordering: Ordering::None },
            definite_statuses: &[],
            trouble: &trouble,
            retry: &retry,
            ack_timeout: Duration::from_secs(300),
            jitter: 0.5,
        };
        black_box(decide(black_box(&outcome), at));
    })
}

fn printed() -> Box<dyn Fn()> {
    let key = effect().key;
    Box::new(move || {
        black_box(black_box(&key).to_string());
    })
}

fn parsed() -> Box<dyn Fn()> {
    let text = effect().key.to_string();
    Box::new(move || {
        let _ = black_box(black_box(&text).parse::<EffectKey>());
    })
}
