//! What the outbox costs its producers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_postgres::Client;

use super::drain;
use crate::bench::bodies::Size;
use crate::bench::ceiling::Ceiling;
use crate::bench::figure::{Figure, Must};
use crate::bench::relay::Relay;
use crate::bench::rig::Stage;
use crate::bench::sink::Sink;
use crate::bench::{Bench, Error, Result};

const FOR: Duration = Duration::from_secs(4);
const PRODUCERS: usize = 16;
/// More tasks than one run can complete.
const TASKS: u32 = 80_000;

/// How a task is completed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// begin; select fencepost.complete_task(..); commit
    Fencepost,
    /// begin; update of the task; insert of the same row; commit
    Bare(Rules),
}

/// What the tables of the bare transaction refuse.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rules {
    /// What fencepost's columns refuse, declared as a service declares it: checks of the table.
    Checks,
    /// Anything goes.
    None,
}

/// What the relay does meanwhile.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Attached {
    No,
    /// Awake and reading everything; its consumer is paused, so that deliveries do not compete for the processor.
    Reading,
    /// Delivering over HTTP on the same machine.
    Delivering,
}

pub async fn complete_task(bench: &Bench) -> Result<Vec<Figure>> {
    let must = Must::RatioAtLeast(0.75);
    let bare = Way::Bare(Rules::Checks);
    let mut figures = Vec::new();
    for producers in [1, PRODUCERS] {
        let before = rate(bench, bare, producers, Attached::No).await?;
        let value = rate(bench, Way::Fencepost, producers, Attached::Reading).await?;
        let after = rate(bench, bare, producers, Attached::No).await?;
        let name = format!("complete_task, {producers} producer{}", if producers == 1 { "" } else { "s" });
        figures.push(Figure::between(name, "/s", value, Ceiling { before, after }, must));
        let without = rate(bench, Way::Bare(Rules::None), producers, Attached::No).await?;
        let name = "the same beside tables that refuse nothing";
        figures.push(Figure::beside(name, "/s", value, without, Must::Nothing));
    }
    Ok(figures)
}

pub async fn attached(bench: &Bench) -> Result<Vec<Figure>> {
    let must = Must::RatioAtLeast(0.95);
    let before = rate(bench, Way::Fencepost, PRODUCERS, Attached::No).await?;
    let reading = rate(bench, Way::Fencepost, PRODUCERS, Attached::Reading).await?;
    let delivering = rate(bench, Way::Fencepost, PRODUCERS, Attached::Delivering).await?;
    let after = rate(bench, Way::Fencepost, PRODUCERS, Attached::No).await?;
    let name = "commits of 16 producers, relay awake";
    let ceiling = Ceiling { before, after };
    Ok(vec![
        Figure::between(name, "/s", reading, ceiling, must),
        Figure::between("the same while it delivers on these cores", "/s", delivering, ceiling, Must::Nothing),
    ])
}

/// Commits a second.
async fn rate(bench: &Bench, way: Way, producers: usize, attached: Attached) -> Result<f64> {
    let stage = bench.rig.stage().await?;
    let sink = Sink::start(TASKS).await?;
    stage.declare("sink", &sink.url()).await?;
    prepare(&stage, way).await?;
    if attached == Attached::Reading {
        stage.client.batch_execute("-- bench::pause\nupdate fencepost.consumers set paused = true").await?;
    }
    let mut relay = match attached {
        Attached::No => None,
        Attached::Reading | Attached::Delivering => Some(Relay::start(&bench.rig, &stage)?),
    };
    if let Some(relay) = &mut relay {
        relay.attached(&stage, 1).await?;
    }
    stage.client.batch_execute("checkpoint").await?;
    let body = String::from_utf8_lossy(&bench.bodies.of(Size::Small)[0]).into_owned();
    let body: Arc<str> = body.into();
    let started = Instant::now();
    let workers: Vec<_> = (0..producers)
        .map(|lane| {
            tokio::spawn(produce(stage.database.clone(), way, lane, producers, Arc::clone(&body), started + FOR))
        })
        .collect();
    let mut commits = 0;
    for worker in workers {
        commits += worker.await??;
    }
    let rate = f64::from(commits) / started.elapsed().as_secs_f64();
    if let Some(relay) = relay {
        if attached == Attached::Delivering {
            sink.wait_for(u64::from(commits)).await?;
            drain::landed(&stage).await?;
        }
        relay.stop().await?;
    }
    accounted(&stage, way, commits).await?;
    bench.rig.clear().await?;
    Ok(rate)
}

const WITHOUT_RULES: &str = "-- bench::without_rules
do $$
declare
    rule record;
begin
    for rule in select a.attrelid::regclass as relation, a.attname, format_type(t.typbasetype, t.typtypmod) as base
                from pg_attribute a
                join pg_class r on r.oid = a.attrelid and r.relkind = 'r' and r.relnamespace = 'bare'::regnamespace
                join pg_type t on t.oid = a.atttypid and t.typtype = 'd' loop
        execute format('alter table %s alter %I type %s', rule.relation, rule.attname, rule.base);
    end loop;
end $$";

const RULES_AS_CHECKS: &str = "-- bench::rules_as_checks
do $$
declare
    rule record;
begin
    for rule in select b.oid::regclass as relation, replace(pg_get_constraintdef(c.oid), 'VALUE', quote_ident(a.attname)) as rule
                from pg_class b
                join pg_attribute a on a.attrelid = ('fencepost.' || b.relname)::regclass
                join pg_constraint c on c.contypid = a.atttypid
                where b.relkind = 'r' and b.relnamespace = 'bare'::regnamespace
                union all
                select b.oid::regclass, pg_get_constraintdef(c.oid)
                from pg_class b join pg_constraint c on c.conrelid = ('fencepost.' || b.relname)::regclass and c.contype = 'c'
                where b.relkind = 'r' and b.relnamespace = 'bare'::regnamespace loop
        execute format('alter table %s add %s', rule.relation, rule.rule);
    end loop;
end $$";

/// Tasks that are leased, and tables of the same shape for the bare transaction.
async fn prepare(stage: &Stage, way: Way) -> Result<()> {
    stage
        .client
        .batch_execute(
            "-- bench::bare_tables
             create schema bare;
             create table bare.tasks (like fencepost.tasks including all excluding constraints);
             create table bare.effects (like fencepost.effects including all excluding constraints)",
        )
        .await?;
    stage.client.batch_execute(WITHOUT_RULES).await?;
    if way == Way::Bare(Rules::Checks) {
        stage.client.batch_execute(RULES_AS_CHECKS).await?;
    }
    for schema in ["fencepost", "bare"] {
        stage
            .client
            .execute(
                &format!(
                    "-- bench::leased
                     insert into {schema}.tasks (task_id, kind, status, owner, lease_epoch, lease_expires_at, claims_left)
                     select 'bench-' || n, 'bench', 'running', 'bench', 1, clock_timestamp() + interval '1 hour', 24
                     from generate_series(0, $1::int - 1) n"
                ),
                &[&(TASKS as i32)],
            )
            .await?;
        stage.client.batch_execute(&format!("analyze {schema}.tasks")).await?;
    }
    Ok(())
}

async fn produce(
    database: crate::store::Database,
    way: Way,
    lane: usize,
    lanes: usize,
    body: Arc<str>,
    until: Instant,
) -> Result<u32> {
    let mut client = database.connect().await?;
    let mut commits = 0;
    let effects =
        serde_json::json!([{ "consumer": "sink", "payload_text": &*body, "type": "bench.effect" }]).to_string();
    let statements = match way {
        Way::Fencepost => {
            vec![client.prepare("select fencepost.complete_task($1, 1, 'bench', $2::text::jsonb)").await?]
        }
        Way::Bare(_) => bare_statements(&client).await?,
    };
    for n in (lane..TASKS as usize).step_by(lanes) {
        if Instant::now() >= until {
            return Ok(commits);
        }
        let task = format!("bench-{n}");
        let tx = client.transaction().await?;
        match way {
            Way::Fencepost => {
                tx.query_one(&statements[0], &[&task, &effects]).await?;
            }
            Way::Bare(_) => {
                tx.execute(&statements[0], &[&task]).await?;
                tx.execute(&statements[1], &[&task, &(n as i16 % 8), &body.as_bytes()]).await?;
            }
        }
        tx.commit().await?;
        commits += 1;
    }
    Err(Error::Untrue(format!("{TASKS} tasks were too few")))
}

async fn bare_statements(client: &Client) -> Result<Vec<tokio_postgres::Statement>> {
    Ok(vec![
        client
            .prepare(
                "update bare.tasks set status = 'completed', token = 'effects', ended_at = clock_timestamp(), effect_count = 1
                 where task_id = $1 and status = 'running' and lease_epoch = 1 and owner = 'bench'",
            )
            .await?,
        client
            .prepare(
                "insert into bare.effects (lease_epoch, position, size, shard, targets, task_id, type, content_type, ordering_key, sha256, payload)
                 values (1, 1, octet_length($3::bytea), $2, '{1}', $1, 'bench.effect', 'application/json', $1, sha256($3), $3)",
            )
            .await?,
    ])
}

/// Every commit left its task and its effect.
async fn accounted(stage: &Stage, way: Way, commits: u32) -> Result<()> {
    let schema = match way {
        Way::Fencepost => "fencepost",
        Way::Bare(_) => "bare",
    };
    let row = stage
        .client
        .query_one(
            &format!(
                "-- bench::accounted
                 select (select count(*) from {schema}.tasks where status = 'completed'), (select count(*) from {schema}.effects)"
            ),
            &[],
        )
        .await?;
    match (row.get::<_, i64>(0), row.get::<_, i64>(1)) {
        (tasks, effects) if tasks == i64::from(commits) && effects == tasks => Ok(()),
        (tasks, effects) => Err(Error::Untrue(format!("{commits} commits left {tasks} tasks and {effects} effects"))),
    }
}
