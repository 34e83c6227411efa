//! `fencepost bench`: every row beside its ceiling. Exit code 1 where one falls short.

use super::global::Global;
use super::output::{Output, Table};
use super::{Exit, logging, output};
use crate::bench::{self, BenchOptions, Figure, chart::short};
use crate::config::LogFormat;

pub async fn run(global: &Global, options: BenchOptions) -> anyhow::Result<Exit> {
    logging::init(LogFormat::Text, "error");
    let chart = options.chart.clone();
    // Each figure as it comes, for whoever watches; the table, or the array, at the end.
    let (machine, figures) = bench::run(options, |figure| eprintln!("{}", line(figure).join("  "))).await?;
    eprintln!("{machine}\nchart: {}", chart.display());
    match global.output() {
        Output::Json => output::write(&format!("{}\n", serde_json::to_string_pretty(&figures)?))?,
        Output::Text => output::write(&table(&figures))?,
    }
    Ok(if figures.iter().all(|figure| figure.ok) { Exit::Done } else { Exit::Found })
}

fn table(figures: &[Figure]) -> String {
    let mut table = Table::new(&["what", "value", "unit", "ceiling", "ratio", "must", "ok", "note"]);
    for figure in figures {
        table.row(line(figure));
    }
    table.render("nothing was measured")
}

fn line(figure: &Figure) -> [String; 8] {
    let number = |value: Option<f64>| value.map_or_else(|| "-".into(), short);
    [
        figure.name.clone(),
        number(figure.value),
        figure.unit.into(),
        number(figure.ceiling),
        number(figure.ratio),
        figure.must.to_string(),
        if figure.ok { "yes".into() } else { "NO".into() },
        figure.note.clone().unwrap_or_default(),
    ]
}
