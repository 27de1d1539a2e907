//! One rank's side of a communicator on a device: its state, and how a call is entered.

#![allow(unsafe_code)] // launches kernels, and prepares device memory by address

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::topology::Topology;
use symmpool_allocator::{Block, Error, HeapLayout, Maker, PeerRow, Pool, Result, Stream};

use super::api::{Api, Handle};
use super::constraints::{Shape, directly_linked};
use super::fault::{Fault, Seen};
use super::kernel_spec::{BARRIER_THREADS, Specialty};
use super::kernels::{Kernels, Loaded};
use super::modules::{self, Modules};
use super::p2p::{self, P2p, Places};
use super::params::{CallParams, Channel, Comm, Control, Traffic};
use super::stream_order::{Order, fork};
use super::strided_copy::Slices;
use super::table::Rows;
use crate::algorithm::RequestedAlgorithm;
use crate::host::call::{Call, Operation};
use crate::row_exchange::RowWork;
use crate::timeout::Timeout;
use crate::{AllToAllAlgorithm, DType, Place};

/// How a [`CudaEngine`] behaves. The same on every rank.
#[derive(Clone, Debug)]
pub(crate) struct CudaOptions {
    /// Longest wait for a peer, on the device (rule S5).
    pub(crate) timeout: Duration,
    /// Bytes of each of three parts of the inbox.
    pub(crate) inbox: u64,
    /// Bytes of scratch.
    pub(crate) scratch: u64,
    /// The number of the first call.
    pub(crate) first_epoch: u32,
    /// How all-reduces are to go about it.
    pub(crate) asked: RequestedAlgorithm,
    pub(crate) all_to_all: AllToAllAlgorithm,
    /// Communicators whose calls may be under way at once, if that was said. Ranks may differ.
    pub(crate) concurrent: Option<u32>,
    /// How the ranks are linked.
    pub(crate) links: Topology,
}

/// What calls may need of a device that can wait: made before any of them is.
pub(crate) struct Ready(Arc<Modules>);

/// Tells whether a rank's process still runs.
pub(crate) type Alive = Box<dyn Fn(u32) -> bool + Send>;

/// What fresh sentinel inboxes hold: `SENTINEL` in `protocol/inbox.cuh`.
const SENTINEL: u32 = 0xffff_ffff;
/// What those for bare vectors hold: `FRESH` in `protocol/lamport_escaped.cuh`.
const FRESH: u32 = 0xc35a_96e8;

/// One rank's side of a communicator on a device.
///
/// Calls put kernels on a stream and return. What goes wrong on the device is found by the next
/// call, or by [`CudaEngine::synchronize`]; then all later calls fail with the same cause.
pub(crate) struct CudaEngine {
    pool: Pool,
    maker: Maker,
    api: &'static Api,
    pub(super) control: Control,
    /// What was measured on devices of this kind.
    pub(super) rows: Rows,
    /// Whether all ranks' devices are linked by NVLink, or are one.
    pub(super) direct: bool,
    pub(super) comm: Comm,
    pub(super) all_to_all: AllToAllAlgorithm,
    kernels: Kernels,
    /// `None` only while dropping.
    fault: Option<Fault>,
    /// What kernels that are launched are told.
    pub(crate) timeout: Arc<Timeout>,
    alive: Alive,
    order: Order,
    /// Its own, for copies beside a call's kernels,
    pub(super) aside: Stream,
    /// and for a kernel beside these.
    pub(super) beside: Stream,
    /// Of signals and waits, which have one at each end of a channel.
    channels: BTreeMap<Channel, Order>,
    pub(super) p2p: P2p,
    failed: Option<Error>,
}

impl CudaEngine {
    /// Bytes of control block that a group of `world` ranks needs with these options, of which those that
    /// are a communicator's were checked.
    pub(crate) fn control_bytes(world: u32, options: &CudaOptions) -> Result<u64> {
        let control = Control::new(world, options.inbox, options.scratch)?;
        Ok(Places::new(world, control.bytes(), options.scratch).end(world))
    }

    /// Makes a control block's memory as kernels expect it, before it is shared, and has ready what its calls
    /// need. The ranks meet when all have done so: then none of them has to load anything while another's
    /// call waits for it.
    pub(crate) fn prepare(pool: &Pool, block: &Block<u8>, options: &CudaOptions) -> Result<Ready> {
        let driver = cuda(pool)?;
        let control = Control::new(pool.world(), options.inbox, options.scratch)?;
        let Some(last_epoch) = options.first_epoch.checked_sub(1) else {
            return Err(Error::invalid_argument("first epoch 0: calls count from 1"));
        };
        fill(driver, block.address(), 0, control.bare)?;
        fill(driver, block.address(), last_epoch, 4)?;
        fill(driver, block.address() + control.bare, FRESH, control.bare_bytes)?;
        fill(driver, block.address() + control.sentinel, SENTINEL, control.sentinel_bytes)?;
        fill(driver, block.address() + control.scratch, 0, control.scratch_bytes)?;
        if pool.world() > 1 {
            let places = Places::new(pool.world(), control.bytes(), options.scratch);
            let (words, words_bytes) = places.zeroed();
            fill(driver, block.address() + words, 0, words_bytes)?;
            p2p::prepare(driver, block.address(), places)?;
        }
        let modules = Modules::of(pool.driver())?;
        let usual = Shape {
            bytes: 0,
            dtype: DType::U8,
            world: pool.world(),
            input_window: true,
            output_window: true,
            direct: directly_linked(&options.links),
        };
        let list = Specialty::ready((&usual, options.asked), &control, &rows_of(pool)?)?;
        modules.make_ready((pool.rank(), pool.world()), &list)?;
        Ok(Ready(modules))
    }

    /// A communicator that signals through the control blocks at one offset of every slot, which
    /// every rank has prepared and committed.
    pub(crate) fn new(
        pool: &Pool,
        control_offset: u64,
        options: &CudaOptions,
        Ready(modules): Ready,
        alive: Alive,
    ) -> Result<Self> {
        let driver = cuda(pool)?;
        let api = Api::get()?;
        let layout: HeapLayout = pool.layout();
        let control = Control::new(layout.world, options.inbox, options.scratch)?;
        let kernels = Kernels::new(api, modules, driver, layout.world, options.concurrent);
        let fault = driver.with_context_unordered(|| Fault::new(api, pool, control_offset))?;
        let (aside, beside) =
            driver.with_context_unordered(|| Ok((api.stream()?, api.stream()?)))?;
        let places = Places::new(layout.world, control.bytes(), options.scratch);
        let p2p = P2p::new(driver, &layout, control_offset, places)?;
        let timeout = Arc::new(Timeout::new(options.timeout));
        let comm = control.comm(&layout, control_offset, timeout.nanoseconds(), fault.address());
        Ok(Self {
            pool: pool.clone(),
            maker: Maker::here(),
            api,
            rows: rows_of(pool)?,
            direct: directly_linked(&options.links),
            control,
            comm,
            all_to_all: options.all_to_all,
            kernels,
            fault: Some(fault),
            timeout,
            alive,
            order: Order::default(),
            aside,
            beside,
            channels: BTreeMap::new(),
            p2p,
            failed: None,
        })
    }

    pub(crate) fn rank(&self) -> u32 {
        self.comm.rank
    }

    pub(crate) fn world(&self) -> u32 {
        self.pool.world()
    }

    /// Bytes of a slot: no block is longer.
    pub(super) fn pool_stride(&self) -> u64 {
        self.comm.stride
    }

    /// Why all calls fail, if they do.
    pub(crate) fn failure(&mut self) -> Option<&Error> {
        if self.failed.is_none() && self.fault.as_ref().is_some_and(Fault::is_set) {
            let fault = self.fault.as_ref()?;
            let alive = &*self.alive;
            // What the latest kernels were told, whatever it was changed to since.
            let timeout = Duration::from_nanos(self.comm.timeout);
            let seen = Seen { rank: self.comm.rank, world: self.pool.world(), timeout, alive };
            self.failed = Some(fault.error(&seen));
        }
        self.failed.as_ref()
    }

    /// Refuses a call after a failure, and in a process forked from the one that made this.
    #[inline]
    pub(crate) fn ready(&mut self) -> Result<()> {
        self.maker.check("a communicator")?;
        if let Some(error) = self.failure() {
            return Err(error.clone());
        }
        self.comm.timeout = self.timeout.nanoseconds();
        Ok(())
    }

    /// A call begins, on that stream.
    #[inline]
    pub(super) fn begin(&mut self, stream: Stream) -> Result<()> {
        self.ready()?;
        self.turn_to(stream)?;
        let driver = self.pool.driver();
        let share = self.kernels.begin(stream, || driver.is_capturing(stream));
        self.comm.early = share.early.into();
        Ok(())
    }

    /// An operation that is no call of all ranks begins. Whether what follows it on its stream may take
    /// its places early.
    pub(super) fn begin_apart(&mut self) -> bool {
        self.kernels.begin_apart().early
    }

    /// No call can follow.
    pub(crate) fn abandon(&mut self) {
        self.failed.get_or_insert_with(|| {
            Error::invalid_state("a call of this communicator panicked; make a new one")
        });
    }

    /// Waits until the stream has done what was put on it, and says what went wrong there.
    pub(crate) fn synchronize(&mut self, stream: Stream) -> Result<()> {
        self.maker.check("a communicator")?;
        let driver = cuda(&self.pool)?;
        let api = self.api;
        driver.stream_handle(stream)?;
        driver.with_context(|| api.synchronize(stream))?;
        self.ready()?;
        self.noticed()
    }

    /// What calls wanted the host to know, though they went on; once.
    fn noticed(&mut self) -> Result<()> {
        let (rank, world) = (self.comm.rank, self.world());
        match self.fault.as_mut().and_then(|fault| fault.notice(rank, world)) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Enters a call only to tell the other ranks that this one cannot make it; gives back why.
    pub(crate) fn decline(&mut self, why: Error, stream: Stream) -> Error {
        match self.enter_only(Call::new(Operation::Declined), stream) {
            Ok(()) => why,
            Err(error) => error,
        }
    }

    /// A call without data.
    pub(crate) fn enter_only(&mut self, call: Call, stream: Stream) -> Result<()> {
        self.begin(stream)?;
        let kernel = self.kernel(Specialty::barrier(false))?;
        self.enter_by(kernel, call, stream)
    }

    /// A call without data that tells a kernel beside it, which is launched behind it, when all have
    /// entered.
    pub(super) fn enter_and_tell(&mut self, call: Call, stream: Stream) -> Result<()> {
        let kernel = self.kernel(Specialty::barrier(true))?;
        self.enter_by(kernel, call, stream)
    }

    /// A call without data behind copies on the stream, which have ended when it begins.
    pub(super) fn enter_after_copies(&mut self, call: Call, stream: Stream) -> Result<()> {
        let kernel = self.kernel(Specialty::barrier(false))?;
        self.enter_by(kernel.after_copies(), call, stream)
    }

    fn enter_by(&mut self, kernel: Loaded, call: Call, stream: Stream) -> Result<()> {
        // SAFETY: nothing is pointed to but the control block, which the communicator keeps.
        unsafe { self.launch(kernel, (1, BARRIER_THREADS), &CallParams::of(&call), None, stream) }
    }

    /// Every rank has called it, before what follows on the stream; what ranks wrote before is
    /// visible then.
    pub(crate) fn barrier(&mut self, stream: Stream) -> Result<()> {
        self.enter_only(Call::new(Operation::Barrier), stream)
    }

    pub(super) fn kernel(&mut self, specialty: Specialty) -> Result<Loaded> {
        self.kernels.get(specialty)
    }

    /// This rank's address of a place.
    pub(super) fn address(&self, place: Place) -> u64 {
        match place {
            Place::Plain(pointer) => pointer as u64,
            Place::Window(offset) => self.pool.layout().address(self.comm.rank, offset),
        }
    }

    /// Puts a kernel of so many blocks and threads on the stream, behind what this communicator put on
    /// another one before. All-to-alls have traffic too.
    ///
    /// # Safety
    ///
    /// As [`Kernels::launch`].
    pub(super) unsafe fn launch(
        &mut self,
        kernel: Loaded,
        grid: (u32, u32),
        params: &CallParams,
        traffic: Option<&Traffic>,
        stream: Stream,
    ) -> Result<()> {
        self.turn_to(stream)?;
        // SAFETY: as the caller promised.
        unsafe { self.launch_apart(kernel, grid, &self.comm, params, traffic, stream) }?;
        self.called(kernel, stream)
    }

    /// What is put on the stream from now on is behind what this communicator put on another one.
    pub(super) fn turn_to(&mut self, stream: Stream) -> Result<()> {
        self.order.turn_to(self.api, cuda(&self.pool)?, stream)
    }

    /// Likewise for what counts on one end of a channel.
    pub(super) fn turn_channel_to(&mut self, end: Channel, stream: Stream) -> Result<()> {
        self.channels.entry(end).or_default().turn_to(self.api, cuda(&self.pool)?, stream)
    }

    /// An operation on one end of a channel was put on the stream.
    pub(super) fn operated(&mut self, end: Channel, stream: Stream) -> Result<()> {
        let order = self.channels.entry(end).or_default();
        order.operated(self.api, cuda(&self.pool)?, stream);
        Ok(())
    }

    /// What is put on the stream next waits for a peer, outside calls.
    pub(super) fn before_a_wait(&mut self, stream: Stream) -> Result<()> {
        self.order.before_a_wait(self.api, cuda(&self.pool)?, stream);
        Ok(())
    }

    /// Never touches the stream again, which lives still, unless a call names it. What was put on it keeps
    /// its place in the order.
    pub(crate) fn forget_stream(&mut self, stream: Stream) -> Result<()> {
        self.maker.check("a communicator")?;
        let driver = cuda(&self.pool)?;
        driver.stream_handle(stream)?;
        let mut orders = std::iter::once(&mut self.order).chain(self.channels.values_mut());
        orders.try_for_each(|order| order.forget(self.api, driver, stream))
    }

    /// Refuses what is no stream of a device.
    pub(super) fn expects(&self, stream: Stream) -> Result<()> {
        cuda(&self.pool)?.stream_handle(stream).map(drop)
    }

    /// The device's ordinal in this process.
    pub(super) fn ordinal(&self) -> Result<u32> {
        Ok(cuda(&self.pool)?.facts().ordinal)
    }

    /// The last kernel of a call, so far, was put on the stream.
    fn called(&mut self, kernel: Loaded, stream: Stream) -> Result<()> {
        self.order.called(self.api, cuda(&self.pool)?, stream, kernel.share.beside);
        Ok(())
    }

    /// Puts a copy on the stream, by a copy engine.
    ///
    /// # Safety
    ///
    /// Both stretches are mapped until the stream has done it, and nothing else touches what it
    /// writes, or writes what it reads, meanwhile.
    pub(super) unsafe fn copy_apart(
        &self,
        to: u64,
        from: u64,
        bytes: u64,
        stream: Stream,
    ) -> Result<()> {
        let api = self.api;
        cuda(&self.pool)?.with_context(|| {
            // SAFETY: as the caller promised; the stream is live.
            let code = unsafe { (api.copy)(to, from, bytes as usize, stream.raw() as Handle) };
            CudaDriver::check(code, || format!("copying {bytes} bytes to {to:#x}"))
        })
    }

    /// Puts one copy of several stretches on the stream, if it can be one; says whether it did.
    ///
    /// # Safety
    ///
    /// As [`copy_apart`](Self::copy_apart), of all of them, and what lies between those that are
    /// written is mapped, too.
    pub(super) unsafe fn copy_slices(&self, slices: &Slices, stream: Stream) -> bool {
        let Some(shape) = slices.shape() else { return false };
        let api = self.api;
        let copied = cuda(&self.pool).and_then(|driver| {
            driver.with_context(|| {
                // SAFETY: as the caller promised; the driver copies the shape; the stream is live.
                let code = unsafe { (api.copy_slices)(&raw const shape, stream.raw() as Handle) };
                CudaDriver::check(code, || format!("copying {slices:?}"))
            })
        });
        if let Err(error) = &copied {
            tracing::debug!(%error, "one by one instead");
        }
        copied.is_ok()
    }

    /// Where all peers' copies of this rank's output lie in a row, if they can.
    pub(super) fn peers_in_a_row(&self, address: u64, bytes: u64) -> Option<PeerRow> {
        let row = self.pool.peers_in_a_row(address, bytes);
        if let Err(error) = &row {
            tracing::debug!(%error, "peers' memory is not mapped in a row");
        }
        row.ok()
    }

    /// A peer's address of what this rank has at `address` in a window.
    pub(super) fn at_peer(&self, address: u64, peer: u32) -> u64 {
        self.pool.layout().address(peer, address - self.pool.layout().address(self.comm.rank, 0))
    }

    pub(super) fn scratch_of(&self, rank: u32) -> u64 {
        self.pool.layout().address(rank, self.comm.control + self.control.scratch)
    }

    /// Puts a kernel on the stream, whatever is on others.
    ///
    /// # Safety
    ///
    /// As [`Kernels::launch`].
    pub(super) unsafe fn launch_apart(
        &self,
        kernel: Loaded,
        grid: (u32, u32),
        comm: &Comm,
        params: &CallParams,
        traffic: Option<&Traffic>,
        stream: Stream,
    ) -> Result<()> {
        cuda(&self.pool)?.with_context(|| {
            // SAFETY: as the caller promised.
            unsafe { self.kernels.launch(kernel, grid, stream, comm, params, traffic) }
        })
    }

    /// Puts a kernel of a row exchange on the stream, behind what this communicator put on another
    /// one before.
    ///
    /// # Safety
    ///
    /// As [`Kernels::launch_rows`].
    pub(super) unsafe fn launch_rows(
        &mut self,
        kernel: Loaded,
        grid: (u32, u32),
        work: &RowWork,
        stream: Stream,
    ) -> Result<()> {
        self.turn_to(stream)?;
        cuda(&self.pool)?.with_context(|| {
            // SAFETY: as the caller promised.
            unsafe { self.kernels.launch_rows(kernel, grid, stream, &self.comm, work) }
        })?;
        self.called(kernel, stream)
    }

    /// Makes a stream wait for what another one has been given, in graphs too.
    pub(super) fn fork(&self, from: Stream, stream: Stream) -> Result<()> {
        fork(&**self.pool.driver(), from, stream)
    }
}

impl Drop for CudaEngine {
    /// Waits for the device: kernels under way know the control block and the fault record.
    fn drop(&mut self) {
        let Ok(driver) = cuda(&self.pool) else { return };
        let (api, fault) = (self.api, self.fault.take());
        let orders = std::iter::once(&mut self.order).chain(self.channels.values_mut());
        let streams = [self.aside, self.beside];
        let deadline = self.pool.group().deadline();
        if let Err(error) = self.pool.driver().synchronize_by(deadline) {
            // What may still run keeps what it knows.
            self.kernels.keep();
            tracing::warn!(%error, "a communicator's kernels and memory are not given back");
            return;
        }
        let cleaned = driver.with_context_unordered(|| {
            orders.for_each(|order| order.end(api));
            for stream in streams {
                // SAFETY: made by this value and given up here; nothing runs on it.
                let code = unsafe { (api.stream_destroy)(stream.raw() as Handle) };
                CudaDriver::check(code, || "giving back a stream".to_owned())?;
            }
            if let Some(fault) = fault {
                fault.free(api);
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

fn cuda(pool: &Pool) -> Result<&CudaDriver> {
    modules::cuda(pool.driver())
}

/// What was measured on the ranks' devices.
fn rows_of(pool: &Pool) -> Result<Rows> {
    let name = |rank| Ok(pool.device(rank)?.name.as_str());
    let devices: Result<Vec<&str>> = (0..pool.world()).map(name).collect();
    Ok(Rows::of(&devices?))
}

/// Fills device memory with a word.
fn fill(driver: &CudaDriver, address: u64, word: u32, bytes: u64) -> Result<()> {
    // SAFETY: the caller passes a part of a block it holds, whose parts begin and end at multiples
    // of 4096; no other rank knows of it before the commit.
    unsafe { driver.fill(address, word, bytes / 4) }
}
