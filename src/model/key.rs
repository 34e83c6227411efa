//! Names of things: task ids, lease epochs, idempotency keys, and the numbers the store gives out.

use std::fmt;
use std::str::FromStr;

/// A task id: text matching `^[A-Za-z0-9_-]{1,128}$` (contract, section 2).
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TaskId(String);

/// The fencing token of a task: an integer from 1 that grows at every claim.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct LeaseEpoch(i64);

/// The idempotency key of one effect, the same at every consumer and on every attempt.
///
/// Written `<task_id>:<lease_epoch>` for the first effect of a completion and `<task_id>:<lease_epoch>:<n>` for the
/// n-th, n ≥ 2 (contract, section 2).
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EffectKey {
    task_id: TaskId,
    lease_epoch: LeaseEpoch,
    position: u32,
}

/// Why a piece of text is not the key it was taken for.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum KeyError {
    #[error("a task id is 1 to 128 characters of A-Z a-z 0-9 _ -, not {0:?}")]
    TaskId(String),
    #[error("a lease epoch is a whole number from 1 without leading zeros, not {0:?}")]
    LeaseEpoch(String),
    #[error("an effect's position is a whole number from 2 without leading zeros (the first has none), not {0:?}")]
    Position(String),
    #[error("an idempotency key is <task_id>:<lease_epoch> or <task_id>:<lease_epoch>:<n>, not {0:?}")]
    Shape(String),
}

impl TaskId {
    pub fn new(text: impl Into<String>) -> Result<Self, KeyError> {
        let text = text.into();
        let form = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
        if text.is_empty() || text.len() > 128 || !text.bytes().all(form) {
            return Err(KeyError::TaskId(text));
        }
        Ok(Self(text))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl LeaseEpoch {
    pub fn new(epoch: i64) -> Result<Self, KeyError> {
        if epoch < 1 {
            return Err(KeyError::LeaseEpoch(epoch.to_string()));
        }
        Ok(Self(epoch))
    }

    pub fn get(self) -> i64 {
        self.0
    }
}

impl EffectKey {
    /// The key of the effect at `position` (from 1) of the completion of `task_id` under `lease_epoch`.
    pub fn new(task_id: TaskId, lease_epoch: LeaseEpoch, position: u32) -> Result<Self, KeyError> {
        if position == 0 {
            return Err(KeyError::Position("0".into()));
        }
        Ok(Self { task_id, lease_epoch, position })
    }

    pub fn task_id(&self) -> &TaskId {
        &self.task_id
    }

    pub fn lease_epoch(&self) -> LeaseEpoch {
        self.lease_epoch
    }

    /// The effect's place in its completion's array, from 1.
    pub fn position(&self) -> u32 {
        self.position
    }
}

impl fmt::Display for TaskId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for TaskId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for LeaseEpoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for EffectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.task_id, self.lease_epoch)?;
        if self.position > 1 {
            write!(f, ":{}", self.position)?;
        }
        Ok(())
    }
}

impl fmt::Debug for EffectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A decimal number that has exactly one spelling, so that equal keys are equal byte for byte.
fn canonical<N: FromStr + ToString>(text: &str) -> Option<N> {
    text.parse::<N>().ok().filter(|n| n.to_string() == text)
}

impl FromStr for TaskId {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        Self::new(text)
    }
}

impl FromStr for EffectKey {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        let mut parts = text.split(':');
        let (Some(task), Some(epoch), position, None) = (parts.next(), parts.next(), parts.next(), parts.next()) else {
            return Err(KeyError::Shape(text.into()));
        };
        let epoch_bad = || KeyError::LeaseEpoch(epoch.into());
        let lease_epoch = LeaseEpoch::new(canonical(epoch).ok_or_else(epoch_bad)?).map_err(|_| epoch_bad())?;
        let position = match position {
            None => 1,
            Some(n) => canonical(n).filter(|n| *n >= 2).ok_or_else(|| KeyError::Position(n.into()))?,
        };
        Self::new(TaskId::new(task)?, lease_epoch, position)
    }
}

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number!(
    /// The log's own number of an effect: its place in the order of a key.
    EffectId(i64)
);
number!(
    /// The store's number of a consumer. 0 stands for "nobody subscribed".
    ConsumerId(i32)
);
number!(
    /// A unit of ordering, leasing and failover.
    Shard(i16)
);
number!(
    /// The fencing token of a shard: raised at every takeover.
    ShardEpoch(i64)
);
number!(
    /// A flight's place in its shard's log of flights.
    FlightSeq(i64)
);

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn first_effect_has_no_suffix() {
        let key = |p| EffectKey::new(TaskId::new("a-1").unwrap(), LeaseEpoch::new(7).unwrap(), p).unwrap().to_string();
        assert_eq!(key(1), "a-1:7");
        assert_eq!(key(2), "a-1:7:2");
    }

    #[test]
    fn other_spellings_of_a_key_are_refused() {
        for bad in [
            "",
            "a",
            "a:",
            "a:0",
            "a:01",
            "a:+1",
            "a:-1",
            "a:1:1",
            "a:1:0",
            "a:1:02",
            "a:1:2:3",
            "a b:1",
            ":1",
            "a:9223372036854775808",
            "a:1 ",
            "ü:1",
        ] {
            assert!(bad.parse::<EffectKey>().is_err(), "{bad:?} was taken");
        }
        assert_eq!("a:9223372036854775807".parse::<EffectKey>().unwrap().lease_epoch().get(), i64::MAX);
    }

    #[test]
    fn task_ids_end_at_128_characters() {
        assert!(TaskId::new("x".repeat(128)).is_ok());
        assert!(TaskId::new("x".repeat(129)).is_err());
    }

    proptest! {
        #[test]
        fn keys_survive_text(task in "[A-Za-z0-9_-]{1,128}", epoch in 1i64.., position in 1u32..) {
            let key = EffectKey::new(TaskId::new(task).unwrap(), LeaseEpoch::new(epoch).unwrap(), position).unwrap();
            prop_assert_eq!(key.to_string().parse::<EffectKey>().unwrap(), key);
        }

        #[test]
        fn a_key_has_one_spelling(text in "[A-Za-z0-9_:+ -]{0,24}") {
            if let Ok(key) = text.parse::<EffectKey>() {
                prop_assert_eq!(key.to_string(), text);
            }
        }
    }
}
