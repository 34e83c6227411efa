//! Messages that were out when a channel died. Any of them may have caused it, so each goes alone the next time: it takes
//! no other with it then, and is known by it.

use std::collections::HashSet;

/// The most that are remembered; beyond it only those of the last death are.
const MAX: usize = 4_096;

/// By message id.
#[derive(Default, Debug)]
pub struct Suspects(HashSet<String>);

impl Suspects {
    pub fn contains(&self, id: &str) -> bool {
        self.0.contains(id)
    }

    /// These were out when a channel died.
    pub fn remember(&mut self, died_with: HashSet<String>) {
        if self.0.len() + died_with.len() > MAX {
            self.0.clear();
        }
        self.0.extend(died_with);
    }

    /// It has come to its own end.
    pub fn clear(&mut self, id: &str) {
        self.0.remove(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_death_is_remembered_whatever_came_before() {
        let mut suspects = Suspects::default();
        let ids = |from: usize, to: usize| (from..to).map(|n| n.to_string()).collect();
        suspects.remember(ids(0, 4_000));
        suspects.remember(ids(4_000, 4_096));
        assert!(suspects.contains("0") && suspects.contains("4095"));
        suspects.remember(ids(5_000, 5_001));
        assert!(!suspects.contains("0") && suspects.contains("5000"));
        suspects.clear("5000");
        assert!(!suspects.contains("5000"));
    }
}
