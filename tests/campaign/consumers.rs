//! What the consumers are, and the desk each of them works at: it writes down what comes before it thinks about it, dedups,
//! fences, and has moods. `http` and `amqp` bring the work and carry the answers.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use rand::Rng;
use rand::rngs::StdRng;
use serde::Serialize;
use serde_json::{Value, json};

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

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transport {
    Http,
    Amqp,
}

/// What a consumer is declared as, and how it behaves.
#[derive(Debug)]
pub struct Profile {
    pub name: &'static str,
    pub transport: Transport,
    pub speech: Speech,
    pub ack: &'static str,
    pub on_ambiguous: On,
    pub topic: &'static str,
}

/// Of the AMQP consumers' queues: by name, and by the version of what is sent.
pub const EXCHANGE: &str = "campaign";
pub const SORTED: &str = "campaign-sorted";
/// The versions of effects,
pub const VERSIONS: [&str; 2] = ["1", "2"];
/// and one that the queue at [`SORTED`] takes only when all is healed: until then each attempt of it comes back.
pub const LATE: &str = "3";
/// And one that goes to a queue which takes nothing until then: each attempt of it is nacked. Not to a full one of the
/// consumer's own, from which the broker drops what it has confirmed when it starts.
pub const REFUSED: &str = "4";
/// Whose queue hangs at [`SORTED`], and who is sent many at once.
pub const FIGURES: &str = "figures";
pub const ORDERED: &str = "ordered";
pub const ALL: &str = "all";

pub const HTTP: usize = 6;

pub static PROFILES: [Profile; 9] = [
    speaking("orders", Transport::Http, ORDERED, On::Retry),
    speaking("accounts", Transport::Http, ORDERED, On::Hold),
    silent("feed", Transport::Http, ORDERED, "none", On::Retry),
    speaking("billing", Transport::Http, ALL, On::Retry),
    silent("search", Transport::Http, ALL, "optional", On::Retry),
    silent("mail", Transport::Http, ALL, "none", On::Hold),
    speaking("stock", Transport::Amqp, ORDERED, On::Retry),
    speaking("parcels", Transport::Amqp, ALL, On::Retry),
    silent(FIGURES, Transport::Amqp, ALL, "none", On::Retry),
];

/// What happens where an outcome is not known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum On {
    Retry,
    Hold,
}

const fn speaking(name: &'static str, transport: Transport, topic: &'static str, on_ambiguous: On) -> Profile {
    Profile { name, transport, speech: Speech::Words, ack: "required", on_ambiguous, topic }
}

const fn silent(
    name: &'static str,
    transport: Transport,
    topic: &'static str,
    ack: &'static str,
    on_ambiguous: On,
) -> Profile {
    Profile { name, transport, speech: Speech::Bare, ack, on_ambiguous, topic }
}

pub fn profile(name: &str) -> Option<&'static Profile> {
    PROFILES.iter().find(|profile| profile.name == name)
}

impl Profile {
    pub fn holds(&self) -> bool {
        self.on_ambiguous == On::Hold
    }

    pub fn ordered(&self) -> bool {
        self.topic == ORDERED
    }

    /// Over AMQP.
    pub fn exchange(&self) -> &'static str {
        if self.name == FIGURES { SORTED } else { EXCHANGE }
    }

    /// Its declaration; over HTTP it is reached at `port`.
    pub fn spec(&self, port: u16) -> Value {
        let mut spec = json!({
            "kind": "http",
            "ack": self.ack,
            "on_ambiguous": if self.holds() { "hold" } else { "retry" },
            "ordering": if self.ordered() { "key" } else { "none" },
            "topics": [self.topic],
            "concurrency": 8,
        });
        let more = match self.transport {
            Transport::Http => json!({
                "url": format!("http://127.0.0.1:{port}/{}", self.name),
                "timeout": format!("{}ms", TIMEOUT.as_millis()),
                "connect_timeout": "500ms",
            }),
            // A shorter `ack_timeout` than a configuration file may have, so that a run sees it pass.
            Transport::Amqp => json!({
                "kind": "amqp", "exchange": self.exchange(), "routing_key": self.name,
                "timeout": "3s", "connect_timeout": "2s",
            }),
        };
        let fields = more.as_object().into_iter().flatten().map(|(name, value)| (name.clone(), value.clone()));
        spec.as_object_mut().into_iter().for_each(|spec| spec.extend(fields.clone()));
        match self.name {
            "mail" => spec["definite_statuses"] = json!([503]),
            "stock" | "parcels" => {
                spec["ack_timeout"] = json!("6s");
                spec["queue"] = json!(self.name);
                spec["republishes"] = json!(20);
            }
            FIGURES => spec["concurrency"] = json!(64),
            _ => {}
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
    /// 410: it is paused until somebody resumes it.
    Gone,
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
    pub const BAD: [Mood; 12] = [
        Mood::Errors,
        Mood::Throttles,
        Mood::InProgress,
        Mood::NotApplied,
        Mood::Refuses,
        Mood::Gone,
        Mood::Garbage,
        Mood::ResetsBefore,
        Mood::ResetsAfter,
        Mood::Slow,
        Mood::Crawls,
        Mood::BlackHole,
    ];
}

/// What becomes of a consumer's replies over AMQP on their way.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub enum Damage {
    /// Each comes twice.
    Doubled,
    /// They come when the message has been published again.
    Late,
    /// Somebody else replies first, and not the truth.
    Forged,
}

impl Damage {
    pub const ALL: [Damage; 3] = [Damage::Doubled, Damage::Late, Damage::Forged];
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
    /// Over AMQP: left to the broker, to bring it again.
    Returned,
}

/// A request as it came, and what was done about it.
#[derive(Clone, Debug, Serialize)]
pub struct Receipt {
    pub at: i64,
    pub key: String,
    pub attempt: u32,
    pub sha256: String,
    /// The broker says that it has brought it before.
    pub again: bool,
    /// What about the request contradicts itself.
    pub odd: Option<String>,
    /// Its place among all things this consumer applied.
    pub applied: Option<u64>,
    pub said: Option<Said>,
    pub answered: Option<i64>,
}

/// Where a consumer works.
pub struct Desk {
    pub profile: &'static Profile,
    book: Mutex<Book>,
    lines: Lines,
}

/// A receipt's number at its desk.
#[derive(Clone, Copy)]
pub struct Number(usize);

struct Book {
    mood: Mood,
    damage: Option<Damage>,
    calm: bool,
    rng: StdRng,
    receipts: Vec<Receipt>,
    /// Their keys.
    seen: HashSet<String>,
    /// Keys it has applied, with the body's digest.
    known: HashMap<String, String>,
    /// The newest epoch it has applied, by task.
    epochs: HashMap<String, i64>,
    applied: u64,
}

impl Desk {
    pub fn new(profile: &'static Profile, rng: StdRng, lines: Lines) -> Self {
        let book = Book {
            mood: Mood::Well,
            damage: None,
            calm: false,
            rng,
            receipts: Vec::new(),
            seen: HashSet::new(),
            known: HashMap::new(),
            epochs: HashMap::new(),
            applied: 0,
        };
        Self { profile, book: Mutex::new(book), lines }
    }

    pub fn feel(&self, mood: Mood) {
        self.book().mood = mood;
    }

    pub fn mood(&self) -> Mood {
        self.book().mood
    }

    /// While it is calm it has no moods but those it is given.
    pub fn calm(&self, calm: bool) {
        self.book().calm = calm;
    }

    pub fn suffer(&self, damage: Option<Damage>) {
        self.book().damage = damage;
    }

    /// What becomes of the next reply. One that is late only in an outage, so that the end of a run need not wait for it.
    pub fn damage(&self) -> Option<Damage> {
        let mut book = self.book();
        if book.damage.is_none() && !book.calm && book.rng.random_ratio(1, 30) {
            return Some(if book.rng.random_bool(0.5) { Damage::Doubled } else { Damage::Forged });
        }
        book.damage
    }

    pub fn receipts(&self) -> Vec<Receipt> {
        self.book().receipts.clone()
    }

    pub fn has_received(&self, key: &str) -> bool {
        self.book().seen.contains(key)
    }

    /// Whether it did the work of this key.
    pub fn has_applied(&self, key: &str) -> bool {
        self.book().known.contains_key(key)
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().expect("no holder panics")
    }

    /// The receipt comes first, then everything else. With it goes the mood for this one, and a coin.
    pub fn take(&self, receipt: Receipt) -> (Number, Mood, bool) {
        let mut book = self.book();
        let number = book.receipts.len();
        self.lines.write(&json!({ "n": number, "receipt": receipt }));
        book.seen.insert(receipt.key.clone());
        book.receipts.push(receipt);
        let mut mood = book.mood;
        if mood == Mood::Well && !book.calm && book.rng.random_ratio(1, 50) {
            mood = Mood::BAD[book.rng.random_range(0..Mood::BAD.len())];
        }
        let coin = book.rng.random_bool(0.5);
        (Number(number), mood, coin)
    }

    /// Does the work, where it is to be done, and gives the honest word for it.
    pub fn apply(&self, number: Number) -> Said {
        let mut book = self.book();
        let receipt = book.receipts[number.0].clone();
        let known = book.known.get(&receipt.key).map(|sha256| *sha256 == receipt.sha256);
        let (task, epoch) = receipt.task_and_epoch();
        let newest = book.epochs.get(&task).copied().unwrap_or(0);
        let speaks = self.profile.speech == Speech::Words;
        match known {
            Some(true) if speaks => Said::Duplicate,
            Some(false) if speaks => Said::Conflict,
            None if speaks && epoch < newest => Said::Stale,
            _ => {
                book.applied += 1;
                book.receipts[number.0].applied = Some(book.applied);
                book.known.insert(receipt.key.clone(), receipt.sha256);
                book.epochs.insert(task, newest.max(epoch));
                if speaks { Said::Applied } else { Said::Fine }
            }
        }
    }

    /// The word of section 4 of the contract, where there is one.
    pub fn word(&self, number: Number, said: Said) -> Option<String> {
        let book = self.book();
        let (task, _) = book.receipts[number.0].task_and_epoch();
        Some(match said {
            Said::Applied => "applied".into(),
            Said::Duplicate => "duplicate".into(),
            Said::Conflict => "conflict".into(),
            Said::NotApplied => "not-applied".into(),
            Said::InProgress => "in-progress".into(),
            Said::Stale => format!("stale; current={}", book.epochs.get(&task).copied().unwrap_or(0)),
            _ => return None,
        })
    }

    /// What will be answered, written down first: the relay's record of it can only be later.
    pub fn says(&self, number: Number, said: Said) {
        let mut book = self.book();
        let receipt = &mut book.receipts[number.0];
        receipt.said = Some(said);
        receipt.answered = Some(now());
        self.lines.write(&json!({ "n": number.0, "said": said, "applied": receipt.applied, "at": receipt.answered }));
    }
}

impl Receipt {
    fn task_and_epoch(&self) -> (String, i64) {
        let mut parts = self.key.split(':');
        let task = parts.next().unwrap_or_default().to_owned();
        (task, parts.next().and_then(|epoch| epoch.parse().ok()).unwrap_or(0))
    }
}

/// What of a request is not as its key and body say: pairs of a name with what it is and what it ought to be.
pub fn odd(pairs: &[(&str, String, String)]) -> Option<String> {
    let odd = pairs.iter().find(|(_, is, wanted)| is != wanted);
    odd.map(|(name, is, wanted)| format!("{name} is {is:?}, not {wanted:?}"))
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
