//! The configuration: one TOML file, overridden by `FENCEPOST__SECTION__KEY`, secrets only by `*_env` and `*_file`.
//! Every fault is named at once, with its file, its key, what is wrong and what to write. Nothing here opens a socket.

mod brokers;
mod check;
mod fault;
mod read;
mod sections;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use secrecy::SecretString;

pub use brokers::{BrokerSection, LoginKind, URL_VARIABLE};
pub use fault::{Fault, Faults, Origin};
pub use sections::{AdminSection, LogFormat, LogSection, Sections};

use crate::edge::Reach;
use crate::edge::egress::EgressPolicy;
use crate::model::broker::Broker;
use crate::model::consumer::ConsumerEntry;
use crate::relay::options::Options;

/// Where the file is looked for when nobody names one.
pub const PLACES: [&str; 2] = ["config/fencepost.toml", "/etc/fencepost/fencepost.toml"];

/// A configuration without faults.
#[derive(Clone, Debug)]
pub struct Config {
    /// None: nobody named a file and none lies in [`PLACES`].
    pub file: Option<PathBuf>,
    /// Grows with every change of the consumers; an older one never overwrites a newer.
    pub revision: i64,
    /// None where neither the file nor the environment names a database.
    pub database_url: Option<SecretString>,
    pub options: Options,
    pub egress: EgressPolicy,
    pub brokers: Vec<Arc<Broker>>,
    pub admin: AdminSection,
    pub log: LogSection,
    /// Each of them passes [`ConsumerEntry::check`].
    pub consumers: Vec<ConsumerEntry>,
}

impl Config {
    /// Reads the named file, else the first of [`PLACES`] that exists, else only defaults and the environment.
    pub fn load(named: Option<&Path>) -> Result<Self, Faults> {
        let file = match named {
            Some(path) => Some(path.to_path_buf()),
            None => PLACES.iter().map(PathBuf::from).find(|path| path.exists()),
        };
        let text = match &file {
            None => String::new(),
            Some(path) => std::fs::read_to_string(path).map_err(|error| {
                Faults(vec![Fault {
                    origin: Origin::File(path.clone()),
                    key: "(file)".into(),
                    wrong: format!("cannot be read: {error}"),
                    write: "--config FILE".into(),
                }])
            })?,
        };
        Self::parse(&text, file.as_deref(), std::env::vars())
    }

    /// Reads the text of a file and the variables of an environment.
    pub fn parse(
        text: &str,
        file: Option<&Path>,
        env: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, Faults> {
        let env: Vec<(String, String)> = env.into_iter().collect();
        let broker_url = env.iter().find(|(name, _)| name == URL_VARIABLE).map(|(_, url)| url.clone());
        let mut reading = read::read(text, file, env);
        let database_url = check::database_url(&mut reading);
        let egress = check::egress(&mut reading);
        let brokers = brokers::brokers(&mut reading, broker_url.as_deref());
        check::combinations(&mut reading);
        check::consumers(&mut reading, &brokers);
        if !reading.faults.is_empty() {
            return Err(Faults(reading.faults));
        }
        let sections = reading.sections;
        Ok(Self {
            file: file.map(Path::to_path_buf),
            revision: sections.revision,
            database_url,
            options: sections.options(),
            egress,
            brokers,
            admin: sections.admin,
            log: sections.log,
            consumers: sections.consumers,
        })
    }

    /// Where consumers may be and which brokers there are.
    pub fn reach(&self) -> Reach {
        Reach { egress: self.egress.clone(), brokers: self.brokers.clone(), ..Reach::default() }
    }

    /// The file's name for people.
    pub fn place(&self) -> String {
        self.file.as_ref().map_or_else(|| "no configuration file".into(), |file| file.display().to_string())
    }
}
