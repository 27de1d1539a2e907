//! One-sided operations: copies and signals between two ranks, which are in no order with collectives.
//!
//! They are not collective: ranks need not make the same ones, they have no epoch, and there is no
//! handshake (rules S1, S2 and S6 are about collectives). They commit nothing either, as that takes all
//! ranks. Wrong arguments are reported to the caller alone.

#![allow(unsafe_code)] // copies between raw memory of ranks

use std::time::Duration;

use bytemuck::Pod;
use symmpool_allocator::{Block, Error, Result, Stream};

use super::Communicator;
use crate::signal::channel::CHANNELS;

/// Who makes a copy on a device. In host memory it is the CPU.
#[derive(Clone, Copy, Debug)]
enum By {
    /// A kernel, which then signals the peer on a channel if there is one.
    Kernel(Option<u32>),
    CopyEngine,
}

impl Communicator {
    /// Number of channels from each rank to each other one.
    pub const CHANNELS: u32 = CHANNELS;

    /// Copies `src` into `peer`'s copy of `dst`, from element `at` on. `dst` lies in windows: commit
    /// the pool after allocating it. `peer` may be this rank.
    ///
    /// In host memory the copy is done when the call returns; on a device it is put on `stream`.
    /// The peer is to read it only after a later [`Self::signal`] of this thread or stream, and
    /// nobody else touches the elements until then. For parts of `src` see [`Self::put_at`].
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` for a peer that is no rank, elements beyond the end of `dst`, memory
    /// that is no window, and copies onto themselves; why the communicator has failed, if it has.
    pub fn put<T: Pod>(
        &self,
        dst: &Block<T>,
        at: usize,
        src: &Block<T>,
        peer: u32,
        stream: &Stream,
    ) -> Result<()> {
        self.check_block("put", src, peer)?;
        let to = self.element("put", dst, at, src.len(), peer)?;
        // SAFETY: both blocks are borrowed, so live and mapped, for this length. Whoever else
        // touches them meanwhile does so through raw pointers as well: there are no references into
        // blocks.
        unsafe { self.put_at(to, src.as_ptr().cast(), src.bytes() as usize, peer, stream) }
    }

    /// Copies from `peer`'s copy of `src`, from element `at` on, into the whole of `dst`. `src` lies
    /// in windows. The peer must have written it and signalled: see [`Self::wait`].
    ///
    /// In host memory the copy is done when the call returns; on a device, when `stream` is past it.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::put`].
    pub fn get<T: Pod>(
        &self,
        dst: &Block<T>,
        src: &Block<T>,
        at: usize,
        peer: u32,
        stream: &Stream,
    ) -> Result<()> {
        self.check_block("get", dst, peer)?;
        let from = self.element("get", src, at, dst.len(), peer)?;
        // SAFETY: both blocks are borrowed, so live and mapped, for this length. There are no references into blocks:
        // whoever else touches them does so through raw pointers as well.
        unsafe { self.get_at(dst.as_ptr().cast(), from, dst.bytes() as usize, peer, stream) }
    }

    /// [`Self::put`] and then [`Self::signal`]: on a device, in one kernel.
    pub fn put_signal<T: Pod>(
        &self,
        dst: &Block<T>,
        at: usize,
        src: &Block<T>,
        peer: u32,
        channel: u32,
        stream: &Stream,
    ) -> Result<()> {
        self.check_block("put_signal", src, peer)?;
        let to = self.element("put_signal", dst, at, src.len(), peer)?;
        let bytes = src.bytes() as usize;
        // SAFETY: both blocks are borrowed, so live and mapped, for this length. There are no references into blocks:
        // whoever else touches them does so through raw pointers as well.
        unsafe { self.put_signal_at(to, src.as_ptr().cast(), bytes, peer, channel, stream) }
    }

    /// Copies `bytes` bytes from `src` to where `peer` has what this rank has at `dst`, which lies
    /// in windows. Otherwise as [`Self::put`].
    ///
    /// # Safety
    ///
    /// `src` is readable for `bytes` bytes by whoever makes the copy (the CPU in host memory, else
    /// the device), from now until `stream` is past it. Nobody else writes these, or touches the
    /// peer's, meanwhile.
    pub unsafe fn put_at(
        &self,
        dst: *mut u8,
        src: *const u8,
        bytes: usize,
        peer: u32,
        stream: &Stream,
    ) -> Result<()> {
        // SAFETY: the caller promised that `src` is readable for `bytes` bytes until `stream` is past the copy, and
        // that nobody touches the peer's.
        unsafe { self.copy_at("put", (dst, src), bytes, peer, By::Kernel(None), stream) }
    }

    /// Copies `bytes` bytes from where `peer` has what this rank has at `src`, which lies in
    /// windows, to `dst`. Otherwise as [`Self::get`].
    ///
    /// # Safety
    ///
    /// `dst` is writable for `bytes` bytes by whoever makes the copy (the CPU in host memory, else
    /// the device), from now until `stream` is past it. Nobody else touches these, or writes the
    /// peer's, meanwhile.
    pub unsafe fn get_at(
        &self,
        dst: *mut u8,
        src: *const u8,
        bytes: usize,
        peer: u32,
        stream: &Stream,
    ) -> Result<()> {
        // SAFETY: the caller promised that `dst` is writable for `bytes` bytes until `stream` is past the copy, and
        // that nobody writes the peer's.
        unsafe { self.copy_at("get", (dst, src), bytes, peer, By::Kernel(None), stream) }
    }

    /// Copies like [`Self::put_at`], by a copy engine of the device, which leaves all SMs to other work. A copy takes
    /// some microseconds more to start, and large ones are faster. Behind it on the stream,
    /// [`Self::signal_by_memory`] tells the peer, and so does [`Self::signal`].
    ///
    /// # Errors
    ///
    /// The errors of [`Self::put_at`].
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::put_at`].
    pub unsafe fn put_by_copy_engine_at(
        &self,
        dst: *mut u8,
        src: *const u8,
        bytes: usize,
        peer: u32,
        stream: &Stream,
    ) -> Result<()> {
        // SAFETY: the caller promised that `src` is readable for `bytes` bytes until `stream` is past the copy, and
        // that nobody touches the peer's.
        unsafe { self.copy_at("put", (dst, src), bytes, peer, By::CopyEngine, stream) }
    }

    /// Copies like [`Self::get_at`], by a copy engine of the device: see [`Self::put_by_copy_engine_at`].
    ///
    /// # Errors
    ///
    /// The errors of [`Self::get_at`].
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::get_at`].
    pub unsafe fn get_by_copy_engine_at(
        &self,
        dst: *mut u8,
        src: *const u8,
        bytes: usize,
        peer: u32,
        stream: &Stream,
    ) -> Result<()> {
        // SAFETY: the caller promised that `dst` is writable for `bytes` bytes until `stream` is past the copy, and
        // that nobody writes the peer's.
        unsafe { self.copy_at("get", (dst, src), bytes, peer, By::CopyEngine, stream) }
    }

    /// Signals `peer` on a channel by stream memory operations, which take no SM; [`Self::wait_by_memory`] takes the
    /// signal. These channels are others than those of [`Self::signal`], and hold one signal: the next one waits on
    /// the stream until the peer has taken the last. Replayed graphs send their signals again. In host memory this
    /// is [`Self::signal`].
    ///
    /// # Errors
    ///
    /// The errors of [`Self::signal`]; a peer that does not take a signal within the communicator's timeout is named
    /// as by [`Self::wait`].
    pub fn signal_by_memory(&self, peer: u32, channel: u32, stream: &Stream) -> Result<()> {
        self.check_channel("signal_by_memory", peer, channel)?;
        match &self.one_sided {
            Some(host) => host.signal(&host.channels, peer, channel),
            None => self.lock().engine.cuda()?.signal_by_memory((peer, channel), true, *stream),
        }
    }

    /// Waits for `peer`'s next [`Self::signal_by_memory`] on a channel, by stream memory operations: `stream` waits, and
    /// no SM. In host memory this is [`Self::wait`].
    ///
    /// # Errors
    ///
    /// The errors of [`Self::wait`]. A thread of the communicator ends a wait that takes longer than `timeout`,
    /// within 0.1 s.
    pub fn wait_by_memory(
        &self,
        peer: u32,
        channel: u32,
        timeout: Duration,
        stream: &Stream,
    ) -> Result<()> {
        self.check_channel("wait_by_memory", peer, channel)?;
        match &self.one_sided {
            Some(host) => host.wait(&host.channels, peer, channel, timeout),
            None => {
                let mut inner = self.lock();
                inner.engine.cuda()?.wait_by_memory((peer, channel), timeout, true, *stream)
            }
        }
    }

    /// [`Self::put_at`] and then [`Self::signal`]: on a device, in one kernel.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::put_at`].
    pub unsafe fn put_signal_at(
        &self,
        dst: *mut u8,
        src: *const u8,
        bytes: usize,
        peer: u32,
        channel: u32,
        stream: &Stream,
    ) -> Result<()> {
        self.check_channel("put_signal", peer, channel)?;
        let by = By::Kernel(Some(channel));
        // SAFETY: the caller promised that `src` is readable for `bytes` bytes until `stream` is past the copy, and
        // that nobody touches the peer's.
        unsafe { self.copy_at("put_signal", (dst, src), bytes, peer, by, stream) }
    }

    /// Signals `peer` on a channel, one of [`Self::CHANNELS`]. Whatever this thread did before, in
    /// host memory, or `stream` did before, on a device, is visible to the peer once its
    /// [`Self::wait`] has taken the signal: copies into its memory as well as this rank's own.
    ///
    /// Signals are counted, in 64 bits, and may run ahead of the waits without bound. `peer` may be
    /// this rank. On a device the count is kept in device memory, so each replay of a graph sends its
    /// captured signals again. Signals to one peer on one channel run in the order of
    /// the calls, also from several streams. Captured ones are ordered by whoever launches the
    /// graphs: two graphs that signal one peer on one channel, or wait there, must not run at once.
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` for a peer or a channel that there is not; why the communicator
    /// has failed, if it has.
    pub fn signal(&self, peer: u32, channel: u32, stream: &Stream) -> Result<()> {
        self.check_channel("signal", peer, channel)?;
        match &self.one_sided {
            Some(host) => host.signal(&host.channels, peer, channel),
            None => self.lock().engine.cuda()?.signal((0, peer, channel), *stream),
        }
    }

    /// Waits for the next signal of `peer` on a channel: the nth wait takes the nth signal, whether
    /// it came before or comes later. In host memory this blocks the calling thread and no other;
    /// on a device `stream` waits, in a kernel of one small block. The block stays resident on the device
    /// meanwhile, so the signal must not depend on a collective that this rank runs on another stream
    /// at the same time: a large one needs the whole device.
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` for a peer or a channel that there is not. `is_timeout`, naming the
    /// peer and the channel, where no signal comes within `timeout` (zero: where none is there):
    /// - in host memory from this call. No signal is taken then, and the communicator stays
    ///   usable; `is_peer_lost` if the peer's process is gone.
    /// - on a device from [`Self::synchronize`] or the next call; the time begins when `stream`
    ///   comes to the wait. The communicator fails on this rank, as what follows on the stream relies on the
    ///   signal: none of its operations run any more, except copies of large calls.
    pub fn wait(&self, peer: u32, channel: u32, timeout: Duration, stream: &Stream) -> Result<()> {
        self.check_channel("wait", peer, channel)?;
        match &self.one_sided {
            Some(host) => host.wait(&host.channels, peer, channel, timeout),
            None => self.lock().engine.cuda()?.wait((0, peer, channel), timeout, *stream),
        }
    }

    /// Waits for every other rank to come to the same barrier: a [`Self::signal`] to each on a channel,
    /// and a [`Self::wait`] for one of each. What a rank did before is visible to all after it. No
    /// collective: barriers count signals on a channel, so do not use [`Self::signal`] and [`Self::wait`] on the same
    /// channel.
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` for a channel that there is not, and as [`Self::wait`]:
    /// - in host memory, `is_timeout` names all ranks that have not come within `timeout`, and
    ///   `is_peer_lost` one that is gone. The barrier is then not over: the next call on this channel
    ///   signals nobody and goes on waiting for those. So a rank may call again until it succeeds, and
    ///   the nth success on each rank is of the same barrier.
    /// - on a device `timeout` is for each peer, and the communicator fails when it runs out.
    pub fn barrier_on(&self, channel: u32, timeout: Duration, stream: &Stream) -> Result<()> {
        self.check_channel("a barrier", self.rank(), channel)?;
        if let Some(host) = &self.one_sided {
            return host.barrier(&host.channels, channel, timeout);
        }
        let (rank, world) = (self.rank(), self.world());
        let peers = || (1..world).map(|step| (rank + step) % world);
        peers().try_for_each(|peer| self.signal(peer, channel, stream))?;
        peers().try_for_each(|peer| self.wait(peer, channel, timeout, stream))
    }

    /// Copies between this rank's memory and a peer's: "get" from where the peer has what this rank has at the source,
    /// everything else to where it has what this rank has at the destination.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::put_at`] and [`Self::get_at`].
    unsafe fn copy_at(
        &self,
        what: &str,
        (dst, src): (*mut u8, *const u8),
        bytes: usize,
        peer: u32,
        by: By,
        stream: &Stream,
    ) -> Result<()> {
        let (mut from, mut to, length) = (src as u64, dst as u64, bytes as u64);
        let theirs = if what == "get" { &mut from } else { &mut to };
        *theirs = self.remote(what, *theirs, length, peer)?;
        self.check_ends(what, (from, to), length, peer)?;
        tracing::trace!(rank = self.rank(), peer, bytes, ?by, "one-sided copy");
        if let Some(host) = &self.one_sided {
            // SAFETY: the caller promised that this rank's end is there for `bytes` bytes; `remote` has found the
            // peer's in a window, and `check_ends` that they do not overlap.
            unsafe { host.copy(from, to, bytes) }?;
            let By::Kernel(Some(channel)) = by else { return Ok(()) };
            return host.signal(&host.channels, peer, channel);
        }
        let mut inner = self.lock();
        let cuda = inner.engine.cuda()?;
        match by {
            // SAFETY: the caller promised that this rank's end is there for `bytes` bytes until `stream` is past it;
            // `remote` has found the peer's in a window.
            By::Kernel(channel) => unsafe {
                cuda.copy((from, to), length, (peer, channel), *stream)
            },
            // SAFETY: the caller promised that this rank's end is there for `bytes` bytes until `stream` is past it;
            // `remote` has found the peer's in a window.
            By::CopyEngine => unsafe { cuda.put_by_copy_engine((from, to), length, *stream) },
        }
    }

    /// Refuses a block of another pool, which the device or process that copies may not reach.
    pub(super) fn check_block<T: Pod>(
        &self,
        what: &str,
        block: &Block<T>,
        peer: u32,
    ) -> Result<()> {
        self.check_one_host(what)?;
        if self.is_own(block.address(), block.offset()) {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "{what} between rank {} and rank {peer}: {block:?} is not a block of the \
             communicator's pool",
            self.rank()
        )))
    }

    /// This rank's address of element `at` of a block, from which on there must be `count` elements.
    fn element<T: Pod>(
        &self,
        what: &str,
        block: &Block<T>,
        at: usize,
        count: usize,
        peer: u32,
    ) -> Result<*mut u8> {
        if at.checked_add(count).is_none_or(|end| end > block.len()) {
            return Err(Error::invalid_argument(format!(
                "{what} of {count} elements from {at} on of {block:?}, between rank {} and rank \
                 {peer}: it has {}",
                self.rank(),
                block.len()
            )));
        }
        Ok(block.as_ptr().wrapping_add(at).cast())
    }

    /// Where `peer` has what this rank has in `bytes` bytes of windows from `address` on.
    pub(super) fn remote(&self, what: &str, address: u64, bytes: u64, peer: u32) -> Result<u64> {
        self.check_channel(what, peer, 0)?;
        if bytes == 0 {
            return Ok(address);
        }
        let (me, layout) = (self.rank(), self.pool.layout());
        let refuse = |why: &str| {
            Err(Error::invalid_argument(format!(
                "{what} of {bytes} bytes at {address:#x} on rank {me}, for rank {peer}'s copy of \
                 them: {why}"
            )))
        };
        let Some((slot, offset)) = layout.locate(address) else {
            return refuse("they are not in the pool's heap");
        };
        if slot != me {
            return refuse("they lie in another rank's slot; pass this rank's own address of them");
        }
        // The windows count as they are now: some may have gone, and no commit is made here.
        if !self.pool.windows().covers(address, bytes) {
            return refuse("they are not all in windows; commit the pool after allocating");
        }
        let over = |(begin, length): (u64, u64)| {
            offset < begin + length && begin < offset.saturating_add(bytes)
        };
        if self.shared.memory().any(over) {
            return refuse("they lie over the communicator's own memory");
        }
        layout.peer(peer, address)
    }

    /// Refuses what is no memory of this rank, and ends that overlap.
    fn check_ends(&self, what: &str, (from, to): (u64, u64), bytes: u64, peer: u32) -> Result<()> {
        let (me, layout) = (self.rank(), self.pool.layout());
        let mine = if what == "get" { to } else { from };
        let elsewhere = |address| layout.locate(address).is_some_and(|(slot, _)| slot != me);
        let why = match (from.checked_add(bytes), to.checked_add(bytes)) {
            _ if bytes == 0 => return Ok(()),
            (None, _) | (_, None) => "no memory is that long",
            _ if mine == 0 => "it is not memory",
            _ if elsewhere(mine) || elsewhere(mine + (bytes - 1)) => {
                "it reaches into another rank's slot"
            }
            (Some(from_end), Some(to_end)) if from < to_end && to < from_end => "both ends overlap",
            _ => return Ok(()),
        };
        Err(Error::invalid_argument(format!(
            "{what} of {bytes} bytes between {mine:#x} on rank {me} and rank {peer}: {why}"
        )))
    }

    /// Refuses peers and channels that do not exist.
    pub(super) fn check_channel(&self, what: &str, peer: u32, channel: u32) -> Result<()> {
        self.check_one_host(what)?;
        if peer >= self.world() {
            return Err(Error::invalid_argument(format!(
                "{what} on rank {} with rank {peer}: there are {} ranks",
                self.rank(),
                self.world()
            )));
        }
        if channel >= CHANNELS {
            return Err(Error::invalid_argument(format!(
                "{what} on rank {} with rank {peer} on channel {channel}: channels are 0 to {}",
                self.rank(),
                CHANNELS - 1
            )));
        }
        Ok(())
    }
}
