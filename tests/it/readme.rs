//! README.md, played from top to bottom as a new user would: every command is run, every file written, every block of
//! SQL pasted, in their order.

use std::collections::HashMap;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};

use tokio::net::TcpStream;
use tokio::process::{Child, Command};

use crate::support::db::TestDb;
use crate::support::eventually;
use crate::support::languages::{self, finish, repository};
use crate::support::process::{self, Process};

const README: &str = include_str!("../../README.md");
const MAKEFILE: &str = include_str!("../../Makefile");
const COMPOSE: &str = include_str!("../../docker-compose.yml");
const REPORT: &str = include_str!("../../src/demo/report.rs");
const EXAMPLE: &str = include_str!("../../examples/producer.rs");

/// A fenced block: its language, and its text.
fn blocks(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let inside = text.split("```").enumerate().filter(|(n, _)| n % 2 == 1);
    inside.map(|(_, block)| block.split_once('\n').expect("a fence ends its line"))
}

#[tokio::test]
async fn the_readme_runs_as_written() {
    let mut reader = Reader::new().await;
    for (language, text) in blocks(README) {
        match language {
            "sh" => {
                for line in text.lines() {
                    reader.types(line).await;
                }
            }
            "sql" => reader.pastes(text).await,
            "python" | "toml" => reader.writes(text),
            "rust" => assert_eq!(text, EXAMPLE, "the README's Rust is examples/producer.rs"),
            "text" => {}
            other => panic!("what is to be done with a block of {other:?}?"),
        }
    }
    reader.has_seen_it_work().await;
}

#[test]
fn the_report_shown_is_one_the_demo_prints() {
    let report = blocks(README).find(|(_, text)| text.contains("lost 0\n")).expect("the demo's report").1;
    assert!(report.lines().count() >= 10, "{report}");
    for line in report.lines() {
        let label = line.split(' ').next().expect("a first word");
        assert!(REPORT.contains(&format!("\"{label} ")), "no line of the report begins with {label:?}");
    }
}

/// Whoever follows the README: a checkout, a database, and a folder for the files.
struct Reader {
    db: TestDb,
    folder: PathBuf,
    /// Where the consumer of the README listens, instead of 8080.
    port: u16,
    python: PathBuf,
    env: HashMap<String, String>,
    consumer: Option<Child>,
    relay: Option<Process>,
}

impl Reader {
    async fn new() -> Self {
        let db = TestDb::empty().await;
        let folder = std::env::temp_dir().join(db.name());
        fs::create_dir(&folder).expect("a folder");
        let free = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = free.local_addr().expect("an address").port();
        let python = languages::python().await;
        Self { db, folder, port, python, env: HashMap::new(), consumer: None, relay: None }
    }

    /// A file, whose first line is its name as a comment.
    fn writes(&self, text: &str) {
        let name =
            text.lines().next().and_then(|line| line.strip_prefix("# ")).expect("a block begins with its file's name");
        fs::write(self.folder.join(name), text.replace("8080", &self.port.to_string())).expect("a file");
    }

    async fn pastes(&self, sql: &str) {
        // Roles belong to the whole server: the reader's is renamed.
        let sql = sql.replace("shop_backend", self.db.name());
        let pasted = self.db.client().await.batch_execute(&sql).await;
        pasted.unwrap_or_else(|error| panic!("{error:?}\n{sql}"));
    }

    async fn types(&mut self, line: &str) {
        let words = words(line);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        match words.as_slice() {
            ["export", setting] => self.exports(setting),
            ["fencepost", "run", "&"] => {
                self.relay = Some(Process::start(&["run"], &self.env()));
            }
            ["fencepost", args @ ..] => self.calls(args).await,
            ["python3", file, "&"] => {
                let child = self.command(&self.python).arg(self.folder.join(file)).kill_on_drop(true).spawn();
                self.consumer = Some(child.expect("the consumer starts"));
                let listening = async || TcpStream::connect(("127.0.0.1", self.port)).await.ok();
                eventually("the consumer listens", listening).await;
            }
            ["python3", file] => {
                finish(self.command(&self.python).arg(self.folder.join(file))).await;
            }
            ["cargo", "run", "--example", name] => {
                finish(languages::rust(name).envs(self.env())).await;
            }
            ["make", target] => assert!(MAKEFILE.contains(&format!("\n{target}:")), "make {target}"),
            // What these do is for `make e2e` to see.
            ["docker", "compose", "up", "-d"] | ["docker", "compose", "down", "-v"] => {}
            ["docker", "compose", "run", "--rm", service, ..] => {
                assert!(COMPOSE.contains(&format!("\n  {service}:\n")), "no service {service}");
            }
            // The binary and the packages are the tests' own.
            ["cargo", "install", "--locked", "--path", "."] | ["pip", "install", "psycopg[binary]"] => {}
            _ => panic!("what does a reader do with {line:?}?"),
        }
    }

    fn exports(&mut self, setting: &str) {
        let (name, value) = setting.split_once('=').expect("NAME=VALUE");
        let value = match name {
            "DATABASE_URL" => self.db.url().to_owned(),
            "FENCEPOST_CONFIG" => self.folder.join(value).to_str().expect("a path").to_owned(),
            _ => panic!("what is {name}?"),
        };
        self.env.insert(name.to_owned(), value);
    }

    async fn calls(&self, args: &[&str]) {
        if self.relay.is_some() {
            // A reader looks around after a while.
            self.everything_is_settled().await;
        }
        let (code, out, err) = process::run(args, &self.env()).await;
        assert_eq!(code, 0, "fencepost {args:?}:\n{out}{err}");
    }

    async fn everything_is_settled(&self) {
        let client = self.db.client().await;
        eventually("every delivery has ended", async || {
            let open = "select count(*) from fencepost.deliveries where settled_at is null";
            let row = client.query_one(open, &[]).await.expect("deliveries");
            (row.get::<_, i64>(0) == 0).then_some(())
        })
        .await;
    }

    async fn has_seen_it_work(&self) {
        self.everything_is_settled().await;
        let client = self.db.client().await;
        let seen =
            "select string_agg(format('%s %s %s', d.key, d.token, convert_from(i.body, 'UTF8')), ', ' order by d.key)
                    from fencepost.deliveries d join invoices i on i.key = d.key";
        let seen: String = client.query_one(seen, &[]).await.expect("deliveries and invoices").get(0);
        let all = [1001, 1002, 1003].map(|order| format!(r#"order-{order}:1 applied {{"order": {order}}}"#));
        assert_eq!(seen, all.join(", "));
        let paid = "select count(*) from orders where status = 'paid'";
        assert_eq!(client.query_one(paid, &[]).await.expect("orders").get::<_, i64>(0), 3);
        let leaves = format!("drop owned by {0}; drop role {0}", self.db.name());
        client.batch_execute(&leaves).await.expect("the role goes");
    }

    fn env(&self) -> Vec<(&str, &str)> {
        self.env.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect()
    }

    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.current_dir(repository("")).envs(self.env());
        command
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        // What a failed test leaves is of no use to the next.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// The words of a command, as a shell reads them: double quotes hold together.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut quoted = false;
    for c in line.chars() {
        match c {
            '"' => quoted = !quoted,
            ' ' if !quoted => words.push(String::new()),
            c => words.last_mut().expect("one at least").push(c),
        }
    }
    assert!(!quoted, "an open quote: {line}");
    words
}
