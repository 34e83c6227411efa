//! The consumer's word about a key: `Outbox-Ack: <token>[; key="..."][; retain=<seconds>][; current=<epoch>]`, an
//! RFC 8941 item (contract, section 4).

use std::time::Duration;

use http::{HeaderMap, StatusCode};

use super::error::printable;
use super::item::{Bare, Item};
use crate::model::key::EffectKey;
use crate::model::outcome::AckReading;
use crate::model::token::Ack;

/// The header's name.
pub const HEADER: &str = "outbox-ack";
/// What ready-made idempotency middleware adds to a repeated answer.
const REPLAYED: &str = "idempotent-replayed";
/// The longest acknowledgement kept, in bytes.
const RAW_LIMIT: usize = 512;

/// Reads an answer's head: its `Outbox-Ack`, else `Idempotent-Replayed: true` on a 2xx, held against its status.
pub fn of_answer(status: StatusCode, headers: &HeaderMap, key: &EffectKey) -> AckReading {
    let reading = read(headers.get_all(HEADER).iter().map(|value| value.as_bytes()), key);
    let replayed = || headers.get(REPLAYED).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"true"));
    if reading == AckReading::Silent && status.is_success() && replayed() {
        return AckReading::Word { ack: Ack::Duplicate, retain: None, raw: format!("{REPLAYED}: true") };
    }
    under_status(status, reading)
}

/// The two places where a token and a status contradict each other: `applied` or `duplicate` on a non-2xx is kept and
/// ambiguous; `in-progress` or `not-applied` on a 2xx is malformed.
pub fn under_status(status: StatusCode, reading: AckReading) -> AckReading {
    match reading {
        AckReading::Word { ack: ack @ (Ack::Applied | Ack::Duplicate), raw, .. } if !status.is_success() => {
            AckReading::Contradicted { ack, raw }
        }
        AckReading::Word { ack: Ack::InProgress | Ack::NotApplied, raw, .. } if status.is_success() => {
            AckReading::Malformed { raw, why: "says not done under a 2xx status" }
        }
        other => other,
    }
}

/// Reads the values of all `Outbox-Ack` headers of one answer to `key`. No value at all is silence; more than one is
/// malformed.
pub fn read<'a>(values: impl IntoIterator<Item = &'a [u8]>, key: &EffectKey) -> AckReading {
    let values: Vec<&[u8]> = values.into_iter().collect();
    let joined = || printable(&String::from_utf8_lossy(&values.join(b", ".as_slice())), RAW_LIMIT);
    let word = match values.as_slice() {
        [] => return AckReading::Silent,
        [value] => parse(value, key),
        _ => Err("repeated"),
    };
    match word {
        Ok((ack, retain)) => AckReading::Word { ack, retain, raw: joined() },
        Err(why) => AckReading::Malformed { raw: joined(), why },
    }
}

fn parse(value: &[u8], key: &EffectKey) -> Result<(Ack, Option<Duration>), &'static str> {
    let item = Item::parse(value).ok_or("not one RFC 8941 item")?;
    let Bare::Token(token) = &item.value else {
        return Err("not a token");
    };
    match item.param("key") {
        None => {}
        Some(Bare::String(named)) if *named == key.to_string() => {}
        Some(Bare::String(_)) => return Err("names another key"),
        Some(_) => return Err("key is not a string"),
    }
    let whole = |name, why| match item.param(name) {
        None => Ok(None),
        Some(Bare::Integer(number)) if *number >= 0 => Ok(Some(*number)),
        Some(_) => Err(why),
    };
    let retain = whole("retain", "retain is not a whole number of seconds")?;
    let current = whole("current", "current is not an epoch")?;
    let ack = word(token, current, key)?;
    Ok((ack, retain.map(|seconds| Duration::from_secs(seconds.unsigned_abs()))))
}

/// The word a token is in answer to `key`, over HTTP and AMQP alike. `stale` needs a `current` above the key's epoch;
/// whether the task knows an epoch that high is for the ledger to say.
pub fn word(token: &str, current: Option<i64>, key: &EffectKey) -> Result<Ack, &'static str> {
    Ok(match token {
        "applied" => Ack::Applied,
        "duplicate" => Ack::Duplicate,
        "stale" => match current {
            Some(current) if current > key.lease_epoch().get() => Ack::Stale { current },
            Some(_) => return Err("stale, but current is not above the key's epoch"),
            None => return Err("stale without current"),
        },
        "conflict" => Ack::Conflict,
        "rejected" => Ack::Rejected,
        "in-progress" => Ack::InProgress,
        "not-applied" => Ack::NotApplied,
        _ => return Err("not a token of the contract"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key() -> EffectKey {
        "task:3".parse().unwrap()
    }

    fn one(value: &str) -> AckReading {
        read([value.as_bytes()], &key())
    }

    fn word(ack: Ack, retain: Option<u64>, raw: &str) -> AckReading {
        AckReading::Word { ack, retain: retain.map(Duration::from_secs), raw: raw.into() }
    }

    #[test]
    fn every_token_with_its_parameters() {
        for (token, ack) in [
            ("applied", Ack::Applied),
            ("duplicate", Ack::Duplicate),
            ("conflict", Ack::Conflict),
            ("rejected", Ack::Rejected),
            ("in-progress", Ack::InProgress),
            ("not-applied", Ack::NotApplied),
        ] {
            assert_eq!(one(token), word(ack, None, token));
            let full = format!("{token}; key=\"task:3\"; retain=604800; unknown=?1");
            assert_eq!(one(&full), word(ack, Some(604_800), &full));
        }
        assert_eq!(one("stale; current=4"), word(Ack::Stale { current: 4 }, None, "stale; current=4"));
        assert_eq!(read([], &key()), AckReading::Silent);
    }

    #[test]
    fn malformed_words_say_why() {
        for (value, why) in [
            ("", "not one RFC 8941 item"),
            ("applied, applied", "not one RFC 8941 item"),
            ("applied; key=\"task:3", "not one RFC 8941 item"),
            ("\"applied\"", "not a token"),
            ("Applied", "not a token of the contract"),
            ("accepted", "not a token of the contract"),
            ("not_applied", "not a token of the contract"),
            ("applied; key=\"task:4\"", "names another key"),
            ("applied; key=\"task:3:2\"", "names another key"),
            ("applied; key=task:3", "key is not a string"),
            ("applied; key", "key is not a string"),
            ("applied; retain=-1", "retain is not a whole number of seconds"),
            ("applied; retain=1.5", "retain is not a whole number of seconds"),
            ("applied; retain=\"9\"", "retain is not a whole number of seconds"),
            ("stale", "stale without current"),
            ("stale; current=3", "stale, but current is not above the key's epoch"),
            ("stale; current=2", "stale, but current is not above the key's epoch"),
            ("stale; current=\"4\"", "current is not an epoch"),
        ] {
            assert_eq!(one(value), AckReading::Malformed { raw: value.into(), why }, "{value:?}");
        }
        let twice = read([b"applied".as_slice(), b"applied"], &key());
        assert_eq!(twice, AckReading::Malformed { raw: "applied, applied".into(), why: "repeated" });
    }

    #[test]
    fn a_replayed_answer_is_a_duplicate_only_on_success_and_in_silence() {
        let mut headers = HeaderMap::new();
        headers.insert("idempotent-replayed", "true".parse().unwrap());
        let ack = |status, headers: &HeaderMap| of_answer(status, headers, &key());
        assert_eq!(ack(StatusCode::OK, &headers), word(Ack::Duplicate, None, "idempotent-replayed: true"));
        assert_eq!(ack(StatusCode::BAD_REQUEST, &headers), AckReading::Silent);
        headers.insert("outbox-ack", "applied".parse().unwrap());
        assert_eq!(ack(StatusCode::OK, &headers), word(Ack::Applied, None, "applied"), "the token decides");
        headers.insert("outbox-ack", "nonsense".parse().unwrap());
        assert!(matches!(ack(StatusCode::OK, &headers), AckReading::Malformed { .. }));
        headers.remove("outbox-ack");
        headers.insert("idempotent-replayed", "false".parse().unwrap());
        assert_eq!(ack(StatusCode::OK, &headers), AckReading::Silent);
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(values in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..600), 0..3)) {
            let reading = read(values.iter().map(Vec::as_slice), &key());
            prop_assert_eq!(values.is_empty(), reading == AckReading::Silent);
            if let Some(raw) = reading.raw() {
                prop_assert!(raw.len() <= RAW_LIMIT && !raw.chars().any(char::is_control));
            }
        }

        #[test]
        fn a_word_never_names_another_key(value in "(applied|stale|rejected)(; ?(key=\"[a-z:0-9]{0,8}\"|current=[0-9]{1,3}|retain=[0-9]{1,3})){0,3}") {
            match one(&value) {
                AckReading::Word { ack: Ack::Stale { current }, .. } => prop_assert!(current > 3),
                AckReading::Word { .. } => prop_assert!(!value.contains("key=") || value.contains("key=\"task:3\"")),
                _ => {}
            }
        }
    }
}
