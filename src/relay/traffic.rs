//! How fast producers commit, as the reader sees it.
//!
//! At a moderate rate each commit wakes the reader: nothing waits. In heavy traffic that would be a flight, with a flush the
//! producers wait for as well, and a notification for every commit or two: there the reader looks by the clock, and takes
//! what has gathered.

use std::time::Duration;

use tokio::time::Instant;

/// Deliveries a second from which traffic is heavy.
const HEAVY: f64 = 1_000.0;
/// In heavy traffic the reader pauses so many times as long as it read, and never longer than `PAUSE_MAX`: what reading
/// costs the producers is bounded.
const PAUSE: u32 = 10;
const PAUSE_MAX: Duration = Duration::from_millis(25);

/// Counts over one span after the other.
#[derive(Debug)]
pub struct Traffic {
    span: Duration,
    began: Instant,
    deliveries: usize,
    heavy: bool,
}

impl Traffic {
    pub fn new(span: Duration, now: Instant) -> Self {
        Self { span, began: now, deliveries: 0, heavy: false }
    }

    /// A reading has found so many deliveries. Whether the traffic is heavy.
    pub fn found(&mut self, deliveries: usize, now: Instant) -> bool {
        self.deliveries += deliveries;
        let elapsed = now.saturating_duration_since(self.began);
        if elapsed >= self.span {
            self.heavy = self.deliveries as f64 >= HEAVY * elapsed.as_secs_f64();
            self.began = now;
            self.deliveries = 0;
        }
        self.heavy
    }

    pub fn is_heavy(&self) -> bool {
        self.heavy
    }

    /// How long the reader pauses in heavy traffic, at least `least`, where a reading took so long.
    pub fn pause(took: Duration, least: Duration) -> Duration {
        (PAUSE * took).clamp(least, PAUSE_MAX.max(least))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPAN: Duration = Duration::from_millis(50);

    #[test]
    fn traffic_is_heavy_while_a_span_brings_much() {
        let mut now = Instant::now();
        let mut traffic = Traffic::new(SPAN, now);
        let mut found = |deliveries| {
            now += Duration::from_millis(2);
            traffic.found(deliveries, now)
        };
        // 500 a second, for long.
        assert!((0..100).all(|_| !found(1)));
        // 2,000 a second: heavy from the end of the first span on.
        let heavy: Vec<bool> = (0..50).map(|_| found(4)).collect();
        assert!(!heavy[0] && heavy[49], "{heavy:?}");
        // Nothing comes any more: it is over after a span or two, since the first may have begun before.
        let heavy: Vec<bool> = (0..50).map(|_| found(0)).collect();
        assert!(heavy[0] && !heavy[49], "{heavy:?}");
    }

    #[test]
    fn pauses_are_bounded() {
        let least = Duration::from_millis(5);
        assert_eq!(Traffic::pause(Duration::from_micros(100), least), least);
        assert_eq!(Traffic::pause(Duration::from_micros(800), least), Duration::from_millis(8));
        assert_eq!(Traffic::pause(Duration::from_secs(1), least), PAUSE_MAX);
        assert_eq!(Traffic::pause(Duration::ZERO, Duration::from_millis(40)), Duration::from_millis(40));
    }
}
