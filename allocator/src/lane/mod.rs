//! Lanes: sequences of allocations whose placement is a pure function of the sequence.
//!
//! Everything in this folder is arithmetic on offsets. No address, handle, clock, thread or hash
//! seed is visible here (rule D1), nothing is unsafe, and nothing waits; the pool lends a
//! [`Backing`] for the moments when physical memory or a stream is needed.
//!
//! | file | holds |
//! | --- | --- |
//! | `state` | the lane itself: alloc, free, record, trim, reclaim, resync |
//! | `split_merge` | cutting ranges out of free blocks, and merging them back |
//! | `table` | the blocks: a slab, chained in address order |
//! | `free` | the free blocks of one stream, first fit |
//! | `deferred` | blocks freed without order, and how they come back |
//! | `commit_trigger` | when they are worth a commit |
//! | `index` | from an offset to the block that begins there |
//! | `lookup` | the same for callers; who may free a block by its address |
//! | `segments` | physical segments: how large, where, which may move |
//! | `rollback` | going back to a state all ranks share |
//! | `streams` | stream ordinals and waits between streams |
//! | `history` | the event log's digest and its recent past |
//! | `site` | which line of a program an event comes from |
//! | `divergence` | what is said when ranks differ |
#![forbid(unsafe_code)]

mod commit_trigger;
mod config;
mod deferred;
mod divergence;
mod free;
mod growth;
mod history;
mod index;
#[cfg(test)]
mod invariants;
mod lane_event;
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

pub use config::{LaneConfig, LaneKind, MAX_LANE_BYTES, UNIT, WindowPolicy};
pub use divergence::{Divergence, Side};
pub use history::Digest;
pub use lane_event::{Event, EventKind};
pub use segments::{Growth, Move, NewSegment, Segment};
pub use site::{Line, Origin, Site, at_site};
pub use state::{Backing, BlockKey, LaneState, NoBacking, Placed, Request};
pub use stats::{ClassStats, LaneStats};
pub use table::{BlockState, BlockView};

pub(crate) use history::Checkpoints;
pub(crate) use rollback::{Agreed, Survivor};
pub(crate) use site::here;
