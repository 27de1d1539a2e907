//! The options of a communicator, and how it is made.

use std::collections::BTreeSet;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use symmpool_allocator::short;
use symmpool_collectives::{Communicator, CommunicatorOptions, Outers, StandardCollective};

use crate::arguments::{CommunicatorCalls, RankContext};
use crate::convert::{self, MemoryDevice, standard};
use crate::errors::{OrRaise, invalid, reason};
use crate::fork_guarded::ForkGuarded;
use crate::number::Number;
use crate::outer::outers_of;
use crate::pool::Pool;
use crate::site;

/// How much memory there is for calls, and how much of a device they may take, as Python says it.
pub(crate) struct Sizes {
    pub(crate) scratch_bytes: Option<Number<u64>>,
    pub(crate) device_memory_bytes: Option<Number<u64>>,
    pub(crate) device_memory_grows: bool,
    pub(crate) serves_subgroups: bool,
    pub(crate) concurrent: Option<Number<u32>>,
    pub(crate) sm_budget: Option<Number<u32>>,
    pub(crate) beside_compute: bool,
}

/// Options as Python gives them.
pub(crate) fn read(
    py: Python<'_>,
    device: MemoryDevice,
    timeout: Number<f64>,
    algorithm: &str,
    all_to_all: &str,
    algorithms: Option<&Bound<'_, PyDict>>,
    sizes: Sizes,
) -> PyResult<CommunicatorOptions> {
    let device_memory_bytes = sizes
        .device_memory_bytes
        .map(|bytes| bytes.or_raise(py, "device_memory_bytes"))
        .transpose()?;
    let bytes = sizes.scratch_bytes.map(|bytes| bytes.or_raise(py, "scratch_bytes")).transpose()?;
    let count = |number: Option<Number<u32>>, name| {
        number.map(|number| number.or_raise(py, name)).transpose()
    };
    let concurrent = count(sizes.concurrent, "concurrent")?;
    let sm_budget = count(sizes.sm_budget, "sm_budget")?;
    let mut options = CommunicatorOptions {
        timeout: timeout.seconds(py, "timeout")?,
        algorithm: convert::algorithm(py, algorithm)?,
        all_to_all: convert::all_to_all_algorithm(py, all_to_all)?,
        device_memory_bytes,
        device_memory_grows: sizes.device_memory_grows,
        serves_subgroups: sizes.serves_subgroups,
        concurrent,
        sm_budget,
        beside_compute: sizes.beside_compute,
        ..CommunicatorOptions::default()
    };
    for (collective, name) in algorithms.into_iter().flat_map(PyDictMethods::iter) {
        let text = |object: &Bound<'_, PyAny>| {
            object.extract::<String>().map_err(|_| {
                invalid(
                    py,
                    format!(
                        "algorithms: {} where names of collectives lead to names of algorithms",
                        short(&format!("{object:?}"))
                    ),
                )
            })
        };
        let collective = standard(py, &text(&collective)?)?;
        options.algorithms.insert(collective, text(&name)?);
    }
    match (device, bytes) {
        (MemoryDevice::Cpu, Some(bytes)) => options.scratch_bytes = bytes,
        (MemoryDevice::Cuda(_), Some(bytes)) => options.device_scratch_bytes = Some(bytes),
        (_, None) => {}
    }
    Ok(options)
}

/// Makes a communicator, and says which algorithm was requested. Options that were refused are reported to the other
/// ranks.
pub(crate) fn open(
    py: Python<'_>,
    (object, pool): (&Bound<'_, Pool>, &Pool),
    options: PyResult<CommunicatorOptions>,
) -> PyResult<(Arc<CommunicatorCalls>, String)> {
    let on = &*pool.pool;
    let ready = if on.hosts().count() == 1 {
        options.map(|options| (options, None))
    } else {
        over_hosts(py, object, options)
    };
    let (options, outers) = ready.inspect_err(|error| {
        let why = reason(py, error);
        py.detach(|| Communicator::decline_new(on, why));
    })?;
    let algorithm = algorithm_name(&options);
    let make = || match outers {
        Some(outers) => Communicator::spanning(on, &options, outers),
        None => Communicator::with_options(on, &options),
    };
    let comm = ForkGuarded::new(Arc::new(site::detach(py, make).or_raise(py)?));
    pool.communicators.add(&comm);
    let context = RankContext { device: pool.device, rank: comm.rank(), world: comm.world() };
    Ok((Arc::new(CommunicatorCalls { comm, context }), algorithm))
}

/// The options with the outer engines. Ranks whose options were refused come to this too, and tell the others why.
fn over_hosts(
    py: Python<'_>,
    pool: &Bound<'_, Pool>,
    options: PyResult<CommunicatorOptions>,
) -> PyResult<(CommunicatorOptions, Option<Outers>)> {
    if uses_nccl(&pool.get().pool).or_raise(py)? {
        return over_hosts_on_gpus(py, &pool.get().pool, options);
    }
    let module = py.import("symmpool.communicators.outer")?;
    let rendezvous = module.call_method1("OuterRendezvous", (pool,))?;
    match options {
        Ok(options) => {
            let made = rendezvous.call_method1("outers", (options.timeout.as_secs_f64(),))?;
            Ok((options, Some(outers_of(&made)?)))
        }
        Err(error) => {
            rendezvous.call_method1("refuse", (error.to_string(),))?;
            Err(error)
        }
    }
}

/// Whether NCCL carries data of a pool between hosts: on GPUs of which each rank has its own. It refuses ranks that share one.
fn uses_nccl(pool: &symmpool_allocator::Pool) -> symmpool_allocator::Result<bool> {
    let uuid = |rank| Ok(pool.device(rank)?.uuid.as_str());
    let devices: symmpool_allocator::Result<BTreeSet<&str>> = (0..pool.world()).map(uuid).collect();
    Ok(pool.driver().as_cuda().is_some() && devices?.len() == pool.world() as usize)
}

/// The options with outer engines over NCCL, for memory of GPUs.
fn over_hosts_on_gpus(
    py: Python<'_>,
    pool: &symmpool_allocator::Pool,
    options: PyResult<CommunicatorOptions>,
) -> PyResult<(CommunicatorOptions, Option<Outers>)> {
    match options {
        Ok(options) => {
            let outers = site::detach(py, || Outers::nccl(pool, options.timeout)).or_raise(py)?;
            Ok((options, Some(outers)))
        }
        Err(error) => {
            let (why, limit) = (reason(py, &error), pool.group().timeout());
            py.detach(|| Outers::decline_nccl(pool, limit, &why));
            Err(error)
        }
    }
}

/// The name of the algorithm that is requested for all-reduces.
fn algorithm_name(options: &CommunicatorOptions) -> String {
    let named = options.algorithms.get(&StandardCollective::AllReduce);
    named.cloned().unwrap_or_else(|| options.algorithm.name().to_owned())
}
