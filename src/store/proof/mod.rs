//! The proof of `fencepost audit`: from effects, flights, ledger, parked and attempts, that every committed effect of a
//! time range has ended or waits with a reason, and that no attempt is without a token. Read in one snapshot; nothing
//! is changed and nothing is repaired here.
//!
//! Each file holds the checks of one thing as SQL that gives `(object, detail)` per hole. Parameters: $1 and $2 the
//! range (from, and up to but without), $3 how many holes are named.

mod attempts;
mod completions;
mod deliveries;
mod flights;

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;
use tokio_postgres::{Client, IsolationLevel, Transaction};

use super::Result;

/// So many holes of one kind are named; all are counted.
const NAMED: i64 = 200;
/// The longest one check may take.
const CHECK_TIMEOUT: Duration = Duration::from_secs(600);

/// One end of the range: an effect belongs to it by `committed_at`, everything else by its own time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Moment {
    /// So long before the database's now.
    Ago(Duration),
    /// A time as PostgreSQL reads it.
    At(String),
}

/// What was found, and what was not.
#[derive(Clone, Debug, Serialize)]
pub struct Proof {
    pub since: String,
    pub until: String,
    pub effects: i64,
    /// Deliveries that have ended, by token.
    pub ended: BTreeMap<String, i64>,
    /// Those that wait, by where: a waiting token, or `unread`, `in_flight`, `lagging`.
    pub waiting: BTreeMap<String, i64>,
    /// Completions by token, re-opened ones included.
    pub completions: BTreeMap<String, i64>,
    /// Attempts that have a row of their own, by token.
    pub attempts: BTreeMap<String, i64>,
    /// How many there are of each kind of hole.
    pub holes_by_kind: BTreeMap<&'static str, i64>,
    /// Each by name, up to a limit per kind.
    pub holes: Vec<Hole>,
}

/// Something that has neither end nor reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Hole {
    /// For programs; stable.
    pub kind: &'static str,
    pub object: String,
    pub detail: String,
}

/// One thing that must not be found.
struct Check {
    kind: &'static str,
    sql: String,
}

impl Proof {
    pub fn holds(&self) -> bool {
        self.holes_by_kind.is_empty()
    }
}

/// Goes through the whole range.
pub async fn load(client: &mut Client, since: Option<&Moment>, until: Option<&Moment>) -> Result<Proof> {
    let tx = client.build_transaction().isolation_level(IsolationLevel::RepeatableRead).read_only(true).start().await?;
    tx.batch_execute(&format!(
        "-- store::proof_session\nset local statement_timeout = {}; set local jit = off",
        CHECK_TIMEOUT.as_millis()
    ))
    .await?;
    let range = Range { since: moment(&tx, since, "-infinity").await?, until: moment(&tx, until, "infinity").await? };
    // PostgreSQL's error where the end lies before the beginning: an empty range would prove nothing.
    let sql = "-- store::proof_range\nselect tstzrange($1::text::timestamptz, $2::text::timestamptz)";
    tx.execute(sql, &[&range.since, &range.until]).await?;
    let mut proof = Proof {
        effects: count(&tx, &range, "select null, count(*) from effects").await?.into_values().sum(),
        ended: count(&tx, &range, deliveries::ENDED).await?,
        waiting: count(&tx, &range, deliveries::PARKED).await?,
        completions: count(&tx, &range, completions::BY_TOKEN).await?,
        attempts: count(&tx, &range, attempts::BY_TOKEN).await?,
        holes_by_kind: BTreeMap::new(),
        holes: Vec::new(),
        since: range.since.clone(),
        until: range.until.clone(),
    };
    let places =
        format!("{} select place, count(*) from placed where place is not null group by place", deliveries::PLACED);
    proof.waiting.extend(count(&tx, &range, &places).await?);
    let checks = [deliveries::checks(), attempts::checks(), flights::checks(), completions::checks()];
    for check in checks.into_iter().flatten() {
        let found = holes(&tx, &range, &check).await?;
        if found.0 > 0 {
            proof.holes_by_kind.insert(check.kind, found.0);
            proof.holes.extend(found.1);
        }
    }
    tx.commit().await?;
    Ok(proof)
}

/// Both ends in PostgreSQL's own text.
struct Range {
    since: String,
    until: String,
}

async fn moment(tx: &Transaction<'_>, moment: Option<&Moment>, otherwise: &str) -> Result<String> {
    let (text, ago) = match moment {
        None => return Ok(otherwise.into()),
        Some(Moment::At(text)) => (Some(text.as_str()), None),
        Some(Moment::Ago(ago)) => (None, Some(ago.as_secs_f64())),
    };
    let sql = "-- store::proof_moment
               select coalesce($1::text::timestamptz, clock_timestamp() - make_interval(secs => $2))::text";
    Ok(tx.query_one(sql, &[&text, &ago]).await?.get(0))
}

/// The effects of the range, and the deliveries they are.
const RANGE: &str = "with effects as not materialized (
    select id, xid, shard, task_id, lease_epoch, position, targets from fencepost.effects
    where committed_at >= $1::text::timestamptz and committed_at < $2::text::timestamptz
    union all
    select id, xid, shard, task_id, lease_epoch, position, targets from fencepost.effects_kept
    where committed_at >= $1::text::timestamptz and committed_at < $2::text::timestamptz
      and not exists (select from fencepost.effects e where e.id = effects_kept.id)
), deliveries as not materialized (
    select e.id, e.xid, e.shard, t.consumer_id, e.task_id || ':' || e.lease_epoch
               || case when e.position > 1 then ':' || e.position else '' end as key
    from effects e
    cross join lateral unnest(case when e.targets = '{}' then array[0] else e.targets end) t (consumer_id)
)";

/// Tokens and how many there are of each.
async fn count(tx: &Transaction<'_>, range: &Range, sql: &str) -> Result<BTreeMap<String, i64>> {
    let sql = match sql.strip_prefix("with ") {
        Some(rest) => format!("-- store::proof_count\n{RANGE}, {rest}"),
        None => format!("-- store::proof_count\n{RANGE} {sql}"),
    };
    let rows = tx.query(&sql, &[&range.since, &range.until]).await?;
    Ok(rows.iter().map(|row| (row.get::<_, Option<String>>(0).unwrap_or_default(), row.get(1))).collect())
}

async fn holes(tx: &Transaction<'_>, range: &Range, check: &Check) -> Result<(i64, Vec<Hole>)> {
    let (with, body) = match check.sql.strip_prefix("with ") {
        Some(rest) => (RANGE, format!(", {rest}")),
        None => (RANGE, format!(" {}", check.sql)),
    };
    let sql = format!(
        "-- store::proof_{}\n{with}{}",
        check.kind,
        body.replace("{found}", "select object, detail, count(*) over () from found order by object limit $3::bigint")
    );
    let rows = tx.query(&sql, &[&range.since, &range.until, &NAMED]).await?;
    let count = rows.first().map_or(0, |row| row.get(2));
    let hole = |row: &tokio_postgres::Row| Hole { kind: check.kind, object: row.get(0), detail: row.get(1) };
    Ok((count, rows.iter().map(hole).collect()))
}
