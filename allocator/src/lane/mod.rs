//! Lanes: sequences of allocations whose placement is a pure function of the sequence.
//!
//! Everything in this folder is arithmetic on offsets. No address, handle, clock, thread or hash
//! seed is visible here (rule D1), nothing is unsafe, and nothing waits; the pool lends a
//! [`Backing`] for the moments when physical memory or a stream is needed.
//!
//! | file | holds |
//! | --- | --- |
//! | `state` | the lane itself: alloc, free, record, trim, reclaim, resync |
//! | `place` | cutting ranges out of free blocks, and merging them back |
//! | `table` | the blocks: a slab, chained in address order |
//! | `free` | the free blocks of one stream, first fit |
//! | `aside` | blocks freed without order, and how they come back |
//! | `turnover` | when they are worth a commit |
//! | `index` | from an offset to the block that begins there |
//! | `by_address` | the same for callers; who may free a block by its address |
//! | `segments` | physical segments: how large, where, which may move |
//! | `resync` | going back to a state all ranks share |
//! | `streams` | stream ordinals and waits between streams |
//! | `history` | the event log's digest and its recent past |
//! | `site` | which line of a program an event comes from |
//! | `divergence` | what is said when ranks differ |
#![forbid(unsafe_code)]

mod aside;
mod by_address;
mod config;
mod divergence;
mod event;
mod free;
mod growth;
mod history;
mod index;
#[cfg(test)]
mod invariants;
#[cfg(test)]
mod model_tests;
mod place;
mod resync;
mod segments;
mod site;
mod state;
mod stats;
mod streams;
mod table;
mod turnover;

pub use config::{LaneConfig, LaneKind, MAX_LANE_BYTES, UNIT, WindowPolicy};
pub use divergence::{Divergence, Side};
pub use event::{Event, EventKind};
pub use history::Digest;
pub use segments::{Growth, Move, NewSegment, Segment};
pub use site::{Line, Origin, Site, at_site};
pub use state::{Backing, BlockKey, LaneState, NoBacking, Placed, Request};
pub use stats::{ClassStats, LaneStats};
pub use table::{BlockState, BlockView};

pub(crate) use history::Checkpoints;
pub(crate) use resync::{Agreed, Survivor};
pub(crate) use site::here;
