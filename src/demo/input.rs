//! The bodies that are sent: from a file, or made up.

use std::path::Path;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::{Error, Result};

/// The default of `payload_max_bytes`.
const LIMIT: usize = 1 << 20;

/// One body, sent verbatim.
#[derive(Clone, Debug, PartialEq)]
pub struct Body {
    pub kind: String,
    pub text: String,
}

/// Bodies, used in turn.
#[derive(Debug)]
pub struct Bodies {
    read: Vec<Body>,
}

/// A line that says what happened beside what it says about it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Typed<'a> {
    r#type: String,
    #[serde(borrow)]
    payload: &'a RawValue,
}

impl Bodies {
    /// None: bodies are made up.
    pub fn load(path: Option<&Path>) -> Result<Self> {
        let Some(path) = path else { return Ok(Self { read: Vec::new() }) };
        let fault = |what: String| Error::Payloads { path: path.into(), what };
        let text = std::fs::read_to_string(path).map_err(|e| fault(format!("cannot be read: {e}")))?;
        let mut read = Vec::new();
        for (n, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let body = Body::parse(line).map_err(|what| fault(format!("line {}: {what}", n + 1)))?;
            read.push(body);
        }
        if read.is_empty() {
            return Err(fault("is empty; write one JSON value per line".into()));
        }
        Ok(Self { read })
    }

    /// Those that were read.
    pub fn all(&self) -> impl Iterator<Item = &Body> {
        self.read.iter()
    }

    /// The body of the n-th task.
    pub fn of(&self, n: u32) -> Body {
        match self.read.get(n as usize % self.read.len().max(1)) {
            Some(body) => body.clone(),
            None => Body {
                kind: "order.paid".into(),
                text: format!(r#"{{"order": {n}, "amount": "{}.{:02}", "currency": "EUR"}}"#, 10 + n % 90, n % 100),
            },
        }
    }
}

impl Body {
    fn parse(line: &str) -> Result<Self, String> {
        let value: &RawValue = serde_json::from_str(line).map_err(|e| format!("not JSON: {e}"))?;
        let body = match serde_json::from_str::<Typed>(line) {
            Ok(typed) if is_word(&typed.r#type) => Self { kind: typed.r#type, text: typed.payload.get().into() },
            _ => Self { kind: "demo.event".into(), text: value.get().into() },
        };
        if body.text.len() > LIMIT {
            return Err(format!("{} bytes; the limit is {LIMIT}", body.text.len()));
        }
        Ok(body)
    }
}

/// Whether it can travel as a header's value.
fn is_word(text: &str) -> bool {
    !text.is_empty() && text.len() <= 128 && text.bytes().all(|b| b.is_ascii_graphic())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(line: &str) -> (String, String) {
        let body = Body::parse(line).unwrap();
        (body.kind, body.text)
    }

    #[test]
    fn a_line_is_any_json_value_or_a_typed_one() {
        let own = |kind: &str, text: &str| (kind.to_owned(), text.to_owned());
        assert_eq!(body(r#"{"type": "a.b", "payload": { "n" : 1.0 }}"#), own("a.b", r#"{ "n" : 1.0 }"#));
        assert_eq!(body(" [1,  2] "), own("demo.event", "[1,  2]"));
        assert_eq!(body("null"), own("demo.event", "null"));
        let more = r#"{"type": "a", "payload": 1, "id": 2}"#;
        assert_eq!(body(more), own("demo.event", more));
        assert_eq!(body(r#"{"type": "a b", "payload": 1}"#).0, "demo.event");
        assert!(Body::parse("{").unwrap_err().starts_with("not JSON"));
    }
}
