//! A backlog: effects as `complete_task` would have stored them, committed a thousand at a time.

use super::Result;
use super::rig::Stage;
use crate::model::key::ConsumerId;

/// Rows of one transaction.
const CHUNK: u32 = 1_000;

/// Commits effects `from..to`, keys `bench-<n>:1`, to one consumer each, taken in turn.
pub async fn fill(stage: &Stage, from: u32, to: u32, bodies: &[Vec<u8>], consumers: &[ConsumerId]) -> Result<()> {
    let consumers: Vec<i32> = consumers.iter().map(|consumer| consumer.0).collect();
    let statement = stage
        .client
        .prepare(
            "-- bench::fill
             insert into fencepost.effects (lease_epoch, position, size, shard, targets, task_id, type, content_type, ordering_key, sha256, payload)
             select 1, 1, octet_length(b.payload), fencepost.shard_of(t.id, s.shards), array[($4::int[])[1 + n % cardinality($4::int[])]],
                    t.id, 'bench.effect', 'application/json', t.id, b.sha256, b.payload
             from (select value::int as shards from fencepost.settings where name = 'shards') s
             cross join generate_series($1::int, $2::int) n
             cross join lateral (select 'bench-' || n as id) t
             join (select payload, sha256(payload) as sha256, k - 1 as k from unnest($3::bytea[]) with ordinality as u (payload, k)) b
               on b.k = n % cardinality($3::bytea[])
             order by n",
        )
        .await?;
    let mut first = from;
    while first < to {
        let last = (first + CHUNK).min(to) - 1;
        stage.client.execute(&statement, &[&(first as i32), &(last as i32), &bodies, &consumers]).await?;
        first = last + 1;
    }
    Ok(())
}

/// What the seeding left to do is done, so that it does not fall into what is measured.
pub async fn calm(stage: &Stage) -> Result<()> {
    stage.client.batch_execute("-- bench::calm\nanalyze fencepost.effects").await?;
    stage.client.batch_execute("checkpoint").await?;
    Ok(())
}
