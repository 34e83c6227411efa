//! The names of a run, and how to reach its database.

use deadpool_postgres::Pool;

use secrecy::SecretString;

use super::Result;
use super::consumers::{ANALYTICS, BILLING, SHIPPING};
use crate::inbox::Inbox;
use crate::store::Database;

const TABLES: &str = include_str!("stage.sql");

#[derive(Clone)]
pub struct Site {
    /// Names everything that belongs to this run.
    pub run: String,
    pub database: Database,
    pub pool: Pool,
    /// Where the AMQP consumer is, if there is one.
    pub broker: Option<Way>,
}

/// How the AMQP consumer is reached.
#[derive(Clone)]
pub struct Way {
    pub url: SecretString,
    pub queue: String,
}

impl Site {
    pub fn new(run: String, database: Database, broker: Option<SecretString>) -> Self {
        let pool = database.pool(24);
        let broker = broker.map(|url| Way { url, queue: format!("demo-shipping-{run}") });
        Self { run, database, pool, broker }
    }

    /// The consumers that the topic of this run reaches.
    pub fn subscribers(&self) -> Vec<&'static str> {
        let shipping = self.broker.as_ref().map(|_| SHIPPING);
        [BILLING, ANALYTICS].into_iter().chain(shipping).collect()
    }

    /// Makes the tables of the run's own; fencepost's must be there. May be run again.
    pub async fn prepare(&self) -> Result<()> {
        let client = self.database.connect().await?;
        client.batch_execute(&format!("-- demo::stage\ncreate schema if not exists {}", self.schema())).await?;
        client.batch_execute(&TABLES.replace("{schema}", &self.schema())).await?;
        Ok(self.inbox(BILLING)?.install(&client).await?)
    }

    /// The schema of everything that is not fencepost's.
    pub fn schema(&self) -> String {
        format!("fencepost_demo_{}", self.run)
    }

    /// The inbox of a consumer that has one.
    pub fn inbox(&self, consumer: &str) -> Result<Inbox> {
        Ok(Inbox::new(&self.schema(), consumer)?)
    }

    /// The kind of this run's tasks, and the topic of their effects.
    pub fn kind(&self) -> String {
        format!("demo.{}", self.run)
    }

    /// What the ids of its tasks begin with.
    pub fn prefix(&self) -> String {
        format!("demo-{}-", self.run)
    }

    /// The id of the n-th task.
    pub fn task_id(&self, n: u32) -> String {
        format!("{}{n}", self.prefix())
    }

    /// How many deliveries have ended, and how many have not.
    pub async fn settled(&self) -> Result<(i64, i64)> {
        let client = self.pool.get().await.map_err(crate::store::Error::from)?;
        let row = client
            .query_one(
                "-- demo::settled
                 select count(settled_at), count(*) - count(settled_at)
                 from fencepost.deliveries where key like $1",
                &[&format!("{}%", self.prefix())],
            )
            .await?;
        Ok((row.get(0), row.get(1)))
    }
}
