//! What is delivered: bodies of 400 bytes, and real ones.

use std::path::Path;

use super::{Error, Result};
use crate::demo::input;

/// The bodies of one row, used in turn.
pub struct Bodies {
    real: Vec<String>,
}

/// Which bodies a row delivers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Size {
    Small,
    Real,
}

const SMALL: usize = 400;
/// How many bodies are made up where none are given.
const MADE_UP: usize = 64;

impl Bodies {
    pub fn load(path: Option<&Path>) -> Result<Self> {
        let Some(path) = path else { return Ok(Self { real: (0..MADE_UP).map(made_up).collect() }) };
        let read = input::Bodies::load(Some(path))
            .map_err(|error| Error::Payloads { path: path.into(), what: error.to_string() })?;
        Ok(Self { real: read.all().map(|body| body.text.clone()).collect() })
    }

    pub fn of(&self, size: Size) -> Vec<Vec<u8>> {
        match size {
            Size::Small => vec![small()],
            Size::Real => self.real.iter().map(|body| body.clone().into_bytes()).collect(),
        }
    }
}

fn small() -> Vec<u8> {
    let head = br#"{"order":"0190b3c4-7d5e-7abc-8def-0123456789ab","amount":"129.90","currency":"EUR","note":""#;
    let mut body = head.to_vec();
    body.resize(SMALL - 2, b'n');
    body.extend_from_slice(br#""}"#);
    body
}

/// Sizes spread like those of webhooks: from 1 to 30 kB, half of them below 7.
fn made_up(n: usize) -> String {
    let share = n as f64 / (MADE_UP - 1) as f64;
    let lines = (10.0 * 30_f64.powf(share)) as usize;
    let items: Vec<String> = (0..lines)
        .map(|line| {
            format!(
                r#"{{"sku":"{:08x}","title":"item {line} of order {n}","quantity":{},"price":"{}.{:02}","url":""}}"#,
                line * 7919 + n,
                1 + line % 5,
                3 + line % 90,
                line % 100
            )
        })
        .collect();
    format!(r#"{{"order":{n},"items":[{}]}}"#, items.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_have_the_sizes_they_are_named_after() {
        assert_eq!(small().len(), 400);
        assert!(serde_json::from_slice::<serde_json::Value>(&small()).is_ok());
        let sizes: Vec<usize> = (0..MADE_UP).map(|n| made_up(n).len()).collect();
        assert!((700..1_300).contains(&sizes[0]), "{sizes:?}");
        assert!((25_000..35_000).contains(&sizes[MADE_UP - 1]), "{sizes:?}");
    }
}
