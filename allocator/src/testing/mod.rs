//! What tests and benchmarks share.

mod splitmix;

pub(crate) use splitmix::Random;
