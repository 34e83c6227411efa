//! A consumer that is dead while fifty thousand deliveries for it commit: they cost no row each and no memory, and come
//! in order when it is back, through a restart and a takeover on the way.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use fencepost::demo::embedded::guardian::Signal;
use serde_json::json;

use super::{count, facts_of};
use crate::relay::{Relay, declare};
use crate::support::db::TestDb;
use crate::support::process::Process;
use crate::support::receiver::Receiver;
use crate::support::script::{Cut, Script};

const WAITING: usize = 50_000;
const KEYS: usize = 400;
/// Of completions.
const BATCH: usize = 500;
/// A relay may hold two MiB of payload here; what fifty thousand deliveries take in memory is far beyond this.
const GROWTH_KIB: i64 = 40 * 1024;
/// The drain alone is fifty thousand requests.
const LONG: Duration = Duration::from_secs(300);

/// Resident memory.
fn rss_kib(process: &Process) -> i64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.pid())).expect("a running process");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("a size");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).expect("a number")
}

async fn eventually_long(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let started = Instant::now();
    while !condition().await {
        assert!(started.elapsed() < LONG, "not within {LONG:?}: {what}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test]
async fn fifty_thousand_deliveries_for_a_dead_consumer_cost_neither_rows_nor_memory_and_come_in_order() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (lazy, other) = (Receiver::start().await, Receiver::start().await);
    declare(&client, "lazy", &lazy, json!({"ordering": "key", "concurrency": 64})).await;
    declare(&client, "other", &other, json!({})).await;
    lazy.always(Script::cut(Cut::Rst));
    let relay = Relay::of(&db)
        .short_leases()
        .set("relay.bytes_in_flight", "2097152")
        .set("relay.flight_bytes", "1048576")
        .set("relay.park_after", "1s")
        .set("breaker.probe", "500ms")
        .set("breaker.probe_max", "1s")
        .set("retry.cap", "1s");
    let mut first = relay.start();
    first.says("shard taken shard=7").await;
    let sql = "select fencepost.emit(jsonb_agg(jsonb_build_object(
                   'consumer', 'lazy', 'ordering_key', 'k' || (n % $2), 'payload_text', n::text) order by n))
               from generate_series($1::int, $1 + $3 - 1) n";
    let (batch, keys) = (BATCH as i32, KEYS as i32);
    client.query(sql, &[&1, &keys, &batch]).await.unwrap();
    crate::support::eventually("its deliveries fail", async || (lazy.connections() >= 10).then_some(())).await;
    let before = rss_kib(&first);
    let (mut parked_most, mut rss_most) = (0, 0);
    for n in 1..WAITING / BATCH {
        client.query(sql, &[&((n * BATCH + 1) as i32), &keys, &batch]).await.unwrap();
        parked_most = parked_most.max(count(&client, "select count(*) from fencepost.parked").await);
        rss_most = rss_most.max(rss_kib(&first));
    }
    client
        .query(
            "select fencepost.emit(jsonb_build_array(jsonb_build_object('consumer', 'other', 'payload_text', 'last')))",
            &[],
        )
        .await
        .unwrap();
    super::counts(&client, &facts_of("other"), 1).await;
    eventually_long("the whole log is read", async || {
        let unread = "select count(*) from fencepost.flights where token is null";
        count(&client, unread).await == 0
            && count(&client, "select sum(deliveries)::bigint from fencepost.flights").await > WAITING as i64
    })
    .await;
    parked_most = parked_most.max(count(&client, "select count(*) from fencepost.parked").await);
    rss_most = rss_most.max(rss_kib(&first));
    assert_eq!(count(&client, &facts_of("lazy")).await, 0);
    // A lane has at most what it took in before it lagged, a row for each of a flight's deliveries.
    assert!(parked_most <= 8 * 1_000, "{parked_most} parked rows for {WAITING} that wait");
    assert!(count(&client, "select count(*) from fencepost.lags").await <= 8);
    assert!(rss_most - before < GROWTH_KIB, "from {before} to {rss_most} KiB");

    // It comes back; on the way through its backlog one relay is killed and another told to stop.
    lazy.always(Script::answer(200).ack("applied"));
    let passed = async |share: usize| {
        eventually_long(&format!("{share} of {WAITING} are applied"), async || {
            count(&client, &facts_of("lazy")).await >= share as i64
        })
        .await;
    };
    passed(WAITING / 10).await;
    first.kill().await;
    let mut second = relay.start();
    passed(WAITING / 2).await;
    second.signal(Signal::Term);
    let mut third = relay.start();
    second.ended().await;
    passed(WAITING).await;
    assert!(rss_kib(&third) - before < GROWTH_KIB);
    eventually_long("nothing is left over", async || {
        count(&client, "select (select count(*) from fencepost.parked) + (select count(*) from fencepost.lags)").await
            == 0
    })
    .await;
    third.signal(Signal::Term);
    third.ended().await;

    let mut newest: HashMap<usize, usize> = HashMap::new();
    let mut seen = std::collections::HashSet::new();
    for request in lazy.requests() {
        let n: usize = String::from_utf8_lossy(&request.body).parse().expect("a number");
        if seen.insert(n) {
            let before = newest.insert(n % KEYS, n).unwrap_or(0);
            assert!(before < n, "{n} came after {before} of its key");
        }
    }
    assert_eq!(seen.len(), WAITING);
    assert_eq!(count(&client, "select count(*) from fencepost.alarms").await, 0);
}
