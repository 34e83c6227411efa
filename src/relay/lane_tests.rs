use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use tokio::time::Instant;

use super::*;
use crate::model::effect::Effect;
use crate::model::key::{ConsumerId, EffectId, EffectKey, FlightSeq, LeaseEpoch, Shard, ShardEpoch, TaskId};
use crate::relay::delivery::{ByteBudget, Flight, Hand};
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
    }
}

fn fresh(id: i64, key: &str) -> Delivery {
    let flight = Flight { seq: FlightSeq(1), outstanding: AtomicUsize::new(1), bytes: ByteBudget::new(1).charge(0, 1) };
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
fn shedding_keeps_each_key_in_order() {
    let mut lane = Lane::new(Ordering::Key, []);
    for (id, key) in [(1, "a"), (2, "b"), (3, "b"), (4, "c"), (5, "a")] {
        let _ = lane.offer(fresh(id, key));
    }
    assert_eq!(ids(&lane.shed(1)), [2, 3, 4]);
    assert!(matches!(lane.offer(fresh(6, "b")), Offer::Blocked(_)));
    assert_eq!(drain(&mut lane), [1]);
    lane.ended(Some("a"), WasParked::No);
    assert_eq!(drain(&mut lane), [5], "what was kept goes on");
}
