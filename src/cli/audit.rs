//! `fencepost audit`: proves that nothing of a time range is without an end or a reason; names every hole.

use std::collections::BTreeMap;

use super::global::Global;
use super::output::{Table, plain};
use super::{Exit, Usage};
use crate::model::duration;
use crate::store::proof::{self, Moment, Proof};

#[derive(clap::Args, Debug)]
pub struct Args {
    /// From here on: so long ago (24h), or a time (2026-01-31T08:00:00Z) [default: everything that is kept].
    #[arg(long, value_parser = moment, value_name = "TIME")]
    since: Option<Moment>,
    /// Up to here, but without it [default: now].
    #[arg(long, value_parser = moment, value_name = "TIME")]
    until: Option<Moment>,
}

fn moment(text: &str) -> Result<Moment, String> {
    if let Some(ago) = duration::parse(text) {
        return Ok(Moment::Ago(ago));
    }
    match text.trim() {
        "" => Err("a length of time such as 24h, or a time such as 2026-01-31T08:00:00Z".into()),
        time => Ok(Moment::At(time.into())),
    }
}

pub async fn run(global: &Global, args: Args) -> anyhow::Result<Exit> {
    let mut client = global.session().await?;
    let proof = proof::load(&mut client, args.since.as_ref(), args.until.as_ref()).await.map_err(|error| {
        // Class 22: a time that PostgreSQL cannot read, or an end before the beginning.
        match error.sqlstate() {
            Some(state) if state.code().starts_with("22") => {
                anyhow::Error::from(Usage(format!("--since or --until: {error}; write 24h, or 2026-01-31T08:00:00Z")))
            }
            _ => error.into(),
        }
    })?;
    global.output().print(&proof, || render(&proof))?;
    Ok(if proof.holds() { Exit::Done } else { Exit::Found })
}

fn render(proof: &Proof) -> String {
    let since = if proof.since == "-infinity" { "the beginning" } else { &proof.since };
    let until = if proof.until == "infinity" { "now" } else { &proof.until };
    let mut text = format!("from {since} up to {until}\n\n");
    for (what, tokens) in [
        ("completions", &proof.completions),
        ("deliveries ended", &proof.ended),
        ("deliveries waiting", &proof.waiting),
        ("attempts recorded", &proof.attempts),
    ] {
        text.push_str(&format!("{what:<20}{}\n", words(tokens)));
    }
    text.push_str(&format!("{:<20}{}\n\n", "effects", proof.effects));
    if proof.holds() {
        text.push_str("no hole: every effect has ended or waits with a reason, and no attempt is without a token\n");
        return text;
    }
    let mut table = Table::new(&["hole", "of", "what is wrong"]);
    for hole in &proof.holes {
        table.row([hole.kind.into(), hole.object.clone(), hole.detail.clone()]);
    }
    text.push_str(&table.render(""));
    let total: i64 = proof.holes_by_kind.values().sum();
    text.push_str(&format!("\n{total} holes"));
    if total > proof.holes.len() as i64 {
        text.push_str(&format!(", of which {} are named here", proof.holes.len()));
    }
    text.push('\n');
    text
}

fn words(tokens: &BTreeMap<String, i64>) -> String {
    if tokens.is_empty() {
        return "none".into();
    }
    tokens.iter().map(|(token, count)| format!("{} {count}", plain(token))).collect::<Vec<_>>().join("   ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_is_a_length_or_a_time() {
        assert_eq!(moment("24h"), Ok(Moment::Ago(std::time::Duration::from_secs(86_400))));
        assert_eq!(moment("2026-01-31"), Ok(Moment::At("2026-01-31".into())));
        assert!(moment(" ").is_err());
    }
}
