//! The stable views: columns, what decides a delivery's token, and look-ups by key that stay cheap.

use super::{EFFECT, billing, one, rows};

#[tokio::test]
async fn the_views_have_the_promised_columns() {
    let (_db, c) = billing().await;
    for (view, columns) in [
        ("completions", "task_id,lease_epoch,owner,token,reason,late,ended_at"),
        ("intended", "key,consumer,topic,type,payload,deliver_after,committed_at"),
        ("deliveries", "key,consumer,token,attempts,next_attempt_at,reason,ack_raw,settled_at"),
    ] {
        let sql = format!(
            "select string_agg(attname, ',' order by attnum) from pg_attribute where attrelid = 'fencepost.{view}'::regclass and attnum > 0"
        );
        assert_eq!(one(&c, &sql).await, columns, "{view}");
    }
}

/// A delivery is what its strongest fact says, else where it is parked, else nothing yet.
#[tokio::test]
async fn the_strongest_fact_decides_a_delivery() {
    let (_db, c) = billing().await;
    c.batch_execute(&format!("select fencepost.emit('{EFFECT}', 't')")).await.unwrap();
    let delivery = "select key, consumer, token, attempts, next_attempt_at is not null, reason, ack_raw, settled_at is not null from fencepost.deliveries";
    assert_eq!(one(&c, delivery).await, "t:1|billing|-|0|f|-|-|f");
    c.batch_execute(
        "insert into fencepost.parked (effect_id, consumer_id, shard, state, attempts, next_attempt_at, reason)
         select id, 1, shard, 'retry', 3, clock_timestamp(), 'connection refused' from fencepost.effects",
    )
    .await
    .unwrap();
    assert_eq!(one(&c, delivery).await, "t:1|billing|retry|3|t|connection refused|-|f");
    for (token, attempt, ack, expected) in [
        ("confirmed", 4, "null", "t:1|billing|confirmed|4|f|-|-|t"),
        ("duplicate", 5, "'duplicate'", "t:1|billing|duplicate|5|f|-|duplicate|t"),
        ("stale", 6, "'stale; current=9'", "t:1|billing|duplicate|5|f|-|duplicate|t"),
        ("applied", 7, "'applied'", "t:1|billing|applied|7|f|-|applied|t"),
    ] {
        c.batch_execute(&format!("insert into fencepost.ledger (effect_id, consumer_id, token, attempt, ack_raw) select id, 1, '{token}', {attempt}, {ack} from fencepost.effects")).await.unwrap();
        assert_eq!(one(&c, delivery).await, expected, "after {token}");
        assert_eq!(one(&c, &delivery.replace("deliveries", "deliveries_of('t:1')")).await, expected);
    }
}

#[tokio::test]
async fn an_effect_kept_past_its_segment_is_seen() {
    let (_db, c) = billing().await;
    c.batch_execute(&format!("select fencepost.emit('{EFFECT}', 't')")).await.unwrap();
    // As retention does: copy what waits, drop the segment, go on in the next.
    c.batch_execute(
        "insert into fencepost.effects_kept select * from fencepost.effects;
         alter table fencepost.effects detach partition fencepost.effects_0; drop table fencepost.effects_0;
         select setval('fencepost.effects_id_seq', 68719476736, false)",
    )
    .await
    .unwrap();
    c.batch_execute(&format!("select fencepost.emit('{EFFECT}', 'u')")).await.unwrap();
    assert_eq!(
        rows(&c, "select key, consumer, token from fencepost.deliveries order by 1").await,
        ["t:1|billing|-", "u:1|billing|-"]
    );
    assert_eq!(one(&c, "select fencepost.effect_id_of('t:1'), fencepost.effect_id_of('u:1')").await, "1|2");
    assert_eq!(super::code(&c, "select fencepost.reopen_task('t', 'r')").await, "55000", "its kept delivery waits");
}

#[tokio::test]
async fn keys_that_name_nothing_give_nothing() {
    let (_db, c) = billing().await;
    c.batch_execute(&format!("select fencepost.emit('{EFFECT}', 't')")).await.unwrap();
    for key in [
        "",
        "t",
        "t:",
        "t:0",
        "t:01",
        "t:2",
        "t:1:1",
        "t:1:2",
        "t:1:02",
        "u:1",
        "t:9223372036854775807",
        "t:9223372036854775808",
        "t:1:99999999999",
    ] {
        assert_eq!(one(&c, &format!("select fencepost.effect_id_of('{key}')")).await, "-", "{key}");
    }
    assert_eq!(one(&c, "select fencepost.effect_id_of(null)").await, "-");
}

/// By key the log is not scanned: what is read does not grow with it.
#[tokio::test]
async fn a_look_up_by_key_reads_a_few_pages_of_a_large_log() {
    let (_db, c) = billing().await;
    let fill = "select fencepost.emit((select jsonb_agg(jsonb_build_object('consumer', 'billing', 'payload', repeat('x', 300))) from generate_series(1, 1000)), 'fill' || n) from generate_series(1, 20) n";
    c.batch_execute(&format!("{fill}; select fencepost.emit('{EFFECT}', 't')")).await.unwrap();
    let by_key = "select consumer from fencepost.deliveries_of('t:1')";
    assert_eq!(one(&c, by_key).await, "billing");
    let by_key = pages_read(&c, by_key).await;
    let by_scan = pages_read(&c, "select consumer from fencepost.deliveries where key = 't:1'").await;
    assert!(by_scan > 500, "the log is too small to tell: {by_scan}");
    assert!(by_key < 50, "{by_key} pages by key, {by_scan} by a scan");
}

/// How many pages a query reads, in memory or not, what its functions read included.
async fn pages_read(c: &tokio_postgres::Client, sql: &str) -> i64 {
    let plan = rows(c, &format!("explain (analyze, buffers, format json) {sql}")).await.concat();
    let plan: serde_json::Value = serde_json::from_str(&plan).unwrap();
    let pages = |name: &str| plan[0]["Plan"][name].as_i64().unwrap();
    pages("Shared Hit Blocks") + pages("Shared Read Blocks")
}
