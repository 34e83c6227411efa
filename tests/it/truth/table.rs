//! The table of contract section 4, through the relay: what each answer and each cut becomes in ledger, parking lot and
//! attempts. Every attempt here is a first one; what follows from several is in `doubt` and `consumer_wide`.

use super::rig::{Rig, http};
use crate::support::receiver::{Answer, Cut, Receiver, Script};
use crate::support::tls::{Authority, ClientCertificate, Flaw};

/// One delivery: to whom, what it meets, and what must be recorded.
struct Case {
    consumer: &'static str,
    script: Script,
    attempt: &'static str,
    delivery: &'static str,
    /// What the delivery's reason or acknowledgement must contain.
    says: &'static str,
}

fn case(
    consumer: &'static str,
    script: impl Into<Script>,
    attempt: &'static str,
    delivery: &'static str,
    says: &'static str,
) -> Case {
    Case { consumer, script: script.into(), attempt, delivery, says }
}

fn ack(status: u16, word: &str) -> Answer {
    Script::answer(status).ack(word)
}

fn cases() -> Vec<Case> {
    let partial = "HTTP/1.1 200 OK\r\nOutbox-Ack: applied\r\n";
    let mut cases = vec![
        // The consumer's word.
        case("optional", ack(200, "applied"), "applied", "applied", ""),
        case("optional", ack(204, "applied; retain=86400"), "applied", "applied", "applied; retain=86400"),
        case("optional", ack(200, "duplicate"), "duplicate", "duplicate", ""),
        case("optional", Script::answer(200).header("Idempotent-Replayed", "true"), "duplicate", "duplicate", ""),
        case("optional", ack(412, "stale; current=2"), "stale", "stale", "stale; current=2"),
        case("optional", ack(422, "conflict"), "conflict", "conflict", ""),
        case("optional", ack(400, "rejected"), "rejected", "rejected", ""),
        case("optional", ack(500, "rejected"), "rejected", "rejected", ""),
        case("optional", ack(410, "rejected"), "rejected", "rejected", ""),
        case("optional", ack(409, "in-progress"), "in_progress", "retry", "status 409, ack in-progress"),
        case("optional", Script::answer(409), "in_progress", "retry", "status 409"),
        case("optional", ack(503, "not-applied"), "not_applied", "retry", "status 503, ack not-applied"),
        case("optional", ack(409, "not-applied"), "not_applied", "retry", "status 409, ack not-applied"),
        // No word: a bare 2xx is weaker than `applied` and never called so.
        case("optional", Script::answer(200), "accepted", "accepted", ""),
        case("optional", Script::answer(204), "accepted", "accepted", ""),
        case("required", Script::answer(200), "ambiguous", "retry", "status 200"),
        case("required", ack(200, "applied"), "applied", "applied", ""),
        case("required", ack(200, "maybe"), "ambiguous", "retry", "malformed ack"),
        case("none", Script::answer(202), "accepted", "accepted", ""),
        // A word the status denies is ambiguous.
        case("optional", ack(500, "applied"), "ambiguous", "retry", "status 500, ack applied"),
        case("optional", ack(302, "duplicate"), "ambiguous", "retry", "status 302, ack duplicate"),
        case("hold", ack(404, "applied"), "ambiguous", "in_doubt", "status 404, ack applied"),
        // Malformed words are kept and count as none.
        case("optional", ack(200, "in-progress"), "accepted", "accepted", "in-progress"),
        case("optional", ack(200, "not-applied"), "accepted", "accepted", "not-applied"),
        case("optional", ack(200, "applied").ack("applied"), "accepted", "accepted", "applied, applied"),
        case("optional", ack(200, "applied; key=\"other:1\""), "accepted", "accepted", "other:1"),
        case("optional", ack(412, "stale"), "refused", "retry", "malformed ack"),
        case("optional", ack(412, "stale; current=1"), "refused", "retry", "malformed ack"),
        case("optional", ack(412, "stale; current=9"), "refused", "retry", "an epoch its task has never had"),
        // What a status alone says.
        case("optional", Script::answer(501), "refused", "retry", "status 501"),
        case("optional", Script::answer(505), "refused", "retry", "status 505"),
        case("none", Script::answer(503), "not_applied", "retry", "status 503"),
        case("none", Script::answer(502), "ambiguous", "in_doubt", "status 502"),
        case("gone", Script::answer(410), "refused", "backlog", "status 410"),
        // What is definite is retried at an edge that holds what is not.
        case("hold", Script::answer(200), "accepted", "accepted", ""),
        case("hold", Script::answer(429), "throttled", "retry", "status 429"),
        case("hold", Script::answer(404), "refused", "retry", "status 404"),
        case("hold", Script::answer(409), "in_progress", "retry", "status 409"),
        case("hold", ack(500, "not-applied"), "not_applied", "retry", "not-applied"),
        case("hold", Script::answer(500), "ambiguous", "in_doubt", "status 500"),
        case("hold", Script::stall(), "ambiguous", "in_doubt", "no answer (wait)"),
        // Cuts after the first byte.
        case("optional", Script::stall(), "ambiguous", "retry", "no answer within 1s"),
        case("optional", Script::cut(Cut::Fin), "ambiguous", "retry", "no answer (wait)"),
        case("optional", Script::cut(Cut::Rst), "ambiguous", "retry", "no answer (wait)"),
        case("optional", Script::cut_before_body(Cut::Rst), "ambiguous", "retry", "no answer"),
        case("optional", Script::raw("HTTP/1.1 2").then_cut(Cut::Fin), "ambiguous", "retry", "no answer (wait)"),
        case("optional", Script::raw(partial).then_cut(Cut::Rst), "ambiguous", "retry", "no answer (wait)"),
        case("optional", Script::raw(partial).then_stall(), "ambiguous", "retry", "no answer (wait)"),
        case("optional", Script::raw("nonsense\r\n\r\n").then_cut(Cut::Fin), "ambiguous", "retry", "no answer (wait)"),
        case(
            "optional",
            Script::raw(Script::answer(103).ack("applied").head()).then_cut(Cut::Fin),
            "ambiguous",
            "retry",
            "no answer",
        ),
        case(
            "optional",
            Script::drip(ack(200, "applied").header("X-Padding", "x".repeat(500)).bytes()),
            "ambiguous",
            "retry",
            "no answer within",
        ),
        // A head that arrived stands, whatever becomes of its body.
        case(
            "optional",
            Script::raw(ack(200, "applied").header("Content-Length", "9").head()).then_cut(Cut::Rst),
            "applied",
            "applied",
            "",
        ),
        case(
            "optional",
            Script::raw(ack(200, "applied").header("Content-Length", "9").head()).then_stall(),
            "applied",
            "applied",
            "",
        ),
        case(
            "optional",
            Script::raw(ack(200, "applied").header("Content-Length", "999999").head()).then_repeat([b'x'; 999]),
            "applied",
            "applied",
            "",
        ),
        case(
            "optional",
            Script::early(ack(413, "rejected").header("Connection", "close").bytes()).then_stall(),
            "rejected",
            "rejected",
            "",
        ),
        // Nothing left this machine.
        case("refused", Script::answer(200), "not_delivered", "retry", "not delivered (connect)"),
        case("unknown-host", Script::answer(200), "not_delivered", "retry", "not delivered (connect)"),
        case("plain-behind-https", Script::answer(200), "not_delivered", "retry", "not delivered (connect)"),
        case("self-signed", Script::answer(200), "not_delivered", "retry", "not delivered (connect)"),
    ];
    for status in [300, 301, 302, 303, 304, 305, 307, 308] {
        cases.push(case(
            "optional",
            Script::answer(status).header("Location", "/elsewhere"),
            "refused",
            "retry",
            "status 3",
        ));
    }
    for status in [400, 401, 402, 403, 404, 405, 406, 407, 411, 412, 413, 415, 418, 422, 426, 428, 431, 451, 499] {
        cases.push(case("optional", Script::answer(status), "refused", "retry", "status 4"));
    }
    for status in [408, 421, 425, 429] {
        cases.push(case("optional", Script::answer(status), "throttled", "retry", "status 4"));
    }
    for status in [500, 502, 503, 504, 506, 507, 508, 511, 520, 599] {
        cases.push(case("optional", Script::answer(status), "ambiguous", "retry", "status 5"));
    }
    cases
}

#[tokio::test]
async fn every_ending_has_its_token() {
    let (receiver, gone) = (Receiver::start().await, Receiver::start().await);
    let self_signed = Receiver::start_tls(Authority::new().server(Flaw::SelfSigned, ClientCertificate::NotAsked)).await;
    let closed = std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address");
    let consumers = [
        http("optional", &receiver.url(), "ack = 'optional'\nconcurrency = 64"),
        http("required", &receiver.url(), "ack = 'required'"),
        http("none", &receiver.url(), "ack = 'none'\non_ambiguous = 'hold'\ndefinite_statuses = [503]"),
        http("hold", &receiver.url(), "on_ambiguous = 'hold'"),
        http("gone", &gone.url(), ""),
        http("refused", &format!("http://{closed}/"), ""),
        http("unknown-host", "http://nobody.invalid/", ""),
        http("plain-behind-https", &format!("https://127.0.0.1:{}/", receiver.port()), ""),
        http("self-signed", &self_signed.url(), ""),
    ]
    .concat();
    // One attempt each: the next one is an hour away.
    let rig = Rig::with_retry("base = '1h'\ncap = '1h'", &consumers).await;
    rig.apply().await;
    let cases = cases();
    for (n, case) in cases.iter().enumerate() {
        // Whose task has known epoch 2: an answer of `stale` may name it.
        if case.says.contains("current=2") {
            rig.client
                .execute("select fencepost.submit_task('kind', '{}', 'task-' || $1::text)", &[&n.to_string()])
                .await
                .unwrap();
        }
        for receiver in [&receiver, &gone] {
            receiver.on_key(&format!("task-{n}:1"), case.script.clone());
        }
        rig.emit(&format!("task-{n}"), case.consumer).await;
    }
    rig.second_epochs().await;
    let mut relay = rig.relay().await;

    for (n, Case { consumer, attempt, delivery, says, .. }) in cases.iter().enumerate() {
        let key = format!("task-{n}:1");
        let what = format!("case {n}, {consumer}: {:?}", cases[n].script);
        let got = rig.becomes(&key, consumer, delivery).await;
        let attempts = rig.attempts(&key, consumer).await;
        let token = attempts.last().and_then(|a| a.token.clone()).or(got.token.clone());
        assert_eq!(token.as_deref(), Some(*attempt), "{what}");
        assert_eq!(got.attempts, 1, "{what}");
        assert!(!got.doubt, "{what}");
        let text = format!("{} {}", got.reason, got.ack_raw.clone().unwrap_or_default());
        assert!(text.contains(says), "{text:?} lacks {says:?}: {what}");
        for row in &attempts {
            assert_eq!(row.started, matches!(*consumer, "hold" | "none"), "{what}: {row:?}");
            let left = *attempt != "not_delivered";
            assert_eq!(row.bytes_left, Some(left), "{what}: {row:?}");
            assert_eq!(
                row.status.is_some(),
                row.phase.as_deref() == Some("done") || row.phase.as_deref() == Some("body"),
                "{what}: {row:?}"
            );
        }
        let receiver = if *consumer == "gone" { &gone } else { &receiver };
        rig.wire_agrees(receiver, &key, consumer).await;
    }
    rig.counts("select count(*) from fencepost.flights where token is null", 0).await;
    assert_eq!(rig.count("select count(*) from fencepost.alarms where name = 'conflict'").await, 1);
    assert_eq!(self_signed.requests().len(), 0);
    relay.signal(fencepost::demo::embedded::guardian::Signal::Term);
    assert!(relay.ended().await.success(), "{}", relay.log());
    let errors: Vec<String> =
        relay.log().lines().filter(|line| line.contains("ERROR fencepost")).map(str::to_owned).collect();
    assert!(errors.len() == 1 && errors[0].contains("conflict"), "one alarm and nothing else: {errors:#?}");
}
