//! Mistakes that others have shipped, to be chosen with `FENCEPOST_MUTANT`: the fault campaign must notice each of them
//! (`make campaign-mutants`), or it would not notice ours. Compiled in only with the feature `mutants`.

/// A mistake. Its name is what the environment says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mutant {
    /// A retry carries a key of its own.
    NewKeyOnRetry,
    /// The log is read by `id > last` instead of by snapshot difference.
    CursorById,
    /// Claims and renewals do not ask whether their epoch is over.
    NoEpochPredicate,
    /// A write whose COMMIT was answered to nobody counts as written.
    CommitErrorAsSuccess,
    /// What a predecessor left open is not looked at.
    NoTakeoverSweep,
    /// What a predecessor may have sent ahead of its flight is read as if it had not been.
    SentAheadForgotten,
    /// What comes later of a key overtakes what waits in the parking lot.
    OrderIgnoredAfterSpill,
    /// An outcome that is not known frees its key for the next.
    KeyFreedByDoubt,
    /// The fact is what was sent, not what was answered.
    FactBeforeAnswer,
    /// No answer counts as a refusal, and the delivery ends.
    AmbiguousDropped,
    /// A flight closes with its first outcome.
    FlightClosedEarly,
    /// A retry leaves without a start row.
    RetryWithoutStart,
    /// Where a duplicate costs, doubt is resent like everywhere else.
    DoubtResent,
    /// After a reconnect reading goes on behind a flight whose opening was answered to nobody.
    UnansweredFlightSkipped,
    /// A lane that lags leaves its flights unread and does not say so.
    LagForgotten,
    /// A message is delivered as soon as it is written to the broker's socket.
    FinishBeforeConfirm,
    /// The broker's nack counts as its confirm.
    NackAsSuccess,
    /// A returned message is taken for the one whose confirm it came with.
    PairingTrusted,
}

impl Mutant {
    pub const ALL: &[Self] = &[
        Self::NewKeyOnRetry,
        Self::CursorById,
        Self::NoEpochPredicate,
        Self::CommitErrorAsSuccess,
        Self::NoTakeoverSweep,
        Self::SentAheadForgotten,
        Self::OrderIgnoredAfterSpill,
        Self::KeyFreedByDoubt,
        Self::FactBeforeAnswer,
        Self::AmbiguousDropped,
        Self::FlightClosedEarly,
        Self::RetryWithoutStart,
        Self::DoubtResent,
        Self::UnansweredFlightSkipped,
        Self::LagForgotten,
        Self::FinishBeforeConfirm,
        Self::NackAsSuccess,
        Self::PairingTrusted,
    ];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::NewKeyOnRetry => "new_key_on_retry",
            Self::CursorById => "cursor_by_id",
            Self::NoEpochPredicate => "no_epoch_predicate",
            Self::CommitErrorAsSuccess => "commit_error_as_success",
            Self::NoTakeoverSweep => "no_takeover_sweep",
            Self::SentAheadForgotten => "sent_ahead_forgotten",
            Self::OrderIgnoredAfterSpill => "order_ignored_after_spill",
            Self::KeyFreedByDoubt => "key_freed_by_doubt",
            Self::FactBeforeAnswer => "fact_before_answer",
            Self::AmbiguousDropped => "ambiguous_dropped",
            Self::FlightClosedEarly => "flight_closed_early",
            Self::RetryWithoutStart => "retry_without_start",
            Self::DoubtResent => "doubt_resent",
            Self::UnansweredFlightSkipped => "unanswered_flight_skipped",
            Self::LagForgotten => "lag_forgotten",
            Self::FinishBeforeConfirm => "finish_before_confirm",
            Self::NackAsSuccess => "nack_as_success",
            Self::PairingTrusted => "pairing_trusted",
        }
    }
}

/// Whether this process makes that mistake.
#[cfg(feature = "mutants")]
pub fn is(mutant: Mutant) -> bool {
    static CHOSEN: std::sync::LazyLock<Option<Mutant>> = std::sync::LazyLock::new(|| {
        let name = std::env::var("FENCEPOST_MUTANT").ok()?;
        tracing::warn!(mutant = name, "a mistake is made on purpose");
        Mutant::ALL.iter().copied().find(|mutant| mutant.as_str() == name)
    });
    *CHOSEN == Some(mutant)
}

/// Never, in a build without the feature.
#[cfg(not(feature = "mutants"))]
pub const fn is(_mutant: Mutant) -> bool {
    false
}
