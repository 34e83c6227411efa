//! The SQLSTATEs of class OB as types.

use std::error::Error as StdError;
use std::fmt;

use tokio_postgres::error::SqlState;

/// What a call was refused for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ErrorKind {
    /// OB001: somebody else holds a newer epoch. Roll back; nothing of this epoch may commit.
    LeaseLost,
    /// OB002: an effect names a consumer nobody declared.
    UnknownConsumer,
    /// OB003: this epoch has completed before. After a COMMIT whose answer was lost: it had committed.
    AlreadyCompleted,
    /// OB004: an effect is malformed; the message names its index and field.
    Malformed,
    /// OB005: a payload, a header or an array is beyond its limit.
    TooLarge,
    /// OB006
    UnknownTask,
    /// OB007: the id exists with other content.
    IdTaken,
    /// Anything else the server refused.
    Refused,
    /// The answer never came: the call, or the transaction around it, may or may not have taken effect.
    Disconnected,
    /// The database holds something this client does not know.
    Unexpected,
}

/// A call that did not do what was asked. The server's own words are its text, the driver's error is its source.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    source: Box<dyn StdError + Send + Sync>,
}

impl Error {
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    pub(super) fn unexpected(source: impl StdError + Send + Sync + 'static) -> Self {
        Self { kind: ErrorKind::Unexpected, source: Box::new(source) }
    }
}

impl From<tokio_postgres::Error> for Error {
    fn from(error: tokio_postgres::Error) -> Self {
        let kind = match error.code().map(SqlState::code) {
            Some("OB001") => ErrorKind::LeaseLost,
            Some("OB002") => ErrorKind::UnknownConsumer,
            Some("OB003") => ErrorKind::AlreadyCompleted,
            Some("OB004") => ErrorKind::Malformed,
            Some("OB005") => ErrorKind::TooLarge,
            Some("OB006") => ErrorKind::UnknownTask,
            Some("OB007") => ErrorKind::IdTaken,
            Some(code) if code.starts_with("08") || code.starts_with("57P") => ErrorKind::Disconnected,
            Some(_) => ErrorKind::Refused,
            None if StdError::source(&error).is_some_and(|s| s.is::<std::io::Error>()) || error.is_closed() => {
                ErrorKind::Disconnected
            }
            None => ErrorKind::Unexpected,
        };
        Self { kind, source: Box::new(error) }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.source.downcast_ref::<tokio_postgres::Error>().and_then(tokio_postgres::Error::as_db_error) {
            Some(db) => {
                write!(f, "{} ({})", db.message(), db.code().code())?;
                db.detail().map_or(Ok(()), |detail| write!(f, "; {detail}"))
            }
            None => self.source.fmt(f),
        }
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        Some(&*self.source)
    }
}
