//! What came of the run, checked against what producers and consumers wrote down themselves.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::Serialize;
use tokio_postgres::Client;

use super::Result;
use super::consumers::{Consumers, DEDUPING, Ledger};
use super::stage::Stage;
use super::workers::Tally;

type Tokens = BTreeMap<String, i64>;

#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub seconds: f64,
    /// Epochs by how they ended.
    pub completions: Tokens,
    /// Of those, how many ended after their lease had expired, before anybody took it over.
    pub late: i64,
    /// Deliveries by token, per consumer; `unfinished` where there is none.
    pub deliveries: BTreeMap<String, Tokens>,
    /// Attempts whose outcome nobody wrote: their relay was killed.
    pub attempts_without_outcome: i64,
    /// Deliveries of which an attempt may or may not have taken effect.
    pub doubts: i64,
    /// Of those, how many the consumer's own word has ended.
    pub doubts_resolved: i64,
    pub relay_kills: u32,
    /// In a few words, also why there was none.
    pub broker: String,
    pub workers_killed: u64,
    pub workers_paused: u64,
    /// Completions refused because another worker held a newer epoch.
    pub lease_losses_detected: u64,
    /// What the consumers remember.
    pub consumers: Vec<Ledger>,
    pub deliveries_per_second: f64,
    /// From the completion to the ledger.
    pub latency_p50_ms: f64,
    pub latency_p99_ms: f64,
    pub check: Check,
}

/// The producers' word against the consumers': all but `promised` must be 0.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Check {
    /// Deliveries that committed with their completion.
    pub promised: i64,
    /// Promised, ended or unknown to fencepost, and not in the consumer's own ledger with the very bytes. What still waits
    /// is unfinished.
    pub lost: i64,
    /// In a consumer's ledger without having been promised.
    pub unasked: i64,
    /// Not once in the table of the consumer that dedups.
    pub not_applied: i64,
    /// Twice there.
    pub applied_twice: i64,
    /// Without an end in fencepost's ledger.
    pub unfinished: i64,
}

impl Report {
    pub(super) async fn collect(
        stage: &Stage,
        consumers: &Consumers,
        tally: &Tally,
        relay_kills: u32,
        broker: String,
        unfinished: i64,
        took: Duration,
    ) -> Result<Self> {
        let client = stage.site.database.connect().await?;
        let run = format!("demo-{}-%", stage.site.run);
        let (completions, late) = completions(&client, &run).await?;
        let (latency_p50_ms, latency_p99_ms, deliveries_per_second) = speed(&client, &run).await?;
        let (doubts, doubts_resolved) = doubts(&client, &run).await?;
        Ok(Self {
            seconds: took.as_secs_f64(),
            completions,
            late,
            deliveries: deliveries(&client, &run).await?,
            attempts_without_outcome: without_outcome(&client, &run).await?,
            doubts,
            doubts_resolved,
            relay_kills,
            broker,
            workers_killed: tally.killed(),
            workers_paused: tally.paused(),
            lease_losses_detected: tally.lease_losses(),
            consumers: consumers.services().map(|service| service.ledger()).collect(),
            deliveries_per_second,
            latency_p50_ms,
            latency_p99_ms,
            check: check(&client, &stage.site.schema(), unfinished).await?,
        })
    }

    /// Whether everything that was promised happened, and nothing else.
    pub fn is_good(&self) -> bool {
        self.check.is_good()
    }
}

impl Check {
    pub fn is_good(&self) -> bool {
        let Self { promised, lost, unasked, not_applied, applied_twice, unfinished } = *self;
        promised > 0 && [lost, unasked, not_applied, applied_twice, unfinished] == [0; 5]
    }
}

async fn completions(client: &Client, run: &str) -> Result<(Tokens, i64)> {
    let sql = "-- demo::completions
               select token, count(*), count(*) filter (where late)
               from fencepost.completions where task_id like $1 group by token";
    let rows = client.query(sql, &[&run]).await?;
    let late = rows.iter().map(|row| row.get::<_, i64>(2)).sum();
    Ok((rows.iter().map(|row| (row.get(0), row.get(1))).collect(), late))
}

async fn deliveries(client: &Client, run: &str) -> Result<BTreeMap<String, Tokens>> {
    let sql = "-- demo::deliveries
               select coalesce(consumer, 'nobody'), coalesce(token, 'unfinished'), count(*)
               from fencepost.deliveries where key like $1 group by 1, 2";
    let mut all: BTreeMap<String, Tokens> = BTreeMap::new();
    for row in client.query(sql, &[&run]).await? {
        all.entry(row.get(0)).or_default().insert(row.get(1), row.get(2));
    }
    Ok(all)
}

async fn without_outcome(client: &Client, run: &str) -> Result<i64> {
    let sql = "-- demo::without_outcome
               select count(*) from fencepost.attempts a join fencepost.effects e on e.id = a.effect_id
               where a.token = 'lost' and e.task_id like $1";
    Ok(client.query_one(sql, &[&run]).await?.get(0))
}

async fn doubts(client: &Client, run: &str) -> Result<(i64, i64)> {
    let sql = "-- demo::doubts
               with d as (
                   select distinct a.effect_id, a.consumer_id
                   from fencepost.attempts a join fencepost.effects e on e.id = a.effect_id
                   where a.token = 'ambiguous' and e.task_id like $1
               )
               select count(*), count(*) filter (where exists (
                   select from fencepost.ledger l
                   where l.effect_id = d.effect_id and l.consumer_id = d.consumer_id and l.token in ('applied', 'duplicate')))
               from d";
    let row = client.query_one(sql, &[&run]).await?;
    Ok((row.get(0), row.get(1)))
}

async fn speed(client: &Client, run: &str) -> Result<(f64, f64, f64)> {
    let sql = "-- demo::speed
               with d as (
                   select i.committed_at, d.settled_at, extract(epoch from d.settled_at - i.committed_at)::float8 * 1000 as ms
                   from fencepost.intended i join fencepost.deliveries d on d.key = i.key and d.consumer = i.consumer
                   where i.key like $1 and d.key like $1
               )
               select coalesce(percentile_cont(0.5) within group (order by ms), 0),
                      coalesce(percentile_cont(0.99) within group (order by ms), 0),
                      coalesce(count(settled_at) / nullif(extract(epoch from max(settled_at) - min(committed_at)), 0), 0)::float8
               from d";
    let row = client.query_one(sql, &[&run]).await?;
    Ok((row.get(0), row.get(1), row.get(2)))
}

pub(super) async fn check(client: &Client, schema: &str, unfinished: i64) -> Result<Check> {
    let sql = "-- demo::check
               select (select count(*) from {schema}.promised),
                      (select count(*) from {schema}.promised p where not exists (
                          select from {schema}.receipts r
                          where r.consumer = p.consumer and r.key = p.key and r.body_sha256 = p.body_sha256)
                          and not exists (
                          select from fencepost.deliveries_of(p.key) d
                          where d.consumer = p.consumer and d.settled_at is null)),
                      (select count(*) from {schema}.receipts r where not exists (
                          select from {schema}.promised p
                          where p.consumer = r.consumer and p.key = r.key and p.body_sha256 = r.body_sha256)),
                      (select count(*) from {schema}.promised p where p.consumer = any($1) and not exists (
                          select from {schema}.applied a where a.consumer = p.consumer and a.key = p.key)),
                      (select count(*) from (
                          select from {schema}.applied group by consumer, key having count(*) > 1) twice)";
    let row = client.query_one(&sql.replace("{schema}", schema), &[&DEDUPING.as_slice()]).await?;
    Ok(Check {
        promised: row.get(0),
        lost: row.get(1),
        unasked: row.get(2),
        not_applied: row.get(3),
        applied_twice: row.get(4),
        unfinished,
    })
}

impl fmt::Display for Report {
    /// The word `lost` stands in one line only, the last: the others have other words for what is taken over or killed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = |tokens: &Tokens| {
            let word = |(token, count): (&String, &i64)| match token.as_str() {
                "lost" => format!("taken over {count}"),
                token => format!("{token} {count}"),
            };
            tokens.iter().map(word).collect::<Vec<_>>().join("   ")
        };
        writeln!(f, "completions   {}   (late {})", words(&self.completions), self.late)?;
        for (consumer, tokens) in &self.deliveries {
            writeln!(f, "deliveries    {consumer:<16}{}", words(tokens))?;
        }
        for ledger in &self.consumers {
            let answers: Vec<_> = ledger.answers.iter().map(|(word, count)| format!("{word} {count}")).collect();
            writeln!(
                f,
                "consumer      {:<16}{} requests for {} keys; answered: {}",
                ledger.consumer,
                ledger.requests,
                ledger.keys,
                answers.join("   ")
            )?;
        }
        let absorbed = self.consumers.iter().filter_map(|ledger| ledger.answers.get("duplicate")).sum::<u64>();
        writeln!(f, "duplicates    {absorbed} absorbed by the consumers that dedup")?;
        writeln!(
            f,
            "doubt         {} deliveries had an ambiguous attempt; the consumer's own word resolved {}, a bare 2xx ended {}",
            self.doubts,
            self.doubts_resolved,
            self.doubts - self.doubts_resolved
        )?;
        writeln!(
            f,
            "relay         killed {} times; {} attempts it left without an outcome, made again",
            self.relay_kills, self.attempts_without_outcome
        )?;
        writeln!(f, "broker        {}", self.broker)?;
        writeln!(
            f,
            "workers       {} killed, {} paused past their lease; {} completions refused because the lease was gone",
            self.workers_killed, self.workers_paused, self.lease_losses_detected
        )?;
        writeln!(
            f,
            "speed         {:.1} s, {:.0} deliveries/s, commit to ledger p50 {:.0} ms, p99 {:.0} ms (kills included)",
            self.seconds, self.deliveries_per_second, self.latency_p50_ms, self.latency_p99_ms
        )?;
        writeln!(f, "{}", self.check)
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { promised, lost, unasked, not_applied, applied_twice, unfinished } = self;
        writeln!(
            f,
            "checked       {promised} promised deliveries against the consumers' own ledgers, byte for byte: \
             unasked {unasked}, not applied {not_applied}, applied twice {applied_twice}, unfinished {unfinished}"
        )?;
        write!(f, "lost {lost}")
    }
}

#[cfg(test)]
mod tests {
    use super::super::consumers::BILLING;
    use super::*;

    fn report() -> Report {
        Report {
            seconds: 12.3,
            completions: [("effects".into(), 9), ("lost".into(), 2)].into(),
            late: 1,
            deliveries: [(BILLING.into(), [("applied".into(), 9)].into())].into(),
            attempts_without_outcome: 4,
            doubts: 3,
            doubts_resolved: 2,
            relay_kills: 2,
            broker: "none".into(),
            workers_killed: 1,
            workers_paused: 1,
            lease_losses_detected: 3,
            consumers: Vec::new(),
            deliveries_per_second: 100.0,
            latency_p50_ms: 5.0,
            latency_p99_ms: 50.0,
            check: Check { promised: 9, lost: 0, unasked: 0, not_applied: 0, applied_twice: 0, unfinished: 0 },
        }
    }

    #[test]
    fn one_line_says_what_is_lost() {
        let text = report().to_string();
        let lines: Vec<_> = text.lines().filter(|line| line.contains("lost")).collect();
        assert_eq!(lines, ["lost 0"]);
    }

    #[test]
    fn a_report_is_good_only_if_nothing_is_wrong() {
        assert!(report().is_good());
        let wrong: [fn(&mut Check); 6] = [
            |check| check.promised = 0,
            |check| check.lost = 1,
            |check| check.unasked = 1,
            |check| check.not_applied = 1,
            |check| check.applied_twice = 1,
            |check| check.unfinished = 1,
        ];
        for spoil in wrong {
            let mut report = report();
            spoil(&mut report.check);
            assert!(!report.is_good(), "{:?}", report.check);
        }
    }
}
