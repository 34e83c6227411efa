//! Where a run happens: a private PostgreSQL with fencepost's schema and one of the campaign's own, the consumers behind
//! their proxies, and the relays behind theirs.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use fencepost::demo::embedded::postgres::{Durability, PrivatePostgres};
use fencepost::demo::embedded::rabbitmq::PrivateRabbitmq;
use fencepost::store::{Database, schema};
use rand::SeedableRng;
use rand::rngs::StdRng;
use tokio::sync::Mutex;
use tokio_postgres::{Client, NoTls};
use tokio_util::task::AbortOnDropHandle;

use crate::consumers::{Desk, PROFILES, Transport};
use crate::fault_proxy::FaultProxy;
use crate::history::History;
use crate::replicas::Replica;
use crate::{amqp, http};

/// A short lease, so that a pause outlives it; short waits, so that a run sees many turns.
const CONFIG: &str = "
[relay]
shard_lease = '3s'
renew_every = '1s'
flight_deliveries = 50
park_after = '2s'
shutdown_grace = '2s'
[retry]
base = '100ms'
cap = '1s'
in_progress_max = '4s'
[breaker]
probe = '300ms'
probe_max = '1s'
[log]
level = 'info'
";

/// What the campaign keeps beside fencepost: rows that commit with effects, counters that order them, who held which shard
/// when, and when each relay ticked.
const SCHEMA: &str = "
create schema campaign;
create table campaign.business (part text primary key);
create table campaign.keys (key text primary key, n bigint not null default 0);
create table campaign.leases (
    id bigint generated always as identity primary key, at timestamptz not null default clock_timestamp(),
    shard smallint, epoch bigint, relay uuid, was_epoch bigint, was_relay uuid, was_until timestamptz
);
create function campaign.note_lease() returns trigger language plpgsql as $$
begin
    insert into campaign.leases (shard, epoch, relay, was_epoch, was_relay, was_until)
    values (new.shard, new.epoch, new.relay, old.epoch, old.relay, old.lease_expires_at);
    return null;
end $$;
create table campaign.ticks (at timestamptz not null default clock_timestamp(), relay uuid);
create function campaign.note_tick() returns trigger language plpgsql as $$
begin
    insert into campaign.ticks (relay) values (new.relay);
    return null;
end $$;
create trigger note_tick after update on fencepost.relays for each row
    when (old.tick <> new.tick) execute function campaign.note_tick();
create trigger note_lease after update on fencepost.shards for each row
    when (old.relay is distinct from new.relay or old.epoch <> new.epoch) execute function campaign.note_lease();
";

pub struct Stage {
    pub history: Arc<History>,
    pub postgres: Mutex<PrivatePostgres>,
    pub broker: Broker,
    /// Past every proxy.
    pub url: String,
    pub consumers: Vec<Link>,
    pub replicas: Vec<Replica>,
    pub config: PathBuf,
}

/// A consumer and the way to it; over AMQP, its way to the broker.
pub struct Link {
    pub desk: Arc<Desk>,
    pub proxy: FaultProxy,
    _server: AbortOnDropHandle<()>,
}

pub struct Broker {
    pub node: Mutex<PrivateRabbitmq>,
    /// The relays' way to it.
    pub wire: FaultProxy,
    /// Past every proxy.
    pub url: String,
    /// What its queues for replies are named after.
    pub deployment: String,
}

impl Stage {
    pub async fn set(history: Arc<History>, seed: u64, relays: usize, env: &[(&str, &str)]) -> anyhow::Result<Self> {
        let postgres = PrivatePostgres::start(Durability::None).await?;
        let url = postgres.tcp_url("postgres");
        let mut client = Database::new(&url.clone().into(), "campaign")?.connect().await?;
        schema::migrate(&mut client).await?;
        client.batch_execute(SCHEMA).await?;
        let node = PrivateRabbitmq::start().await?;
        let at_broker = SocketAddr::from(([127, 0, 0, 1], node.port()));
        let sql = "select value from fencepost.settings where name = 'deployment'";
        let deployment: String = client.query_one(sql, &[]).await?.get(0);
        amqp::declare(&node.url(), &deployment).await?;
        let mut consumers = Vec::new();
        for (n, profile) in PROFILES.iter().enumerate() {
            let rng = StdRng::seed_from_u64(seed ^ (0xc0 + n as u64));
            let lines = history.lines(&format!("ledger-{}.jsonl", profile.name))?;
            let desk = Arc::new(Desk::new(profile, rng, lines));
            let (proxy, server) = match profile.transport {
                Transport::Http => {
                    let (address, server) = http::start(Arc::clone(&desk)).await?;
                    (FaultProxy::start(address).await, server)
                }
                Transport::Amqp => {
                    let proxy = FaultProxy::start(at_broker).await;
                    let url = format!("{}?heartbeat=2", node.url_at(proxy.port()));
                    (proxy, amqp::start(Arc::clone(&desk), url))
                }
            };
            let declare = "select fencepost.declare_consumer($1, $2)";
            client.query(declare, &[&profile.name, &profile.spec(proxy.port())]).await?;
            client.query("select fencepost.subscribe($1, $2)", &[&profile.topic, &profile.name]).await?;
            consumers.push(Link { desk, proxy, _server: server });
        }
        let wire = FaultProxy::start(at_broker).await;
        let (config, at) = (history.folder().join("fencepost.toml"), history.folder().join("amqp-url"));
        std::fs::write(&at, node.url_at(wire.port()))?;
        let brokers =
            format!("[brokers.default]\nurl_file = '{}'\nheartbeat = '1s'\nblocked_max = '5s'\n", at.display());
        std::fs::write(&config, format!("{CONFIG}{brokers}"))?;
        let broker = Broker { url: node.url(), node: Mutex::new(node), wire, deployment };
        let mut replicas = Vec::new();
        for n in 0..relays {
            replicas.push(Replica::start(n, &url, &config, history.folder(), env).await?);
        }
        Ok(Self { history, postgres: Mutex::new(postgres), broker, url, consumers, replicas, config })
    }

    /// A connection of the campaign's own, past every proxy. The server may be down.
    pub async fn connect(&self) -> anyhow::Result<Client> {
        connect(&self.url).await
    }

    pub fn link(&self, name: &str) -> &Link {
        let found = self.consumers.iter().find(|link| link.desk.profile.name == name);
        found.unwrap_or_else(|| panic!("there is no consumer {name}"))
    }
}

pub async fn connect(url: &str) -> anyhow::Result<Client> {
    let connecting = tokio_postgres::connect(url, NoTls);
    let limit = std::time::Duration::from_secs(5);
    let (client, connection) = tokio::time::timeout(limit, connecting).await.context("no connection in time")??;
    tokio::spawn(connection);
    Ok(client)
}
