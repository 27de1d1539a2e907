//! The first step of a commit: what each rank proposes, and what follows from all proposals.
//!
//! Usually all proposals are equal, byte for byte, because they hold only digests and counters. Segments
//! are not listed, as their places follow from the sequence that the digest stands for. So a commit's
//! traffic does not grow with the number of segments, and the answer of a store that sends equal parts once
//! does not grow with the world either.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::message::{Message, decode};
use super::status::{RankStatus, agreed};
use crate::error::ErrorKind;
use crate::lane::Digest;
use crate::store::Gathered;
use crate::{Error, Result};

/// Where one symmetric lane of one rank stands.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct LaneProposal {
    pub(crate) counter: u64,
    pub(crate) digest: Digest,
    /// Counters of unordered frees that this rank has not reported in an earlier commit, ascending.
    pub(crate) freed: Vec<u64>,
    /// A failure of this rank, and at which counter.
    pub(crate) failure: Option<(u64, ErrorKind)>,
}

/// Proposal of a rank for a commit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Proposal {
    /// Number of the commit.
    pub(crate) round: u64,
    /// The symmetric lanes, in the order of the configuration.
    pub(crate) lanes: Vec<LaneProposal>,
}

/// The message: a proposal, or why this rank cannot make one.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Propose(pub(crate) RankStatus<Proposal>);

impl Message for Propose {
    const KIND: u16 = 3;
    const NAME: &'static str = "proposal";
}

/// Counters of freed blocks, ascending, with the number of ranks that reported each.
pub(crate) type ReportedFrees = Vec<(u64, u32)>;

/// Result of the proposals of all ranks.
#[derive(Debug, PartialEq)]
pub(crate) enum CommitVerdict {
    /// All lanes agree. For each, the unordered frees that were reported.
    Agreed(Vec<ReportedFrees>),
    /// A lane went different ways.
    Differs {
        /// Its index.
        lane: usize,
        /// The failures of single ranks, and at which counter: they may be the reason.
        failures: Vec<(u32, (u64, ErrorKind))>,
    },
}

/// Comes to the same verdict, or the same error, on every rank.
pub(crate) fn judge(gathered: &Gathered) -> Result<CommitVerdict> {
    let mut distinct = Vec::with_capacity(gathered.distinct().len());
    for (at, part) in gathered.distinct().iter().enumerate() {
        let rank = first_rank(gathered, at);
        distinct.push((rank, decode::<Propose>(rank, part)?.0));
    }
    let failures = || {
        gathered.which().iter().zip(0..).filter_map(|(&at, rank)| {
            let (_, status) = &distinct[at as usize];
            status.as_ref().err().map(|kind| (rank, kind.clone()))
        })
    };
    if let Some(error) = agreed("commit", &failures().collect::<Vec<_>>()) {
        return Err(error);
    }
    let proposals: Vec<(u32, &Proposal)> =
        distinct.iter().filter_map(|(rank, status)| Some((*rank, status.as_ref().ok()?))).collect();
    let (_, first) = proposals[0];
    for (rank, other) in &proposals {
        if other.round != first.round || other.lanes.len() != first.lanes.len() {
            return Err(Error::mismatch(format!(
                "rank 0 is at commit {} with {} symmetric lanes, rank {rank} at commit {} with {}; \
                 every rank must call commit the same number of times",
                first.round,
                first.lanes.len(),
                other.round,
                other.lanes.len()
            ))
            .naming([*rank]));
        }
    }
    for lane in 0..first.lanes.len() {
        let place = |proposal: &Proposal| {
            let LaneProposal { counter, digest, .. } = proposal.lanes[lane];
            (counter, digest)
        };
        if proposals.iter().all(|(_, other)| place(other) == place(first)) {
            continue;
        }
        let failures = gathered.which().iter().zip(0..).filter_map(|(&at, rank)| {
            let proposal = distinct[at as usize].1.as_ref().ok()?;
            Some((rank, proposal.lanes[lane].failure.clone()?))
        });
        return Ok(CommitVerdict::Differs { lane, failures: failures.collect() });
    }
    let mut ranks = vec![0; distinct.len()];
    gathered.which().iter().for_each(|&at| ranks[at as usize] += 1);
    let reported = (0..first.lanes.len()).map(|lane| reported_frees(&proposals, &ranks, lane));
    Ok(CommitVerdict::Agreed(reported.collect::<Result<_>>()?))
}

/// The lowest rank that contributed this part.
fn first_rank(gathered: &Gathered, part: usize) -> u32 {
    gathered.which().iter().position(|&at| at as usize == part).unwrap_or(0) as u32
}

/// The unordered frees of a lane that were reported, and by how many ranks (rule D5). `ranks` holds how many
/// ranks made each of `proposals`.
fn reported_frees(
    proposals: &[(u32, &Proposal)],
    ranks: &[u32],
    lane: usize,
) -> Result<ReportedFrees> {
    let mut reported = BTreeMap::<u64, u32>::new();
    for ((rank, proposal), ranks) in proposals.iter().zip(ranks) {
        let freed = &proposal.lanes[lane].freed;
        // A counter that comes twice would count as the report of another rank.
        if !freed.is_sorted_by(|a, b| a < b) {
            return Err(Error::mismatch(format!(
                "rank {rank} reported freed blocks of lane {lane} out of order or twice"
            ))
            .naming([*rank]));
        }
        freed.iter().for_each(|counter| *reported.entry(*counter).or_default() += ranks);
    }
    Ok(reported.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rendezvous::message::encode;

    fn lane(counter: u64, digest: u64, freed: &[u64]) -> LaneProposal {
        LaneProposal { counter, digest, freed: freed.to_vec(), failure: None }
    }

    fn gather(proposals: Vec<RankStatus<Proposal>>) -> Gathered {
        Gathered::from_parts(proposals.into_iter().map(|status| encode(&Propose(status)).unwrap()))
    }

    fn propose(lanes: Vec<LaneProposal>) -> RankStatus<Proposal> {
        Ok(Proposal { round: 7, lanes })
    }

    #[test]
    fn every_freed_block_is_reported_with_the_number_of_ranks_that_freed_it() {
        // D5
        let verdict = judge(&gather(vec![
            propose(vec![lane(9, 1, &[1, 4, 6]), lane(0, 0, &[])]),
            propose(vec![lane(9, 1, &[4, 6, 8]), lane(0, 0, &[])]),
            propose(vec![lane(9, 1, &[1, 4, 6]), lane(0, 0, &[])]),
            propose(vec![lane(9, 1, &[2, 4]), lane(0, 0, &[])]),
        ]));
        let reported = vec![(1, 2), (2, 1), (4, 4), (6, 3), (8, 1)];
        assert_eq!(verdict.unwrap(), CommitVerdict::Agreed(vec![reported, vec![]]));
    }

    #[test]
    fn no_rank_reports_a_block_twice() {
        for freed in [[4, 4], [6, 4]] {
            let twice = vec![propose(vec![lane(9, 1, &[4, 6])]), propose(vec![lane(9, 1, &freed)])];
            let error = judge(&gather(twice)).unwrap_err();
            assert!(error.is_diverged() && error.to_string().contains("rank 1"), "{error}");
        }
    }

    #[test]
    fn the_first_lane_that_differs_is_named() {
        let verdict = judge(&gather(vec![
            propose(vec![lane(9, 1, &[]), lane(3, 5, &[])]),
            propose(vec![lane(9, 1, &[]), lane(3, 6, &[])]),
        ]));
        assert_eq!(verdict.unwrap(), CommitVerdict::Differs { lane: 1, failures: vec![] });
    }

    #[test]
    fn a_failure_of_one_rank_is_the_error_of_all() {
        let mut failed = lane(8, 2, &[]);
        let kind = Error::out_of_memory("no memory").kind().clone();
        failed.failure = Some((8, kind.clone()));
        let lanes = vec![propose(vec![lane(9, 1, &[])]), propose(vec![failed.clone()])];
        let failures = vec![(1, (8, kind.clone()))];
        assert_eq!(judge(&gather(lanes)).unwrap(), CommitVerdict::Differs { lane: 0, failures });
        // All ranks failed alike: nothing differs.
        let lanes = vec![propose(vec![failed.clone()]), propose(vec![failed])];
        assert_eq!(judge(&gather(lanes)).unwrap(), CommitVerdict::Agreed(vec![vec![]]));
        let error = judge(&gather(vec![propose(vec![]), Err(kind)])).unwrap_err();
        assert!(error.to_string().contains("rank 1 failed in commit"), "{error}");
    }

    #[test]
    fn ranks_at_different_commits_are_named() {
        let late = Ok(Proposal { round: 8, lanes: vec![] });
        let error = judge(&gather(vec![propose(vec![]), propose(vec![]), late])).unwrap_err();
        assert!(error.is_diverged());
        assert!(error.to_string().contains("rank 2 at commit 8"), "{error}");
    }
}
