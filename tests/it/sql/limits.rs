//! Limits, at the byte: OB005 where an effect or payload is too large, a named CHECK or 22023 elsewhere. Never an error
//! about index rows or notifications.

use super::{billing, code, one, refused, rows};

/// What `sql` answers: `ok` or its SQLSTATE.
async fn outcome(c: &tokio_postgres::Client, sql: &str) -> String {
    match c.simple_query(sql).await {
        Ok(_) => "ok".into(),
        Err(error) => error.as_db_error().unwrap().code().code().into(),
    }
}

#[tokio::test]
async fn lengths_are_limited_to_the_byte() {
    let (_db, c) = billing().await;
    let effect =
        |field: &str| format!(r#"select fencepost.emit('[{{"consumer": "billing", "payload": 1, {field}}}]')"#);
    let x = |n: usize| "x".repeat(n);
    for (limit, field) in [(255, "type"), (255, "schema_version"), (512, "ordering_key")] {
        for n in [limit - 1, limit] {
            assert_eq!(outcome(&c, &effect(&format!(r#""{field}": "{}""#, x(n)))).await, "ok", "{field} {n}");
        }
        let (state, message) = refused(&c, &effect(&format!(r#""{field}": "{}""#, x(limit + 1)))).await;
        assert_eq!(
            (state.as_str(), message),
            ("OB005", format!("effects[0].{field}: {} bytes, the limit is {limit}", limit + 1))
        );
        assert_eq!(outcome(&c, &effect(&format!(r#""{field}": "{}""#, x(1 << 20)))).await, "OB005", "{field}");
    }
    assert_eq!(outcome(&c, &effect(&format!(r#""content_type": "a/{}""#, x(253)))).await, "ok");
    assert_eq!(outcome(&c, &effect(&format!(r#""content_type": "a/{}""#, x(254)))).await, "OB005");
    assert_eq!(
        outcome(&c, &effect(&format!(r#""ordering_key": "{}""#, "ü".repeat(257)))).await,
        "OB005",
        "bytes, not characters"
    );

    let topic = |n| format!(r#"select fencepost.emit('[{{"topic": "{}", "payload": 1}}]')"#, x(n));
    for (n, expected) in [(255, "ok"), (256, "ok"), (257, "OB005"), (1 << 20, "OB005")] {
        assert_eq!(outcome(&c, &topic(n)).await, expected, "topic of {n}");
    }
    assert_eq!(
        code(&c, &format!(r#"select fencepost.emit('[{{"consumer": "{}", "payload": 1}}]')"#, x(1 << 20))).await,
        "OB002"
    );
}

#[tokio::test]
async fn headers_are_limited_in_name_number_and_bytes() {
    let (_db, c) = billing().await;
    let effect = |headers: &str| {
        format!(
            r#"select fencepost.emit(jsonb_build_array(jsonb_build_object('consumer', 'billing', 'payload', 1, 'headers', {headers})))"#
        )
    };
    let name = |n| format!("jsonb_build_object(repeat('n', {n}), 'v')");
    assert_eq!(outcome(&c, &effect(&name(64))).await, "ok");
    assert_eq!(outcome(&c, &effect(&name(65))).await, "OB005");
    let many = |n| format!("(select jsonb_object_agg('h' || i, '') from generate_series(1, {n}) i)");
    assert_eq!(outcome(&c, &effect(&many(64))).await, "ok");
    assert_eq!(outcome(&c, &effect(&many(65))).await, "OB005");
    let bytes = |n| format!("jsonb_build_object('h', repeat('v', {n} - 1))");
    assert_eq!(outcome(&c, &effect(&bytes(16_384))).await, "ok");
    let (state, message) = refused(&c, &effect(&bytes(16_385))).await;
    assert_eq!((state.as_str(), message.as_str()), ("OB005", "effects[0].headers: 16385 bytes, the limit is 16384"));
}

#[tokio::test]
async fn sizes_and_numbers_follow_the_settings() {
    let (_db, c) = billing().await;
    let text = |n: usize| {
        format!(
            r#"select fencepost.emit(jsonb_build_array(jsonb_build_object('consumer', 'billing', 'payload_text', repeat('x', {n}))))"#
        )
    };
    assert_eq!(outcome(&c, &text(1 << 20)).await, "ok", "the default is 1 MiB");
    assert_eq!(outcome(&c, &text((1 << 20) + 1)).await, "OB005");
    c.batch_execute("update fencepost.settings set value = '17000000' where name = 'payload_max_bytes'").await.unwrap();
    assert_eq!(outcome(&c, &text(16_777_216)).await, "ok");
    assert_eq!(
        code(&c, &text(16_777_217)).await,
        "23514",
        "the table's own limit holds where the setting is beyond it"
    );

    c.batch_execute("update fencepost.settings set value = '5' where name = 'payload_max_bytes'").await.unwrap();
    let (state, message) = refused(&c, &text(6)).await;
    assert_eq!((state.as_str(), message.as_str()), ("OB005", "effects[0].payload: 6 bytes, the limit is 5"));
    for (payload, expected) in [
        (r#""payload": "abc""#, "ok"),
        (r#""payload": "abcd""#, "OB005"),
        (r#""payload_base64": "AAAAAAA=""#, "ok"),
        (r#""payload_base64": "AAAAAAAA""#, "OB005"),
    ] {
        assert_eq!(
            outcome(&c, &format!(r#"select fencepost.emit('[{{"consumer": "billing", {payload}}}]')"#)).await,
            expected,
            "{payload}"
        );
    }

    let many = |n: usize| {
        format!(
            "select fencepost.emit((select jsonb_agg('{{\"consumer\": \"billing\", \"payload\": 1}}'::jsonb) from generate_series(1, {n})), 'many')"
        )
    };
    let (state, message) = refused(&c, &many(1001)).await;
    assert_eq!((state.as_str(), message.as_str()), ("OB005", "effects: 1001 effects, the limit is 1000"));
    assert_eq!(outcome(&c, &many(1000)).await, "ok");

    c.batch_execute(
        r#"update fencepost.settings set value = '2' where name = 'targets_max';
           select fencepost.declare_consumer('c' || n, '{"kind": "amqp", "exchange": "x", "topics": ["two", "three"]}') from generate_series(1, 2) n;
           select fencepost.subscribe('three', 'billing')"#,
    )
    .await
    .unwrap();
    assert_eq!(outcome(&c, r#"select fencepost.emit('[{"topic": "two", "payload": 1}]')"#).await, "ok");
    let (state, message) = refused(&c, r#"select fencepost.emit('[{"topic": "three", "payload": 1}]')"#).await;
    assert_eq!((state.as_str(), message.as_str()), ("OB005", "effects[0].topic: 3 consumers, the limit is 2"));
}

#[tokio::test]
async fn a_setting_that_makes_no_sense_is_refused_where_it_is_written() {
    let (db, c) = billing().await;
    for wrong in ["1 MiB", "-1", "0", "", "9999999999"] {
        let sql = format!("update fencepost.settings set value = '{wrong}' where name = 'effects_max'");
        let (state, message) = refused(&c, &sql).await;
        let expected = format!("settings.effects_max: '{wrong}' is not a whole number from 1 to 999999999");
        assert_eq!((state.as_str(), message), ("22023", expected));
    }
    for (name, wrong, said) in [
        ("retention", "-3 days", "settings.retention: must be longer than nothing"),
        ("retention", "0", "settings.retention: must be longer than nothing"),
        ("audit_retention", "banana", "settings.audit_retention: 'banana' is not a length of time, such as 7 days"),
        ("segment_span_min", "-1 s", "settings.segment_span_min: must be longer than nothing"),
    ] {
        let sql = format!("update fencepost.settings set value = '{wrong}' where name = '{name}'");
        let (state, message) = refused(&c, &sql).await;
        assert_eq!((state.as_str(), message.as_str()), ("22023", said));
    }
    let (state, message) = refused(&c, "update fencepost.settings set value = '16' where name = 'shards'").await;
    assert!(state == "55000" && message.starts_with("settings.shards: it is 8, and fixed at migrate"), "{message}");
    let limits = "select effects, payload from fencepost.limits";
    let limits =
        async || c.query_one(limits, &[]).await.map(|row| (row.get::<_, i32>(0), row.get::<_, i32>(1))).unwrap();
    assert_eq!(limits().await, (1000, 1 << 20));
    // Two that are changed at the same time both count.
    let other = db.client().await;
    c.batch_execute("begin; update fencepost.settings set value = '7' where name = 'effects_max'").await.unwrap();
    let second = tokio::spawn(async move {
        other.batch_execute("update fencepost.settings set value = '8000' where name = 'payload_max_bytes'").await
    });
    crate::support::eventually("the second waits for the first", async || {
        let waits = "select 1 from pg_stat_activity where wait_event_type = 'Lock' and query like '%8000%'";
        c.query_opt(waits, &[]).await.unwrap()
    })
    .await;
    c.batch_execute("commit").await.unwrap();
    second.await.unwrap().unwrap();
    assert_eq!(limits().await, (7, 8000));
}

#[tokio::test]
async fn tasks_are_limited_too() {
    let (_db, c) = billing().await;
    let id = |n| format!("select fencepost.submit_task('k', '{{}}', repeat('i', {n}))");
    assert_eq!(outcome(&c, &id(128)).await, "ok");
    for bad in [
        id(129),
        id(1 << 20),
        "select fencepost.submit_task('k', '{}', 'a b')".into(),
        "select fencepost.submit_task('k', '{}', '')".into(),
    ] {
        let error = c.simple_query(&bad).await.unwrap_err();
        assert_eq!(error.as_db_error().unwrap().constraint(), Some("task_id_form"), "{error:?}");
    }
    let kind = |n| format!("select fencepost.submit_task(repeat('k', {n}))");
    assert_eq!(outcome(&c, &kind(128)).await, "ok");
    for n in [129, 1 << 20] {
        let error = c.simple_query(&kind(n)).await.unwrap_err();
        assert_eq!(error.as_db_error().unwrap().constraint(), Some("kind_form"), "{error:?}");
    }
    assert_eq!(code(&c, "select fencepost.submit_task('')").await, "22023");
    assert_eq!(code(&c, "select fencepost.submit_task(null)").await, "22023");
    assert_eq!(code(&c, "select fencepost.submit_task('k', null)").await, "22023");
    assert_eq!(code(&c, "select fencepost.submit_task('k', max_claims => 0)").await, "22023");

    let payload = |n| format!("select fencepost.submit_task('k', to_jsonb(repeat('p', {n} - 2)))");
    assert_eq!(outcome(&c, &payload(1 << 20)).await, "ok");
    let (state, message) = refused(&c, &payload((1 << 20) + 1)).await;
    assert_eq!(
        (state.as_str(), message.as_str()),
        ("OB005", "payload of the task: 1048577 bytes, the limit is 1048576")
    );

    c.batch_execute("select fencepost.submit_task('z', '{}', 't')").await.unwrap();
    rows(&c, "select from fencepost.claim_tasks('w', '{z}')").await;
    let result = |n| {
        format!(
            r#"select fencepost.complete_task('t', 1, 'w', '[{{"consumer": "billing", "payload": 1}}]', to_jsonb(repeat('p', {n} - 2)))"#
        )
    };
    assert_eq!(code(&c, &result((1 << 20) + 1)).await, "OB005");
    one(&c, &result(1 << 20)).await;

    // A reason is for people: a stack trace of any length must not keep a task from failing.
    c.batch_execute("select fencepost.submit_task('z', '{}', 'u')").await.unwrap();
    rows(&c, "select from fencepost.claim_tasks('w', '{z}')").await;
    one(&c, "select fencepost.fail_task('u', 1, 'w', repeat('trace ', 100000))").await;
    assert_eq!(one(&c, "select length(reason) from fencepost.completions where task_id = 'u'").await, "4096");
}
