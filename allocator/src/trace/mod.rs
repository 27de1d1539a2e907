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

mod parse;
mod replay;

pub use parse::{Op, Trace};
pub use replay::{Outcome, ReplayOptions, replay};
