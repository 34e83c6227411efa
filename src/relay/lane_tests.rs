use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use tokio::time::Instant;

use super::*;
use crate::model::effect::Effect;
use crate::model::key::{ConsumerId, EffectId, EffectKey, FlightSeq, LeaseEpoch, Shard, ShardEpoch, TaskId};
use crate::relay::delivery::{Flight, FlightKind, Hand, Share};
use crate::relay::lease::{LeaseHold, ShardLease};
use crate::store::parking::Trouble;
use crate::store::settle::DeliveryId;

fn delivery(id: i64, key: &str, origin: Origin) -> Delivery {
    let effect = Effect {
        id: EffectId(id),
        shard: Shard(0),
        key: EffectKey::new(TaskId::new(format!("t{id}")).unwrap(), LeaseEpoch::new(1).unwrap(), 1).unwrap(),
        targets: vec![ConsumerId(1)],
        topic: None,
        kind: None,
        schema_version: None,
        content_type: "text/plain".into(),
        headers: Vec::new(),
        ordering_key: key.into(),
        traceparent: None,
        payload: Bytes::new(),
        sha256: [0; 32],
        committed_at: SystemTime::UNIX_EPOCH,
        deliver_after: None,
        expires_at: None,
    };
    let lease = Arc::new(ShardLease::new(Shard(0), ShardEpoch(1), Instant::now() + Duration::from_secs(60)));
    Delivery {
        effect: Arc::new(effect),
        consumer: ConsumerId(1),
        lease: LeaseHold::of(&lease),
        trouble: Trouble::default(),
        expired: false,
        origin,
        since: Instant::now(),
        lane: None,
        share: Share::default(),
    }
}

fn fresh(id: i64, key: &str) -> Delivery {
    of_flight(id, key, FlightKind::Log, 1)
}

fn of_flight(id: i64, key: &str, kind: FlightKind, seq: i64) -> Delivery {
    let flight = Flight::written(kind, FlightSeq(seq), 1, None);
    delivery(id, key, Origin::Flight(Arc::new(flight)))
}

fn parked(id: i64, key: &str, turn: Turn) -> Delivery {
    let guard = Hand::default().take(DeliveryId { effect: EffectId(id), consumer: ConsumerId(1) }).unwrap();
    delivery(id, key, Origin::Parked { turn, guard })
}

fn ids(deliveries: &[Delivery]) -> Vec<i64> {
    deliveries.iter().map(|d| d.effect_id().0).collect()
}

fn drain(lane: &mut Lane) -> Vec<i64> {
    std::iter::from_fn(|| lane.next_fresh()).map(|d| d.effect_id().0).collect()
}

#[test]
fn without_ordering_everything_may_go() {
    let mut lane = Lane::new(Ordering::None, []);
    for id in 1..=3 {
        assert!(matches!(lane.offer(fresh(id, "k")), Offer::Queued));
    }
    assert_eq!(drain(&mut lane), [1, 2, 3]);
}

#[test]
fn one_of_a_key_at_a_time() {
    let mut lane = Lane::new(Ordering::Key, []);
    for (id, key) in [(1, "a"), (2, "a"), (3, "b"), (4, "a")] {
        assert!(matches!(lane.offer(fresh(id, key)), Offer::Queued));
    }
    assert_eq!(drain(&mut lane), [1, 3]);
    lane.ended(Some("a"), WasParked::No);
    assert_eq!(drain(&mut lane), [2]);
    lane.ended(Some("b"), WasParked::No);
    lane.ended(Some("a"), WasParked::No);
    assert_eq!(drain(&mut lane), [4]);
    lane.ended(Some("a"), WasParked::No);
    assert!(lane.keys.is_empty(), "a free key costs nothing");
}

#[test]
fn a_parked_head_takes_those_behind_it_along() {
    let mut lane = Lane::new(Ordering::Key, []);
    for (id, key) in [(1, "a"), (2, "a"), (3, "b"), (4, "a")] {
        let _ = lane.offer(fresh(id, key));
    }
    assert_eq!(drain(&mut lane), [1, 3]);
    assert_eq!(ids(&lane.parked(Some("a"), WasParked::No, Waiting::Retry)), [2, 4]);
    assert!(matches!(lane.offer(fresh(5, "a")), Offer::Blocked(_)));
    lane.blocked(Some("a"));
    assert!(matches!(lane.offer(fresh(6, "b")), Offer::Queued), "only its own key waits");

    // Four of the key are parked; each is brought in turn, and the key is free after the last.
    for id in [1, 2, 4, 5] {
        assert!(matches!(lane.offer(parked(id, "a", Turn::Again)), Offer::Queued));
        assert_eq!(lane.next_retry().map(|d| d.effect_id().0), Some(id));
        assert!(matches!(lane.offer(fresh(9, "a")), Offer::Blocked(_)), "while {id} is on its way");
        lane.ended(Some("a"), WasParked::Yes);
    }
    assert!(matches!(lane.offer(fresh(7, "a")), Offer::Queued));
}

#[test]
fn a_retry_that_fails_again_keeps_its_key() {
    let mut lane = Lane::new(Ordering::Key, [("a".to_string(), 1)]);
    assert!(matches!(lane.offer(parked(1, "a", Turn::Again)), Offer::Queued));
    lane.next_retry().unwrap();
    assert!(lane.parked(Some("a"), WasParked::Yes, Waiting::Retry).is_empty());
    assert!(matches!(lane.offer(fresh(2, "a")), Offer::Blocked(_)));
}

#[test]
fn one_that_was_scheduled_waits_for_the_one_on_its_way() {
    let mut lane = Lane::new(Ordering::Key, []);
    let _ = lane.offer(fresh(5, "a"));
    assert_eq!(drain(&mut lane), [5]);
    assert!(matches!(lane.offer(parked(1, "a", Turn::Scheduled)), Offer::Queued));
    assert!(lane.retries_len() == 0, "one of a key at a time");
    assert!(matches!(lane.offer(fresh(6, "a")), Offer::Blocked(_)), "it takes its place when due");
    lane.blocked(Some("a"));
    lane.ended(Some("a"), WasParked::No);
    assert_eq!(lane.next_retry().map(|d| d.effect_id().0), Some(1));
}

#[test]
fn a_scheduled_delivery_blocks_nobody() {
    let mut lane = Lane::new(Ordering::Key, []);
    let _ = lane.offer(fresh(1, "a"));
    let _ = lane.offer(fresh(2, "a"));
    assert_eq!(drain(&mut lane), [1]);
    assert!(lane.parked(Some("a"), WasParked::No, Waiting::Scheduled).is_empty());
    assert_eq!(drain(&mut lane), [2]);
}

#[test]
fn rows_an_operator_removed_free_the_key() {
    let mut lane = Lane::new(Ordering::Key, [("a".to_string(), 2), ("b".to_string(), 1)]);
    let asked = lane.changes();
    lane.recount(asked, &HashMap::from([("b".to_string(), 1)]));
    assert!(matches!(lane.offer(fresh(1, "a")), Offer::Queued));
    assert!(matches!(lane.offer(fresh(2, "b")), Offer::Blocked(_)));

    // A count that was taken before a change does not undo the change.
    let asked = lane.changes();
    drain(&mut lane);
    let _ = lane.parked(Some("a"), WasParked::No, Waiting::Retry);
    lane.recount(asked, &HashMap::new());
    assert!(matches!(lane.offer(fresh(3, "a")), Offer::Blocked(_)));
}

#[test]
fn a_lane_that_lags_leaves_flights_unread_and_comes_back() {
    let mut lane = Lane::new(Ordering::None, []);
    for seq in 1..=3 {
        let _ = lane.offer(of_flight(seq, "k", FlightKind::Log, seq));
    }
    let out = lane.next_fresh().unwrap();
    assert_eq!(ids(&lane.fall_behind()), [2, 3]);
    assert!(matches!(lane.offer(of_flight(4, "k", FlightKind::Log, 4)), Offer::Lags(_)), "later flights too");
    assert!(!lane.wants_page(), "one is still out: whether it needs sending again is not known");
    drop(out);
    assert!(lane.wants_page());

    // The page covers flights 2 to 4; a flight that comes now is queued behind it.
    lane.page_read(FlightSeq(4));
    assert!(matches!(lane.offer(of_flight(2, "k", FlightKind::Page, 4)), Offer::Queued));
    assert!(matches!(lane.offer(of_flight(5, "k", FlightKind::Log, 5)), Offer::Queued));
    assert_eq!(drain(&mut lane), [2, 5]);
    assert!(!lane.wants_page());
    assert!(!lane.lags());
}

#[test]
fn a_page_that_is_put_back_stays_in_its_range() {
    let mut lane = Lane::new(Ordering::None, []).with_lag(Some(Range { from: FlightSeq(3), to: FlightSeq(9) }));
    assert!(lane.wants_page());
    lane.page_read(FlightSeq(5));
    let _ = lane.offer(of_flight(1, "k", FlightKind::Page, 5));
    assert!(lane.fall_behind().is_empty(), "the range covers it already");
    assert!(lane.wants_page());
    assert_eq!(
        lane.lag.as_ref().map(|lag| (lag.from, lag.next, lag.to)),
        Some((FlightSeq(3), FlightSeq(3), FlightSeq(9)))
    );
}

#[test]
fn a_lane_that_caught_up_can_lag_again_before_its_page_is_settled() {
    let mut lane = Lane::new(Ordering::None, []).with_lag(Some(Range { from: FlightSeq(3), to: FlightSeq(4) }));
    assert!(lane.wants_page());
    lane.page_read(FlightSeq(4));
    let _ = lane.offer(of_flight(1, "k", FlightKind::Page, 4));
    let out = lane.next_fresh().unwrap();
    assert!(matches!(lane.offer(of_flight(2, "k", FlightKind::Log, 5)), Offer::Queued));
    assert_eq!(ids(&lane.fall_behind()), [2]);
    assert!(matches!(lane.offer(of_flight(3, "k", FlightKind::Log, 6)), Offer::Lags(_)));
    drop(out);
    assert!(lane.wants_page());
    assert_eq!(lane.lag.as_ref().map(|lag| (lag.from, lag.to)), Some((FlightSeq(5), FlightSeq(6))));
}

#[test]
fn falling_behind_frees_the_keys_of_what_was_not_sent() {
    let mut lane = Lane::new(Ordering::Key, []);
    for (id, key) in [(1, "a"), (2, "b"), (3, "b"), (4, "c"), (5, "a")] {
        let _ = lane.offer(fresh(id, key));
    }
    let out = lane.next_fresh().unwrap();
    let mut behind = ids(&lane.fall_behind());
    behind.sort_unstable();
    assert_eq!(behind, [2, 3, 4, 5]);
    lane.ended(Some("a"), WasParked::No);
    drop(out);
    assert!(lane.keys.is_empty());
    assert!(lane.wants_page());
}

#[test]
fn one_from_the_parking_lot_is_not_stranded_behind_what_fell_behind() {
    let mut lane = Lane::new(Ordering::Key, []);
    let _ = lane.offer(fresh(1, "a"));
    let _ = lane.offer(parked(2, "a", Turn::Scheduled));
    assert!(lane.next_retry().is_none(), "its key is busy");
    assert_eq!(ids(&lane.fall_behind()), [1]);
    assert_eq!(lane.next_retry().map(|delivery| delivery.effect.id.0), Some(2));
    lane.ended(Some("a"), WasParked::Yes);
    assert!(lane.keys.is_empty());
    assert_eq!(lane.fresh_len(), 0);
}

#[test]
fn a_lane_that_knows_of_too_many_blocked_keys_reads_no_further() {
    let blocked = |keys: usize| (0..keys).map(|n| (format!("k{n}"), 1));
    let range = Some(Range { from: FlightSeq(3), to: FlightSeq(9) });
    let mut lane = Lane::new(Ordering::Key, blocked(BLOCKED_KEYS_MAX - 1)).with_lag(range);
    assert!(lane.wants_page());
    let _ = lane.offer(of_flight(1, "one more", FlightKind::Page, 4));
    drop(lane.next_fresh());
    assert!(lane.parked(Some("one more"), WasParked::No, Waiting::Retry).is_empty());
    assert!(lane.is_clogged());
    assert!(!lane.wants_page(), "what it leaves unread stays unread");
    let _ = lane.offer(parked(2, "k0", Turn::Again));
    lane.ended(Some("k0"), WasParked::Yes);
    assert!(!lane.is_clogged());
    assert!(lane.wants_page());
    let asked = lane.changes();
    lane.recount(asked, &HashMap::new());
    assert_eq!(lane.blocked_keys, 0, "a count that an operator changed");
}
