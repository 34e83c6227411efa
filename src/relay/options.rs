//! What a relay is told at its start, as a person writes it in the configuration. Every duration here is measured on this
//! machine's monotonic clock; every moment is the database's.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::model::duration;

/// The relay's settings; `Default` is the table of defaults in `docs/architecture.md`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Options {
    /// Shown in `status` and in logs; several relays may share a name.
    pub name: String,
    #[serde(with = "duration::text")]
    pub shard_lease: Duration,
    /// At most a third of `shard_lease`.
    #[serde(with = "duration::text")]
    pub renew_every: Duration,
    pub flight_deliveries: u32,
    pub flight_bytes: u64,
    /// Bytes of payload the relay holds at once, all flights together.
    pub bytes_in_flight: u64,
    /// A thousand deliveries a second over so long, and it takes the doorbell down and looks by the clock.
    #[serde(with = "duration::text")]
    pub awake_after: Duration,
    #[serde(with = "duration::text")]
    pub poll_min: Duration,
    #[serde(with = "duration::text")]
    pub poll_max: Duration,
    /// A delivery without an outcome for so long leaves its flight for the parking lot.
    #[serde(with = "duration::text")]
    pub park_after: Duration,
    #[serde(with = "duration::text")]
    pub shutdown_grace: Duration,
    /// A section of its own, as the next is.
    #[serde(skip)]
    pub retry: RetryOptions,
    #[serde(skip)]
    pub breaker: BreakerOptions,
}

/// The schedule of deliveries in trouble.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RetryOptions {
    /// The wait after the first failure; doubles with each further one.
    #[serde(with = "duration::text")]
    pub base: Duration,
    #[serde(with = "duration::text")]
    pub cap: Duration,
    /// From the first failure: after so long a delivery is `dead`.
    #[serde(with = "duration::text")]
    pub budget: Duration,
    /// Attempts where the consumer refused without a word: 4xx, 501, 505.
    pub short_budget: u32,
    /// How long `in-progress` may be answered before it counts against the budget.
    #[serde(with = "duration::text")]
    pub in_progress_max: Duration,
    /// The longest `Retry-After` that is heeded.
    #[serde(with = "duration::text")]
    pub retry_after_max: Duration,
}

/// When a consumer counts as down. Per relay.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BreakerOptions {
    /// Failures in a row that open it.
    pub consecutive: u32,
    /// It also opens when half of at least so many attempts within `window` failed.
    pub ratio_of: u32,
    #[serde(with = "duration::text")]
    pub window: Duration,
    /// The wait before the first probe; doubles with each probe that fails.
    #[serde(with = "duration::text")]
    pub probe: Duration,
    #[serde(with = "duration::text")]
    pub probe_max: Duration,
}

impl Default for BreakerOptions {
    fn default() -> Self {
        Self {
            consecutive: 10,
            ratio_of: 20,
            window: Duration::from_secs(30),
            probe: Duration::from_secs(5),
            probe_max: Duration::from_secs(120),
        }
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            name: "relay".into(),
            shard_lease: Duration::from_secs(15),
            renew_every: Duration::from_secs(5),
            flight_deliveries: 500,
            flight_bytes: 8 << 20,
            bytes_in_flight: 16 << 20,
            awake_after: Duration::from_millis(50),
            poll_min: Duration::from_millis(5),
            poll_max: Duration::from_millis(500),
            park_after: Duration::from_secs(10),
            shutdown_grace: Duration::from_secs(20),
            retry: RetryOptions::default(),
            breaker: BreakerOptions::default(),
        }
    }
}

impl Default for RetryOptions {
    fn default() -> Self {
        Self {
            base: Duration::from_secs(1),
            cap: Duration::from_secs(600),
            budget: Duration::from_secs(86_400),
            short_budget: 3,
            in_progress_max: Duration::from_secs(900),
            retry_after_max: Duration::from_secs(3_600),
        }
    }
}
