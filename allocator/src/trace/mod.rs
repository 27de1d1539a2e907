//! Allocation traces: one text format for tests, benchmarks and bug reports.
//!
//! A trace is CSV, plain or gzip, with the header `op,id,bytes,stream`:
//!
//! | op | id | bytes | stream |
//! | --- | --- | --- | --- |
//! | `alloc` | new name | size | ordinal of its stream (empty: 0) |
//! | `free`, `free_unordered` | name | - | - |
//! | `record` | name | - | ordinal of the stream it is used on |
//! | `commit`, `trim` | - | - | - |
//!
//! Columns marked `-` may hold anything or be empty; recorded traces repeat sizes there.
//!
//! | file | holds |
//! | --- | --- |
//! | `parse` | reading traces |
//! | `generate` | making random traces, and writing traces |
//! | `replay` | a replay on ranks that are threads, and its outcome |
//! | `rank` | one rank's part of a replay |
//! | `options` | the options of a replay |

mod generate;
mod options;
mod parse;
mod rank;
mod replay;
#[cfg(test)]
mod replay_tests;

pub use options::{ReplayDriver, ReplayOptions, Unordered};
pub use parse::{Trace, TraceOp};
pub use replay::{RankGroup, ReplayFailure, ReplayOutcome, replay, replay_with};
