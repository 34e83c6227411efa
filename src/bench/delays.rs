//! Delays and their percentiles.

use std::time::Duration;

/// Delays, sorted.
pub struct Delays(Vec<Duration>);

impl Delays {
    pub fn new(mut delays: Vec<Duration>) -> Self {
        delays.sort_unstable();
        Self(delays)
    }

    /// The delay that `share` of all stay within, in milliseconds.
    pub fn at(&self, share: f64) -> f64 {
        let last = self.0.len().saturating_sub(1);
        let index = (self.0.len() as f64 * share).ceil() as usize;
        self.0.get(index.saturating_sub(1).min(last)).map_or(0.0, |delay| delay.as_secs_f64() * 1e3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_delays_that_occurred() {
        let delays = Delays::new((1..=100).rev().map(Duration::from_millis).collect());
        assert_eq!((delays.at(0.5), delays.at(0.99), delays.at(1.0)), (50.0, 99.0, 100.0));
        assert_eq!(Delays::new(Vec::new()).at(0.5), 0.0);
    }
}
