//! Allocation traces: one text format that is a test, a benchmark and a bug report at once.
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

//! | file | holds |
//! | --- | --- |
//! | `parse` | reading |
//! | `generate` | making random ones, and writing |
//! | `replay` | a replay on ranks that are threads, and what came of it |
//! | `rank` | one rank's part of a replay |
//! | `options` | what a replay is made with |
//! | `random` | random numbers that are the same everywhere |

mod generate;
mod options;
mod parse;
mod random;
mod rank;
mod replay;
#[cfg(test)]
mod replay_tests;

pub use options::{ReplayDriver, ReplayOptions, Unordered};
pub use parse::{Op, Trace};
pub use replay::{Failure, Outcome, Told, replay, replay_with};
