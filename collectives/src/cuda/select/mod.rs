//! Which algorithm serves a call.
//!
//! | file | holds |
//! | --- | --- |
//! | `constraints` | what decides which all-reduce can serve a call |
//! | `algorithms` | the built-in algorithms: what fits each, and how it is launched |
//! | `table` | what was measured on known devices |
//! | `rule` | which algorithm serves an all-reduce |

pub(in crate::cuda) mod algorithms;
pub(in crate::cuda) mod constraints;
pub(in crate::cuda) mod rule;
pub(in crate::cuda) mod table;
