//! Lanes: sequences of allocations whose placement is a pure function of the sequence.
//!
//! Everything in this folder is arithmetic on offsets. No address, handle, clock, thread or hash
//! seed is visible here (rule D1), nothing is unsafe, and nothing waits. When physical memory or a
//! stream is needed, the pool lends a [`Backing`]. A lane does not know other ranks; what it learns
//! of them at a commit is how many have reported each deferred free (`deferred`), and at a resync
//! the state to return to (`rollback`).
//!
//! Start with `state`. The hardest files are `growth`, where memory is made and moved, `streams`
//! and `rollback`.
//!
//! | file | holds |
//! | --- | --- |
//! | `state` | the lane itself: alloc, free, record, reclaim |
//! | `config` | what a lane is built with |
//! | `backing` | what a lane needs from outside: memory and stream events |
//! | `growth` | how a lane gets memory from its backing, moves it and releases it (trim) |
//! | `segments` | physical segments: how large, where, which may move |
//! | `table` | the blocks: a slab, chained in address order |
//! | `free` | the free blocks of one stream, first fit |
//! | `split_merge` | splitting free blocks, and merging freed ones with their neighbours |
//! | `index` | from an offset to the block that begins there |
//! | `lookup` | the same for callers; which blocks may be freed by their address |
//! | `streams` | stream ordinals and waits between streams |
//! | `local_uses` | streams of this rank that use a block too, which are no part of the sequence |
//! | `uses` | a lane's calls about them |
//! | `deferred` | blocks freed without order, and how they return |
//! | `commit_trigger` | when deferred frees make a commit due |
//! | `lane_event` | the events of a lane's sequence |
//! | `history` | the event log: its digest and its most recent events |
//! | `rollback` | returning to a state that all ranks share |
//! | `site` | which line of a program an event comes from |
//! | `stats` | a lane's counts and sizes |
#![forbid(unsafe_code)]

mod backing;
mod commit_trigger;
mod config;
mod deferred;
mod free;
mod growth;
mod history;
mod index;
#[cfg(test)]
mod invariants;
mod lane_event;
mod local_uses;
mod lookup;
#[cfg(test)]
mod model_tests;
mod rollback;
mod segments;
mod site;
mod split_merge;
mod state;
mod stats;
mod streams;
mod table;
mod uses;

pub use crate::divergence::{Divergence, Side};
pub use backing::{Backing, NoBacking};
pub use config::{LaneConfig, LaneKind, MAX_LANE_BYTES, UNIT, WindowPolicy};
pub use history::Digest;
pub use lane_event::{EventKind, LaneEvent};
pub use segments::{Growth, Move, NewSegment, Segment};
pub use site::{Line, Origin, Site, at_site};
pub use state::{AllocationRequest, BlockKey, LaneState, Placed};
pub use stats::{ClassStats, LaneStats};
pub use table::{BlockState, BlockView};

pub(crate) use history::Checkpoints;
pub(crate) use rollback::{AgreedState, Survivor};
pub(crate) use site::here;
