//! A flight that was closed over deliveries nobody made: a mistake of ours, made by hand.

use serde_json::json;

use super::{count, counts};
use crate::relay::{Relay, declare};
use crate::support::db::TestDb;
use crate::support::receiver::Receiver;

/// The next flight of each shard over everything that is new there, closed as if all had been delivered.
pub(super) const CLOSED_OVER: &str = "
insert into fencepost.flights (shard, seq, epoch, base, target, first_id, last_id, token, closed_at, deliveries)
select f.shard, f.seq + 1, f.epoch, f.target, pg_current_snapshot(), e.first_id, e.last_id, 'done', clock_timestamp(), e.effects
from (select distinct on (shard) shard, seq, epoch, target from fencepost.flights order by shard, seq desc) f
cross join lateral (select min(id) as first_id, max(id) as last_id, count(*) as effects from fencepost.effects e
                    where e.shard = f.shard and not pg_visible_in_snapshot(e.xid, f.target)) e
where e.effects > 0";

#[tokio::test]
async fn a_flight_closed_over_what_was_never_sent_costs_latency_and_an_alarm_and_no_effect() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let receiver = Receiver::start().await;
    declare(&client, "retries", &receiver, json!({})).await;
    declare(&client, "holds", &receiver, json!({"on_ambiguous": "hold"})).await;
    let sql = "select fencepost.emit(jsonb_build_array(
                   jsonb_build_object('consumer', 'retries', 'payload_text', n::text),
                   jsonb_build_object('consumer', 'holds', 'payload_text', n::text)))
               from generate_series(1, 40) n";
    client.query(sql, &[]).await.unwrap();
    assert!(client.execute(CLOSED_OVER, &[]).await.unwrap() > 0);
    let mut relay = Relay::of(&db).start();

    // Found, said, tried again; where a duplicate costs it is left to the operator, since it may have been sent.
    counts(&client, "select count(*) from fencepost.ledger where token = 'applied'", 40).await;
    counts(&client, "select count(*) from fencepost.parked where state = 'in_doubt'", 40).await;
    relay.says("had neither fact nor parked row").await;
    let alarms = "select count(*) from fencepost.alarms where name = 'unaccounted' and resolved_at is null";
    assert!(count(&client, alarms).await > 0);
    let keys: std::collections::BTreeSet<String> = receiver.requests().iter().map(|request| request.key()).collect();
    assert_eq!((keys.len(), receiver.requests().len()), (40, 40));
}
