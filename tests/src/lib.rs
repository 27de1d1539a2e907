//! Shared helpers of the multi-rank tests.
