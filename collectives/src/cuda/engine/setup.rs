//! How an engine on a device is made: its control block's contents, its kernels, its streams.

#![allow(unsafe_code)] // prepares device memory by address

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::{Block, Deadline, Error, HeapLayout, Pool, ProcessId, Result};

use super::areas::{Areas, initial_data};
use super::decline::CallProgress;
use super::failure::{Alive, Failure};
use super::memory_operations::MemoryOperations;
use super::stream_order::{CallEvents, StreamOrder};
use super::{CudaEngine, CudaEngineOptions, ReadyKernels};
use crate::DType;
use crate::algorithm::AlgorithmId;
use crate::cuda::all_reduce::constraints::{AllReduceShape, are_nvlinked};
use crate::cuda::all_to_all::row::Exchange;
use crate::cuda::driver::api::{Api, cuda};
use crate::cuda::kernel::kernels::Kernels;
use crate::cuda::kernel::modules::Modules;
use crate::cuda::kernel::sm_budget::has_communicators;
use crate::cuda::kernel::spec::KernelSpec;
use crate::cuda::layout::p2p_layout::{P2p, P2pLayout, prepare};
use crate::cuda::layout::params::ControlLayout;
use crate::cuda::select::table::MeasuredTable;
use crate::types::timeout::Timeout;

/// How long a communicator waits for calls of others when it is made.
const LONGEST_WAIT_FOR_OTHERS: Duration = Duration::from_secs(10);
/// The driver's variable for the number of queues through which a process gives its work to a device.
const QUEUES: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

impl CudaEngine {
    /// Bytes of control block that a group of `world` ranks needs with these options. Options that are the
    /// communicator's own were checked before.
    pub(crate) fn control_bytes(world: u32, options: &CudaEngineOptions) -> Result<u64> {
        let control = ControlLayout::new(world, options.footprint)?;
        Ok(P2pLayout::new(world, control.data_end(), options.footprint.staging).end(world))
    }

    /// Fills a control block as kernels expect it, before peers can see it, and loads the kernels that calls
    /// need. The ranks commit when all have done so; so no rank has to load anything while another's
    /// call waits for it.
    pub(crate) fn prepare(
        pool: &Pool,
        block: &Block<u8>,
        options: &CudaEngineOptions,
    ) -> Result<ReadyKernels> {
        let driver = cuda(pool.driver())?;
        let control = ControlLayout::new(pool.world(), options.footprint)?;
        let Some(last_epoch) = options.first_epoch.checked_sub(1) else {
            return Err(Error::invalid_argument("first epoch 0: calls count from 1"));
        };
        // SAFETY: the control block begins there, up to its inboxes, and is committed later.
        unsafe { fill(driver, block.address(), 0, control.ll) }?;
        // SAFETY: the first word of the control block, which is committed later.
        unsafe { fill(driver, block.address(), last_epoch, 4) }?;
        for (begin, word, bytes) in initial_data(&control) {
            // SAFETY: a part of the control block, which begins and ends at a multiple of 4096; it is committed later.
            unsafe { fill(driver, block.address() + begin, word, bytes) }?;
        }
        if pool.world() > 1 {
            let layout =
                P2pLayout::new(pool.world(), control.data_end(), options.footprint.staging);
            let (words, words_bytes) = layout.zeroed();
            // SAFETY: the words of messages lie in the control block, which is committed later.
            unsafe { fill(driver, block.address() + words, 0, words_bytes) }?;
            // SAFETY: the layout is that of this control block, which is committed later.
            unsafe { prepare(driver, block.address(), layout) }?;
        }
        let modules = Modules::of(pool.driver())?;
        let usual = AllReduceShape {
            bytes: 0,
            dtype: DType::U8,
            world: pool.world(),
            input_window: true,
            output_window: true,
            nvlinked: are_nvlinked(&options.links),
            beside_compute: options.budget.beside_compute,
            streams_may_wait: streams_may_wait(pool)?,
        };
        let grown = options.grown.map(|grown| control.with_data(control.ll, grown));
        let layouts: Vec<ControlLayout> = std::iter::once(control).chain(grown).collect();
        let list =
            KernelSpec::ready((&usual, options.requested), &layouts, &measured_table(pool)?)?;
        let has_company = has_communicators(driver.facts().ordinal);
        let list = Modules::in_company(&list, has_company);
        modules.make_ready((pool.rank(), pool.world()), &list)?;
        if has_company {
            modules.make_sharing_forms_ready(pool.rank())?;
        }
        Ok(ReadyKernels(modules))
    }

    /// A communicator whose control blocks lie at one offset of every slot. Every rank has prepared and
    /// committed its own, by the commit of that number.
    pub(crate) fn new(
        pool: &Pool,
        control_offset: u64,
        options: &CudaEngineOptions,
        ReadyKernels(modules): ReadyKernels,
        alive: Alive,
        number: u64,
    ) -> Result<Self> {
        let driver = cuda(pool.driver())?;
        let api = Api::get()?;
        let layout: HeapLayout = pool.layout();
        let control = ControlLayout::new(layout.world, options.footprint)?;
        let kernels = Kernels::new(api, modules, driver, layout.world, options.budget);
        let failure = driver
            .with_context_unordered(|| Failure::new(api, pool, control_offset, alive))
            .map(Arc::new)?;
        let stream = || driver.with_context_unordered(|| api.stream());
        let (copy_stream, companion_stream) = (stream()?, stream()?);
        let (signal_stream, result_stream) = (stream()?, stream()?);
        let p2p_layout =
            P2pLayout::new(layout.world, control.data_end(), options.footprint.staging);
        let p2p = P2p::new(driver, &layout, control_offset, p2p_layout)?;
        let own = layout.address(layout.rank, control_offset);
        let memory_operations = driver.with_context_unordered(|| {
            // SAFETY: the commit before has made the control block a window at `control_offset` on all ranks; it is given back
            // behind the value, or never.
            unsafe { MemoryOperations::new(api, pool, (&control, own), Arc::clone(&failure)) }
        })?;
        let timeout = Arc::new(Timeout::new(options.timeout));
        let nvlinked = are_nvlinked(&options.links);
        let comm = control.for_links(nvlinked).comm(
            &layout,
            control_offset,
            timeout.nanoseconds(),
            failure.address(),
        );
        if kernels.has_company() {
            wait_for_others(pool, options.timeout);
        }
        Ok(Self {
            pool: pool.clone(),
            maker: ProcessId::here(),
            api,
            measured: measured_table(pool)?,
            nvlinked,
            beside_compute: options.budget.beside_compute,
            control,
            areas: Areas::new(control, options.grown, number),
            comm,
            default_exchange: Exchange::of_all_to_all(AlgorithmId::of_all_to_all(
                options.all_to_all,
            )),
            kernels,
            failure,
            recv_counts: None,
            timeout,
            order: StreamOrder::default(),
            events: CallEvents::default(),
            copy_stream,
            companion_stream,
            signal_stream,
            result_stream,
            streams_may_wait: streams_may_wait(pool)?,
            channels: BTreeMap::new(),
            p2p,
            memory_operations,
            progress: CallProgress::default(),
            rehearsal: None,
        })
    }
}

/// Whether nothing that a stream waits for can stand behind that wait: each process has several queues to its device, and
/// no two ranks share one.
fn streams_may_wait(pool: &Pool) -> Result<bool> {
    let devices: Result<BTreeSet<&str>> =
        (0..pool.world()).map(|rank| Ok(pool.device(rank)?.uuid.as_str())).collect();
    let has_queues = std::env::var(QUEUES).ok().is_none_or(|queues| queues.trim() != "1");
    Ok(has_queues && devices?.len() == pool.world() as usize)
}

/// Returns what was measured on devices like those of the ranks.
fn measured_table(pool: &Pool) -> Result<MeasuredTable> {
    let name = |rank| Ok(pool.device(rank)?.name.as_str());
    let devices: Result<Vec<&str>> = (0..pool.world()).map(name).collect();
    Ok(MeasuredTable::of(&devices?))
}

/// Waits for what other communicators of the process have put on the device. From now on they leave a part of it to this one;
/// but kernels that were launched before have all of it. One that is still to come on its stream could find a kernel of this
/// communicator in its place, on one rank and not on another, and ranks would wait for each other (`sm_budget/model.rs`).
///
/// A peer that is late may keep the device busy for long: then it goes on, as that is no error.
fn wait_for_others(pool: &Pool, timeout: Duration) {
    let deadline = Deadline::after(timeout.min(LONGEST_WAIT_FOR_OTHERS));
    if let Err(error) = pool.driver().synchronize_by(deadline) {
        tracing::warn!(
            rank = pool.rank(),
            %error,
            "a communicator is made while calls of another one do not end; do not call both at the same time before they have"
        );
    }
}

/// Fills device memory with a word.
///
/// # Safety
///
/// The memory is part of a block of the caller's, which no other rank knows yet. It begins and ends at multiples of 4 bytes.
unsafe fn fill(driver: &CudaDriver, address: u64, word: u32, bytes: u64) -> Result<()> {
    // SAFETY: the caller promised that the memory is there, that it has whole words, and that nobody else uses it.
    unsafe { driver.fill(address, word, bytes / 4) }
}
