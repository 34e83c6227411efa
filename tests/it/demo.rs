//! `fencepost demo`, as a user runs it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fencepost::demo::embedded::guardian::Signal;
use serde_json::Value;

use crate::support::db::TestDb;
use crate::support::process::{Process, run, run_within};
use crate::support::{broker, eventually};

/// A demo takes its time on a busy machine; it gives up by itself where nothing moves for a minute.
const LONG: Duration = Duration::from_secs(180);

#[tokio::test]
async fn the_demo_keeps_every_promise_through_its_crashes() {
    let (code, report, errors) = run_within(LONG, &["demo", "--tasks", "400", "--json"], &[]).await;
    assert_eq!(code, 0, "{report}\n{errors}");
    let report: Value = serde_json::from_str(&report).unwrap();
    let count = |path: &str| report.pointer(path).and_then(Value::as_u64).unwrap_or_else(|| panic!("{path}: {report}"));
    assert_eq!(count("/check/promised"), 384 * 3 + 40, "over HTTP and over AMQP");
    assert_eq!((count("/check/lost"), count("/check/unfinished")), (0, 0));
    // What it promises to survive did happen.
    assert_eq!((count("/relay_kills"), count("/workers_killed"), count("/workers_paused")), (2, 1, 1));
    assert!(report["broker"].as_str().unwrap().contains("restarted once"), "{report}");
    assert!(count("/lease_losses_detected") >= 1, "{report}");
    assert!(count("/completions/lost") >= 1, "{report}");
    assert!(count("/consumers/0/answers/duplicate") >= 1, "{report}");
    assert!(count("/attempts_without_outcome") >= 1, "{report}");
    // A 503 without a word is ambiguous; a later 2xx ends the delivery, but only the consumer's word resolves a doubt.
    assert!(count("/doubts") > count("/doubts_resolved"), "{report}");
}

#[tokio::test]
async fn the_demo_runs_in_a_database_of_yours_with_bodies_of_yours() {
    let db = TestDb::empty().await;
    let folder = scratch();
    let file = folder.join("bodies.jsonl");
    fs::write(&file, "{\"type\": \"a.b\", \"payload\": { \"ü\" : 1.0 }}\n\n[1,  \"\\u0000\"]\n").unwrap();
    let args = ["demo", "--tasks", "60", "--payloads", file.to_str().unwrap(), "--database-url", db.url()];
    let (code, report, errors) = run_within(LONG, &args, &[]).await;
    assert_eq!(code, 0, "{report}\n{errors}");
    let with_the_word: Vec<_> = report.lines().filter(|line| line.contains("lost")).collect();
    assert_eq!(with_the_word, ["lost 0"]);
    let client = db.client().await;
    let sql = "select distinct type, convert_from(payload, 'UTF8') from fencepost.effects order by 1";
    let sent: Vec<(String, String)> =
        client.query(sql, &[]).await.unwrap().iter().map(|row| (row.get(0), row.get(1))).collect();
    let own = |kind: &str, text: &str| (kind.to_owned(), text.to_owned());
    assert_eq!(sent, [own("a.b", "{ \"ü\" : 1.0 }"), own("demo.event", "[1,  \"\\u0000\"]")]);
    let left = "select (select count(*) from pg_namespace where nspname like 'fencepost_demo%'),
                       (select count(*) from fencepost.consumers where retired_at is null)";
    let row = client.query_one(left, &[]).await.unwrap();
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1)), (0, 0));
    fs::remove_dir_all(folder).unwrap();
}

#[tokio::test]
async fn what_the_demo_cannot_use_is_named_with_exit_code_2() {
    let folder = scratch();
    let file = folder.join("bodies.jsonl");
    fs::write(&file, "1\n{\n").unwrap();
    let (code, _, errors) = run(&["demo", "--payloads", file.to_str().unwrap()], &[]).await;
    assert!(code == 2 && errors.contains("line 2: not JSON"), "{code}: {errors}");
    fs::write(&file, "\n").unwrap();
    let (code, _, errors) = run(&["demo", "--payloads", file.to_str().unwrap()], &[]).await;
    assert!(code == 2 && errors.contains("is empty"), "{code}: {errors}");
    let (code, _, errors) = run(&["demo"], &[("FENCEPOST_PG_BIN", folder.to_str().unwrap())]).await;
    assert!(code == 2 && errors.contains("no PostgreSQL 14 or later"), "{code}: {errors}");
    fs::remove_dir_all(folder).unwrap();
}

#[tokio::test]
async fn the_demo_uses_a_broker_of_yours_and_does_the_rest_without_any() {
    let yours = broker::url().await;
    let (code, report, errors) = run_within(LONG, &["demo", "--tasks", "20"], &[("AMQP_URL", yours)]).await;
    assert_eq!(code, 0, "{report}\n{errors}");
    assert!(report.contains("yours, left alone") && report.contains("demo-shipping"), "{report}");

    let folder = scratch();
    let none = [("FENCEPOST_RABBITMQ_BIN", folder.to_str().unwrap())];
    let (code, report, errors) = run_within(LONG, &["demo", "--tasks", "20"], &none).await;
    assert_eq!(code, 0, "{report}\n{errors}");
    assert!(report.contains("none, so nothing was sent over AMQP") && report.contains("no RabbitMQ"), "{report}");
    assert!(report.contains("demo-billing") && report.contains("lost 0"), "{report}");
    assert!(!report.contains("demo-shipping"), "{report}");
    fs::remove_dir_all(folder).unwrap();
}

/// Starts a demo that stays, and returns the folders it lives in once its report is out.
async fn staying() -> (Process, Vec<PathBuf>) {
    let mut demo = Process::start(&["demo", "--tasks", "10", "--keep"], &[]);
    demo.says_within(LONG, "Everything keeps running").await;
    let after =
        |line: &str, mark: &str, end: char| PathBuf::from(line.split_once(mark).unwrap().1.split(end).next().unwrap());
    let server = after(&demo.says("psql").await, "host=", '&');
    let relay = after(&demo.says("configuration and log:").await, "log: ", ' ');
    assert!(server.join("data").is_dir() && relay.join("relay.log").is_file());
    (demo, vec![server, relay])
}

async fn nothing_is_left(folders: &[PathBuf]) {
    eventually("no process that knows a folder of the demo, and no folder", async || {
        let names_one = |cmdline: &Vec<u8>| {
            let cmdline = String::from_utf8_lossy(cmdline).into_owned();
            folders.iter().any(|folder| cmdline.contains(folder.to_str().unwrap()))
        };
        let processes = fs::read_dir("/proc").unwrap().flatten();
        let left = processes.filter_map(|p| fs::read(p.path().join("cmdline")).ok()).filter(names_one).count();
        (left == 0 && !folders.iter().any(|folder| Path::exists(folder))).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_killed_demo_leaves_nothing() {
    let (mut demo, folders) = staying().await;
    demo.kill().await;
    nothing_is_left(&folders).await;
}

#[tokio::test]
async fn ctrl_c_ends_a_demo_that_stays() {
    let (mut demo, folders) = staying().await;
    demo.signal(Signal::Interrupt);
    let status = demo.ended().await;
    assert_eq!(status.code(), Some(0), "{}", demo.log());
    nothing_is_left(&folders).await;
}

fn scratch() -> PathBuf {
    let folder = std::env::temp_dir().join(format!("fencepost-test-{:016x}", rand::random::<u64>()));
    fs::create_dir(&folder).unwrap();
    folder
}
