//! Bringing deliveries back from the parking lot when their turn has come.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use deadpool_postgres::Pool;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::delivery::{ByteBudget, Delivery, Flight, FlightKind, Hand, Origin, Share};
use super::dispatcher::{Command, Dispatcher};
use super::doorbell::Doorbell;
use super::lease::LeaseHold;
use super::router::Router;
use super::settler::Settler;
use crate::edge::error::report;
use crate::model::key::{ConsumerId, Shard};
use crate::store::effects::ReadEffect;
use crate::store::lags::{self, LaneId, PageSize};
use crate::store::parking::{self, Due, Trouble};
use crate::store::settle::{AdvanceRow, DeliveryId};
use crate::store::{Error, Result};

/// How often the parking lot is looked through while nothing happens there.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How often while nothing is parked at all: whoever parks says so.
const LOOK_EMPTY: Duration = Duration::from_secs(5);
/// And while something happens.
const LOOK_BUSY: Duration = Duration::from_millis(100);
/// How long it counts as busy after a delivery was parked.
const BUSY_FOR: Duration = Duration::from_secs(3);
/// How much of a lag range is read at once; one flight at least.
const PAGE: PageSize = PageSize { flights: 1_000, deliveries: 1_000 };
/// How often what a crash or an operator left is mended, and the blocked keys are counted again.
const MEND_EVERY: Duration = Duration::from_secs(5);

pub struct Loader {
    pub pool: Pool,
    pub router: Arc<Router>,
    pub bell: Arc<Doorbell>,
    pub hand: Hand,
    pub settler: Settler,
    pub budget: ByteBudget,
    /// Until then the parking lot is known to be empty.
    pub empty_until: Instant,
}

impl Loader {
    pub async fn run(mut self, stop: CancellationToken) {
        let mut busy_until = Instant::now();
        let mut mend_at = Instant::now() + MEND_EVERY;
        loop {
            let wait = if Instant::now() < busy_until { LOOK_BUSY } else { LOOK_EVERY };
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.bell.parked.notified() => {
                    busy_until = Instant::now() + BUSY_FOR;
                    self.empty_until = Instant::now();
                }
                () = tokio::time::sleep(wait) => {}
            }
            let looked = async {
                let brought = self.bring().await?;
                if Instant::now() >= mend_at {
                    self.mend().await?;
                }
                Ok::<_, Error>(brought)
            };
            let looked = tokio::select! {
                () = stop.cancelled() => return,
                looked = looked => looked,
            };
            match looked {
                Ok(0) => {}
                Ok(_) => busy_until = Instant::now() + BUSY_FOR,
                // The settler and the reader say when the database is gone.
                Err(error) if error.is_disconnect() => {
                    tracing::debug!(error = %report(&error), "the parking lot waits for the database")
                }
                Err(error) => tracing::warn!(error = %report(&error), "the parking lot could not be read"),
            }
            if Instant::now() >= mend_at {
                mend_at = Instant::now() + MEND_EVERY;
            }
        }
    }

    async fn bring(&mut self) -> Result<usize> {
        let (mut rooms, mut pages) = (Vec::new(), Vec::new());
        for (_, dispatcher) in self.router.dispatchers() {
            let wanted = dispatcher.rooms().await;
            rooms.extend(wanted.parked);
            pages.extend(wanted.pages.into_iter().map(|lane| (lane, dispatcher.clone())));
        }
        let mut brought = 0;
        for (lane, dispatcher) in pages {
            brought += self.page(lane, &dispatcher).await?;
        }
        if rooms.is_empty() || Instant::now() < self.empty_until {
            return Ok(brought);
        }
        let client = self.pool.get().await?;
        let due = parking::due(&client, &rooms, &self.hand.all()).await?;
        if due.is_empty() {
            let held: Vec<Shard> = self.router.leases().iter().map(|lease| lease.shard).collect();
            if parking::is_empty(&client, &held).await? {
                self.empty_until = Instant::now() + LOOK_EMPTY;
            }
        }
        drop(client);
        brought += due.len();
        self.router.route(due.into_iter().filter_map(|due| self.delivery(due)).collect());
        Ok(brought)
    }

    /// Reads the next page of what a lane left unread, while there is memory for it.
    async fn page(&self, lane: LaneId, dispatcher: &Dispatcher) -> Result<usize> {
        let Some(lease) = self.router.lease(lane.shard).filter(|lease| lease.epoch == lane.epoch) else { return Ok(0) };
        if self.budget.room() == 0 {
            return Ok(0);
        }
        let client = self.pool.get().await?;
        let Some(page) = lags::page(&client, lane, PAGE).await? else { return Ok(0) };
        drop(client);
        let count = page.effects.len();
        if count == 0 {
            self.settler.advance_empty(AdvanceRow { lane, up_to: page.up_to });
        }
        let flight = Arc::new(Flight::written(FlightKind::Page, page.up_to, count, None));
        let delivery = |read: ReadEffect| Delivery {
            share: self.budget.bytes_of(&read.effect),
            effect: Arc::new(read.effect),
            consumer: lane.consumer,
            lease: LeaseHold::of(&lease),
            trouble: Trouble::default(),
            expired: read.expired,
            origin: Origin::Flight(Arc::clone(&flight)),
            since: Instant::now(),
            lane: None,
        };
        let deliveries = page.effects.into_iter().map(delivery).collect();
        dispatcher.tell(Command::Page { shard: lane.shard, epoch: lane.epoch, up_to: page.up_to, deliveries });
        Ok(count.max(1))
    }

    fn delivery(&self, due: Due) -> Option<Delivery> {
        let lease = self.router.lease(due.effect.shard)?;
        let guard = self.hand.take(DeliveryId { effect: due.effect.id, consumer: due.consumer })?;
        Some(Delivery {
            effect: Arc::new(due.effect),
            consumer: due.consumer,
            lease: LeaseHold::of(&lease),
            trouble: due.trouble,
            expired: due.expired,
            origin: Origin::Parked { turn: due.turn, guard },
            since: Instant::now(),
            lane: None,
            share: Share::default(),
        })
    }

    async fn mend(&self) -> Result<()> {
        let leases = self.router.leases();
        if leases.is_empty() {
            return Ok(());
        }
        // Asked before the count is taken: keys that change meanwhile keep theirs.
        let dispatchers: HashMap<ConsumerId, _> = self.router.dispatchers().into_iter().collect();
        let mut asked: HashMap<(ConsumerId, Shard), u64> = HashMap::new();
        for (id, dispatcher) in &dispatchers {
            asked.extend(dispatcher.changes().await.into_iter().map(|(shard, changes)| ((*id, shard), changes)));
        }
        // Rows that are parked as far as the lanes know must be there to be counted.
        self.settler.flush().await;
        let client = self.pool.get().await?;
        let held: Vec<_> = leases.iter().map(|lease| (lease.shard, lease.epoch)).collect();
        parking::mend(&client, &held).await?;
        let shards: Vec<Shard> = leases.iter().map(|lease| lease.shard).collect();
        let mut counted: HashMap<(ConsumerId, Shard), HashMap<String, u64>> = HashMap::new();
        for (shard, consumer, key, count) in parking::blocked_keys(&client, &shards).await? {
            counted.entry((consumer, shard)).or_default().insert(key, count);
        }
        for ((consumer, shard), asked) in asked {
            if let Some(dispatcher) = dispatchers.get(&consumer) {
                let counted = counted.remove(&(consumer, shard)).unwrap_or_default();
                dispatcher.tell(Command::Recount { shard, asked, counted });
            }
        }
        Ok(())
    }
}
