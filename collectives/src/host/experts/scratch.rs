//! Memory that calls of experts use for themselves.

use super::routing::Routing;

/// What calls use for themselves; it is kept so that calls need not allocate.
#[derive(Debug, Default)]
pub(crate) struct ExpertScratch {
    pub(super) routing: Routing,
    pub(super) row: Vec<f32>,
    pub(super) sum: Vec<f32>,
    /// A row that is quantised, and its scales; or the sum of a token's rows on this rank.
    pub(super) bytes: Vec<u8>,
    pub(super) scales: Vec<u8>,
    pub(super) own: Vec<f32>,
}
