//! What an effect may say, what is frozen of it, and the words with which the rest is refused.

use fencepost::model::header::is_reserved;

use super::{billing, code, one, refused, rows};

fn emit(effect: &str) -> String {
    format!("select fencepost.emit($effects$[{effect}]$effects$, 't')")
}

/// `billing` and one payload, with further fields.
fn with(fields: &str) -> String {
    emit(&format!(r#"{{"consumer": "billing", "payload": 1, {fields}}}"#))
}

#[tokio::test]
async fn payload_bytes_are_frozen_as_given() {
    let (_db, c) = billing().await;
    c.batch_execute(
        r#"select fencepost.emit('[
            {"consumer": "billing", "payload": {"b":1,   "a": [true,null,1.50], "a2": "ü\n"}},
            {"consumer": "billing", "payload": null},
            {"consumer": "billing", "payload_text": " {\"b\":1,   \"a\": 2}\r\nü\t"},
            {"consumer": "billing", "payload_base64": "AP8Q\nAA=="},
            {"consumer": "billing", "payload_text": ""}]', 't')"#,
    )
    .await
    .unwrap();
    assert_eq!(
        rows(&c, "select convert_from(payload, 'UTF8') from fencepost.effects where content_type <> 'application/octet-stream' order by position").await,
        [r#"{"a": [true, null, 1.50], "b": 1, "a2": "ü\n"}"#, "null", " {\"b\":1,   \"a\": 2}\r\nü\t", ""]
    );
    assert_eq!(one(&c, "select encode(payload, 'hex') from fencepost.effects where position = 4").await, "00ff1000");
    assert_eq!(
        rows(&c, "select position, content_type, sha256 = sha256(payload), size = octet_length(payload) from fencepost.effects order by id").await,
        [
            "1|application/json|t|t",
            "2|application/json|t|t",
            "3|text/plain; charset=utf-8|t|t",
            "4|application/octet-stream|t|t",
            "5|text/plain; charset=utf-8|t|t"
        ]
    );
}

#[tokio::test]
async fn every_field_is_kept() {
    let (_db, c) = billing().await;
    let effect = with(
        r#""content_type": "application/vnd.x+json; v=1", "type": "order.paid", "schema_version": "2", "headers": {"X-Tenant": "a b"},
           "ordering_key": "order-1", "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "amends": "t-0:7:2",
           "deliver_after": "2099-01-31T08:00:00.5+01:00", "expires_at": "2099-02-01 00:00Z""#,
    );
    one(&c, &effect).await;
    assert_eq!(
        one(&c, "select content_type, type, schema_version, headers, ordering_key, traceparent, amends, deliver_after at time zone 'utc', expires_at at time zone 'utc', shard = fencepost.shard_of('order-1') from fencepost.effects").await,
        r#"application/vnd.x+json; v=1|order.paid|2|{"X-Tenant": "a b"}|order-1|00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01|t-0:7:2|2099-01-31 07:00:00.5|2099-02-01 00:00:00|t"#
    );
}

#[tokio::test]
async fn what_is_left_out_has_its_default() {
    let (_db, c) = billing().await;
    one(
        &c,
        &with(
            r#""type": null, "headers": null, "deliver_in": null, "topic": null, "payload_text": null, "amends": null"#,
        ),
    )
    .await;
    assert_eq!(
        one(&c, "select topic, type, schema_version, headers, ordering_key, traceparent, amends, deliver_after, expires_at, shard = fencepost.shard_of('t') from fencepost.effects").await,
        "-|-|-|-|t|-|-|-|-|t"
    );
}

#[tokio::test]
async fn intervals_count_from_the_database_s_now() {
    let (_db, c) = billing().await;
    one(&c, &with(r#""deliver_in": "10 minutes", "expires_in": "1 hour""#)).await;
    assert_eq!(
        one(&c, "select deliver_after - committed_at between interval '9 min' and interval '11 min', expires_at - committed_at between interval '59 min' and interval '61 min' from fencepost.effects").await,
        "t|t"
    );
}

#[tokio::test]
async fn a_topic_is_resolved_when_it_is_said() {
    let (_db, c) = billing().await;
    c.batch_execute(
        r#"select fencepost.declare_consumer('mail', '{"kind": "amqp", "routing_key": "mail"}');
           select fencepost.declare_consumer('gone', '{"kind": "amqp", "routing_key": "gone"}');
           select fencepost.subscribe('paid', 'mail'), fencepost.subscribe('paid', 'billing'), fencepost.subscribe('paid', 'billing'), fencepost.subscribe('paid', 'gone');
           update fencepost.consumers set retired_at = clock_timestamp() where name = 'gone';
           select fencepost.emit('[{"topic": "paid", "payload": 1}, {"topic": "nobody", "payload": 2}]', 't')"#,
    )
    .await
    .unwrap();
    c.batch_execute(r#"select fencepost.declare_consumer('later', '{"kind": "amqp", "routing_key": "later", "topics": ["paid", "nobody"]}')"#).await.unwrap();
    assert_eq!(
        rows(&c, "select key, consumer, topic from fencepost.intended order by key, consumer").await,
        ["t:1|billing|paid", "t:1|mail|paid", "t:1:2|-|nobody"]
    );
    assert_eq!(
        rows(&c, "select key, consumer, token from fencepost.deliveries order by key, consumer").await,
        ["t:1|billing|-", "t:1|mail|-", "t:1:2|-|unrouted"]
    );
    assert_eq!(rows(&c, "select consumer_id, token from fencepost.ledger").await, ["0|unrouted"]);

    let (state, message) = refused(&c, r#"select fencepost.emit('[{"consumer": "gone", "payload": 1}]')"#).await;
    assert_eq!((state.as_str(), message.as_str()), ("OB002", "effects[0].consumer: no consumer is named 'gone'"));
    assert_eq!(code(&c, r#"select fencepost.emit('[{"consumer": "Billing", "payload": 1}]')"#).await, "OB002");
}

/// Each fault names the index in the array and the field.
#[tokio::test]
async fn malformed_effects_are_refused_by_index_and_field() {
    let (_db, c) = billing().await;
    let good = r#"{"consumer": "billing", "payload": 1}"#;
    let cases = [
        ("7", "effects[1]: must be an object"),
        (r#"{"payload": 1}"#, "effects[1].consumer: give exactly one of consumer and topic"),
        (r#"{"consumer": "billing", "topic": "x", "payload": 1}"#, "effects[1].consumer: give exactly one"),
        (r#"{"topic": "", "payload": 1}"#, "effects[1].topic: must not be empty"),
        (r#"{"consumer": "billing"}"#, "effects[1].payload: missing"),
        (r#"{"consumer": "billing", "payload_text": null}"#, "effects[1].payload: missing"),
        (r#"{"consumer": "billing", "payload": 1, "payload_text": "x"}"#, "effects[1].payload: give exactly one"),
        (
            r#"{"consumer": "billing", "payload_base64": "AA==", "payload_text": "x"}"#,
            "effects[1].payload: give exactly one",
        ),
        (
            r#"{"consumer": "billing", "payload_text": 1}"#,
            "effects[1].payload_text: must be a string, not a JSON number",
        ),
        (r#"{"consumer": "billing", "payload_base64": "A"}"#, "effects[1].payload_base64: invalid base64"),
        (r#"{"consumer": "billing", "payload_base64": "A*=="}"#, "effects[1].payload_base64: invalid symbol"),
        (r#"{"consumer": "billing", "payload": 1, "ttl": 5}"#, "effects[1].ttl: unknown field"),
        (r#"{"consumer": "billing", "payload": 1, "Type": "x"}"#, "effects[1].Type: unknown field"),
        (r#"{"consumer": ["billing"], "payload": 1}"#, "effects[1].consumer: must be a string, not a JSON array"),
        (
            r#"{"consumer": "billing", "payload": 1, "schema_version": 2}"#,
            "effects[1].schema_version: must be a string",
        ),
    ];
    let fields = [
        (r#""type": """#, "type: must be printable ASCII"),
        (r#""type": "a\nb""#, "type: must be printable ASCII"),
        (r#""type": "ü""#, "type: must be printable ASCII"),
        (r#""schema_version": " 2""#, "schema_version: must be printable ASCII"),
        (r#""content_type": "json""#, "content_type: not a media type"),
        (r#""content_type": "text/plain\r\nX: y""#, "content_type: not a media type"),
        (r#""ordering_key": """#, "ordering_key: must not be empty"),
        (
            r#""traceparent": "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01""#,
            "traceparent: not a W3C traceparent",
        ),
        (
            r#""traceparent": "00-00000000000000000000000000000000-00f067aa0ba902b7-01""#,
            "traceparent: not a W3C traceparent",
        ),
        (
            r#""traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01""#,
            "traceparent: not a W3C traceparent",
        ),
        (
            r#""traceparent": "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01""#,
            "traceparent: not a W3C traceparent",
        ),
        (r#""amends": "t""#, "amends: not an idempotency key"),
        (r#""amends": "t:0""#, "amends: not an idempotency key"),
        (r#""amends": "t:1:1""#, "amends: not an idempotency key"),
        (r#""amends": "t:01""#, "amends: not an idempotency key"),
        (r#""amends": "t:9223372036854775808""#, "amends: not an idempotency key"),
        (r#""deliver_after": "2030-01-31T08:00:00""#, "deliver_after: '2030-01-31T08:00:00' is not a time with offset"),
        (r#""deliver_after": "tomorrow""#, "deliver_after: 'tomorrow' is not a time with offset"),
        (r#""deliver_after": "2030-02-31T08:00:00Z""#, "deliver_after: date/time field value out of range"),
        (
            r#""deliver_after": "2030-01-31T08:00Z", "deliver_in": "1 s""#,
            "deliver_in: give deliver_after or deliver_in, not both",
        ),
        (r#""deliver_in": "soon""#, "deliver_in: invalid input syntax"),
        (r#""deliver_in": "-1 s""#, "deliver_in: must not be negative"),
        (r#""deliver_in": "300000 years""#, "deliver_in: timestamp out of range"),
        (r#""expires_at": "x""#, "expires_at: 'x' is not a time with offset"),
        (r#""expires_in": "1 s", "deliver_in": "2 s""#, "expires_at: the effect would expire before it is due"),
        (r#""headers": []"#, "headers: must be an object of strings"),
        (r#""headers": "x""#, "headers: must be an object of strings"),
        (r#""headers": {"a": 1}"#, r#"headers["a"]: must be a string, not a JSON number"#),
        (r#""headers": {"": "x"}"#, r#"headers[""]: not a header name"#),
        (r#""headers": {"a b": "x"}"#, r#"headers["a b"]: not a header name"#),
        (r#""headers": {"a:": "x"}"#, r#"headers["a:"]: not a header name"#),
        (r#""headers": {"ä": "x"}"#, r#"headers["ä"]: not a header name"#),
        (r#""headers": {"a": "x\r\nEvil: y"}"#, r#"headers["a"]: must be printable ASCII, without line breaks"#),
        (r#""headers": {"a": "x\ny"}"#, r#"headers["a"]: must be printable ASCII, without line breaks"#),
        (r#""headers": {"A": "x", "a": "y"}"#, r#"headers["a"]: given twice"#),
    ];
    for (effect, wrong) in cases {
        let (state, message) = refused(&c, &emit(&format!("{good}, {effect}"))).await;
        assert_eq!(state, "OB004", "{effect}: {message}");
        assert!(message.starts_with(wrong), "{effect}: {message}");
    }
    for (field, wrong) in fields {
        let (state, message) = refused(&c, &with(field)).await;
        assert_eq!(state, "OB004", "{field}: {message}");
        assert!(message.starts_with(&format!("effects[0].{wrong}")), "{field}: {message}");
    }
    for effects in ["null", "'[]'", "'{}'", "'\"x\"'", "'null'"] {
        let (state, message) = refused(&c, &format!("select fencepost.emit({effects})")).await;
        assert_eq!((state.as_str(), message.as_str()), ("OB004", "effects: must be a non-empty JSON array of objects"));
    }
    assert_eq!(one(&c, "select count(*) from fencepost.effects").await, "0");
    assert_eq!(one(&c, "select count(*) from fencepost.tasks").await, "0");
}

#[tokio::test]
async fn reserved_header_names_are_refused_in_any_spelling() {
    let (_db, c) = billing().await;
    for name in "Host|content-length|Content-Type|Content-Encoding|content-digest|Transfer-Encoding|connection|Keep-Alive|TE|trailer|Upgrade|expect|\
                 User-Agent|accept-encoding|proxy-authorization|Proxy-Connection|authorization|cookie|idempotency-key|Webhook-Id|webhook-signature|webhook-timestamp|\
                 outbox-task-id|OUTBOX-ACK|outbox-meta-x|traceparent|tracestate|CC|BCC|cc|x-death|x-death-count|x-first-death-queue|x-last-death-reason|x-delay|\
                 x-deduplication-header|x-match|x-meta-a".split('|')
    {
        let (state, message) = refused(&c, &with(&format!(r#""headers": {{"{name}": "x"}}"#))).await;
        assert_eq!((state.as_str(), message), ("OB004", format!(r#"effects[0].headers["{name}"]: this name is reserved"#)));
        assert!(is_reserved(&name.parse().unwrap()), "a consumer's pass_headers may hold {name}");
    }
    for name in ["X-Tenant", "hostess", "X-Deathly", "accept", "etag", "x!#$%&'*+.^_`|~9"] {
        let sql = with(&format!(r#""headers": {{"{name}": "tab\tand space"}}"#)).replace(", 't')", ")");
        assert_eq!(rows(&c, &sql).await.len(), 1, "{name}");
        assert!(!is_reserved(&name.parse().unwrap()), "a consumer's pass_headers may not hold {name}");
    }
}

/// What PostgreSQL's jsonb cannot hold is refused by its own clear words, before any of ours.
#[tokio::test]
async fn a_zero_byte_needs_base64() {
    let (_db, c) = billing().await;
    let (state, message) =
        refused(&c, r#"select fencepost.emit('[{"consumer": "billing", "payload_text": "a\u0000b"}]')"#).await;
    assert_eq!((state.as_str(), message.as_str()), ("22P05", "unsupported Unicode escape sequence"));
    one(&c, r#"select fencepost.emit('[{"consumer": "billing", "payload_base64": "YQBi"}]', 't')"#).await;
    assert_eq!(one(&c, "select payload from fencepost.intended").await, r"\x610062");
}

#[tokio::test]
async fn keys_count_the_array() {
    let (_db, c) = billing().await;
    c.batch_execute("select fencepost.emit((select jsonb_agg(jsonb_build_object('consumer', 'billing', 'payload', n)) from generate_series(1, 120) n), 't')").await.unwrap();
    assert_eq!(
        rows(&c, "select key, convert_from(payload, 'UTF8') from fencepost.intended order by payload limit 3").await,
        ["t:1|1", "t:1:10|10", "t:1:100|100"]
    );
    assert_eq!(one(&c, "select count(distinct key), bool_and(array_position(a, id) = position) from (select id, position, i.key from fencepost.effects join fencepost.intended_by_id i on effect_id = id) e, (select array_agg(id order by id) a from fencepost.effects) o").await, "120|t");
    assert_eq!(one(&c, "select first_effect_id, last_effect_id, effect_count from fencepost.tasks").await, "1|120|120");
}

/// What a call of `store` makes of one effect: the row it leaves, or its refusal.
async fn stored_by(c: &tokio_postgres::Client, store: &str, effect: &str) -> String {
    c.batch_execute("begin").await.unwrap();
    let call = format!("select fencepost.{store}('t', 1, $effects$[{effect}]$effects$, '{{7}}')");
    let made = match c.simple_query(&call).await {
        Ok(_) => one(c, "select to_jsonb(e) - 'xid' - 'committed_at' from fencepost.effects e").await,
        Err(error) => {
            let error = error.as_db_error().unwrap();
            format!("{} {}", error.code().code(), error.message())
        }
    };
    c.batch_execute("rollback").await.unwrap();
    made
}

#[tokio::test]
async fn the_short_way_of_the_usual_effect_is_the_long_way() {
    let (_db, c) = billing().await;
    c.batch_execute("update fencepost.settings set value = '300' where name = 'payload_max_bytes'").await.unwrap();
    let long = |field: &str, length: usize| format!(r#"{{"consumer": "billing", {field}: "{}"}}"#, "x".repeat(length));
    let effects = [
        r#"{"consumer": "billing", "payload": 1}"#,
        r#"{"consumer": "billing", "payload": null}"#,
        r#"{"consumer": "billing", "payload": {"b": [1, "ü"]}, "type": "order.paid"}"#,
        r#"{"consumer": "billing", "payload_text": "ü\n", "type": "a b"}"#,
        r#"{"consumer": "billing", "payload_text": ""}"#,
        r#"{"consumer": "billing", "payload": 1, "type": null}"#,
        r#"{"consumer": "billing", "payload": 1, "type": ""}"#,
        r#"{"consumer": "billing", "payload": 1, "type": "ü"}"#,
        r#"{"consumer": "billing", "payload": 1, "type": 5}"#,
        r#"{"consumer": "billing", "payload_text": 5}"#,
        r#"{"consumer": "billing", "payload_text": null}"#,
        r#"{"consumer": "billing", "payload": 1, "payload_text": "x"}"#,
        r#"{"consumer": "billing", "payload": 1, "payload_text": null}"#,
        r#"{"consumer": "billing"}"#,
        r#"{"consumer": "billing", "payload": 1, "ordering_key": "k"}"#,
        r#"{"consumer": "billing", "payload": 1, "spelt": "wrong"}"#,
        r#"{"consumer": "nobody", "payload": 1}"#,
        r#"{"consumer": null, "payload": 1}"#,
        r#"{"consumer": ["billing"], "payload": 1}"#,
        r#"{"topic": "orders", "payload": 1}"#,
        r#"{"payload": 1}"#,
        "[]",
        "1",
        r#""consumer""#,
        "null",
        &long(r#""payload": 1, "type""#, 255),
        &long(r#""payload": 1, "type""#, 256),
        &long(r#""payload_text""#, 300),
        &long(r#""payload_text""#, 301),
        &long(r#""payload""#, 299),
    ];
    let mut kept = 0;
    for effect in effects {
        let made = stored_by(&c, "store_effects", effect).await;
        assert_eq!(made, stored_by(&c, "store_each", effect).await, "{effect}");
        kept += usize::from(made.starts_with('{'));
    }
    assert_eq!(kept, 11);
}
