//! What never reaches the consumer: our own checks, DNS, TCP and TLS. All of it is provably not delivered.

use std::net::SocketAddr;

use fencepost::edge::egress::PrivateNetworks;
use fencepost::edge::error::{EdgeError, report};
use fencepost::edge::http::Trust;
use fencepost::model::outcome::Phase;
use tokio::net::{TcpListener, TcpSocket};

use super::*;
use crate::support::receiver::{Cut, OnAccept, Receiver, Script};
use crate::support::tls::{Authority, ClientCertificate, Flaw};

/// Asserts that nothing left, and returns the error.
fn never_left(outcome: &Outcome, phase: Phase) -> &str {
    assert_eq!(outcome.end, End::NotDelivered, "{:?}", outcome.evidence);
    assert_eq!((outcome.evidence.phase, outcome.evidence.bytes_left), (phase, false));
    outcome.evidence.error.as_deref().expect("an error")
}

#[tokio::test]
async fn refused_and_unreachable_and_unknown_hosts() {
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let refused = attempt(&hasty(&format!("http://{free}/")), &effect("{}")).await;
    assert!(never_left(&refused, Phase::Connect).contains("refused"));

    let unknown = attempt(&hasty("http://no-such-host.invalid/"), &effect("{}")).await;
    assert!(never_left(&unknown, Phase::Connect).contains("dns"), "{unknown:?}");

    // A network of the documentation: unreachable at once, or a timeout, by the machine's routes.
    never_left(&attempt(&hasty("http://[2001:db8::1]:9/"), &effect("{}")).await, Phase::Connect);
}

#[tokio::test]
async fn a_connect_that_nobody_answers_ends_by_its_own_deadline() {
    let full = Full::start().await;
    for payload in ["{}", ""] {
        let outcome = attempt(&hasty(&format!("http://{}/", full.address)), &effect(payload)).await;
        assert!(never_left(&outcome, Phase::Connect).contains("no connection within 300ms"), "{outcome:?}");
    }
}

/// A listener whose queue is full: the system drops further connection requests, as a dead host would.
struct Full {
    address: SocketAddr,
    _kept: (TcpListener, Vec<tokio::net::TcpStream>),
}

impl Full {
    async fn start() -> Self {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let listener = socket.listen(1).unwrap();
        let address = listener.local_addr().unwrap();
        let mut waiting = Vec::new();
        let patience = Duration::from_millis(200);
        while let Ok(Ok(stream)) = tokio::time::timeout(patience, tokio::net::TcpStream::connect(address)).await {
            waiting.push(stream);
            assert!(waiting.len() < 64, "the queue never fills");
        }
        Self { address, _kept: (listener, waiting) }
    }
}

#[tokio::test]
async fn tls_of_every_broken_kind() {
    let authority = Authority::new();
    for (flaw, error) in [
        (Flaw::SelfSigned, "invalid peer certificate"),
        (Flaw::Expired, "expired"),
        (Flaw::NotYetValid, "not valid yet"),
        (Flaw::WrongHost, "not valid for name"),
    ] {
        let receiver = Receiver::start_tls(authority.server(flaw, ClientCertificate::NotAsked)).await;
        let outcome = attempt(&trusting(&receiver.url(), &authority), &effect("{}")).await;
        let text = never_left(&outcome, Phase::Connect);
        assert!(text.contains(error), "{flaw:?}: {text}");
        assert_eq!((receiver.requests().len(), receiver.connections()), (0, 1));
    }
    // The control: the same authority, no flaw.
    let receiver = Receiver::start_tls(authority.server(Flaw::None, ClientCertificate::NotAsked)).await;
    assert_eq!(answered(&attempt(&trusting(&receiver.url(), &authority), &effect("{}")).await).0, 200);
    // Another authority than the one we trust.
    let outcome = attempt(&trusting(&receiver.url(), &Authority::new()), &effect("{}")).await;
    assert!(never_left(&outcome, Phase::Connect).contains("UnknownIssuer") || outcome.evidence.error.is_some());
}

#[tokio::test]
async fn handshakes_that_stall_break_off_or_speak_plain_http() {
    let authority = Authority::new();
    let receiver = Receiver::start_tls(authority.server(Flaw::None, ClientCertificate::NotAsked)).await;
    let edge = trusting(&receiver.url(), &authority);
    for what in [OnAccept::Stall, OnAccept::Cut(Cut::Fin), OnAccept::Cut(Cut::Rst)] {
        receiver.next_connection(what);
        never_left(&attempt(&edge, &effect("{}")).await, Phase::Connect);
    }
    let plain = Receiver::start().await;
    let edge = trusting(&plain.url().replace("http:", "https:"), &authority);
    never_left(&attempt(&edge, &effect("{}")).await, Phase::Connect);
    assert!(receiver.requests().is_empty() && plain.requests().is_empty());
}

#[tokio::test]
async fn a_client_certificate_asked_for_in_tls_1_3_is_noticed_after_bytes_left() {
    let authority = Authority::new();
    let receiver = Receiver::start_tls(authority.server(Flaw::None, ClientCertificate::Required)).await;
    let outcome = attempt(&trusting(&receiver.url(), &authority), &effect("{}")).await;
    // Our handshake ends before the server has looked for a certificate; its alert meets our request.
    match outcome.end {
        End::Ambiguous => assert!(outcome.evidence.bytes_left),
        End::NotDelivered => assert!(!outcome.evidence.bytes_left),
        other => panic!("{other:?}"),
    }
    assert!(receiver.requests().is_empty());
}

fn trusting(url: &str, authority: &Authority) -> HttpEdge {
    let consumer = consumer(url, "timeout = '3s'\nconnect_timeout = '1s'");
    HttpEdge::trusting(&consumer, &EgressPolicy::default(), &Trust::Only(authority.pem())).expect("an edge")
}

#[tokio::test]
async fn forbidden_addresses_are_refused_before_any_socket() {
    let receiver = Receiver::start().await;
    let closed = EgressPolicy::new(PrivateNetworks::Deny, &[], &[]).unwrap();
    let refused = HttpEdge::new(&consumer(&receiver.url(), ""), &closed).unwrap_err();
    assert!(matches!(refused, EdgeError::Egress { .. }));
    assert!(report(&refused).contains("127.0.0.1"), "{}", report(&refused));
    let metadata = HttpEdge::new(&consumer("http://[::ffff:169.254.169.254]/latest", ""), &EgressPolicy::default());
    assert!(report(&metadata.unwrap_err()).contains("refused in every mode"));

    // A name is checked when it resolves.
    let by_name = consumer(&format!("http://localhost:{}/", receiver.port()), "");
    let edge = HttpEdge::new(&by_name, &closed).unwrap();
    let outcome = attempt(&edge, &effect("{}")).await;
    assert!(never_left(&outcome, Phase::Connect).contains("private networks are denied"), "{outcome:?}");
    assert_eq!(receiver.connections(), 0);
    // The control: the same name where private networks are allowed.
    let edge = HttpEdge::new(&by_name, &EgressPolicy::default()).unwrap();
    assert_eq!(answered(&attempt(&edge, &effect("{}")).await).0, 200);
}

#[tokio::test]
async fn an_edge_that_cannot_be_built_says_what_to_write() {
    let with = |more: &str| HttpEdge::new(&consumer("http://127.0.0.1/", more), &EgressPolicy::default());
    let missing = report(&with("secret_file = '/nonexistent/secret'").unwrap_err());
    assert!(missing.contains("consumer billing") && missing.contains("/nonexistent/secret"), "{missing}");
    let unset = report(&with("secret_env = 'FENCEPOST_TEST_UNSET'").unwrap_err());
    assert!(unset.contains("FENCEPOST_TEST_UNSET") && unset.contains("fencepost secret new"), "{unset}");
    let file = std::env::temp_dir().join(format!("fencepost-secret-{}", std::process::id()));
    std::fs::write(&file, "hunter2hunter2\n").unwrap();
    let weak = report(&with(&format!("secret_file = '{}'", file.display())).unwrap_err());
    std::fs::remove_file(&file).unwrap();
    assert!(weak.contains("starts with whsec_") && !weak.contains("hunter2"), "{weak}");
}

/// Set in the child process of the next test: where it sends its one request.
const TARGET: &str = "FENCEPOST_TEST_PROXY_TARGET";

#[tokio::test]
async fn a_proxy_in_the_environment_is_not_used() {
    if let Ok(target) = std::env::var(TARGET) {
        assert_eq!(answered(&attempt(&edge(&target, ""), &effect("{}")).await).0, 204);
        return;
    }
    let (receiver, proxy) = (Receiver::start().await, Receiver::start().await);
    receiver.always(Script::answer(204));
    // The environment belongs to the whole process: the request is made by a second run of this test.
    let this = "http::connect::a_proxy_in_the_environment_is_not_used";
    let child = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", this])
        .env(TARGET, receiver.url())
        .envs(["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"].map(|name| (name, proxy.url())))
        .kill_on_drop(true)
        .output()
        .await
        .unwrap();
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stdout));
    assert_eq!((receiver.requests().len(), proxy.connections()), (1, 0));
}
