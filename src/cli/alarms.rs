//! `fencepost alarms`: what was raised, and taking note of it.

use serde::Serialize;

use super::Exit;
use super::consent::Consent;
use super::global::Global;
use super::output::{Table, plain};
use crate::store::inspect::status::{self as inspect, Alarm};
use crate::store::interventions;

#[derive(clap::Subcommand, Debug)]
pub enum Command {
    /// Alarms that nobody has resolved.
    List,
    /// Take note of an alarm whose cause was dealt with; it is raised again if it comes back.
    Resolve(Resolve),
}

#[derive(clap::Args, Debug)]
pub struct Resolve {
    /// The alarm's name, as listed.
    name: String,
    /// Only about this object.
    object: Option<String>,
    #[command(flatten)]
    consent: Consent,
}

#[derive(Serialize)]
struct Preview<'a> {
    action: &'static str,
    alarms: Vec<&'a Alarm>,
}

pub async fn run(global: &Global, command: Command) -> anyhow::Result<Exit> {
    let mut client = global.session().await?;
    let alarms = inspect::alarms(&client).await?;
    let Command::Resolve(args) = command else {
        global.output().print(&alarms, || table(&alarms).render("no alarms"))?;
        return Ok(Exit::Done);
    };
    let chosen = |a: &&Alarm| a.name == args.name && args.object.as_ref().is_none_or(|object| *object == a.object);
    let preview = Preview { action: "resolve", alarms: alarms.iter().filter(chosen).collect() };
    global.output().print(&preview, || match preview.alarms.as_slice() {
        [] => format!("no alarm is called {:?}: `fencepost alarms list`", args.name),
        alarms => alarms.iter().map(|a| format!("resolve {}\n", plain(&format!("{} {}", a.name, a.object)))).collect(),
    })?;
    if preview.alarms.is_empty() {
        return Ok(Exit::Found);
    }
    let reason = args.consent.given()?;
    interventions::acknowledge(&mut client, &args.name, args.object.as_deref(), &reason).await?;
    Ok(Exit::Done)
}

pub(super) fn table(alarms: &[Alarm]) -> Table {
    let mut table = Table::new(&["alarm", "object", "count", "last", "detail"]);
    for a in alarms {
        table.row([a.name.clone(), a.object.clone(), a.count.to_string(), a.last_at.clone(), a.detail.clone()]);
    }
    table
}
