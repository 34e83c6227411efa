//! A lane: one consumer in one shard. Which of its deliveries may go next; no I/O and no clock.
//!
//! Where the consumer orders by key, one delivery of a key is on its way at a time, and while any of a key waits in
//! the parking lot, whatever comes later of that key goes there too.

use std::collections::{HashMap, HashSet, VecDeque};

use super::delivery::{Delivery, Origin};
use crate::model::consumer::Ordering;
use crate::model::token::Waiting;
use crate::store::parking::Turn;

/// The queues of one consumer in one shard.
#[derive(Debug)]
pub struct Lane {
    ordering: Ordering,
    fresh: VecDeque<Delivery>,
    retries: VecDeque<Delivery>,
    keys: HashMap<String, Key>,
    changes: u64,
}

/// What is known of one ordering key. A key nothing is known of is free.
#[derive(Debug, Default)]
struct Key {
    /// One of it is in a queue or on its way.
    busy: bool,
    /// Those behind it.
    behind: VecDeque<Delivery>,
    /// Deliveries of it in the parking lot, those being parked included.
    parked: u64,
    touched: u64,
}

/// What becomes of a delivery that is offered to a lane.
#[derive(Debug)]
pub enum Offer {
    Queued,
    /// Its key's turn has not come.
    Blocked(Delivery),
}

impl Lane {
    pub fn new(ordering: Ordering, parked: impl IntoIterator<Item = (String, u64)>) -> Self {
        let keys = parked.into_iter().map(|(key, parked)| (key, Key { parked, ..Key::default() })).collect();
        Self { ordering, fresh: VecDeque::new(), retries: VecDeque::new(), keys, changes: 0 }
    }

    /// The key a delivery is ordered by, where this lane orders at all.
    pub fn key<'a>(&self, delivery: &'a Delivery) -> Option<&'a str> {
        // A replay has had its turn.
        let replay = matches!(delivery.origin, Origin::Parked { turn: Turn::Replay, .. });
        (self.ordering == Ordering::Key && !replay).then_some(delivery.effect.ordering_key.as_str())
    }

    pub fn offer(&mut self, delivery: Delivery) -> Offer {
        if self.key(&delivery).is_none() {
            self.enqueue(delivery);
            return Offer::Queued;
        }
        let stamp = self.stamp();
        let key = self.keys.entry(delivery.effect.ordering_key.clone()).or_default();
        key.touched = stamp;
        match delivery.origin {
            // One that was scheduled counts among those that wait only from now on.
            Origin::Parked { turn: Turn::Scheduled, .. } => key.parked += 1,
            Origin::Parked { .. } => {}
            Origin::Flight(_) if key.parked > 0 => return Offer::Blocked(delivery),
            Origin::Flight(_) => {}
        }
        if key.busy {
            key.behind.push_back(delivery);
        } else {
            key.busy = true;
            self.enqueue(delivery);
        }
        Offer::Queued
    }

    pub fn next_fresh(&mut self) -> Option<Delivery> {
        self.fresh.pop_front()
    }

    pub fn next_retry(&mut self) -> Option<Delivery> {
        self.retries.pop_front()
    }

    /// A delivery ended: its key is free for the next.
    pub fn ended(&mut self, key: Option<&str>, was_parked: WasParked) {
        let Some(text) = key else { return };
        let stamp = self.stamp();
        let Some(key) = self.keys.get_mut(text) else { return };
        key.touched = stamp;
        if was_parked == WasParked::Yes {
            key.parked = key.parked.saturating_sub(1);
        }
        match key.behind.pop_front() {
            Some(next) => self.enqueue(next),
            None => self.rest(text),
        }
    }

    /// A delivery goes to the parking lot: its key waits. Returns those behind it, which must be parked as well.
    #[must_use]
    pub fn parked(&mut self, key: Option<&str>, was_parked: WasParked, state: Waiting) -> Vec<Delivery> {
        let Some(text) = key else { return Vec::new() };
        let stamp = self.stamp();
        let key = self.keys.entry(text.to_string()).or_default();
        key.touched = stamp;
        key.busy = false;
        match (was_parked, state) {
            // Scheduled for later it blocks nobody.
            (WasParked::Yes, Waiting::Scheduled) => key.parked = key.parked.saturating_sub(1),
            (WasParked::No, Waiting::Scheduled) | (WasParked::Yes, _) => {}
            (WasParked::No, _) => key.parked += 1,
        }
        if key.parked == 0 {
            if let Some(next) = key.behind.pop_front() {
                key.busy = true;
                self.enqueue(next);
            } else {
                self.rest(text);
            }
            return Vec::new();
        }
        let behind = std::mem::take(&mut key.behind);
        // Those already parked keep their rows and are brought again; the others need one.
        let (parked, fresh): (Vec<_>, Vec<_>) = behind.into_iter().partition(Delivery::is_parked);
        drop(parked);
        key.parked += fresh.len() as u64;
        fresh
    }

    /// A delivery that was refused entry is parked as blocked.
    pub fn blocked(&mut self, key: Option<&str>) {
        let stamp = self.stamp();
        if let Some(key) = key.and_then(|key| self.keys.get_mut(key)) {
            key.parked += 1;
            key.touched = stamp;
        }
    }

    /// What to compare a later count with.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Corrects the counts by what the database counted after `asked`: an operator may have removed rows. Keys that
    /// changed since then keep theirs.
    pub fn recount(&mut self, asked: u64, counted: &HashMap<String, u64>) {
        for (text, key) in &mut self.keys {
            if key.touched <= asked && !key.busy {
                key.parked = counted.get(text).copied().unwrap_or(0);
            }
        }
        self.keys.retain(|_, key| key.busy || key.parked > 0);
    }

    pub fn fresh_len(&self) -> usize {
        self.fresh.len() + self.keys.values().map(|key| key.behind.len()).sum::<usize>()
    }

    pub fn retries_len(&self) -> usize {
        self.retries.len()
    }

    pub fn oldest_fresh(&self) -> Option<tokio::time::Instant> {
        self.fresh.front().map(|delivery| delivery.since)
    }

    pub fn oldest_retry(&self) -> Option<tokio::time::Instant> {
        self.retries.front().map(|delivery| delivery.since)
    }

    /// Empties the queues, to be dropped or parked. In order.
    pub fn take_all(&mut self) -> Vec<Delivery> {
        let mut all: Vec<Delivery> = self.fresh.drain(..).chain(self.retries.drain(..)).collect();
        for key in self.keys.values_mut() {
            all.extend(key.behind.drain(..));
        }
        all.sort_by_key(Delivery::effect_id);
        all
    }

    /// Takes the youngest fresh deliveries out until `keep` are left, in order, to be parked.
    pub fn shed(&mut self, keep: usize) -> Vec<Delivery> {
        let mut shed: Vec<Delivery> = self.fresh.drain(keep.min(self.fresh.len())..).collect();
        for delivery in &shed {
            if let Some(key) =
                (self.ordering == Ordering::Key).then(|| self.keys.get_mut(&delivery.effect.ordering_key)).flatten()
            {
                key.busy = false;
            }
        }
        let stamp = self.stamp();
        if self.ordering == Ordering::Key {
            let texts: HashSet<String> = shed.iter().map(|d| d.effect.ordering_key.clone()).collect();
            for text in texts {
                if let Some(key) = self.keys.get_mut(&text) {
                    key.touched = stamp;
                    let (parked, fresh): (Vec<_>, Vec<_>) = key.behind.drain(..).partition(Delivery::is_parked);
                    drop(parked);
                    key.parked += 1 + fresh.len() as u64;
                    shed.extend(fresh);
                }
            }
            shed.sort_by_key(Delivery::effect_id);
        }
        shed
    }

    fn enqueue(&mut self, delivery: Delivery) {
        match delivery.origin {
            Origin::Flight(_) => self.fresh.push_back(delivery),
            Origin::Parked { .. } => self.retries.push_back(delivery),
        }
    }

    fn rest(&mut self, text: &str) {
        if let Some(key) = self.keys.get_mut(text) {
            key.busy = false;
            if key.parked == 0 {
                self.keys.remove(text);
            }
        }
    }

    fn stamp(&mut self) -> u64 {
        self.changes += 1;
        self.changes
    }
}

/// Whether a delivery has a row in the parking lot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WasParked {
    Yes,
    No,
}

impl WasParked {
    pub fn of(delivery: &Delivery) -> Self {
        if delivery.is_parked() { Self::Yes } else { Self::No }
    }
}

#[cfg(test)]
#[path = "lane_tests.rs"]
mod tests;
