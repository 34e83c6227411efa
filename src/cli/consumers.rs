//! `fencepost consumers`: what is declared, applying the file, and the state all relays share.

use serde::Serialize;
use serde_json::Value;

use super::consent::Consent;
use super::global::{self, Global};
use super::output::{Output, Table, or_dash, plain};
use super::{Exit, Usage, logging, rotate};
use crate::config::{Config, LogFormat};
use crate::model::consumer::{Consumer, ConsumerEntry, Kind};
use crate::model::key::ConsumerId;
use crate::store::consumers::{self, Applied, Change, StateChange, Stored};

#[derive(clap::Subcommand, Debug)]
pub enum Command {
    /// The consumers in the database.
    List,
    /// Add and change consumers as the file says; removes nothing.
    Apply(Apply),
    /// Stop attempts within a second; deliveries are kept.
    Pause(Names),
    /// Let attempts go on, at once; brings a retired consumer back.
    Resume(Names),
    /// Take no new effects; what waits is kept and still delivered.
    Retire(Names),
    /// Write a new signing secret; the present one stays valid as the previous one.
    Rotate(rotate::Args),
}

#[derive(clap::Args, Debug)]
pub struct Apply {
    /// Only show what would change.
    #[arg(long, conflicts_with = "yes")]
    dry_run: bool,
    #[command(flatten)]
    consent: Consent,
}

#[derive(clap::Args, Debug)]
pub struct Names {
    #[arg(required_unless_present = "all")]
    names: Vec<String>,
    /// Every consumer.
    #[arg(long, conflicts_with = "names")]
    all: bool,
    #[command(flatten)]
    consent: Consent,
}

pub async fn run(global: &Global, command: Command) -> anyhow::Result<Exit> {
    match command {
        Command::List => list(global).await,
        Command::Apply(args) => apply(global, args).await,
        Command::Pause(names) => change(global, StateChange::Pause, names).await,
        Command::Resume(names) => change(global, StateChange::Resume, names).await,
        Command::Rotate(args) => rotate::run(global, args).await,
        Command::Retire(names) => change(global, StateChange::Retire, names).await,
    }
}

#[derive(Serialize)]
struct Listed {
    name: String,
    kind: Option<Kind>,
    state: &'static str,
    reason: Option<String>,
    destination: String,
    contract: String,
    topics: Vec<String>,
}

impl Listed {
    fn new(stored: &Stored) -> Self {
        let entry = stored.entry().ok();
        Self {
            name: stored.name.clone(),
            kind: entry.as_ref().map(|entry| entry.kind),
            state: match (stored.retired, stored.paused) {
                (true, _) => "retired",
                (false, true) => "paused",
                (false, false) => "active",
            },
            reason: stored.paused_reason.clone(),
            destination: entry.as_ref().map(destination).unwrap_or_default(),
            contract: contract(entry.as_ref()),
            topics: entry.map(|entry| entry.topics).unwrap_or_default(),
        }
    }
}

/// Where an entry points to, without what may be secret in it.
fn destination(entry: &ConsumerEntry) -> String {
    match (&entry.url, entry.kind) {
        (Some(url), _) => without_secrets(url),
        (None, _) => {
            format!("{}/{}", entry.exchange.as_deref().unwrap_or(""), entry.routing_key.as_deref().unwrap_or(""))
        }
    }
}

fn without_secrets(url: &str) -> String {
    let Ok(mut url) = url::Url::parse(url) else { return "?".into() };
    // A URL that cannot have them needs no removal.
    let _ = url.set_username("");
    let _ = url.set_password(None);
    if url.query().is_some() {
        url.set_query(Some("..."));
    }
    url.set_fragment(None);
    url.to_string()
}

/// What the edge can enforce, in one line.
pub(super) fn contract(entry: Option<&ConsumerEntry>) -> String {
    match entry.and_then(|entry| entry.check(ConsumerId(0)).ok()) {
        None => "?".into(),
        Some(Consumer { contract, .. }) => format!(
            "ack={} ambiguous={} ordering={}",
            word(contract.ack),
            word(contract.on_ambiguous),
            word(contract.ordering)
        ),
    }
}

/// The kind of an edge as text.
pub(super) fn kind(entry: &ConsumerEntry) -> String {
    word(entry.kind)
}

/// The word an enum is written with in the configuration.
fn word(value: impl Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|value| value.as_str().map(Into::into)).unwrap_or_default()
}

async fn list(global: &Global) -> anyhow::Result<Exit> {
    let client = global.session().await?;
    let listed: Vec<Listed> = consumers::load(&client).await?.iter().map(Listed::new).collect();
    global.output().print(&listed, || {
        let mut table = Table::new(&["name", "kind", "state", "contract", "destination", "topics"]);
        for c in &listed {
            let state = c.reason.as_ref().map_or_else(|| c.state.into(), |reason| format!("{}: {reason}", c.state));
            let kind = or_dash(c.kind.map(word));
            table.row([c.name.clone(), kind, state, c.contract.clone(), c.destination.clone(), c.topics.join(" ")]);
        }
        table.render("no consumers: write [[consumers]] and run `fencepost consumers apply`")
    })?;
    Ok(Exit::Done)
}

async fn apply(global: &Global, args: Apply) -> anyhow::Result<Exit> {
    logging::init(LogFormat::Text, "warn");
    let config = global.config()?;
    let mut client = global::open(&global.database_of(&config)?).await?;
    let preview = consumers::preview(&client, config.revision, &config.consumers).await?;
    show(global.output(), &config, &preview)?;
    if let Applied::Older { .. } = preview {
        return Ok(Exit::Found);
    }
    if args.dry_run {
        return Ok(Exit::Done);
    }
    let reason = args.consent.given()?;
    match consumers::apply(&mut client, config.revision, &config.consumers, &reason).await? {
        Applied::Older { .. } => Ok(Exit::Found),
        Applied::Changes { .. } => Ok(Exit::Done),
    }
}

fn show(output: Output, config: &Config, applied: &Applied) -> anyhow::Result<()> {
    output.print(applied, || match applied {
        Applied::Older { revision, stored } => format!(
            "{}: revision {revision} is older than {stored}, the one last applied; nothing to do until it is raised",
            config.place()
        ),
        Applied::Changes { revision, changes } => {
            let mut text = format!("{} (revision {revision})\n", config.place());
            changes.iter().for_each(|change| text.push_str(&describe(change)));
            if changes.is_empty() {
                text.push_str("  no consumers in the file\n");
            }
            text
        }
    })?;
    Ok(())
}

fn describe(change: &Change) -> String {
    match change {
        Change::Add { name } => format!("  add      {}\n", plain(name)),
        Change::Same { name } => format!("  same     {}\n", plain(name)),
        Change::Retired { name } => {
            format!("  retired  {} (left alone; `fencepost consumers resume` brings it back)\n", plain(name))
        }
        Change::Absent { name } => {
            format!("  absent   {} (not in the file; left alone, `fencepost consumers retire` ends it)\n", plain(name))
        }
        Change::Alter { name, keys } => {
            let mut text = format!("  change   {}\n", plain(name));
            for key in keys {
                let show = |value: &Value| match (key.key.as_str(), value) {
                    (_, Value::Null) => "(default)".into(),
                    ("url", Value::String(url)) => without_secrets(url),
                    (_, value) => value.to_string(),
                };
                let line = format!("{}: {} -> {}", key.key, show(&key.before), show(&key.after));
                text.push_str(&format!("             {}\n", plain(&line)));
            }
            text
        }
    }
}

#[derive(Serialize)]
struct Preview<'a> {
    action: &'static str,
    consumers: &'a [String],
}

async fn change(global: &Global, change: StateChange, args: Names) -> anyhow::Result<Exit> {
    let mut client = global.session().await?;
    let stored = consumers::load(&client).await?;
    if let Some(unknown) = args.names.iter().find(|name| stored.iter().all(|s| s.name != **name)) {
        return Err(Usage(format!("there is no consumer {unknown:?}: `fencepost consumers list`")).into());
    }
    let wanted =
        |s: &&Stored| args.names.contains(&s.name) || (args.all && (!s.retired || change == StateChange::Retire));
    let names: Vec<String> =
        stored.iter().filter(wanted).filter(|s| change.applies_to(s)).map(|s| s.name.clone()).collect();
    let output = global.output();
    output.print(&Preview { action: change.verb(), consumers: &names }, || match names.as_slice() {
        [] => format!("nothing to {}", change.verb()),
        names => names.iter().map(|name| format!("{} {}\n", change.verb(), plain(name))).collect(),
    })?;
    if names.is_empty() {
        return Ok(Exit::Done);
    }
    let reason = args.consent.given()?;
    consumers::change_state(&mut client, change, &names, &reason).await?;
    Ok(Exit::Done)
}
