//! The CUDA backend: collectives as kernels on a stream, over the windows of a pool on a device.
//!
//! Each room imports the ones before it.
//!
//! | room | holds |
//! | --- | --- |
//! | `driver` | the functions of the CUDA driver library that this module calls, and words of pinned memory |
//! | `layout` | what kernels are given, laid out as in `symmpool/impl/comm.cuh`; the control block, records of failures |
//! | `kernel` | what kernels are compiled for, their loading and launch, and how much of a device they may occupy |
//! | `all_reduce`, `reduce_scatter`, `all_to_all`, `all_gather`, `broadcast` | their algorithms: kernels, launches, constraints, and the calls that check them |
//! | `select` | the tables of built-in algorithms, and which of them serves a call |
//! | `engine` | one rank's side of a communicator: its state, and what every call does |
//! | `ops` | the collectives and the other operations: which kernels and copies they launch |
//! | `interface` | all of it as an `Engine` |
//! | `protocols` | for tests: models of what kernels of several devices have among themselves |

mod all_gather;
mod all_reduce;
mod all_to_all;
mod broadcast;
mod driver;
mod engine;
mod interface;
mod kernel;
mod layout;
mod ops;
#[cfg(test)]
mod protocols;
mod reduce_scatter;
mod select;

use crate::jit::KernelSource;
use crate::jit::sources::KERNELS;

pub(crate) use self::all_reduce::constraints::fits_lamport;
pub use self::all_reduce::row::{Cases, CheckedAllReduce};
pub(crate) use self::driver::api::{Api as CudaApi, CudaHandle, cuda};
pub(crate) use self::driver::pinned_words::Words as PinnedWords;
pub(crate) use self::engine::failure::Failure as CudaFailure;
pub use self::engine::memory_operations::end_watching;
pub(crate) use self::kernel::modules::sm_count;
#[cfg(feature = "testing")]
pub use self::kernel::modules::take_sms;
pub(crate) use self::kernel::sm_budget::BudgetOptions;
pub use self::kernel::sm_budget::{share_sms, share_sms_of_several};
pub(crate) use self::layout::footprint::{
    Requested as RequestedMemory, VARIABLE as MEMORY_VARIABLE, as_text, check_total,
    communicator_bytes, growing_bytes, requested_total,
};
pub(crate) use self::layout::params::{Footprint, MAX_LOCAL_INPUTS};
pub use self::ops::algorithms::checked_exchanges;
pub use self::reduce_scatter::checked_reduce_scatters;
pub use self::reduce_scatter::row::ScatterCases;
pub(crate) use engine::{Area, CudaEngine, CudaEngineOptions, ReadyKernels};

/// Every kernel.
pub(crate) fn kernels() -> impl Iterator<Item = &'static KernelSource<'static>> {
    let exchanges = all_to_all::KERNELS.into_iter().chain([&broadcast::pipeline::KERNEL]);
    KERNELS.iter().copied().chain(all_reduce::kernels()).chain(exchanges)
}
