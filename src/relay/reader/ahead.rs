//! Reading ahead: what little is new is handed out before it has a flight, and written into one some milliseconds later
//! (`store::ahead`).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::tail::Tail;
use super::{Found, Reader};
use crate::failpoint;
use crate::model::key::{Shard, ShardEpoch};
use crate::mutant::{self, Mutant};
use crate::relay::launch;
use crate::store::Result;
use crate::store::ahead::{self, Ahead, Commits, New};
use crate::store::effects::ReadEffect;
use crate::store::log::{Held, Position, Reached, Snapshot};
use crate::store::session::Session;

/// What was read ahead has its flight so long after the first of it was handed out.
const WRITTEN_AFTER: Duration = Duration::from_millis(250);

/// Everything visible in this snapshot was read of these shards, held under these epochs: what others read of a shard meanwhile
/// says nothing of it. Only of use over the connection it came from: after a crash of the server the same transaction ids
/// may come again.
pub struct Seen {
    snapshot: Snapshot,
    shards: Vec<(Shard, ShardEpoch)>,
    /// Since when something that was read has no flight.
    unwritten_since: Option<Instant>,
}

impl Seen {
    /// When what was read ahead is to have its flight.
    pub(super) fn write_in(&self) -> Option<Duration> {
        self.unwritten_since.map(|since| WRITTEN_AFTER.saturating_sub(since.elapsed()))
    }
}

impl Reader {
    /// After a reading of the whole difference of `held`.
    pub(super) fn has_seen(&mut self, snapshot: Option<Snapshot>, held: &[Held]) {
        let whole = !held.iter().any(|h| matches!(h.position.reached, Reached::Partial { .. })) && !self.is_behind();
        let shards = held.iter().map(|h| (h.shard, h.epoch)).collect();
        // What was read ahead over another connection has its flight now, or was not found any more.
        let forgotten: Vec<Shard> =
            self.shards.iter().filter(|(_, reading)| reading.tail.is_some()).map(|(shard, _)| *shard).collect();
        forgotten.into_iter().for_each(|shard| self.lose(shard));
        self.seen = snapshot.filter(|_| whole).map(|snapshot| Seen { snapshot, shards, unwritten_since: None });
    }

    /// Hands out what little is new, before it has a flight. `None` where it must have one first.
    pub(super) async fn read_ahead(&mut self, session: &Session) -> Result<Option<Found>> {
        let Some(seen) = &self.seen else { return Ok(None) };
        let alive: Vec<(Shard, ShardEpoch)> = self
            .shards
            .values()
            .filter(|reading| reading.lease.is_alive())
            .map(|reading| (reading.lease.shard, reading.lease.epoch))
            .collect();
        let known = alive.iter().all(|shard| seen.shards.contains(shard));
        if !known || self.traffic.is_heavy() || mutant::is(Mutant::CursorById) {
            return Ok(None);
        }
        let shards: Vec<Shard> = alive.iter().map(|(shard, _)| *shard).collect();
        match ahead::read(session, &shards, &seen.snapshot).await? {
            Ahead::Nothing => Ok(Some(Found::default())),
            Ahead::New(new) => self.launch_ahead(session, new, alive).await.map(Some),
            Ahead::Much => Ok(None),
        }
    }

    async fn launch_ahead(&mut self, session: &Session, new: New, shards: Vec<(Shard, ShardEpoch)>) -> Result<Found> {
        self.clock.set(new.now);
        let found = Found { flights: 1, deliveries: launch::deliveries(&new.effects) };
        if let Some(seen) = &mut self.seen {
            (seen.snapshot, seen.shards) = (new.seen, shards);
            seen.unwritten_since.get_or_insert_with(Instant::now);
        }
        let mut by_shard: BTreeMap<Shard, Vec<_>> = BTreeMap::new();
        for read in new.effects {
            by_shard.entry(read.effect.shard).or_default().push(read);
        }
        let mut held_back = Vec::new();
        for (shard, effects) in by_shard {
            let Some(reading) = self.shards.get_mut(&shard) else { continue };
            let tail = reading.tail.get_or_insert_with(|| Tail::new(&reading.lease, reading.position.next_seq()));
            tail.takes(&effects);
            let licensed = effects.last().map(|read| read.effect.id) <= reading.position.ahead_to;
            match licensed && new.commits == Commits::OnDisk {
                true => self.launcher.hand_out(&reading.lease, &tail.flight, effects),
                false => held_back.push((Arc::clone(&reading.lease), Arc::clone(&tail.flight), effects)),
            }
        }
        if !held_back.is_empty() {
            let written = self.write_tails(session).await;
            for (lease, flight, effects) in held_back {
                match flight.is_written() {
                    true => self.launcher.hand_out(&lease, &flight, effects),
                    false => self.take_back(lease.shard, &effects),
                }
            }
            written?;
        }
        Ok(found)
    }

    /// What was not handed out is found again.
    fn take_back(&mut self, shard: Shard, effects: &[ReadEffect]) {
        let Some(reading) = self.shards.get_mut(&shard) else { return };
        reading.tail = reading.tail.take().and_then(|tail| tail.without(effects));
        if reading.tail.is_none() {
            reading.lease.has_written();
        }
    }

    /// Gives what was read ahead its flights.
    pub(super) async fn write_tails(&mut self, session: &Session) -> Result<()> {
        let unwritten: Vec<_> =
            self.shards.values().filter_map(|reading| reading.tail.as_ref()?.unwritten(reading.held())).collect();
        let Some(snapshot) = self.seen.as_ref().map(|seen| seen.snapshot.clone()).filter(|_| !unwritten.is_empty())
        else {
            return Ok(());
        };
        let opener = self.opener();
        failpoint::reach("before_ahead", &[]).await;
        let written = ahead::write(session, &unwritten, &snapshot, opener).await?;
        self.unanswered = None;
        for (shard, position) in written {
            self.tail_written(shard, position);
        }
        for one in unwritten {
            if self.shards.get(&one.held.shard).is_some_and(|reading| reading.tail.is_some()) {
                self.lose(one.held.shard);
            }
        }
        if let Some(seen) = &mut self.seen {
            seen.unwritten_since = None;
        }
        Ok(())
    }

    pub(super) fn tail_written(&mut self, shard: Shard, position: Position) {
        let Some(reading) = self.shards.get_mut(&shard) else { return };
        let Some(tail) = reading.tail.take() else { return };
        reading.has_flight(position);
        reading.lease.has_written();
        tail.flight.has_row();
        self.launcher.settler.written(tail.flight, shard, reading.lease.epoch);
    }
}
