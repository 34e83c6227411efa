//! Handing out what was read: each effect becomes a delivery for each of its consumers, on its way to their lanes.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::attempt;
use super::delivery::{ByteBudget, Delivery, Flight, Origin};
use super::lease::{LeaseHold, ShardLease};
use super::router::Router;
use super::settler::{Settlement, Settler, Verdict};
use crate::model::consumer::Ordering;
use crate::model::token::Waiting;
use crate::store::effects::ReadEffect;
use crate::store::parking::Trouble;
use crate::store::settle::{Durability, Parking};

pub struct Launcher {
    pub router: Arc<Router>,
    pub settler: Settler,
    pub budget: ByteBudget,
}

/// How many deliveries `effects` are.
pub fn deliveries(effects: &[ReadEffect]) -> usize {
    effects.iter().map(|read| read.effect.targets.len()).sum()
}

impl Launcher {
    /// From here on `flight`, which knows of so many deliveries, answers for them.
    pub fn hand_out(&self, lease: &Arc<ShardLease>, flight: &Arc<Flight>, effects: Vec<ReadEffect>) {
        let now = Instant::now();
        let count = deliveries(&effects);
        metrics::counter!("fencepost_deliveries_read_total").increment(count as u64);
        let (mut due, mut later) = (Vec::with_capacity(count), Vec::new());
        for read in effects {
            let effect = Arc::new(read.effect);
            let shares = self.budget.shares(&effect);
            for (consumer, share) in effect.targets.iter().zip(shares) {
                let delivery = Delivery {
                    effect: Arc::clone(&effect),
                    consumer: *consumer,
                    lease: LeaseHold::of(lease),
                    trouble: Trouble::default(),
                    expired: read.expired,
                    origin: Origin::Flight(Arc::clone(flight)),
                    since: now,
                    lane: None,
                    share,
                };
                match read.due_in {
                    Some(wait) => later.push((delivery, wait)),
                    None => due.push(delivery),
                }
            }
        }
        for (delivery, wait) in later {
            self.schedule(delivery, wait);
        }
        self.router.route(due);
    }

    /// A scheduled effect waits in the parking lot and takes its place in its key's order when it is due.
    fn schedule(&self, delivery: Delivery, wait: Duration) {
        let row = attempt::park_row(
            &delivery,
            Ordering::Key,
            Parking::waiting(Waiting::Scheduled, Some(wait), "deliver_after lies ahead"),
        );
        self.settler.settle(Settlement {
            delivery,
            verdict: Verdict::Park(row),
            end: None,
            durability: Durability::Lazy,
        });
    }
}
