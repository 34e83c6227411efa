//! `fencepost deliveries`: what waits and what has ended, and what an operator does about it.

mod change;
mod list;
mod tail;

use anyhow::bail;
use tokio_postgres::Client;

use super::global::Global;
use super::{Exit, Usage};
use crate::model::key::{ConsumerId, EffectId, EffectKey};
use crate::store::consumers;
use crate::store::inspect::deliveries::{self, Filter};
use crate::store::interventions::{Intervention, Resolution};

#[derive(clap::Subcommand, Debug)]
pub enum Command {
    /// Deliveries that wait, oldest first; with a terminal --token those that ended with it, newest first.
    List(list::Args),
    /// Follow what is settled and what fails.
    Tail(tail::Args),
    /// Attempt now, or when a floor the consumer asked for is over, with the same key and a fresh budget.
    Retry(change::Args),
    /// Say what became of it: the operator's word, never the consumer's.
    Resolve(Resolve),
    /// Give it up and release its key.
    Skip(change::Args),
    /// Send a delivery that has ended again, same key and bytes.
    Replay(change::Args),
}

#[derive(clap::Args, Debug)]
pub struct Resolve {
    #[arg(long = "as", value_enum)]
    word: Word,
    #[command(flatten)]
    change: change::Args,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Word {
    Applied,
    NotApplied,
}

impl From<Word> for Resolution {
    fn from(word: Word) -> Self {
        match word {
            Word::Applied => Self::Applied,
            Word::NotApplied => Self::NotApplied,
        }
    }
}

/// Which deliveries.
#[derive(clap::Args, Debug)]
pub struct Selection {
    /// Idempotency keys.
    #[arg(value_name = "KEY")]
    keys: Vec<EffectKey>,
    /// Only those to this consumer.
    #[arg(long, value_name = "NAME")]
    consumer: Option<String>,
    /// Only those with this token; may be given several times.
    #[arg(long = "token", value_name = "TOKEN")]
    tokens: Vec<String>,
    /// At most so many.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    limit: u16,
}

pub async fn run(global: &Global, command: Command) -> anyhow::Result<Exit> {
    match command {
        Command::List(args) => list::run(global, args).await,
        Command::Tail(args) => tail::run(global, args).await,
        Command::Retry(args) => change::run(global, Intervention::Retry, args).await,
        Command::Resolve(args) => change::run(global, Intervention::Resolve(args.word.into()), args.change).await,
        Command::Skip(args) => change::run(global, Intervention::Skip, args).await,
        Command::Replay(args) => change::run(global, Intervention::Replay, args).await,
    }
}

impl Selection {
    /// The filter, with names and keys looked up; one that is not known ends the command.
    async fn filter(&self, client: &Client) -> anyhow::Result<Filter> {
        let consumer = match &self.consumer {
            Some(name) => Some(consumer_id(client, name).await?),
            None => None,
        };
        let mut effects = Vec::new();
        for key in &self.keys {
            effects.push(effect_id(client, key).await?);
        }
        Ok(Filter { effects: (!effects.is_empty()).then_some(effects), consumer })
    }

    fn names_something(&self) -> bool {
        !self.keys.is_empty() || self.consumer.is_some() || !self.tokens.is_empty()
    }
}

pub(super) async fn consumer_id(client: &Client, name: &str) -> anyhow::Result<ConsumerId> {
    let stored = consumers::load(client).await?;
    match stored.iter().find(|consumer| consumer.name == name) {
        Some(consumer) => Ok(consumer.id),
        None => Err(Usage(format!("there is no consumer {name:?}: `fencepost consumers list`")).into()),
    }
}

pub(super) async fn effect_id(client: &Client, key: &EffectKey) -> anyhow::Result<EffectId> {
    match deliveries::effect_id(client, key).await? {
        Some(id) => Ok(id),
        None => bail!("no effect has the key {key}"),
    }
}
