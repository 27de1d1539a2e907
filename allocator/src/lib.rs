//! Symmetric memory for several ranks: "the same" buffer at the same offset of every rank's heap.

#![deny(unsafe_code)]

mod deadline;
pub mod driver;
mod error;
mod group;
mod heap;
pub mod lane;
mod rendezvous;
pub mod store;
pub mod topology;
pub mod trace;

pub use deadline::Deadline;
pub use driver::{Driver, Stream};
pub use error::{Error, Result};
pub use group::Group;
pub use heap::HeapLayout;
