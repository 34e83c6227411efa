//! What keeps the log for long: segments and their end, rows that expire, and histories that were rewound or copied.

mod dropping;
mod expiry;
mod histories;
mod rights;

use fencepost::model::key::Shard;
use fencepost::relay::retention::Retention;
use fencepost::store::Database;
use fencepost::store::log::{self, Held, Opener, PageLimits};
use fencepost::store::retention;
use fencepost::store::session::Session;
use fencepost::store::shards;
use serde_json::json;
use tokio_postgres::Client;
use uuid::Uuid;

use crate::support::db::TestDb;

/// Ids of one segment.
const WIDTH: i64 = 1 << 36;

/// Consumers `a` and `b`, ids 1 and 2, both subscribed to `both`, which no relay serves.
async fn two_consumers(client: &Client) {
    let spec = json!({"kind": "http", "url": "http://127.0.0.1:9/", "topics": ["both"]});
    for name in ["a", "b"] {
        client.query("select fencepost.declare_consumer($1, $2)", &[&name, &spec]).await.unwrap();
        client.query("select fencepost.subscribe('both', $1)", &[&name]).await.unwrap();
    }
}

async fn emit(client: &Client, task: &str, target: (&str, &str)) -> i64 {
    let effects = json!([{ target.0: target.1, "payload": {"task": task} }]);
    client.query("select fencepost.emit($1, $2)", &[&effects, &task]).await.unwrap();
    let sql = "select first_effect_id from fencepost.tasks where task_id = $1";
    client.query_one(sql, &[&task]).await.unwrap().get(0)
}

/// How long log and segments last: PostgreSQL intervals.
async fn keep_for(client: &Client, retention: &str, span: &str) {
    let set = "update fencepost.settings set value = $2 where name = $1";
    client.execute(set, &[&"retention", &retention]).await.unwrap();
    client.execute(set, &[&"segment_span_min", &span]).await.unwrap();
}

/// A session that does rounds of retention as a relay does.
struct Rounds {
    session: Session,
    retention: Retention,
}

impl Rounds {
    async fn new(db: &TestDb) -> Self {
        Self::over(&db.database()).await
    }

    /// With the rights that this database's URL gives.
    async fn over(database: &Database) -> Self {
        let session = Session::open(database).await.unwrap();
        let retention = Retention::begin(&session).await.unwrap().expect("nobody else does it");
        Self { session, retention }
    }

    async fn round(&mut self) {
        let policy = retention::policy(&self.session).await.unwrap();
        self.retention.round(&mut self.session, policy).await.unwrap();
    }
}

/// Segments of effects that hang on their parent, by the id they start at.
async fn segments(client: &Client, parent: &str) -> Vec<i64> {
    let sql = "select substring(c.relname from '[0-9]+$')::bigint from pg_inherits i join pg_class c on c.oid = i.inhrelid
               where i.inhparent = ('fencepost.' || $1)::regclass and not i.inhdetachpending and c.relname !~ 'kept' order by 1";
    client.query(sql, &[&parent]).await.unwrap().iter().map(|row| row.get(0)).collect()
}

async fn ids(client: &Client, sql: &str) -> Vec<i64> {
    client.query(sql, &[]).await.unwrap().iter().map(|row| row.get(0)).collect()
}

/// A reader without a relay: it opens flights and sends nothing.
struct Reading {
    session: Session,
    opener: Opener,
    held: Vec<Held>,
}

impl Reading {
    async fn new(db: &TestDb) -> Self {
        let mut session = Session::open(&db.database()).await.unwrap();
        let opener = Opener { relay: Uuid::now_v7(), nonce: Uuid::now_v7() };
        let mut held = Vec::new();
        for shard in 0..8 {
            let lease = std::time::Duration::from_secs(60);
            let taken = shards::take(session.client_mut(), Shard(shard), opener.relay, lease).await.unwrap().unwrap();
            held.push(Held { shard: taken.shard, epoch: taken.epoch, position: taken.position });
        }
        Self { session, opener, held }
    }

    /// Reads what is new, and says which effects that is.
    async fn read(&mut self) -> Vec<i64> {
        let limits = PageLimits { deliveries: 500, bytes: 8 << 20 };
        let reading = log::open_flights(&self.session, &self.held, self.opener, limits).await.unwrap();
        let mut read = Vec::new();
        for flight in reading.opened {
            read.extend(flight.effects.iter().map(|read| read.effect.id.0));
            let held = self.held.iter_mut().find(|held| held.shard == flight.shard).unwrap();
            held.position = flight.position;
        }
        read.sort_unstable();
        read
    }
}
