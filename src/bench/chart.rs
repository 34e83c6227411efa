//! The chart: one bar per figure, as long as its ratio, with a mark at what it must reach.

use std::fmt::Write as _;

use super::figure::{Figure, Must};
use super::machine::Machine;

const LEFT: f64 = 330.0;
const WIDTH: f64 = 420.0;
const LINE: f64 = 26.0;
const TOP: f64 = 64.0;
/// The ratio at the right edge.
const SCALE: f64 = 2.0;

/// An SVG of everything that has a bound.
pub fn svg(machine: &Machine, figures: &[Figure]) -> String {
    let shown: Vec<&Figure> = figures.iter().filter(|figure| figure.must != Must::Nothing).collect();
    let height = TOP + LINE * shown.len() as f64 + 16.0;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 960 {height}\" font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"960\" height=\"{height}\" fill=\"#fff\"/>\n\
         <text x=\"16\" y=\"24\" font-size=\"16\">fencepost beside its ceilings</text>\n\
         <text x=\"16\" y=\"44\" fill=\"#666\" font-size=\"11\">{}</text>\n",
        escaped(&machine.to_string())
    );
    for (n, figure) in shown.iter().enumerate() {
        bar(&mut out, TOP + LINE * n as f64, figure);
    }
    out.push_str("</svg>\n");
    out
}

fn bar(out: &mut String, y: f64, figure: &Figure) {
    let (share, mark) = share_and_mark(figure);
    let at = |ratio: f64| LEFT + WIDTH * (ratio / SCALE).clamp(0.0, 1.0);
    let color = if figure.ok { "#2f7d4f" } else { "#b3392f" };
    let _ = writeln!(
        out,
        "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>",
        LEFT - 10.0,
        y + 14.0,
        escaped(&figure.name)
    );
    if let Some(share) = share {
        let _ = writeln!(
            out,
            "<rect x=\"{LEFT}\" y=\"{y}\" width=\"{:.1}\" height=\"18\" fill=\"{color}\"/>",
            at(share) - LEFT
        );
    }
    if let Some(mark) = mark {
        let x = at(mark);
        let _ = writeln!(
            out,
            "<line x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{}\" y2=\"{}\" stroke=\"#222\" stroke-width=\"2\"/>",
            y - 2.0,
            y + 20.0
        );
    }
    let text = match (figure.value, figure.ratio) {
        (Some(value), Some(ratio)) => format!("{ratio:.2} ({} {})", short(value), figure.unit),
        (Some(value), None) => format!("{} {} ({})", short(value), figure.unit, figure.must),
        (None, _) => "not measurable".into(),
    };
    let _ = writeln!(
        out,
        "<text x=\"{}\" y=\"{}\" fill=\"{color}\">{}</text>",
        LEFT + WIDTH + 10.0,
        y + 14.0,
        escaped(&text)
    );
}

/// How long the bar is and where its bound lies; a bare value is shown as a share of its bound.
fn share_and_mark(figure: &Figure) -> (Option<f64>, Option<f64>) {
    match figure.must {
        Must::RatioAtLeast(bound) | Must::RatioAtMost(bound) => (figure.ratio, Some(bound)),
        Must::ValueAtMost(bound) => (figure.value.map(|value| value / bound.max(1.0)), Some(1.0)),
        Must::Nothing => (None, None),
    }
}

/// A value with as many digits as it is worth.
pub fn short(value: f64) -> String {
    match value.abs() {
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
