//! What was opened over is handed out: flights of what is new, and of the pages of a large difference.

use std::sync::Arc;

use super::{Found, Reader};
use crate::relay::delivery::{Flight, FlightKind};
use crate::relay::launch;
use crate::relay::lease::InAir;
use crate::store::Result;
use crate::store::log::{Held, OpenedFlight, Opener, PageLimits, Reading};
use crate::store::pages::{self, Manifest};
use crate::store::session::Session;
use crate::store::settle::CloseRow;

/// Effects of a large difference that are known in advance per shard, sixteen bytes each.
const MANIFEST_MAX: i64 = 100_000;

impl Reader {
    /// The next flight of each difference too large for one.
    pub(super) async fn pages(
        &mut self,
        session: &Session,
        partial: Vec<Held>,
        opener: Opener,
        limits: PageLimits,
    ) -> Result<Found> {
        let (mut pages, mut ended) = (Vec::new(), 0);
        for held in partial {
            let Some(shard) = self.shards.get_mut(&held.shard) else { continue };
            if shard.manifest.is_empty() {
                shard.manifest = Manifest::read(session, held.shard, &held.position.reached, MANIFEST_MAX).await?;
            }
            if let Some(page) = shard.manifest.page(limits) {
                pages.push((held, page));
                continue;
            }
            ended += 1;
            match pages::finish_difference(session, &held, opener).await? {
                Some(position) => shard.position = position,
                None => self.lose(held.shard),
            }
        }
        let reading = pages::open_pages(session, &pages::aligned(pages), opener).await?;
        for flight in &reading.opened {
            if let (Some(shard), Some(last)) = (self.shards.get_mut(&flight.shard), flight.effects.last()) {
                shard.manifest.opened(last.effect.id);
            }
        }
        let found = self.launch(reading);
        Ok(Found { flights: found.flights + ended, ..found })
    }

    pub(super) fn launch(&mut self, reading: Reading) -> Found {
        if let Some(now) = reading.now {
            self.clock.set(now);
        }
        for shard in reading.lost {
            self.lose(shard);
        }
        let flights = reading.opened.len();
        let deliveries = reading.opened.into_iter().map(|flight| self.launch_one(flight)).sum();
        Found { flights, deliveries }
    }

    /// Hands the deliveries of an opened flight out. From here on the flight, not this reader, knows of them.
    /// Gives how many they are.
    pub(super) fn launch_one(&mut self, mut opened: OpenedFlight) -> usize {
        let Some(reading) = self.shards.get_mut(&opened.shard) else { return 0 };
        if let Some(tail) = &mut reading.tail {
            if opened.effects.last().map(|read| read.effect.id) < tail.last() {
                self.lose(opened.shard);
                return 0;
            }
            // Read ahead before the connection was lost: it is in the lanes, and has its flight now.
            opened.effects.retain(|read| !tail.holds(read.effect.id));
            tail.takes(&opened.effects);
            let count = launch::deliveries(&opened.effects);
            self.launcher.hand_out(&reading.lease, &tail.flight, opened.effects);
            self.tail_written(opened.shard, opened.position);
            return count;
        }
        let seq = opened.position.seq;
        reading.has_flight(opened.position);
        let lease = &reading.lease;
        let count = launch::deliveries(&opened.effects);
        if count == 0 {
            let row = CloseRow { shard: lease.shard, seq, epoch: lease.epoch, parks: Vec::new() };
            self.launcher.settler.close_empty(row);
            return 0;
        }
        let flight = Arc::new(Flight::written(FlightKind::Log, seq, count, Some(InAir::of(lease, seq))));
        self.launcher.hand_out(lease, &flight, opened.effects);
        count
    }
}
