//! Text and environment into [`Sections`]. serde stops at the first fault, so every key is first read on its own: what
//! reads alone is kept, what does not is named, and only the kept keys make the result.

use std::collections::BTreeMap;
use std::path::Path;

use serde::de::DeserializeOwned;
use toml::{Table, Value};

use super::fault::{Fault, Origin};
use super::sections::Sections;
use crate::model::consumer::ConsumerEntry;

const PREFIX: &str = "FENCEPOST__";
const TABLES: [&str; 7] = ["database", "relay", "retry", "breaker", "http", "admin", "log"];

/// A configuration as read, with where each overridden key came from.
pub(super) struct Reading {
    pub sections: Sections,
    /// Where each of `sections.consumers` stands in the file: one that could not be read is not among them.
    pub entries: Vec<usize>,
    pub faults: Vec<Fault>,
    /// Keys the environment set, as `section.key`, and the variable that did.
    overridden: BTreeMap<String, String>,
    file: Option<std::path::PathBuf>,
}

impl Reading {
    /// Where the value of `key` came from.
    pub fn origin(&self, key: &str) -> Origin {
        match (self.overridden.get(key), &self.file) {
            (Some(variable), _) => Origin::Env(variable.clone()),
            (None, Some(file)) => Origin::File(file.clone()),
            (None, None) => Origin::Here("defaults"),
        }
    }

    pub fn fault(&mut self, key: &str, wrong: impl Into<String>, write: impl Into<String>) {
        let origin = self.origin(key);
        self.faults.push(Fault { origin, key: key.into(), wrong: wrong.into(), write: write.into() });
    }
}

/// Reads the file's text, then the `FENCEPOST__SECTION__KEY` variables among `env`.
pub(super) fn read(text: &str, file: Option<&Path>, env: impl IntoIterator<Item = (String, String)>) -> Reading {
    let mut reading = Reading {
        sections: Sections::default(),
        entries: Vec::new(),
        faults: Vec::new(),
        overridden: BTreeMap::new(),
        file: file.map(Path::to_path_buf),
    };
    let mut written = match text.parse::<Table>() {
        Ok(table) => table,
        Err(error) => {
            let line = error.span().map_or(1, |span| text[..span.start].matches('\n').count() + 1);
            reading.fault(&format!("line {line}"), error.message().to_string(), "TOML, as in config/fencepost.toml");
            Table::new()
        }
    };
    let entries = written.remove("consumers");
    let mut kept = Table::new();
    for (name, value) in written {
        match value {
            Value::Table(table) if TABLES.contains(&name.as_str()) => {
                for (key, value) in table {
                    keep::<Sections>(&mut reading, &mut kept, &[&name, &key], value);
                }
            }
            Value::Table(brokers) if name == "brokers" => {
                for (broker, value) in brokers {
                    let Value::Table(table) = value else {
                        keep::<Sections>(&mut reading, &mut kept, &[&name, &broker], value);
                        continue;
                    };
                    for (key, value) in table {
                        keep::<Sections>(&mut reading, &mut kept, &[&name, &broker, &key], value);
                    }
                }
            }
            value => keep::<Sections>(&mut reading, &mut kept, &[&name], value),
        }
    }
    for (variable, text) in env {
        override_with(&mut reading, &mut kept, &variable, &text);
    }
    // Every key read alone: together they cannot fail, and if they do it is said.
    match Value::Table(kept).try_into() {
        Ok(sections) => reading.sections = sections,
        Err(error) => reading.fault("(whole file)", message(&error), ""),
    }
    (reading.entries, reading.sections.consumers) = consumers(&mut reading, entries).into_iter().unzip();
    reading
}

/// Puts `value` at `path` of `kept` if `T` can be read with nothing else set.
fn keep<T: DeserializeOwned>(reading: &mut Reading, kept: &mut Table, path: &[&str], value: Value) {
    match alone::<T>(path, value.clone()) {
        Ok(()) => put(kept, path, value),
        Err(wrong) => reading.fault(&path.join("."), wrong, ""),
    }
}

fn alone<T: DeserializeOwned>(path: &[&str], value: Value) -> Result<(), String> {
    let mut table = Table::new();
    put(&mut table, path, value);
    Value::Table(table).try_into::<T>().map(drop).map_err(|error| message(&error))
}

fn put(table: &mut Table, path: &[&str], value: Value) {
    match path {
        [] => {}
        [key] => {
            table.insert((*key).into(), value);
        }
        [section, rest @ ..] => {
            let inner = table.entry(*section).or_insert_with(|| Value::Table(Table::new()));
            if let Value::Table(inner) = inner {
                put(inner, rest, value);
            }
        }
    }
}

/// The first line of serde's message: the rest repeats the value, which may be a secret.
fn message(error: &toml::de::Error) -> String {
    error.message().lines().next().unwrap_or_default().to_string()
}

fn override_with(reading: &mut Reading, kept: &mut Table, variable: &str, text: &str) {
    let Some(name) = variable.strip_prefix(PREFIX) else { return };
    let name = name.to_ascii_lowercase();
    let path: Vec<&str> = name.split("__").collect();
    let key = path.join(".");
    reading.overridden.insert(key.clone(), variable.into());
    if path[0] == "consumers" {
        reading.fault(&key, "consumers are written in the file only", "");
        return;
    }
    // `5` is a number for one key and text for another: whichever reading fits.
    let typed = format!("v = {text}").parse::<Table>().ok().and_then(|mut table| table.remove("v"));
    let string = Value::String(text.into());
    match typed.filter(|value| alone::<Sections>(&path, value.clone()).is_ok()) {
        Some(value) => put(kept, &path, value),
        None => keep::<Sections>(reading, kept, &path, string),
    }
}

/// The entries that could be read, each with its place in the file.
fn consumers(reading: &mut Reading, written: Option<Value>) -> Vec<(usize, ConsumerEntry)> {
    let entries = match written {
        None => Vec::new(),
        Some(Value::Array(entries)) => entries,
        Some(_) => {
            reading.fault("consumers", "not a list of tables", "[[consumers]]");
            Vec::new()
        }
    };
    entries.into_iter().enumerate().filter_map(|(n, entry)| Some((n, consumer(reading, n, entry)?))).collect()
}

/// One entry; `None` where a key of it could not be read.
fn consumer(reading: &mut Reading, n: usize, entry: Value) -> Option<ConsumerEntry> {
    let Value::Table(entry) = entry else {
        reading.fault(&format!("consumers[{n}]"), "not a table", "[[consumers]]");
        return None;
    };
    let name = entry.get("name").and_then(Value::as_str);
    let place = entry_place(n, name);
    let before = reading.faults.len();
    for (key, example) in [("name", "name = \"billing\""), ("kind", "kind = \"http\" or \"amqp\"")] {
        if !entry.contains_key(key) {
            reading.fault(&format!("{place}.{key}"), "missing", example);
        }
    }
    for (key, value) in &entry {
        let mut table: Table =
            [("name", "x"), ("kind", "http")].map(|(k, v)| (k.into(), Value::from(v))).into_iter().collect();
        table.insert(key.clone(), value.clone());
        if let Err(error) = Value::Table(table).try_into::<ConsumerEntry>() {
            reading.fault(&format!("{place}.{key}"), message(&error), "");
        }
    }
    if reading.faults.len() > before {
        return None;
    }
    Value::Table(entry).try_into().ok()
}

/// How an entry is named in a fault.
pub(super) fn entry_place(n: usize, name: Option<&str>) -> String {
    match name {
        Some(name) => format!("consumers[{n}] ({})", name.escape_debug()),
        None => format!("consumers[{n}]"),
    }
}
