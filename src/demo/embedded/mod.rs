//! Private servers for the demo and the tests: found or installed, started in a folder of their own, and gone with the
//! process that started them, also when that is killed. Nothing here knows what runs on them.

pub mod guardian;
mod install;
pub mod postgres;
pub mod rabbitmq;

use std::path::PathBuf;

pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Something has to be installed by hand; `line` is what to type.
    #[error("{what}\n  {line}")]
    Missing { what: String, line: String },
    #[error("{what}")]
    Io { what: String, source: std::io::Error },
    /// A program of the server's ended badly; `output` is the end of what it said.
    #[error("{what}:\n{output}")]
    Program { what: String, output: String },
    #[error("{}: no PostgreSQL 14 or later (FENCEPOST_PG_BIN names a folder with initdb and postgres)", .0.display())]
    NotAServer(PathBuf),
    #[error("{}: no RabbitMQ (FENCEPOST_RABBITMQ_BIN names a folder with rabbitmq-server and rabbitmqctl)", .0.display())]
    NotABroker(PathBuf),
    #[error("the private PostgreSQL")]
    Postgres(#[from] tokio_postgres::Error),
}

impl Error {
    fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}
