//! One consumer in trouble, one relay restarted, one mistake of ours: what the others notice of it, which is nothing.
//! Counts and conditions decide, never how long something took.

mod claims;
mod clogged;
mod fairness;
mod lag;
mod left_behind;
mod neighbours;
mod reconciler;
mod restarts;

use tokio_postgres::Client;

use crate::support::eventually;

async fn count(client: &Client, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.unwrap_or_else(|e| panic!("{sql}: {e}")).get(0)
}

async fn counts(client: &Client, sql: &str, wanted: i64) {
    let what = format!("{wanted} = {sql}");
    eventually(&what, async || (count(client, sql).await == wanted).then_some(())).await;
}

/// Facts of one consumer.
fn facts_of(consumer: &str) -> String {
    format!(
        "select count(*) from fencepost.ledger join fencepost.consumers using (consumer_id) where name = '{consumer}'"
    )
}
