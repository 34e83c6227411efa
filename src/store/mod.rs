//! Everything that is said to PostgreSQL, and nothing else. SQL lives beside the function that runs it and begins with
//! `-- store::<name>`, so that it is recognised in `pg_stat_activity`. All times and all decisions about time are the
//! database's. Only `store` knows SQL; it knows `model` and nobody above it.

pub mod ahead;
pub mod alarms;
pub mod audit;
pub mod consumers;
pub mod database;
pub mod doorbell;
pub mod early;
pub mod effects;
pub mod expiry;
pub mod flights;
pub mod gates;
pub mod history;
pub mod inspect;
pub mod interventions;
pub mod lags;
pub mod log;
mod lost;
pub mod overdue;
pub mod pages;
pub mod parking;
pub mod proof;
pub mod rebase;
pub mod reconcile;
pub mod relays;
pub mod replies;
pub mod retention;
pub mod schema;
pub mod segments;
pub mod session;
pub mod settle;
pub mod shards;
pub mod tasks;

pub use database::{Database, Error, Result};
