//! The integration tests, one binary. Each talks to a real PostgreSQL: the one in FENCEPOST_TEST_DATABASE_URL (set by
//! `make test`), else a private one that starts with the first test that needs it and ends with the process.

mod support;

mod amqp;
mod cli;
mod compose;
mod demo;
mod docs;
mod embedded;
mod examples;
mod http;
mod inbox;
mod isolation;
mod keep;
mod producer;
mod readme;
mod relay;
mod sql;
mod truth;
