//! Batches written without waiting for the disk. A crash of the database may forget them, so they are kept here until
//! the disk has them, and written again over a new connection: the write is repeated, never the send.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use crate::store::settle::{Batch, Durability, Wal};

/// How often the database is asked how far its disk is.
pub const ASK_EVERY: Duration = Duration::from_millis(100);

const KEPT_MAX: usize = 256;

pub struct Unflushed {
    /// With the position in the log that covers it, once one was asked for after its commit.
    batches: VecDeque<(Batch, Option<u64>)>,
    asked: Instant,
}

impl Default for Unflushed {
    fn default() -> Self {
        Self { batches: VecDeque::new(), asked: Instant::now() }
    }
}

impl Unflushed {
    pub fn is_empty(&self) -> bool {
        self.batches.is_empty()
    }

    /// The disk does not keep up: the next batch had better wait for it.
    pub fn is_long(&self) -> bool {
        self.batches.len() >= KEPT_MAX
    }

    /// A batch was committed.
    pub fn committed(&mut self, batch: Batch) {
        match batch.durability {
            _ if batch.is_empty() => {}
            // One flush covers everything committed before.
            Durability::Local | Durability::Flushed => self.batches.clear(),
            Durability::Lazy => self.batches.push_back((batch, None)),
        }
    }

    pub fn wants_to_know(&self) -> bool {
        !self.is_empty() && self.asked.elapsed() >= ASK_EVERY
    }

    /// How far the database is, asked for after the last commit.
    pub fn reached(&mut self, wal: Wal) {
        self.asked = Instant::now();
        for (_, covered) in &mut self.batches {
            covered.get_or_insert(wal.inserted);
        }
        while self.batches.front().is_some_and(|(_, covered)| covered.is_some_and(|at| at <= wal.flushed)) {
            self.batches.pop_front();
        }
    }

    /// What must be written again, in order. It stays here: it is as unflushed as before.
    pub fn again(&mut self) -> impl Iterator<Item = &Batch> {
        self.batches.iter_mut().map(|(batch, covered)| {
            *covered = None;
            &*batch
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::key::{FlightSeq, Shard, ShardEpoch};
    use crate::store::settle::CloseRow;

    fn batch(seq: i64, durability: Durability) -> Batch {
        let close = CloseRow { shard: Shard(0), seq: FlightSeq(seq), epoch: ShardEpoch(1), parks: Vec::new() };
        Batch { closes: vec![close], durability, ..Batch::default() }
    }

    fn kept(unflushed: &mut Unflushed) -> Vec<i64> {
        unflushed.again().map(|batch| batch.closes[0].seq.0).collect()
    }

    #[test]
    fn a_batch_is_kept_until_the_disk_has_it() {
        let mut unflushed = Unflushed::default();
        unflushed.committed(batch(1, Durability::Lazy));
        unflushed.reached(Wal { inserted: 10, flushed: 5 });
        unflushed.committed(batch(2, Durability::Lazy));
        unflushed.reached(Wal { inserted: 20, flushed: 10 });
        assert_eq!(kept(&mut unflushed), [2], "the first is on disk, the second ends somewhere before 20");
        unflushed.reached(Wal { inserted: 30, flushed: 20 });
        assert_eq!(kept(&mut unflushed), [2], "after a repetition only a new position counts");
        unflushed.reached(Wal { inserted: 30, flushed: 30 });
        assert!(unflushed.is_empty());
    }

    #[test]
    fn one_flush_covers_everything_before_it() {
        let mut unflushed = Unflushed::default();
        unflushed.committed(batch(1, Durability::Lazy));
        unflushed.committed(batch(2, Durability::Flushed));
        assert!(unflushed.is_empty());
    }
}
