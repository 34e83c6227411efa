//! `fencepost bench`: the product measured beside its ceilings, in the same run on the same machine. Ratios are the
//! result; absolute figures are context.
//!
//! The `rig` is a private PostgreSQL (durable) and, where a row needs it, a private RabbitMQ. The relay is a child
//! process of this very binary; consumers (`sink`) and producers run in this process. Each file of `rows` measures
//! one thing and gives `figure`s. A ceiling is measured before and after what it is compared with (`ceiling`), and
//! consumers count what they receive: anything missing or twice fails the run.

mod backlog;
mod bodies;
mod ceiling;
pub mod chart;
mod delays;
pub mod figure;
mod machine;
mod openloop;
mod relay;
mod rig;
mod rows;
mod sink;

use std::path::PathBuf;

pub use figure::Figure;
pub use machine::Machine;
pub use rows::Row;

use bodies::Bodies;
use rig::Rig;

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// How much is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scale {
    /// Under ten minutes on two cores.
    Quick,
    /// With a million waiting and ten million retained.
    Full,
}

/// What the bench is asked for.
#[derive(clap::Args, Clone, Debug)]
pub struct BenchOptions {
    /// Also the rows with a million waiting and ten million retained: about an hour, 20 GB of disk.
    #[arg(long)]
    pub full: bool,
    /// Measure only these rows.
    #[arg(long, value_name = "NAME", value_enum)]
    pub only: Vec<Row>,
    /// Real bodies: one JSON value per line, or {"type": ..., "payload": ...}; without it, bodies of 1 to 30 kB are made up.
    #[arg(long, value_name = "FILE.jsonl")]
    pub payloads: Option<PathBuf>,
    /// Where the chart goes.
    #[arg(long, value_name = "FILE.svg", default_value = "fencepost-bench.svg")]
    pub chart: PathBuf,
    /// Divides every size: for trying the bench itself, never for figures.
    #[arg(long, value_name = "N", default_value_t = 1, hide = true)]
    pub shrink: u32,
}

/// What every row may ask.
pub struct Bench {
    rig: Rig,
    scale: Scale,
    shrink: u32,
    bodies: Bodies,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Setup(#[from] crate::demo::embedded::Error),
    #[error("{}: {what}", path.display())]
    Payloads { path: PathBuf, what: String },
    #[error(transparent)]
    Store(#[from] crate::store::Error),
    #[error("the bench's database")]
    Postgres(#[from] tokio_postgres::Error),
    #[error("an edge of the bench")]
    Edge(#[from] crate::edge::error::EdgeError),
    #[error("the bare AMQP client")]
    Amqp(#[from] lapin::Error),
    #[error("{what}")]
    Io { what: String, source: std::io::Error },
    #[error("a task of the bench")]
    Task(#[from] tokio::task::JoinError),
    /// The product did not do what it promises: no figure is worth anything then.
    #[error("{0}")]
    Untrue(String),
}

impl Error {
    fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}

impl Bench {
    /// A size, as small as was asked for.
    fn size(&self, of: u32) -> u32 {
        (of / self.shrink).max(100)
    }

    /// The size for the scale at hand.
    fn sized(&self, quick: u32, full: u32) -> u32 {
        self.size(match self.scale {
            Scale::Quick => quick,
            Scale::Full => full,
        })
    }
}

/// Measures. `show` is given each figure as soon as it is there.
pub async fn run(options: BenchOptions, mut show: impl FnMut(&Figure)) -> Result<(Machine, Vec<Figure>)> {
    let scale = if options.full { Scale::Full } else { Scale::Quick };
    let rows = if options.only.is_empty() { Row::all(scale) } else { options.only.clone() };
    let bodies = Bodies::load(options.payloads.as_deref())?;
    let bench = Bench { rig: Rig::start().await?, scale, shrink: options.shrink.max(1), bodies };
    let machine = Machine::look(&bench.rig).await?;
    let mut figures = Vec::new();
    for row in rows {
        for figure in row.measure(&bench).await? {
            show(&figure);
            figures.push(figure);
        }
        bench.rig.clear().await?;
    }
    std::fs::write(&options.chart, chart::svg(&machine, &figures))
        .map_err(Error::io(format!("cannot write {}", options.chart.display())))?;
    Ok((machine, figures))
}
