//! The documents against the repository: what they point to exists, what they say of defaults and tables is so.

use std::fs;
use std::path::{Path, PathBuf};

use toml::Value;

use crate::support::db::TestDb;
use crate::support::languages::repository;

const ARCHITECTURE: &str = include_str!("../../docs/architecture.md");
const CONFIG: &str = include_str!("../../config/fencepost.toml");

fn documents() -> Vec<PathBuf> {
    let docs = fs::read_dir(repository("docs")).expect("docs").flatten().map(|entry| entry.path());
    let docs = docs.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    docs.chain(["README.md", "CHANGELOG.md"].map(repository)).collect()
}

#[test]
fn every_link_leads_somewhere() {
    let mut broken = Vec::new();
    let mut links = 0;
    for document in documents() {
        let text = fs::read_to_string(&document).expect("a document");
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            if file.contains("://") || file.contains(char::is_whitespace) {
                continue;
            }
            links += 1;
            let target = match file {
                "" => document.clone(),
                file => document.parent().expect("a folder").join(file),
            };
            if !target.exists() || !(anchor.is_empty() || has_heading(&target, anchor)) {
                broken.push(format!("{}: {link}", document.display()));
            }
        }
    }
    assert!(links >= 5, "{links} links were found");
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn the_readme_knows_every_page() {
    let readme = fs::read_to_string(repository("README.md")).expect("the README");
    for page in documents() {
        let name = page.file_name().expect("a file").to_string_lossy().into_owned();
        assert!(name == "README.md" || readme.contains(&name), "the README does not lead to {name}");
    }
}

/// Whether a document has the heading an anchor names, by GitHub's rules.
fn has_heading(document: &Path, anchor: &str) -> bool {
    let text = fs::read_to_string(document).expect("a document");
    let slug = |heading: &str| -> String {
        let kept = heading.trim_start_matches('#').trim().to_lowercase();
        kept.chars()
            .filter(|c| c.is_alphanumeric() || "-_ ".contains(*c))
            .map(|c| if c == ' ' { '-' } else { c })
            .collect()
    };
    text.lines().filter(|line| line.starts_with('#')).any(|line| slug(line) == anchor)
}

/// The defaults of the architecture page are those of the documented file, which a test of its own holds to the code.
#[test]
fn the_defaults_are_the_file_s() {
    let config: toml::Table = CONFIG.parse().expect("TOML");
    let mut compared = 0;
    for line in ARCHITECTURE.lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, key, value, ..] = cells.as_slice() else { continue };
        let Some((section, key)) = key.trim_matches('`').split_once('.') else { continue };
        let Some(Value::Table(section)) = config.get(section) else { continue };
        let value: toml::Table =
            format!("v = {}", value.trim_matches('`')).parse().unwrap_or_else(|e| panic!("{line}: {e}"));
        assert_eq!(section.get(key), value.get("v"), "{line}");
        compared += 1;
    }
    assert!(compared >= 15, "{compared} defaults were compared");
}

#[tokio::test]
async fn every_table_is_described() {
    let db = TestDb::new().await;
    let tables = "select relname::text from pg_class where relnamespace = 'fencepost'::regnamespace
                  and relkind in ('r', 'p') and not relispartition";
    let tables = db.client().await.query(tables, &[]).await.expect("tables");
    assert!(tables.len() >= 15);
    for table in tables.iter().map(|row| row.get::<_, String>(0)) {
        assert!(ARCHITECTURE.contains(&format!("`{table}`")), "the architecture page does not know {table}");
    }
}

#[test]
fn every_metric_is_described() {
    let runbook = fs::read_to_string(repository("docs/runbook.md")).expect("the runbook");
    let mut metrics = 0;
    for source in sources(&repository("src")) {
        let text = fs::read_to_string(&source).expect("a source file");
        for (before, after) in text.match_indices("\"fencepost_").map(|(at, _)| text.split_at(at)) {
            let call = before.trim_end();
            if !["gauge!(", "counter!(", "gauge(", "counter("].iter().any(|end| call.ends_with(end)) {
                continue;
            }
            let name = after[1..].split('"').next().expect("a name");
            assert!(runbook.contains(&format!("`{name}`")), "the runbook does not know {name}");
            metrics += 1;
        }
    }
    assert!(metrics >= 25, "{metrics} metrics were found");
}

/// Every source file below a folder.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder").flatten().map(|entry| entry.path());
    let (folders, files): (Vec<_>, Vec<_>) = entries.partition(|path| path.is_dir());
    let files = files.into_iter().filter(|path| path.extension().is_some_and(|extension| extension == "rs"));
    files.chain(folders.iter().flat_map(|folder| sources(folder))).collect()
}

#[test]
fn every_folder_of_the_source_is_described() {
    for entry in fs::read_dir(repository("src")).expect("src").flatten().filter(|entry| entry.path().is_dir()) {
        let name = entry.file_name().into_string().expect("a plain name");
        assert!(ARCHITECTURE.contains(&format!("src/{name}")), "the architecture page does not know src/{name}");
    }
}
