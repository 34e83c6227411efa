//! Every end without a complete head: what is provable, what is in doubt, and how far the attempt got.

use fencepost::model::outcome::Phase;

use super::*;
use crate::support::receiver::{Cut, OnAccept, Receiver, Script};

/// More than sockets and clients buffer, so that a peer that does not read is noticed.
const LARGE: usize = 16 << 20;

#[tokio::test]
async fn silence_after_the_request_is_ambiguous() {
    let receiver = Receiver::start().await;
    let edge = hasty(&receiver.url());
    for script in [
        Script::stall(),
        Script::cut(Cut::Fin),
        Script::cut(Cut::Rst),
        Script::raw("HTTP/1.1 2").then_stall(),
        Script::raw("HTTP/1.1 2").then_cut(Cut::Fin),
        Script::raw("HTTP/1.1 200 OK\r\nOutbox-Ack: applied\r\n").then_stall(),
        Script::raw("HTTP/1.1 200 OK\r\nOutbox-Ack: applied\r\n").then_cut(Cut::Fin),
        Script::raw("HTTP/1.1 200 OK\r\nOutbox-Ack: applied\r\n").then_cut(Cut::Rst),
        Script::drip(Script::answer(200).ack("applied").header("X-Padding", "x".repeat(500)).bytes()),
        Script::raw("220 smtp.example ESMTP\r\n").then_cut(Cut::Fin),
        Script::raw("HTTP/1.1 200 OK\r\nno colon\r\n\r\n").then_cut(Cut::Fin),
        Script::raw("HTTP/1.1 999999 OK\r\n\r\n").then_cut(Cut::Fin),
        Script::raw([0, 255, 13, 10, 13, 10]).then_stall(),
    ] {
        for payload in ["{}", ""] {
            receiver.next(script.clone());
            let outcome = attempt(&edge, &effect(payload)).await;
            assert_eq!(outcome.end, End::Ambiguous, "{script:?}");
            assert_eq!(outcome.evidence.phase, Phase::Wait, "{script:?} {payload:?}");
            assert!(outcome.evidence.bytes_left && outcome.evidence.error.is_some() && outcome.retry_after.is_none());
        }
    }
    assert_eq!(receiver.requests().len(), 26, "wire requests equal attempts");
}

#[tokio::test]
async fn a_body_that_nobody_reads_is_ambiguous_while_it_is_sent() {
    let receiver = Receiver::start().await;
    let edge = hasty(&receiver.url());
    let large = effect(vec![b'x'; LARGE]);
    for script in
        [Script::stall_before_body(), Script::cut_before_body(Cut::Rst), Script::early("HTTP/1.1 4").then_stall()]
    {
        receiver.next(script.clone());
        let outcome = attempt(&edge, &large).await;
        assert_eq!((&outcome.end, outcome.evidence.phase), (&End::Ambiguous, Phase::Send), "{script:?}");
        assert!(outcome.evidence.bytes_left);
    }
    receiver.next_connection(OnAccept::Stall);
    let outcome = attempt(&edge, &large).await;
    assert_eq!((outcome.end, outcome.evidence.phase), (End::Ambiguous, Phase::Send));
    receiver.next_connection(OnAccept::Stall);
    let outcome = attempt(&edge, &effect("{}")).await;
    assert_eq!((outcome.end, outcome.evidence.phase), (End::Ambiguous, Phase::Wait));
    assert_eq!(receiver.connections(), 5);
}

#[tokio::test]
async fn an_early_answer_counts_while_the_body_is_still_being_sent() {
    let receiver = Receiver::start().await;
    let edge = edge(&receiver.url(), "");
    let early = Script::answer(413).ack("rejected").bytes();
    receiver.next(Script::early(early).then_stall());
    let outcome = attempt(&edge, &effect(vec![b'x'; LARGE])).await;
    assert!(matches!(answered(&outcome), (413, AckReading::Word { .. })), "{outcome:?}");
}

#[tokio::test]
async fn an_early_answer_followed_by_a_reset_is_either_heard_or_in_doubt() {
    let receiver = Receiver::start().await;
    let edge = edge(&receiver.url(), "");
    for _ in 0..10 {
        receiver.next(Script::early(Script::answer(413).bytes()).then_cut(Cut::Rst));
        let outcome = attempt(&edge, &effect(vec![b'x'; LARGE])).await;
        match outcome.end {
            End::Answered { status, .. } => assert_eq!(status, 413),
            // The reset overtook the answer: RFC 9112, 9.6.
            End::Ambiguous => assert_eq!(outcome.evidence.phase, Phase::Send),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(receiver.requests().len(), 10);
}

#[tokio::test]
async fn a_connection_cut_at_once_is_ambiguous_because_bytes_may_have_left() {
    let receiver = Receiver::start().await;
    let edge = hasty(&receiver.url());
    for how in [Cut::Fin, Cut::Rst] {
        receiver.next_connection(OnAccept::Cut(how));
        let outcome = attempt(&edge, &effect("{}")).await;
        match outcome.end {
            End::Ambiguous => assert!(outcome.evidence.bytes_left),
            // The cut was noticed before the request was handed over.
            End::NotDelivered => assert!(!outcome.evidence.bytes_left),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(receiver.connections(), 2);
}
