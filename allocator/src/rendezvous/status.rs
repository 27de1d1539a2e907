//! The error that all ranks report when some of them failed.

use super::message::{Message, encode};
use crate::error::ErrorKind;
use crate::ranks::list;
use crate::{Error, Result};

/// The result of a rank's part in a step, in a form that can be sent to the others.
pub(crate) type RankStatus<T> = std::result::Result<T, ErrorKind>;

/// Encodes this rank's status in a step. If it is too long, that is encoded as this rank's failure: the
/// others would wait for a rank that sends nothing.
pub(crate) fn encode_status<T, M: Message>(
    message: fn(RankStatus<T>) -> M,
    status: RankStatus<T>,
) -> Result<Vec<u8>> {
    encode(&message(status)).or_else(|error| encode(&message(Err(error.kind().clone()))))
}

/// The error that every rank reports for the `failures` of one step, which all ranks know: the
/// same on each of them. `None` when there are none.
///
/// Failures that are often consequences of others come last: a lost peer may be one that failed and left,
/// and a timeout may be due to a lost peer. Among failures of one kind, that of the lowest rank is taken.
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
    // All ranks whose failures are of the same level as this one.
    let level = consequence(&kind);
    let failed = failures.iter().filter(|(_, kind)| consequence(kind) == level);
    let error = Error::from_kind(kind).naming(failed.map(|(rank, _)| *rank));
    Some(error.context(context))
}

/// The values of all ranks in one step, in rank order, if none of them failed; otherwise [`agreed`].
pub(crate) fn all_ok<T>(
    step: &str,
    all: impl IntoIterator<Item = RankStatus<T>>,
) -> Result<Vec<T>> {
    let (mut values, mut failures) = (Vec::new(), Vec::new());
    for (rank, status) in (0..).zip(all) {
        match status {
            Ok(value) => values.push(value),
            Err(kind) => failures.push((rank, kind)),
        }
    }
    agreed(step, &failures).map_or(Ok(values), Err)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde::{Deserialize, Serialize};

    use super::*;
    use crate::rendezvous::message::{MAX_PAYLOAD, decode};

    #[derive(Debug, Serialize, Deserialize)]
    struct Say(RankStatus<String>);

    impl Message for Say {
        const KIND: u16 = 0x7003;
        const NAME: &'static str = "say";
    }

    #[test]
    fn a_status_that_is_too_long_becomes_a_failure() {
        for long in [Ok("x".repeat(MAX_PAYLOAD)), Err(ErrorKind::Refused("x".repeat(MAX_PAYLOAD)))]
        {
            let Say(status) = decode(0, &encode_status(Say, long).unwrap()).unwrap();
            let kind = status.unwrap_err();
            assert!(matches!(&kind, ErrorKind::InvalidArgument(_)));
            assert!(kind.to_string().contains("a say message of "), "{kind}");
        }
        let Say(status) = decode(0, &encode_status(Say, Ok("short".into())).unwrap()).unwrap();
        assert_eq!(status.unwrap(), "short");
    }

    #[test]
    fn causes_come_before_consequences() {
        let lost = Error::peer_lost(vec![2], "gone").kind().clone();
        let late = Error::timeout("for it", Duration::from_secs(1), vec![1]).kind().clone();
        let cause = Error::out_of_memory("no memory").kind().clone();
        let error = agreed("commit", &[(0, late.clone()), (1, lost.clone()), (2, cause)]).unwrap();
        assert!(error.is_out_of_memory());
        assert_eq!(error.ranks(), [2]);
        assert_eq!(
            error.to_string(),
            "symmpool: rank 2 failed in commit (and so did 0, 1): no memory"
        );
        let lost = agreed("commit", &[(0, late), (1, lost)]).unwrap();
        assert!(lost.is_peer_lost() && lost.ranks() == [2], "{lost}");
        assert!(agreed("commit", &[]).is_none());
    }

    #[test]
    fn all_values_are_returned_or_the_failures() {
        let full = Error::out_of_memory("no memory").kind().clone();
        assert_eq!(all_ok("commit", [Ok(3), Ok(5)]).unwrap(), [3, 5]);
        let error = all_ok("commit", [Ok(3), Err(full)]).unwrap_err();
        assert_eq!(error.to_string(), "symmpool: rank 1 failed in commit: no memory");
    }
}
