//! Runs a command with private servers beside it: `cargo run --example with_services -- cargo test`.
//!
//! The command finds its database in FENCEPOST_TEST_DATABASE_URL (superuser, its own server, nothing durable) and its
//! broker in FENCEPOST_TEST_AMQP_URL. The servers end with the command, and its exit code is passed on. What is set
//! already is used as it is.

use std::process::ExitCode;

use anyhow::{Context, bail};
use fencepost::demo::embedded::postgres::{Durability, PrivatePostgres};
use fencepost::demo::embedded::rabbitmq::PrivateRabbitmq;

#[tokio::main]
async fn main() -> anyhow::Result<ExitCode> {
    let mut args = std::env::args_os().skip(1);
    let Some(program) = args.next() else { bail!("usage: with_services COMMAND [ARGUMENT...]") };
    let mut command = tokio::process::Command::new(&program);
    command.args(args);
    let mut server = None;
    if std::env::var_os("FENCEPOST_TEST_DATABASE_URL").is_none() {
        let server = server.insert(PrivatePostgres::start(Durability::None).await?);
        command.env("FENCEPOST_TEST_DATABASE_URL", server.url("postgres"));
        command.env("FENCEPOST_PG_BIN", server.bin());
    }
    let mut broker = None;
    if std::env::var_os("FENCEPOST_TEST_AMQP_URL").is_none() {
        let broker = broker.insert(PrivateRabbitmq::start().await?);
        command.env("FENCEPOST_TEST_AMQP_URL", broker.url());
    }
    let mut child = command.spawn().with_context(|| format!("cannot run {}", program.display()))?;
    let status = loop {
        tokio::select! {
            status = child.wait() => break status?,
            // The command got it as well, and ends by itself.
            _ = tokio::signal::ctrl_c() => {}
        }
    };
    drop((server, broker));
    Ok(ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1)))
}
