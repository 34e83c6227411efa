//! `fencepost secret new`: a signing secret in the form Standard Webhooks prescribes.

use secrecy::ExposeSecret;
use serde_json::json;

use super::Exit;
use super::global::Global;
use crate::edge::sign::Secret;

#[derive(clap::Subcommand, Debug)]
pub enum Command {
    /// Print a new secret; put it in a file that only the relay and the consumer can read.
    New,
}

pub fn run(global: &Global, command: Command) -> anyhow::Result<Exit> {
    let Command::New = command;
    let secret = Secret::generate().printed();
    global.output().print(&json!({ "secret": secret.expose_secret() }), || secret.expose_secret().to_string())?;
    Ok(Exit::Done)
}
