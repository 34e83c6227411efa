//! What follows from an attempt's outcome: a pure decision by the edge's contract (contract, sections 4 and 5).

use std::time::Duration;

use super::options::RetryOptions;
use super::retry;
use crate::model::consumer::{AckMode, Contract, OnAmbiguous};
use crate::model::outcome::{AckReading, End, Outcome};
use crate::model::token::{Ack, AttemptToken, Fact, Waiting};
use crate::mutant::{self, Mutant};
use crate::store::parking::Trouble;
use crate::store::settle::{Moment, Parking};

/// What an attempt came to.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    pub attempt: AttemptToken,
    pub next: Next,
    pub signal: Option<Signal>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Next {
    /// The delivery has ended.
    Fact {
        fact: Fact,
        /// An earlier attempt is unresolved, and this fact does not resolve it.
        doubt: bool,
    },
    Park(Parking),
}

/// What an attempt says about the whole consumer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// 410: nothing more is sent until an operator resumes it.
    Gone,
    NotBefore(Duration),
}

/// What the decision depends on besides the outcome.
#[derive(Clone, Copy, Debug)]
pub struct Circumstances<'a> {
    pub contract: Contract,
    pub definite_statuses: &'a [u16],
    /// How long a confirmed message may go without the consumer's word.
    pub ack_timeout: Duration,
    /// Before this attempt.
    pub trouble: &'a Trouble,
    pub retry: &'a RetryOptions,
    /// In 0..1.
    pub jitter: f64,
}

/// The classes the answers fall into, once status and token are weighed.
enum Class {
    Fact(Fact),
    NotDelivered,
    /// Nothing was tried: the way is shut for everybody.
    Shut,
    Unroutable,
    Throttled,
    Refused,
    Gone,
    NotApplied,
    InProgress,
    Ambiguous,
    /// The broker has it, the consumer's word is still needed.
    Unacked,
}

/// Decides what an outcome means. The token decides, the status is for proxies (contract, section 4).
pub fn decide(outcome: &Outcome, at: Circumstances<'_>) -> Decision {
    let (class, retain) = classify(outcome, at);
    let hint = outcome.retry_after.map(|hint| hint.min(at.retry.retry_after_max));
    let trouble = at.trouble;
    let in_doubt = trouble.in_doubt_for.is_some();
    let failures = trouble.attempts + 1;
    let why = reason(outcome);

    let mut parking = Parking {
        state: Waiting::Retry,
        due_in: Some(retry::delay(at.retry, failures, hint, at.jitter)),
        reason: why,
        refusals: trouble.refusals,
        first_failed: Moment::Set,
        first_doubt: Moment::Keep,
        in_progress: Moment::Clear,
        retain,
    };
    let spent = trouble.failing_for.is_some_and(|age| age >= at.retry.budget);
    let attempt = match class {
        Class::Fact(fact) => {
            let resolves = matches!(fact, Fact::Applied | Fact::Duplicate);
            let attempt = attempt_token(fact);
            return Decision { attempt, next: Next::Fact { fact, doubt: in_doubt && !resolves }, signal: None };
        }
        Class::NotDelivered => {
            spend(&mut parking, spent);
            AttemptToken::NotDelivered
        }
        Class::Shut => {
            parking.first_failed = Moment::Keep;
            parking.due_in = Some(retry::delay(at.retry, 1, hint, at.jitter));
            AttemptToken::NotDelivered
        }
        Class::Unroutable => {
            spend(&mut parking, spent);
            AttemptToken::Unroutable
        }
        Class::Throttled => {
            spend(&mut parking, spent);
            AttemptToken::Throttled
        }
        Class::NotApplied => {
            parking.first_doubt = Moment::Clear;
            spend(&mut parking, spent);
            AttemptToken::NotApplied
        }
        Class::Refused => {
            parking.refusals += 1;
            let refused = parking.refusals >= at.retry.short_budget;
            spend(&mut parking, spent || refused);
            AttemptToken::Refused
        }
        Class::Gone => {
            parking.state = Waiting::Backlog;
            parking.due_in = Some(Duration::ZERO);
            parking.first_failed = Moment::Keep;
            AttemptToken::Refused
        }
        Class::InProgress => {
            parking.in_progress = Moment::Set;
            match trouble.in_progress_for {
                // The consumer has said so for too long: what the first one did is not known.
                Some(age) if age >= at.retry.in_progress_max => doubt(&mut parking, at.contract, spent),
                _ => {
                    parking.first_failed = Moment::Keep;
                    // The longer it lasts, the more rarely it is asked: about twenty times in a quarter of an hour.
                    let rest = trouble.in_progress_for.unwrap_or_default() / 4;
                    parking.due_in = Some(retry::delay(at.retry, 1, hint.max(Some(rest)), at.jitter));
                }
            }
            AttemptToken::InProgress
        }
        Class::Ambiguous => {
            doubt(&mut parking, at.contract, spent);
            AttemptToken::Ambiguous
        }
        Class::Unacked => {
            parking.state = Waiting::Unacked;
            parking.due_in = Some(at.ack_timeout);
            parking.first_failed = Moment::Keep;
            AttemptToken::Confirmed
        }
    };
    let signal = match (&attempt, hint) {
        (AttemptToken::Refused, _) if outcome.status() == Some(410) => Some(Signal::Gone),
        (_, Some(hint)) if !hint.is_zero() => Some(Signal::NotBefore(hint)),
        _ => None,
    };
    Decision { attempt, next: Next::Park(parking), signal }
}

/// Whether a retry may no longer be absorbed: the consumer forgets keys after `retain`, and the first attempt whose
/// effect is unknown is older than that.
pub fn outlived_retain(trouble: &Trouble, dedup_retain: Option<Duration>) -> bool {
    match (trouble.in_doubt_for, trouble.retain.or(dedup_retain)) {
        (Some(age), Some(retain)) => age >= retain,
        _ => false,
    }
}

fn spend(parking: &mut Parking, spent: bool) {
    if spent {
        parking.state = Waiting::Dead;
        parking.due_in = None;
    }
}

/// An attempt that may have taken effect: sent again where the consumer absorbs it, held where it cannot.
fn doubt(parking: &mut Parking, contract: Contract, spent: bool) {
    parking.first_doubt = Moment::Set;
    match contract.on_ambiguous {
        OnAmbiguous::Retry if !spent => {}
        OnAmbiguous::Hold if mutant::is(Mutant::DoubtResent) => {}
        OnAmbiguous::Retry | OnAmbiguous::Hold => {
            parking.state = Waiting::InDoubt;
            parking.due_in = None;
        }
    }
}

fn classify(outcome: &Outcome, at: Circumstances<'_>) -> (Class, Option<Duration>) {
    match &outcome.end {
        End::NotDelivered => (Class::NotDelivered, None),
        End::Ambiguous if mutant::is(Mutant::FactBeforeAnswer) => (Class::Fact(Fact::Applied), None),
        End::Ambiguous if mutant::is(Mutant::AmbiguousDropped) => (Class::Fact(Fact::Rejected), None),
        End::Ambiguous => (Class::Ambiguous, None),
        End::Unroutable => (Class::Unroutable, None),
        End::Shut => (Class::Shut, None),
        End::Refused => (Class::Refused, None),
        End::Confirmed => match at.contract.ack {
            AckMode::Required => (Class::Unacked, None),
            AckMode::Optional | AckMode::None => (Class::Fact(Fact::Confirmed), None),
        },
        End::Answered { status, ack: AckReading::Word { ack, retain, .. } } => (by_word(*ack, *status), *retain),
        End::Answered { ack: AckReading::Contradicted { .. }, .. } => (Class::Ambiguous, None),
        End::Answered { status, ack: AckReading::Silent | AckReading::Malformed { .. } } => {
            (by_status(*status, at), None)
        }
    }
}

fn by_word(ack: Ack, status: u16) -> Class {
    let good = (200..300).contains(&status);
    match (ack, ack.fact()) {
        // Kept and counted, but a status that denies it leaves the effect unknown.
        (Ack::Applied | Ack::Duplicate, _) if !good => Class::Ambiguous,
        (_, Some(fact)) => Class::Fact(fact),
        (Ack::InProgress, None) => Class::InProgress,
        (_, None) => Class::NotApplied,
    }
}

fn by_status(status: u16, at: Circumstances<'_>) -> Class {
    match status {
        200..=299 if at.contract.ack == AckMode::Required => Class::Ambiguous,
        200..=299 => Class::Fact(Fact::Accepted),
        300..=399 => Class::Refused,
        408 | 421 | 425 | 429 => Class::Throttled,
        409 => Class::InProgress,
        410 => Class::Gone,
        400..=499 | 501 | 505 => Class::Refused,
        500..=599 if at.definite_statuses.contains(&status) => Class::NotApplied,
        _ => Class::Ambiguous,
    }
}

fn attempt_token(fact: Fact) -> AttemptToken {
    match fact {
        Fact::Applied => AttemptToken::Applied,
        Fact::Duplicate => AttemptToken::Duplicate,
        Fact::Stale => AttemptToken::Stale,
        Fact::Conflict => AttemptToken::Conflict,
        Fact::Rejected => AttemptToken::Rejected,
        Fact::Confirmed => AttemptToken::Confirmed,
        // No other fact comes out of an attempt.
        _ => AttemptToken::Accepted,
    }
}

fn reason(outcome: &Outcome) -> String {
    let phase = outcome.evidence.phase.as_str();
    match (&outcome.end, &outcome.evidence.error) {
        (End::Answered { status, ack: AckReading::Malformed { why, .. } }, _) => {
            format!("status {status}, malformed ack: {why}")
        }
        (End::Answered { status, ack: AckReading::Word { ack, .. } | AckReading::Contradicted { ack, .. } }, _) => {
            format!("status {status}, ack {}", ack.wire())
        }
        (End::Answered { status, .. }, _) => format!("status {status}"),
        (End::Confirmed, _) => "the broker has it, the consumer has not answered".into(),
        (End::Unroutable, _) => "the broker found no queue for it".into(),
        (End::NotDelivered, Some(error)) => format!("not delivered ({phase}): {error}"),
        (End::Ambiguous, Some(error)) => format!("no answer ({phase}): {error}"),
        (End::Shut, Some(error)) => format!("not tried: {error}"),
        (End::Shut, None) => "not tried".into(),
        (End::Refused, Some(error)) => format!("refused ({phase}): {error}"),
        (End::Refused, None) => format!("refused ({phase})"),
        (End::NotDelivered, None) => format!("not delivered ({phase})"),
        (End::Ambiguous, None) => format!("no answer ({phase})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::consumer::Ordering;
    use crate::model::outcome::{Evidence, Phase};

    const RETRY: Contract =
        Contract { ack: AckMode::Optional, on_ambiguous: OnAmbiguous::Retry, ordering: Ordering::None };
    const HOLD: Contract = Contract { on_ambiguous: OnAmbiguous::Hold, ..RETRY };
    const REQUIRED: Contract = Contract { ack: AckMode::Required, ..RETRY };

    fn outcome(end: End) -> Outcome {
        Outcome {
            end,
            evidence: Evidence { phase: Phase::Wait, bytes_left: true, took: Duration::ZERO, error: None },
            retry_after: None,
        }
    }

    fn silent(status: u16) -> Outcome {
        outcome(End::Answered { status, ack: AckReading::Silent })
    }

    fn word(status: u16, ack: Ack) -> Outcome {
        outcome(End::Answered { status, ack: AckReading::Word { ack, retain: None, raw: ack.wire().into() } })
    }

    fn decided(outcome: &Outcome, contract: Contract, trouble: &Trouble) -> Decision {
        decide(
            outcome,
            Circumstances {
                contract,
                definite_statuses: &[503],
                ack_timeout: Duration::from_secs(300),
                trouble,
                retry: &RetryOptions::default(),
                jitter: 0.0,
            },
        )
    }

    fn summary(outcome: &Outcome, contract: Contract) -> (AttemptToken, String) {
        let decision = decided(outcome, contract, &Trouble::default());
        let next = match decision.next {
            Next::Fact { fact, doubt } => format!("{fact}{}", if doubt { "?" } else { "" }),
            Next::Park(parking) => parking.state.to_string(),
        };
        (decision.attempt, next)
    }

    #[test]
    fn the_token_decides() {
        for status in [200, 204, 299] {
            assert_eq!(summary(&word(status, Ack::Applied), REQUIRED), (AttemptToken::Applied, "applied".into()));
            assert_eq!(summary(&word(status, Ack::Duplicate), HOLD), (AttemptToken::Duplicate, "duplicate".into()));
        }
        for status in [200, 412, 500] {
            assert_eq!(summary(&word(status, Ack::Stale { current: 9 }), RETRY), (AttemptToken::Stale, "stale".into()));
            assert_eq!(summary(&word(status, Ack::Conflict), RETRY), (AttemptToken::Conflict, "conflict".into()));
            assert_eq!(summary(&word(status, Ack::Rejected), RETRY), (AttemptToken::Rejected, "rejected".into()));
        }
        assert_eq!(summary(&word(409, Ack::InProgress), RETRY), (AttemptToken::InProgress, "retry".into()));
        assert_eq!(summary(&word(500, Ack::NotApplied), HOLD), (AttemptToken::NotApplied, "retry".into()));
    }

    #[test]
    fn applied_on_a_bad_status_is_ambiguous() {
        for status in [302, 404, 500] {
            assert_eq!(summary(&word(status, Ack::Applied), RETRY), (AttemptToken::Ambiguous, "retry".into()));
            assert_eq!(summary(&word(status, Ack::Duplicate), HOLD), (AttemptToken::Ambiguous, "in_doubt".into()));
        }
    }

    #[test]
    fn a_bare_status_is_never_called_applied() {
        assert_eq!(summary(&silent(200), RETRY), (AttemptToken::Accepted, "accepted".into()));
        assert_eq!(summary(&silent(200), REQUIRED), (AttemptToken::Ambiguous, "retry".into()));
        for status in 100..=699 {
            let (attempt, next) = summary(&silent(status), RETRY);
            assert!(next != "applied" && attempt != AttemptToken::Applied, "{status}");
        }
    }

    #[test]
    fn statuses_without_a_token() {
        use AttemptToken::{Ambiguous, InProgress, NotApplied, Refused, Throttled};
        let table = [
            (300..=399, Refused),
            (400..=407, Refused),
            (408..=408, Throttled),
            (409..=409, InProgress),
            (411..=420, Refused),
            (421..=421, Throttled),
            (425..=425, Throttled),
            (429..=429, Throttled),
            (430..=499, Refused),
            (500..=500, Ambiguous),
            (501..=501, Refused),
            (502..=502, Ambiguous),
            (503..=503, NotApplied),
            (505..=505, Refused),
            (506..=599, Ambiguous),
        ];
        for (statuses, token) in table {
            for status in statuses {
                assert_eq!(summary(&silent(status), RETRY).0, token, "{status}");
            }
        }
    }

    #[test]
    fn ambiguity_is_held_where_a_duplicate_costs() {
        assert_eq!(summary(&outcome(End::Ambiguous), HOLD).1, "in_doubt");
        assert_eq!(summary(&silent(500), HOLD).1, "in_doubt");
        assert_eq!(summary(&outcome(End::NotDelivered), HOLD).1, "retry");
        assert_eq!(summary(&silent(503), HOLD).1, "retry");
    }

    #[test]
    fn doubt_stays_until_the_consumer_resolves_it() {
        let doubted = Trouble { attempts: 1, in_doubt_for: Some(Duration::from_secs(5)), ..Trouble::default() };
        let doubt = |outcome: &Outcome| match decided(outcome, RETRY, &doubted).next {
            Next::Fact { doubt, .. } => doubt,
            Next::Park(parking) => parking.first_doubt != Moment::Clear,
        };
        assert!(!doubt(&word(200, Ack::Applied)));
        assert!(!doubt(&word(200, Ack::Duplicate)));
        assert!(!doubt(&word(500, Ack::NotApplied)));
        assert!(doubt(&word(412, Ack::Stale { current: 3 })));
        assert!(doubt(&silent(200)));
        assert!(doubt(&silent(404)));
    }

    #[test]
    fn budgets_end_in_dead_never_in_failed() {
        let refused = Trouble { attempts: 2, refusals: 2, ..Trouble::default() };
        let state = |outcome: &Outcome, contract, trouble: &Trouble| match decided(outcome, contract, trouble).next {
            Next::Park(parking) => (parking.state, parking.due_in.is_some()),
            Next::Fact { .. } => panic!("a fact"),
        };
        assert_eq!(state(&silent(404), RETRY, &refused), (Waiting::Dead, false));
        assert_eq!(state(&silent(404), RETRY, &Trouble { refusals: 1, ..refused.clone() }), (Waiting::Retry, true));
        let old = Trouble { attempts: 40, failing_for: Some(Duration::from_secs(86_400)), ..Trouble::default() };
        assert_eq!(state(&outcome(End::NotDelivered), RETRY, &old), (Waiting::Dead, false));
        assert_eq!(state(&outcome(End::Ambiguous), RETRY, &old), (Waiting::InDoubt, false), "unknown is not dead");
    }

    #[test]
    fn in_progress_spends_nothing_until_it_lasts_too_long() {
        let at = |seconds| Trouble {
            attempts: 3,
            in_progress_for: Some(Duration::from_secs(seconds)),
            ..Trouble::default()
        };
        let parking = |trouble: &Trouble, contract| match decided(&silent(409), contract, trouble).next {
            Next::Park(parking) => parking,
            Next::Fact { .. } => panic!("a fact"),
        };
        assert_eq!(parking(&at(10), HOLD).first_failed, Moment::Keep);
        assert_eq!(parking(&at(10), HOLD).state, Waiting::Retry);
        let waits = |seconds| parking(&at(seconds), HOLD).due_in.map(|wait| wait.as_secs());
        assert!(waits(0) < waits(60) && waits(60) < waits(600), "{:?} {:?} {:?}", waits(0), waits(60), waits(600));
        assert!(waits(600) >= Some(150) && waits(600) <= Some(300), "{:?}", waits(600));
        assert_eq!(parking(&at(900), HOLD).state, Waiting::InDoubt);
        assert_eq!(parking(&at(900), RETRY).first_failed, Moment::Set);
    }

    #[test]
    fn gone_pauses_and_keeps_the_delivery() {
        let decision = decided(&silent(410), RETRY, &Trouble { refusals: 2, ..Trouble::default() });
        assert_eq!(decision.signal, Some(Signal::Gone));
        assert!(matches!(decision.next, Next::Park(Parking { state: Waiting::Backlog, refusals: 2, .. })));
    }

    #[test]
    fn retry_after_holds_for_the_whole_consumer_and_is_capped() {
        let mut throttled = silent(429);
        throttled.retry_after = Some(Duration::from_secs(1_000_000));
        let decision = decided(&throttled, RETRY, &Trouble::default());
        assert_eq!(decision.signal, Some(Signal::NotBefore(Duration::from_secs(3_600))));
    }

    #[test]
    fn a_confirm_is_not_an_acknowledgement() {
        assert_eq!(summary(&outcome(End::Confirmed), RETRY), (AttemptToken::Confirmed, "confirmed".into()));
        assert_eq!(summary(&outcome(End::Confirmed), REQUIRED), (AttemptToken::Confirmed, "unacked".into()));
    }

    #[test]
    fn retries_stop_when_the_consumer_may_have_forgotten() {
        let trouble = |doubt, retain| Trouble { in_doubt_for: doubt, retain, ..Trouble::default() };
        let s = |n| Some(Duration::from_secs(n));
        assert!(outlived_retain(&trouble(s(10), s(10)), None));
        assert!(outlived_retain(&trouble(s(10), None), s(5)));
        assert!(!outlived_retain(&trouble(s(10), s(11)), s(5)), "the consumer's last word counts");
        assert!(!outlived_retain(&trouble(None, s(1)), s(1)));
        assert!(!outlived_retain(&trouble(s(1_000_000), None), None));
    }
}
