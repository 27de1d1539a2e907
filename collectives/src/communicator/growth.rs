//! How a communicator gets more memory: before the first call that has use for it.
//!
//! Small calls need little memory, and many groups of a program make no others. So a communicator whose memory may grow
//! ([`device_memory_grows`](super::CommunicatorOptions::device_memory_grows)) begins with little. Its first large call waits
//! on the host until every rank has come to it; then all ranks allocate a block of one size and commit, and the engine moves
//! data there (`cuda/engine/growth.rs`). Where a rank cannot, for instance as its device is full, all keep what they have, and
//! the call is made in more pieces.
//!
//! Whether a call is the first large one must follow from what ranks have alike: its kind, its size, and the calls before it.

use std::thread;
use std::time::{Duration, Instant};

use symmpool_allocator::{Block, CONTROL_LANE, Error, Result, Stream};

use super::choice::{Chosen, Request};
use super::engine::Engine;
use super::{Communicator, Inner};
use crate::algorithm::Source;
use crate::cuda::{CudaEngine, fits_lamport};
use crate::host::call::{Call, Operation};
use crate::{DType, StandardCollective};

/// Bytes of a device that are left to others.
const LEFT: u64 = 64 << 20;
/// For so long a wait for other ranks asks the device again at once; later it pauses in between, and now and then asks
/// whether it is to stop.
const SPIN: Duration = Duration::from_millis(1);
const PAUSE: Duration = Duration::from_micros(50);
const ASK_TO_STOP: Duration = Duration::from_millis(100);

/// Inboxes that hold what all ranks send in a call that needs no more memory. LL's is the smallest one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Inbox {
    Lamport,
    Ll,
}

impl Communicator {
    /// Gives the communicator more memory if a call of a collective is the first that has use for it. `is_open` says whether
    /// the engine chooses the algorithm.
    pub(super) fn grow_for(
        &self,
        inner: &mut Inner,
        request: &Request,
        is_open: bool,
        stream: &Stream,
    ) -> Result<()> {
        if !matches!(&inner.engine, Engine::Cuda(cuda) if cuda.may_grow()) {
            return Ok(());
        }
        let Request { collective, count, dtype, root, .. } = *request;
        let bytes = (count as u64).saturating_mul(dtype.size() as u64);
        let is_reducible = !collective.reduces() || dtype.is_reduced();
        if !is_reducible || bytes > self.pool.layout().stride || root >= self.world() {
            // The engine refuses the call, without a wait for other ranks.
            return Ok(());
        }
        if collective == StandardCollective::AllToAll {
            // Other ranks may make the same call with splits.
            return self.grow_for_splits(inner, dtype, stream);
        }
        let by_lamport = is_open && (!collective.reduces() || fits_lamport(dtype));
        let inbox = if by_lamport { Inbox::Lamport } else { Inbox::Ll };
        self.grow_above(inner, (bytes, inbox), described(request), stream)
    }

    /// The same before a call with an algorithm that a program brings along, whatever its size: how much memory that needs
    /// is the program's affair.
    pub(super) fn grow_for_program(
        &self,
        inner: &mut Inner,
        chosen: &Chosen,
        request: &Request,
        stream: &Stream,
    ) -> Result<()> {
        match chosen {
            Chosen::Registered(algorithm) if !matches!(algorithm.source(), Source::BuiltIn(_)) => {
                self.grow(inner, described(request), stream)
            }
            _ => Ok(()),
        }
    }

    /// The same before an all-to-all, whatever its size: ranks do not know each other's splits.
    pub(super) fn grow_for_splits(
        &self,
        inner: &mut Inner,
        dtype: DType,
        stream: &Stream,
    ) -> Result<()> {
        self.grow(inner, Call::new(Operation::AllToAllV).elements(dtype, 0), stream)
    }

    /// The same before any call in which every rank sends so many bytes to each, if they do not fit into an inbox.
    pub(super) fn grow_above(
        &self,
        inner: &mut Inner,
        (bytes, inbox): (u64, Inbox),
        call: Call,
        stream: &Stream,
    ) -> Result<()> {
        let is_large = |cuda: &CudaEngine| cuda.is_large(bytes, inbox == Inbox::Lamport);
        match &inner.engine {
            Engine::Cuda(cuda) if cuda.may_grow() && is_large(cuda) => {
                self.grow(inner, call, stream)
            }
            _ => Ok(()),
        }
    }

    /// Gives the communicator more memory if it may have more, before a call that has use for it.
    ///
    /// # Errors
    ///
    /// Those of the call, on every rank: `is_diverged` if ranks make different calls, a late or lost rank; and those of a
    /// commit.
    pub(super) fn grow(&self, inner: &mut Inner, call: Call, stream: &Stream) -> Result<()> {
        let Engine::Cuda(cuda) = &mut inner.engine else { return Ok(()) };
        if !cuda.may_grow() || self.pool.driver().is_capturing(*stream) {
            return Ok(());
        }
        // Ranks that make different calls, or none, get their errors here, from the device, and the pool goes on. A rank may
        // pass a handshake that another one has given up; in the second one it misses that rank.
        for _ in 0..2 {
            cuda.call(*stream, |cuda| cuda.handshake_only(call.grows(), *stream))?;
            self.await_handshake(cuda, stream)?;
        }
        match self.allocate_growth(cuda) {
            Ok(Some(block)) => {
                inner.windows = self.pool.windows();
                let total = self.memory().total + block.bytes();
                cuda.grow(block.offset());
                self.set_memory(cuda.memory(total));
                self.shared.keep_grown(block);
                Ok(())
            }
            Ok(None) => {
                cuda.stay_small();
                Ok(())
            }
            Err(error) if self.pool.can_commit() => Err(inner.engine.decline(error, stream)),
            Err(error) => Err(inner.engine.give_up(error, stream)),
        }
    }

    /// Waits until every rank has come to the handshake on the stream, or until it is over. Signals such as Ctrl-C end the
    /// wait, and close the communicator.
    fn await_handshake(&self, cuda: &mut CudaEngine, stream: &Stream) -> Result<()> {
        let (interrupt, begun) = (self.pool.interrupt(), Instant::now());
        let mut asked = begun;
        while !cuda.is_idle(*stream)? {
            let now = Instant::now();
            if now - begun < SPIN {
                std::hint::spin_loop();
                continue;
            }
            let asks = now - asked >= ASK_TO_STOP;
            asked = if asks { now } else { asked };
            if asks && interrupt.as_ref().is_some_and(|interrupt| interrupt()) {
                let why = Error::interrupted(format!(
                    "interrupted: rank {} waiting for all ranks to come to their first large call",
                    self.rank()
                ));
                cuda.close(&why);
                return Err(why);
            }
            thread::sleep(PAUSE);
        }
        cuda.ready()
    }

    /// The block that the memory grows by, as a window; `None` where a rank has none to give. The same on every rank.
    fn allocate_growth(&self, cuda: &CudaEngine) -> Result<Option<Block<u8>>> {
        let deadline = self.pool.group().deadline();
        let ready = cuda.check_growth().and_then(|()| self.check_room(cuda));
        let why = match self.pool.all_ready_by(ready, deadline) {
            Ok(()) => match self.commit_growth(cuda) {
                Ok(block) => return Ok(Some(block)),
                // There was room when ranks were asked, and some rank found none then.
                Err(error) if error.is_out_of_memory() => {
                    self.pool.resync()?;
                    error
                }
                Err(error) => return Err(error),
            },
            Err(error) if !self.pool.can_commit() => return Err(error),
            Err(error) => error,
        };
        tracing::warn!(
            rank = self.rank(),
            %why,
            "a communicator's memory does not grow; large calls go in more pieces"
        );
        Ok(None)
    }

    /// Refuses to grow on a device that has no room.
    fn check_room(&self, cuda: &CudaEngine) -> Result<()> {
        let lane = self.pool.lane(CONTROL_LANE)?.stats()?;
        let needed = cuda.growth_bytes().saturating_sub(lane.reserved - lane.allocated);
        let free = cuda.free_bytes()?;
        if needed > 0 && free < needed + LEFT {
            return Err(Error::out_of_memory(format!(
                "{free} bytes of the device are free on rank {}, and a communicator's memory would grow by {needed}",
                self.rank()
            )));
        }
        Ok(())
    }

    fn commit_growth(&self, cuda: &CudaEngine) -> Result<Block<u8>> {
        let lane = self.pool.lane(CONTROL_LANE)?;
        let allocated = lane.alloc_bytes(cuda.growth_bytes() as usize, 4096, Stream::DEFAULT);
        let prepared = allocated.and_then(|block| {
            // A failure counts at the first event in which ranks differ: freeing the block again is one.
            cuda.prepare_growth(&block).inspect_err(|why| lane.note_failure(why))?;
            Ok(block)
        });
        let prepared = prepared.inspect_err(|why| lane.note_failure(why));
        self.pool.commit()?;
        // Had one rank alone failed, the commit had found that ranks differ.
        prepared
    }
}

/// What ranks compare before they take memory for a call.
fn described(request: &Request) -> Call {
    let Request { collective, count, dtype, op, root, .. } = *request;
    let call = Call::new(Operation::of(collective)).elements(dtype, count).root(root);
    if collective.reduces() { call.reduce(op) } else { call }
}
