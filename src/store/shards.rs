//! Who holds which shard: leases by the database's clock, and the fence that stops a predecessor.

use std::time::{Duration, SystemTime};

use tokio_postgres::Client;
use uuid::Uuid;

use super::log::Position;
use super::{Error, Result, ahead};
use crate::model::key::{Shard, ShardEpoch};
use crate::mutant::{self, Mutant};

/// A shard just taken over.
#[derive(Clone, Debug)]
pub struct Taken {
    pub shard: Shard,
    pub epoch: ShardEpoch,
    /// Where its reading goes on: the fence flight carries the predecessor's position.
    pub position: Position,
}

/// What a renewal kept.
#[derive(Debug)]
pub struct Renewed {
    pub kept: Vec<Shard>,
    /// The database's clock.
    pub now: SystemTime,
}

/// What a relay sees when it looks around.
#[derive(Debug)]
pub struct Roster {
    /// Shards nobody holds, or whose lease has run out.
    pub claimable: Vec<Shard>,
    /// All shards there are.
    pub shards: usize,
    /// Relays that have ticked within the time asked for, in an order all agree on.
    pub relays: Vec<Uuid>,
}

impl Roster {
    /// How many shards are this relay's share: they differ by one at most.
    pub fn share_of(&self, relay: Uuid) -> usize {
        let relays = self.relays.len().max(1);
        let rank = self.relays.iter().position(|known| *known == relay).unwrap_or(relays);
        self.shards / relays + usize::from(rank < self.shards % relays)
    }
}

/// Looks around. A relay that has not ticked for `within` counts no more.
pub async fn roster(client: &Client, within: Duration) -> Result<Roster> {
    let row = client
        .query_one(
            "-- store::roster
             select (select coalesce(array_agg(shard order by shard), '{}') from fencepost.shards
                     where relay is null or lease_expires_at <= clock_timestamp()),
                    (select count(*) from fencepost.shards),
                    (select coalesce(array_agg(relay order by relay), '{}') from fencepost.relays
                     where stopped_at is null and at > clock_timestamp() - make_interval(secs => $1))",
            &[&within.as_secs_f64()],
        )
        .await?;
    Ok(Roster {
        claimable: row.get::<_, Vec<i16>>(0).into_iter().map(Shard).collect(),
        shards: row.get::<_, i64>(1).max(0) as usize,
        relays: row.get(2),
    })
}

/// Takes a shard over in one transaction: raises its epoch and inserts a fence flight, so that whatever the old owner
/// has slipped in is seen, and nothing more can be. `None` where somebody else was faster.
pub async fn take(client: &mut Client, shard: Shard, relay: Uuid, lease: Duration) -> Result<Option<Taken>> {
    let tx = client.transaction().await?;
    // The lock is the one that claims under the old epoch (`for key share`) wait for; the update's own is not. Where one
    // of them is under way the shard is left for the next look: this session's renewals must not wait for it.
    let taken = tx
        .query_opt(
            "-- store::take_shard
             with free as (
                 select shard from fencepost.shards
                 where shard = $1 and (relay is null or lease_expires_at <= clock_timestamp()) for update skip locked
             )
             update fencepost.shards s
             set relay = $2, epoch = epoch + 1, lease_expires_at = clock_timestamp() + make_interval(secs => $3),
                 left_at = coalesce(s.left_at, s.lease_expires_at)
             from free where s.shard = free.shard
             returning s.epoch",
            &[&shard.0, &relay, &lease.as_secs_f64()],
        )
        .await?;
    let Some(row) = taken else { return Ok(None) };
    let epoch: i64 = row.get(0);
    // Each round sees one more flight of the old owner; it can slip in no more than it had under way.
    for _ in 0..100 {
        let Some(newest) = ahead::leave_lost(&tx, shard).await? else { break };
        let fence = tx
            .query_opt(
                "-- store::fence
                 insert into fencepost.flights (shard, seq, epoch, relay, base, target, last_id, partial, token, closed_at)
                 select shard, seq + 1, $2, $3, base, target, last_id, partial, 'fence', clock_timestamp()
                 from fencepost.flights where shard = $1 and seq = $4
                 on conflict (shard, seq) do nothing
                 returning seq, base::text, target::text, last_id, partial, ahead_to",
                &[&shard.0, &epoch, &relay, &newest.0],
            )
            .await?;
        if let Some(row) = fence {
            let position = Position::from_row(&row, 0);
            tx.commit().await?;
            return Ok(Some(Taken { shard, epoch: ShardEpoch(epoch), position }));
        }
    }
    Err(Error::Corrupt(format!(
        "shard {shard} has no flight row to continue from: where its reading stands is unknown"
    )))
}

/// Renews the leases of all shards held, in one statement. A lease that has run out is not renewed: it is lost, even
/// where nobody else has taken the shard yet.
pub async fn renew(client: &Client, relay: Uuid, held: &[(Shard, ShardEpoch)], lease: Duration) -> Result<Renewed> {
    let shards: Vec<i16> = held.iter().map(|(shard, _)| shard.0).collect();
    let epochs: Vec<i64> = held.iter().map(|(_, epoch)| epoch.0).collect();
    let mine = match mutant::is(Mutant::NoEpochPredicate) {
        false => "s.epoch = h.epoch and s.relay = $1 and s.lease_expires_at > clock_timestamp()",
        true => "$1::uuid is not null",
    };
    let sql = format!(
        "-- store::renew_shards
             with renewed as (
                 update fencepost.shards s set lease_expires_at = clock_timestamp() + make_interval(secs => $2)
                 from unnest($3::smallint[], $4::bigint[]) as h (shard, epoch)
                 where s.shard = h.shard and {mine}
                 returning s.shard
             )
             select n.now, r.shard from (select clock_timestamp() as now) n left join renewed r on true"
    );
    let rows = client.query(&sql, &[&relay, &lease.as_secs_f64(), &shards, &epochs]).await?;
    let now = rows.first().ok_or_else(|| Error::Corrupt("the clock gave no row".into()))?.get(0);
    Ok(Renewed { kept: rows.iter().filter_map(|row| row.get::<_, Option<i16>>(1)).map(Shard).collect(), now })
}

/// How a shard is given up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Leaving {
    /// Whatever was read has its flight: nothing was sent ahead of one.
    InOrder,
    Lost,
}

/// Gives shards up, so that another relay can take them at once, and says so to those that listen.
pub async fn release(client: &Client, relay: Uuid, held: &[(Shard, ShardEpoch)], leaving: Leaving) -> Result<()> {
    let shards: Vec<i16> = held.iter().map(|(shard, _)| shard.0).collect();
    let epochs: Vec<i64> = held.iter().map(|(_, epoch)| epoch.0).collect();
    client
        .execute(
            "-- store::release_shards
             with released as (
                 update fencepost.shards s
                 set relay = null, lease_expires_at = null, left_at = coalesce(s.left_at, clock_timestamp())
                 from unnest($2::smallint[], $3::bigint[]) as h (shard, epoch)
                 where s.shard = h.shard and s.epoch = h.epoch and s.relay = $1
                 returning s.shard
             ), licences as (
                 update fencepost.flights f set ahead_to = null
                 from released r
                 where $4 and f.shard = r.shard and f.ahead_to is not null
                   and f.seq = (select max(n.seq) from fencepost.flights n where n.shard = r.shard)
             )
             select pg_notify('fencepost_shards', count(*)::text) from released having count(*) > 0",
            &[&relay, &shards, &epochs, &(leaving == Leaving::InOrder)],
        )
        .await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_even_and_complete() {
        for relays in 1..=10usize {
            let ids: Vec<Uuid> = (0..relays).map(|n| Uuid::from_u128(n as u128)).collect();
            let roster = Roster { claimable: Vec::new(), shards: 8, relays: ids.clone() };
            let shares: Vec<usize> = ids.iter().map(|id| roster.share_of(*id)).collect();
            assert_eq!(shares.iter().sum::<usize>(), 8);
            assert!(shares.iter().max().unwrap() - shares.iter().min().unwrap() <= 1, "{shares:?}");
        }
    }
}
