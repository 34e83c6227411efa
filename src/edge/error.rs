//! What keeps an edge from being built, and how an attempt's error is written down.

use std::error::Error;
use std::path::PathBuf;

use super::egress::Refused;
use super::request::RequestError;
use super::sign::SecretError;

/// Why a consumer cannot be reached as configured. Each message names the consumer and what to write instead.
#[derive(Debug, thiserror::Error)]
pub enum EdgeError {
    #[error("consumer {consumer}: is not an HTTP edge; write kind = \"http\" and a url")]
    NotHttp { consumer: String },
    #[error("consumer {consumer}: cannot read {key}_file {}; write a file that holds one line from `fencepost secret new`", path.display())]
    SecretFile {
        consumer: String,
        key: &'static str,
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error(
        "consumer {consumer}: the variable {variable} named by {key}_env is not set; set it to the output of `fencepost secret new`"
    )]
    SecretVariable { consumer: String, key: &'static str, variable: String },
    #[error("consumer {consumer}: {key} is not usable; write the output of `fencepost secret new` there")]
    Secret {
        consumer: String,
        key: &'static str,
        #[source]
        source: SecretError,
    },
    #[error(
        "consumer {consumer}: its url is refused; write another host, or name its network in [http] allow where the reason permits it"
    )]
    Egress {
        consumer: String,
        #[source]
        source: Refused,
    },
    #[error("consumer {consumer}: its headers cannot be built")]
    Headers {
        consumer: String,
        #[source]
        source: RequestError,
    },
    #[error("consumer {consumer}: no broker {broker:?} is configured here; write [brokers.{broker}]")]
    Broker { consumer: String, broker: String },
    #[error("consumer {consumer}: its exchange or routing key cannot be used")]
    Message {
        consumer: String,
        #[source]
        source: super::amqp::message::Invalid,
    },
    #[error(
        "consumer {consumer}: its HTTP client cannot be built (a machine without CA certificates? install ca-certificates)"
    )]
    Client {
        consumer: String,
        #[source]
        source: reqwest::Error,
    },
}

/// The longest text kept of one attempt's error, in bytes.
pub const REPORT_LIMIT: usize = 1024;

/// The chain of causes on one line: control characters escaped, at most [`REPORT_LIMIT`] bytes. A cause that only
/// repeats the end of its parent is left out.
pub fn report(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.ends_with(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = error.source();
    }
    printable(&text, REPORT_LIMIT)
}

/// `text` with its control characters escaped, cut to at most `limit` bytes at the end of a character.
pub fn printable(text: &str, limit: usize) -> String {
    let mut out = String::with_capacity(text.len().min(limit));
    for c in text.chars() {
        let before = out.len();
        if c.is_control() {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
        if out.len() > limit {
            out.truncate(before);
            break;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Link {
        text: &'static str,
        #[source]
        source: Option<Box<Link>>,
    }

    fn chain(texts: &[&'static str]) -> Link {
        let mut texts = texts.iter().rev();
        let last = Link { text: texts.next().unwrap(), source: None };
        texts.fold(last, |inner, text| Link { text, source: Some(Box::new(inner)) })
    }

    #[test]
    fn the_whole_chain_is_named_once() {
        assert_eq!(report(&chain(&["sending", "tcp: refused", "refused"])), "sending: tcp: refused");
    }

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(report(&chain(&["a\r\nb\u{1b}[31m"])), "a\\r\\nb\\u{1b}[31m");
    }

    proptest! {
        #[test]
        fn printable_text_is_short_and_plain(text in any::<String>(), limit in 0usize..64) {
            let out = printable(&text, limit);
            prop_assert!(out.len() <= limit);
            prop_assert!(!out.chars().any(char::is_control));
        }
    }
}
