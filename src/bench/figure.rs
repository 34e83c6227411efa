//! One line of the table: what was measured, beside what, and whether it is enough.

use serde::{Serialize, Serializer};

use super::ceiling::Ceiling;

/// What a figure must reach.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Must {
    /// The value is at least so much of the ceiling.
    RatioAtLeast(f64),
    /// The value is at most so much of the baseline.
    RatioAtMost(f64),
    ValueAtMost(f64),
    /// Context.
    Nothing,
}

/// A measured figure. `None` where the run could not be trusted: its ceiling itself varied too much.
#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    pub name: String,
    pub value: Option<f64>,
    pub unit: &'static str,
    pub ceiling: Option<f64>,
    pub ratio: Option<f64>,
    #[serde(serialize_with = "in_words")]
    pub must: Must,
    pub ok: bool,
    /// Why there is no value, or what else belongs beside it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

impl Figure {
    /// A value beside what bounds it.
    pub fn beside(name: impl Into<String>, unit: &'static str, value: f64, ceiling: f64, must: Must) -> Self {
        let ratio = value / ceiling;
        let ok = must.holds(value, Some(ratio));
        let (value, ceiling, ratio) = (Some(value), Some(ceiling), Some(ratio));
        Self { name: name.into(), value, unit, ceiling, ratio, must, ok, note: None }
    }

    /// A value beside what was measured before and after it; refused where the two say that the machine was busy.
    pub fn between(name: impl Into<String>, unit: &'static str, value: f64, ceiling: Ceiling, must: Must) -> Self {
        match ceiling.steady() {
            Ok(ceiling) => Self::beside(name, unit, value, ceiling, must),
            Err(why) => Self::refused(name, unit, must, format!("{why}; measured {value:.2}")),
        }
    }

    /// A value with nothing beside it.
    pub fn alone(name: impl Into<String>, unit: &'static str, value: f64, must: Must) -> Self {
        let ok = must.holds(value, None);
        Self { name: name.into(), value: Some(value), unit, ceiling: None, ratio: None, must, ok, note: None }
    }

    /// The run is refused.
    pub fn refused(name: impl Into<String>, unit: &'static str, must: Must, why: String) -> Self {
        let note = Some(format!("not measurable: {why}"));
        Self { name: name.into(), value: None, unit, ceiling: None, ratio: None, must, ok: false, note }
    }

    pub fn noting(mut self, note: impl Into<String>) -> Self {
        let note = note.into();
        self.note = Some(match self.note {
            Some(before) => format!("{before}; {note}"),
            None => note,
        });
        self
    }
}

impl Must {
    fn holds(self, value: f64, ratio: Option<f64>) -> bool {
        match self {
            Self::RatioAtLeast(least) => ratio.is_some_and(|ratio| ratio >= least),
            Self::RatioAtMost(most) => ratio.is_some_and(|ratio| ratio <= most),
            Self::ValueAtMost(most) => value <= most,
            Self::Nothing => true,
        }
    }
}

impl std::fmt::Display for Must {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::RatioAtLeast(least) => write!(f, "ratio >= {least:.2}"),
            Self::RatioAtMost(most) => write!(f, "ratio <= {most:.2}"),
            Self::ValueAtMost(most) => write!(f, "<= {most}"),
            Self::Nothing => write!(f, "-"),
        }
    }
}

fn in_words<S: Serializer>(must: &Must, serializer: S) -> Result<S::Ok, S::Error> {
    match must {
        Must::Nothing => serializer.serialize_none(),
        must => serializer.collect_str(must),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_knows_whether_it_is_enough() {
        assert!(Figure::beside("rate", "/s", 61.0, 100.0, Must::RatioAtLeast(0.6)).ok);
        assert!(!Figure::beside("rate", "/s", 59.0, 100.0, Must::RatioAtLeast(0.6)).ok);
        assert!(!Figure::beside("p50", "ms", 1.6, 1.0, Must::RatioAtMost(1.5)).ok);
        assert!(Figure::alone("wal", "B", 260.0, Must::ValueAtMost(260.0)).ok);
        assert!(!Figure::refused("rate", "/s", Must::RatioAtLeast(0.6), "it varied".into()).ok);
    }

    #[test]
    fn json_has_the_promised_fields() {
        let figure = Figure::beside("rate", "/s", 1.0, 2.0, Must::RatioAtLeast(0.5));
        let json = serde_json::to_value(&figure).unwrap();
        assert_eq!(
            json,
            serde_json::json!({
                "name": "rate", "value": 1.0, "unit": "/s", "ceiling": 2.0, "ratio": 0.5, "must": "ratio >= 0.50", "ok": true
            })
        );
    }
}
