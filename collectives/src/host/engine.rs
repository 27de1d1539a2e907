//! One rank's side of a communicator in host memory: its epoch, its two kinds of wait, its fate.

#![allow(unsafe_code)] // builds the view of shared memory, from the caller's promise

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use symmpool_allocator::topology::{Mesh, Topology};
use symmpool_allocator::{Deadline, Error, HeapLayout, Maker, Result};

use super::call::{Call, Operation, mismatch};
use super::control::{Control, peers};
use super::cores::enough_here;
use super::fault::{Cause, End, Fault};
use super::kernels::{Isa, ReduceFn, prepare_to_copy, select};
use super::options::HostOptions;
use super::place::{Data, InPlace, Place, Resolver, checked, disjoint};
use super::wait::{Patience, SLICE, Waiter, wake};
use crate::allreduce::Halves;
use crate::alltoallv::Shares;
use crate::signal::{await_word, entry_word, is_entry, wake_sleepers};
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
    #[inline]
    pub(crate) fn or_decline<T>(&mut self, found: Result<T>) -> Result<T> {
        found.map_err(|why| self.decline(why))
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
    /// that (rule S4).
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

    /// The first phase of every call: tells every peer what this rank calls, waits until every
    /// peer has told, and compares. What this rank wrote before is visible to peers after, and the
    /// reverse.
    ///
    /// # Errors
    ///
    /// `is_diverged`, the same on every rank, when calls differ; `is_timeout` or `is_peer_lost`
    /// when a peer does not come, which closes the communicator.
    #[inline]
    pub(crate) fn enter(&mut self, call: &Call) -> Result<()> {
        let (epoch, parity) = (self.epoch, self.parity());
        if self.meet(call)? { Ok(()) } else { Err(self.disagreement(call, parity, epoch)) }
    }

    /// [`Self::enter`] of an all-to-all that shows rows: whether all ranks said the same of it. It is no
    /// other call where some said that their parts are equal, as rows tell what these are.
    #[inline]
    pub(crate) fn enter_exchange(&mut self, call: &Call) -> Result<bool> {
        let (epoch, parity) = (self.epoch, self.parity());
        if self.meet(call)? { Ok(true) } else { self.exchange_alike(call, parity, epoch) }
    }

    /// What ranks that said different things of an all-to-all come to.
    #[cold]
    fn exchange_alike(&mut self, call: &Call, parity: u64, epoch: u64) -> Result<bool> {
        for peer in self.peers() {
            // It is there: the peer has entered, and its next word here is that of the call after the
            // next, which this rank has to enter first.
            let word = match self.await_entry(peer, parity, epoch) {
                Ok(word) => word,
                Err(end) => return Err(self.close(end)),
            };
            let slot = self.control.entry(self.layout.rank, parity, peer);
            let theirs = Call::from_words(slot.details());
            // The digest tells options that differ as well.
            let true_to_word = entry_word(epoch, theirs.digest(self.salt)) == word;
            if !true_to_word || theirs.without_parts() != call.without_parts() {
                return Err(self.disagreement(call, parity, epoch));
            }
        }
        Ok(false)
    }

    /// Tells what this rank calls, waits for what the others call, and says whether it is the same.
    #[inline]
    fn meet(&mut self, call: &Call) -> Result<bool> {
        let (me, epoch, parity) = (self.layout.rank, self.epoch, self.parity());
        let word = self.announce(call);
        let mut all_agree = true;
        for peer in self.peers() {
            match self.await_entry(peer, parity, epoch) {
                Ok(theirs) => all_agree &= theirs == word,
                Err(end) => return Err(self.close(end)),
            }
        }
        // A peer that waited in vain for this very call has left its words behind, and may use its
        // memory for something else by now.
        if self.control.aborted(me)
            && let Some(end) = self.control.told(&self.layout)
        {
            return Err(self.close(end));
        }
        Ok(all_agree)
    }

    /// Tells every peer that this rank makes a call; returns the word that says which.
    #[inline]
    fn announce(&mut self, call: &Call) -> u64 {
        let (me, epoch, parity) = (self.layout.rank, self.epoch, self.parity());
        let word = entry_word(epoch, call.digest(self.salt));
        self.operation = call.words()[0] as u8;
        self.steps_before = self.steps;
        // Advanced before anything can fail: the call counts, however it ends (S2).
        self.epoch += 1;
        for peer in self.peers() {
            self.control.entry(peer, parity, me).publish(word, call.words());
        }
        wake_sleepers(self.peers().map(|peer| self.control.entry(peer, parity, me)), wake);
        word
    }

    /// A later phase: signals every peer, and waits for every peer's signal.
    #[inline]
    pub(crate) fn step(&mut self) -> Result<()> {
        let me = self.layout.rank;
        self.steps += 1;
        let (step, parity) = (self.steps, self.steps & 1);
        for peer in self.peers() {
            self.control.step(peer, parity, me).publish_word(step);
        }
        wake_sleepers(self.peers().map(|peer| self.control.step(peer, parity, me)), wake);
        for peer in self.peers() {
            if let Err(end) = self.await_step(peer, step) {
                return Err(self.close(end));
            }
        }
        Ok(())
    }

    #[inline]
    fn await_entry(&self, peer: u32, parity: u64, epoch: u64) -> Result<u64, End> {
        let slot = self.control.entry(self.layout.rank, parity, peer);
        let mut waiter = Waiter::new(self.patience, self.watch(peer, 0, epoch));
        await_word(slot, |word| is_entry(word, epoch), &mut waiter)
    }

    #[inline]
    fn await_step(&self, peer: u32, step: u64) -> Result<u64, End> {
        let slot = self.control.step(self.layout.rank, step & 1, peer);
        let phase = (step - self.steps_before) as u32;
        // The call's own epoch; `self.epoch` is already the next one's.
        let mut waiter = Waiter::new(self.patience, self.watch(peer, phase, self.epoch - 1));
        await_word(slot, |word| word == step, &mut waiter)
    }

    /// Enters only to tell the others that this rank refused its own arguments, so that they get
    /// an error instead of a wait, and epochs stay aligned. Returns the error for this rank.
    #[cold]
    pub(crate) fn decline(&mut self, why: Error) -> Error {
        if let Err(closed) = self.ready() {
            return closed;
        }
        match self.enter(&Call::new(Operation::Declined)) {
            Err(error) if self.failed.get().is_some() => error,
            Ok(()) | Err(_) => why,
        }
    }

    /// The same for a rank that will make no call any more: it waits for nobody. Returns the error.
    #[cold]
    pub(crate) fn give_up(&mut self, why: Error) -> Error {
        if let Err(closed) = self.ready() {
            return closed;
        }
        self.announce(&Call::new(Operation::Declined));
        self.failed.get_or_init(|| {
            let rank = self.layout.rank;
            why.clone().context(format!("rank {rank}: this communicator is closed; rebuild it"))
        });
        why
    }

    /// Closes the engine after a panic inside a call, which may have left its peers waiting.
    #[cold]
    pub(crate) fn abandon(&mut self) {
        self.failed.get_or_init(|| {
            Error::invalid_state(format!(
                "rank {}: an earlier call of this communicator panicked; rebuild it on every rank",
                self.layout.rank
            ))
        });
    }

    /// Every rank sees the same words, so makes the same error of them.
    #[cold]
    fn disagreement(&self, mine: &Call, parity: u64, epoch: u64) -> Error {
        let me = self.layout.rank;
        let calls: Vec<Call> = (0..self.layout.world)
            .map(|rank| match rank {
                rank if rank == me => *mine,
                peer => Call::from_words(self.control.entry(me, parity, peer).details()),
            })
            .collect();
        mismatch(epoch, &calls)
    }

    /// What a waiter looks for once it has stopped spinning: an abort, the peer's death, the
    /// deadline.
    #[inline]
    fn watch(&self, peer: u32, phase: u32, epoch: u64) -> impl FnMut() -> Result<(), End> {
        let mut deadline: Option<Deadline> = None;
        let mut next_look = None;
        let mut dead = false;
        move || {
            if self.control.aborted(self.layout.rank)
                && let Some(end) = self.control.told(&self.layout)
            {
                return Err(end);
            }
            let deadline = deadline.get_or_insert_with(|| Deadline::after(self.timeout.get()));
            let fault = |cause| {
                let timeout = deadline.budget();
                Fault { cause, operation: self.operation, phase, peer, epoch, timeout }
            };
            // The peer may have signalled and then ended: one more look came after `dead` was set.
            if dead {
                return Err(End { fault: fault(Cause::PeerLost), reporter: None });
            }
            if deadline.expired() {
                return Err(End { fault: fault(Cause::Timeout), reporter: None });
            }
            if let Some(alive) = &self.options.peer_alive {
                let now = Instant::now();
                if next_look.is_none_or(|at| now >= at) {
                    // Not at once: a peer that is merely late costs no system call.
                    dead = next_look.is_some() && !alive(peer);
                    next_look = Some(now + if dead { Duration::ZERO } else { SLICE });
                }
            }
            Ok(())
        }
    }

    /// Closes the communicator: tells the peers, unless one told us, and keeps the error for later
    /// calls.
    #[cold]
    fn close(&mut self, end: End) -> Error {
        let me = self.layout.rank;
        if end.reporter.is_none() {
            for peer in self.peers() {
                self.control.tell(peer, me, &end.fault);
            }
            // Pairs with the fence between a rank's entry and its look at the abort flag: a late
            // peer sees the flag, unless it had entered before.
            std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        }
        let error = end.fault.to_error(me, end.reporter);
        tracing::error!(rank = me, epoch = end.fault.epoch, %error, "communicator closed");
        self.failed.get_or_init(|| error).clone()
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
