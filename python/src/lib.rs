//! The binding behind the Python package `symmpool`: classes over pools and communicators.
//!
//! | file | holds |
//! | --- | --- |
//! | `group`, `pool`, `communicator` | the classes of these names |
//! | `communicator_methods`, `explanation` | the methods of a communicator, and its `explain` |
//! | `channels` | the class `Channels`: channels of their own |
//! | `fork_guarded` | objects that belong to the process that made them |
//! | `algorithm` | algorithms: the built-in ones, and those that a program brought along |
//! | `fused`, `matmul` | all-reduces with a residual and a norm; the steps of fused matmuls |
//! | `selection` | functions of a program that choose algorithms |
//! | `statistics` | the numbers of pools and communicators |
//! | `experts` | buffers for dispatch to experts and combine |
//! | `device` | the driver that a device's name means, and ranks that have none |
//! | `slot` | a pool behind exported functions, for torch's allocator |
//! | `process` | the allocator under all of torch's |
//! | `bell` | how a thread waits for calls that nobody else makes first |
//! | `block` | memory of a pool, as Python objects and DLPack consumers hold it |
//! | `memory`, `record_stream` | a block that Python objects hold; memory that a stream uses, of whatever object |
//! | `dlpack` | the structures of the DLPack protocol, and capsules of them |
//! | `exchange` | DLPack's table of C functions, through which torch's tensors are read |
//! | `arguments`, `checks` | what calls of a communicator are given, checked, also before there is one |
//! | `short_calls` | calls as the backend of torch makes them, where their arguments need nothing |
//! | `stream`, `mark` | the streams of calls, and positions on them |
//! | `options`, `p2p`, `one_sided` | a communicator's options, its messages, its copies and signals |
//! | `outer`, `pool_store` | what carries data between hosts, and how its ranks meet |
//! | `mailbox` | messages of pairs of ranks, which need no communicator |
//! | `nested` | communicators of some of a communicator's ranks |
//! | `splits` | how all-to-alls divide their tensors, checked |
//! | `number` | counts, ranks, addresses and times, or which argument is none |
//! | `tensor`, `ndarray` | where tensors of torch and arrays of numpy lie, read cheaply |
//! | `reading` | what that gives: addresses, counts and types, or why it is refused |
//! | `convert`, `name` | names of types, algorithms and devices; names that callers give |
//! | `operation` | names of reductions, and torch's constants for them |
//! | `store` | a store of torch's, as the allocator wants it |
//! | `site` | which line of the program a call comes from |
//! | `machine` | what this machine has, for the doctor |
//! | `torch`, `written` | questions to torch, and reports to autograd of which tensors calls write to |
//! | `errors` | the package's exceptions |
//!
//! Nothing here decides or waits by itself. The interpreter's lock is released around every call
//! that may block or take long.

#![deny(unsafe_code)]

mod algorithm;
mod arguments;
mod bell;
mod block;
mod channels;
mod checks;
mod communicator;
mod communicator_methods;
mod convert;
mod device;
mod dlpack;
mod errors;
mod exchange;
mod experts;
mod explanation;
mod fork_guarded;
mod fused;
mod group;
mod machine;
mod mailbox;
mod mark;
mod matmul;
mod memory;
mod name;
mod ndarray;
mod nested;
mod number;
mod one_sided;
mod operation;
mod options;
mod outer;
mod p2p;
mod pool;
mod pool_store;
mod process;
mod reading;
mod record_stream;
mod selection;
mod short_calls;
mod site;
mod slot;
mod splits;
mod statistics;
mod store;
mod stream;
mod tensor;
mod torch;
mod written;

/// The native half of the package `symmpool`.
#[pyo3::pymodule]
mod _symmpool {
    use std::path::PathBuf;

    #[pymodule_export]
    use crate::algorithm::Algorithm;
    #[pymodule_export]
    use crate::bell::CallWakeup;
    #[pymodule_export]
    use crate::block::Block;
    #[pymodule_export]
    use crate::channels::Channels;
    #[pymodule_export]
    use crate::checks::check_call;
    #[pymodule_export]
    use crate::communicator::Communicator;
    #[pymodule_export]
    use crate::experts::ExpertBufferCore;
    #[pymodule_export]
    use crate::fused::all_reduce_norm;
    #[pymodule_export]
    use crate::group::{Group, launch, launcher_variables};
    #[pymodule_export]
    use crate::machine::machine;
    #[pymodule_export]
    use crate::mailbox::{Mailbox, PendingMessage};
    #[pymodule_export]
    use crate::mark::StreamPosition;
    #[pymodule_export]
    use crate::matmul::{
        begin_matmul, end_watching, fail_matmul, gather_memory, gather_multiply,
        has_room_for_matmul, has_tensor_kernels, make_room_for_matmul, matmul_memory,
        multiply_all_reduce, multiply_scatter, pull, push_step, step,
    };
    #[pymodule_export]
    use crate::nested::GroupOffer;
    #[pymodule_export]
    use crate::p2p::waiting_senders;
    #[pymodule_export]
    use crate::pool::Pool;
    #[pymodule_export]
    use crate::pool_store::{pool_store_add, pool_store_get, pool_store_set};
    #[pymodule_export]
    use crate::process::{
        process_redirect, process_redirect_back, process_reset_peaks, process_stats,
    };
    #[pymodule_export]
    use crate::short_calls::{
        try_all_gather, try_all_reduce, try_all_to_all, try_broadcast, try_reduce_scatter,
    };
    #[pymodule_export]
    use crate::slot::Slot;
    #[pymodule_export]
    use crate::tensor::shows_memory;
    #[pymodule_export]
    use crate::written::count_versions;

    use crate::convert;
    use crate::number::Number;

    /// Tells where the interpreter's packages are, one of which may be the compiler.
    #[pymodule_init]
    fn init(module: &pyo3::Bound<'_, pyo3::types::PyModule>) -> pyo3::PyResult<()> {
        use pyo3::types::PyAnyMethods;
        let path = module.py().import("sys")?.getattr("path")?;
        let folders = path.try_iter()?.filter_map(|folder| folder.ok()?.extract::<PathBuf>().ok());
        let has_packages = |folder: &PathBuf| {
            folder.ends_with("site-packages") || folder.ends_with("dist-packages")
        };
        symmpool_collectives::search_packages(folders.filter(has_packages).collect());
        Ok(())
    }

    /// Names that `algorithm` of a `Communicator` takes, "auto" first.
    #[pyo3::pyfunction]
    fn algorithms() -> Vec<&'static str> {
        convert::algorithm_names()
    }

    /// Names that `all_to_all` of a `Communicator` takes, "auto" first.
    #[pyo3::pyfunction]
    fn all_to_all_algorithms() -> Vec<&'static str> {
        convert::all_to_all_algorithm_names()
    }

    /// Has this process's communicators on the CUDA device of that number leave a third of its
    /// multiprocessors to others from now on: to kernels that wait for other ranks while ours do, as NCCL's
    /// may. A communicator that was made with `concurrent` does what that says. Ranks may differ, and what a
    /// graph has captured stays as it was. Touches no device.
    #[pyo3::pyfunction]
    fn share_sms(py: pyo3::Python<'_>, device: Number<u32>) -> pyo3::PyResult<()> {
        symmpool_collectives::share_sms(device.or_raise(py, "device")?);
        Ok(())
    }

    /// Has this process's communicators on the CUDA device of that number leave a third of its multiprocessors to
    /// others from now on, if there are several of them. Otherwise as `share_sms`. Touches no device.
    #[pyo3::pyfunction]
    fn share_sms_of_several(py: pyo3::Python<'_>, device: Number<u32>) -> pyo3::PyResult<()> {
        symmpool_collectives::share_sms_of_several(device.or_raise(py, "device")?);
        Ok(())
    }

    /// The device of a pool that names none: the GPU of this process if it has one, else the CPU.
    #[pyo3::pyfunction]
    fn default_device(py: pyo3::Python<'_>) -> pyo3::PyResult<String> {
        use crate::errors::OrRaise;
        let name = crate::torch::current_device(py, None)?;
        let (_, device) = py.detach(|| crate::device::driver(name.as_deref())).or_raise(py)?;
        Ok(device.name())
    }

    /// Ends the waits for other ranks that are under way, and all later ones: the program is ending.
    #[pyo3::pyfunction]
    fn end_waits() {
        crate::errors::ENDING.store(true, std::sync::atomic::Ordering::Relaxed);
    }

    /// The commit that the extension was built from (None where the build was not told), and the version of the
    /// kernels in each folder, by its name.
    #[pyo3::pyfunction]
    fn built() -> (Option<&'static str>, std::collections::BTreeMap<&'static str, String>) {
        (symmpool_collectives::built_from(), symmpool_collectives::kernel_versions())
    }

    /// The package's version.
    #[pyo3::pyfunction]
    fn version() -> &'static str {
        env!("CARGO_PKG_VERSION")
    }
}
