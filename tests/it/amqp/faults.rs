//! The broker and the network fail while messages are under way. Each test shows its fault happening, and checks that
//! every confirmed message is in the queue, that what never left is called so, and that the way opens again.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use fencepost::demo::embedded::rabbitmq::PrivateRabbitmq;
use fencepost::edge::amqp::AmqpEdge;
use fencepost::model::outcome::{End, Outcome};
use lapin::ExchangeKind;
use lapin::types::AMQPValue;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::{attempt, consumer, effect, open_edge, opens, shuts};
use crate::support::broker::{self, Client, broker, fresh, id};
use crate::support::eventually;
use crate::support::fault_proxy::{Direction, Fault, FaultProxy};

/// Messages published one after the other by many senders until told to stop, each key once unless it must be again.
struct Load {
    stop: CancellationToken,
    ended: Arc<AtomicUsize>,
    senders: Vec<JoinHandle<Vec<(String, Outcome)>>>,
}

impl Load {
    fn start(edge: &Arc<AmqpEdge>, senders: usize) -> Self {
        let (stop, ended) = (CancellationToken::new(), Arc::new(AtomicUsize::new(0)));
        let senders = (0..senders).map(|sender| {
            let (edge, stop, ended) = (Arc::clone(edge), stop.clone(), Arc::clone(&ended));
            tokio::spawn(async move {
                let mut outcomes = Vec::new();
                for n in 1.. {
                    if stop.is_cancelled() {
                        break;
                    }
                    let key = format!("s{sender}-{n}:1");
                    let outcome = attempt(&edge, &effect(&key)).await;
                    ended.fetch_add(1, Ordering::SeqCst);
                    // As the dispatcher does: nothing more is started while the way is shut.
                    while edge.shut().is_some() && !stop.is_cancelled() {
                        tokio::time::sleep(Duration::from_millis(5)).await;
                    }
                    outcomes.push((key, outcome));
                }
                outcomes
            })
        });
        let senders = senders.collect();
        Self { stop, ended, senders }
    }

    async fn reaches(&self, count: usize) {
        eventually("messages end", async || (self.ended.load(Ordering::SeqCst) >= count).then_some(())).await;
    }

    fn ended(&self) -> usize {
        self.ended.load(Ordering::SeqCst)
    }

    async fn stop(self) -> Outcomes {
        self.stop.cancel();
        let mut outcomes = Outcomes::default();
        for sender in self.senders {
            for (key, outcome) in sender.await.expect("a sender") {
                let set = match outcome.end {
                    End::Confirmed => &mut outcomes.confirmed,
                    End::Ambiguous => &mut outcomes.ambiguous,
                    End::Shut => &mut outcomes.shut,
                    other => panic!("{key}: {other:?} {:?}", outcome.evidence),
                };
                assert!(set.insert(key));
            }
        }
        outcomes
    }
}

#[derive(Default)]
struct Outcomes {
    confirmed: HashSet<String>,
    ambiguous: HashSet<String>,
    shut: HashSet<String>,
}

impl Outcomes {
    /// Everything confirmed is there, nothing that never left is, and nothing nobody sent.
    fn hold_against(&self, arrived: &HashSet<String>) {
        let lost: Vec<_> = self.confirmed.difference(arrived).take(5).collect();
        assert!(lost.is_empty(), "confirmed and not there: {lost:?}");
        let unsent: Vec<_> = self.shut.intersection(arrived).take(5).collect();
        assert!(unsent.is_empty(), "called unsent and there: {unsent:?}");
        assert!(arrived.iter().all(|key| self.confirmed.contains(key) || self.ambiguous.contains(key)));
    }
}

async fn drain(url: &str, queue: &str) -> HashSet<String> {
    let client = Client::new(url).await;
    let depth = client.depth(queue).await as usize;
    let read = client.read(queue, |read| read.len() >= depth).await;
    let ids: HashSet<String> = read.iter().map(id).collect();
    assert_eq!(ids.len(), read.len(), "a key is in the queue twice");
    ids
}

async fn queue_on(url: &str) -> String {
    let queue = fresh("faults");
    Client::new(url).await.queue(&queue, &[]).await;
    queue
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_closed_by_the_operator() {
    let broker_process = PrivateRabbitmq::start().await.unwrap();
    let url = broker_process.url();
    let queue = queue_on(&url).await;
    let edge = Arc::new(open_edge(&consumer(&format!("routing_key = '{queue}'")), &broker(&url)).await);
    let load = Load::start(&edge, 64);
    for _ in 0..5 {
        load.reaches(load.ended() + 500).await;
        broker_process.ctl(&["close_all_connections", "the test closes them"]).await.unwrap();
        opens(&edge).await;
    }
    load.reaches(load.ended() + 500).await;
    let outcomes = load.stop().await;
    assert!(!outcomes.ambiguous.is_empty(), "nothing was under way when the connections were closed");
    outcomes.hold_against(&drain(&url, &queue).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_restarted_and_killed_under_load() {
    let mut broker_process = PrivateRabbitmq::start().await.unwrap();
    let url = broker_process.url();
    let queue = queue_on(&url).await;
    let edge = Arc::new(open_edge(&consumer(&format!("routing_key = '{queue}'")), &broker(&url)).await);
    let load = Load::start(&edge, 64);
    for round in 0..6 {
        load.reaches(load.ended() + 300).await;
        if round % 2 == 0 {
            broker_process.stop().await.unwrap();
        } else {
            broker_process.kill().await.unwrap();
        }
        shuts(&edge).await;
        broker_process.boot().await.unwrap();
        opens(&edge).await;
    }
    load.reaches(load.ended() + 300).await;
    let outcomes = load.stop().await;
    outcomes.hold_against(&drain(&url, &queue).await);
    assert!(!outcomes.ambiguous.is_empty() || !outcomes.shut.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_memory_alarm_shuts_the_way_at_once_and_costs_nothing() {
    let broker_process = PrivateRabbitmq::start().await.unwrap();
    let url = broker_process.url();
    let queue = queue_on(&url).await;
    let edge =
        Arc::new(open_edge(&consumer(&format!("routing_key = '{queue}'\ntimeout = '20s'")), &broker(&url)).await);
    let load = Load::start(&edge, 64);
    load.reaches(500).await;
    broker_process.ctl(&["set_vm_memory_high_watermark", "0.0000001"]).await.unwrap();
    let why = eventually("the alarm shuts the way", async || edge.shut()).await;
    assert!(why.contains("blocked"), "{why}");
    // Half a minute, longer than any deadline here: blocked time does not count against them.
    let during = load.ended();
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert!(edge.shut().is_some(), "still blocked");
    assert!(load.ended() <= during + 64, "attempts went on during the alarm");
    broker_process.ctl(&["set_vm_memory_high_watermark", "0.4"]).await.unwrap();
    opens(&edge).await;
    load.reaches(load.ended() + 500).await;
    let outcomes = load.stop().await;
    assert!(outcomes.ambiguous.is_empty(), "{:?}", outcomes.ambiguous);
    outcomes.hold_against(&drain(&url, &queue).await);
}

/// The broker blocks for longer than is waited for: the connection goes, and what it still held back is never sent.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_alarm_ends_the_connection_and_unsends_what_it_held() {
    let broker_process = PrivateRabbitmq::start().await.unwrap();
    let url = broker_process.url();
    let queue = queue_on(&url).await;
    let mut impatient = (*broker(&url)).clone();
    impatient.blocked_max = Duration::from_secs(1);
    let edge = Arc::new(open_edge(&consumer(&format!("routing_key = '{queue}'")), &Arc::new(impatient)).await);
    let load = Load::start(&edge, 64);
    load.reaches(500).await;
    broker_process.ctl(&["set_vm_memory_high_watermark", "0.0000001"]).await.unwrap();
    eventually("the connection is given up", async || edge.shut().filter(|why| why.contains("blocked publishing for")))
        .await;
    let outcomes = load.stop().await;
    broker_process.ctl(&["set_vm_memory_high_watermark", "0.4"]).await.unwrap();
    assert!(!outcomes.ambiguous.is_empty() || !outcomes.shut.is_empty(), "nothing was under way");
    opens(&edge).await;
    assert_eq!(attempt(&edge, &effect("after:1")).await.end, End::Confirmed);
    let mut arrived = drain(&url, &queue).await;
    assert!(arrived.remove("after:1"));
    outcomes.hold_against(&arrived);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_half_open_connection_is_noticed_by_its_silence() {
    let url = broker::url().await;
    let queue = queue_on(url).await;
    let direct = broker(url);
    let server: SocketAddr = format!("127.0.0.1:{}", direct.hosts[0].port).parse().unwrap();
    let proxy = FaultProxy::start(server).await;
    let mut through = (*direct).clone();
    through.hosts[0].port = proxy.port();
    let edge =
        Arc::new(open_edge(&consumer(&format!("routing_key = '{queue}'\ntimeout = '20s'")), &Arc::new(through)).await);
    let load = Load::start(&edge, 32);
    load.reaches(500).await;
    proxy.blackhole();
    let why = shuts(&edge).await;
    assert!(why.contains("heartbeat"), "{why}");
    proxy.heal();
    opens(&edge).await;
    load.reaches(load.ended() + 500).await;
    let outcomes = load.stop().await;
    assert!(!outcomes.ambiguous.is_empty(), "nothing was under way");
    assert!(proxy.accepted() >= 2);
    outcomes.hold_against(&drain(url, &queue).await);
}

/// Only the broker's answers are lost: everything arrives, nothing is known.
#[tokio::test(flavor = "multi_thread")]
async fn confirms_that_never_come_are_ambiguous() {
    let url = broker::url().await;
    let queue = queue_on(url).await;
    let direct = broker(url);
    let proxy = FaultProxy::start(format!("127.0.0.1:{}", direct.hosts[0].port).parse().unwrap()).await;
    let mut through = (*direct).clone();
    through.hosts[0].port = proxy.port();
    through.heartbeat = Duration::from_secs(60);
    let edge =
        Arc::new(open_edge(&consumer(&format!("routing_key = '{queue}'\ntimeout = '1s'")), &Arc::new(through)).await);
    assert_eq!(attempt(&edge, &effect("before:1")).await.end, End::Confirmed);
    proxy.set(Direction::ToClient, Fault::Swallow);
    let outcome = attempt(&edge, &effect("unheard:1")).await;
    assert_eq!((outcome.end, outcome.evidence.bytes_left), (End::Ambiguous, true));
    proxy.heal();
    let expected: HashSet<String> = ["before:1", "unheard:1"].map(String::from).into();
    assert_eq!(drain(url, &queue).await, expected);
    opens(&edge).await;
    proxy.set(Direction::ToServer, Fault::CutAfter(40));
    let cut = attempt(&edge, &effect("cut:1")).await;
    assert!(matches!(cut.end, End::Ambiguous | End::Shut), "{cut:?}");
    proxy.heal();
    assert!(drain(url, &queue).await.is_empty(), "40 bytes are no message");
}

/// A fan-out to a full queue that rejects and to one that takes it: nack, and yet one of them has it.
#[tokio::test]
async fn a_nack_is_ambiguous() {
    let url = broker::url().await;
    let client = Client::new(url).await;
    let (exchange, full, open) = (fresh("fan"), fresh("full"), fresh("open"));
    client.exchange(&exchange, ExchangeKind::Fanout).await;
    let limits =
        [("x-max-length", AMQPValue::LongInt(1)), ("x-overflow", AMQPValue::LongString("reject-publish".into()))];
    client.queue(&full, &limits).await;
    client.queue(&open, &[]).await;
    client.bind(&full, &exchange, "").await;
    client.bind(&open, &exchange, "").await;
    let edge = open_edge(&consumer(&format!("exchange = '{exchange}'\nrouting_key = ''")), &broker(url)).await;
    assert_eq!(attempt(&edge, &effect("first:1")).await.end, End::Confirmed);
    let nacked = attempt(&edge, &effect("second:1")).await;
    assert_eq!(nacked.end, End::Ambiguous);
    assert!(nacked.evidence.error.unwrap().contains("nack"));
    assert_eq!(client.depth(&open).await, 2, "it was partial");
    assert_eq!(client.depth(&full).await, 1);
    assert!(edge.shut().is_none(), "the way stays open");
}

/// What a broker refuses takes the channel with it, and whatever else is out, once: each of those goes alone the next
/// time, the good ones arrive and the bad one is known.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_the_broker_refuses_takes_no_other_with_it_for_good() {
    let broker_process = PrivateRabbitmq::start().await.unwrap();
    let url = broker_process.url();
    refuse_large(&broker_process).await;
    let queue = queue_on(&url).await;
    let edge = Arc::new(open_edge(&consumer(&format!("routing_key = '{queue}'")), &broker(&url)).await);
    assert_eq!(attempt(&edge, &effect("first:1")).await.end, End::Confirmed);
    let mut waiting: Vec<String> = (0..60).map(|n| format!("good{n}:1")).collect();
    waiting.insert(30, "large:1".into());
    let (mut confirmed, mut ambiguous) = (HashSet::new(), HashSet::new());
    eventually("every message has its end", async || {
        opens(&edge).await;
        let attempts: Vec<_> = std::mem::take(&mut waiting)
            .into_iter()
            .map(|key| {
                let edge = Arc::clone(&edge);
                tokio::spawn(async move {
                    let effect = if key == "large:1" { large(2_000) } else { effect(&key) };
                    (key, attempt(&edge, &effect).await)
                })
            })
            .collect();
        for tried in attempts {
            let (key, outcome) = tried.await.unwrap();
            match outcome.end {
                End::Confirmed => assert!(confirmed.insert(key)),
                End::Refused => assert_eq!(key, "large:1", "{:?}", outcome.evidence),
                End::Ambiguous => {
                    assert!(ambiguous.insert(key.clone()), "{key} died with another twice");
                    waiting.push(key);
                }
                End::Shut => waiting.push(key),
                other => panic!("{key}: {other:?} {:?}", outcome.evidence),
            }
        }
        waiting.is_empty().then_some(())
    })
    .await;
    assert_eq!(confirmed.len(), 60);
    assert!(!ambiguous.is_empty(), "the channel died with nothing else on it");
}

/// The same while fresh messages keep the window full between the tries of the bad one, as they do in a relay.
#[tokio::test(flavor = "multi_thread")]
async fn a_message_the_broker_refuses_goes_alone_under_load() {
    let broker_process = PrivateRabbitmq::start().await.unwrap();
    let url = broker_process.url();
    refuse_large(&broker_process).await;
    let queue = queue_on(&url).await;
    let edge = Arc::new(open_edge(&consumer(&format!("routing_key = '{queue}'")), &broker(&url)).await);
    // One that is refused when all of it has been written, and one that is refused before.
    for size in [2_000, 8 << 20] {
        let load = Load::start(&edge, 64);
        load.reaches(500).await;
        let mut deaths = 0;
        eventually("it is refused", async || {
            opens(&edge).await;
            load.reaches(load.ended() + 200).await;
            let outcome = attempt(&edge, &large(size)).await;
            let why = outcome.evidence.error.unwrap_or_default();
            match outcome.end {
                End::Refused => {
                    assert!(why.contains("PRECONDITION_FAILED"), "{why}");
                    return Some(());
                }
                End::Ambiguous | End::Shut => deaths += usize::from(why.contains("PRECONDITION_FAILED")),
                other => panic!("{other:?} {why}"),
            }
            None
        })
        .await;
        assert!(deaths <= 1, "it took others with it {deaths} times");
        opens(&edge).await;
        load.reaches(load.ended() + 200).await;
        load.stop().await.hold_against(&drain(&url, &queue).await);
    }
}

async fn refuse_large(broker: &PrivateRabbitmq) {
    broker.ctl(&["eval", "application:set_env(rabbit, max_message_size, 1000)."]).await.unwrap();
}

fn large(size: usize) -> fencepost::model::effect::Effect {
    let mut effect = effect("large:1");
    effect.payload = vec![b'x'; size].into();
    effect
}

#[tokio::test]
async fn oversized_messages_touch_no_socket() {
    let url = broker::url().await;
    let queue = queue_on(url).await;
    let edge = open_edge(&consumer(&format!("routing_key = '{queue}'")), &broker(url)).await;
    let mut headers = effect("headers:1");
    headers.headers = vec![("big".into(), "x".repeat(140_000))];
    let mut kind = effect("kind:1");
    kind.kind = Some("k".repeat(300));
    let mut body = effect("body:1");
    body.payload = vec![0; 17 << 20].into();
    for (n, bad) in [headers, kind, body].iter().enumerate() {
        let outcome = attempt(&edge, bad).await;
        assert_eq!((outcome.end, outcome.evidence.bytes_left), (End::Refused, false));
        assert_eq!(attempt(&edge, &effect(&format!("good{n}:1"))).await.end, End::Confirmed);
    }
    assert_eq!(drain(url, &queue).await.len(), 3);
}
