//! The error of an algorithm that devices do not have.

use symmpool_allocator::Error;

use super::{AlgorithmId, StandardCollective};

/// The error of an algorithm that runs in host memory only, with those that devices have.
#[cold]
pub(crate) fn not_on_devices(
    collective: StandardCollective,
    id: AlgorithmId,
    all: impl IntoIterator<Item = AlgorithmId>,
) -> Error {
    let all: Vec<&str> = all.into_iter().map(|id| id.label(collective)).collect();
    Error::unsupported(format!(
        "the {} algorithm {}: it runs in host memory only; on devices there are {}",
        collective.in_words(),
        id.label(collective),
        all.join(", ")
    ))
}
