//! Claims of a relay whose time is over: a takeover waits for those under way, and later ones are refused.

use std::time::Duration;

use fencepost::model::key::{ConsumerId, EffectId, Shard, ShardEpoch};
use fencepost::store::session::Session;
use fencepost::store::settle::{self, Batch, DeliveryId, StartRow};
use fencepost::store::shards::{self, Leaving};
use uuid::Uuid;

use crate::support::db::TestDb;

const LEASE: Duration = Duration::from_secs(60);
const SHARD: Shard = Shard(3);

fn start(epoch: ShardEpoch) -> Batch {
    let delivery = DeliveryId { effect: EffectId(1), consumer: ConsumerId(1) };
    Batch { starts: vec![StartRow { delivery, shard: SHARD, epoch, attempt: 1 }], ..Batch::default() }
}

#[tokio::test]
async fn a_takeover_waits_for_claims_under_way_and_sees_them() {
    let db = TestDb::new().await;
    let (mut old, mut new) = (db.client().await, db.client().await);
    let (first, second) = (Uuid::now_v7(), Uuid::now_v7());
    let held = shards::take(&mut old, SHARD, first, LEASE).await.unwrap().expect("a free shard");
    // A claim under the first relay's epoch, as long as it is not committed.
    let claim = old.transaction().await.unwrap();
    let lock = "select 1 from fencepost.shards where shard = $1 and epoch = $2 for key share";
    assert_eq!(claim.query(lock, &[&SHARD.0, &held.epoch.0]).await.unwrap().len(), 1);
    let expire = "update fencepost.shards set lease_expires_at = clock_timestamp() - interval '1 s' where shard = $1";
    new.execute(expire, &[&SHARD.0]).await.unwrap();
    assert!(shards::take(&mut new, SHARD, second, LEASE).await.unwrap().is_none(), "a claim is under way");
    claim.commit().await.unwrap();
    let taken = shards::take(&mut new, SHARD, second, LEASE).await.unwrap().expect("nothing is in the way");
    assert!(taken.epoch > held.epoch);
}

#[tokio::test]
async fn an_attempt_starts_only_under_its_relays_own_epoch() {
    let db = TestDb::new().await;
    let mut client = db.client().await;
    let mut session = Session::open(&db.database()).await.unwrap();
    let (first, second) = (Uuid::now_v7(), Uuid::now_v7());
    let held = shards::take(&mut client, SHARD, first, LEASE).await.unwrap().expect("a free shard");
    let written = settle::write(&mut session, &start(held.epoch), first).await.unwrap();
    assert!(written.refused.starts.is_empty(), "the holder may");
    // Given up: the epoch is still the newest, and yet it is over.
    shards::release(&client, first, &[(SHARD, held.epoch)], Leaving::InOrder).await.unwrap();
    let mut late = start(held.epoch);
    late.starts[0].attempt = 2;
    assert_eq!(settle::write(&mut session, &late, first).await.unwrap().refused.starts.len(), 1);
    shards::take(&mut client, SHARD, second, LEASE).await.unwrap().expect("a free shard");
    assert_eq!(settle::write(&mut session, &late, first).await.unwrap().refused.starts.len(), 1);
    let started = "select count(*) from fencepost.attempts";
    assert_eq!(client.query_one(started, &[]).await.unwrap().get::<_, i64>(0), 1);
}
