//! What fencepost's own database says: the second witness.

use std::collections::{BTreeMap, HashMap, HashSet};

use tokio_postgres::Client;

/// One delivery with everything recorded about it.
#[derive(Clone, Debug, Default)]
pub struct Delivery {
    pub key: String,
    pub consumer: String,
    pub sha256: String,
    pub shard: i16,
    /// Terminal or waiting; none: it did not finish.
    pub token: Option<String>,
    pub settled: bool,
    /// Facts with the moment they were written, strongest first.
    pub facts: Vec<Fact>,
    pub attempts: BTreeMap<i32, Attempt>,
    /// How often an operator asked for an attempt of it.
    pub asked: usize,
}

#[derive(Clone, Debug)]
pub struct Fact {
    pub token: String,
    /// Microseconds since 1970.
    pub at: i64,
}

#[derive(Clone, Debug, Default)]
pub struct Attempt {
    /// When it started, and whose start that was, where it has a start row.
    pub started: Option<(i64, String)>,
    pub ended: Option<String>,
}

/// Who took a shard, and when.
#[derive(Clone, Debug)]
pub struct Tenure {
    pub shard: i16,
    pub at: i64,
    pub epoch: i64,
    pub relay: Option<String>,
    pub was_epoch: i64,
    pub was_relay: Option<String>,
    pub was_until: Option<i64>,
}

#[derive(Default)]
pub struct Database {
    /// By (key, consumer).
    pub deliveries: BTreeMap<(String, String), Delivery>,
    pub business: HashSet<String>,
    pub tenures: Vec<Tenure>,
    /// Replies that were not believed, by the reason.
    pub orphans: BTreeMap<String, i64>,
    /// Who ticked when.
    pub ticks: Vec<(String, i64)>,
    pub alarms: Vec<(String, String, String)>,
    /// Completions by task: (epoch, token).
    pub completions: HashMap<String, Vec<(i64, String)>>,
    pub left_over: Vec<(String, i64)>,
}

/// What must be empty once everything has settled.
const LEFT_OVER: [(&str, &str); 6] = [
    ("parked rows", "select count(*) from fencepost.parked"),
    ("lag ranges", "select count(*) from fencepost.lags"),
    ("open flights", "select count(*) from fencepost.flights where token is null"),
    (
        "unread effects",
        "select count(*) from (select f.shard, f.target, row_number() over (partition by f.shard order by f.seq desc) n
                               from fencepost.flights f) f
         join fencepost.effects e on e.shard = f.shard and f.n = 1 and not pg_visible_in_snapshot(e.xid, f.target)",
    ),
    ("consumers that are paused", "select count(*) from fencepost.consumers where paused"),
    ("unsettled deliveries", "select count(*) from fencepost.deliveries_by_id where settled_at is null"),
];

/// What has not settled yet, in words.
pub async fn unsettled(client: &Client) -> anyhow::Result<Vec<(String, i64)>> {
    let mut found = Vec::new();
    for (what, sql) in LEFT_OVER {
        let count: i64 = client.query_one(sql, &[]).await?.get(0);
        if count > 0 {
            found.push((what.to_owned(), count));
        }
    }
    Ok(found)
}

/// A delivery that nothing of its own consumer holds up.
#[derive(Clone, Debug)]
pub struct Due {
    pub effect: i64,
    pub key: String,
    pub consumer: String,
}

/// What was committed since `from` to be delivered at once. Where a consumer keeps order, only what waits for no other.
pub async fn due(client: &Client, from: i64) -> anyhow::Result<Vec<Due>> {
    let sql = "select e.id, d.key, d.consumer from fencepost.effects e
               join fencepost.deliveries_by_id d on d.effect_id = e.id
               join fencepost.consumers c on c.consumer_id = d.consumer_id
               where e.committed_at >= to_timestamp($1::bigint / 1000000.0) and e.deliver_after is null
                 and (d.settled_at is not null or c.spec->>'ordering' = 'none' or not exists (
                     select from fencepost.effects o
                     where o.ordering_key = e.ordering_key and o.id < e.id and d.consumer_id = any (o.targets)
                       and not exists (select from fencepost.ledger l
                                       where l.effect_id = o.id and l.consumer_id = d.consumer_id)))";
    let rows = client.query(sql, &[&from]).await?;
    Ok(rows.iter().map(|row| Due { effect: row.get(0), key: row.get(1), consumer: row.get(2) }).collect())
}

/// Which deliveries of these effects have ended.
pub async fn ended(client: &Client, effects: &[i64]) -> anyhow::Result<HashSet<(i64, String)>> {
    let sql = "select l.effect_id, c.name from fencepost.ledger l join fencepost.consumers c using (consumer_id)
               where l.effect_id = any ($1)";
    let rows = client.query(sql, &[&effects]).await?;
    Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
}

const MICROS: &str = "(extract(epoch from at) * 1000000)::bigint";

impl Database {
    pub async fn read(client: &Client) -> anyhow::Result<Self> {
        let mut this = Self { left_over: unsettled(client).await?, ..Self::default() };
        let names = this.read_deliveries(client).await?;
        this.read_facts(client, &names).await?;
        this.read_attempts(client, &names).await?;
        this.read_requests(client).await?;
        this.read_rest(client).await?;
        Ok(this)
    }

    async fn read_deliveries(&mut self, client: &Client) -> anyhow::Result<HashMap<(i64, i32), (String, String)>> {
        let sql = "select d.effect_id, d.consumer_id, d.key, d.consumer, encode(e.sha256, 'hex'), e.shard,
                          d.token, d.settled_at is not null
                   from fencepost.deliveries_by_id d join fencepost.effects e on e.id = d.effect_id";
        let mut names = HashMap::new();
        for row in client.query(sql, &[]).await? {
            let (key, consumer): (String, Option<String>) = (row.get(2), row.get(3));
            let consumer = consumer.unwrap_or_default();
            names.insert((row.get(0), row.get(1)), (key.clone(), consumer.clone()));
            let delivery = Delivery {
                key: key.clone(),
                consumer: consumer.clone(),
                sha256: row.get(4),
                shard: row.get(5),
                token: row.get(6),
                settled: row.get(7),
                ..Delivery::default()
            };
            self.deliveries.insert((key, consumer), delivery);
        }
        Ok(names)
    }

    async fn read_facts(
        &mut self,
        client: &Client,
        names: &HashMap<(i64, i32), (String, String)>,
    ) -> anyhow::Result<()> {
        let sql = format!("select effect_id, consumer_id, token::text, {MICROS} from fencepost.ledger order by token");
        for row in client.query(&sql, &[]).await? {
            if let Some(delivery) = names.get(&(row.get(0), row.get(1))).and_then(|id| self.deliveries.get_mut(id)) {
                delivery.facts.push(Fact { token: row.get(2), at: row.get(3) });
            }
        }
        Ok(())
    }

    async fn read_attempts(
        &mut self,
        client: &Client,
        names: &HashMap<(i64, i32), (String, String)>,
    ) -> anyhow::Result<()> {
        let sql = format!(
            "select effect_id, consumer_id, attempt, ended, coalesce(token, ''), coalesce(relay::text, ''), {MICROS} from fencepost.attempts"
        );
        for row in client.query(&sql, &[]).await? {
            let Some(delivery) = names.get(&(row.get(0), row.get(1))).and_then(|id| self.deliveries.get_mut(id)) else {
                continue;
            };
            let attempt = delivery.attempts.entry(row.get(2)).or_default();
            match row.get(3) {
                true => attempt.ended = Some(row.get(4)),
                false => attempt.started = Some((row.get(6), row.get(5))),
            }
        }
        Ok(())
    }

    /// What operators asked for, from the audit log.
    async fn read_requests(&mut self, client: &Client) -> anyhow::Result<()> {
        let sql = "select jsonb_array_elements_text(detail->'deliveries') from fencepost.audit_log
                   where action in ('deliveries retry', 'deliveries replay')";
        for row in client.query(sql, &[]).await? {
            let text: String = row.get(0);
            if let Some((key, consumer)) = text.split_once(' ')
                && let Some(delivery) = self.deliveries.get_mut(&(key.to_owned(), consumer.to_owned()))
            {
                delivery.asked += 1;
            }
        }
        Ok(())
    }

    async fn read_rest(&mut self, client: &Client) -> anyhow::Result<()> {
        for row in client.query("select part from campaign.business", &[]).await? {
            self.business.insert(row.get(0));
        }
        let sql = format!(
            "select shard, {MICROS}, epoch, relay::text, was_epoch, was_relay::text,
                    (extract(epoch from was_until) * 1000000)::bigint
             from campaign.leases order by id"
        );
        for row in client.query(&sql, &[]).await? {
            self.tenures.push(Tenure {
                shard: row.get(0),
                at: row.get(1),
                epoch: row.get(2),
                relay: row.get(3),
                was_epoch: row.get(4),
                was_relay: row.get(5),
                was_until: row.get(6),
            });
        }
        for row in client.query("select why, count(*) from fencepost.orphan_acks group by why", &[]).await? {
            self.orphans.insert(row.get(0), row.get(1));
        }
        let sql = format!("select relay::text, {MICROS} from campaign.ticks order by at");
        for row in client.query(&sql, &[]).await? {
            self.ticks.push((row.get(0), row.get(1)));
        }
        for row in client.query("select name, object, detail from fencepost.alarms where resolved_at is null or name in ('unaccounted', 'unwritable')", &[]).await? {
            self.alarms.push((row.get(0), row.get(1), row.get(2)));
        }
        for row in client.query("select task_id, lease_epoch, token from fencepost.completions", &[]).await? {
            self.completions.entry(row.get(0)).or_default().push((row.get(1), row.get(2)));
        }
        Ok(())
    }
}
