//! One rank's side of a communicator on a device: its state, how calls begin, and how it ends.
//!
//! | file | holds |
//! | --- | --- |
//! | `setup` | how an engine is made |
//! | `areas` | its memory for small calls and for large ones |
//! | `launch` | how it puts kernels and copies on streams |
//! | `streams`, `stream_order` | how it keeps calls in order when they change streams |
//! | `decline` | calls that this rank cannot make |
//! | `failure` | why all calls fail from then on |
//! | `memory_operations` | signals and waits that take no SM, and the thread that ends such waits |
//! | `rehearsal`, `rehearse` | what a call would do, found by a rehearsal of it |
//! | `recv_counts` | how many rows a dispatch to experts receives, which the host learns before they have arrived |

#![allow(unsafe_code)] // destroys streams by their handles

mod areas;
mod decline;
pub(super) mod failure;
mod launch;
pub(super) mod memory_operations;
pub(super) mod recv_counts;
pub(super) mod rehearsal;
mod rehearse;
mod setup;
pub(super) mod stream_order;
mod streams;

use std::cell::LazyCell;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::topology::Topology;
use symmpool_allocator::{Error, Pool, ProcessId, Result, Stream};

use self::failure::Failure;
use self::memory_operations::MemoryOperations;
use self::recv_counts::RecvCounts;
use self::rehearsal::Rehearsal;
use self::stream_order::{CallEvents, StreamOrder};
use super::all_to_all::row::Exchange;
use super::driver::api::{Api, CudaHandle};
use super::kernel::kernels::Kernels;
use super::kernel::modules::Modules;
use super::kernel::sm_budget::BudgetOptions;
use super::kernel::spec::KernelSpec;
use super::layout::p2p_layout::P2p;
use super::layout::params::Footprint;
use super::layout::params::{CallParams, ChannelEnd, CommFields, ControlLayout};
use super::select::table::MeasuredTable;
use crate::call::{CallDescription, OpType};
use crate::cuda::driver::api::cuda;
use crate::types::timeout::Timeout;
use crate::{AllReduceAlgorithm, AllToAllAlgorithm, CommunicatorMemory, Place};
pub(crate) use areas::Area;
use areas::Areas;
#[cfg(test)]
pub(in crate::cuda) use areas::{ESCAPED_PATTERN, LAMPORT_PATTERN};
use decline::CallProgress;

/// How a [`CudaEngine`] behaves. The same on every rank.
#[derive(Clone, Debug)]
pub(crate) struct CudaEngineOptions {
    /// Longest wait for a peer, on the device (rule S5).
    pub(crate) timeout: Duration,
    /// The sizes of the parts of its memory.
    pub(crate) footprint: Footprint,
    /// The sizes of the parts of its area for large calls, if its memory grows before the first of them.
    pub(crate) grown: Option<Footprint>,
    /// The number of the first call.
    pub(crate) first_epoch: u32,
    /// The algorithm that was requested for all-reduces.
    pub(crate) requested: AllReduceAlgorithm,
    pub(crate) all_to_all: AllToAllAlgorithm,
    pub(crate) budget: BudgetOptions,
    /// How the ranks are linked.
    pub(crate) links: Topology,
}

/// The kernels that calls may need. They are loaded before any call, as loading may wait for what runs.
pub(crate) struct ReadyKernels(Arc<Modules>);

/// One rank's side of a communicator on a device.
///
/// Calls put kernels on a stream and return. What goes wrong on the device is found by the next
/// call, or by [`CudaEngine::synchronize`]; then all later calls fail with the same cause.
pub(crate) struct CudaEngine {
    pub(super) pool: Pool,
    maker: ProcessId,
    pub(super) api: &'static Api,
    /// The layout of the area that the call under way uses.
    pub(super) control: ControlLayout,
    areas: Areas,
    /// Table of what was measured on devices of this kind.
    pub(super) measured: MeasuredTable,
    /// Whether all ranks' devices are linked by NVLink, or are one device.
    pub(super) nvlinked: bool,
    /// Whether calls may run beside compute.
    pub(super) beside_compute: bool,
    pub(super) comm: CommFields,
    /// How exchanges go whose calls name no algorithm.
    pub(super) default_exchange: &'static Exchange,
    kernels: Kernels,
    failure: Arc<Failure>,
    /// Words for the counts of dispatches to experts, once a buffer for experts was made.
    pub(super) recv_counts: Option<RecvCounts>,
    /// The timeout of kernels that are launched from now on.
    pub(crate) timeout: Arc<Timeout>,
    order: StreamOrder,
    /// Events that streams within a call wait for.
    events: CallEvents,
    /// A stream of the engine's own, for copies that run at the same time as a call's kernels.
    pub(super) copy_stream: Stream,
    /// A stream for the companion kernel of such copies, and for copies within this rank.
    pub(super) companion_stream: Stream,
    /// A stream for signals that follow copies, so that the next copies do not wait for them.
    pub(super) signal_stream: Stream,
    /// A stream for copies of results while inputs are copied, and for waits on which copies depend.
    pub(super) result_stream: Stream,
    /// Whether a stream can wait for a peer by a memory operation, and be sure that the wait can be ended.
    pub(super) streams_may_wait: bool,
    /// The order of signals, waits, sends and receives, which each end of a channel has for itself.
    channels: BTreeMap<ChannelEnd, StreamOrder>,
    pub(super) p2p: P2p,
    pub(super) memory_operations: MemoryOperations,
    progress: CallProgress,
    /// While a call is rehearsed.
    pub(super) rehearsal: Option<Box<Rehearsal>>,
}

impl CudaEngine {
    pub(crate) fn rank(&self) -> u32 {
        self.comm.rank
    }

    pub(crate) fn world(&self) -> u32 {
        self.pool.world()
    }

    /// Bytes of a rank's slot of the heap. No block is longer.
    pub(super) fn pool_stride(&self) -> u64 {
        self.comm.stride
    }

    pub(super) fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    pub(super) fn kernels_mut(&mut self) -> &mut Kernels {
        &mut self.kernels
    }

    /// The device's SMs.
    pub(crate) fn sm_count(&self) -> u32 {
        self.kernels.sm_count()
    }

    /// The device's ordinal in this process.
    pub(super) fn ordinal(&self) -> Result<u32> {
        Ok(cuda(self.pool.driver())?.facts().ordinal)
    }

    /// Why all calls fail, if they do.
    #[inline]
    pub(crate) fn failure(&self) -> Option<&Error> {
        self.failure.get()
    }

    /// Returns what answers [`Self::failure`] to threads that do not wait until a call has ended.
    pub(crate) fn failure_handle(&self) -> Arc<Failure> {
        Arc::clone(&self.failure)
    }

    /// Refuses a call after a failure, and in a process forked from the one that made this.
    #[inline]
    pub(crate) fn ready(&mut self) -> Result<()> {
        self.maker.check("a communicator")?;
        if let Some(error) = self.failure() {
            return Err(error.clone());
        }
        self.comm.timeout = self.timeout.nanoseconds();
        self.failure.note_timeout(self.comm.timeout);
        Ok(())
    }

    /// Begins a call on that stream.
    #[inline]
    pub(super) fn begin(&mut self, stream: Stream) -> Result<()> {
        self.ready()?;
        self.switch_to(stream)?;
        let driver = self.pool.driver();
        let is_captured = LazyCell::new(|| driver.is_capturing(stream));
        match self.rehearsed_budget(stream, || *is_captured) {
            None => drop(self.kernels.begin(stream, || *is_captured)),
            Some(budget) => self.kernels.set_budget(budget),
        }
        self.kernels.share(&mut self.comm);
        Ok(())
    }

    /// Returns how its `total` bytes of memory divide.
    pub(crate) fn memory(&self, total: u64) -> CommunicatorMemory {
        let mut parts = CommunicatorMemory {
            staging: self.p2p.staging(self.world()),
            wanted: self.wanted_bytes(),
            ..Default::default()
        };
        for area in std::iter::once(&self.areas.small).chain(&self.areas.large) {
            parts.inboxes += area.ll_bytes
                + area.ll128_bytes
                + area.lamport_bytes
                + area.escaped_bytes / 16 * 17;
            parts.scratch += area.scratch_bytes + area.plan_scratch_bytes;
        }
        parts.of(total)
    }

    /// Limits the SMs of kernels that are launched from now on; `None` lifts the limit.
    pub(crate) fn set_sm_budget(&mut self, most: Option<u32>) {
        self.kernels.set_sm_budget(most);
    }

    /// Begins an operation that is no call of all ranks. Says whether the kernel that follows it on its
    /// stream may start early.
    pub(super) fn begin_outside_calls(&mut self) -> bool {
        self.kernels.begin_outside_calls().early
    }

    /// Fails the communicator after a panic inside a call: no call can follow.
    pub(crate) fn fail_after_panic(&mut self) {
        self.rehearsal = None;
        self.fail(&Error::invalid_state("a call of this communicator panicked; make a new one"));
    }

    /// Waits until the stream has done what was put on it, and says what went wrong there.
    pub(crate) fn synchronize(&mut self, stream: Stream) -> Result<()> {
        self.maker.check("a communicator")?;
        let driver = cuda(self.pool.driver())?;
        let api = self.api;
        driver.stream_handle(stream)?;
        driver.with_context(|| api.synchronize(stream))?;
        if self.has_late_reports() {
            self.report_late(stream)?;
        }
        self.ready()?;
        self.take_async_error()
    }

    /// Whether what is put on the stream becomes part of a graph.
    pub(super) fn is_capturing(&self, stream: Stream) -> bool {
        self.pool.driver().is_capturing(stream)
    }

    /// Whether the stream has done what was put on it.
    pub(crate) fn is_idle(&self, stream: Stream) -> Result<bool> {
        let api = self.api;
        cuda(self.pool.driver())?.with_context(|| api.is_idle(stream))
    }

    /// Whether a stream that is not captured has done what was put on it. The calling thread may capture another one.
    pub(crate) fn is_done(&self, stream: Stream) -> Result<bool> {
        let api = self.api;
        cuda(self.pool.driver())?.with_context_unordered(|| api.is_idle(stream))
    }

    /// Makes the place where dispatches to experts tell the host how many rows arrive, ahead of them: it may wait for the device.
    pub(super) fn make_recv_counts(&mut self) -> Result<()> {
        if self.recv_counts.is_none() {
            let api = self.api;
            self.recv_counts =
                Some(cuda(self.pool.driver())?.with_context_unordered(|| RecvCounts::new(api))?);
        }
        Ok(())
    }

    /// Returns as an error what calls reported to the host although they went on. Each error is returned once.
    pub(super) fn take_async_error(&mut self) -> Result<()> {
        match self.failure.take_async_error() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Every rank has called it before what follows on the stream runs; what ranks wrote before is
    /// visible then.
    pub(crate) fn barrier(&mut self, stream: Stream) -> Result<()> {
        self.handshake_only(CallDescription::new(OpType::Barrier), stream)
    }

    /// [`Self::barrier`] that adds to `waits`, an `i64` for each rank, for how many clock cycles of an SM this rank
    /// waited for that one.
    ///
    /// # Safety
    ///
    /// `waits` is an aligned address of the device, readable and writable for a number for each rank until the stream is
    /// past the call.
    pub(crate) unsafe fn measured_barrier(&mut self, waits: u64, stream: Stream) -> Result<()> {
        self.begin(stream)?;
        let spec = KernelSpec::measured_barrier();
        let grid = (1, spec.threads);
        let kernel = self.kernel(spec)?;
        let params = CallParams::of(&CallDescription::new(OpType::Barrier));
        // SAFETY: the caller promised that `waits` is aligned, readable and writable for a number for each rank until
        // the stream is past the call; the address is the kernel's third parameter.
        unsafe { self.launch_with_work(kernel, grid, &params, &waits, stream) }
    }

    /// Whether large calls go in pieces, whose streams wait without SMs.
    pub(super) fn goes_in_pieces(&self) -> bool {
        self.beside_compute && self.streams_may_wait
    }

    /// This rank's address of a place.
    pub(super) fn address(&self, place: Place) -> u64 {
        match place {
            Place::Unregistered(pointer) => pointer as u64,
            Place::Window(offset) => self.pool.layout().address(self.comm.rank, offset),
        }
    }

    /// A peer's address of what this rank has at `address` in a window.
    pub(super) fn at_peer(&self, address: u64, peer: u32) -> u64 {
        self.pool.layout().address(peer, address - self.pool.layout().address(self.comm.rank, 0))
    }

    pub(super) fn scratch_of(&self, rank: u32) -> u64 {
        self.pool.layout().address(rank, self.comm.control.wrapping_add(self.control.scratch))
    }

    /// The other ranks in an order that differs from rank to rank, so that no two ranks send to one at the
    /// same time.
    pub(super) fn peers_in_rotated_order(&self) -> impl Iterator<Item = u32> + use<> {
        let (rank, world) = (self.rank(), self.world());
        (1..world).map(move |distance| (rank + distance) % world)
    }
}

impl Drop for CudaEngine {
    /// Waits for the device: kernels under way use the control block and the fault record.
    fn drop(&mut self) {
        self.report_at_the_end();
        let Ok(driver) = cuda(self.pool.driver()) else { return };
        let (api, recv_counts) = (self.api, self.recv_counts.take());
        let orders = std::iter::once(&mut self.order).chain(self.channels.values_mut());
        let streams =
            [self.copy_stream, self.companion_stream, self.signal_stream, self.result_stream];
        let streams = streams.into_iter().chain(self.progress.stream());
        let deadline = self.pool.group().deadline();
        let synchronize = || self.pool.driver().synchronize_by(deadline);
        // The thread that ends streams' waits must not end before them, and writes until it does: into pinned memory and
        // into the control block.
        let synchronized = synchronize()
            .and_then(|()| if self.memory_operations.end() { synchronize() } else { Ok(()) });
        if let Err(error) = synchronized {
            // Kernels may still run, so what they use is leaked: also the control block, and, if streams may wait, the
            // thread that ends their waits.
            self.failure.leak();
            self.kernels.keep();
            self.kernels.keep_place();
            tracing::warn!(%error, "a communicator's kernels and memory are not given back");
            return;
        }
        let cleaned = driver.with_context_unordered(|| {
            orders.for_each(|order| order.end(api));
            self.events.end(api);
            for stream in streams {
                // SAFETY: made by this value and given up here; nothing runs on it.
                let code = unsafe { (api.stream_destroy)(stream.raw() as CudaHandle) };
                CudaDriver::check(code, || "giving back a stream".to_owned())?;
            }
            // SAFETY: the thread has ended and the device has done all that was put on it, both of which were awaited above.
            unsafe { self.memory_operations.free() };
            self.failure.free(api);
            if let Some(recv_counts) = recv_counts {
                // SAFETY: the device has done all that was put on it.
                unsafe { recv_counts.free(api) };
            }
            Ok(())
        });
        if let Err(error) = cleaned {
            tracing::debug!(%error, "at the end of a communicator");
        }
    }
}

impl fmt::Debug for CudaEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaEngine").field("comm", &self.comm).finish_non_exhaustive()
    }
}
