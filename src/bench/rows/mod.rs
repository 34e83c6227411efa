//! What is measured, one file per subject.

mod amqp;
mod bare;
mod black_hole;
mod curves;
mod database;
mod drain;
mod footprint;
mod growth;
mod idle;
mod latency;
mod memory;
mod producers;
mod replicas;
mod snapshot;

use super::bodies::Size;
use super::figure::Figure;
use super::{Bench, Result, Scale};

/// A row of the table, or several that come from the same runs.
#[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Row {
    /// Reading and settling, with an edge that answers at once.
    Database,
    /// HTTP drain, bodies of 400 bytes.
    Http,
    /// HTTP drain, real bodies.
    HttpReal,
    /// WAL and dead tuples of healthy deliveries.
    Footprint,
    /// Drain while another session holds a snapshot.
    Snapshot,
    /// Drain of ten times the backlog.
    Backlog,
    /// What an idle relay costs.
    Idle,
    /// From commit to received, 500 a second.
    Latency,
    /// From commit to received, one a second.
    LatencyIdle,
    /// complete_task with one effect, 1 and 16 producers.
    CompleteTask,
    /// Commits of 16 producers with the relay attached.
    Attached,
    /// 1, 2 and 4 replicas on one database.
    Replicas,
    /// One of 20 consumers never answers.
    BlackHole,
    /// The relay's memory with a large backlog.
    Memory,
    /// AMQP drain.
    Amqp,
    /// Drain with ten million old effects retained (--full).
    Retained,
    /// Curves: rate against window and backlog, latency against offered load (--full).
    Curves,
}

impl Row {
    /// The rows of a scale, in the order in which they are measured.
    pub fn all(scale: Scale) -> Vec<Self> {
        use clap::ValueEnum;
        let fits = |row: &Self| scale == Scale::Full || !matches!(row, Self::Retained | Self::Curves);
        Self::value_variants().iter().copied().filter(fits).collect()
    }

    pub async fn measure(self, bench: &Bench) -> Result<Vec<Figure>> {
        match self {
            Self::Database => database::measure(bench).await,
            Self::Http => drain::measure(bench, Size::Small).await,
            Self::HttpReal => drain::measure(bench, Size::Real).await,
            Self::Footprint => footprint::measure(bench).await,
            Self::Snapshot => snapshot::measure(bench).await,
            Self::Backlog => growth::backlog(bench).await,
            Self::Retained => growth::retained(bench).await,
            Self::Idle => idle::measure(bench).await,
            Self::Latency => latency::loaded(bench).await,
            Self::LatencyIdle => latency::idle(bench).await,
            Self::CompleteTask => producers::complete_task(bench).await,
            Self::Attached => producers::attached(bench).await,
            Self::Replicas => replicas::measure(bench).await,
            Self::BlackHole => black_hole::measure(bench).await,
            Self::Memory => memory::measure(bench).await,
            Self::Amqp => amqp::measure(bench).await,
            Self::Curves => curves::measure(bench).await,
        }
    }
}
