//! `fencepost grant`: rights for a database role.

use std::fmt;

use clap::ValueEnum;
use serde_json::json;

use super::consent::Consent;
use super::global::Global;
use super::output::plain;
use super::{Exit, Usage};
use crate::store::audit;

#[derive(clap::Args, Debug)]
pub struct Args {
    /// The database role.
    role: String,
    /// What it may do: submit and complete tasks, claim them, read, or deliver.
    #[arg(long = "as", value_enum)]
    right: Right,
    #[command(flatten)]
    consent: Consent,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Right {
    /// Submit tasks, emit and complete.
    Producer,
    /// Claim, heartbeat and complete tasks.
    Worker,
    /// Read the stable views.
    Reader,
    /// Run `fencepost run`.
    Relay,
}

impl fmt::Display for Right {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Producer => "producer",
            Self::Worker => "worker",
            Self::Reader => "reader",
            Self::Relay => "relay",
        })
    }
}

pub async fn run(global: &Global, args: Args) -> anyhow::Result<Exit> {
    let mut client = global.session().await?;
    let right = args.right.to_string();
    if !audit::role_exists(&client, &args.role).await? {
        return Err(Usage(format!("there is no database role {:?}: create role first", args.role)).into());
    }
    let output = global.output();
    let change = json!({ "role": args.role, "as": right });
    output.print(&change, || format!("grant {} the rights of a {right}", plain(&args.role)))?;
    let reason = args.consent.given()?;
    audit::grant(&mut client, &args.role, &right, &reason).await?;
    Ok(Exit::Done)
}
