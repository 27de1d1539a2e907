//! Which algorithm serves a call.
//!
//! | file | holds |
//! | --- | --- |
//! | `table` | what was measured on known devices |
//! | `rule` | which algorithm serves an all-reduce |
//! | `ready_kernels` | which kernels are ready before a communicator's first call |

pub(in crate::cuda) mod ready_kernels;
pub(in crate::cuda) mod rule;
pub(in crate::cuda) mod table;
