//! What is sent before it has a flight: the flight before it is the marker, and what has none when its relay is gone is ended
//! as lost by whoever takes the shard.

use std::time::Duration;

use fencepost::model::key::{EffectId, Shard};
use fencepost::store::Database;
use fencepost::store::ahead::{self, AHEAD_IDS, Ahead, Commits, New};
use fencepost::store::log::{self, Held, Opener, PageLimits, Snapshot};
use fencepost::store::session::Session;
use fencepost::store::shards::{self, Leaving};
use serde_json::json;
use tokio_postgres::Client;
use uuid::Uuid;

use super::{Relay, all_landed, all_settled, declare, emit_many};
use crate::support::db::{TestDb, database_at, own_server};
use crate::support::receiver::Receiver;
use crate::support::{eventually, kill};

const LEASE: Duration = Duration::from_secs(60);
/// So many that each shard has some.
const FLOWN: usize = 200;
const LIMITS: PageLimits = PageLimits { deliveries: 500, bytes: 8 << 20 };

/// The store's side of a relay that holds every shard, and is never seen to send.
struct Reading {
    session: Session,
    opener: Opener,
    held: Vec<Held>,
    seen: Snapshot,
}

impl Reading {
    async fn of(database: &Database) -> Self {
        let mut session = Session::open(database).await.unwrap();
        let opener = Opener { relay: Uuid::now_v7(), nonce: Uuid::now_v7() };
        let mut held = Vec::new();
        for shard in 0..8 {
            let taken = shards::take(session.client_mut(), Shard(shard), opener.relay, LEASE).await.unwrap();
            let taken = taken.expect("the shard is free");
            held.push(Held { shard: taken.shard, epoch: taken.epoch, position: taken.position });
        }
        let seen = log::open_flights(&session, &held, opener, LIMITS).await.unwrap().seen.expect("a snapshot");
        Self { session, opener, held, seen }
    }

    /// Opens flights over what is new.
    async fn open(&mut self) {
        let reading = log::open_flights(&self.session, &self.held, self.opener, LIMITS).await.unwrap();
        self.seen = reading.seen.expect("a snapshot");
        for opened in reading.opened {
            let held = self.held.iter_mut().find(|held| held.shard == opened.shard).expect("a shard of ours");
            held.position = opened.position;
        }
    }

    async fn ahead(&self) -> Ahead {
        let shards: Vec<Shard> = self.held.iter().map(|held| held.shard).collect();
        ahead::read(&self.session, &shards, &self.seen).await.unwrap()
    }

    async fn what_is_new(&self) -> New {
        match self.ahead().await {
            Ahead::New(new) => new,
            other => panic!("{other:?}"),
        }
    }

    fn licence(&self) -> EffectId {
        self.held.iter().map(|held| held.position.ahead_to.expect("a licence")).min().expect("shards")
    }
}

async fn expire_leases(client: &Client) {
    let sql =
        "update fencepost.shards set lease_expires_at = clock_timestamp() - interval '1 s' where relay is not null";
    client.batch_execute(sql).await.unwrap();
}

fn attempts(receiver: &Receiver, task: &str) -> Vec<u32> {
    receiver.requests().iter().filter(|r| r.body.starts_with(task.as_bytes())).map(|r| r.attempt()).collect()
}

#[tokio::test]
async fn what_may_have_been_sent_ahead_is_ended_as_lost_and_nothing_else_is() {
    // On a shared one, what other tests write need not be on disk, and then nobody knows it of ours.
    let server = own_server().await;
    let database = database_at(&server.url("postgres"));
    let client = database.connect().await.unwrap();
    let receiver = Receiver::start().await;
    declare(&client, "c", &receiver, json!({})).await;
    let mut gone = Reading::of(&database).await;
    emit_many(&client, "c", "flown", FLOWN).await;
    gone.open().await;

    // One draws its id now and commits after it was looked: it may be seen by a later look, and counts as well.
    let mut other = database.connect().await.unwrap();
    let late = other.transaction().await.unwrap();
    let sql = "select fencepost.emit($1)";
    late.execute(sql, &[&json!([{"consumer": "c", "payload_text": "late"}])]).await.unwrap();
    emit_many(&client, "c", "ahead", 20).await;
    let new = gone.what_is_new().await;
    assert_eq!((new.effects.len(), new.commits), (20, Commits::OnDisk));
    assert!(new.effects.iter().all(|read| read.effect.id <= gone.licence()), "all within the licence");
    late.commit().await.unwrap();
    // Beyond the licence nothing was sent.
    let sql = "select setval(pg_get_serial_sequence('fencepost.effects', 'id'), (select max(id) from fencepost.effects) + $1)";
    client.execute(sql, &[&AHEAD_IDS]).await.unwrap();
    emit_many(&client, "c", "beyond", 30).await;
    expire_leases(&client).await;

    let _next = Relay::at(&server.url("postgres")).start();
    all_settled(&client, FLOWN + 21 + 30).await;
    all_landed(&client).await;
    for (task, count, attempt) in [("flown", FLOWN, 2), ("ahead", 20, 2), ("late", 1, 2), ("beyond", 30, 1)] {
        assert_eq!(attempts(&receiver, task), vec![attempt; count], "{task}");
    }
    let lost = "select count(*) from fencepost.attempts where token = 'lost'";
    assert_eq!(client.query_one(lost, &[]).await.unwrap().get::<_, i64>(0), FLOWN as i64 + 21);
    // Whose shard was taken writes no flight any more.
    let unwritten: Vec<_> = gone
        .held
        .iter()
        .map(|held| ahead::Unwritten { held: held.clone(), first: EffectId(1), last: EffectId(1), deliveries: 1 })
        .collect();
    assert!(ahead::write(&gone.session, &unwritten, &new.seen, gone.opener).await.unwrap().is_empty());
}

#[tokio::test]
async fn who_hands_a_shard_over_in_order_takes_the_licence_back() {
    for (leaving, attempt) in [(Leaving::InOrder, 1), (Leaving::Lost, 2)] {
        let db = TestDb::new().await;
        let client = db.client().await;
        let receiver = Receiver::start().await;
        declare(&client, "c", &receiver, json!({})).await;
        let mut first = Reading::of(&db.database()).await;
        emit_many(&client, "c", "flown", FLOWN).await;
        first.open().await;
        let held: Vec<_> = first.held.iter().map(|held| (held.shard, held.epoch)).collect();
        shards::release(&client, first.opener.relay, &held, leaving).await.unwrap();
        emit_many(&client, "c", "after", 20).await;
        let _next = Relay::of(&db).start();
        all_settled(&client, FLOWN + 20).await;
        assert_eq!(attempts(&receiver, "after"), [attempt; 20], "{leaving:?}");
    }
}

#[tokio::test]
async fn what_is_not_on_disk_waits_for_its_flight() {
    let server = own_server().await;
    let database = database_at(&server.url("postgres"));
    let client = database.connect().await.unwrap();
    let receiver = Receiver::start().await;
    declare(&client, "c", &receiver, json!({})).await;
    let reading = Reading::of(&database).await;
    // A log writer that stands still keeps what was committed without waiting off the disk.
    let writer: i32 = client
        .query_one("select pid from pg_stat_activity where backend_type = 'walwriter'", &[])
        .await
        .unwrap()
        .get(0);
    kill("STOP", writer);
    client.batch_execute("set synchronous_commit = off").await.unwrap();
    emit_many(&client, "c", "lazy", 1).await;
    let new = reading.what_is_new().await;
    assert_eq!((new.effects.len(), new.commits), (1, Commits::Unknown), "it is visible, and a crash would lose it");
    client.batch_execute("set synchronous_commit = on").await.unwrap();
    emit_many(&client, "c", "waits", 1).await;
    assert_eq!(
        reading.what_is_new().await.commits,
        Commits::OnDisk,
        "one that waits for the disk takes the other along"
    );
    // A standby may lack what this disk has.
    client.batch_execute("alter system set synchronous_standby_names = 'nobody'").await.unwrap();
    client.query("select pg_reload_conf()", &[]).await.unwrap();
    eventually("the server waits for a standby", async || {
        let row = reading
            .session
            .client()
            .query_one("select current_setting('synchronous_standby_names')", &[])
            .await
            .unwrap();
        (row.get::<_, String>(0) == "nobody").then_some(())
    })
    .await;
    assert_eq!(reading.what_is_new().await.commits, Commits::Unknown);
    kill("CONT", writer);
}

#[tokio::test]
async fn much_and_large_effects_are_left_to_flights() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let receiver = Receiver::start().await;
    declare(&client, "c", &receiver, json!({})).await;
    let mut reading = Reading::of(&db.database()).await;
    assert!(matches!(reading.ahead().await, Ahead::Nothing));
    emit_many(&client, "c", "few", 64).await;
    assert_eq!(reading.what_is_new().await.effects.len(), 64);
    emit_many(&client, "c", "one", 1).await;
    assert!(matches!(reading.ahead().await, Ahead::Much));
    reading.open().await;
    for (bytes, large) in [(65_536, false), (65_537, true)] {
        let effects = json!([{"consumer": "c", "payload_text": "x".repeat(bytes)}]);
        client.execute("select fencepost.emit($1)", &[&effects]).await.unwrap();
        assert_eq!(matches!(reading.ahead().await, Ahead::Much), large, "{bytes}");
    }
}

/// A transaction that was in progress at the last look is found when it commits, whatever its number.
#[tokio::test]
async fn a_late_commit_is_found() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let receiver = Receiver::start().await;
    declare(&client, "c", &receiver, json!({})).await;
    let mut reading = Reading::of(&db.database()).await;
    let mut other = db.client().await;
    let late = other.transaction().await.unwrap();
    let sql = "select fencepost.emit($1)";
    late.execute(sql, &[&json!([{"consumer": "c", "payload_text": "late"}])]).await.unwrap();
    emit_many(&client, "c", "early", 3).await;
    let new = reading.what_is_new().await;
    assert_eq!(new.effects.len(), 3);
    reading.seen = new.seen;
    assert!(matches!(reading.ahead().await, Ahead::Nothing));
    late.commit().await.unwrap();
    let new = reading.what_is_new().await;
    assert_eq!((new.effects.len(), &new.effects[0].effect.payload[..]), (1, &b"late"[..]));
}
