//! `fencepost check`: configuration and connectivity, every fault named at once.

use std::time::Duration;

use futures_util::future::join_all;
use serde::Serialize;

use super::global::Global;
use super::logging::{self, report};
use super::output::Table;
use super::{Exit, Usage};
use crate::config::{Config, Fault, Faults, LogFormat};
use crate::edge::egress::EgressPolicy;
use crate::edge::http::HttpEdge;
use crate::model::consumer::{Consumer, EdgeSpec};
use crate::model::key::ConsumerId;
use crate::store::inspect::installation::{self, Installation};
use crate::store::{Database, schema};

/// The longest a consumer's host may take to be found and reached.
const REACH: Duration = Duration::from_secs(5);

#[derive(clap::Args, Debug)]
pub struct Args {
    /// Do not look whether consumers can be reached.
    #[arg(long)]
    offline: bool,
}

#[derive(Serialize)]
struct Report {
    file: Option<std::path::PathBuf>,
    faults: Vec<Fault>,
    findings: Vec<Finding>,
}

/// One thing that was looked at beyond the configuration.
#[derive(Serialize)]
struct Finding {
    subject: String,
    /// None: it is in order.
    wrong: Option<String>,
}

impl Finding {
    fn new(subject: impl Into<String>, wrong: Option<String>) -> Self {
        Self { subject: subject.into(), wrong }
    }
}

pub async fn run(global: &Global, args: Args) -> anyhow::Result<Exit> {
    logging::init(LogFormat::Text, "error");
    let (config, faults) = match global.config() {
        Ok(config) => (Some(config), Vec::new()),
        Err(Faults(faults)) => (None, faults),
    };
    let database = match &config {
        Some(config) => global.database_of(config),
        None => global.database(),
    };
    let mut findings = match database {
        Ok(database) => check_database(&database, config.as_ref()).await,
        // The faults of the configuration are told once.
        Err(error) if error.is::<Faults>() => Vec::new(),
        Err(error) => vec![Finding::new("database", Some(error.to_string()))],
    };
    if let Some(config) = &config {
        let consumers = config.consumers.iter().filter_map(|entry| entry.check(ConsumerId(0)).ok());
        let consumers: Vec<Consumer> = consumers.collect();
        findings.extend(consumers.iter().map(|consumer| edge(consumer, config)));
        if !args.offline {
            findings.extend(
                join_all(consumers.iter().map(|consumer| reach(consumer, &config.egress))).await.into_iter().flatten(),
            );
        }
    }
    let report = Report { file: config.as_ref().and_then(|config| config.file.clone()), faults, findings };
    global.output().print(&report, || render(&report, config.as_ref()))?;
    let wrong = report.findings.iter().filter(|finding| finding.wrong.is_some()).count();
    match (report.faults.len(), wrong) {
        (0, 0) => Ok(Exit::Done),
        (0, _) => Ok(Exit::Found),
        (n, _) => Err(Usage(format!("{n} {} in the configuration", if n == 1 { "fault" } else { "faults" })).into()),
    }
}

fn render(report: &Report, config: Option<&Config>) -> String {
    let mut text: String =
        report.faults.iter().map(|fault| format!("{}\n", super::output::plain(&fault.to_string()))).collect();
    if let Some(config) = config {
        text.push_str(&format!("{}: no faults, {} consumers\n", config.place(), config.consumers.len()));
    }
    let mut table = Table::new(&["checked", "result"]);
    for finding in &report.findings {
        let result = finding.wrong.clone().unwrap_or_else(|| "ok".into());
        table.row([finding.subject.clone(), result]);
    }
    text + &table.render("")
}

async fn check_database(database: &Database, config: Option<&Config>) -> Vec<Finding> {
    let client = match database.connect().await {
        Ok(client) => client,
        Err(error) => return vec![Finding::new("database", Some(report(&error)))],
    };
    let mut findings = vec![Finding::new("database", None)];
    let schema = schema::check(&client).await.err().map(|error| report(&error));
    let missing = schema.is_some();
    findings.push(Finding::new("schema", schema));
    if missing {
        return findings;
    }
    match installation::load(&client).await {
        Ok(installation) => findings.extend(check_installation(&installation, config)),
        Err(error) => findings.push(Finding::new("settings", Some(report(&error)))),
    }
    findings
}

fn check_installation(installation: &Installation, config: Option<&Config>) -> Vec<Finding> {
    let standby = installation.standby.then(|| "a standby: add target_session_attrs=read-write to the url".to_string());
    let mut findings = vec![Finding::new("writable", standby)];
    let rights = (!installation.missing_rights.is_empty()).then(|| {
        format!(
            "{} may not use {}: fencepost grant {} --as relay",
            installation.role,
            installation.missing_rights.join(", "),
            installation.role
        )
    });
    findings.push(Finding::new("rights of a relay", rights));
    if let Some(config) = config {
        let budget = config.options.retry.budget;
        let short = (installation.retention_seconds < budget.as_secs_f64()).then(|| {
            format!(
                "{}s is shorter than retry.budget ({budget:?}): raise the setting or lower the budget",
                installation.retention_seconds
            )
        });
        findings.push(Finding::new("retention", short));
        let older = (config.revision < installation.consumers_revision).then(|| {
            format!("{} is older than {}, the one last applied", config.revision, installation.consumers_revision)
        });
        findings.push(Finding::new("revision of the file", older));
    }
    findings
}

/// Whether the edge can be built here: its secrets, its headers, and whether its address may be reached.
fn edge(consumer: &Consumer, config: &Config) -> Finding {
    let wrong = match consumer.edge {
        EdgeSpec::Http { .. } => HttpEdge::new(consumer, &config.egress).err().map(|error| report(&error)),
        // The configuration's own check has found its broker; `fencepost amqp check` asks it.
        EdgeSpec::Amqp(_) => None,
    };
    Finding::new(format!("consumer {}", consumer.name), wrong)
}

/// Whether a consumer's host can be found and reached. Nothing is sent.
async fn reach(consumer: &Consumer, egress: &EgressPolicy) -> Option<Finding> {
    let EdgeSpec::Http { url } = &consumer.edge else { return None };
    let host = url.host_str()?.trim_matches(['[', ']']).to_string();
    let port = url.port_or_known_default()?;
    let connect = async {
        let mut last = "its name has no address".to_string();
        for address in tokio::net::lookup_host((host.as_str(), port)).await.map_err(|error| error.to_string())? {
            egress.check(&host, address.ip()).map_err(|refused| refused.to_string())?;
            match tokio::net::TcpStream::connect(address).await {
                Ok(_) => return Ok(()),
                Err(error) => last = format!("{address}: {error}"),
            }
        }
        Err(last)
    };
    let wrong = match tokio::time::timeout(REACH, connect).await {
        Ok(result) => result.err(),
        Err(_) => Some(format!("not reached within {REACH:?}")),
    };
    Some(Finding::new(format!("consumer {} at {host}:{port}", consumer.name), wrong))
}
