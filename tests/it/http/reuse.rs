//! Connections are kept, and no client below us sends anything a second time.

use super::*;
use crate::support::receiver::{Cut, Receiver, Script};

#[tokio::test]
async fn a_kept_connection_cut_as_the_post_arrives_is_ambiguous_and_not_sent_again() {
    for how in [Cut::Fin, Cut::Rst] {
        let receiver = Receiver::start().await;
        let edge = edge(&receiver.url(), "");
        receiver.next(Script::answer(200).ack("applied").then_cut_next(how));
        assert_eq!(answered(&attempt(&edge, &effect("{}")).await).0, 200);

        let outcome = attempt_number(&edge, &effect("{}"), 2).await;
        assert_eq!(outcome.end, End::Ambiguous);
        assert!(outcome.evidence.bytes_left);

        // A hidden retry would be a third request, on a second connection, before this fourth.
        assert_eq!(answered(&attempt_number(&edge, &effect("{}"), 3).await).0, 200);
        let requests = receiver.requests();
        assert_eq!(requests.iter().map(|r| (r.attempt(), r.connection)).collect::<Vec<_>>(), [(1, 0), (2, 0), (3, 1)]);
    }
}

#[tokio::test]
async fn a_connection_closed_while_idle_is_replaced_and_costs_no_attempt() {
    let receiver = Receiver::start().await;
    let edge = edge(&receiver.url(), "");
    for number in 1..=5 {
        let answer = Script::answer(200).ack("applied").header("Connection", "close").bytes();
        receiver.next(Script::raw(answer).then_cut(Cut::Fin));
        assert_eq!(answered(&attempt_number(&edge, &effect("{}"), number).await).0, 200);
    }
    assert_eq!((receiver.requests().len(), receiver.connections()), (5, 5));
}

#[tokio::test]
async fn connections_are_shared_one_after_the_other() {
    let receiver = Receiver::start().await;
    let edge = edge(&receiver.url(), "concurrency = 4");
    for _ in 0..10 {
        let (a, b, c, d) = (effect("1"), effect("2"), effect("3"), effect("4"));
        let all = tokio::join!(attempt(&edge, &a), attempt(&edge, &b), attempt(&edge, &c), attempt(&edge, &d));
        for outcome in [all.0, all.1, all.2, all.3] {
            assert_eq!(answered(&outcome).0, 200);
        }
    }
    assert_eq!(receiver.requests().len(), 40);
    // One may be a moment late in coming back to the pool, hence the margin; without reuse there would be 40.
    assert!(receiver.connections() < 20, "{} connections for 4 at a time", receiver.connections());
}
