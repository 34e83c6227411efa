//! A fresh, migrated database for each test, copied from a template that the first test of a schema makes.

use std::hash::{DefaultHasher, Hash, Hasher};

use fencepost::demo::embedded::postgres::{Durability, PrivatePostgres};
use fencepost::store::{Database, schema};
use secrecy::SecretString;
use tokio::sync::OnceCell;
use tokio_postgres::{Client, Config, NoTls};

/// Names the server the tests use: a superuser's URL. Everything made there is dropped again, but for the template.
pub const URL: &str = "FENCEPOST_TEST_DATABASE_URL";

/// One per process; its guardian ends it with the process.
static SERVER: OnceCell<Server> = OnceCell::const_new();

struct Server {
    /// Where databases are made from.
    config: Config,
    url: String,
    template: String,
    _private: Option<PrivatePostgres>,
}

/// A migrated database of one test. Dropped, it is gone from the server.
pub struct TestDb {
    name: String,
    url: String,
}

impl TestDb {
    /// A database with this build's schema and nothing else in it.
    pub async fn new() -> Self {
        let server = SERVER.get_or_init(Server::start).await;
        Self::make(server, &format!("template {}", server.template)).await
    }

    /// A database without any schema, for tests of the migrator.
    pub async fn empty() -> Self {
        Self::make(SERVER.get_or_init(Server::start).await, "template template0").await
    }

    async fn make(server: &Server, template: &str) -> Self {
        let name = format!("fencepost_test_{:016x}", rand::random::<u64>());
        let admin = connect(&server.config).await;
        admin.batch_execute(&format!("create database {name} {template}")).await.expect("create database");
        Self { url: with_database(&server.url, &name), name }
    }

    /// For the product's own `Database`, for child processes, and for libpq.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The URL as another role, which must exist and may log in.
    pub fn url_as(&self, role: &str) -> String {
        let mut url = url::Url::parse(&self.url).expect("a url");
        let others = url.query_pairs().filter(|(key, _)| key != "user").map(|(k, v)| (k.into_owned(), v.into_owned()));
        let others: Vec<(String, String)> = others.collect();
        url.query_pairs_mut().clear().extend_pairs(others).append_pair("user", role);
        url.into()
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn database(&self) -> Database {
        database_at(self.url())
    }

    /// A connection of its own, as superuser.
    pub async fn client(&self) -> Client {
        connect(&self.url.parse().expect("a url")).await
    }

    /// A connection as another role, which must exist: roles belong to the server, so name them after the database.
    pub async fn client_as(&self, role: &str) -> Client {
        let client = self.client().await;
        client.batch_execute(&format!("set session authorization {role}")).await.expect("set session authorization");
        client
    }
}

/// The product's own `Database`.
pub fn database_at(url: &str) -> Database {
    Database::new(&SecretString::from(url), "fencepost test").expect("a database")
}

/// A server of the test's own, migrated: it may be ended, and nobody else writes to its log.
pub async fn own_server() -> PrivatePostgres {
    let server = PrivatePostgres::start(Durability::None).await.expect("a private PostgreSQL");
    schema::migrate(&mut connect(&server.url("postgres").parse().expect("a url")).await).await.expect("migrate");
    server
}

impl Drop for TestDb {
    fn drop(&mut self) {
        let Some(server) = SERVER.get() else { return };
        let (config, name) = (server.config.clone(), self.name.clone());
        // A test's own runtime may be the one that is dropping us: it cannot be waited on.
        let dropping = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let admin = connect(&config).await;
                admin.batch_execute(&format!("drop database if exists {name} with (force)")).await
            })
        });
        match dropping.join() {
            Ok(Ok(())) => {}
            outcome => eprintln!("{} is left behind: {outcome:?}", self.name),
        }
    }
}

impl Server {
    async fn start() -> Self {
        let (url, private) = match std::env::var(URL) {
            Ok(url) => (url, None),
            Err(_) => {
                let server = PrivatePostgres::start(Durability::None).await.expect("a private PostgreSQL");
                (server.url("postgres"), Some(server))
            }
        };
        let config: Config = url.parse().expect("a database url");
        let template = make_template(&config, &url).await;
        Self { config, url, template, _private: private }
    }
}

/// One template per schema: processes that come at once wait for the first.
async fn make_template(config: &Config, url: &str) -> String {
    let mut hasher = DefaultHasher::new();
    schema::MIGRATIONS.iter().for_each(|m| (m.name, m.sql).hash(&mut hasher));
    let name = format!("fencepost_template_{:016x}", hasher.finish());
    let admin = connect(config).await;
    // Ends with this connection.
    admin.batch_execute("select pg_advisory_lock(hashtext('fencepost test template'))").await.expect("a lock");
    let known = "select 1 from pg_database where datname = $1 and datistemplate";
    if admin.query_opt(known, &[&name]).await.expect("a list of databases").is_none() {
        // One that a killed run left half made is no template yet.
        admin.batch_execute(&format!("drop database if exists {name} with (force)")).await.expect("drop database");
        let create = format!("create database {name} template template0 encoding 'UTF8' lc_collate 'C' lc_ctype 'C'");
        admin.batch_execute(&create).await.expect("create database");
        let mut client = connect(&with_database(url, &name).parse().expect("a url")).await;
        schema::migrate(&mut client).await.expect("migrate");
        let finished = format!("alter database {name} is_template true");
        drop(client);
        admin.batch_execute(&finished).await.expect("alter database");
    }
    name
}

/// `postgresql://…/postgres?…` with another database.
fn with_database(url: &str, name: &str) -> String {
    let (head, query) = match url.split_once('?') {
        Some((head, query)) => (head, format!("?{query}")),
        None => (url, String::new()),
    };
    let (server, _) = head.rsplit_once('/').expect("a database url ends with /<database>");
    format!("{server}/{name}{query}")
}

async fn connect(config: &Config) -> Client {
    let (client, connection) = config.connect(NoTls).await.expect("a connection to the test database");
    tokio::spawn(connection);
    client
}
