//! What a consumer said about itself as a whole, on its way to the state that all relays share.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use deadpool_postgres::Pool;
use tokio::time::Instant;

use super::settle::Signal;
use crate::edge::error::report;
use crate::model::key::ConsumerId;
use crate::store::{Error, Result, gates};

const REPEAT_AFTER: Duration = Duration::from_secs(1);

/// The words of one consumer. What was read of the shared state before a word was written there does not know it, and
/// must not open the gate again.
#[derive(Clone, Debug, Default)]
pub struct Words(Arc<Mutex<Written>>);

#[derive(Debug, Default)]
struct Written {
    under_way: u32,
    last: Option<Instant>,
}

impl Words {
    /// Writes a word down, however long it takes.
    pub fn pass_on(&self, pool: Pool, consumer: ConsumerId, word: Signal) {
        self.state().under_way += 1;
        let words = self.clone();
        let heard = Instant::now();
        tokio::spawn(async move {
            while let Err(error) = write(&pool, consumer, word, heard).await {
                tracing::warn!(error = %report(&error), "what a consumer said of itself could not be written yet");
                tokio::time::sleep(REPEAT_AFTER).await;
            }
            let mut state = words.state();
            state.under_way -= 1;
            state.last = Some(Instant::now());
        });
    }

    /// Whether a reading that began at `asked` knows every word.
    pub fn known_to(&self, asked: Instant) -> bool {
        let state = self.state();
        state.under_way == 0 && state.last.is_none_or(|written| written < asked)
    }

    fn state(&self) -> MutexGuard<'_, Written> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn write(pool: &Pool, consumer: ConsumerId, word: Signal, heard: Instant) -> Result<()> {
    let client = pool.get().await.map_err(Error::from)?;
    match word {
        Signal::Gone => gates::pause(&client, consumer, "the consumer answered 410 Gone").await,
        Signal::NotBefore(wait) => gates::not_before(&client, consumer, wait.saturating_sub(heard.elapsed())).await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reading_older_than_a_word_does_not_know_it() {
        let words = Words::default();
        let before = Instant::now();
        assert!(words.known_to(before));
        words.state().under_way = 1;
        assert!(!words.known_to(Instant::now()));
        *words.state() = Written { under_way: 0, last: Some(Instant::now()) };
        assert!(!words.known_to(before));
        assert!(words.known_to(Instant::now() + Duration::from_millis(1)));
    }
}
