//! One rank's side of a communicator in host memory: what it is made of, and where data and scratch lie.
//! `handshake` has its two kinds of wait, and its fate; `refusal` has what becomes of a call whose arguments
//! this rank refuses.

#![allow(unsafe_code)] // builds the view of shared memory, from the caller's promise

mod handshake;
mod refusal;

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use symmpool_allocator::topology::{Mesh, Topology};
use symmpool_allocator::{Error, HeapLayout, Maker, Result};

use super::collectives::all_reduce::Halves;
use super::collectives::all_to_all::Shares;
use super::control::{Control, peers};
use super::cores::enough_here;
use super::kernels::{Isa, ReduceFn, prepare_to_copy, select};
use super::options::HostOptions;
use super::place::{Data, InPlace, Place, Resolver, checked, disjoint};
use super::wait::Patience;
use crate::timeout::Timeout;
use crate::{AllToAllAlgorithm, DType, ReduceOp};

/// One rank's side of a communicator in host memory.
///
/// Every rank makes the same calls in the same order; a rank that calls something else is told so,
/// as is every other, before data is touched (rule S6). Calls need `&mut self`: one at a time.
/// After a timeout or a lost peer, all later calls fail with the same cause.
/// In a forked child all calls are refused: its signals would be its parent's.
pub struct HostEngine {
    pub(super) layout: HeapLayout,
    pub(super) control: Control,
    options: HostOptions,
    /// What `options` said, until it is changed.
    pub(crate) timeout: Arc<Timeout>,
    pub(super) patience: Patience,
    isa: Isa,
    salt: u64,
    /// How the links group the ranks, or why they do not.
    pub(crate) halves: std::result::Result<Halves, String>,
    /// Whether the links are known to be a hybrid cube mesh.
    pub(crate) cube_mesh: bool,
    /// Of the next call. Rule S2: one per call, however it ends.
    epoch: u64,
    /// Steps signalled so far, over all calls.
    steps: u64,
    /// The value of `steps` when the current call began; for messages.
    steps_before: u64,
    /// Code of the call under way; for messages.
    operation: u8,
    /// How long the call under way waits for a rank: what `timeout` said when it began.
    call_timeout: Duration,
    /// Calls that this rank refused, and has not met the others in yet.
    refused: Option<refusal::Refused>,
    /// Shared with whoever signals outside calls.
    pub(super) failed: Arc<OnceLock<Error>>,
    pub(super) maker: Maker,
    /// Kept to spare calls an allocation.
    pub(crate) sources: Vec<*const u8>,
    pub(crate) outputs: Vec<*mut u8>,
    /// Likewise.
    pub(crate) shares: Shares,
}

// SAFETY: the raw pointers are scratch lists that are empty between calls; everything else is
// numbers, atomics in shared memory, and a callback that is itself `Send`.
unsafe impl Send for HostEngine {}

impl HostEngine {
    /// Bytes of control block that a group of `world` ranks needs with these options: a multiple
    /// of 128, to be allocated at such an offset, the same on every rank. Refuses a group and
    /// options with which no engine can be made ([`Error::is_invalid_argument`]).
    pub fn control_bytes(world: u32, options: &HostOptions) -> Result<u64> {
        options.check(world)?;
        Control::required(world, options.scratch_bytes)
    }

    /// A communicator over the heap `layout`, signalling through the control blocks at
    /// `control_offset` of every slot. Talks to nobody: ranks may build theirs at any time.
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
    ///   writable, was all zero when the first rank began to use it, and is used by nothing else;
    /// - every heap offset that is passed to a call as [`Place::Window`] is mapped in every slot.
    pub unsafe fn new(
        layout: HeapLayout,
        control_offset: u64,
        control_bytes: u64,
        options: HostOptions,
    ) -> Result<Self> {
        if layout.rank >= layout.world {
            return Err(Error::invalid_argument(format!(
                "rank {} of a group of {} ranks",
                layout.rank, layout.world
            )));
        }
        options.check(layout.world)?;
        // SAFETY: the caller promises just this, for longer than the engine lives.
        let control =
            unsafe { Control::new(&layout, control_offset, control_bytes, options.scratch_bytes)? };
        let spin = options.spin.unwrap_or_else(|| enough_here(layout.world));
        let patience = Patience::new(spin && layout.world > 1);
        let world = layout.world as usize;
        prepare_to_copy();
        Ok(Self {
            layout,
            control,
            patience,
            isa: Isa::detect(),
            salt: options.salt(),
            halves: Halves::find(options.links.as_ref().unwrap_or(&Topology::host(layout.world))),
            cube_mesh: options.links.as_ref().map(Topology::mesh) == Some(Mesh::HybridCubeMesh),
            epoch: options.first_epoch,
            steps: 0,
            steps_before: 0,
            operation: 0,
            call_timeout: options.timeout,
            refused: None,
            failed: Arc::default(),
            maker: Maker::here(),
            timeout: Arc::new(Timeout::new(options.timeout)),
            sources: Vec::with_capacity(world),
            outputs: Vec::with_capacity(world),
            shares: Shares::default(),
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

    /// Why all calls fail, if they do.
    pub fn failure(&self) -> Option<&Error> {
        self.failed.get()
    }

    /// Refuses when an earlier call failed for good, and in a process that was forked from the one
    /// that made this. Every call begins with this.
    #[inline]
    pub(crate) fn ready(&self) -> Result<()> {
        self.maker.check("a communicator")?;
        match self.failed.get() {
            None => Ok(()),
            Some(error) => Err(error.clone()),
        }
    }

    /// What a call has found about its arguments, or why it cannot be, which the other ranks are told.
    /// From here on the call may write to this rank's scratch and rows.
    #[inline]
    pub(crate) fn or_decline<T>(&mut self, found: Result<T>) -> Result<T> {
        match found {
            Ok(found) => {
                self.catch_up()?;
                Ok(found)
            }
            Err(why) => Err(self.decline(why)),
        }
    }

    /// Bytes of `count` elements, of as many for every rank, and where this rank's begin in those; none
    /// where there cannot be as many.
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

    /// This rank's addresses of an input and an output, which lie apart or, if the address of the
    /// one is as far into the other as `in_place` says, in place.
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

    /// This rank's address of the one buffer of a call.
    #[inline]
    pub(crate) fn resolve_one(&self, place: Place, bytes: Option<usize>) -> Result<*mut u8> {
        let resolver = Resolver { layout: &self.layout, control: &self.control };
        resolver.address("buffer", place, checked(bytes)?)
    }

    /// The loop that reduces, or why there is none, which the other ranks are told.
    #[inline]
    pub(crate) fn reduction(&mut self, what: &str, dtype: DType, op: ReduceOp) -> Result<ReduceFn> {
        let found = select(self.isa, dtype, op);
        found.ok_or_else(|| self.decline(dtype.only_moved(what, self.rank())))
    }

    /// The parity of the next call: which scratch is this rank's to fill before it enters.
    #[inline]
    fn parity(&self) -> u64 {
        self.epoch & 1
    }

    /// A rank's scratch for the next call: what to fill before [`Self::enter`]. Own scratch of
    /// this parity is free: every peer has entered the call before, so is done with the one before
    /// that (rule S4). [`Self::catch_up`] has seen to that where this rank refused that call.
    #[inline]
    pub(crate) fn next_scratch(&self) -> *mut u8 {
        self.control.scratch(self.layout.rank, self.parity())
    }

    /// `owner`'s scratch for the call that was last entered.
    #[inline]
    pub(crate) fn scratch(&self, owner: u32) -> *mut u8 {
        self.control.scratch(owner, self.parity() ^ 1)
    }

    /// How all-to-alls are to go.
    #[inline]
    pub(crate) fn all_to_all_way(&self) -> AllToAllAlgorithm {
        self.options.all_to_all
    }

    /// Bytes of scratch a call has.
    #[inline]
    pub(crate) fn scratch_bytes(&self) -> usize {
        self.control.scratch_bytes()
    }

    /// Where this rank writes its row for the next call, before it enters.
    #[inline]
    pub(crate) fn set_next_row(&self, index: u32, value: u64) {
        let row = self.control.row(self.layout.rank, self.parity(), index);
        row.store(value, std::sync::atomic::Ordering::Relaxed);
    }

    /// What this rank wrote with [`Self::set_next_row`].
    #[inline]
    pub(crate) fn next_row(&self, index: u32) -> u64 {
        let row = self.control.row(self.layout.rank, self.parity(), index);
        row.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// `owner`'s row of the call that was last entered.
    #[inline]
    pub(crate) fn row(&self, owner: u32, index: u32) -> u64 {
        self.control.row(owner, self.parity() ^ 1, index).load(std::sync::atomic::Ordering::Relaxed)
    }

    /// The same offset in `rank`'s slot.
    #[inline]
    pub(crate) fn window(&self, rank: u32, offset: u64) -> *mut u8 {
        (self.layout.base + u64::from(rank) * self.layout.stride + offset) as *mut u8
    }

    /// The other ranks, starting after this one.
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
