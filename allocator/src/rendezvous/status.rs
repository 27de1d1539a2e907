//! One error out of many: what all ranks report when some of them failed.

use crate::Error;
use crate::error::{ErrorKind, list};

/// How a rank fared, in a form it can tell the others.
pub(crate) type Status<T> = Result<T, ErrorKind>;

/// The error that every rank reports for the `failures` of one step, which all ranks know: the
/// same on each of them. `None` when there are none.
///
/// Failures that follow from others come last: a lost peer is often one that failed and left, and
/// a timeout often means that somebody else was lost. Among equals the lowest rank speaks.
pub(crate) fn agreed(step: &str, failures: &[(u32, ErrorKind)]) -> Option<Error> {
    let consequence = |kind: &ErrorKind| match kind {
        ErrorKind::PeerLost { .. } => 1,
        ErrorKind::Timeout { .. } => 2,
        _ => 0,
    };
    let (rank, kind) =
        failures.iter().min_by_key(|(rank, kind)| (consequence(kind), *rank))?.clone();
    let also: Vec<u32> =
        failures.iter().map(|&(other, _)| other).filter(|&other| other != rank).collect();
    let mut context = format!("rank {rank} failed in {step}");
    if !also.is_empty() {
        context.push_str(&format!(" (and so did {})", list(&also)));
    }
    Some(Error::from_kind(kind).context(context))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn causes_speak_before_consequences() {
        let lost = Error::peer_lost(vec![2], "gone").kind().clone();
        let late = Error::timeout("for it", Duration::from_secs(1), vec![1]).kind().clone();
        let cause = Error::out_of_memory("no memory").kind().clone();
        let error = agreed("commit", &[(0, late.clone()), (1, lost.clone()), (2, cause)]).unwrap();
        assert!(error.is_out_of_memory());
        assert_eq!(
            error.to_string(),
            "symmpool: rank 2 failed in commit (and so did 0, 1): no memory"
        );
        assert!(agreed("commit", &[(0, late), (1, lost)]).unwrap().is_peer_lost());
        assert!(agreed("commit", &[]).is_none());
    }
}
