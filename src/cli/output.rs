//! Printing: plain aligned tables for people, JSON for programs. Text that came from elsewhere is never trusted with
//! the terminal.

use std::fmt::Write as _;
use std::io::{self, Write as _};

use serde::Serialize;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    Text,
    Json,
}

impl Output {
    /// Prints `value` as JSON or `text` for people.
    pub fn print(self, value: &impl Serialize, text: impl FnOnce() -> String) -> io::Result<()> {
        let mut text = match self {
            Self::Json => serde_json::to_string_pretty(value)?,
            Self::Text => text(),
        };
        if !text.is_empty() && !text.ends_with('\n') {
            text.push('\n');
        }
        write(&text)
    }
}

/// Writes to stdout. A reader that went away (`| head`) is no failure.
pub fn write(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// Text as it can be shown: control characters, and those that hide or reorder others, are escaped.
pub fn plain(text: &str) -> String {
    let hidden = |c: char| {
        c.is_control()
            || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}' | '\u{e0000}'..='\u{e007f}')
    };
    text.chars().fold(String::with_capacity(text.len()), |mut out, c| {
        if hidden(c) {
            out.extend(c.escape_default())
        } else {
            out.push(c)
        }
        out
    })
}

/// Rows under headings, columns as wide as their widest cell. Cells are escaped here, so that no caller forgets it.
pub struct Table {
    headings: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new(headings: &[&'static str]) -> Self {
        Self { headings: headings.to_vec(), rows: Vec::new() }
    }

    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().map(|cell| plain(&cell)).collect());
    }

    /// The table, or `empty` where there are no rows.
    pub fn render(&self, empty: &str) -> String {
        if self.rows.is_empty() {
            return if empty.is_empty() { String::new() } else { format!("{empty}\n") };
        }
        let widths: Vec<usize> = (0..self.headings.len())
            .map(|n| {
                let cells = self.rows.iter().filter_map(|row| row.get(n)).map(|cell| cell.chars().count());
                cells.max().unwrap_or(0).max(self.headings[n].len())
            })
            .collect();
        let mut out = String::new();
        let headings: Vec<String> = self.headings.iter().map(|h| h.to_uppercase()).collect();
        for row in std::iter::once(&headings).chain(&self.rows) {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(&widths) {
                let _ = write!(line, "{cell:<width$}  ");
            }
            out.push_str(line.trim_end());
            out.push('\n');
        }
        out
    }
}

/// A length of time for people: `850ms`, `12s`, `3m20s`, `5h07m`, `2d04h`.
pub fn span(seconds: f64) -> String {
    let whole = seconds.max(0.0) as u64;
    match whole {
        0 => format!("{}ms", (seconds.max(0.0) * 1000.0) as u64),
        1..60 => format!("{whole}s"),
        60..3_600 => format!("{}m{:02}s", whole / 60, whole % 60),
        3_600..86_400 => format!("{}h{:02}m", whole / 3_600, whole % 3_600 / 60),
        _ => format!("{}d{:02}h", whole / 86_400, whole % 86_400 / 3_600),
    }
}

/// An optional value, or a dash.
pub fn or_dash<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".into(), |value| value.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_text_cannot_reach_the_terminal() {
        assert_eq!(plain("a\x1b[2Jb\nc\u{202e}d\u{9b}e"), "a\\u{1b}[2Jb\\nc\\u{202e}d\\u{9b}e");
        assert_eq!(plain("Grüße 中文"), "Grüße 中文");
        let mut table = Table::new(&["name"]);
        table.row(["x\x07\r".to_string()]);
        assert_eq!(table.render(""), "NAME\nx\\u{7}\\r\n");
    }

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(&["a", "long"]);
        table.row(["wide cell".into(), "1".into()]);
        table.row(["x".into(), "22".into()]);
        assert_eq!(table.render(""), "A          LONG\nwide cell  1\nx          22\n");
        assert_eq!(Table::new(&["a"]).render("nothing"), "nothing\n");
    }

    #[test]
    fn spans_read_well() {
        let cases =
            [(0.0, "0ms"), (0.85, "850ms"), (12.9, "12s"), (200.0, "3m20s"), (18_420.0, "5h07m"), (187_200.0, "2d04h")];
        for (seconds, text) in cases {
            assert_eq!(span(seconds), text);
        }
    }
}
