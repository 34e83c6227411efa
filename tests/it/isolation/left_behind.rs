//! A relay is lost whose lane lagged, and with it a flight that came after the range the lane had still to read.

use std::collections::BTreeMap;

use serde_json::json;

use super::counts;
use crate::relay::{Relay, declare};
use crate::support::db::TestDb;
use crate::support::receiver::Receiver;

const KEYS: i64 = 40;

/// The next flight of each shard over everything that is new there: closed and left to the lanes' ranges, or open still.
const OPENED: &str = "
insert into fencepost.flights (shard, seq, epoch, base, target, first_id, last_id, token, closed_at, deliveries)
select f.shard, f.seq + 1, f.epoch, f.target, pg_current_snapshot(), e.first_id, e.last_id,
       case when $1 then 'done' end, case when $1 then clock_timestamp() end, e.effects
from (select distinct on (shard) shard, seq, epoch, target from fencepost.flights order by shard, seq desc) f
cross join lateral (select min(id) as first_id, max(id) as last_id, count(*) as effects from fencepost.effects e
                    where e.shard = f.shard and not pg_visible_in_snapshot(e.xid, f.target)) e
where e.effects > 0";
const LEFT_UNREAD: &str = "
insert into fencepost.lags (shard, consumer_id, from_seq, to_seq)
select f.shard, c.consumer_id, f.seq, f.seq from fencepost.flights f cross join fencepost.consumers c where f.token = 'done'";

#[tokio::test]
async fn what_is_lost_with_a_relay_comes_after_what_its_lane_had_left_unread() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let receiver = Receiver::start().await;
    declare(&client, "orders", &receiver, json!({"ordering": "key"})).await;
    let sql = "select fencepost.emit(jsonb_build_array(jsonb_build_object(
                   'consumer', 'orders', 'ordering_key', 'k' || n, 'payload_text', $1 || ' of k' || n)))
               from generate_series(1, $2::bigint) n";
    for (which, closed) in [("first", true), ("second", false)] {
        client.query(sql, &[&which, &KEYS]).await.unwrap();
        assert!(client.execute(OPENED, &[&closed]).await.unwrap() > 0);
        if closed {
            assert!(client.execute(LEFT_UNREAD, &[]).await.unwrap() > 0);
        }
    }
    let _relay = Relay::of(&db).start();

    counts(&client, "select count(*) from fencepost.ledger where token = 'applied'", 2 * KEYS).await;
    counts(&client, "select count(*) from fencepost.attempts where token = 'lost'", KEYS).await;
    let mut came: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for request in receiver.requests() {
        let body = String::from_utf8(request.body.to_vec()).unwrap();
        let (which, key) = body.split_once(" of ").unwrap();
        came.entry(key.into()).or_default().push(which.into());
    }
    assert_eq!(came.len(), KEYS as usize);
    for (key, order) in came {
        assert_eq!(order, ["first", "second"], "{key}");
    }
}
