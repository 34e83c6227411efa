//! The consumers: raw HTTP servers that write down each request before they think about it, and that have moods.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use rand::Rng;
use rand::rngs::StdRng;
use serde::Serialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::task::AbortOnDropHandle;

use crate::history::{Lines, now};

/// How long a relay waits for one of them.
pub const TIMEOUT: Duration = Duration::from_millis(1_500);

/// Whether a consumer says what it did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Speech {
    /// It dedups and fences by the key, and says so.
    Words,
    /// It does what it is sent, each time, and answers a bare status.
    Bare,
}

/// What a consumer is declared as, and how it behaves.
#[derive(Debug)]
pub struct Profile {
    pub name: &'static str,
    pub speech: Speech,
    pub ack: &'static str,
    pub hold: bool,
    pub ordered: bool,
    pub topics: &'static [&'static str],
}

pub const ORDERED: &str = "ordered";
pub const ALL: &str = "all";

pub static PROFILES: [Profile; 6] = [
    Profile { name: "orders", speech: Speech::Words, ack: "required", hold: false, ordered: true, topics: &[ORDERED] },
    Profile { name: "accounts", speech: Speech::Words, ack: "required", hold: true, ordered: true, topics: &[ORDERED] },
    Profile { name: "feed", speech: Speech::Bare, ack: "none", hold: false, ordered: true, topics: &[ORDERED] },
    Profile { name: "billing", speech: Speech::Words, ack: "required", hold: false, ordered: false, topics: &[ALL] },
    Profile { name: "search", speech: Speech::Bare, ack: "optional", hold: false, ordered: false, topics: &[ALL] },
    Profile { name: "mail", speech: Speech::Bare, ack: "none", hold: true, ordered: false, topics: &[ALL] },
];

pub fn profile(name: &str) -> Option<&'static Profile> {
    PROFILES.iter().find(|profile| profile.name == name)
}

impl Profile {
    /// Its declaration, reached at `port`.
    pub fn spec(&self, port: u16) -> Value {
        let mut spec = json!({
            "kind": "http",
            "url": format!("http://127.0.0.1:{port}/{}", self.name),
            "ack": self.ack,
            "on_ambiguous": if self.hold { "hold" } else { "retry" },
            "ordering": if self.ordered { "key" } else { "none" },
            "topics": self.topics,
            "timeout": format!("{}ms", TIMEOUT.as_millis()),
            "connect_timeout": "500ms",
            "concurrency": 8,
        });
        if self.name == "mail" {
            spec["definite_statuses"] = json!([503]);
        }
        spec
    }
}

/// How a consumer treats its requests for a while.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub enum Mood {
    Well,
    /// 500, before or after it did its work.
    Errors,
    /// 429 with Retry-After.
    Throttles,
    /// 409
    InProgress,
    /// 503, and where it speaks: `not-applied`.
    NotApplied,
    /// 404
    Refuses,
    /// Does its work and answers nonsense.
    Garbage,
    ResetsBefore,
    ResetsAfter,
    /// Does its work, and answers when nobody listens any more.
    Slow,
    /// Takes its time, within bounds.
    Crawls,
    /// Reads and never answers.
    BlackHole,
}

impl Mood {
    pub const BAD: [Mood; 11] = [
        Mood::Errors,
        Mood::Throttles,
        Mood::InProgress,
        Mood::NotApplied,
        Mood::Refuses,
        Mood::Garbage,
        Mood::ResetsBefore,
        Mood::ResetsAfter,
        Mood::Slow,
        Mood::Crawls,
        Mood::BlackHole,
    ];
}

/// What a request was answered with.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub enum Said {
    Applied,
    Duplicate,
    Stale,
    Conflict,
    NotApplied,
    InProgress,
    /// A bare 2xx.
    Fine,
    /// Another bare status.
    Status(u16),
    Garbage,
    /// No answer.
    Nothing,
}

/// A request as it came, and what was done about it.
#[derive(Clone, Debug, Serialize)]
pub struct Receipt {
    pub at: i64,
    pub key: String,
    pub attempt: u32,
    pub sha256: String,
    /// What about the request contradicts itself.
    pub odd: Option<String>,
    /// Its place among all things this consumer applied.
    pub applied: Option<u64>,
    pub said: Option<Said>,
    pub answered: Option<i64>,
}

/// A running consumer. Dropped, it is gone.
pub struct Consumer {
    pub profile: &'static Profile,
    pub address: SocketAddr,
    desk: Arc<Desk>,
    _server: AbortOnDropHandle<()>,
}

struct Desk {
    profile: &'static Profile,
    book: Mutex<Book>,
    lines: Lines,
}

struct Book {
    mood: Mood,
    rng: StdRng,
    receipts: Vec<Receipt>,
    /// Keys it has applied, with the body's digest.
    known: HashMap<String, String>,
    /// The newest epoch it has applied, by task.
    epochs: HashMap<String, i64>,
    applied: u64,
}

/// What goes back over the wire.
enum Answer {
    Http { status: u16, headers: Vec<(&'static str, String)>, after: Duration },
    Raw(&'static [u8]),
    Reset,
    Never,
}

impl Consumer {
    pub async fn start(profile: &'static Profile, rng: StdRng, lines: Lines) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let book = Book {
            mood: Mood::Well,
            rng,
            receipts: Vec::new(),
            known: HashMap::new(),
            epochs: HashMap::new(),
            applied: 0,
        };
        let desk = Arc::new(Desk { profile, book: Mutex::new(book), lines });
        let serving = Arc::clone(&desk);
        let server = AbortOnDropHandle::new(tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((socket, _)) = listener.accept().await {
                connections.spawn(serve(socket, Arc::clone(&serving)));
                while connections.try_join_next().is_some() {}
            }
        }));
        Ok(Self { profile, address, desk, _server: server })
    }

    pub fn feel(&self, mood: Mood) {
        self.desk.book().mood = mood;
    }

    pub fn receipts(&self) -> Vec<Receipt> {
        self.desk.book().receipts.clone()
    }

    /// Whether it did the work of this key.
    pub fn has_applied(&self, key: &str) -> bool {
        self.desk.book().known.contains_key(key)
    }
}

impl Desk {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().expect("no holder panics")
    }

    /// The receipt comes first, then everything else.
    fn take(&self, headers: &HashMap<String, String>, body: &[u8]) -> (usize, Answer) {
        let receipt = read_receipt(headers, body, self.profile.name);
        let mut book = self.book();
        let number = book.receipts.len();
        self.lines.write(&json!({ "n": number, "receipt": receipt }));
        book.receipts.push(receipt.clone());
        let mut mood = book.mood;
        if mood == Mood::Well && book.rng.random_ratio(1, 50) {
            mood = Mood::BAD[book.rng.random_range(0..Mood::BAD.len())];
        }
        let coin = book.rng.random_bool(0.5);
        (number, self.treat(&mut book, number, &receipt, mood, coin))
    }

    fn treat(&self, book: &mut Book, number: usize, receipt: &Receipt, mood: Mood, coin: bool) -> Answer {
        let speaks = self.profile.speech == Speech::Words;
        let word = |word: &str| vec![("outbox-ack", format!("{word}; key=\"{}\"", receipt.key))];
        let http = |status, headers| Answer::Http { status, headers, after: Duration::ZERO };
        let (said, answer) = match mood {
            Mood::Errors if coin => (Said::Status(500), http(500, Vec::new())),
            Mood::Throttles => (Said::Status(429), http(429, vec![("retry-after", "1".into())])),
            Mood::InProgress if speaks => (Said::InProgress, http(409, word("in-progress"))),
            Mood::InProgress => (Said::InProgress, http(409, Vec::new())),
            Mood::NotApplied if speaks => (Said::NotApplied, http(503, word("not-applied"))),
            Mood::NotApplied => (Said::Status(503), http(503, Vec::new())),
            Mood::Refuses => (Said::Status(404), http(404, Vec::new())),
            Mood::ResetsBefore => (Said::Nothing, Answer::Reset),
            Mood::BlackHole => (Said::Nothing, Answer::Never),
            Mood::Well | Mood::Errors | Mood::Garbage | Mood::ResetsAfter | Mood::Slow | Mood::Crawls => {
                let (said, honest) = self.apply(book, number, receipt);
                match mood {
                    Mood::Errors => (Said::Status(500), http(500, Vec::new())),
                    Mood::Garbage if speaks => {
                        (Said::Garbage, http(200, vec![("outbox-ack", "perhaps; or=not".into())]))
                    }
                    Mood::Garbage => (Said::Garbage, Answer::Raw(b"HTTP/1.1 banana\r\n\r\n")),
                    Mood::ResetsAfter => (Said::Nothing, Answer::Reset),
                    Mood::Slow => (said, delayed(honest, TIMEOUT + Duration::from_millis(500))),
                    Mood::Crawls => (said, delayed(honest, Duration::from_millis(300))),
                    _ => (said, honest),
                }
            }
        };
        book.receipts[number].said = Some(said);
        answer
    }

    fn apply(&self, book: &mut Book, number: usize, receipt: &Receipt) -> (Said, Answer) {
        let known = book.known.get(&receipt.key).map(|sha256| *sha256 == receipt.sha256);
        let mut parts = receipt.key.split(':');
        let task = parts.next().unwrap_or_default().to_owned();
        let epoch: i64 = parts.next().and_then(|epoch| epoch.parse().ok()).unwrap_or(0);
        let newest = book.epochs.get(&task).copied().unwrap_or(0);
        let speaks = self.profile.speech == Speech::Words;
        let said = match known {
            Some(true) if speaks => Said::Duplicate,
            Some(false) if speaks => Said::Conflict,
            None if speaks && epoch < newest => Said::Stale,
            _ => {
                book.applied += 1;
                book.receipts[number].applied = Some(book.applied);
                book.known.insert(receipt.key.clone(), receipt.sha256.clone());
                book.epochs.insert(task, newest.max(epoch));
                if speaks { Said::Applied } else { Said::Fine }
            }
        };
        let (status, word) = match said {
            Said::Duplicate => (200, Some("duplicate".to_owned())),
            Said::Conflict => (422, Some("conflict".to_owned())),
            Said::Stale => (412, Some(format!("stale; current={newest}"))),
            Said::Applied => (200, Some("applied".to_owned())),
            _ => (204, None),
        };
        let headers = word.map(|word| ("outbox-ack", word)).into_iter().collect();
        (said, Answer::Http { status, headers, after: Duration::ZERO })
    }

    fn answered(&self, number: usize) {
        let mut book = self.book();
        let receipt = &mut book.receipts[number];
        receipt.answered = Some(now());
        self.lines
            .write(&json!({ "n": number, "said": receipt.said, "applied": receipt.applied, "at": receipt.answered }));
    }
}

fn delayed(answer: Answer, wait: Duration) -> Answer {
    match answer {
        Answer::Http { status, headers, .. } => Answer::Http { status, headers, after: wait },
        other => other,
    }
}

fn read_receipt(headers: &HashMap<String, String>, body: &[u8], me: &str) -> Receipt {
    let header = |name: &str| headers.get(name).cloned().unwrap_or_default();
    let key = header("webhook-id");
    let digest = Sha256::digest(body);
    let encoded = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, digest);
    let mut parts = key.split(':');
    let pairs = [
        ("idempotency-key", format!("\"{key}\"")),
        ("outbox-task-id", parts.next().unwrap_or_default().to_owned()),
        ("outbox-lease-epoch", parts.next().unwrap_or_default().to_owned()),
        ("outbox-consumer", me.to_owned()),
        ("content-digest", format!("sha-256=:{encoded}:")),
    ];
    let odd = pairs.iter().find(|(name, wanted)| header(name) != *wanted);
    Receipt {
        at: now(),
        attempt: header("outbox-attempt").parse().unwrap_or(0),
        sha256: hex(&digest),
        odd: odd.map(|(name, wanted)| format!("{name} is {:?}, not {wanted:?}", header(name))),
        key,
        applied: None,
        said: None,
        answered: None,
    }
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Answers one request after the other.
async fn serve(mut socket: TcpStream, desk: Arc<Desk>) {
    let _ = socket.set_nodelay(true);
    let mut buffer = Vec::new();
    while let Some((headers, body)) = read_request(&mut socket, &mut buffer).await {
        let (number, answer) = desk.take(&headers, &body);
        match answer {
            Answer::Http { status, headers, after } => {
                tokio::time::sleep(after).await;
                let mut text = format!("HTTP/1.1 {status} Answer\r\n");
                headers.iter().for_each(|(name, value)| text.push_str(&format!("{name}: {value}\r\n")));
                text.push_str(if status == 204 { "\r\n" } else { "content-length: 0\r\n\r\n" });
                // Written down first: the relay's record of the answer can only be later.
                desk.answered(number);
                if socket.write_all(text.as_bytes()).await.is_err() {
                    return;
                }
            }
            Answer::Raw(bytes) => {
                desk.answered(number);
                let _ = socket.write_all(bytes).await;
                return;
            }
            Answer::Reset => {
                let _ = socket.set_zero_linger();
                return;
            }
            Answer::Never => {
                let mut rest = [0; 1_024];
                while matches!(socket.read(&mut rest).await, Ok(count) if count > 0) {}
                return;
            }
        }
    }
}

async fn read_request(socket: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<(HashMap<String, String>, Vec<u8>)> {
    let end = loop {
        if let Some(at) = buffer.windows(4).position(|window| window == b"\r\n\r\n") {
            break at + 4;
        }
        if socket.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    };
    let head: Vec<u8> = buffer.drain(..end).collect();
    let text = String::from_utf8_lossy(&head);
    let pair = |line: &str| line.split_once(':').map(|(n, v)| (n.to_ascii_lowercase(), v.trim().to_owned()));
    let headers: HashMap<String, String> = text.lines().skip(1).filter_map(pair).collect();
    let length: usize = headers.get("content-length").and_then(|n| n.parse().ok()).unwrap_or(0);
    while buffer.len() < length {
        if socket.read_buf(buffer).await.ok()? == 0 {
            return None;
        }
    }
    Some((headers, buffer.drain(..length).collect()))
}
