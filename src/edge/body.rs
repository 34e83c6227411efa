//! The request's body, which knows how much of itself was taken: the evidence whether bytes may have left.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use crate::model::outcome::Phase;

/// Small enough to tell a body that is being taken from one that is out, large enough to cost nothing.
const FRAME: usize = 64 * 1024;

/// How far a request got, shared between the attempt and the body it sends.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<AtomicU8>);

const UNTOUCHED: u8 = 0;
const TAKING: u8 = 1;
const TAKEN: u8 = 2;

impl Progress {
    /// Where the attempt stands while no head has come back.
    pub fn phase(&self) -> Phase {
        match self.0.load(Ordering::Acquire) {
            UNTOUCHED => Phase::Connect,
            TAKING => Phase::Send,
            _ => Phase::Wait,
        }
    }

    fn reach(&self, mark: u8) {
        self.0.fetch_max(mark, Ordering::AcqRel);
    }
}

/// A body of known size in memory.
///
/// The HTTP/1 connection asks `is_end_stream` at the moment it takes a request over, before it writes the first byte
/// of the head, and nobody asks before it: an untouched body proves that nothing was sent.
pub struct Tracked {
    rest: Bytes,
    progress: Progress,
}

impl Tracked {
    pub fn new(payload: Bytes, progress: Progress) -> Self {
        Self { rest: payload, progress }
    }
}

impl Body for Tracked {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.rest.is_empty() {
            self.progress.reach(TAKEN);
            return Poll::Ready(None);
        }
        let length = self.rest.len().min(FRAME);
        let frame = self.rest.split_to(length);
        self.progress.reach(if self.rest.is_empty() { TAKEN } else { TAKING });
        Poll::Ready(Some(Ok(Frame::data(frame))))
    }

    fn is_end_stream(&self) -> bool {
        self.progress.reach(if self.rest.is_empty() { TAKEN } else { TAKING });
        self.rest.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.rest.len() as u64)
    }
}
