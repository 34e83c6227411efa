//! The explicit words with which everything ends (contract, section 6). Stored with underscores, on the wire with
//! hyphens. A word that is absent means one thing only: it did not finish.

use std::fmt;

/// A piece of text that is none of the words expected in its place.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{text:?} is not a {what}")]
pub struct UnknownToken {
    what: &'static str,
    text: String,
}

macro_rules! tokens {
    ($(#[$doc:meta])* $name:ident, $what:literal { $($(#[$vdoc:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, serde::Serialize)]
        pub enum $name { $($(#[$vdoc])* #[serde(rename = $text)] $variant),+ }

        impl $name {
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// As stored in the database.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl std::str::FromStr for $name {
            type Err = UnknownToken;

            fn from_str(text: &str) -> Result<Self, UnknownToken> {
                match text {
                    $($text => Ok(Self::$variant),)+
                    _ => Err(UnknownToken { what: $what, text: text.into() }),
                }
            }
        }
    };
}

tokens!(
    /// A terminal fact about a delivery, strongest first: the least decides where several are recorded.
    Fact, "delivery's terminal token" {
        Applied = "applied",
        Duplicate = "duplicate",
        Conflict = "conflict",
        Rejected = "rejected",
        Stale = "stale",
        /// A 2xx without a word about the key: weaker than `applied`, and never called so.
        Accepted = "accepted",
        /// The broker has it, which says nothing about the consumer.
        Confirmed = "confirmed",
        OperatorApplied = "operator:applied",
        OperatorNotApplied = "operator:not_applied",
        Skipped = "skipped",
        Expired = "expired",
        Unrouted = "unrouted",
    }
);

tokens!(
    /// Why a delivery is not finished yet.
    Waiting, "delivery's waiting token" {
        Retry = "retry",
        /// Its key's turn has not come.
        Blocked = "blocked",
        /// Its lane lags or is paused.
        Backlog = "backlog",
        Scheduled = "scheduled",
        /// The broker has it, the consumer has not answered.
        Unacked = "unacked",
        /// An attempt may or may not have taken effect, and the edge cannot tell us.
        InDoubt = "in_doubt",
        /// Its budget is spent; an operator decides.
        Dead = "dead",
    }
);

tokens!(
    /// How one try of a delivery ended.
    AttemptToken, "attempt's token" {
        Applied = "applied",
        Duplicate = "duplicate",
        Accepted = "accepted",
        Confirmed = "confirmed",
        Stale = "stale",
        Conflict = "conflict",
        Rejected = "rejected",
        /// Nothing left us: our own checks, DNS, connect, TLS.
        NotDelivered = "not_delivered",
        Unroutable = "unroutable",
        Throttled = "throttled",
        Refused = "refused",
        NotApplied = "not_applied",
        InProgress = "in_progress",
        Ambiguous = "ambiguous",
        /// No outcome was ever written: the relay died.
        Lost = "lost",
    }
);

tokens!(
    /// How an epoch of a task ended.
    CompletionToken, "completion's token" {
        Effects = "effects",
        NoAction = "no_action",
        Failed = "failed",
        Released = "released",
        /// Expired and taken over.
        Lost = "lost",
    }
);

tokens!(
    /// What one turn of a relay's or worker's loop did.
    TickToken, "tick's token" {
        Worked = "worked",
        Idle = "idle",
        Failed = "failed",
    }
);

tokens!(
    /// How a flight ended. An open flight has none.
    FlightToken, "flight's token" {
        /// Flight 0: where reading starts.
        Origin = "origin",
        /// Written at a takeover, so that the predecessor's next flight cannot open.
        Fence = "fence",
        /// Every delivery has a fact, is parked, or lies in a lag range.
        Done = "done",
        /// Its relay died or lost the shard.
        Lost = "lost",
        Rebase = "rebase",
    }
);

/// What a consumer said about a key (contract, section 4).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Ack {
    Applied,
    Duplicate,
    /// A newer epoch of this task was already applied: `current`.
    Stale {
        current: i64,
    },
    Conflict,
    Rejected,
    InProgress,
    NotApplied,
}

impl Ack {
    /// The word on the wire.
    pub fn wire(self) -> &'static str {
        match self {
            Self::Applied => "applied",
            Self::Duplicate => "duplicate",
            Self::Stale { .. } => "stale",
            Self::Conflict => "conflict",
            Self::Rejected => "rejected",
            Self::InProgress => "in-progress",
            Self::NotApplied => "not-applied",
        }
    }

    /// The terminal fact this word is, if it ends the delivery.
    pub fn fact(self) -> Option<Fact> {
        match self {
            Self::Applied => Some(Fact::Applied),
            Self::Duplicate => Some(Fact::Duplicate),
            Self::Stale { .. } => Some(Fact::Stale),
            Self::Conflict => Some(Fact::Conflict),
            Self::Rejected => Some(Fact::Rejected),
            Self::InProgress | Self::NotApplied => None,
        }
    }
}

impl Fact {
    /// Whether the consumer is known, by its own word, to have applied the key.
    pub fn is_applied(self) -> bool {
        matches!(self, Self::Applied | Self::Duplicate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_words_parse_back() {
        for token in Fact::ALL {
            assert_eq!(token.as_str().parse::<Fact>().unwrap(), *token);
        }
        for token in AttemptToken::ALL {
            assert_eq!(token.as_str().parse::<AttemptToken>().unwrap(), *token);
        }
        assert!("Applied".parse::<Fact>().is_err());
        assert!("in-doubt".parse::<Waiting>().is_err(), "hyphens belong to the wire");
    }

    #[test]
    fn the_strongest_fact_is_the_least() {
        let order = "applied duplicate conflict rejected stale accepted confirmed operator:applied operator:not_applied skipped expired unrouted";
        let mut facts = Fact::ALL.to_vec();
        facts.reverse();
        facts.sort();
        assert_eq!(facts.iter().map(|f| f.as_str()).collect::<Vec<_>>().join(" "), order);
        assert!(Fact::Applied < Fact::Stale && Fact::Confirmed < Fact::Skipped);
    }
}
