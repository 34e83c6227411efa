//! What is wrong with a configuration, all of it at once.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Origin {
    File(PathBuf),
    /// The name of an environment variable.
    Env(String),
    /// A default, or the command line.
    Here(&'static str),
}

/// One thing wrong: where, which key, what, and what to write.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Fault {
    pub origin: Origin,
    pub key: String,
    pub wrong: String,
    pub write: String,
}

/// Every fault of a configuration. Never empty.
#[derive(Debug, Serialize)]
pub struct Faults(pub Vec<Fault>);

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => path.display().fmt(f),
            Self::Env(name) => write!(f, "environment {name}"),
            Self::Here(place) => f.write_str(place),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.origin, self.key, self.wrong)?;
        if !self.write.is_empty() {
            write!(f, "; write {}", self.write)?;
        }
        Ok(())
    }
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.0.len();
        write!(f, "{count} {} in the configuration", if count == 1 { "fault" } else { "faults" })?;
        for fault in &self.0 {
            write!(f, "\n  {fault}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Faults {}
