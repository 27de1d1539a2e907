//! Memory that calls of experts use for themselves.

use super::expert_routing::Routing;

/// Scratch of calls, which is kept so that calls need not allocate.
#[derive(Debug, Default)]
pub(crate) struct ExpertScratch {
    pub(crate) routing: Routing,
    pub(crate) row: Vec<f32>,
    pub(crate) sum: Vec<f32>,
    /// A row that is quantised, and its scales; or the sum of a token's rows on this rank.
    pub(crate) bytes: Vec<u8>,
    pub(crate) scales: Vec<u8>,
    pub(crate) own: Vec<f32>,
}
