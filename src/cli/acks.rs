//! `fencepost acks orphans`: replies over AMQP that matched no delivery.

use super::Exit;
use super::global::Global;
use super::output::{Table, or_dash};
use crate::store::replies;

#[derive(clap::Subcommand, Debug)]
pub enum Command {
    /// The newest replies that matched nothing, and why; exit code 1 when there are any.
    Orphans {
        /// At most so many.
        #[arg(long, default_value_t = 50)]
        limit: u32,
    },
}

pub async fn run(global: &Global, command: Command) -> anyhow::Result<Exit> {
    let Command::Orphans { limit } = command;
    let client = global.session().await?;
    let orphans = replies::orphans(&client, limit).await?;
    global.output().print(&orphans, || {
        let mut table = Table::new(&["at", "shard", "correlation", "why", "headers"]);
        for orphan in &orphans {
            table.row([
                orphan.at.clone(),
                or_dash(orphan.shard),
                or_dash(orphan.correlation_id.as_ref()),
                orphan.why.clone(),
                orphan.properties.to_string(),
            ]);
        }
        table.render("every reply matched a delivery")
    })?;
    Ok(if orphans.is_empty() { Exit::Done } else { Exit::Found })
}
