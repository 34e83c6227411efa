//! A lane: one consumer in one shard. Which of its deliveries may go next; no I/O and no clock.
//!
//! Where the consumer orders by key, one delivery of a key is on its way at a time, and while any of a key waits in
//! the parking lot, whatever comes later of that key goes there too.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use super::delivery::{Delivery, FlightKind, Origin};
use crate::model::consumer::Ordering;
use crate::model::key::FlightSeq;
use crate::model::token::Waiting;
use crate::mutant::{self, Mutant};
use crate::store::lags::Range;
use crate::store::parking::Turn;

/// Keys of a lane that may wait in the parking lot, each known here; with more the lane lags.
pub const BLOCKED_KEYS_MAX: usize = 10_000;

/// The queues of one consumer in one shard.
#[derive(Debug)]
pub struct Lane {
    ordering: Ordering,
    fresh: VecDeque<Delivery>,
    retries: VecDeque<Delivery>,
    keys: HashMap<String, Key>,
    /// Deliveries behind others of their key.
    behind: usize,
    /// Keys with a delivery in the parking lot.
    blocked_keys: usize,
    changes: u64,
    lag: Option<Lag>,
    /// Every fresh delivery of this lane that is not settled holds a clone.
    fresh_out: Arc<()>,
}

/// Where a lane lags: flights it left unread.
#[derive(Debug)]
struct Lag {
    /// The first flight that is not settled: where the range begins in the database.
    from: FlightSeq,
    /// The first flight of which nothing is in hand.
    next: FlightSeq,
    to: FlightSeq,
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

impl Key {
    /// Takes the next of those behind, and keeps the lane's count of them.
    fn next(&mut self, behind: &mut usize) -> Option<Delivery> {
        let next = self.behind.pop_front()?;
        *behind -= 1;
        Some(next)
    }

    fn park(&mut self, more: u64, blocked_keys: &mut usize) {
        self.set_parked(self.parked + more, blocked_keys);
    }

    fn unpark(&mut self, blocked_keys: &mut usize) {
        self.set_parked(self.parked.saturating_sub(1), blocked_keys);
    }

    /// Keeps the lane's count of keys that wait.
    fn set_parked(&mut self, parked: u64, blocked_keys: &mut usize) {
        match (self.parked, parked) {
            (0, 1..) => *blocked_keys += 1,
            (1.., 0) => *blocked_keys -= 1,
            _ => {}
        }
        self.parked = parked;
    }
}

/// What becomes of a delivery that is offered to a lane.
#[derive(Debug)]
pub enum Offer {
    Queued,
    /// Its key's turn has not come.
    Blocked(Delivery),
    /// The lane lags: the flight is left unread for now.
    Lags(Delivery),
}

impl Lane {
    pub fn new(ordering: Ordering, parked: impl IntoIterator<Item = (String, u64)>) -> Self {
        let keys: HashMap<_, _> =
            parked.into_iter().map(|(key, parked)| (key, Key { parked, ..Key::default() })).collect();
        let blocked_keys = keys.values().filter(|key| key.parked > 0).count();
        let (fresh, retries) = (VecDeque::new(), VecDeque::new());
        Self { ordering, fresh, retries, keys, behind: 0, blocked_keys, changes: 0, lag: None, fresh_out: Arc::new(()) }
    }

    /// The range a predecessor left.
    pub fn with_lag(mut self, range: Option<Range>) -> Self {
        self.lag = range.map(|range| Lag { from: range.from, next: range.from, to: range.to });
        self
    }

    /// The key a delivery is ordered by, where this lane orders at all.
    pub fn key<'a>(&self, delivery: &'a Delivery) -> Option<&'a str> {
        // A replay has had its turn.
        let replay = matches!(delivery.origin, Origin::Parked { turn: Turn::Replay, .. });
        (self.ordering == Ordering::Key && !replay).then_some(delivery.effect.ordering_key.as_str())
    }

    pub fn offer(&mut self, mut delivery: Delivery) -> Offer {
        if let Origin::Flight(flight) = &delivery.origin {
            if flight.kind == FlightKind::Log
                && let Some(lag) = self.lag.as_mut().filter(|lag| lag.next <= lag.to)
            {
                lag.to = lag.to.max(flight.seq);
                return Offer::Lags(delivery);
            }
            delivery.lane = Some(Arc::clone(&self.fresh_out));
        }
        if self.key(&delivery).is_none() {
            self.enqueue(delivery);
            return Offer::Queued;
        }
        let stamp = self.stamp();
        let key = self.keys.entry(delivery.effect.ordering_key.clone()).or_default();
        key.touched = stamp;
        match delivery.origin {
            // One that was scheduled counts among those that wait only from now on.
            Origin::Parked { turn: Turn::Scheduled, .. } => key.park(1, &mut self.blocked_keys),
            Origin::Parked { .. } => {}
            Origin::Flight(_) if key.parked > 0 && !mutant::is(Mutant::OrderIgnoredAfterSpill) => {
                return Offer::Blocked(delivery);
            }
            Origin::Flight(_) => {}
        }
        if key.busy {
            key.behind.push_back(delivery);
            self.behind += 1;
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

    /// The retry that was attempted least, and how often: the one that says most about the consumer, least about itself.
    pub fn least_tried(&self) -> Option<u32> {
        self.retries.iter().map(|delivery| delivery.trouble.attempts).min()
    }

    pub fn take_least_tried(&mut self) -> Option<Delivery> {
        let (at, _) = self.retries.iter().enumerate().min_by_key(|(_, delivery)| delivery.trouble.attempts)?;
        self.retries.remove(at)
    }

    /// A delivery ended: its key is free for the next.
    pub fn ended(&mut self, key: Option<&str>, was_parked: WasParked) {
        let Some(text) = key else { return };
        let stamp = self.stamp();
        let Some(key) = self.keys.get_mut(text) else { return };
        key.touched = stamp;
        if was_parked == WasParked::Yes {
            key.unpark(&mut self.blocked_keys);
        }
        match key.next(&mut self.behind) {
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
        if mutant::is(Mutant::KeyFreedByDoubt) {
            key.set_parked(0, &mut self.blocked_keys);
        }
        match (was_parked, state) {
            // Scheduled for later it blocks nobody.
            (WasParked::Yes, Waiting::Scheduled) => key.unpark(&mut self.blocked_keys),
            (WasParked::No, Waiting::Scheduled) | (WasParked::Yes, _) => {}
            (WasParked::No, _) if mutant::is(Mutant::KeyFreedByDoubt) => {}
            (WasParked::No, _) => key.park(1, &mut self.blocked_keys),
        }
        if key.parked == 0 {
            if let Some(next) = key.next(&mut self.behind) {
                key.busy = true;
                self.enqueue(next);
            } else {
                self.rest(text);
            }
            return Vec::new();
        }
        let behind = std::mem::take(&mut key.behind);
        self.behind -= behind.len();
        // Those already parked keep their rows and are brought again; the others need one.
        let (parked, fresh): (Vec<_>, Vec<_>) = behind.into_iter().partition(Delivery::is_parked);
        drop(parked);
        key.park(fresh.len() as u64, &mut self.blocked_keys);
        fresh
    }

    /// A delivery that was refused entry is parked as blocked.
    pub fn blocked(&mut self, key: Option<&str>) {
        let stamp = self.stamp();
        if let Some(key) = key.and_then(|key| self.keys.get_mut(key)) {
            key.park(1, &mut self.blocked_keys);
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
                key.set_parked(counted.get(text).copied().unwrap_or(0), &mut self.blocked_keys);
            }
        }
        self.keys.retain(|_, key| key.busy || key.parked > 0);
    }

    pub fn fresh_len(&self) -> usize {
        self.fresh.len() + self.behind
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

    /// The consumer orders otherwise from now on. The queues must be empty.
    pub fn reorder(&mut self, ordering: Ordering) {
        self.ordering = ordering;
        self.keys.clear();
        (self.behind, self.blocked_keys) = (0, 0);
        self.stamp();
    }

    /// Deliveries from the parking lot keep their rows and are brought again.
    pub fn drop_retries(&mut self) {
        self.retries.clear();
        for key in self.keys.values_mut() {
            let before = key.behind.len();
            key.behind.retain(|delivery| !delivery.is_parked());
            self.behind -= before - key.behind.len();
        }
    }

    /// Begins to lag, or lags again: empties the fresh queue. Returns the deliveries whose flights must be put into the
    /// lag range; those of a page are in it already.
    pub fn fall_behind(&mut self) -> Vec<Delivery> {
        let mut out: Vec<Delivery> = self.fresh.drain(..).collect();
        let stamp = self.stamp();
        for delivery in &out {
            if let Some(key) = self.keys.get_mut(&delivery.effect.ordering_key) {
                key.busy = false;
                key.touched = stamp;
            }
        }
        for key in self.keys.values_mut() {
            let (parked, fresh): (Vec<_>, Vec<_>) = key.behind.drain(..).partition(Delivery::is_parked);
            key.behind.extend(parked);
            self.behind -= fresh.len();
            out.extend(fresh);
            // One that waited behind what is gone is next, or nothing would ever call it.
            if !key.busy
                && let Some(next) = key.next(&mut self.behind)
            {
                key.busy = true;
                self.retries.push_back(next);
            }
        }
        self.keys.retain(|_, key| key.busy || key.parked > 0 || !key.behind.is_empty());
        let (log, page): (Vec<_>, Vec<_>) = out.into_iter().partition(|d| d.flight_kind() == Some(FlightKind::Log));
        if let Some(lag) = self.lag.as_mut().filter(|_| !page.is_empty()) {
            lag.next = lag.from;
        }
        let seqs = log.iter().filter_map(Delivery::flight_seq);
        if let (Some(from), Some(to)) = (seqs.clone().min(), seqs.max()) {
            let lag = self.lag.get_or_insert(Lag { from, next: from, to });
            // What was read through begins again with what was just put back.
            if lag.next > lag.to {
                lag.next = lag.next.min(from);
            }
            lag.from = lag.from.min(from);
            lag.to = lag.to.max(to);
        }
        log
    }

    /// Whether so many keys wait in the parking lot that no more may be known.
    pub fn is_clogged(&self) -> bool {
        self.blocked_keys >= BLOCKED_KEYS_MAX
    }

    /// Whether flights were left unread.
    pub fn lags(&self) -> bool {
        self.lag.as_ref().is_some_and(|lag| lag.next <= lag.to)
    }

    /// Whether the next page of the range may be read: nothing fresh of the lane is out, so that what the ledger lacks
    /// was not sent.
    pub fn wants_page(&mut self) -> bool {
        if Arc::strong_count(&self.fresh_out) > 1 {
            return false;
        }
        if let Some(lag) = &mut self.lag {
            // The page that was in hand is settled.
            lag.from = lag.next;
            if lag.from > lag.to {
                self.lag = None;
            }
        }
        self.lag.is_some() && !self.is_clogged()
    }

    /// A page was read: everything up to this flight is in hand, or was settled before.
    pub fn page_read(&mut self, up_to: FlightSeq) {
        if let Some(lag) = &mut self.lag {
            lag.next = FlightSeq(up_to.0 + 1);
        }
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
