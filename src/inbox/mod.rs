//! The consumer kit: dedup and fence in the transaction that makes the effect, and the words to answer with.
//!
//! A consumer installs a few tables into a schema of its own database, opens a transaction per delivery, asks
//! [`Inbox::apply`], makes its effect if (and only if) the verdict is [`Verdict::Applied`], commits, and then sends
//! the verdict's status and `Outbox-Ack` header. It needs nothing else of fencepost and no access to its database.
//!
//! Concurrency: of two simultaneous deliveries of one key the second is told [`Verdict::InProgress`] at once (409, the
//! relay comes again without spending its budget); nobody waits, and no connection is held by a duplicate. Two effects
//! of one *task* do wait for each other, so that an old epoch cannot slip past a newer one that is about to commit. Run
//! at READ COMMITTED, PostgreSQL's default; above it a race ends with a serialization failure instead of a verdict,
//! which is safe (roll back and answer 503) but slower.

mod verdict;

use std::time::Duration;

use sha2::{Digest, Sha256};
use tokio_postgres::types::Type;
use tokio_postgres::{GenericClient, Transaction};

use crate::model::key::EffectKey;

pub use verdict::{Answer, Verdict};

const SCHEMA: &str = include_str!("schema.sql");

/// One service's memory of the keys it applied.
#[derive(Clone, Debug)]
pub struct Inbox {
    schema: String,
    scope: String,
    retain: Option<Duration>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("an inbox's schema is 1 to 63 characters of a-z 0-9 _, not starting with a digit, not {0:?}")]
    Schema(String),
    #[error("the inbox's database")]
    Postgres(#[from] tokio_postgres::Error),
    /// The installed function is not this build's.
    #[error("the inbox said {0:?}, which is no verdict: install its schema again")]
    Unknown(String),
}

impl Inbox {
    /// An inbox in `schema` (usual: `inbox`) for `scope`: the name under which this service knows the fencepost database
    /// that sends to it. Edges that lead to the same service share a scope: an effect has the same key on each of them.
    pub fn new(schema: &str, scope: &str) -> Result<Self, Error> {
        let form = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_';
        let digit_first = schema.as_bytes().first().is_none_or(u8::is_ascii_digit);
        if digit_first || schema.len() > 63 || !schema.bytes().all(form) {
            return Err(Error::Schema(schema.into()));
        }
        Ok(Self { schema: schema.into(), scope: scope.into(), retain: None })
    }

    /// How long a key is remembered at least, told to the relay with every answer: past it, a delivery that may have
    /// been applied goes to an operator instead of being sent again. [`Inbox::prune`] keeps to it.
    pub fn retaining(mut self, retain: Duration) -> Self {
        self.retain = Some(retain);
        self
    }

    /// The tables and functions, for a migration of the consumer's own. May be run again.
    pub fn sql(&self) -> String {
        SCHEMA.replace("{schema}", &format!("\"{}\"", self.schema))
    }

    /// Creates what is missing.
    pub async fn install(&self, client: &impl GenericClient) -> Result<(), Error> {
        Ok(client.batch_execute(&self.sql()).await?)
    }

    /// Decides about one delivery, inside the transaction that will make its effect. `body` is the request's body.
    ///
    /// Send the answer only after the transaction committed. Where the commit fails, answer with a 5xx: the relay
    /// comes again with the same key.
    pub async fn apply(&self, tx: &Transaction<'_>, key: &EffectKey, body: &[u8]) -> Result<Verdict, Error> {
        let sql = format!("-- inbox::apply\nselect verdict, current from \"{}\".apply($1, $2, $3)", self.schema);
        let digest = Sha256::digest(body).to_vec();
        let rows = tx
            .query_typed(&sql, &[(&self.scope, Type::TEXT), (&key.to_string(), Type::TEXT), (&digest, Type::BYTEA)])
            .await?;
        let said = rows.first().map(|row| (row.get::<_, String>(0), row.get::<_, Option<i64>>(1)));
        match said {
            Some((word, current)) => Verdict::read(&word, current).ok_or(Error::Unknown(word)),
            None => Err(Error::Unknown(String::new())),
        }
    }

    /// What to send once the transaction of [`Inbox::apply`] committed.
    pub fn answer(&self, verdict: Verdict, key: &EffectKey) -> Answer {
        Answer::new(verdict, key, self.retain)
    }

    /// Forgets keys and epochs older than [`Inbox::retaining`]; without it, nothing. Returns the keys forgotten.
    ///
    /// Choose it longer than the relay keeps trying (its retention, 7 days by default): what comes later than that is
    /// not recognised any more.
    pub async fn prune(&self, client: &impl GenericClient) -> Result<i64, Error> {
        let Some(retain) = self.retain else { return Ok(0) };
        let sql = format!("-- inbox::prune\nselect \"{}\".prune(make_interval(secs => $1))", self.schema);
        Ok(client.query_one(&sql, &[&retain.as_secs_f64()]).await?.get(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schema_is_a_plain_name() {
        for bad in ["", "1a", "a b", "a\"b", "A", &"x".repeat(64)] {
            assert!(Inbox::new(bad, "s").is_err(), "{bad:?}");
        }
        assert!(Inbox::new("inbox_2", "s").unwrap().sql().contains("create schema if not exists \"inbox_2\""));
    }
}
