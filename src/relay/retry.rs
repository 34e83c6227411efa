//! When a delivery in trouble is tried again: a pure function of the attempt and the hint.

use std::time::Duration;

use super::options::RetryOptions;

/// The wait before the next attempt, after `failures` failed ones (from 1).
///
/// `base` doubled with each failure up to `cap`, then full jitter upwards: between one and two times that, so that a
/// consumer's `Retry-After` is never undercut. `jitter` is in 0..1. The hint, capped, is a floor.
pub fn delay(options: &RetryOptions, failures: u32, hint: Option<Duration>, jitter: f64) -> Duration {
    let doubled = options.base.saturating_mul(1u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX));
    let backoff = doubled.min(options.cap);
    let floor = hint.unwrap_or_default().min(options.retry_after_max);
    backoff.max(floor).mul_f64(1.0 + jitter.clamp(0.0, 1.0))
}

/// A connection's wait before it is tried again; a Rust clock is right here, since nothing is scheduled by it.
pub fn reconnect() -> backoff::ExponentialBackoff {
    backoff::ExponentialBackoffBuilder::new()
        .with_initial_interval(Duration::from_millis(100))
        .with_max_interval(Duration::from_secs(5))
        .with_max_elapsed_time(None)
        .build()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn options() -> RetryOptions {
        RetryOptions { base: Duration::from_secs(1), cap: Duration::from_secs(600), ..RetryOptions::default() }
    }

    #[test]
    fn doubles_from_the_base_to_the_cap() {
        let waits: Vec<u64> = (1..=12).map(|n| delay(&options(), n, None, 0.0).as_secs()).collect();
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600]);
        assert_eq!(delay(&options(), 3, None, 1.0), Duration::from_secs(8));
        assert_eq!(delay(&options(), 3, None, 0.5), Duration::from_secs(6));
    }

    #[test]
    fn the_hint_is_a_capped_floor() {
        let hint = |seconds| delay(&options(), 1, Some(Duration::from_secs(seconds)), 0.0).as_secs();
        assert_eq!(hint(0), 1);
        assert_eq!(hint(120), 120);
        assert_eq!(hint(1_000_000), 3_600);
    }

    proptest! {
        #[test]
        fn stays_between_the_floor_and_twice_the_most(failures in 1u32.., hint in proptest::option::of(0u64..100_000), jitter in 0.0f64..1.0) {
            let hint = hint.map(Duration::from_secs);
            let wait = delay(&options(), failures, hint, jitter);
            prop_assert!(wait >= options().base);
            prop_assert!(wait >= hint.unwrap_or_default().min(options().retry_after_max));
            prop_assert!(wait <= options().retry_after_max * 2);
        }

        #[test]
        fn never_shrinks_with_more_failures(failures in 1u32..1000, jitter in 0.0f64..1.0) {
            prop_assert!(delay(&options(), failures, None, jitter) <= delay(&options(), failures + 1, None, jitter));
        }
    }
}
