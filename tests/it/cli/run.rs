//! `fencepost run` as a process, and its endpoints. What it delivers is tested elsewhere.

use fencepost::demo::embedded::guardian::Signal;
use serde_json::Value;

use super::{http_consumer, with_consumers};
use crate::support::db::TestDb;
use crate::support::eventually;
use crate::support::process::{self, Process};

struct Running {
    process: Process,
    address: String,
}

impl Running {
    async fn start(db: &TestDb, config: &str) -> Self {
        let path = std::env::temp_dir().join(format!("{}.run.toml", db.name()));
        std::fs::write(&path, config).unwrap();
        let env = [("DATABASE_URL", db.url()), ("FENCEPOST_CONFIG", path.to_str().unwrap())];
        let mut process = Process::start(&["run"], &env);
        let line = process.says("admin endpoints").await;
        std::fs::remove_file(path).unwrap();
        let address = line.split_once("address=").unwrap().1.split_whitespace().next().unwrap().to_string();
        Self { process, address }
    }

    async fn get(&self, path: &str) -> (u16, String) {
        let answer = reqwest::get(format!("http://{}{path}", self.address)).await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    }

    /// Waits until `/readyz` answers so.
    async fn readiness(&self, status: u16) -> Value {
        let what = format!("/readyz answers {status}");
        let body = eventually(&what, async || {
            let (seen, body) = self.get("/readyz").await;
            (seen == status).then_some(body)
        })
        .await;
        serde_json::from_str(&body).unwrap()
    }
}

#[tokio::test]
async fn run_applies_its_consumers_becomes_ready_and_stops_in_order() {
    let db = TestDb::new().await;
    let mut relay = Running::start(&db, &http_consumer("a")).await;
    let ready = relay.readiness(200).await;
    assert_eq!(ready["unhealthy_consumers"], serde_json::json!([]));
    assert_eq!(relay.get("/livez").await.0, 200);
    assert_eq!(relay.get("/other").await.0, 404);
    let client = db.client().await;
    let applied = client.query_one("select name from fencepost.consumers", &[]).await.unwrap();
    assert_eq!(applied.get::<_, String>(0), "a");
    let audited = client.query_one("select reason from fencepost.audit_log", &[]).await.unwrap();
    assert_eq!(audited.get::<_, String>(0), "fencepost run at its start");

    relay.process.signal(Signal::Term);
    assert!(relay.process.ended().await.success(), "{}", relay.process.log());
    let stopped = "select stopped_at is not null from fencepost.relays";
    assert!(client.query_one(stopped, &[]).await.unwrap().get::<_, bool>(0));
}

#[tokio::test]
async fn metrics_tell_what_the_database_knows() {
    let db = with_consumers(&["a", "b"]).await;
    let client = db.client().await;
    client
        .batch_execute(
            "update fencepost.consumers set paused = true where name = 'b';
             select fencepost.emit('[{\"consumer\": \"a\", \"payload\": 1}]', 't1');
             insert into fencepost.parked (effect_id, consumer_id, shard, state) select id, 1, shard, 'dead' from fencepost.effects;
             insert into fencepost.alarms (name, object, detail) values ('conflict', 'k', 'd')",
        )
        .await
        .unwrap();
    let relay = Running::start(&db, "").await;
    let ready = relay.readiness(200).await;
    assert_eq!(ready["unhealthy_consumers"], serde_json::json!(["a", "b"]), "named, and no reason to be unready");
    let (status, text) = relay.get("/metrics").await;
    assert_eq!(status, 200);
    for line in [
        "fencepost_database_up 1",
        "fencepost_waiting{consumer=\"a\",token=\"dead\"} 1",
        "fencepost_waiting{consumer=\"b\",token=\"dead\"} 0",
        "fencepost_consumer_paused{consumer=\"b\"} 1",
        "fencepost_alarms{alarm=\"conflict\"} 1",
    ] {
        assert!(text.lines().any(|seen| seen == line), "{line} is missing in {text}");
    }
    assert!(text.contains("fencepost_oldest_waiting_seconds{consumer=\"a\"} "), "{text}");
    assert!(!text.contains("hunter2"));
}

#[tokio::test]
async fn metrics_tell_stuck_tasks_and_lost_leases() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            "select fencepost.submit_task('charge') from generate_series(1, 3);
             select fencepost.submit_task('mail');
             select fencepost.claim_tasks('w1', array['charge'], 3, lease => '1 microsecond');
             select fencepost.claim_tasks('w1', array['mail'], 1, lease => '1 hour');
             select fencepost.claim_tasks('w2', array['charge'], 1, lease => '1 hour');
             select fencepost.worker_failed('w1', true);
             select fencepost.worker_failed('w1')",
        )
        .await
        .unwrap();
    let relay = Running::start(&db, "").await;
    relay.readiness(200).await;
    let (_, text) = relay.get("/metrics").await;
    for line in [
        "# TYPE fencepost_tasks_stuck gauge",
        "fencepost_tasks_stuck{kind=\"charge\"} 2",
        "fencepost_tasks_stuck{kind=\"mail\"} 0",
        "fencepost_tasks_running{kind=\"charge\"} 1",
        "fencepost_tasks_running{kind=\"mail\"} 1",
        "# TYPE fencepost_leases_lost_total counter",
        "fencepost_leases_lost_total 1",
        "fencepost_completions_refused_total 1",
    ] {
        assert!(text.lines().any(|seen| seen == line), "{line} is missing in {text}");
    }
    let oldest = text.lines().find_map(|line| line.strip_prefix("fencepost_oldest_stuck_task_seconds ")).unwrap();
    assert!(oldest.parse::<f64>().unwrap() > 0.0, "{oldest}");
}

#[tokio::test]
async fn without_its_database_a_relay_is_alive_but_not_ready() {
    let db = TestDb::new().await;
    let relay = Running::start(&db, "").await;
    relay.readiness(200).await;
    let mut url = url::Url::parse(db.url()).unwrap();
    url.set_path("/postgres");
    let (admin, connection) = tokio_postgres::connect(url.as_str(), tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    let cut = format!(
        "alter database {0} allow_connections false; select pg_terminate_backend(pid) from pg_stat_activity where datname = '{0}'",
        db.name()
    );
    admin.batch_execute(&cut).await.unwrap();
    let faults = relay.readiness(503).await["faults"].to_string();
    assert!(faults.contains("the database cannot be reached"), "{faults}");
    assert_eq!(relay.get("/livez").await.0, 200);
    // The last look at the database is kept for a few seconds.
    eventually("/metrics says that the database is away", async || {
        let (_, metrics) = relay.get("/metrics").await;
        metrics.contains("fencepost_database_up 0").then_some(())
    })
    .await;
    admin.batch_execute(&format!("alter database {} allow_connections true", db.name())).await.unwrap();
    relay.readiness(200).await;
}

#[tokio::test]
async fn an_address_in_use_is_said_at_once() {
    let db = TestDb::new().await;
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let env = [("DATABASE_URL", db.url()), ("FENCEPOST__ADMIN__LISTEN", address.as_str())];
    let (code, _, err) = process::run(&["run"], &env).await;
    assert!(code == 2 && err.contains(&format!("admin.listen: cannot listen on {address}")), "{code} {err}");
}
