//! Durations as people write them: a whole number and a unit.

use std::time::Duration;

/// Reads `500ms`, `15s`, `5m`, `2h`, `7d`.
pub fn parse(text: &str) -> Option<Duration> {
    let digits = text.find(|c: char| !c.is_ascii_digit())?;
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().ok()?;
    let millis = match unit.trim_start() {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return None,
    };
    Some(Duration::from_millis(number.checked_mul(millis)?))
}

/// As text in a file, never zero: `#[serde(with = "duration::text")]`.
pub mod text {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    use super::parse;

    pub fn serialize<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&format!("{}ms", duration.as_millis()))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        let text = String::deserialize(deserializer)?;
        parse(&text).filter(|duration| !duration.is_zero()).ok_or_else(|| {
            D::Error::custom(format!(
                "{text:?} is not a duration: a number from 1 and a unit, such as 500ms, 15s, 5m, 2h, 7d"
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_units() {
        assert_eq!(parse("500ms"), Some(Duration::from_millis(500)));
        assert_eq!(parse("7d"), Some(Duration::from_secs(604_800)));
        for bad in ["", "15", "s", "1.5s", "-1s", "1w", "99999999999999999999d", "18446744073709551615d"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
