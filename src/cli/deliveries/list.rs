//! `fencepost deliveries list`.

use super::Selection;
use crate::cli::global::Global;
use crate::cli::output::{Table, or_dash, span};
use crate::cli::{Exit, Usage};
use crate::model::token::{Fact, Waiting};
use crate::store::inspect::deliveries::{self, Delivery};

#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    selection: Selection,
}

/// The tokens asked for: all waiting, or all terminal.
pub(super) enum Tokens {
    Waiting(Vec<Waiting>),
    Settled(Vec<Fact>),
}

impl Tokens {
    /// Reads them; none at all means everything that waits.
    pub(super) fn read(texts: &[String]) -> Result<Self, Usage> {
        let waiting: Vec<Waiting> = texts.iter().filter_map(|text| text.parse().ok()).collect();
        if waiting.len() == texts.len() {
            return Ok(Self::Waiting(if texts.is_empty() { Waiting::ALL.to_vec() } else { waiting }));
        }
        let settled: Vec<Fact> = texts.iter().filter_map(|text| text.parse().ok()).collect();
        if settled.len() == texts.len() {
            return Ok(Self::Settled(settled));
        }
        let names = |all: &[&'static str]| all.join(", ");
        Err(Usage(format!(
            "--token: waiting tokens are {}; terminal ones are {}; one kind at a time",
            names(&Waiting::ALL.iter().map(|token| token.as_str()).collect::<Vec<_>>()),
            names(&Fact::ALL.iter().map(|token| token.as_str()).collect::<Vec<_>>()),
        )))
    }
}

pub async fn run(global: &Global, args: Args) -> anyhow::Result<Exit> {
    let tokens = Tokens::read(&args.selection.tokens)?;
    let client = global.session().await?;
    let filter = args.selection.filter(&client).await?;
    let limit = i64::from(args.selection.limit);
    let found = match &tokens {
        Tokens::Waiting(tokens) => deliveries::waiting(&client, &filter, tokens, limit).await?,
        Tokens::Settled(tokens) => deliveries::settled(&client, &filter, tokens, limit).await?,
    };
    global.output().print(&found, || {
        let mut text = table(&found).render("none");
        if found.len() == usize::from(args.selection.limit) {
            text.push_str(&format!("these are the first {limit}; --limit shows more\n"));
        }
        text
    })?;
    Ok(Exit::Done)
}

pub(super) fn table(deliveries: &[Delivery]) -> Table {
    let mut table = Table::new(&["key", "consumer", "token", "attempts", "next", "since", "reason"]);
    for d in deliveries {
        let next = match d.next_attempt_seconds {
            None => "-".into(),
            Some(seconds) if seconds <= 0.0 => "due".into(),
            Some(seconds) => format!("in {}", span(seconds)),
        };
        let token = if d.replay { format!("{} (replay)", d.token) } else { d.token.clone() };
        table.row([
            or_dash(d.key.clone()),
            d.consumer.clone(),
            token,
            d.attempts.to_string(),
            next,
            span(d.age_seconds),
            or_dash(d.reason.clone()),
        ]);
    }
    table
}
