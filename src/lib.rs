//! fencepost: a transactional-outbox relay beside PostgreSQL.

pub mod admin;
pub mod bench;
pub mod cli;
pub mod config;
pub mod demo;
pub mod edge;
mod failpoint;
pub mod inbox;
pub mod model;
pub mod producer;
pub mod relay;
pub mod store;
