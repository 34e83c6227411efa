//! How fast producers commit, as the reader sees it.
//!
//! At a moderate rate each commit wakes the reader: nothing waits. In heavy traffic that would be a flight, with a flush the
//! producers wait for as well, and a notification for every commit or two, and the reader would do little else: there it
//! looks by the clock, and takes what has gathered. What is heavy depends on how long a reading takes here.

use std::time::Duration;

use tokio::time::Instant;

/// Traffic is heavy where reading each delivery for itself would take this share of the time.
const HEAVY: f64 = 1.0 / 3.0;
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
    /// The least that a reading which found something took.
    shortest: Option<Duration>,
    heavy: bool,
}

impl Traffic {
    pub fn new(span: Duration, now: Instant) -> Self {
        Self { span, began: now, deliveries: 0, shortest: None, heavy: false }
    }

    /// A reading has found so many deliveries, and took so long. Whether the traffic is heavy.
    pub fn found(&mut self, deliveries: usize, took: Duration, now: Instant) -> bool {
        if deliveries > 0 {
            self.deliveries += deliveries;
            self.shortest = Some(self.shortest.map_or(took, |shortest| shortest.min(took)));
        }
        let elapsed = now.saturating_duration_since(self.began);
        if elapsed >= self.span {
            let each = self.shortest.unwrap_or_default();
            self.heavy = self.deliveries as f64 * each.as_secs_f64() >= HEAVY * elapsed.as_secs_f64();
            *self = Self { heavy: self.heavy, ..Self::new(self.span, now) };
        }
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

    /// Whether traffic was heavy after each of the readings, two milliseconds apart.
    fn heavy(traffic: &mut Traffic, now: &mut Instant, readings: &[(usize, Duration)]) -> Vec<bool> {
        let one = |(deliveries, took): &(usize, Duration)| {
            *now += Duration::from_millis(2);
            traffic.found(*deliveries, *took, *now)
        };
        readings.iter().map(one).collect()
    }

    #[test]
    fn traffic_is_heavy_while_a_span_brings_more_than_could_be_read_one_by_one() {
        let mut now = Instant::now();
        let mut traffic = Traffic::new(SPAN, now);
        let quick = Duration::from_micros(300);
        // 500 a second, for long.
        assert!(heavy(&mut traffic, &mut now, &[(1, quick); 100]).iter().all(|heavy| !heavy));
        // 2,000 a second: heavy from the end of the first span on.
        let seen = heavy(&mut traffic, &mut now, &[(4, quick); 50]);
        assert!(!seen[0] && seen[49], "{seen:?}");
        // Nothing comes any more: it is over after a span or two, since the first may have begun before.
        let seen = heavy(&mut traffic, &mut now, &[(0, quick); 50]);
        assert!(seen[0] && !seen[49], "{seen:?}");
        // Where a reading takes longer, 500 a second are heavy.
        let seen = heavy(&mut traffic, &mut now, &[(1, Duration::from_millis(1)); 100]);
        assert!(seen[99], "{seen:?}");
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
