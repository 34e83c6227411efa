//! Segments: how the log moves on, and that nothing goes with them that is still owed.

use std::time::Duration;

use fencepost::model::key::{ConsumerId, Shard};
use fencepost::store::parking::{self, Room};
use fencepost::store::segments::{self, Link, Parent, Step};
use fencepost::store::{flights, retention};

use super::{Reading, Rounds, WIDTH, emit, ids, keep_for, segments, two_consumers};
use crate::support::db::TestDb;
use crate::support::eventually;
use crate::support::receiver::Receiver;
use crate::truth::rig::Rig;

async fn due(client: &tokio_postgres::Client) -> Vec<(i64, i32)> {
    let rooms: Vec<Room> = (0..8)
        .flat_map(|shard| [1, 2].map(|c| Room { shard: Shard(shard), consumer: ConsumerId(c), rows: 100 }))
        .collect();
    let mut due: Vec<(i64, i32)> = parking::due(client, &rooms, &[])
        .await
        .unwrap()
        .iter()
        .map(|due| {
            assert_eq!(due.effect.payload, format!("{{\"task\": \"{}\"}}", due.effect.key.task_id()));
            (due.effect.id.0, due.consumer.0)
        })
        .collect();
    due.sort_unstable();
    due
}

#[tokio::test]
async fn a_segment_goes_and_what_waits_in_it_stays() {
    let db = TestDb::new().await;
    let c = db.client().await;
    two_consumers(&c).await;
    let done = emit(&c, "done", ("consumer", "a")).await;
    let dead = emit(&c, "dead", ("consumer", "a")).await;
    let half = emit(&c, "half", ("topic", "both")).await;
    let open = emit(&c, "open", ("consumer", "b")).await;
    keep_for(&c, "1 microsecond", "0").await;
    let mut rounds = Rounds::new(&db).await;

    rounds.round().await;
    assert_eq!(segments(&c, "effects").await, [0, WIDTH, 2 * WIDTH], "nobody has read it: it stays");
    let unread = retention::obstacle(&rounds.session, &segments::list(&c, Parent::Effects).await.unwrap()[0]).await;
    let unread = unread.unwrap().expect("an obstacle");
    assert!(unread.contains("has not been read through fencepost.effects_0"), "{unread}");
    let next = emit(&c, "next", ("consumer", "a")).await;
    assert_eq!(next, WIDTH, "the log has moved on");

    let mut reading = Reading::new(&db).await;
    assert_eq!(reading.read().await, [done, dead, half, open, next]);
    c.batch_execute(&format!(
        "insert into fencepost.ledger (effect_id, consumer_id, token, attempt) values ({done}, 1, 'applied', 1), ({half}, 1, 'applied', 1);
         insert into fencepost.parked (effect_id, consumer_id, shard, state) select id, 1, shard, 'dead' from fencepost.effects where id = {dead};
         create table before as select * from fencepost.effects"
    ))
    .await
    .unwrap();
    rounds.round().await;
    assert_eq!(segments(&c, "effects").await, [WIDTH, 2 * WIDTH, 3 * WIDTH]);
    assert_eq!(segments(&c, "ledger").await, [WIDTH, 2 * WIDTH, 3 * WIDTH]);
    assert_eq!(ids(&c, "select id from fencepost.effects_kept order by id").await, [dead, half, open]);
    let same = "select count(*) from before b join fencepost.effects_kept k on k::text = b::text";
    assert_eq!(ids(&c, same).await, [3], "byte for byte");
    assert_eq!(ids(&c, "select effect_id from fencepost.ledger").await, [half], "a fact about what is kept is kept");

    // The open flight is lost with its relay: what was in it is found where it was kept, and only what is owed.
    for held in &reading.held {
        for seq in [held.position.seq.0, held.position.seq.0 - 1] {
            flights::close_lost(&c, held.shard, fencepost::model::key::FlightSeq(seq), held.epoch).await.unwrap();
        }
    }
    assert_eq!(due(&c).await, [(half, 2), (open, 2), (next, 1)]);

    // Facts find their place, and with the last of them the effect goes.
    c.batch_execute(
        "insert into fencepost.ledger (effect_id, consumer_id, token, attempt) select effect_id, consumer_id, 'applied', 2 from fencepost.parked;
         delete from fencepost.parked",
    )
    .await
    .unwrap();
    emit(&c, "later", ("consumer", "a")).await;
    rounds.round().await;
    assert_eq!(ids(&c, "select id from fencepost.effects_kept").await, Vec::<i64>::new());
    reading.read().await;
    rounds.round().await;
    rounds.round().await;
    let facts = ids(&c, "select effect_id from fencepost.ledger order by 1").await;
    assert!(facts.iter().all(|id| *id >= WIDTH), "facts go with their effects: {facts:?}");
    for table in ["effects", "ledger"] {
        for from in segments(&c, table).await {
            let column = if table == "ledger" { "attempt" } else { "size" };
            let change = format!("update fencepost.{table}_{from} set {column} = {column}");
            let error = c.batch_execute(&change).await.unwrap_err();
            assert_eq!(error.code().unwrap().code(), "OB008", "{change}");
        }
    }
}

#[tokio::test]
async fn a_transaction_that_is_still_writing_holds_its_segment_and_nobody_else() {
    let db = TestDb::new().await;
    let (c, late) = (db.client().await, db.client().await);
    two_consumers(&c).await;
    keep_for(&c, "1 microsecond", "0").await;
    let mut rounds = Rounds::new(&db).await;
    rounds.round().await;
    emit(&c, "first", ("consumer", "a")).await;
    late.batch_execute("begin").await.unwrap();
    let id = emit(&late, "late", ("consumer", "a")).await;
    let mut reading = Reading::new(&db).await;
    rounds.round().await;
    c.batch_execute("set lock_timeout = '1s'").await.unwrap();
    assert_eq!(emit(&c, "second", ("consumer", "a")).await, WIDTH);
    reading.read().await;
    rounds.round().await;
    assert!(segments(&c, "effects").await.contains(&0), "its writer has not ended");
    late.batch_execute("commit").await.unwrap();
    rounds.round().await;
    assert!(segments(&c, "effects").await.contains(&0), "nobody has read what was committed late");
    assert_eq!(reading.read().await, [id]);
    rounds.round().await;
    assert!(!segments(&c, "effects").await.contains(&0));
    assert!(ids(&c, "select id from fencepost.effects_kept").await.contains(&id));
}

#[tokio::test]
async fn what_is_committed_while_its_segment_is_being_dropped_is_kept_and_parked() {
    let db = TestDb::new().await;
    let (c, late) = (db.client().await, db.client().await);
    two_consumers(&c).await;
    keep_for(&c, "1 microsecond", "0").await;
    let first = emit(&c, "first", ("consumer", "a")).await;
    let mut rounds = Rounds::new(&db).await;
    rounds.round().await;
    let mut reading = Reading::new(&db).await;
    assert_eq!(reading.read().await, [first]);

    // The steps of a drop, with a producer in between that had drawn its id long ago.
    let old = segments::list(&c, Parent::Effects).await.unwrap().remove(0);
    assert_eq!(retention::obstacle(&rounds.session, &old).await.unwrap(), None);
    assert_eq!(retention::keep(&rounds.session, &old).await.unwrap(), 1);
    late.batch_execute(
        "begin;
         insert into fencepost.effects (id, lease_epoch, position, size, shard, targets, task_id, content_type, ordering_key, sha256, payload)
         overriding system value
         select 1000, 1, 1, 16, shard, targets, 'late', content_type, 'late', sha256('{\"task\": \"late\"}'), '{\"task\": \"late\"}' from fencepost.effects",
    )
    .await
    .unwrap();
    let detached = segments::detach(rounds.session.client(), &old).await.unwrap();
    assert!(matches!(detached, Step::Waits(_)), "it waits for the writer, and not for ever: {detached:?}");
    let pending = segments::list(&c, Parent::Effects).await.unwrap().remove(0);
    assert_eq!(pending.link, Link::Pending);
    c.batch_execute("set lock_timeout = '1s'").await.unwrap();
    let new = emit(&c, "new", ("consumer", "a")).await;
    late.batch_execute("commit").await.unwrap();
    assert_eq!(reading.read().await, [new], "the log reads past it");
    let after = emit(&c, "after", ("consumer", "a")).await;
    assert_eq!(reading.read().await, [after], "and never comes back");

    rounds.round().await;
    assert!(!segments(&c, "effects").await.contains(&0));
    let kept = ids(&c, "select id from fencepost.effects_kept order by id").await;
    assert_eq!(kept[..2], [first, 1000]);
    assert_eq!(ids(&c, "select effect_id from fencepost.parked").await, [1000], "what a flight holds is not parked");
    c.batch_execute("update fencepost.parked set next_attempt_at = clock_timestamp()").await.unwrap();
    assert_eq!(due(&c).await, [(1000, 1)]);
}

#[tokio::test]
async fn a_dump_delays_the_drop_and_no_producer() {
    let db = TestDb::new().await;
    let (c, dump) = (db.client().await, db.client().await);
    two_consumers(&c).await;
    keep_for(&c, "1 microsecond", "0").await;
    let first = emit(&c, "first", ("consumer", "a")).await;
    let mut rounds = Rounds::new(&db).await;
    rounds.round().await;
    let mut reading = Reading::new(&db).await;
    reading.read().await;
    // As pg_dump: one snapshot for hours, and every table locked against being dropped.
    dump.batch_execute(
        "begin isolation level repeatable read read only; lock table fencepost.effects, fencepost.ledger in access share mode;
         select count(*) from fencepost.effects, fencepost.ledger",
    )
    .await
    .unwrap();
    c.batch_execute("set lock_timeout = '1s'").await.unwrap();
    for n in 0..3 {
        rounds.round().await;
        emit(&c, &format!("during-{n}"), ("topic", "nobody")).await;
        emit(&c, &format!("while-{n}"), ("consumer", "a")).await;
        reading.read().await;
    }
    assert_eq!(segments::list(&c, Parent::Effects).await.unwrap()[0].link, Link::Pending);
    let seen: i64 = dump.query_one("select count(*) from fencepost.effects", &[]).await.unwrap().get(0);
    assert_eq!(seen, 1, "the dump still sees what it began with");
    dump.batch_execute("commit").await.unwrap();
    rounds.round().await;
    let left = segments::list(&c, Parent::Effects).await.unwrap();
    assert!(left.iter().all(|s| s.from > 0 && s.link != Link::Pending), "{left:?}");
    assert!(ids(&c, "select id from fencepost.effects_kept").await.contains(&first));
}

#[tokio::test]
async fn under_load_segments_come_and_go_and_every_effect_arrives() {
    let receiver = Receiver::start().await;
    let consumer = format!(
        "[[consumers]]\nname = 'a'\nkind = 'http'\nurl = '{}'\nack = 'required'\ntimeout = '2s'",
        receiver.url()
    );
    let rig = Rig::new(&consumer).await;
    rig.apply().await;
    // Unread for long: the relay finds its place, and reads what is older than the retention before it goes.
    for n in 0..20 {
        rig.emit(&format!("old-{n}"), "a").await;
    }
    keep_for(&rig.client, "2 seconds", "500 milliseconds").await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let mut relay = rig.relay().await;
    rig.client.batch_execute("set lock_timeout = '1s'").await.unwrap();
    let mut emitted = 20;
    eventually("four segments were dropped", async || {
        rig.emit(&format!("new-{emitted}"), "a").await;
        emit(&rig.client, &format!("unrouted-{emitted}"), ("topic", "nobody")).await;
        emitted += 1;
        (relay.log().matches("segment dropped").count() >= 8).then_some(())
    })
    .await;
    receiver.wait_until(emitted).await;
    rig.rests().await;
    let mut keys: Vec<String> = receiver.requests().iter().map(|request| request.key()).collect();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), emitted, "each arrived");
    assert_eq!(rig.count("select count(*) from fencepost.alarms").await, 0);
    for parent in ["effects", "ledger"] {
        let live = segments(&rig.client, parent).await.len();
        assert!(live <= 12, "{live} segments of {parent}");
    }
    relay.kill().await;
}
