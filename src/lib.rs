//! fencepost: a transactional-outbox relay beside PostgreSQL.

pub mod model;
pub mod store;
