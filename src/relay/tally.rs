//! Counting attempts by how they ended. A counter is looked up once: by its labels that costs more than counting.

use std::collections::HashMap;

use metrics::Counter;

use crate::model::token::AttemptToken;

/// The attempts at one consumer.
#[derive(Default)]
pub struct Tally(HashMap<AttemptToken, Counter>);

impl Tally {
    pub fn count(&mut self, consumer: &str, token: AttemptToken) {
        let counter = self.0.entry(token).or_insert_with(|| {
            metrics::counter!("fencepost_attempts_total", "consumer" => consumer.to_string(), "token" => token.as_str())
        });
        counter.increment(1);
    }
}
