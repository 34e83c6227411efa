//! `fencepost consumers rotate`: a new signing secret; the present one stays valid as the previous one.

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use secrecy::ExposeSecret;
use serde_json::json;

use super::consent::Consent;
use super::global::Global;
use super::{Exit, Usage};
use crate::edge::sign::Secret;
use crate::store::audit;
use crate::store::consumers::{self, Stored};

#[derive(clap::Args, Debug)]
pub struct Args {
    /// The consumer whose secret is rotated; its secret_file and previous_secret_file must be writable here.
    name: String,
    #[command(flatten)]
    consent: Consent,
}

pub async fn run(global: &Global, args: Args) -> anyhow::Result<Exit> {
    let mut client = global.session().await?;
    let stored = consumers::load(&client).await?;
    let consumer = stored
        .iter()
        .find(|stored| stored.name == args.name)
        .ok_or_else(|| Usage(format!("no consumer {:?}; `fencepost consumers list` names them", args.name)))?;
    let files = Files::of(consumer)?;
    let present =
        std::fs::read_to_string(&files.secret).with_context(|| format!("cannot read {}", files.secret.display()))?;
    Secret::parse(present.trim()).with_context(|| format!("{} holds no secret", files.secret.display()))?;

    let preview = json!({ "consumer": args.name, "secret_file": files.secret, "previous_secret_file": files.previous });
    global.output().print(&preview, || {
        format!(
            "{}: {} moves to {}, and a new secret is written in its place; attempts carry both signatures from the next second on.\n\
             Give the new secret to the consumer; the previous one stays until the next rotation.",
            args.name,
            files.secret.display(),
            files.previous.display()
        )
    })?;
    let reason = args.consent.given()?;

    let tx = client.transaction().await.map_err(crate::store::Error::from)?;
    audit::record(&tx, "consumers rotate", &args.name, &reason, &preview).await?;
    // The audit entry commits last: a rotation that failed halfway leaves the present secret in at least one file.
    replace(&files.previous, present.trim())?;
    replace(&files.secret, Secret::generate().printed().expose_secret())?;
    tx.commit().await.map_err(crate::store::Error::from)?;
    Ok(Exit::Done)
}

struct Files {
    secret: PathBuf,
    previous: PathBuf,
}

impl Files {
    fn of(consumer: &Stored) -> anyhow::Result<Self> {
        let entry = consumer.entry()?;
        match (entry.secret_file, entry.previous_secret_file) {
            (Some(secret), Some(previous)) => Ok(Self { secret, previous }),
            (None, _) => Err(Usage(format!(
                "consumer {:?} has no secret_file: a secret from the environment is rotated where it is set, with both secret_env and previous_secret_env",
                consumer.name
            ))
            .into()),
            (Some(_), None) => Err(Usage(format!(
                "consumer {:?} has no previous_secret_file: write one in [[consumers]] and run `fencepost consumers apply`",
                consumer.name
            ))
            .into()),
        }
    }
}

/// Writes beside the file and renames: a relay that reads meanwhile sees the old text or the new, never half of one.
fn replace(file: &Path, text: &str) -> anyhow::Result<()> {
    let beside = file.with_extension("new");
    let written = || -> std::io::Result<()> {
        let mut out = std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&beside)?;
        writeln!(out, "{text}")?;
        out.sync_all()?;
        std::fs::rename(&beside, file)
    };
    written().with_context(|| format!("cannot write {}", file.display()))
}
