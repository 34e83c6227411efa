//! The producer's side in SQL, contract section 3: each function, view, right and SQLSTATE, by plain statements as any
//! language would send them. The Rust client has tests of its own.

mod consumers;
mod effects;
mod epochs;
mod guide;
mod leases;
mod limits;
mod record;
mod rights;
mod tasks;
mod transactions;
mod views;

use tokio_postgres::{Client, SimpleQueryMessage};

use crate::support::db::TestDb;

/// The first consumer of most tests.
const BILLING: &str = r#"select fencepost.declare_consumer('billing', '{"kind": "http", "url": "http://127.0.0.1/"}')"#;

/// A database with the consumer `billing`, and a connection to it.
async fn billing() -> (TestDb, Client) {
    let db = TestDb::new().await;
    let client = db.client().await;
    client.batch_execute(BILLING).await.unwrap();
    (db, client)
}

/// The rows of a statement as text: columns joined by `|`, nulls as `-`.
async fn rows(client: &Client, sql: &str) -> Vec<String> {
    let messages = client.simple_query(sql).await.unwrap_or_else(|e| panic!("{sql}: {}", describe(&e)));
    let row = |message| match message {
        SimpleQueryMessage::Row(row) => {
            let columns: Vec<_> = (0..row.len()).map(|n| row.get(n).unwrap_or("-").to_string()).collect();
            Some(columns.join("|"))
        }
        _ => None,
    };
    messages.into_iter().filter_map(row).collect()
}

/// The only row of a statement, as text.
async fn one(client: &Client, sql: &str) -> String {
    let mut rows = rows(client, sql).await;
    assert_eq!(rows.len(), 1, "{sql}: {rows:?}");
    rows.remove(0)
}

/// The SQLSTATE and message with which a statement is refused.
async fn refused(client: &Client, sql: &str) -> (String, String) {
    let error = client.simple_query(sql).await.err().unwrap_or_else(|| panic!("was not refused: {sql}"));
    let db = error.as_db_error().unwrap_or_else(|| panic!("{sql}: {error}"));
    (db.code().code().to_string(), db.message().to_string())
}

/// The SQLSTATE alone.
async fn code(client: &Client, sql: &str) -> String {
    refused(client, sql).await.0
}

fn describe(error: &tokio_postgres::Error) -> String {
    error.as_db_error().map_or_else(|| error.to_string(), |db| format!("{} {}", db.code().code(), db.message()))
}

/// Claims `task` for `owner` and gives the epoch.
async fn claim(client: &Client, task: &str, owner: &str) -> i64 {
    let sql = format!("select lease_epoch from fencepost.claim_tasks('{owner}', task_ids => '{{{task}}}')");
    one(client, &sql).await.parse().unwrap()
}

/// One effect for `billing`.
const EFFECT: &str = r#"[{"consumer": "billing", "payload": 1}]"#;

fn complete(task: &str, epoch: i64, owner: &str) -> String {
    format!("select fencepost.complete_task('{task}', {epoch}, '{owner}', '{EFFECT}')")
}
