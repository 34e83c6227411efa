//! A consumer's gate: whether one more attempt may start now. Breaker, pause, `Retry-After` floor, rate and
//! concurrency; no I/O.

use std::num::NonZeroU32;
use std::time::Duration;

use tokio::time::Instant;

use super::breaker::{Admission, Breaker, Report};
use super::options::BreakerOptions;

/// Fresh work and retries have shares of their own, so that neither starves the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    Fresh,
    Retry,
}

/// Why the gate is shut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shut {
    Paused,
    /// Until the moment the consumer named.
    NotBefore(Instant),
    /// The breaker is open, until its next probe.
    Broken(Instant),
    /// Until the next token of the rate.
    Rate(Instant),
    /// Until an attempt of this class ends.
    Full,
}

#[derive(Debug)]
pub struct Gate {
    concurrency: NonZeroU32,
    rate: Option<Bucket>,
    paused: bool,
    not_before: Option<Instant>,
    breaker: Breaker,
    fresh: u32,
    retries: u32,
}

/// A token bucket that holds a tenth of a second's worth, at least one.
#[derive(Debug)]
struct Bucket {
    per_second: NonZeroU32,
    tokens: f64,
    filled: Instant,
}

impl Gate {
    pub fn new(concurrency: NonZeroU32, rate: Option<NonZeroU32>, breaker: BreakerOptions, now: Instant) -> Self {
        let breaker = Breaker::new(breaker);
        let mut gate = Self { concurrency, rate: None, paused: false, not_before: None, breaker, fresh: 0, retries: 0 };
        gate.set_limits(concurrency, rate, now);
        gate
    }

    pub fn set_limits(&mut self, concurrency: NonZeroU32, rate: Option<NonZeroU32>, now: Instant) {
        self.concurrency = concurrency;
        if rate != self.rate.as_ref().map(|bucket| bucket.per_second) {
            self.rate = rate.map(|per_second| Bucket { per_second, tokens: 1.0, filled: now });
        }
    }

    pub fn pause(&mut self) {
        self.paused = true;
    }

    pub fn resume(&mut self) {
        self.paused = false;
    }

    /// The consumer's floor. A later one replaces an earlier one, never the other way round.
    pub fn not_before(&mut self, moment: Instant) {
        self.not_before = Some(self.not_before.map_or(moment, |known| known.max(moment)));
    }

    /// The floor as the database has it: an operator may have lifted it.
    pub fn set_not_before(&mut self, moment: Option<Instant>) {
        self.not_before = moment;
    }

    pub fn in_flight(&self) -> u32 {
        self.fresh + self.retries
    }

    /// Whether nothing but time or an operator can open it: what comes meanwhile had better be parked.
    pub fn is_shut_for(&self, longer_than: Duration, now: Instant) -> bool {
        let broken = matches!(self.breaker.admission(now), Admission::ShutUntil(moment) if moment > now + longer_than);
        self.paused || broken || self.not_before.is_some_and(|moment| moment > now + longer_than)
    }

    /// Takes a place for one attempt. `competing` tells whether the other class has work waiting.
    pub fn enter(&mut self, class: Class, competing: Competing, now: Instant) -> Result<(), Shut> {
        if self.paused {
            return Err(Shut::Paused);
        }
        if let Some(moment) = self.not_before.filter(|moment| *moment > now) {
            return Err(Shut::NotBefore(moment));
        }
        let admission = self.breaker.admission(now);
        match admission {
            Admission::Free | Admission::Probe => {}
            Admission::ShutUntil(moment) => return Err(Shut::Broken(moment)),
            Admission::Probing => return Err(Shut::Full),
        }
        let limit = self.concurrency.get();
        let share = match (class, competing) {
            (Class::Retry, Competing::Yes) => (limit / 4).max(1),
            (Class::Fresh, Competing::Yes) if limit > 1 => limit - (limit / 4).max(1),
            _ => limit,
        };
        let taken = match class {
            Class::Fresh => self.fresh,
            Class::Retry => self.retries,
        };
        if taken >= share || self.in_flight() >= limit {
            return Err(Shut::Full);
        }
        if let Some(bucket) = &mut self.rate {
            bucket.take(now)?;
        }
        if admission == Admission::Probe {
            self.breaker.probe();
        }
        match class {
            Class::Fresh => self.fresh += 1,
            Class::Retry => self.retries += 1,
        }
        Ok(())
    }

    /// The attempt came back and says so much about the consumer.
    pub fn report(&mut self, report: Report, now: Instant) {
        self.breaker.report(report, now);
    }

    /// The attempt never left.
    pub fn withdrawn(&mut self, now: Instant) {
        self.breaker.probe_withdrawn(now);
    }

    pub fn is_broken(&self) -> bool {
        self.breaker.is_open()
    }

    /// Gives the place back.
    pub fn leave(&mut self, class: Class) {
        match class {
            Class::Fresh => self.fresh = self.fresh.saturating_sub(1),
            Class::Retry => self.retries = self.retries.saturating_sub(1),
        }
    }
}

/// Whether the other class has work waiting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Competing {
    Yes,
    No,
}

impl Bucket {
    fn take(&mut self, now: Instant) -> Result<(), Shut> {
        let rate = f64::from(self.per_second.get());
        let depth = (rate / 10.0).max(1.0);
        self.tokens = (self.tokens + now.duration_since(self.filled).as_secs_f64() * rate).min(depth);
        self.filled = now;
        if self.tokens >= 1.0 - 1e-9 {
            self.tokens -= 1.0;
            return Ok(());
        }
        Err(Shut::Rate(now + Duration::from_secs_f64((1.0 - self.tokens) / rate)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gate(concurrency: u32, rate: Option<u32>, now: Instant) -> Gate {
        Gate::new(NonZeroU32::new(concurrency).unwrap(), rate.and_then(NonZeroU32::new), BreakerOptions::default(), now)
    }

    fn entered(gate: &mut Gate, class: Class, competing: Competing, now: Instant) -> usize {
        (0..100).filter(|_| gate.enter(class, competing, now).is_ok()).count()
    }

    #[test]
    fn concurrency_is_exact() {
        let now = Instant::now();
        let mut gate = gate(3, None, now);
        assert_eq!(entered(&mut gate, Class::Fresh, Competing::No, now), 3);
        assert_eq!(gate.enter(Class::Fresh, Competing::No, now), Err(Shut::Full));
        gate.leave(Class::Fresh);
        assert_eq!(gate.enter(Class::Fresh, Competing::No, now), Ok(()));
    }

    #[test]
    fn neither_class_starves_the_other() {
        let now = Instant::now();
        let mut gate = gate(8, None, now);
        assert_eq!(entered(&mut gate, Class::Retry, Competing::Yes, now), 2);
        assert_eq!(entered(&mut gate, Class::Fresh, Competing::Yes, now), 6);
    }

    #[test]
    fn alone_each_class_has_everything() {
        let now = Instant::now();
        let mut eight = gate(8, None, now);
        assert_eq!(entered(&mut eight, Class::Retry, Competing::No, now), 8);
        let mut one = gate(1, None, now);
        assert_eq!(one.enter(Class::Fresh, Competing::Yes, now), Ok(()), "a single place goes to whoever comes");
    }

    #[test]
    fn the_rate_is_kept_exactly() {
        let start = Instant::now();
        let mut now = start;
        let mut gate = gate(1_000, Some(50), now);
        let mut sent = 0;
        while now < start + Duration::from_secs(10) {
            match gate.enter(Class::Fresh, Competing::No, now) {
                Ok(()) => sent += 1,
                Err(Shut::Rate(moment)) => now = moment,
                Err(other) => panic!("{other:?}"),
            }
            gate.leave(Class::Fresh);
        }
        assert!((500..=501).contains(&sent), "{sent}");
        now += Duration::from_secs(3_600);
        assert_eq!(
            entered(&mut gate, Class::Fresh, Competing::No, now),
            5,
            "a pause saves up a tenth of a second's worth"
        );
    }

    #[test]
    fn a_floor_only_rises_until_it_passes() {
        let now = Instant::now();
        let mut gate = gate(1, None, now);
        let later = now + Duration::from_secs(60);
        gate.not_before(later);
        gate.not_before(now + Duration::from_secs(1));
        assert_eq!(gate.enter(Class::Fresh, Competing::No, now), Err(Shut::NotBefore(later)));
        assert_eq!(gate.enter(Class::Fresh, Competing::No, later), Ok(()));
    }

    #[test]
    fn behind_an_open_breaker_one_probe_goes() {
        let now = Instant::now();
        let mut gate = gate(8, None, now);
        (0..10).for_each(|_| gate.report(Report::Failing, now));
        let probe_at = now + Duration::from_secs(5);
        assert_eq!(gate.enter(Class::Fresh, Competing::No, now), Err(Shut::Broken(probe_at)));
        assert_eq!(entered(&mut gate, Class::Fresh, Competing::No, probe_at), 1);
        gate.report(Report::Healthy, probe_at);
        assert_eq!(entered(&mut gate, Class::Fresh, Competing::No, probe_at), 7);
    }

    #[test]
    fn paused_means_nothing_starts() {
        let now = Instant::now();
        let mut gate = gate(1, None, now);
        gate.pause();
        assert_eq!(gate.enter(Class::Fresh, Competing::No, now), Err(Shut::Paused));
        assert!(gate.is_shut_for(Duration::from_secs(1), now));
        gate.resume();
        assert_eq!(gate.enter(Class::Fresh, Competing::No, now), Ok(()));
    }
}
