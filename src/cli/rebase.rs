//! `fencepost rebase`: what a relay does by itself where it can see the need; and the operator's word where it cannot.

use std::time::Duration;

use serde::Serialize;

use super::consent::Consent;
use super::global::Global;
use super::output::plain;
use super::{Exit, Usage};
use crate::store::{history, rebase};

/// How often it is looked whether the transactions that are waited for have ended.
const LOOK_EVERY: Duration = Duration::from_millis(200);

#[derive(clap::Args, Debug)]
pub struct Args {
    /// The database was set back in place (a storage snapshot): epochs go on above any that were given out.
    #[arg(long)]
    new_history: bool,
    #[command(flatten)]
    consent: Consent,
}

#[derive(Serialize)]
struct Preview {
    /// Why positions are not valid here, if so.
    needed: Option<String>,
    /// Deliveries that would be tried, and those that would wait for a person.
    retried: u64,
    in_doubt: u64,
    /// Transactions that would be waited for.
    writers: Vec<String>,
    /// Relays that hold shards.
    holders: Vec<String>,
    epoch_base_rises: bool,
}

pub async fn run(global: &Global, args: Args) -> anyhow::Result<Exit> {
    let mut client = global.session().await?;
    // Looking at every effect takes what it takes.
    client.batch_execute("-- cli::rebase\nset statement_timeout = 0").await?;
    history::of(&client).await?;
    rebase::check_identity(&client).await?;
    let needed = rebase::need(&client).await?;
    let preview = if args.new_history && needed.is_none() {
        Preview {
            needed: None,
            retried: 0,
            in_doubt: 0,
            writers: Vec::new(),
            holders: rebase::holders(&client).await?,
            epoch_base_rises: true,
        }
    } else {
        let (retried, in_doubt) = rebase::unfinished(&client).await?;
        Preview {
            needed: needed.map(|need| need.to_string()),
            retried,
            in_doubt,
            writers: rebase::writers(&client).await?.into_iter().map(|writer| writer.who).collect(),
            holders: rebase::holders(&client).await?,
            epoch_base_rises: args.new_history,
        }
    };
    let anew = needed.is_some() || !args.new_history;
    global.output().print(&preview, || render(&preview, anew))?;
    // Where the need is plain the leases are copies: nobody holds a shard here.
    if needed.is_none() && !preview.holders.is_empty() {
        return Err(Usage(format!("stop the relays first: {}", plain(&preview.holders.join(", ")))).into());
    }
    let reason = args.consent.given()?;
    if args.new_history {
        let base = rebase::new_history(&mut client, &reason).await?;
        eprintln!("epochs go on above {base}");
    }
    if anew {
        while !rebase::lead(&client).await? {
            tokio::time::sleep(LOOK_EVERY).await;
        }
        let floor = rebase::set_floor(&client).await?;
        let before = rebase::writers(&client).await?;
        loop {
            let waiting = rebase::still_writing(&client, &before).await?;
            if waiting.is_empty() {
                break;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        let done = rebase::perform(&mut client, floor, &reason).await?;
        eprintln!(
            "rebased above effect {}: {} deliveries to try, {} in doubt",
            done.floor, done.retried, done.in_doubt
        );
    }
    Ok(Exit::Done)
}

fn render(preview: &Preview, anew: bool) -> String {
    let mut text = String::new();
    if let Some(why) = &preview.needed {
        text.push_str(&format!("needed: {why}\n"));
    }
    if anew {
        if preview.needed.is_none() {
            text.push_str("not needed: the positions of this log are valid on this server\n");
        }
        text.push_str(&format!(
            "reading starts anew; {} unfinished deliveries would be tried, {} would be in doubt\n",
            preview.retried, preview.in_doubt
        ));
        if !preview.writers.is_empty() {
            text.push_str(&format!("waits for these transactions to end: {}\n", plain(&preview.writers.join(", "))));
        }
    }
    if preview.epoch_base_rises {
        text.push_str("epochs go on 1048576 above the highest that can have been given out\n");
    }
    text
}
