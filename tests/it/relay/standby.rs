//! A standby is never read from, and after its promotion nothing is missing.

use fencepost::demo::embedded::postgres::{Durability, PrivatePostgres};
use fencepost::store::session::Session;
use fencepost::store::{Database, Error, schema};
use secrecy::SecretString;
use serde_json::json;
use tokio_postgres::NoTls;

use super::{Relay, all_landed, all_settled, declare, emit_many};
use crate::support::copies::Standby;
use crate::support::eventually;
use crate::support::receiver::Receiver;

#[tokio::test]
async fn a_standby_is_refused_until_it_is_promoted() {
    let mut primary = PrivatePostgres::start(Durability::None).await.unwrap();
    let (mut client, connection) = tokio_postgres::connect(&primary.url("postgres"), NoTls).await.unwrap();
    tokio::spawn(connection);
    schema::migrate(&mut client).await.unwrap();
    let receiver = Receiver::start().await;
    declare(&client, "c", &receiver, json!({})).await;
    let standby = Standby::of(&primary).await;
    let caught_up = async || {
        eventually("the standby has everything", async || {
            let lsn: String = client.query_one("select pg_current_wal_lsn()::text", &[]).await.unwrap().get(0);
            let sql = "select pg_last_wal_replay_lsn() >= $1::text::pg_lsn";
            let there: bool = standby.connect().await.query_one(sql, &[&lsn]).await.unwrap().get(0);
            there.then_some(())
        })
        .await;
    };

    // Nothing is read there: a standby's snapshots lack the transactions in progress.
    emit_many(&client, "c", "x", 40).await;
    caught_up().await;
    let there = Database::new(&SecretString::from(standby.url()), "test").unwrap();
    assert!(matches!(Session::open(&there).await.err(), Some(Error::Standby)));
    let mut relay = Relay::at(&standby.url()).start();
    relay.says("read-only").await;
    relay.kill().await;
    assert_eq!(receiver.requests().len(), 0);

    // A relay that knows both works on the primary, and goes on where it was after the failover, on a new timeline.
    let mut relay = Relay::at(&standby.url_of_whoever_writes()).short_leases().start();
    all_settled(&client, 40).await;
    all_landed(&client).await;
    caught_up().await;
    primary.stop_immediate().await.unwrap();
    relay.says("the database is gone").await;
    let client = standby.connect().await;
    client.query("select pg_promote()", &[]).await.unwrap();
    emit_many(&client, "c", "y", 40).await;
    all_settled(&client, 80).await;
    let tokens = super::tokens(&client).await;
    assert_eq!(tokens["applied"], 80);
    assert!(receiver.requests().len() >= 80);
}
