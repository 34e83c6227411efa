//! `fencepost deliveries retry|resolve|skip|replay`: shown first, with what a duplicate would mean there.

use std::collections::BTreeMap;

use serde::Serialize;
use tokio_postgres::Client;

use super::Selection;
use super::list::{Tokens, table};
use crate::cli::consent::Consent;
use crate::cli::consumers::contract;
use crate::cli::global::Global;
use crate::cli::output::plain;
use crate::cli::{Exit, Usage};
use crate::model::consumer::{AckMode, ConsumerEntry, OnAmbiguous};
use crate::model::token::{Fact, Waiting};
use crate::store::consumers;
use crate::store::inspect::deliveries::{self, Delivery};
use crate::store::interventions::{self, Intervention};

#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    selection: Selection,
    #[command(flatten)]
    consent: Consent,
}

#[derive(Serialize)]
struct Preview {
    action: &'static str,
    /// Which deliveries it is for.
    takes: String,
    deliveries: Vec<Delivery>,
    /// There are more than the limit lets through.
    more: bool,
    edges: Vec<Edge>,
}

/// What the operator must know about an edge before something is sent there again.
#[derive(Serialize)]
struct Edge {
    consumer: String,
    contract: String,
    duplicate: &'static str,
}

pub async fn run(global: &Global, what: Intervention, args: Args) -> anyhow::Result<Exit> {
    if !args.selection.names_something() {
        return Err(Usage("name deliveries by KEY, --consumer or --token".into()).into());
    }
    let mut client = global.session().await?;
    let (tokens, preview) = preview(&client, what, &args.selection).await?;
    let output = global.output();
    output.print(&preview, || render(&preview))?;
    if preview.deliveries.is_empty() {
        return Ok(Exit::Found);
    }
    let reason = args.consent.given()?;
    let ids: Vec<_> = preview.deliveries.iter().map(|delivery| delivery.id).collect();
    let done = interventions::perform(&mut client, what, &ids, &tokens, &reason).await?;
    if done.len() < ids.len() {
        // Said on stderr, so that --json stays one document.
        eprintln!("{} of {} changed: the others were no longer as shown, or have expired", done.len(), ids.len());
        return Ok(Exit::Found);
    }
    Ok(Exit::Done)
}

async fn preview(
    client: &Client,
    what: Intervention,
    selection: &Selection,
) -> anyhow::Result<(Vec<Waiting>, Preview)> {
    let filter = selection.filter(client).await?;
    let limit = i64::from(selection.limit);
    let asked = Tokens::read(&selection.tokens)?;
    let (tokens, mut deliveries) = match (what, asked) {
        (Intervention::Replay, Tokens::Settled(facts)) => {
            let facts: Vec<Fact> = facts.into_iter().filter(may_be_sent_again).collect();
            if facts.is_empty() {
                return Err(Usage("what has expired, or was routed to nobody, is never sent".into()).into());
            }
            (Vec::new(), deliveries::settled(client, &filter, &facts, limit + 1).await?)
        }
        (Intervention::Replay, Tokens::Waiting(_)) if selection.tokens.is_empty() => {
            let facts: Vec<Fact> = Fact::ALL.iter().copied().filter(may_be_sent_again).collect();
            (Vec::new(), deliveries::settled(client, &filter, &facts, limit + 1).await?)
        }
        (Intervention::Replay, Tokens::Waiting(_)) => {
            return Err(Usage("replay is for deliveries that have ended: give a terminal --token".into()).into());
        }
        (_, Tokens::Settled(_)) => {
            return Err(Usage(format!("{} is for deliveries that wait: give a waiting --token", what.verb())).into());
        }
        (_, Tokens::Waiting(asked)) => {
            let tokens: Vec<Waiting> = asked.into_iter().filter(|token| what.applies_to().contains(token)).collect();
            if tokens.is_empty() {
                let fit: Vec<&str> = what.applies_to().iter().map(|token| token.as_str()).collect();
                return Err(Usage(format!("{} is for {}", what.verb(), fit.join(", "))).into());
            }
            let found = deliveries::waiting(client, &filter, &tokens, limit + 1).await?;
            (tokens, found)
        }
    };
    let more = deliveries.len() > usize::from(selection.limit);
    deliveries.truncate(usize::from(selection.limit));
    let edges = edges(client, &deliveries).await?;
    Ok((tokens, Preview { action: what.verb(), takes: takes(what), deliveries, more, edges }))
}

fn may_be_sent_again(fact: &Fact) -> bool {
    !matches!(fact, Fact::Unrouted | Fact::Expired)
}

/// What an intervention takes, for whoever named something else.
fn takes(what: Intervention) -> String {
    match what {
        Intervention::Replay => "deliveries that have ended, unless they expired or were routed to nobody".into(),
        _ => {
            let tokens: Vec<&str> = what.applies_to().iter().map(|token| token.as_str()).collect();
            format!("deliveries that are {}", tokens.join(", "))
        }
    }
}

async fn edges(client: &Client, deliveries: &[Delivery]) -> anyhow::Result<Vec<Edge>> {
    let stored = consumers::load(client).await?;
    let entries: BTreeMap<&str, Option<ConsumerEntry>> =
        stored.iter().map(|consumer| (consumer.name.as_str(), consumer.entry().ok())).collect();
    let names: std::collections::BTreeSet<&str> =
        deliveries.iter().map(|delivery| delivery.consumer.as_str()).collect();
    Ok(names
        .into_iter()
        .map(|name| {
            let entry = entries.get(name).and_then(Option::as_ref);
            Edge { consumer: name.into(), contract: contract(entry), duplicate: duplicate(entry) }
        })
        .collect())
}

/// Whether a duplicate would be absorbed there, as far as its declaration tells.
fn duplicate(entry: Option<&ConsumerEntry>) -> &'static str {
    let Some(entry) = entry else { return "unknown: the consumer's declaration cannot be read" };
    if entry.on_ambiguous == Some(OnAmbiguous::Hold) {
        return "must be feared: this consumer is declared as one where a duplicate costs (on_ambiguous = hold)";
    }
    match entry.ack.unwrap_or(AckMode::Optional) {
        AckMode::Required => "would be absorbed if this consumer dedups, as one that answers for every key should",
        AckMode::Optional => "would be absorbed only if this consumer dedups: it may answer for a key, and need not",
        AckMode::None => "would NOT be absorbed as far as is known: this consumer never answers for a key",
    }
}

fn render(preview: &Preview) -> String {
    if preview.deliveries.is_empty() {
        return format!("nothing to {}: it takes {}", preview.action, preview.takes);
    }
    let mut text = format!("{}:\n{}", preview.action, table(&preview.deliveries).render(""));
    if preview.more {
        text.push_str("there are more: --limit\n");
    }
    for edge in &preview.edges {
        let line = format!("{}: {}; a duplicate {}", edge.consumer, edge.contract, edge.duplicate);
        text.push_str(&format!("{}\n", plain(&line)));
    }
    text
}
