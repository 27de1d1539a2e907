//! Algorithms: the names of the built-in ones, which one is requested (by a call, by options, or by the environment), what
//! they can serve, and those that programs bring along.

mod all_reduce;
mod all_to_all;
mod built_in;
mod constraints;
mod id;
mod known;
mod native;
mod not_on_devices;
mod registered;
mod selection;
mod shape;
pub(crate) mod table_format;

pub use all_reduce::AllReduceAlgorithm;
pub use all_to_all::AllToAllAlgorithm;
pub use built_in::StandardCollective;
pub use constraints::{AlgorithmOrigin, Constraints, LaunchShape};
pub(crate) use id::{AUTO, AlgorithmId, COPY, DIRECT, LAMPORT, LL, PIPELINE, RING, SCRATCH};
pub(crate) use known::known;
pub use native::NativeKernel;
pub(crate) use not_on_devices::not_on_devices;
pub use registered::Algorithm;
pub(crate) use registered::{BuiltIn, Source};
#[cfg(feature = "testing")]
pub use selection::read_table;
pub(crate) use selection::{RequestedName, read_rows, table_files};
pub use shape::CallShape;
