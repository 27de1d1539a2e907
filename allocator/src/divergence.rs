//! The report of the first event at which ranks differ.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The first event at which the ranks' sequences of a lane differ. The same on every rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Divergence {
    /// The lane.
    pub lane: String,
    /// The number of the first differing event or, if the history does not reach back far enough, of an
    /// event that is not after it.
    pub counter: u64,
    /// `Some(last)` if the first differing event is only known to lie in `counter..=last`.
    pub until: Option<u64>,
    /// Ranks grouped by their event: one entry for each group that did the same. The largest group is first; of
    /// equally large groups, the one with the lowest rank.
    pub sides: Vec<Side>,
}

/// Ranks that did the same thing at the event in question.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Side {
    /// The ranks, ascending.
    pub ranks: Vec<u32>,
    /// Description of their event.
    pub did: String,
    /// The line of the program that did it, on the lowest of these ranks.
    pub site: Option<String>,
}

impl Divergence {
    /// The ranks that differ from the largest group.
    pub fn ranks(&self) -> &[u32] {
        self.sides.get(1).map_or(&[], |side| &side.ranks)
    }
}

impl fmt::Display for Divergence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ranks diverged in lane {:?} at event {}", self.lane, self.counter)?;
        if let Some(until) = self.until {
            write!(f, " or later, at most {until} (older than the lane's history)")?;
        }
        for side in &self.sides {
            let ranks = crate::ranks::list(&side.ranks);
            let plural = if side.ranks.len() == 1 { "" } else { "s" };
            write!(f, "\n  rank{plural} {ranks}: {}", side.did)?;
            if let Some(site) = &side.site {
                write!(f, "   (called from {site})")?;
            }
        }
        f.write_str("\n  Nothing was mapped; the pool is usable after resync().")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_message_names_every_group_of_ranks() {
        let divergence = Divergence {
            lane: "default".into(),
            counter: 1734,
            until: None,
            sides: vec![
                Side {
                    ranks: vec![0, 1, 3],
                    did: "alloc 8 MiB on stream 0".into(),
                    site: Some("model.py:212".into()),
                },
                Side { ranks: vec![2], did: "alloc 6 MiB on stream 0".into(), site: None },
            ],
        };
        assert_eq!(
            divergence.to_string(),
            "ranks diverged in lane \"default\" at event 1734\
             \n  ranks 0, 1, 3: alloc 8 MiB on stream 0   (called from model.py:212)\
             \n  rank 2: alloc 6 MiB on stream 0\
             \n  Nothing was mapped; the pool is usable after resync()."
        );
        assert_eq!(divergence.ranks(), [2]);
    }
}
