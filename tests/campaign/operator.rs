//! The operator: looks at what is in doubt and dead, asks the consumer, and says so through the CLI.

use std::collections::BTreeMap;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use anyhow::bail;
use serde_json::json;
use tokio_postgres::Client;
use tokio_util::sync::CancellationToken;

use crate::stage::Stage;

/// At most so many deliveries in one command.
const AT_ONCE: usize = 50;
const LIMIT: Duration = Duration::from_secs(60);

/// `fencepost ARGS --yes --reason campaign`, past every proxy.
pub async fn command(stage: &Stage, args: &[&str]) -> anyhow::Result<()> {
    let output = tokio::process::Command::new(stage.history.program())
        .args(args)
        .args(["--yes", "--reason", "campaign"])
        .env("DATABASE_URL", &stage.url)
        .env("FENCEPOST_CONFIG", &stage.config)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(LIMIT, output).await??;
    let code = output.status.code();
    stage.history.note("operator", json!({ "args": args, "code": code }));
    // 1: what was shown had changed meanwhile.
    match code {
        Some(0 | 1) => Ok(()),
        _ => bail!("{args:?}: {}", String::from_utf8_lossy(&output.stderr)),
    }
}

/// What an operator does about what the consumer has not applied.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Temper {
    /// Most is tried again.
    Patient,
    /// What is in doubt is given up.
    Final,
}

/// Looks again and again until `stop`.
pub async fn watch(stage: Arc<Stage>, stop: CancellationToken) {
    while !stop.is_cancelled() {
        let looked = async {
            end_prepared(&stage).await?;
            decide(&stage, Temper::Patient).await
        };
        if let Err(error) = looked.await {
            stage.history.note("operator failed", json!(format!("{error:#}")));
        }
        tokio::select! {
            () = stop.cancelled() => {}
            () = tokio::time::sleep(Duration::from_millis(1_500)) => {}
        }
    }
}

/// Transactions whose producer lost sight of them: they hold locks.
async fn end_prepared(stage: &Stage) -> anyhow::Result<()> {
    let client = stage.connect().await?;
    let sql = "select gid from pg_prepared_xacts where prepared < clock_timestamp() - interval '5 s'";
    for row in client.query(sql, &[]).await? {
        let name: String = row.get(0);
        let end = if name.len().is_multiple_of(2) { "commit" } else { "rollback" };
        client.batch_execute(&format!("{end} prepared '{name}'")).await?;
    }
    Ok(())
}

/// One look: what the consumer applied is resolved as applied; the rest is tried again or given up.
pub async fn decide(stage: &Stage, temper: Temper) -> anyhow::Result<()> {
    let client = stage.connect().await?;
    resume_gone(stage, &client).await?;
    let sql = "select d.key, d.consumer, p.state, p.effect_id from fencepost.parked p
               join fencepost.deliveries_by_id d on d.effect_id = p.effect_id and d.consumer_id = p.consumer_id
               where p.state in ('in_doubt', 'dead') order by p.effect_id limit 200";
    let mut orders: BTreeMap<(&str, String), Vec<String>> = BTreeMap::new();
    for row in client.query(sql, &[]).await? {
        let (key, name, state): (String, String, String) = (row.get(0), row.get(1), row.get(2));
        let applied = stage.link(&name).desk.has_applied(&key);
        let verb = match (applied, state.as_str(), row.get::<_, i64>(3) % 3) {
            (true, ..) => "resolve --as applied",
            (false, "in_doubt", 0) => "resolve --as not-applied",
            (false, "in_doubt", _) if temper == Temper::Final => "resolve --as not-applied",
            _ => "retry",
        };
        orders.entry((verb, name)).or_default().push(key);
    }
    for ((verb, name), keys) in &orders {
        for keys in keys.chunks(AT_ONCE) {
            let mut args = vec!["deliveries"];
            args.extend(verb.split(' '));
            args.extend(["--consumer", name]);
            args.extend(keys.iter().map(String::as_str));
            command(stage, &args).await?;
        }
    }
    Ok(())
}

/// Consumers that answered 410 are there again.
async fn resume_gone(stage: &Stage, client: &Client) -> anyhow::Result<()> {
    let sql = "select object from fencepost.alarms where name = 'consumer_gone' and resolved_at is null";
    for row in client.query(sql, &[]).await? {
        command(stage, &["consumers", "resume", row.get(0)]).await?;
    }
    Ok(())
}

/// Gives up the oldest that waits for a retry.
pub async fn skip_one(stage: &Stage) -> anyhow::Result<()> {
    let client = stage.connect().await?;
    let sql = "select d.key, d.consumer from fencepost.parked p
               join fencepost.deliveries_by_id d on d.effect_id = p.effect_id and d.consumer_id = p.consumer_id
               where p.state in ('retry', 'blocked') order by p.effect_id limit 1";
    if let Some(row) = client.query_opt(sql, &[]).await? {
        let (key, name): (String, String) = (row.get(0), row.get(1));
        command(stage, &["deliveries", "skip", "--consumer", &name, &key]).await?;
    }
    Ok(())
}
