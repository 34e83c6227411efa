//! Why a delivery has not ended: from what the database knows about it to words.

use serde::Serialize;

/// What bears on a delivery that has not ended.
#[derive(Clone, Debug, Default)]
pub struct Circumstances {
    pub place: Place,
    pub paused: bool,
    pub paused_reason: Option<String>,
    /// Why a relay cannot serve the consumer, or cannot reach it: the alarms that stand.
    pub unusable: Option<String>,
    pub shut: Option<String>,
    /// The consumer asked for no attempt before so many seconds from now.
    pub not_before_in: Option<f64>,
    pub shard: i16,
    /// A relay holds the shard, and its lease has not run out.
    pub shard_is_held: bool,
    /// The earliest delivery of the same key that waits before this one, with its token.
    pub head: Option<(String, String)>,
}

/// Where it is.
#[derive(Clone, Debug, Default)]
pub enum Place {
    /// No flight covers it yet.
    #[default]
    Unread,
    /// Its flight is open.
    InFlight {
        seq: i64,
        seconds: f64,
    },
    /// Its flight is closed, and its lane has still to read it.
    Lagging {
        seq: i64,
    },
    /// Its flight is closed, and there is neither fact nor parked row.
    Unaccounted {
        seq: i64,
    },
    Parked {
        state: String,
        next_in: Option<f64>,
        reason: Option<String>,
        replay: bool,
    },
}

/// One reason.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Why {
    /// For programs; stable.
    pub code: &'static str,
    pub text: String,
}

impl Circumstances {
    /// Every reason that applies, what an operator can do something about first.
    pub fn reasons(&self, span: impl Fn(f64) -> String) -> Vec<Why> {
        let mut reasons = Vec::new();
        let mut add = |code: &'static str, text: String| reasons.push(Why { code, text });
        let waits_for_operator =
            matches!(&self.place, Place::Parked { state, .. } if state == "in_doubt" || state == "dead");
        if !waits_for_operator {
            if self.paused {
                let why = self.paused_reason.as_deref().map(|reason| format!(" ({reason})")).unwrap_or_default();
                add("paused", format!("the consumer is paused{why}: fencepost consumers resume"));
            }
            if let Some(why) = &self.unusable {
                add("unusable", format!("a relay cannot use the consumer as it is declared: {why}"));
            }
            if let Some(why) = &self.shut {
                add("edge_shut", format!("a relay cannot reach the consumer: {why}"));
            }
            if !self.shard_is_held {
                add("no_relay", format!("no relay holds shard {}: fencepost run", self.shard));
            }
            if let Some(seconds) = self.not_before_in {
                add("not_before", format!("the consumer asked for no attempt for another {}", span(seconds)));
            }
        }
        if let (Some((key, token)), false) = (&self.head, waits_for_operator) {
            add("behind", format!("its key's turn has not come: {key} waits before it ({token})"));
        }
        match &self.place {
            Place::Unread => add("unread", "committed; no relay has read it yet".into()),
            Place::InFlight { seq, seconds } => {
                add(
                    "in_flight",
                    format!("in flight {seq}, open for {}: its first attempt is to come or under way", span(*seconds)),
                );
            }
            Place::Lagging { seq } => add("lagging", format!("its lane lags and has still to read flight {seq}")),
            Place::Unaccounted { seq } => {
                add(
                    "unaccounted",
                    format!("flight {seq} is closed and knows nothing of it: the reconciler will park it"),
                );
            }
            Place::Parked { state, next_in, reason, replay } => {
                let reason = reason.as_deref().map(|reason| format!(" ({reason})")).unwrap_or_default();
                let next = match next_in {
                    None => "no attempt is planned".into(),
                    Some(seconds) if *seconds <= 0.0 => "the next attempt is due".to_string(),
                    Some(seconds) => format!("the next attempt is due in {}", span(*seconds)),
                };
                match state.as_str() {
                    "retry" if *replay => add("replay", format!("an operator sends it again; {next}")),
                    "retry" => add("retry", format!("the last attempt did not end it{reason}; {next}")),
                    "scheduled" => add("scheduled", format!("it is scheduled; {next}")),
                    "blocked" => add("blocked", "its key is blocked".into()),
                    "backlog" => add("backlog", format!("it left the fast path{reason}; {next}")),
                    "unacked" => {
                        let overdue = match next_in {
                            Some(seconds) if *seconds > 0.0 => format!("overdue in {}", span(*seconds)),
                            _ => "overdue".to_string(),
                        };
                        add("unacked", format!("the broker has it, the consumer has not answered; {overdue}"));
                    }
                    "in_doubt" => add(
                        "in_doubt",
                        format!(
                            "an attempt may have taken effect{reason}: find out, then fencepost deliveries resolve"
                        ),
                    ),
                    _ => {
                        add("dead", format!("its budget is spent{reason}: fencepost deliveries retry, resolve or skip"))
                    }
                }
            }
        }
        reasons
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn codes(circumstances: &Circumstances) -> Vec<&'static str> {
        circumstances.reasons(|s| format!("{s}s")).into_iter().map(|why| why.code).collect()
    }

    fn parked(state: &str) -> Place {
        Place::Parked { state: state.into(), next_in: Some(3.0), reason: Some("503".into()), replay: false }
    }

    #[test]
    fn every_reason_that_applies_is_given() {
        let unread = Circumstances { shard: 3, ..Circumstances::default() };
        assert_eq!(codes(&unread), ["no_relay", "unread"]);
        let held = Circumstances { shard_is_held: true, place: parked("retry"), ..Circumstances::default() };
        assert_eq!(codes(&held), ["retry"]);
        let text = held.reasons(|s| format!("{s}s"))[0].text.clone();
        assert_eq!(text, "the last attempt did not end it (503); the next attempt is due in 3s");
        let shut = Circumstances {
            paused: true,
            not_before_in: Some(1.0),
            head: Some(("a:1".into(), "retry".into())),
            place: parked("blocked"),
            ..held
        };
        assert_eq!(codes(&shut), ["paused", "not_before", "behind", "blocked"]);
        let unserved = Circumstances { unusable: Some("x".into()), shut: Some("y".into()), paused: false, ..shut };
        assert_eq!(codes(&unserved), ["unusable", "edge_shut", "not_before", "behind", "blocked"]);
    }

    #[test]
    fn what_waits_for_an_operator_waits_for_nothing_else() {
        let dead = Circumstances { paused: true, place: parked("dead"), ..Circumstances::default() };
        assert_eq!(codes(&dead), ["dead"]);
    }
}
