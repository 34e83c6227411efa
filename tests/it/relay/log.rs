//! The traps of reading by snapshot difference, on the store's own functions.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fencepost::model::key::{EffectId, FlightSeq, Shard, ShardEpoch};
use fencepost::store::log::{self, Held, Opener, PageLimits};
use fencepost::store::pages::{self, Manifest};
use fencepost::store::reconcile::{self, Unreconciled};
use fencepost::store::session::Session;
use fencepost::store::settle::{self, Batch, CloseRow};
use fencepost::store::{Error, flights, shards};
use serde_json::{Value, json};
use tokio_postgres::Client;
use uuid::Uuid;

use super::{Relay, all_landed, all_settled, declare, emit_many};
use crate::support::db::TestDb;
use crate::support::eventually;
use crate::support::receiver::Receiver;
use crate::support::script::Script;

const LIMITS: PageLimits = PageLimits { deliveries: 500, bytes: 8 << 20 };
const LEASE: Duration = Duration::from_secs(60);

fn opener() -> Opener {
    Opener { relay: Uuid::now_v7(), nonce: Uuid::now_v7() }
}

async fn take(session: &mut Session, shard: i16, opener: Opener, lease: Duration) -> Held {
    let taken = shards::take(session.client_mut(), Shard(shard), opener.relay, lease).await.unwrap();
    let taken = taken.expect("the shard is free");
    Held { shard: taken.shard, epoch: taken.epoch, position: taken.position }
}

async fn take_all(session: &mut Session, opener: Opener) -> Vec<Held> {
    let mut held = Vec::new();
    for shard in 0..8 {
        held.push(take(session, shard, opener, LEASE).await);
    }
    held
}

/// Consumer 1, which no relay serves here.
async fn consumer(client: &Client) {
    let spec = json!({"kind": "http", "url": "http://127.0.0.1:9/"});
    client.query("select fencepost.declare_consumer('c', $1)", &[&spec]).await.unwrap();
}

/// An old log: 200,000 effects of 500 transactions that ended long ago, eight shards, all settled.
async fn fill(client: &Client) {
    client
        .batch_execute(
            "insert into fencepost.effects (xid, lease_epoch, position, size, shard, targets, task_id, content_type, ordering_key, sha256, payload)
             select (3 + n / 400)::text::xid8, 1, 1, 1, (n % 8)::smallint, '{1}', 'old-' || n, 'text/plain', 'old-' || n, sha256('x'), 'x'
             from generate_series(0, 199999) n;
             insert into fencepost.ledger (effect_id, consumer_id, token, attempt) select id, 1, 'applied', 1 from fencepost.effects;",
        )
        .await
        .unwrap();
}

/// Every node of a plan, as EXPLAIN's JSON has it.
fn nodes(plan: &Value) -> Vec<&Value> {
    let children = plan["Plans"].as_array().into_iter().flatten();
    std::iter::once(plan).chain(children.flat_map(nodes)).collect()
}

#[tokio::test]
async fn the_reading_statement_never_scans_the_log() {
    let db = TestDb::new().await;
    let client = db.client().await;
    fill(&client).await;
    let prepare = format!(
        "set plan_cache_mode = force_generic_plan; set jit = off; set enable_seqscan = off; set max_parallel_workers_per_gather = 0;
         prepare reading (smallint[], bigint[], bigint[], text[], uuid, uuid, bigint, bigint) as {}",
        log::open_flights_sql()
    );
    client.batch_execute(&prepare).await.unwrap();
    // A base that has seen everything, with transactions in progress that left nothing.
    let values: Vec<&str> = vec!["'700:1000000000:700,701,702'"; 8];
    let explain = format!(
        "explain (analyze, buffers, format json) execute reading ('{{0,1,2,3,4,5,6,7}}', '{{1,1,1,1,1,1,1,1}}', '{{1,1,1,1,1,1,1,1}}',
         array[{}], gen_random_uuid(), gen_random_uuid(), 500, 8388608)",
        values.join(",")
    );
    for statistics in ["never analyzed", "analyzed"] {
        if statistics == "analyzed" {
            client.batch_execute("analyze fencepost.effects; analyze fencepost.flights; deallocate all").await.unwrap();
            client.batch_execute(&prepare).await.unwrap();
        }
        let plan: Value = client.query_one(&explain, &[]).await.unwrap().get(0);
        let root = &plan[0]["Plan"];
        let on_log: Vec<&Value> = nodes(root)
            .into_iter()
            .filter(|node| node["Relation Name"].as_str().is_some_and(|name| name.starts_with("effects")))
            .collect();
        let kinds: Vec<&str> = on_log.iter().map(|node| node["Node Type"].as_str().unwrap()).collect();
        assert!(kinds.iter().all(|kind| *kind != "Seq Scan"), "{statistics}: {kinds:?}");
        let conditions: Vec<&str> = nodes(root)
            .into_iter()
            .filter(|node| node["Index Name"].as_str().is_some_and(|name| name.contains("shard_xid")))
            .map(|node| node["Index Cond"].as_str().unwrap())
            .collect();
        for branch in ["xid >= ", "xid = "] {
            assert!(
                conditions.iter().any(|c| c.contains("shard = ") && c.contains(branch)),
                "{branch}: {conditions:?}"
            );
        }
        let blocks = root["Shared Hit Blocks"].as_i64().unwrap() + root["Shared Read Blocks"].as_i64().unwrap();
        assert!(blocks < 400, "{statistics}: an empty poll of eight shards touched {blocks} blocks");
    }
}

#[tokio::test]
async fn nothing_a_relay_does_scans_the_log() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let receiver = Receiver::start().await;
    declare(&client, "c", &receiver, json!({"timeout": "30s"})).await;
    fill(&client).await;
    client.batch_execute("analyze fencepost.effects; analyze fencepost.ledger").await.unwrap();
    // Else autovacuum does so when it likes, and is counted as a scan.
    client
        .batch_execute(
            "select brin_summarize_new_values(c.oid) from pg_class c join pg_am m on m.oid = c.relam
             where m.amname = 'brin' and c.relkind = 'i'",
        )
        .await
        .unwrap();
    client
        .batch_execute(&format!("alter database {} set plan_cache_mode = force_generic_plan", db.name()))
        .await
        .unwrap();
    let scans = async || {
        let sql = "select coalesce(sum(seq_tup_read), 0)::bigint from pg_stat_user_tables where relname ~ '^(effects|ledger)_'";
        // Statistics arrive when a session ends or rests.
        db.client().await.query_one(sql, &[]).await.unwrap().get::<_, i64>(0)
    };
    drop(client);
    let gone = async || {
        let sql =
            "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()";
        (db.client().await.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) == 0).then_some(())
    };
    eventually("the sessions of the preparation end", gone).await;
    let before = scans().await;

    // Pages, retries, a takeover with open flights and interrupted attempts.
    // The breaker would keep the retries back that this test is about.
    let relay = Relay::of(&db)
        .short_leases()
        .set("relay.flight_deliveries", "7")
        .set("breaker.consecutive", "100000")
        .set("breaker.ratio_of", "100000");
    let faulty = Arc::new(AtomicBool::new(true));
    let still = Arc::clone(&faulty);
    receiver.choose(move |request| match request.attempt() {
        1 => Some(Script::answer(503).ack("not-applied").into()),
        2 if still.load(Ordering::SeqCst) => Some(Script::stall()),
        _ => None,
    });
    let mut first = relay.start();
    first.says("shard taken").await;
    let client = db.client().await;
    emit_many(&client, "c", "x", 60).await;
    receiver.wait_until(60 + 20).await;
    emit_many(&client, "c", "y", 20).await;
    first.kill().await;
    faulty.store(false, Ordering::SeqCst);
    let mut second = relay.start();
    all_settled_of(&client, 80).await;
    all_landed(&client).await;
    second.kill().await;
    drop(client);
    eventually("the relay's sessions end", gone).await;
    assert_eq!(scans().await, before, "something scanned the log or the ledger");
}

/// A page is written and read by two statements: its segment may be dropped in between.
#[tokio::test]
async fn a_page_that_lost_an_effect_is_not_handed_out_but_adopted_with_what_was_kept() {
    let db = TestDb::new().await;
    let client = db.client().await;
    consumer(&client).await;
    let mut session = Session::open(&db.database()).await.unwrap();
    let opener = opener();
    let held = take(&mut session, 0, opener, LEASE).await;
    client
        .batch_execute(
            "insert into fencepost.effects (lease_epoch, position, size, shard, targets, task_id, content_type, ordering_key, sha256, payload)
             select 1, 1, 1, 0, '{1}', 'task-' || n, 'text/plain', 'task-' || n, sha256('x'), 'x' from generate_series(1, 20) n",
        )
        .await
        .unwrap();
    let limits = PageLimits { deliveries: 5, ..LIMITS };
    let mut opened = log::open_flights(&session, std::slice::from_ref(&held), opener, limits).await.unwrap().opened;
    let next = Held { position: opened.remove(0).position, ..held };
    let manifest = Manifest::read(&session, next.shard, &next.position.reached, 100).await.unwrap();
    let page = manifest.page(limits).expect("a page");
    client
        .batch_execute(
            "begin;
             set local session_replication_role = replica;
             with dropped as (delete from fencepost.effects where task_id = 'task-7' returning *)
             insert into fencepost.effects_kept select * from dropped;
             commit",
        )
        .await
        .unwrap();

    let refused = pages::open_pages(&session, &[(next.clone(), page)], opener).await.unwrap_err();
    assert_eq!(refused.to_string(), "database holds something unexpected: shard 0: of 5 deliveries 4 were found");
    let adopted = log::adopt(&session, &next, opener).await.unwrap().expect("the flight is there");
    let tasks: Vec<&str> = adopted.effects.iter().map(|read| read.effect.key.task_id().as_str()).collect();
    assert_eq!(tasks, ["task-6", "task-7", "task-8", "task-9", "task-10"]);
}

/// All pages of a large difference have the same two snapshots: whoever goes over the flights must not go over all of
/// it for each.
#[tokio::test]
async fn going_over_the_pages_of_a_large_difference_reads_each_once() {
    const EFFECTS: usize = 2_000;
    let db = TestDb::new().await;
    let client = db.client().await;
    let receiver = Receiver::start().await;
    declare(&client, "c", &receiver, json!({})).await;
    let mut session = Session::open(&db.database()).await.unwrap();
    let opener = opener();
    let held = take_all(&mut session, opener).await;
    emit_many(&client, "c", "x", EFFECTS).await;
    let limits = PageLimits { deliveries: 5, ..LIMITS };
    let mut flights = 0;
    for (opened, held) in log::open_flights(&session, &held, opener, limits).await.unwrap().opened.iter().zip(&held) {
        let mut at = opened.position.clone();
        let mut manifest = Manifest::read(&session, held.shard, &at.reached, 10_000).await.unwrap();
        flights += 1;
        while let Some(page) = manifest.page(limits) {
            let next = Held { position: at, ..held.clone() };
            let opened = pages::open_pages(&session, &[(next, page)], opener).await.unwrap().opened.remove(0);
            manifest.opened(opened.effects.last().unwrap().effect.id);
            (at, flights) = (opened.position, flights + 1);
        }
    }
    assert!(flights >= EFFECTS / 5, "{flights} flights");
    client
        .batch_execute(
            "insert into fencepost.ledger (effect_id, consumer_id, token, attempt)
             select id, unnest(targets), 'applied', 1 from fencepost.effects;
             update fencepost.flights set token = 'done' where token is null;
             analyze fencepost.effects; analyze fencepost.flights",
        )
        .await
        .unwrap();

    session.client().batch_execute("begin").await.unwrap();
    // What opening the flights read is still counted.
    let read = async || -> i64 {
        let sql = "select sum(pg_stat_get_xact_tuples_returned(i.indexrelid))::bigint from pg_index i
                   where i.indrelid in (select inhrelid from pg_inherits where inhparent = 'fencepost.effects'::regclass)";
        session.client().query_one(sql, &[]).await.unwrap().get(0)
    };
    let before = read().await;
    let of = |held: &Held| Unreconciled { shard: held.shard, epoch: held.epoch, after: held.position.seq };
    let mut shards: Vec<Unreconciled> = held.iter().map(of).collect();
    while !shards.is_empty() {
        let done = reconcile::reconcile(&session, &shards).await.unwrap();
        assert!(done.values().all(|reconciled| reconciled.found == 0), "{done:?}");
        shards.retain_mut(|shard| match done.get(&shard.shard) {
            Some(reconciled) => {
                shard.after = reconciled.up_to;
                true
            }
            None => false,
        });
    }
    let read = read().await - before;
    // Eight shards' ids lie between one another, and all of them are found by one walk.
    assert!(read as usize >= EFFECTS, "counted: {read}");
    assert!(read as usize <= 2 * EFFECTS, "{read} index entries for {EFFECTS} effects in {flights} flights");
}

/// The statement is planned while there are next to no flights: it must not go over all of them later.
#[tokio::test]
async fn closing_a_flight_reads_no_other() {
    const FLIGHTS: i64 = 200;
    let db = TestDb::new().await;
    let mut session = Session::open(&db.database()).await.unwrap();
    let opener = opener();
    let held = take(&mut session, 0, opener, LEASE).await;
    let first = held.position.next_seq().0;
    let close = async |session: &mut Session, n: i64| {
        let seq = FlightSeq(first + n);
        let batch = Batch {
            closes: vec![CloseRow { shard: held.shard, seq, epoch: held.epoch, parks: Vec::new() }],
            ..Batch::default()
        };
        settle::write(session, &batch, opener.relay).await.unwrap();
    };
    db.client().await.batch_execute("vacuum analyze fencepost.flights").await.unwrap();
    close(&mut session, -1).await;
    let opened = "insert into fencepost.flights (shard, seq, epoch, relay, base, target, last_id)
                  select 0, n, $2, $3, pg_current_snapshot(), pg_current_snapshot(), 0 from generate_series($1::bigint, $1 + $4 - 1) n";
    session.client().execute(opened, &[&first, &held.epoch.0, &opener.relay, &FLIGHTS]).await.unwrap();

    session.client().batch_execute("begin").await.unwrap();
    for n in 0..FLIGHTS {
        close(&mut session, n).await;
    }
    let sql = "select (select count(*) from fencepost.flights where token = 'done'),
                      (select sum(pg_stat_get_xact_tuples_returned(i.indexrelid))::bigint from pg_index i
                       where i.indrelid = 'fencepost.flights'::regclass)";
    let row = session.client().query_one(sql, &[]).await.unwrap();
    let (closed, read): (i64, i64) = (row.get(0), row.get(1));
    assert_eq!(closed, FLIGHTS);
    // Each by its key, and what counting them read before.
    assert!((FLIGHTS..=3 * FLIGHTS).contains(&read), "{read} index entries for {FLIGHTS} flights");
}

/// Those that are not of the old log.
async fn all_settled_of(client: &Client, count: i64) {
    let sql =
        "select count(*) from fencepost.effects e join fencepost.ledger l on l.effect_id = e.id where e.id > 200000";
    client
        .batch_execute("set enable_seqscan = off; set enable_hashjoin = off; set enable_mergejoin = off")
        .await
        .unwrap();
    eventually(&format!("{count} deliveries are settled"), async || {
        (client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) >= count).then_some(())
    })
    .await;
}

#[tokio::test]
async fn an_empty_poll_writes_nothing_and_advances_nothing() {
    let db = TestDb::new().await;
    let client = db.client().await;
    consumer(&client).await;
    let mut session = Session::open(&db.database()).await.unwrap();
    let opener = opener();
    let held = take_all(&mut session, opener).await;
    for _ in 0..20 {
        // Others' transactions move the snapshot on.
        client.batch_execute("select pg_current_xact_id()").await.unwrap();
        session.client().batch_execute("begin").await.unwrap();
        let reading = log::open_flights(&session, &held, opener, LIMITS).await.unwrap();
        assert!(reading.opened.is_empty() && reading.lost.is_empty());
        let row = session.client().query_one("select pg_current_xact_id_if_assigned()::text", &[]).await.unwrap();
        assert_eq!(row.get::<_, Option<String>>(0), None, "an empty poll drew a transaction id");
        session.client().batch_execute("commit").await.unwrap();
    }
    for held in &held {
        assert_eq!(log::position(&session, held.shard).await.unwrap(), held.position);
    }
    // And it is not blind: what is committed next is found from the same position.
    emit_many(&client, "c", "x", 1).await;
    let reading = log::open_flights(&session, &held, opener, LIMITS).await.unwrap();
    assert_eq!(reading.opened.len(), 1);
}

#[tokio::test]
async fn a_shard_without_a_flight_row_is_an_error_and_harms_no_other() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let receiver = Receiver::start().await;
    declare(&client, "c", &receiver, json!({})).await;
    client.batch_execute("delete from fencepost.flights where shard = 0").await.unwrap();
    let mut session = Session::open(&db.database()).await.unwrap();
    let taken = shards::take(session.client_mut(), Shard(0), Uuid::now_v7(), LEASE).await;
    assert!(matches!(taken, Err(Error::Corrupt(_))), "{taken:?}");
    assert!(matches!(log::position(&session, Shard(0)).await, Err(Error::Corrupt(_))));

    let mut relay = Relay::of(&db).start();
    assert!(relay.says("has no flight row").await.contains("ERROR"));
    // Where each key belongs is chance: among so many, shard 0 has some.
    emit_many(&client, "c", "x", 150).await;
    let sql = "select count(*) from fencepost.effects where shard <> 0";
    let elsewhere: i64 = client.query_one(sql, &[]).await.unwrap().get(0);
    eventually("the other shards are served", async || {
        let settled: i64 = client.query_one("select count(*) from fencepost.ledger", &[]).await.unwrap().get(0);
        (settled == elsewhere).then_some(())
    })
    .await;
    assert!(elsewhere < 150, "shard 0 had none");
    assert_eq!(receiver.requests().len() as i64, elsewhere);
}

#[tokio::test]
async fn a_flight_that_slipped_in_before_the_fence_is_seen_and_nothing_slips_in_after() {
    let db = TestDb::new().await;
    let client = db.client().await;
    consumer(&client).await;
    let (mut old, mut new) =
        (Session::open(&db.database()).await.unwrap(), Session::open(&db.database()).await.unwrap());
    let (a, b) = (opener(), opener());
    let held = take(&mut old, 0, a, Duration::from_millis(1)).await;
    emit_many(&client, "c", "x", 64).await;

    // The old owner's opening is on its way: its commit comes only after the takeover has begun.
    old.client().batch_execute("begin").await.unwrap();
    let slipped = log::open_flights(&old, std::slice::from_ref(&held), a, LIMITS).await.unwrap();
    let slipped = slipped.opened.into_iter().next().expect("shard 0 has some of 64");
    let taking = tokio::spawn(async move {
        let taken = take(&mut new, 0, b, LEASE).await;
        (new, taken)
    });
    eventually("the fence waits for the slipped-in flight", async || {
        let sql = "select 1 from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock' and query like '-- store::fence%'";
        client.query_opt(sql, &[]).await.unwrap().map(drop)
    })
    .await;
    old.client().batch_execute("commit").await.unwrap();
    let (new, fenced) = taking.await.unwrap();
    assert_eq!(fenced.position.seq.0, slipped.position.seq.0 + 1, "the fence comes after it");
    assert_eq!(fenced.position.reached, slipped.position.reached);

    // What the new owner sees of it.
    let left = flights::left_open(new.client(), Shard(0), fenced.epoch).await.unwrap();
    assert_eq!(left, [slipped.position.seq]);
    let swept = flights::close_lost(new.client(), Shard(0), slipped.position.seq, fenced.epoch).await.unwrap();
    assert_eq!(swept.retried, slipped.effects.len() as u64);
    assert_eq!(flights::left_open(new.client(), Shard(0), fenced.epoch).await.unwrap(), []);

    // The old owner, later: it knows its own flight, and the next number is taken.
    emit_many(&client, "c", "y", 64).await;
    let behind = Held { position: slipped.position.clone(), ..held };
    let reading = log::open_flights(&old, &[behind], a, LIMITS).await.unwrap();
    assert!(reading.opened.is_empty());
    assert_eq!(reading.lost, [Shard(0)]);
    // And the new owner reads on without a gap.
    let reading = log::open_flights(&new, std::slice::from_ref(&fenced), b, LIMITS).await.unwrap();
    let ids: Vec<EffectId> = reading.opened[0].effects.iter().map(|read| read.effect.id).collect();
    let sql = "select id from fencepost.effects where shard = 0 order by id";
    let stored: Vec<EffectId> = client.query(sql, &[]).await.unwrap().iter().map(|row| EffectId(row.get(0))).collect();
    let first: Vec<EffectId> = slipped.effects.iter().map(|read| read.effect.id).collect();
    assert_eq!([first, ids].concat(), stored);
}

#[tokio::test]
async fn claims_of_a_lost_epoch_are_refused() {
    let db = TestDb::new().await;
    let client = db.client().await;
    consumer(&client).await;
    let mut session = Session::open(&db.database()).await.unwrap();
    let (a, b) = (opener(), opener());
    let old = take(&mut session, 0, a, Duration::from_millis(1)).await;
    emit_many(&client, "c", "x", 64).await;
    let reading = log::open_flights(&session, std::slice::from_ref(&old), a, LIMITS).await.unwrap();
    let seq = reading.opened[0].position.seq;
    let new = eventually("the lease runs out", async || {
        shards::take(session.client_mut(), Shard(0), b.relay, LEASE).await.unwrap()
    })
    .await;
    assert_eq!(new.epoch, ShardEpoch(old.epoch.0 + 1));
    let swept = flights::close_lost(session.client(), Shard(0), seq, old.epoch).await.unwrap();
    assert_eq!(swept, flights::Swept::default());
    let renewed = shards::renew(session.client(), a.relay, &[(Shard(0), old.epoch)], LEASE).await.unwrap();
    assert!(renewed.kept.is_empty(), "an expired lease is not renewed");
}

#[tokio::test]
async fn an_expired_lease_is_lost_even_where_nobody_took_the_shard() {
    let db = TestDb::new().await;
    let mut session = Session::open(&db.database()).await.unwrap();
    let a = opener();
    let held = take(&mut session, 0, a, Duration::from_millis(1)).await;
    eventually("the lease runs out", async || {
        let sql = "select 1 from fencepost.shards where shard = 0 and lease_expires_at < clock_timestamp()";
        session.client().query_opt(sql, &[]).await.unwrap().map(drop)
    })
    .await;
    let renewed = shards::renew(session.client(), a.relay, &[(Shard(0), held.epoch)], LEASE).await.unwrap();
    assert!(renewed.kept.is_empty());
}

#[tokio::test]
async fn a_large_difference_is_read_in_pages_to_its_very_end() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let receiver = Receiver::start().await;
    declare(&client, "c", &receiver, json!({})).await;
    // More than a reader keeps ids of at once, nearly all of it for nobody, with deliveries at both ends.
    client
        .batch_execute(
            "insert into fencepost.effects (lease_epoch, position, size, shard, targets, task_id, content_type, ordering_key, sha256, payload)
             select 1, 1, 1, 3, case when n % 50000 = 1 or n > 120000 then '{1}'::int[] else '{}' end, 'bulk-' || n, 'text/plain', 'bulk', sha256('x'), 'x'
             from generate_series(1, 120010) n;",
        )
        .await
        .unwrap();
    let _relay = Relay::of(&db).set("relay.flight_deliveries", "10000").start();
    let sql = "select count(*) from fencepost.ledger where token = 'applied'";
    eventually("everything in it is delivered", async || {
        (client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) == 13).then_some(())
    })
    .await;
    assert_eq!(receiver.requests().len(), 13);
    let row = client.query_one("select count(*) filter (where partial), bool_or(not partial and seq > 1) from fencepost.flights where shard = 3", &[]);
    let row = row.await.unwrap();
    assert!(row.get::<_, i64>(0) >= 10 && row.get::<_, bool>(1));
    emit_many(&client, "c", "after", 20).await;
    all_settled_applied(&client, 33).await;
}

async fn all_settled_applied(client: &Client, count: i64) {
    let sql = "select count(*) from fencepost.ledger where token = 'applied'";
    eventually("what comes later is delivered", async || {
        (client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0) == count).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_server_that_refuses_writes_is_refused() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let receiver = Receiver::start().await;
    declare(&client, "c", &receiver, json!({})).await;
    let mut session = Session::open(&db.database()).await.unwrap();
    let a = opener();
    let held = take(&mut session, 0, a, LEASE).await;
    emit_many(&client, "c", "x", 64).await;
    session.client().batch_execute("set default_transaction_read_only = on").await.unwrap();
    let refused = log::open_flights(&session, std::slice::from_ref(&held), a, LIMITS).await.unwrap_err();
    assert_eq!(refused.sqlstate().map(|state| state.code()), Some("25006"), "{refused}");
    assert_eq!(log::position(&session, Shard(0)).await.unwrap(), held.position);

    client
        .batch_execute(&format!("alter database {} set default_transaction_read_only = on", db.name()))
        .await
        .unwrap();
    let mut relay = Relay::of(&db).start();
    relay.says("read-only").await;
    assert_eq!(receiver.requests().len(), 0);
    let reset = format!(
        "set default_transaction_read_only = off; alter database {} reset default_transaction_read_only",
        db.name()
    );
    client.batch_execute(&reset).await.unwrap();
    client
        .batch_execute("update fencepost.shards set lease_expires_at = clock_timestamp() where shard = 0")
        .await
        .unwrap();
    relay.kill().await;
    let _relay = Relay::of(&db).start();
    all_settled(&client, 64).await;
}
