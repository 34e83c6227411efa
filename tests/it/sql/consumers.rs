//! Declaring consumers and subscribing them.

use fencepost::model::consumer::ConsumerEntry;
use tokio::sync::mpsc;
use tokio_postgres::AsyncMessage;

use super::{billing, code, one, refused, rows};
use crate::support::PATIENCE;

#[tokio::test]
async fn a_declared_consumer_reads_back_as_an_entry() {
    let (_db, c) = billing().await;
    let spec = r#"{"kind": "http", "url": "https://h/x", "ack": "required", "on_ambiguous": "hold", "ordering": "key", "topics": ["a", "b"], "secret_file": "/s",
        "previous_secret_env": "OLD", "timeout": "10s", "connect_timeout": "500ms", "concurrency": 4, "rate": 10, "pass_headers": ["x-a"], "dedup_retain": "7d",
        "definite_statuses": [503], "broker": null}"#;
    let id = one(&c, &format!("select fencepost.declare_consumer('c', '{spec}')")).await;
    let stored = one(&c, "select spec from fencepost.consumers where name = 'c'").await;
    let entry: ConsumerEntry = serde_json::from_str(&stored).unwrap();
    assert_eq!((entry.name.as_str(), entry.concurrency, entry.topics.len()), ("c", Some(4), 2));
    assert!(entry.check(fencepost::model::key::ConsumerId(id.parse().unwrap())).is_ok());
    assert_eq!(rows(&c, "select topic from fencepost.subscriptions order by 1").await, ["a", "b"]);
}

#[tokio::test]
async fn declaring_again_changes_and_never_removes() {
    let (_db, c) = billing().await;
    let declare = |spec: &str| format!("select fencepost.declare_consumer('c', '{spec}')");
    let first = one(&c, &declare(r#"{"kind": "amqp", "exchange": "x", "topics": ["a"]}"#)).await;
    let at = one(&c, "select updated_at from fencepost.consumers where name = 'c'").await;
    assert_eq!(one(&c, &declare(r#"{"kind": "amqp", "topics": ["a"], "exchange": "x", "name": "c"}"#)).await, first);
    assert_eq!(one(&c, "select updated_at from fencepost.consumers where name = 'c'").await, at, "nothing had changed");
    assert_eq!(one(&c, &declare(r#"{"kind": "amqp", "exchange": "y", "topics": ["b"]}"#)).await, first);
    assert_eq!(one(&c, "select spec ->> 'exchange' from fencepost.consumers where name = 'c'").await, "y");
    assert_eq!(rows(&c, "select topic from fencepost.subscriptions order by 1").await, ["a", "b"]);
    c.batch_execute("update fencepost.consumers set retired_at = clock_timestamp() where name = 'c'").await.unwrap();
    assert_eq!(code(&c, "select fencepost.subscribe('a', 'c')").await, "OB002");
    one(&c, &declare(r#"{"kind": "amqp", "exchange": "y"}"#)).await;
    assert_eq!(one(&c, "select retired_at from fencepost.consumers where name = 'c'").await, "-");
}

#[tokio::test]
async fn bad_entries_are_refused_by_field() {
    let (_db, c) = billing().await;
    let long = format!(r#"{{"kind": "amqp", "exchange": "{}"}}"#, "x".repeat(256));
    for (spec, wrong) in [
        ("[]", "spec: must be a JSON object"),
        ("{}", "consumer c: kind: missing"),
        (r#"{"kind": "smtp"}"#, "consumer c, kind: write http or amqp"),
        (r#"{"kind": "http"}"#, "consumer c: url: missing"),
        (
            r#"{"kind": "http", "url": "ftp://user:hunter2@h/"}"#,
            "consumer c, url: not an http or https URL with a host",
        ),
        (
            r#"{"kind": "http", "url": "http://h", "exchange": "x"}"#,
            "consumer c: exchange, routing_key, broker, queue, ack_timeout and republishes mean nothing for kind http",
        ),
        (r#"{"kind": "amqp"}"#, "consumer c: exchange: missing"),
        (
            r#"{"kind": "amqp", "exchange": "x", "url": "http://h"}"#,
            "consumer c: url, definite_statuses, pass_headers and secrets mean nothing for kind amqp",
        ),
        (long.as_str(), "consumer c, exchange: longer than 255 bytes"),
        (r#"{"kind": "amqp", "exchange": "x", "colour": "red"}"#, "consumer c, colour: unknown field"),
        (r#"{"kind": "amqp", "exchange": "x", "name": "d"}"#, "consumer c, name: differs from the name given, c"),
        (r#"{"kind": "amqp", "exchange": "x", "ack": "maybe"}"#, "consumer c, ack: write required, optional or none"),
        (
            r#"{"kind": "amqp", "exchange": "x", "ack": "none"}"#,
            "consumer c: on_ambiguous: with ack none there is no default",
        ),
        (
            r#"{"kind": "amqp", "exchange": "x", "on_ambiguous": "drop"}"#,
            "consumer c, on_ambiguous: write retry or hold",
        ),
        (r#"{"kind": "amqp", "exchange": "x", "ordering": "fifo"}"#, "consumer c, ordering: write key or none"),
        (r#"{"kind": "amqp", "exchange": "x", "timeout": "15"}"#, "consumer c, timeout: not a duration"),
        (
            r#"{"kind": "amqp", "exchange": "x", "timeout": 15}"#,
            "consumer c, timeout: must be a JSON string, not a number",
        ),
        (
            r#"{"kind": "amqp", "exchange": "x", "concurrency": 0}"#,
            "consumer c, concurrency: must be a whole number from 1",
        ),
        (
            r#"{"kind": "amqp", "exchange": "x", "concurrency": 1.5}"#,
            "consumer c, concurrency: must be a whole number from 1",
        ),
        (r#"{"kind": "amqp", "exchange": "x", "concurrency": 5000}"#, "consumer c, concurrency: must be at most 4096"),
        (r#"{"kind": "amqp", "exchange": "x", "topics": [1]}"#, "consumer c, topics: must be an array of strings"),
        (r#"{"kind": "amqp", "exchange": "x", "topics": [""]}"#, "topic: must be 1 to 256 bytes"),
        (
            r#"{"kind": "http", "url": "http://h", "definite_statuses": [404]}"#,
            "consumer c, definite_statuses: must be statuses from 500 to 599",
        ),
        (
            r#"{"kind": "http", "url": "http://h", "secret_file": "/a", "secret_env": "A"}"#,
            "consumer c: give secret_file or secret_env, not both",
        ),
    ] {
        let (state, message) = refused(&c, &format!("select fencepost.declare_consumer('c', '{spec}')")).await;
        assert_eq!(state, "22023", "{spec}: {message}");
        assert!(message.starts_with(wrong), "{spec}: {message}");
        assert!(!message.contains("hunter2"));
    }
    for name in ["''", "null", "'a b'", "repeat('x', 65)"] {
        assert_eq!(
            code(&c, &format!(r#"select fencepost.declare_consumer({name}, '{{"kind": "amqp", "exchange": "x"}}')"#))
                .await,
            "22023",
            "{name}"
        );
    }
    assert_eq!(rows(&c, "select name from fencepost.consumers").await, ["billing"]);
}

#[tokio::test]
async fn subscribing_needs_a_consumer_and_a_topic() {
    let (_db, c) = billing().await;
    c.batch_execute("select fencepost.subscribe('a', 'billing'), fencepost.subscribe('a', 'billing')").await.unwrap();
    assert_eq!(one(&c, "select count(*) from fencepost.subscriptions").await, "1");
    assert_eq!(code(&c, "select fencepost.subscribe('a', 'nobody')").await, "OB002");
    assert_eq!(code(&c, "select fencepost.subscribe('a', null)").await, "OB002");
    for topic in ["''", "null", "repeat('x', 257)", "repeat('x', 1000000)"] {
        assert_eq!(code(&c, &format!("select fencepost.subscribe({topic}, 'billing')")).await, "22023", "{topic}");
    }
    c.batch_execute("select fencepost.subscribe(repeat('x', 256), 'billing')").await.unwrap();
}

#[tokio::test]
async fn relays_are_told_of_changes_only() {
    let (db, c) = billing().await;
    let (heard, mut notifications) = mpsc::unbounded_channel();
    let relay = db
        .database()
        .connect_with(move |message| {
            if let AsyncMessage::Notification(n) = message {
                let _ = heard.send(n.channel().to_string());
            }
        })
        .await
        .unwrap();
    relay.batch_execute("listen fencepost_consumers; listen fence_end").await.unwrap();
    let changed =
        r#"select fencepost.declare_consumer('billing', '{"kind": "http", "url": "http://127.0.0.1/other"}')"#;
    for sql in [
        super::BILLING,
        changed,
        changed,
        "select fencepost.subscribe('a', 'billing')",
        "select fencepost.subscribe('a', 'billing')",
        "notify fence_end",
    ] {
        c.batch_execute(sql).await.unwrap();
    }
    let mut all = Vec::new();
    while all.last().is_none_or(|channel| channel != "fence_end") {
        all.push(tokio::time::timeout(PATIENCE, notifications.recv()).await.unwrap().unwrap());
    }
    assert_eq!(all, ["fencepost_consumers", "fencepost_consumers", "fence_end"]);
}
