//! Agreeing on a state again after a divergence.
