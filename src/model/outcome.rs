//! How an attempt ended, with the evidence. An edge reports what it saw; what follows from it is decided in
//! `relay::settle`.

use std::time::Duration;

use super::token::Ack;

/// One attempt's end, as its edge saw it.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    pub end: End,
    pub evidence: Evidence,
    /// The consumer's hint, not yet capped. Holds for the whole consumer.
    pub retry_after: Option<Duration>,
}

/// The classes of contract section 4 and 5.
#[derive(Clone, Debug, PartialEq)]
pub enum End {
    /// Provably nothing reached the consumer: our own checks, DNS, connect, TLS.
    NotDelivered,
    /// A complete status line and head arrived.
    Answered { status: u16, ack: AckReading },
    /// Bytes may have left and no complete head came back.
    Ambiguous,
    /// The broker took it over.
    Confirmed,
    /// The broker handed it back.
    Unroutable,
    /// Nothing left us and nothing was tried: the way to the broker is shut. Costs no budget.
    Shut,
    /// Nothing was taken, and the same message will be refused again: our own limits, or the broker's word for them.
    Refused,
}

/// What the answer said about the key.
#[derive(Clone, Debug, PartialEq)]
pub enum AckReading {
    Silent,
    Word {
        ack: Ack,
        retain: Option<Duration>,
        raw: String,
    },
    /// `applied` or `duplicate` under a status that is not 2xx: kept, counted, and the attempt is ambiguous.
    Contradicted {
        ack: Ack,
        raw: String,
    },
    /// Kept raw, counted, and treated as silence.
    Malformed {
        raw: String,
        why: &'static str,
    },
}

/// How far an attempt got, in order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Phase {
    /// Our own checks, before any socket.
    Prepare,
    /// DNS, TCP, TLS.
    Connect,
    /// The request's bytes were being handed over.
    Send,
    /// The request was out; no complete head had come back.
    Wait,
    /// The head was there; the rest of the answer was being read.
    Body,
    Done,
}

impl Phase {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prepare => "prepare",
            Self::Connect => "connect",
            Self::Send => "send",
            Self::Wait => "wait",
            Self::Body => "body",
            Self::Done => "done",
        }
    }
}

/// Kept with each attempt that was not a first-try success.
#[derive(Clone, Debug, PartialEq)]
pub struct Evidence {
    pub phase: Phase,
    /// Whether bytes of the request may have left this machine.
    pub bytes_left: bool,
    pub took: Duration,
    /// The chain of causes, without URLs or secrets, at most 1,024 bytes.
    pub error: Option<String>,
}

impl AckReading {
    /// The acknowledgement's text as it came, if any came.
    pub fn raw(&self) -> Option<&str> {
        match self {
            Self::Silent => None,
            Self::Word { raw, .. } | Self::Contradicted { raw, .. } | Self::Malformed { raw, .. } => Some(raw),
        }
    }
}

impl Outcome {
    pub fn ack_is_malformed(&self) -> bool {
        matches!(self.end, End::Answered { ack: AckReading::Malformed { .. } | AckReading::Contradicted { .. }, .. })
    }

    pub fn status(&self) -> Option<u16> {
        match self.end {
            End::Answered { status, .. } => Some(status),
            _ => None,
        }
    }

    /// The acknowledgement's text as it came, if any came.
    pub fn ack_raw(&self) -> Option<&str> {
        match &self.end {
            End::Answered { ack, .. } => ack.raw(),
            _ => None,
        }
    }
}
