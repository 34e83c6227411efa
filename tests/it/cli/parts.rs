//! The parts of `docker-compose.yml` without Docker: each a process of its own, on a real database and broker.

use fencepost::demo::embedded::guardian::Signal;

use super::{NOTHING, fencepost, json};
use crate::support::broker::{self, Client};
use crate::support::db::TestDb;
use crate::support::process::{Process, run};

const QUEUE: &str = "demo-shipping-shared";

#[tokio::test]
async fn the_parts_of_the_demo_keep_its_promises_together() {
    let db = TestDb::new().await;
    // Test databases are copies of one template: this one's reply queues need a name of their own.
    let deployment =
        format!("update fencepost.settings set value = 't{:08x}' where name = 'deployment'", rand::random::<u32>());
    db.client().await.batch_execute(&deployment).await.unwrap();
    // What an earlier run left on the shared broker.
    let broker = broker::url().await;
    Client::new(broker).await.delete_queue(QUEUE).await;
    let folder = std::env::temp_dir().join(format!("{}-parts", db.name()));
    std::fs::create_dir(&folder).unwrap();
    let file = folder.join("fencepost.toml");
    std::fs::write(&file, "").unwrap();
    let url = |role: &str| {
        let sign = if db.url().contains('?') { '&' } else { '?' };
        format!("{}{sign}options=-c%20role%3D{}_{role}", db.url(), db.name())
    };
    let urls = ["relay", "worker", "consumer"].map(url);
    let of = |url| [("DATABASE_URL", url), ("FENCEPOST_CONFIG", file.to_str().unwrap()), ("AMQP_URL", broker)];
    let [env, as_relay, as_worker, as_consumer] = [db.url(), &urls[0], &urls[1], &urls[2]].map(of);
    // Each part with no more rights than it needs.
    let name = db.name();
    let roles = format!(
        "create role {name}_relay; create role {name}_worker; create role {name}_consumer;
         select fencepost.grant_to('{name}_relay', 'relay'), fencepost.grant_to('{name}_worker', 'worker'),
                fencepost.grant_to('{name}_worker', 'producer')"
    );
    db.client().await.batch_execute(&roles).await.unwrap();

    assert_eq!(run(&["demo", "--role", "stage"], &env).await.0, 0);
    let mut consumer = Process::start(&["demo", "--role", "http-consumer", "--listen", "127.0.0.1:0"], &as_consumer);
    let line = consumer.says("listening on").await;
    let address = line.rsplit(' ').next().unwrap();
    let config = format!(
        "revision = 1\n[relay]\nshard_lease = '3s'\nrenew_every = '1s'\n[retry]\nbase = '200ms'\n
         [[consumers]]\nname = 'demo-billing'\nkind = 'http'\nurl = 'http://{address}/demo-billing'\nack = 'required'\ntimeout = '2s'\ntopics = ['demo.shared']\n
         [[consumers]]\nname = 'demo-analytics'\nkind = 'http'\nurl = 'http://{address}/demo-analytics'\ntimeout = '2s'\ntopics = ['demo.shared']\n
         [[consumers]]\nname = 'demo-shipping'\nkind = 'amqp'\nrouting_key = '{QUEUE}'\nack = 'required'\ntopics = ['demo.shared']\n"
    );
    std::fs::write(&file, config).unwrap();
    let (code, out, err) = run(&["amqp", "init", "--queues", "--yes", "--reason", "test"], &env).await;
    assert_eq!(code, 0, "{out}{err}");

    let mut relay = Process::start(&["run"], &as_relay);
    relay.says("consumer applied").await;
    let mut shipping = Process::start(&["demo", "--role", "amqp-consumer"], &as_consumer);
    let mut workers = Process::start(&["demo", "--role", "worker"], &as_worker);
    for _ in 0..2 {
        let (code, out, err) = run(&["demo", "--role", "submit", "--tasks", "30"], &as_worker).await;
        assert!(code == 0 && out.contains("30 tasks"), "{out}{err}");
    }
    let drained = json(&db, NOTHING, 0, &["wait", "--until-drained", "--tasks"]).await;
    assert_eq!(drained["outcome"], "drained");
    let checked = async |code: i32| {
        let (exit, out, err) = run(&["demo", "--role", "check", "--json"], &env).await;
        assert_eq!(exit, code, "{out}{err}");
        serde_json::from_str::<serde_json::Value>(&out).unwrap()
    };
    let check = checked(0).await;
    // Three of the sixty are no_action; every tenth says something more to one consumer.
    assert_eq!(check["promised"], (60 - 3) * 3 + 6, "{check}");
    let proof = json(&db, NOTHING, 0, &["audit"]).await;
    assert_eq!(proof["ended"].as_object().unwrap().values().map(|n| n.as_i64().unwrap()).sum::<i64>(), 177);

    // A consumer that made something nobody asked for is found out.
    let unasked =
        "insert into fencepost_demo_shared.receipts (consumer, key, body_sha256) values ('demo-billing', 'x:1', '')";
    db.client().await.batch_execute(unasked).await.unwrap();
    let check = checked(1).await;
    assert_eq!(check["unasked"], 1);

    for part in [&mut consumer, &mut shipping, &mut workers, &mut relay] {
        part.signal(Signal::Term);
        assert!(part.ended().await.success(), "{}", part.log());
    }
    let roles = format!(
        "drop owned by {name}_relay, {name}_worker, {name}_consumer; drop role {name}_relay, {name}_worker, {name}_consumer"
    );
    db.client().await.batch_execute(&roles).await.unwrap();
    std::fs::remove_dir_all(folder).unwrap();
}

#[tokio::test]
async fn the_amqp_part_wants_a_broker() {
    let db = TestDb::new().await;
    let (code, _, err) = fencepost(&db, NOTHING, &["demo", "--role", "amqp-consumer"]).await;
    assert!(code == 1 && err.contains("AMQP_URL_FILE"), "{err}");
}

#[tokio::test]
async fn health_is_what_the_relay_says_of_itself() {
    let db = TestDb::new().await;
    let mut relay = Process::start(&["run"], &[("DATABASE_URL", db.url())]);
    let line = relay.says("admin endpoints").await;
    let address = line.split("address=").nth(1).and_then(|rest| rest.split_whitespace().next()).unwrap().to_owned();
    let env = [("DATABASE_URL", db.url()), ("FENCEPOST__ADMIN__LISTEN", address.as_str())];
    let ready = async || (run(&["health"], &env).await.0 == 0).then_some(());
    crate::support::eventually("the relay is ready", ready).await;
    let url = format!("http://{address}/nowhere");
    let (code, out, _) = run(&["health", "--url", &url], &env).await;
    assert!(code == 1 && out.starts_with("404"), "{out}");
    relay.kill().await;
    let (code, _, err) = run(&["health"], &env).await;
    assert!(code == 1 && err.contains("does not answer"), "{err}");
}
