//! What a [`Receiver`](super::receiver::Receiver) is told to do with one request.

use std::sync::Arc;

use tokio::sync::Semaphore;

/// What to do with one request whose head has arrived.
#[derive(Clone, Debug)]
pub struct Script(pub(super) Vec<Step>);

#[derive(Clone, Debug)]
pub(super) enum Step {
    /// Reads the rest of the request's body.
    ReadBody,
    Send(Vec<u8>),
    /// One byte at a time, each in a packet of its own, until the peer goes.
    Drip(Vec<u8>),
    /// Again and again until the peer goes.
    Repeat(Vec<u8>),
    Hold(Gate),
    /// Nothing more until the peer goes.
    Stall,
    Cut(Cut),
    /// Waits for the next request's first bytes on this connection, and cuts without reading them.
    CutNext(Cut),
}

/// How a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    Fin,
    Rst,
}

/// Keeps requests waiting until the test lets them go.
#[derive(Clone, Debug)]
pub struct Gate(pub(super) Arc<Semaphore>);

impl Gate {
    pub fn shut() -> Self {
        Self(Arc::new(Semaphore::new(0)))
    }

    /// Lets everyone pass from now on.
    pub fn open(&self) {
        self.0.close();
    }

    /// Lets one waiting request pass.
    pub fn let_one(&self) {
        self.0.add_permits(1);
    }
}

/// An answer under construction.
#[derive(Clone, Debug)]
pub struct Answer {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Answer {
    pub fn header(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    pub fn ack(self, word: &str) -> Self {
        self.header("Outbox-Ack", word)
    }

    pub fn body(mut self, body: impl Into<Vec<u8>>) -> Self {
        self.body = body.into();
        self
    }

    /// The head alone, up to and with its empty line.
    pub fn head(&self) -> Vec<u8> {
        let mut head = format!("HTTP/1.1 {} Scripted\r\n", self.status);
        for (name, value) in &self.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        let has = |wanted: &str| self.headers.iter().any(|(name, _)| name.eq_ignore_ascii_case(wanted));
        if !(has("content-length") || has("transfer-encoding") || matches!(self.status, 100..=199 | 204 | 304)) {
            head.push_str(&format!("Content-Length: {}\r\n", self.body.len()));
        }
        head.push_str("\r\n");
        head.into_bytes()
    }

    pub fn bytes(&self) -> Vec<u8> {
        [self.head(), self.body.clone()].concat()
    }

    /// Answers, then cuts the connection as soon as the next request arrives on it.
    pub fn then_cut_next(self, cut: Cut) -> Script {
        let Script(mut steps) = self.into();
        steps.push(Step::CutNext(cut));
        Script(steps)
    }

    /// Answers once the gate lets it.
    pub fn behind(self, gate: &Gate) -> Script {
        Script(vec![Step::ReadBody, Step::Hold(gate.clone()), Step::Send(self.bytes())])
    }
}

impl From<Answer> for Script {
    fn from(answer: Answer) -> Self {
        Script(vec![Step::ReadBody, Step::Send(answer.bytes())])
    }
}

impl Script {
    pub fn answer(status: u16) -> Answer {
        Answer { status, headers: Vec::new(), body: Vec::new() }
    }

    /// Reads the request and never answers.
    pub fn stall() -> Self {
        Script(vec![Step::ReadBody, Step::Stall])
    }

    /// Reads the head only and never answers.
    pub fn stall_before_body() -> Self {
        Script(vec![Step::Stall])
    }

    /// Reads the request, then ends the connection without an answer.
    pub fn cut(cut: Cut) -> Self {
        Script(vec![Step::ReadBody, Step::Cut(cut)])
    }

    /// Ends the connection with the request's body unread.
    pub fn cut_before_body(cut: Cut) -> Self {
        Script(vec![Step::Cut(cut)])
    }

    /// Reads the request, sends these bytes as they are, and goes on to the next request.
    pub fn raw(bytes: impl Into<Vec<u8>>) -> Self {
        Script(vec![Step::ReadBody, Step::Send(bytes.into())])
    }

    /// Sends these bytes while the request's body is still unread.
    pub fn early(bytes: impl Into<Vec<u8>>) -> Self {
        Script(vec![Step::Send(bytes.into())])
    }

    /// Reads the request, then sends these bytes slowly, one at a time.
    pub fn drip(bytes: impl Into<Vec<u8>>) -> Self {
        Script(vec![Step::ReadBody, Step::Drip(bytes.into())])
    }

    pub fn then_stall(mut self) -> Self {
        self.0.push(Step::Stall);
        self
    }

    pub fn then_cut(mut self, cut: Cut) -> Self {
        self.0.push(Step::Cut(cut));
        self
    }

    pub fn then_drip(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.0.push(Step::Drip(bytes.into()));
        self
    }

    /// Then sends these bytes for ever.
    pub fn then_repeat(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.0.push(Step::Repeat(bytes.into()));
        self
    }
}
