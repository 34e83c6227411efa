//! What an inbox decided, and how to say it (contract, section 4).

use std::time::Duration;

use crate::model::key::EffectKey;
use crate::model::token::Ack;

/// The decision about one delivery.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use = "only `Applied` calls for the effect"]
pub enum Verdict {
    /// First time: make the effect now, in the same transaction. True once that commits.
    Applied,
    /// It was applied before, with the same body. Make nothing.
    Duplicate,
    /// A newer epoch of the task was applied before. Make nothing.
    Stale { current: i64 },
    /// It was applied before, with another body. Make nothing.
    Conflict,
    /// Another transaction is deciding about this very key. Make nothing.
    InProgress,
}

/// A status and the value of `Outbox-Ack`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Answer {
    pub status: u16,
    pub outbox_ack: String,
}

impl Verdict {
    pub(super) fn read(word: &str, current: Option<i64>) -> Option<Self> {
        match (word, current) {
            ("applied", _) => Some(Self::Applied),
            ("duplicate", _) => Some(Self::Duplicate),
            ("stale", Some(current)) => Some(Self::Stale { current }),
            ("conflict", _) => Some(Self::Conflict),
            ("in-progress", _) => Some(Self::InProgress),
            _ => None,
        }
    }

    /// Its word on the wire.
    pub fn ack(self) -> Ack {
        match self {
            Self::Applied => Ack::Applied,
            Self::Duplicate => Ack::Duplicate,
            Self::Stale { current } => Ack::Stale { current },
            Self::Conflict => Ack::Conflict,
            Self::InProgress => Ack::InProgress,
        }
    }

    /// The status that tells proxies the same.
    pub fn status(self) -> u16 {
        match self {
            Self::Applied | Self::Duplicate => 200,
            Self::Stale { .. } => 412,
            Self::Conflict => 422,
            Self::InProgress => 409,
        }
    }
}

impl Answer {
    pub(super) fn new(verdict: Verdict, key: &EffectKey, retain: Option<Duration>) -> Self {
        let mut outbox_ack = format!("{}; key=\"{key}\"", verdict.ack().wire());
        if let Some(retain) = retain {
            outbox_ack.push_str(&format!("; retain={}", retain.as_secs()));
        }
        if let Verdict::Stale { current } = verdict {
            outbox_ack.push_str(&format!("; current={current}"));
        }
        Self { status: verdict.status(), outbox_ack }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_worded_as_the_contract_has_them() {
        let key = "t-1:3:2".parse().unwrap();
        let answer = |verdict, retain| {
            let answer = Answer::new(verdict, &key, retain);
            format!("{} {}", answer.status, answer.outbox_ack)
        };
        assert_eq!(answer(Verdict::Applied, Some(Duration::from_secs(60))), "200 applied; key=\"t-1:3:2\"; retain=60");
        assert_eq!(answer(Verdict::Duplicate, None), "200 duplicate; key=\"t-1:3:2\"");
        assert_eq!(answer(Verdict::Stale { current: 5 }, None), "412 stale; key=\"t-1:3:2\"; current=5");
        assert_eq!(answer(Verdict::Conflict, None), "422 conflict; key=\"t-1:3:2\"");
        assert_eq!(answer(Verdict::InProgress, None), "409 in-progress; key=\"t-1:3:2\"");
    }
}
