//! Lanes.
#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};

/// Placeholder until the lane lands.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Divergence {}
impl Divergence {
    /// Ranks.
    pub fn ranks(&self) -> &[u32] {
        &[]
    }
}
impl std::fmt::Display for Divergence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("diverged")
    }
}
