//! Symmetric memory for several ranks: "the same" buffer at the same offset of every rank's heap.

#![deny(unsafe_code)]

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!(
    "symmpool runs on 64-bit Linux: ranks share memory by its memfd, and wait by its futex"
);

mod blocking;
mod byte_size;
mod deadline;
mod descriptors;
mod divergence;
pub mod driver;
mod error;
mod fork;
mod framing;
mod group;
mod heap;
pub mod lane;
#[cfg(feature = "models")]
#[doc(hidden)]
pub mod models;
mod nccl;
mod pool;
mod quote;
mod random;
mod ranks;
mod rendezvous;
pub mod store;
mod sync;
#[cfg(feature = "testing")]
#[doc(hidden)]
pub mod testing;
pub mod topology;
#[cfg(feature = "testing")]
pub mod trace;
mod window;

pub use deadline::Deadline;
pub use driver::{Driver, Stream};
pub use error::{Error, Result};
pub use fork::ProcessId;
pub use group::{Group, Hosts, Launch};
pub use heap::HeapLayout;
pub use pool::{
    BarrierId, Block, CONTROL_LANE, CommitReport, JointBlock, Lane, Pool, PoolBuilder, PoolStats,
    PreparedPool,
};
pub use quote::{Short, short};
pub use random::random_bytes;
pub use rendezvous::pairs::{Accepted, Dialled, PairAddress, PairListener, PairSocket};
pub use window::{Window, Windows};
