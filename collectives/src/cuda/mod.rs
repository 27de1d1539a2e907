//! The CUDA backend: collectives as kernels on a stream, over the windows of a pool on a device.
//!
//! Each room imports the ones before it.
//!
//! | room | holds |
//! | --- | --- |
//! | `driver` | the functions of the CUDA driver library that this module calls, and words of pinned memory |
//! | `layout` | what kernels are given, laid out as in `symmpool/comm.cuh`; the control block, records of failures |
//! | `kernel` | what kernels are compiled for, their loading and launch, and how much of a device they may occupy |
//! | `all_reduce` | the algorithms of all-reduces |
//! | `select` | the tables of built-in algorithms, and which of them serves a call |
//! | `engine` | one rank's side of a communicator: its state, and what every call does |
//! | `ops` | the collectives and the other operations: which kernels and copies they launch |
//! | `interface` | all of it as an `Engine` |

mod all_reduce;
mod driver;
mod engine;
mod interface;
mod kernel;
mod layout;
mod ops;
mod select;

use crate::jit::Kernel;
use crate::jit::sources::KERNELS;

pub(crate) use self::all_reduce::constraints::fits_lamport;
pub use self::all_reduce::row::{Cases, CheckedAllReduce};
pub(crate) use self::engine::failure::Failure as CudaFailure;
pub use self::engine::memory_operations::end_watching;
#[cfg(feature = "testing")]
pub use self::kernel::modules::take_sms;
pub(crate) use self::kernel::sm_budget::BudgetOptions;
pub use self::kernel::sm_budget::{share_sms, share_sms_of_several};
pub(crate) use self::layout::footprint::{
    Requested as RequestedMemory, VARIABLE as MEMORY_VARIABLE, as_text, check_total,
    communicator_bytes, growing_bytes, requested_total,
};
pub(crate) use self::layout::params::Footprint;
pub(crate) use engine::{Area, CudaEngine, CudaEngineOptions, ReadyKernels};

/// Every kernel.
pub(crate) fn kernels() -> impl Iterator<Item = &'static Kernel<'static>> {
    KERNELS.iter().copied().chain(all_reduce::kernels())
}
