//! The example producers, each run as it is: work that ends well, work that fails, and a lease that is lost on the way.

use std::process::Stdio;

use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio_postgres::Client;

use crate::support::db::TestDb;
use crate::support::{PATIENCE, eventually, languages};

#[tokio::test]
async fn the_python_producer_survives_the_script() {
    let mut command = Command::new(languages::python().await);
    command.arg(languages::repository("examples/producers/producer.py"));
    script(command).await;
}

#[tokio::test]
async fn the_node_producer_survives_the_script() {
    script(languages::node("examples/producers/producer.mjs", &[]).await).await;
}

async fn script(command: Command) {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            "select fencepost.declare_consumer('billing', '{\"kind\": \"http\", \"url\": \"http://127.0.0.1:9/\", \"topics\": [\"order.paid\"]}');
             create table orders (id int primary key, status text not null, total numeric not null);
             insert into orders values (1, 'new', 42.00), (2, 'new', 7.50), (3, 'new', 3.00)",
        )
        .await
        .expect("a shop");
    for order in [1, 9, 2] {
        submit(&client, order).await;
    }
    // Order 2 is held up in the middle of its transaction until its lease is somebody else's.
    let mut other = db.client().await;
    let held = other.transaction().await.expect("a transaction");
    held.execute("select from orders where id = 2 for update", &[]).await.expect("a row lock");
    let mut producer = Producer::start(command, &db);
    eventually("the producer waits for the row", async || {
        let waits = "select 1 from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'
                     and query like 'update orders%'";
        client.query_opt(waits, &[]).await.expect("activity")
    })
    .await;
    let taken_over =
        "update fencepost.tasks set lease_expires_at = clock_timestamp() - interval '1 s' where task_id = 'order-2'";
    assert_eq!(client.execute(taken_over, &[]).await.expect("an expired lease"), 1);
    let claim = "select lease_epoch from fencepost.claim_tasks('another', task_ids => '{order-2}')";
    assert_eq!(client.query_one(claim, &[]).await.expect("a claim").get::<_, i64>(0), 2);
    held.commit().await.expect("a commit");
    producer.says("order-2: somebody else has it now").await;
    submit(&client, 3).await;
    producer.says("order-3: completed under epoch 1").await;
    producer.ends().await;

    let ended = "select string_agg(format('%s:%s %s', task_id, lease_epoch, token), ', ' order by task_id, lease_epoch)
                 from fencepost.completions";
    let ended: String = client.query_one(ended, &[]).await.expect("completions").get(0);
    assert_eq!(ended, "order-1:1 effects, order-2:1 lost, order-3:1 effects, order-9:1 failed");
    let meant = "select string_agg(format('%s %s', key, convert_from(payload, 'UTF8')), ', ' order by key) from fencepost.intended";
    let meant: String = client.query_one(meant, &[]).await.expect("effects").get(0);
    assert_eq!(meant, r#"order-1:1 {"order": 1, "total": "42.00"}, order-3:1 {"order": 3, "total": "3.00"}"#);
    let refused = "select sum(refused)::bigint from fencepost.workers";
    assert_eq!(client.query_one(refused, &[]).await.expect("workers").get::<_, i64>(0), 1, "the refusal was reported");
    let orders = "select string_agg(status, ' ' order by id) from orders";
    assert_eq!(client.query_one(orders, &[]).await.expect("orders").get::<_, String>(0), "paid new paid");
}

async fn submit(client: &Client, order: i32) {
    let submit =
        "select fencepost.submit_task('charge', jsonb_build_object('order', $1::int), format('order-%s', $1::int))";
    client.execute(submit, &[&order]).await.expect("a task");
}

struct Producer {
    child: Child,
    lines: tokio::io::Lines<BufReader<tokio::process::ChildStdout>>,
}

impl Producer {
    fn start(mut command: Command, db: &TestDb) -> Self {
        command.env("DATABASE_URL", db.url()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().expect("the producer starts");
        let lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        Self { child, lines }
    }

    async fn says(&mut self, wanted: &str) {
        let found = async {
            let mut said = Vec::new();
            while let Some(line) = self.lines.next_line().await.expect("text") {
                if line == wanted {
                    return;
                }
                said.push(line);
            }
            panic!("the producer ended without {wanted:?}: {said:?}");
        };
        tokio::time::timeout(PATIENCE, found).await.unwrap_or_else(|_| panic!("not within {PATIENCE:?}: {wanted:?}"));
    }

    /// SIGTERM, and a good end.
    async fn ends(mut self) {
        let pid = self.child.id().expect("it runs").to_string();
        languages::finish(Command::new("kill").args(["-TERM", &pid])).await;
        let status = tokio::time::timeout(PATIENCE, self.child.wait()).await.expect("in time").expect("a status");
        assert!(status.success(), "{status}");
    }
}
