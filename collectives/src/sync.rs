//! Faults that models of what threads and processes share must notice. There are none outside of unit tests.

#[cfg(not(test))]
use std::sync::atomic::Ordering;

#[cfg(test)]
pub(crate) use symmpool_allocator::models::{mutant, weakened};

/// Whether a model runs with the fault of this name. It never does outside of unit tests.
#[cfg(not(test))]
#[inline(always)]
pub(crate) const fn mutant(_name: &str) -> bool {
    false
}

/// `order`, which the fault of this name makes relaxed.
#[cfg(not(test))]
#[inline(always)]
pub(crate) const fn weakened(_name: &str, order: Ordering) -> Ordering {
    order
}
