//! What relays say of themselves: a growing tick with a token, so that silence is seen.

use std::collections::BTreeMap;

use tokio_postgres::Client;
use uuid::Uuid;

use super::Result;
use super::doorbell;
use crate::model::token::TickToken;

/// Makes a relay known, and tells the others, so that they share the shards with it.
pub async fn register(client: &Client, relay: Uuid, name: &str) -> Result<()> {
    client
        .execute(
            "-- store::register_relay
             with registered as (
                 insert into fencepost.relays (relay, name, version, token) values ($1, $2, $3, 'idle')
                 on conflict do nothing returning relay
             )
             select pg_notify($4, relay::text) from registered",
            &[&relay, &name, &env!("CARGO_PKG_VERSION"), &doorbell::SHARDS],
        )
        .await?;
    Ok(())
}

pub async fn tick(client: &Client, relay: Uuid, token: TickToken) -> Result<()> {
    client
        .execute(
            "-- store::tick_relay
             update fencepost.relays set tick = tick + 1, token = $2, at = clock_timestamp() where relay = $1",
            &[&relay, &token.as_str()],
        )
        .await?;
    Ok(())
}

/// Which edges are shut for a relay now, and why.
pub async fn edges(client: &Client, relay: Uuid, shut: &BTreeMap<String, String>) -> Result<()> {
    client
        .execute(
            "-- store::shut_edges
             update fencepost.relays set shut_edges = $2 where relay = $1 and shut_edges is distinct from $2",
            &[&relay, &tokio_postgres::types::Json(shut)],
        )
        .await?;
    Ok(())
}

/// The last word of a relay that stops in order.
pub async fn stopped(client: &Client, relay: Uuid) -> Result<()> {
    client
        .execute(
            "-- store::stop_relay
             update fencepost.relays set stopped_at = clock_timestamp(), at = clock_timestamp(), tick = tick + 1 where relay = $1",
            &[&relay],
        )
        .await?;
    Ok(())
}
