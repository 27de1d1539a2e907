//! Memory that calls of experts use for themselves.

use super::expert_routing::Routing;

/// Scratch of calls, which is kept so that calls need not allocate.
#[derive(Debug, Default)]
pub(crate) struct ExpertScratch {
    pub(crate) routing: Routing,
    /// Elements of a row that is quantised, that row, and its scales.
    pub(crate) row: Vec<f32>,
    pub(crate) bytes: Vec<u8>,
    pub(crate) scales: Vec<u8>,
    /// Room for the sum of a token's rows on this rank.
    pub(crate) own: Vec<f32>,
}
