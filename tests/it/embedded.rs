//! The private PostgreSQL and the databases made on it; the private RabbitMQ.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use fencepost::demo::embedded::postgres::{Durability, PrivatePostgres};
use fencepost::demo::embedded::rabbitmq::PrivateRabbitmq;
use tokio_postgres::NoTls;

use crate::support::broker::Client;
use crate::support::db::TestDb;
use crate::support::eventually;

async fn answer(url: &str) -> Result<i32, tokio_postgres::Error> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    Ok(client.query_one("select 42", &[]).await?.get(0))
}

fn folder(url: &str) -> PathBuf {
    url.split_once("host=").unwrap().1.split_once('&').unwrap().0.into()
}

#[tokio::test]
async fn a_test_database_is_migrated_and_its_own() {
    let (one, two) = (TestDb::new().await, TestDb::new().await);
    one.client().await.batch_execute("create table public.mine ()").await.unwrap();
    let sql = "select to_regclass('public.mine') is not null, to_regclass('fencepost.effects') is not null";
    let row = two.client().await.query_one(sql, &[]).await.unwrap();
    assert_eq!((row.get(0), row.get(1)), (false, true));
    fencepost::store::schema::check(&two.client().await).await.unwrap();
    let name = one.name().to_owned();
    drop(one);
    let left = "select count(*) from pg_database where datname = $1";
    assert_eq!(two.client().await.query_one(left, &[&name]).await.unwrap().get::<_, i64>(0), 0);
}

#[tokio::test]
async fn a_private_server_survives_its_crash_and_leaves_nothing() {
    let mut server = PrivatePostgres::start(Durability::None).await.unwrap();
    let (url, tcp) = (server.url("postgres"), server.tcp_url("postgres"));
    assert_eq!((answer(&url).await.unwrap(), answer(&tcp).await.unwrap()), (42, 42));
    server.stop_immediate().await.unwrap();
    answer(&url).await.expect_err("the server is down");
    server.restart().await.unwrap();
    assert_eq!(answer(&tcp).await.unwrap(), 42);
    let stranger = tcp.replace("postgres:", "postgres:no");
    answer(&stranger).await.expect_err("TCP wants the password");
    let folder = folder(&url);
    assert!(folder.join("data").exists());
    drop(server);
    assert!(!folder.exists());
    answer(&tcp).await.expect_err("the server is gone");
}

/// Starts what serves until it is killed, and gives it with the first word it says of what it serves.
fn owner(test: &str) -> (Child, String) {
    let mut owner = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("embedded::{test}"), "--ignored", "--nocapture"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let served = BufReader::new(owner.stdout.take().unwrap())
        .lines()
        .find_map(|line| line.unwrap().strip_prefix("serving ").map(str::to_owned))
        .unwrap();
    (owner, served)
}

/// Not a test: the process that the next one kills.
#[tokio::test]
#[ignore = "started by a_private_server_ends_with_its_killed_owner"]
async fn owner_to_be_killed() {
    let server = PrivatePostgres::start(Durability::None).await.unwrap();
    println!("\nserving {}", server.url("postgres"));
    std::future::pending::<()>().await;
}

#[tokio::test]
async fn a_private_server_ends_with_its_killed_owner() {
    let (mut owner, url) = owner("owner_to_be_killed");
    assert_eq!(answer(&url).await.unwrap(), 42);
    owner.kill().unwrap();
    owner.wait().unwrap();
    let folder = folder(&url);
    eventually("no process that knows its folder, and no folder", async || {
        let names_it = |cmdline: &Vec<u8>| String::from_utf8_lossy(cmdline).contains(folder.to_str().unwrap());
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        let left = processes.filter_map(|p| std::fs::read(p.path().join("cmdline")).ok()).filter(names_it).count();
        (left == 0 && !folder.exists()).then_some(())
    })
    .await;
}

/// A node by its own name, which everything of its has in its environment: its epmd, and one that it might start itself.
async fn name(node: &PrivateRabbitmq) -> String {
    node.ctl(&["eval", "node()."]).await.unwrap().trim().trim_matches('\'').to_owned()
}

/// Processes of a node, each with its HOME.
fn processes(node: &str) -> Vec<(u32, PathBuf)> {
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let found = all.filter_map(|entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        let environment = String::from_utf8_lossy(&std::fs::read(entry.path().join("environ")).ok()?).into_owned();
        let variable = |name: &str| environment.split('\0').find_map(|v| v.strip_prefix(name)?.strip_prefix('='));
        (variable("RABBITMQ_NODENAME")? == node).then(|| (pid, PathBuf::from(variable("HOME").unwrap_or_default())))
    });
    found.collect()
}

async fn nothing_is_left(node: &str, home: &std::path::Path) {
    eventually("no process of the node, and no folder", async || {
        (processes(node).is_empty() && !home.exists()).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_private_broker_is_its_own_and_leaves_nothing() {
    let node = PrivateRabbitmq::start().await.unwrap();
    Client::new(&node.url()).await.queue("mine", &[]).await;
    let name = name(&node).await;
    assert!(name.ends_with("@localhost"), "{name}");
    let processes = processes(&name);
    let home = processes[0].1.clone();
    assert!(home.is_dir() && processes.iter().all(|(_, own)| *own == home), "{processes:?}");
    let is_epmd = |(pid, _): &&(u32, PathBuf)| {
        std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "epmd")
    };
    assert_eq!(processes.iter().filter(is_epmd).count(), 1, "an epmd of its own");
    drop(node);
    nothing_is_left(&name, &home).await;
}

/// Not a test: the process that the next one kills.
#[tokio::test]
#[ignore = "started by a_private_broker_ends_with_its_killed_owner"]
async fn brokers_owner_to_be_killed() {
    let node = PrivateRabbitmq::start().await.unwrap();
    println!("\nserving {}", name(&node).await);
    std::future::pending::<()>().await;
}

#[tokio::test]
async fn a_private_broker_ends_with_its_killed_owner() {
    let (mut owner, name) = owner("brokers_owner_to_be_killed");
    let home = processes(&name)[0].1.clone();
    owner.kill().unwrap();
    owner.wait().unwrap();
    nothing_is_left(&name, &home).await;
}
