//! One rank's state of a communicator in host memory, and where data and scratch lie. `handshake` has the phases of
//! a call and what happens when a wait fails; `plan_signals` the signals of plans; `decline` has calls that this rank declines.

#![allow(unsafe_code)] // builds the view of shared memory, from the caller's promise

mod decline;
mod handshake;
pub(in crate::host) mod host_algorithm;
pub(in crate::host) mod options;
mod plan_signals;
mod rehearsal;

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use symmpool_allocator::topology::{Topology, TopologyKind};
use symmpool_allocator::{Error, HeapLayout, ProcessId, Result};

use self::options::HostEngineOptions;
use crate::host::kernels::{Isa, ReduceFn, prepare_to_copy, select};
use crate::host::layout::control::{ControlBlock, peers};
use crate::host::layout::expert_scratch::ExpertScratch;
use crate::host::layout::load_balance::LoadBalance;
use crate::host::layout::paired_groups::PairedGroups;
use crate::host::layout::place::{Data, InPlace, Resolver, checked, disjoint};
use crate::host::wait::cores::enough_here;
use crate::host::wait::shared_cores::SharedCores;
use crate::host::wait::waiter::SpinPolicy;
use crate::signal::parity;
use crate::types::place::Place;
use crate::types::timeout::Timeout;
use crate::{DType, ReduceOp};

/// One rank's side of a communicator in host memory.
///
/// Every rank makes the same calls in the same order. If ranks make different calls, every rank gets an error before
/// data is accessed (rule S6). Calls need `&mut self`, so there is one at a time. After a timeout or a lost peer, all
/// later calls fail with the same cause. In a forked child all calls are refused, because its signals would be taken
/// for its parent's.
pub struct HostEngine {
    pub(in crate::host) layout: HeapLayout,
    pub(in crate::host) control: ControlBlock,
    pub(in crate::host) options: HostEngineOptions,
    /// The timeout of `options`, until it is changed.
    pub(crate) timeout: Arc<Timeout>,
    pub(in crate::host) spin_policy: SpinPolicy,
    shared_cores: SharedCores,
    isa: Isa,
    salt: u64,
    /// How the links group the ranks, or why they do not.
    pub(crate) paired_groups: std::result::Result<PairedGroups, String>,
    /// Whether the links are known to be a hybrid cube mesh.
    pub(crate) cube_mesh: bool,
    /// The epoch of the next call. Rule S2: every call has one, however it ends.
    epoch: u64,
    /// Steps signalled so far, over all calls.
    steps: u64,
    /// The value of `steps` when the current call began; for error messages.
    steps_before: u64,
    /// Code of the current operation; for error messages.
    operation: u8,
    /// How long the current call waits for a rank: the value of `timeout` when the call began.
    call_timeout: Duration,
    /// Calls that this rank declined, and which not all other ranks have reached yet.
    declined: Option<decline::DeclinedCalls>,
    plan_signals: plan_signals::PlanSignals,
    /// Shared with [`HostOneSided`](super::HostOneSided), which signals outside of calls.
    pub(in crate::host) failed: Arc<OnceLock<Error>>,
    pub(in crate::host) maker: ProcessId,
    /// Lists for the addresses that a reduction reads and writes. They are kept so that calls need not allocate.
    pub(crate) sources: Vec<*const u8>,
    pub(crate) outputs: Vec<*mut u8>,
    pub(crate) load_balance: LoadBalance,
    /// The sums of a fused all-reduce.
    pub(crate) norm_sums: Vec<u8>,
    pub(crate) expert_scratch: ExpertScratch,
    /// The algorithm of a call, while it is rehearsed.
    rehearsed: Option<String>,
}

// SAFETY: the raw pointers are scratch lists that are empty between calls; everything else is
// numbers, atomics in shared memory, and a callback that is itself `Send`.
unsafe impl Send for HostEngine {}

impl HostEngine {
    /// Bytes of the control block that `world` ranks need with these options: a multiple of 128. The block must be
    /// allocated at an offset that is a multiple of 128 too, and the same on every rank. Refuses a number of ranks and
    /// options with which no engine can be made ([`Error::is_invalid_argument`]).
    pub fn control_bytes(world: u32, options: &HostEngineOptions) -> Result<u64> {
        options.check(world)?;
        ControlBlock::required(world, options.scratch_bytes)
    }

    /// How many bytes at the beginning of the control block must be zero.
    pub(crate) fn zeroed_bytes(world: u32, options: &HostEngineOptions) -> Result<u64> {
        ControlBlock::zeroed(world, options.scratch_bytes)
    }

    /// A communicator over the heap `layout`, which signals through the control blocks at `control_offset` of every
    /// slot. It exchanges nothing with other ranks, so ranks may make theirs at any time.
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` if the control block is too small (see [`Self::control_bytes`]),
    /// misaligned or outside a slot, if `rank` is not below `world`, or if an option is out of
    /// range.
    ///
    /// # Safety
    ///
    /// Until the engine is dropped, on this and on every other rank:
    /// - `control_offset .. control_offset + control_bytes` of every slot is mapped readable and
    ///   writable, and is used by nothing else; its first bytes, up to the packets, were all zero when the first rank
    ///   began to use it;
    /// - every heap offset that is passed to a call as [`Place::Window`] is mapped in every slot.
    pub unsafe fn new(
        layout: HeapLayout,
        control_offset: u64,
        control_bytes: u64,
        options: HostEngineOptions,
    ) -> Result<Self> {
        if layout.rank >= layout.world {
            return Err(Error::invalid_argument(format!(
                "rank {} of a group of {} ranks",
                layout.rank, layout.world
            )));
        }
        options.check(layout.world)?;
        // SAFETY: the caller promised that the control block is mapped in every slot until the engine is dropped,
        // zero at first, and used by nothing else.
        let control = unsafe {
            ControlBlock::new(&layout, control_offset, control_bytes, options.scratch_bytes)?
        };
        let spin = options.spin.unwrap_or_else(|| enough_here(layout.world));
        let spin_policy = SpinPolicy::new(spin && layout.world > 1);
        let world = layout.world as usize;
        prepare_to_copy();
        Ok(Self {
            layout,
            control,
            spin_policy,
            shared_cores: SharedCores::new(layout.world, spin),
            isa: Isa::detect(),
            salt: options.salt(),
            paired_groups: PairedGroups::find(
                options.links.as_ref().unwrap_or(&Topology::host(layout.world)),
            ),
            cube_mesh: options.links.as_ref().map(Topology::kind)
                == Some(TopologyKind::HybridCubeMesh),
            epoch: options.first_epoch,
            steps: 0,
            steps_before: 0,
            operation: 0,
            call_timeout: options.timeout,
            declined: None,
            plan_signals: plan_signals::PlanSignals::new(layout.world),
            failed: Arc::default(),
            maker: ProcessId::here(),
            timeout: Arc::new(Timeout::new(options.timeout)),
            sources: Vec::with_capacity(world),
            outputs: Vec::with_capacity(world),
            load_balance: LoadBalance::default(),
            norm_sums: Vec::new(),
            expert_scratch: ExpertScratch::default(),
            rehearsed: None,
            options,
        })
    }

    /// This process's rank.
    pub fn rank(&self) -> u32 {
        self.layout.rank
    }

    /// The number of ranks.
    pub fn world(&self) -> u32 {
        self.layout.world
    }

    /// The error that all calls return since the communicator failed, if it has.
    pub fn failure(&self) -> Option<&Error> {
        self.failed.get()
    }

    /// Has waits sleep after a few yields. Every yield makes the operating system prefer other threads to this one later, too,
    /// so many of them cost more than they save where each call waits for threads that carry data.
    pub(crate) fn sleep_soon(&mut self) {
        self.spin_policy = self.spin_policy.with_few_yields();
        self.shared_cores.sleep_soon();
    }

    /// Returns an error after the communicator failed, and in a process that was forked from the one that made
    /// it. Every call begins with this.
    #[inline]
    pub(crate) fn ready(&self) -> Result<()> {
        self.maker.check("a communicator")?;
        match self.failed.get() {
            None => Ok(()),
            Some(error) => Err(error.clone()),
        }
    }

    /// Returns what `found` has if it is valid. Else declines the call, and the other ranks get an error too. After this the
    /// call may write to this rank's scratch and row.
    #[inline]
    pub(crate) fn or_decline<T>(&mut self, found: Result<T>) -> Result<T> {
        match found {
            Ok(found) if self.is_rehearsing() => Ok(found),
            Ok(found) => {
                self.catch_up()?;
                Ok(found)
            }
            Err(why) => Err(self.decline(why)),
        }
    }

    /// The bytes of a part of `count` elements, the bytes of the parts of all ranks, and where this rank's part begins in
    /// those. `None` stands for a number that is too large.
    #[inline]
    pub(crate) fn part_of_all(
        &self,
        count: usize,
        dtype: DType,
    ) -> (Option<usize>, Option<usize>, usize) {
        let part = count.checked_mul(dtype.size());
        let times = |ranks: u32| part.and_then(|part| part.checked_mul(ranks as usize));
        (part, times(self.world()), times(self.rank()).unwrap_or(0))
    }

    /// This rank's addresses of an input and an output. They must not overlap, unless one lies in the other exactly
    /// where `in_place` says.
    #[inline]
    pub(crate) fn resolve(
        &self,
        (input, input_bytes): (Place, Option<usize>),
        (output, output_bytes): (Place, Option<usize>),
        in_place: InPlace,
    ) -> Result<Data> {
        let resolver = Resolver { layout: &self.layout, control: &self.control };
        let (input_bytes, output_bytes) = (checked(input_bytes)?, checked(output_bytes)?);
        let from = resolver.address("input", input, input_bytes)?;
        let to = resolver.address("output", output, output_bytes)?;
        let same = match in_place {
            InPlace::Never => false,
            InPlace::OutputAt(bytes) => from.wrapping_add(bytes) == to,
            InPlace::InputAt(bytes) => to.wrapping_add(bytes) == from,
        };
        if !same {
            disjoint((from, input_bytes), (to, output_bytes))?;
        }
        Ok(Data { input, output, from, to, in_place: same })
    }

    /// This rank's address of the buffer of a call that has one only.
    #[inline]
    pub(crate) fn resolve_one(&self, place: Place, bytes: Option<usize>) -> Result<*mut u8> {
        let resolver = Resolver { layout: &self.layout, control: &self.control };
        resolver.address("buffer", place, checked(bytes)?)
    }

    /// The loop that reduces elements of this type. Declines the call if there is none.
    #[inline]
    pub(crate) fn reduction(&mut self, what: &str, dtype: DType, op: ReduceOp) -> Result<ReduceFn> {
        let found = select(self.isa, dtype, op);
        found.ok_or_else(|| self.decline(dtype.only_moved(what, self.rank())))
    }

    /// The loop that reduces elements of this type, if there is one.
    pub(crate) fn reduce_loop(&self, dtype: DType, op: ReduceOp) -> Option<ReduceFn> {
        select(self.isa, dtype, op)
    }

    /// How many calls were made.
    #[cfg(test)]
    pub(crate) fn next_epoch(&self) -> u64 {
        self.epoch
    }

    /// The parity of the next call, which says which half of scratch it uses.
    #[inline]
    fn parity(&self) -> u64 {
        parity(self.epoch)
    }

    /// This rank's scratch for the next call, which may be filled before [`Self::handshake`]. Scratch of this parity
    /// is free: every peer has begun the last call, so it has finished the one before that (rule S4). Where this rank
    /// refused the last call, [`Self::catch_up`] has waited for that.
    #[inline]
    pub(crate) fn next_scratch(&self) -> *mut u8 {
        self.control.scratch(self.layout.rank, self.parity())
    }

    /// `owner`'s scratch for the current call, whose handshake has begun.
    #[inline]
    pub(crate) fn scratch(&self, owner: u32) -> *mut u8 {
        self.control.scratch(owner, self.parity() ^ 1)
    }

    /// The bytes of scratch that a call has.
    #[inline]
    pub(crate) fn scratch_bytes(&self) -> usize {
        self.control.scratch_bytes()
    }

    /// Writes an entry of this rank's row for the next call. You must call this before the handshake.
    #[inline]
    pub(crate) fn set_next_row(&self, index: u32, value: u64) {
        let row = self.control.row(self.layout.rank, self.parity(), index);
        row.store(value, std::sync::atomic::Ordering::Relaxed);
    }

    /// Writes an entry of this rank's row for the current call. You must call this after the handshake, for an entry that no
    /// peer reads before the next step.
    pub(crate) fn set_row(&self, index: u32, value: u64) {
        let row = self.control.row(self.layout.rank, self.parity() ^ 1, index);
        row.store(value, std::sync::atomic::Ordering::Relaxed);
    }

    /// An entry that this rank wrote with [`Self::set_next_row`].
    #[inline]
    pub(crate) fn next_row(&self, index: u32) -> u64 {
        let row = self.control.row(self.layout.rank, self.parity(), index);
        row.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// An entry of `owner`'s row of the current call. You must call this after the handshake.
    #[inline]
    pub(crate) fn row(&self, owner: u32, index: u32) -> u64 {
        self.control.row(owner, self.parity() ^ 1, index).load(std::sync::atomic::Ordering::Relaxed)
    }

    /// This process's address of an offset in `rank`'s slot.
    #[inline]
    pub(crate) fn window(&self, rank: u32, offset: u64) -> *mut u8 {
        (self.layout.base + u64::from(rank) * self.layout.stride + offset) as *mut u8
    }

    /// The other ranks, beginning with the one after this rank.
    #[inline]
    pub(crate) fn peers(&self) -> impl Iterator<Item = u32> + use<> {
        peers(&self.layout)
    }
}

impl fmt::Debug for HostEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostEngine")
            .field("layout", &self.layout)
            .field("epoch", &self.epoch)
            .field("options", &self.options)
            .field("failed", &self.failed)
            .finish()
    }
}
