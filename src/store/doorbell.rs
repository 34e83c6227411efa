//! The doorbell: how a sleeping relay is woken without a NOTIFY in every commit.
//!
//! A holder about to sleep takes an advisory lock per shard. A producer tries the same lock shared, and notifies only
//! where that fails; where it succeeds it holds the lock to its commit, and meanwhile the holder cannot go to sleep.

use std::time::Duration;

use tokio_postgres::Client;

use super::Result;
use crate::model::key::Shard;

/// Effects were committed in a shard whose holder sleeps; the payload is the shard.
pub const EFFECTS: &str = "fencepost_doorbell";
/// A shard was given up.
pub const SHARDS: &str = "fencepost_shards";
/// A consumer was declared, paused, resumed or changed.
pub const CONSUMERS: &str = "fencepost_consumers";
/// An operator made a parked delivery due.
pub const PARKED: &str = "fencepost_parked";
/// Only the relay that proves its own connection listens here.
const PROOF: &str = "fencepost_proof";

/// How long the proof of a listening connection may take.
pub const PROOF_WITHIN: Duration = Duration::from_secs(2);

/// Listens to all channels and sends itself a word that must come back: behind a transaction pooler it never does.
pub async fn listen(client: &Client, word: &str) -> Result<()> {
    client
        .batch_execute(&format!(
            "-- store::listen\nlisten {EFFECTS}; listen {SHARDS}; listen {CONSUMERS}; listen {PARKED}; listen {PROOF}"
        ))
        .await?;
    client.execute("-- store::prove_listening\nselect pg_notify($1, $2)", &[&PROOF, &word]).await?;
    Ok(())
}

/// Whether a notification is the word that [`listen`] sent.
pub fn is_proof(channel: &str, payload: &str, word: &str) -> bool {
    channel == PROOF && payload == word
}

/// Hangs the doorbell up for these shards. Returns those for which it hangs: for the others a producer is at work.
pub async fn arm(client: &Client, shards: &[Shard]) -> Result<Vec<Shard>> {
    let shards: Vec<i16> = shards.iter().map(|shard| shard.0).collect();
    let rows = client
        .query(
            "-- store::arm_doorbell
             select s.shard from unnest($1::smallint[]) as s (shard)
             where pg_try_advisory_lock(fencepost.doorbell_class(), s.shard)",
            &[&shards],
        )
        .await?;
    Ok(rows.iter().map(|row| Shard(row.get(0))).collect())
}

/// Takes the doorbell down: the relay is awake and polls.
pub async fn disarm(client: &Client) -> Result<()> {
    client.batch_execute("-- store::disarm_doorbell\nselect pg_advisory_unlock_all()").await?;
    Ok(())
}
