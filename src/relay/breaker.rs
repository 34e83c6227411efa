//! A consumer's breaker: opens on consecutive failures or on a ratio over a window, half-opens with one real delivery.
//! While it is open nothing is attempted and no budget is spent. Pure: every moment is passed in.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use super::options::BreakerOptions;

#[derive(Debug)]
pub struct Breaker {
    options: BreakerOptions,
    state: State,
    consecutive: u32,
    window: VecDeque<(Instant, Report)>,
}

/// What an attempt says about the consumer's health.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Report {
    /// It answered, whatever it said about the delivery.
    Healthy,
    /// No connection, no answer, or a 5xx without a word.
    Failing,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum State {
    Closed,
    /// Nothing is attempted until then.
    Open {
        until: Instant,
        wait: Duration,
    },
    /// One delivery is out; what comes of it decides.
    Probing {
        wait: Duration,
    },
}

/// Whether an attempt may start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Admission {
    Free,
    /// As the one probe.
    Probe,
    ShutUntil(Instant),
    /// A probe is out.
    Probing,
}

impl Breaker {
    pub fn new(options: BreakerOptions) -> Self {
        Self { options, state: State::Closed, consecutive: 0, window: VecDeque::new() }
    }

    pub fn admission(&self, now: Instant) -> Admission {
        match self.state {
            State::Closed => Admission::Free,
            State::Open { until, .. } if until > now => Admission::ShutUntil(until),
            State::Open { .. } => Admission::Probe,
            State::Probing { .. } => Admission::Probing,
        }
    }

    /// The probe leaves.
    pub fn probe(&mut self) {
        if let State::Open { wait, .. } = self.state {
            self.state = State::Probing { wait };
        }
    }

    /// The probe never left: the breaker waits for the next.
    pub fn probe_withdrawn(&mut self, now: Instant) {
        if let State::Probing { wait } = self.state {
            self.state = State::Open { until: now, wait };
        }
    }

    pub fn report(&mut self, report: Report, now: Instant) {
        self.remember(report, now);
        match (self.state, report) {
            (State::Probing { .. }, Report::Healthy) => self.close(),
            (State::Probing { wait }, Report::Failing) => self.open((wait * 2).min(self.options.probe_max), now),
            (State::Closed, Report::Failing) if self.trips() => self.open(self.options.probe, now),
            // Attempts that left before it opened say nothing new.
            (State::Closed | State::Open { .. }, _) => {}
        }
    }

    pub fn is_open(&self) -> bool {
        self.state != State::Closed
    }

    fn remember(&mut self, report: Report, now: Instant) {
        self.consecutive = match report {
            Report::Healthy => 0,
            Report::Failing => self.consecutive.saturating_add(1),
        };
        self.window.push_back((now, report));
        let window = self.options.window;
        while self.window.front().is_some_and(|(at, _)| now.duration_since(*at) > window) || self.window.len() > 10_000
        {
            self.window.pop_front();
        }
    }

    fn trips(&self) -> bool {
        let failed = self.window.iter().filter(|(_, report)| *report == Report::Failing).count();
        self.consecutive >= self.options.consecutive
            || (self.window.len() >= self.options.ratio_of as usize && failed * 2 >= self.window.len())
    }

    fn open(&mut self, wait: Duration, now: Instant) {
        self.state = State::Open { until: now + wait, wait };
        self.window.clear();
    }

    fn close(&mut self) {
        self.state = State::Closed;
        self.consecutive = 0;
        self.window.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn breaker() -> Breaker {
        Breaker::new(BreakerOptions::default())
    }

    fn fail(breaker: &mut Breaker, times: u32, now: Instant) {
        (0..times).for_each(|_| breaker.report(Report::Failing, now));
    }

    #[test]
    fn ten_failures_in_a_row_open_it_nine_do_not() {
        let now = Instant::now();
        let mut breaker = breaker();
        fail(&mut breaker, 9, now);
        assert_eq!(breaker.admission(now), Admission::Free);
        breaker.report(Report::Healthy, now);
        fail(&mut breaker, 9, now);
        assert_eq!(breaker.admission(now), Admission::Free, "a success in between starts the count anew");
        fail(&mut breaker, 1, now);
        assert_eq!(breaker.admission(now), Admission::ShutUntil(now + Duration::from_secs(5)));
    }

    #[test]
    fn half_of_twenty_within_the_window_open_it() {
        let start = Instant::now();
        let mut breaker = breaker();
        for n in 0..19u64 {
            let report = if n % 2 == 0 { Report::Failing } else { Report::Healthy };
            breaker.report(report, start + Duration::from_secs(n));
        }
        let now = start + Duration::from_secs(19);
        assert_eq!(breaker.admission(now), Admission::Free, "nineteen are too few to tell");
        breaker.report(Report::Failing, now);
        assert!(breaker.is_open());
    }

    #[test]
    fn what_is_older_than_the_window_does_not_count() {
        let start = Instant::now();
        let mut breaker = breaker();
        for n in 0..8u64 {
            breaker.report(Report::Failing, start + Duration::from_millis(n));
        }
        let later = start + Duration::from_secs(31);
        for n in 0..20u64 {
            let report = if n % 4 == 3 { Report::Failing } else { Report::Healthy };
            breaker.report(report, later + Duration::from_millis(n));
        }
        assert!(!breaker.is_open());
    }

    #[test]
    fn one_probe_at_a_time_and_each_failure_doubles_the_wait() {
        let mut now = Instant::now();
        let mut breaker = breaker();
        fail(&mut breaker, 10, now);
        let mut waits = Vec::new();
        for _ in 0..7 {
            let Admission::ShutUntil(until) = breaker.admission(now) else { panic!("open") };
            waits.push((until - now).as_secs());
            now = until;
            assert_eq!(breaker.admission(now), Admission::Probe);
            breaker.probe();
            assert_eq!(breaker.admission(now), Admission::Probing);
            breaker.report(Report::Failing, now);
        }
        assert_eq!(waits, [5, 10, 20, 40, 80, 120, 120]);
    }

    #[test]
    fn a_probe_that_succeeds_closes_it() {
        let now = Instant::now();
        let mut breaker = breaker();
        fail(&mut breaker, 10, now);
        let later = now + Duration::from_secs(5);
        breaker.probe();
        breaker.report(Report::Healthy, later);
        assert_eq!(breaker.admission(later), Admission::Free);
        fail(&mut breaker, 9, later);
        assert_eq!(breaker.admission(later), Admission::Free);
    }

    #[test]
    fn late_answers_do_not_prolong_it() {
        let now = Instant::now();
        let mut breaker = breaker();
        fail(&mut breaker, 10, now);
        let later = now + Duration::from_secs(4);
        fail(&mut breaker, 20, later);
        assert_eq!(breaker.admission(later), Admission::ShutUntil(now + Duration::from_secs(5)));
    }
}
