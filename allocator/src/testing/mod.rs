//! Helpers of tests and benchmarks of several crates. They are not part of the library that is shipped.
//!
//! | file | holds |
//! | --- | --- |
//! | `threads` | ranks that are threads |
//! | `processes` | tests that run again in a process of their own, or in a forked child |
//! | `splitmix` | random numbers that are the same everywhere |

mod processes;
mod splitmix;
mod threads;

pub use crate::rendezvous::sockets::fuzzed::{
    MeshCall, MeshPacket, mesh_hello, mesh_introduction, mesh_session,
};
pub use crate::store::tcp::fuzzed::{StoreStep, store_reply, store_session};

pub use crate::descriptors::{ReceivedMessage, receive_with_descriptors, send_with_descriptors};
pub use processes::{in_child, role, this_test_as};
pub use splitmix::SplitMix64;
pub use threads::{on_each, on_ranks};
