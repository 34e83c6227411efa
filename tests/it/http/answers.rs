//! Every answer whose head arrived: status, word, hint.

use fencepost::model::outcome::{AckReading, Phase};
use fencepost::model::token::Ack;

use super::*;
use crate::support::receiver::{Cut, Receiver, Script};

const WORDS: [(&str, Ack); 7] = [
    ("applied", Ack::Applied),
    ("duplicate", Ack::Duplicate),
    ("stale; current=9", Ack::Stale { current: 9 }),
    ("conflict", Ack::Conflict),
    ("rejected", Ack::Rejected),
    ("in-progress", Ack::InProgress),
    ("not-applied", Ack::NotApplied),
];

/// What the contract makes of a word under a status.
fn expected(status: u16, word: &str, ack: Ack) -> AckReading {
    let success = (200..300).contains(&status);
    let raw = word.to_owned();
    match ack {
        Ack::Applied | Ack::Duplicate if !success => AckReading::Contradicted { ack, raw },
        Ack::InProgress | Ack::NotApplied if success => {
            AckReading::Malformed { raw, why: "says not done under a 2xx status" }
        }
        _ => AckReading::Word { ack, retain: None, raw },
    }
}

#[tokio::test]
async fn every_status_with_and_without_every_word() {
    let receiver = Receiver::start().await;
    let edge = edge(&receiver.url(), "");
    let effect = effect("{}");
    let statuses = (200..=208).chain(300..=308).chain(400..=451).chain(500..=511).chain([226, 499, 520, 524, 599]);
    let mut sent = 0;
    for status in statuses {
        receiver.next(Script::answer(status));
        let outcome = attempt(&edge, &effect).await;
        assert_eq!(answered(&outcome), (status, &AckReading::Silent));
        assert_eq!(outcome.evidence.phase, Phase::Done);
        assert!(outcome.evidence.bytes_left && outcome.evidence.error.is_none());
        for (word, ack) in WORDS {
            receiver.next(Script::answer(status).ack(word));
            let outcome = attempt(&edge, &effect).await;
            assert_eq!(answered(&outcome), (status, &expected(status, word, ack)), "{status} {word}");
        }
        sent += 1 + WORDS.len();
    }
    assert_eq!(receiver.requests().len(), sent, "wire requests equal attempts");
    assert_eq!(receiver.connections(), 1, "one after the other on one connection");
}

#[tokio::test]
async fn malformed_words_are_kept_raw_and_never_taken() {
    let receiver = Receiver::start().await;
    let edge = edge(&receiver.url(), "");
    for (values, raw) in [
        (&["applied", "applied"][..], "applied, applied"),
        (&["applied, duplicate"], "applied, duplicate"),
        (&["applied; key=\"task-1:4\""], "applied; key=\"task-1:4\""),
        (&["applied; key=\"task-1:3:2\""], "applied; key=\"task-1:3:2\""),
        (&["stale; current=3"], "stale; current=3"),
        (&["stale"], "stale"),
        (&["yes!; ok"], "yes!; ok"),
        (&["accepted"], "accepted"),
        (&[""], ""),
        (&["\"applied\""], "\"applied\""),
        (&["\u{fc}"], "\u{fc}"),
    ] {
        let answer = values.iter().fold(Script::answer(200), |answer, value| answer.ack(value));
        receiver.next(answer);
        let outcome = attempt(&edge, &effect("{}")).await;
        assert!(matches!(answered(&outcome), (200, AckReading::Malformed { .. })), "{values:?}: {outcome:?}");
        assert_eq!(outcome.ack_raw(), Some(raw));
    }
}

#[tokio::test]
async fn words_name_the_key_and_how_long_it_is_kept() {
    let receiver = Receiver::start().await;
    let edge = edge(&receiver.url(), "");
    let raw = "duplicate; key=\"task-1:3\"; retain=86400";
    receiver.next(Script::answer(204).ack(raw));
    let outcome = attempt(&edge, &effect("{}")).await;
    let word = AckReading::Word { ack: Ack::Duplicate, retain: seconds(86_400), raw: raw.into() };
    assert_eq!(answered(&outcome), (204, &word));

    receiver.next(Script::answer(200).header("Idempotent-Replayed", "true"));
    let outcome = attempt(&edge, &effect("{}")).await;
    assert!(matches!(answered(&outcome), (200, AckReading::Word { ack: Ack::Duplicate, .. })));
    receiver.next(Script::answer(500).header("Idempotent-Replayed", "true"));
    assert_eq!(answered(&attempt(&edge, &effect("{}")).await), (500, &AckReading::Silent));
}

#[tokio::test]
async fn redirects_of_each_kind_are_answers_and_never_followed() {
    let (receiver, elsewhere) = (Receiver::start().await, Receiver::start().await);
    let edge = edge(&receiver.url(), "");
    for status in [300, 301, 302, 303, 304, 305, 307, 308] {
        receiver.next(Script::answer(status).header("Location", elsewhere.url()));
        assert_eq!(answered(&attempt(&edge, &effect("{}")).await), (status, &AckReading::Silent));
    }
    assert_eq!(receiver.requests().len(), 8);
    assert_eq!(elsewhere.connections(), 0);
}

#[tokio::test]
async fn retry_after_is_heard_where_the_answer_is_not_final() {
    let receiver = Receiver::start().await;
    let edges = [edge(&receiver.url(), "ack = 'optional'"), edge(&receiver.url(), "ack = 'required'")];
    let date = "Sun, 06 Nov 1994 08:49:37 GMT";
    let minute_later = "Sun, 06 Nov 1994 08:50:37 GMT";
    let answer = |status, after: &str| Script::answer(status).header("Retry-After", after);
    for (script, optional, required) in [
        (answer(429, "120"), seconds(120), seconds(120)),
        (answer(503, "0"), seconds(0), seconds(0)),
        (answer(503, minute_later).header("Date", date), seconds(60), seconds(60)),
        (answer(503, minute_later), None, None), // long past, by the database's clock
        (answer(503, "-5"), None, None),
        (answer(503, "soon"), None, None),
        (answer(409, "7").ack("in-progress"), seconds(7), seconds(7)),
        (answer(400, "7").ack("not-applied"), seconds(7), seconds(7)),
        (answer(422, "7").ack("rejected"), None, None),
        (answer(200, "7").ack("applied"), None, None),
        (answer(500, "7").ack("applied"), seconds(7), seconds(7)),
        (answer(200, "7"), None, seconds(7)),
        (answer(200, "7").ack("nonsense"), None, seconds(7)),
    ] {
        for (edge, expected) in edges.iter().zip([optional, required]) {
            receiver.next(script.clone());
            assert_eq!(attempt(edge, &effect("{}")).await.retry_after, expected, "{script:?}");
        }
    }
}

#[tokio::test]
async fn a_status_stands_whatever_becomes_of_its_body() {
    let receiver = Receiver::start().await;
    let (patient, hasty) = (edge(&receiver.url(), ""), hasty(&receiver.url()));
    let head = |status| Script::answer(status).ack("applied").header("Content-Length", "1000000").head();
    let chunked = Script::answer(200).ack("applied").header("Transfer-Encoding", "chunked").head();
    for (script, error) in [
        (Script::raw(head(200)).then_stall(), "did not end within"),
        (Script::raw(head(200)).then_cut(Cut::Fin), "end of file"),
        (Script::raw(head(200)).then_cut(Cut::Rst), ""),
        (Script::raw(head(200)).then_drip("slowly ".repeat(1000)), "did not end within"),
        (Script::raw(head(200)).then_repeat([b'x'; 1000]), "exceeds 65536 bytes"),
        (Script::raw(chunked.clone()).then_repeat("5\r\nhello\r\n"), "exceeds 65536 bytes"),
        (Script::raw([chunked, b"what is this".to_vec()].concat()), ""),
    ] {
        receiver.next(script.clone());
        let edge = if error == "did not end within" { &hasty } else { &patient };
        let outcome = attempt(edge, &effect("{}")).await;
        assert!(matches!(answered(&outcome), (200, AckReading::Word { ack: Ack::Applied, .. })), "{outcome:?}");
        assert_eq!(outcome.evidence.phase, Phase::Body, "{script:?}");
        let text = outcome.evidence.error.expect("an error");
        assert!(text.contains(error), "{text} instead of {error}");
    }
}

#[tokio::test]
async fn bodies_up_to_the_limit_keep_their_connection() {
    let receiver = Receiver::start().await;
    let edge = edge(&receiver.url(), "");
    for size in [0, 1, 64 * 1024] {
        receiver.next(Script::answer(200).ack("applied").body(vec![b'x'; size]));
        assert_eq!(attempt(&edge, &effect("{}")).await.evidence.phase, Phase::Done);
    }
    assert_eq!(receiver.connections(), 1);
}

#[tokio::test]
async fn heads_are_read_up_to_16_kib() {
    let receiver = Receiver::start().await;
    let edge = edge(&receiver.url(), "");
    let padded = |size: usize| Script::answer(200).ack("applied").header("X-Padding", "x".repeat(size));
    receiver.next(padded(15_000));
    assert!(matches!(answered(&attempt(&edge, &effect("{}")).await).1, AckReading::Word { .. }));
    receiver.next(padded(17_000));
    let outcome = attempt(&edge, &effect("{}")).await;
    let why = "the answer's head exceeds 16 KiB";
    assert_eq!(answered(&outcome), (200, &AckReading::Malformed { raw: String::new(), why }));
    // The status of a far larger one is lost, and with it what the consumer meant.
    receiver.next(padded(1_000_000));
    let outcome = attempt(&edge, &effect("{}")).await;
    assert_eq!(outcome.end, End::Ambiguous);
    assert!(outcome.evidence.error.expect("an error").contains("too large"));
}

#[tokio::test]
async fn informational_answers_are_not_the_answer() {
    let receiver = Receiver::start().await;
    let edge = hasty(&receiver.url());
    let hints = [Script::answer(100).head(), Script::answer(103).ack("applied").head()].concat();
    receiver.next(Script::raw([hints.clone(), Script::answer(409).ack("rejected").bytes()].concat()));
    assert!(matches!(
        answered(&attempt(&edge, &effect("{}")).await),
        (409, AckReading::Word { ack: Ack::Rejected, .. })
    ));
    for script in [Script::raw(hints.clone()).then_stall(), Script::raw(hints).then_cut(Cut::Fin)] {
        receiver.next(script);
        assert_eq!(attempt(&edge, &effect("{}")).await.end, End::Ambiguous);
    }
    receiver
        .next(Script::raw(Script::answer(101).header("Upgrade", "websocket").header("Connection", "upgrade").head()));
    assert_eq!(answered(&attempt(&edge, &effect("{}")).await), (101, &AckReading::Silent));
}
