//! Which algorithm serves a call.
//!
//! | file | holds |
//! | --- | --- |
//! | `reduce_scatter`, `exchange` | the tables of built-in algorithms: what fits each, and how it is launched |
//! | `table` | what was measured on known devices |
//! | `rule` | which algorithm serves an all-reduce |
//! | `ready_kernels` | which kernels are ready before a communicator's first call |

pub(in crate::cuda) mod exchange;
pub(in crate::cuda) mod ready_kernels;
pub(in crate::cuda) mod reduce_scatter;
pub(in crate::cuda) mod rule;
pub(in crate::cuda) mod table;

use symmpool_allocator::Error;

use crate::algorithm::{AlgorithmId, StandardCollective};

/// The error of an algorithm that runs in host memory only, with those that devices have.
#[cold]
pub(in crate::cuda) fn not_here(
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
