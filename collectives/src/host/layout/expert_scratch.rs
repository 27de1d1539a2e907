//! Memory that calls of experts use for themselves.

use super::expert_routing::Routing;

/// Scratch of calls, which is kept so that calls need not allocate.
#[derive(Debug, Default)]
pub(crate) struct ExpertScratch {
    pub(in crate::host) routing: Routing,
    pub(in crate::host) row: Vec<f32>,
    pub(in crate::host) sum: Vec<f32>,
    /// A row that is quantised, and its scales; or the sum of a token's rows on this rank.
    pub(in crate::host) bytes: Vec<u8>,
    pub(in crate::host) scales: Vec<u8>,
    pub(in crate::host) own: Vec<f32>,
}
