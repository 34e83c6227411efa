//! fencepost: a transactional-outbox relay beside PostgreSQL.

pub mod cli;
pub mod config;
pub mod demo;
pub mod edge;
pub mod inbox;
pub mod model;
pub mod relay;
pub mod store;
