//! Replaying traces.
/// x
#[derive(Debug)]
pub struct Outcome;
/// x
#[derive(Debug)]
pub struct ReplayOptions;
/// x
pub fn replay() {}
