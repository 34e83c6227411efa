//! The command line: one file per command, each of which reads its arguments, calls `store` (or starts the relay) and
//! prints. No SQL and no delivery logic lives here. Exit codes: 0 done, 1 failed or found something, 2 usage or
//! configuration.

mod acks;
mod alarms;
mod amqp;
mod audit;
mod bench;
mod check;
mod consent;
mod consumers;
mod deliveries;
mod demo;
mod global;
mod grant;
mod health;
pub mod logging;
mod migrate;
mod output;
mod rebase;
mod rotate;
mod run;
mod secret;
mod status;
mod story;
mod wait;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use global::Global;

/// A transactional-outbox relay beside PostgreSQL.
#[derive(Parser, Debug)]
#[command(name = "fencepost", version, propagate_version = true)]
#[command(after_help = "Exit codes: 0 done, 1 failed or found something, 2 usage or configuration.\n\
    What changes state shows what it would do, and does it with --yes --reason TEXT.")]
pub struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// The main job on a private PostgreSQL: consumers, tasks, crashes, and a report.
    Demo(crate::demo::DemoOptions),
    /// Measure the product beside its ceilings, on a private PostgreSQL and RabbitMQ.
    Bench(crate::bench::BenchOptions),
    /// Create or upgrade the schema; any number may run at once.
    Migrate(migrate::Args),
    /// Check configuration and connectivity and name every fault at once.
    Check(check::Args),
    /// Let a database role use fencepost.
    Grant(grant::Args),
    /// The consumers in the database: list, apply the file, pause, resume, rotate, retire.
    #[command(subcommand)]
    Consumers(consumers::Command),
    /// Edges, what waits, alarms, relays, workers and shards; exit code 1 when something needs a person.
    Status(status::Args),
    /// The whole story of one task, and why what it meant is not delivered yet; re-opens or cancels it.
    Task(story::TaskArgs),
    /// The whole story of one effect, and why it is not delivered yet.
    Effect(story::EffectArgs),
    /// Deliveries: list, tail, retry, resolve, skip, replay.
    #[command(subcommand)]
    Deliveries(deliveries::Command),
    /// Alarms: list, resolve.
    #[command(subcommand)]
    Alarms(alarms::Command),
    /// Brokers: check what exists, declare the reply queues.
    #[command(subcommand)]
    Amqp(amqp::Command),
    /// Consumers' replies over AMQP.
    #[command(subcommand)]
    Acks(acks::Command),
    /// Prove that every committed effect has ended or waits with a reason, and no attempt is without a token; exit code 1
    /// names each hole.
    Audit(audit::Args),
    /// Wait until nothing waits any more: for tests and deployments.
    Wait(wait::Args),
    /// Run the relay until SIGTERM or SIGINT.
    Run(run::Args),
    /// Ask the relay here whether it is ready: for the health check of a container.
    Health(health::Args),
    /// Read the log anew where its positions are another server's; said by hand where nothing shows it.
    Rebase(rebase::Args),
    /// Signing secrets.
    #[command(subcommand)]
    Secret(secret::Command),
}

/// How a command ended that did not fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Exit {
    Done,
    /// It worked and found something that needs a person.
    Found,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        match exit {
            Exit::Done => Self::SUCCESS,
            Exit::Found => Self::FAILURE,
        }
    }
}

/// The command was not used as it must be: exit code 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Usage(pub String);

/// The exit code of a failure: 2 for usage and configuration, else 1.
pub fn exit_code_of(error: &anyhow::Error) -> ExitCode {
    if error.is::<Usage>() || error.is::<crate::config::Faults>() {
        return ExitCode::from(2);
    }
    error.downcast_ref::<crate::demo::Error>().map_or(ExitCode::FAILURE, |error| ExitCode::from(error.exit_code()))
}

impl Cli {
    /// Reads the command line; help and usage errors end the process.
    pub fn read() -> Self {
        let matches = Self::command().get_matches();
        let mut cli = Self::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
        cli.global.note_sources(&matches);
        cli
    }

    /// Does what was asked.
    pub async fn run(self) -> anyhow::Result<Exit> {
        let global = self.global;
        match self.command {
            Command::Demo(options) => demo::run(&global, options).await,
            Command::Bench(options) => bench::run(&global, options).await,
            Command::Migrate(args) => migrate::run(&global, args).await,
            Command::Check(args) => check::run(&global, args).await,
            Command::Grant(args) => grant::run(&global, args).await,
            Command::Consumers(command) => consumers::run(&global, command).await,
            Command::Status(args) => status::run(&global, args).await,
            Command::Task(args) => story::task(&global, args).await,
            Command::Effect(args) => story::effect(&global, args).await,
            Command::Deliveries(command) => deliveries::run(&global, command).await,
            Command::Alarms(command) => alarms::run(&global, command).await,
            Command::Amqp(command) => amqp::run(&global, command).await,
            Command::Acks(command) => acks::run(&global, command).await,
            Command::Audit(args) => audit::run(&global, args).await,
            Command::Wait(args) => wait::run(&global, args).await,
            Command::Run(args) => run::run(&global, args).await,
            Command::Health(args) => health::run(&global, args).await,
            Command::Rebase(args) => rebase::run(&global, args).await,
            Command::Secret(command) => secret::run(&global, command),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commands_are_well_formed() {
        Cli::command().debug_assert();
    }
}
