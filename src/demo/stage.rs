//! Where the run happens: a database with fencepost's schema, a schema of the run's own, and a folder.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use secrecy::{ExposeSecret, SecretString};
use serde_json::json;

use super::broker::{self, Broker, Node};
use super::consumers::{Consumers, SHIPPING};
use super::embedded::guardian::Guardian;
use super::embedded::postgres::{Durability, PrivatePostgres};
use super::relay::Relay;
use super::shipping;
use super::site::Site;
use super::{Error, Result};
use crate::store::audit::Reason;
use crate::store::consumers::{self, StateChange};
use crate::store::{Database, schema};

/// How long a consumer may take to answer.
pub const CONSUMER_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(2);

/// Dropped, it removes the folder and ends the private server; [`Stage::strike`] also cleans up the database.
pub struct Stage {
    /// Its run is named by 8 hexadecimal digits.
    pub site: Site,
    pub url: SecretString,
    pub folder: PathBuf,
    pub guardian: std::sync::Mutex<Guardian>,
    private: Option<PrivatePostgres>,
    pub broker: Broker,
}

impl Stage {
    pub async fn set(url: Option<&SecretString>) -> Result<(Self, Node)> {
        let broker = tokio::spawn(Broker::find());
        let mut private = None;
        let url = match url {
            Some(url) => url.clone(),
            None => private.insert(PrivatePostgres::start(Durability::Full).await?).url("postgres").into(),
        };
        let run = format!("{:08x}", rand::random::<u32>());
        let folder = std::env::temp_dir().join(format!("fencepost-demo-{run}"));
        let what = || Error::io(format!("cannot make {}", folder.display()));
        fs::create_dir(&folder).map_err(what())?;
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).map_err(what())?;
        let guardian = Guardian::new(&[&folder]).map_err(Error::io("cannot start sh"))?.into();
        let database = Database::new(&url, "fencepost-demo")?;
        schema::migrate(&mut database.connect().await?).await?;
        let (broker, node) =
            broker.await.map_err(|error| Error::io("looking for a broker")(std::io::Error::other(error)))?;
        let site = Site::new(run, database, broker.url());
        site.prepare().await?;
        Ok((Self { site, url, folder, guardian, private, broker }, node))
    }

    /// Where the run happens, in a few words.
    pub fn describe(&self) -> String {
        match &self.private {
            Some(server) => format!("a private PostgreSQL from {}, {}", server.bin().display(), self.broker()),
            None => format!("your database, {}", self.broker()),
        }
    }

    fn broker(&self) -> &'static str {
        match self.broker {
            Broker::Private(_) => "a private RabbitMQ",
            Broker::Yours(_) => "your broker",
            Broker::None(_) => "no broker",
        }
    }

    /// Makes fencepost know the consumers, and subscribes them to the topic of this run.
    pub async fn declare(&self, consumers: &Consumers) -> Result<()> {
        let client = self.site.database.connect().await?;
        for (consumer, url) in consumers.all() {
            let spec = json!({
                "kind": "http",
                "url": url,
                "ack": consumer.ack(),
                "timeout": format!("{}s", CONSUMER_TIMEOUT.as_secs()),
                "topics": [self.site.kind()],
            });
            client
                .query("-- demo::declare\nselect fencepost.declare_consumer($1, $2)", &[&consumer.name(), &spec])
                .await?;
        }
        if let Some(way) = &self.site.broker {
            let what = Error::io("cannot declare the queue of the demo's AMQP consumer");
            shipping::declare(&way.url, &way.queue).await.map_err(|error| what(std::io::Error::other(error)))?;
            let topics = [self.site.kind()];
            let spec = json!({ "kind": "amqp", "routing_key": way.queue, "ack": "required", "topics": topics });
            client.query("-- demo::declare\nselect fencepost.declare_consumer($1, $2)", &[&SHIPPING, &spec]).await?;
            init_replies(self).await?;
        }
        Ok(())
    }

    pub fn how_to_look_around(&self, relay: &Relay) -> String {
        let url = match &self.private {
            Some(server) => server.url("postgres"),
            // It may hold a password.
            None => "<your --database-url>".into(),
        };
        let bin = self.private.as_ref().map(|server| format!("{}/", server.bin().display())).unwrap_or_default();
        format!(
            "Everything keeps running; Ctrl-C ends it.\n  \
             fencepost status --database-url '{url}'\n  \
             fencepost task {} --database-url '{url}'\n  \
             {bin}psql '{url}' -c 'select * from fencepost.deliveries limit 10'\n  \
             the relay's configuration and log: {}",
            self.site.task_id(13),
            relay.folder().display(),
        )
    }

    /// Retires the consumers, which are gone, and removes what the run made outside of fencepost's own schema. A private
    /// server goes as a whole.
    pub async fn strike(self) -> Result<()> {
        if self.private.is_none() {
            let mut client = self.site.database.connect().await?;
            let names: Vec<String> = self.site.subscribers().into_iter().map(str::to_owned).collect();
            consumers::change_state(&mut client, StateChange::Retire, &names, &reason()).await?;
            client.batch_execute(&format!("-- demo::strike\ndrop schema {} cascade", self.site.schema())).await?;
        }
        if let (Broker::Yours(url), Some(way)) = (&self.broker, &self.site.broker) {
            let what = Error::io("cannot remove the queue of the demo's AMQP consumer");
            shipping::remove(url, &way.queue).await.map_err(|error| what(std::io::Error::other(error)))?;
        }
        Ok(())
    }
}

fn reason() -> Reason {
    // Unwrap safety: a short text.
    "the demo ended".parse().expect("a reason")
}

/// `fencepost amqp init`, as a user runs it: fencepost's reply queues.
async fn init_replies(stage: &Stage) -> Result<()> {
    let program = std::env::current_exe().map_err(Error::io("cannot find this program"))?;
    let config = relay_config(&stage.folder, &stage.site.run)?;
    let output = tokio::process::Command::new(program)
        .args(["amqp", "init", "--yes", "--reason", "the demo", "--config"])
        .arg(config)
        .envs(environment(stage))
        .stdin(std::process::Stdio::null())
        .output()
        .await
        .map_err(Error::io("cannot run fencepost amqp init"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(Error::io("fencepost amqp init failed")(std::io::Error::other(said)))
}

/// A configuration for the relay of this run.
pub fn relay_config(folder: &Path, run: &str) -> Result<PathBuf> {
    let path = folder.join("fencepost.toml");
    // A short lease, so that a killed relay's shards are free again soon; consumers' timeouts are below it.
    let text = format!(
        "[relay]\nname = \"demo-{run}\"\nshard_lease = \"3s\"\nrenew_every = \"1s\"\n\n\
         [retry]\nbase = \"200ms\"\n\n[admin]\nlisten = \"127.0.0.1:0\"\n"
    );
    fs::write(&path, text).map_err(Error::io(format!("cannot write {}", path.display())))?;
    Ok(path)
}

/// The environment of a child that uses this run's servers: a password belongs into no file and no argument.
pub fn environment(stage: &Stage) -> Vec<(&'static str, String)> {
    let database = ("DATABASE_URL", stage.url.expose_secret().to_string());
    let broker = stage.broker.url().map(|url| (broker::URL, url.expose_secret().to_string()));
    std::iter::once(database).chain(broker).collect()
}
