//! Which memory a call uses, and how a communicator gets more of it: before the first call that has use for it.
//!
//! Small calls need little memory, and many groups of a program make no others. So a communicator whose memory may grow
//! ([`device_memory_grows`](super::CommunicatorOptions::device_memory_grows)) begins with an area for small calls. Its first
//! large call waits on the host until every rank has come to it; then all ranks allocate a block of one size and commit, and it
//! is the area of this call and of all large ones to come (`cuda/engine/areas.rs`). Where a rank has no room on its device, all
//! keep what they have, the call is made in more pieces, and it is tried again, after twice as many large calls each time.
//!
//! Whether a call is large must follow from what ranks have alike: its kind and its size. A large call that is captured before
//! there is an area for it uses the one of small calls, in that graph for good.

use std::thread;
use std::time::{Duration, Instant};

use symmpool_allocator::{Block, CONTROL_LANE, Error, Result, Stream};

use super::choice::{Chosen, Request};
use super::engine::Engine;
use super::{Communicator, Inner};
use crate::algorithm::Source;
use crate::call::{Call, Operation};
use crate::cuda::{Area, CudaEngine, fits_lamport};
use crate::{DType, ReduceOp, StandardCollective};

/// Bytes of a device that are left to others.
const LEFT: u64 = 64 << 20;
/// For so long a wait for other ranks asks the device again at once; later it pauses in between, and now and then asks
/// whether it is to stop.
const SPIN: Duration = Duration::from_millis(1);
const PAUSE: Duration = Duration::from_micros(50);
const ASK_TO_STOP: Duration = Duration::from_millis(100);

/// Small inboxes that hold what all ranks send in a small call. LL's is the smallest one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Inbox {
    Lamport,
    Ll,
}

impl Communicator {
    /// Has a call of a collective use the memory for large calls if it is one. `is_open` says whether the engine chooses the
    /// algorithm.
    pub(super) fn grow_for(
        &self,
        inner: &mut Inner,
        request: &Request,
        is_open: bool,
        stream: &Stream,
    ) -> Result<()> {
        if !matches!(&inner.engine, Engine::Cuda(cuda) if cuda.may_have_large_area()) {
            return Ok(());
        }
        let Request { collective, count, dtype, root, .. } = *request;
        let bytes = (count as u64).saturating_mul(dtype.size() as u64);
        let is_reducible = !collective.reduces() || dtype.is_reduced();
        let has_root = collective == StandardCollective::Broadcast;
        let is_rank = !has_root || root < self.world();
        if !is_reducible || bytes > self.pool.layout().stride || !is_rank {
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
            Engine::Cuda(cuda) if cuda.may_have_large_area() && is_large(cuda) => {
                self.grow(inner, call, stream)
            }
            _ => Ok(()),
        }
    }

    /// Has a large call use the memory for large calls, which the communicator takes now if it has none yet.
    ///
    /// # Errors
    ///
    /// Those of the call, on every rank: `is_diverged` if ranks make different calls, a late or lost rank; and those of a
    /// commit.
    pub(super) fn grow(&self, inner: &mut Inner, call: Call, stream: &Stream) -> Result<()> {
        let Engine::Cuda(cuda) = &mut inner.engine else { return Ok(()) };
        if cuda.is_rehearsing() {
            self.rehearse_growth(cuda, stream);
        } else if !self.pool.driver().is_capturing(*stream) && cuda.is_time_to_grow() {
            self.take_memory(inner, call, stream)?;
        }
        inner.engine.use_area(Area::Large);
        Ok(())
    }

    /// Says what [`Self::grow`] would do, as far as this rank knows.
    fn rehearse_growth(&self, cuda: &mut CudaEngine, stream: &Stream) {
        let Some(calls_left) = cuda.next_growth() else { return };
        if cuda.lifts_memory() {
            return cuda.rehearse_growth(0);
        }
        let why = if self.pool.driver().is_capturing(*stream) {
            "calls that are captured take none".to_owned()
        } else if calls_left > 0 {
            format!(
                "a device had no room, and it is tried again after {calls_left} more large calls"
            )
        } else {
            match self.check_room(cuda) {
                Ok(()) => return cuda.rehearse_growth(cuda.growth_bytes()),
                Err(why) => why.to_string(),
            }
        };
        cuda.rehearse_no_growth(why);
    }

    /// The same for a call of experts. All of these use the memory that the first one used that was made, whichever it is: how
    /// much that is decides how rows travel, which must be the same in a dispatch and its combine.
    pub(super) fn grow_for_experts(
        &self,
        inner: &mut Inner,
        call: Call,
        stream: &Stream,
    ) -> Result<()> {
        let Engine::Cuda(cuda) = &mut inner.engine else { return Ok(()) };
        if cuda.use_area_of_experts() {
            return Ok(());
        }
        self.grow(inner, call, stream)
    }

    /// Takes the memory for large calls, on every rank or on none.
    #[cold]
    fn take_memory(&self, inner: &mut Inner, call: Call, stream: &Stream) -> Result<()> {
        let Engine::Cuda(cuda) = &mut inner.engine else { return Ok(()) };
        self.await_ranks(cuda, call.grows(), stream)?;
        let total = self.memory().total;
        match self.allocate_growth(cuda) {
            Ok(Ok(block)) => {
                inner.windows = self.pool.windows();
                let (offset, bytes) = (block.offset(), block.bytes());
                // From here on it is the communicator's, whatever becomes of that.
                self.shared.keep_grown(block);
                cuda.grow(offset).map_err(|why| cuda.fail_halfway(why, *stream))?;
                self.set_memory(cuda.memory(total + bytes));
                Ok(())
            }
            Ok(Err(why)) => {
                cuda.stay_small();
                self.set_memory(cuda.memory(total));
                self.note_shortage();
                tracing::warn!(
                    rank = self.rank(),
                    %why,
                    wanted = cuda.growth_bytes(),
                    "a communicator's memory does not grow now; large calls go in more pieces, and it is tried again"
                );
                Ok(())
            }
            // The commit found that ranks had differed before, on all of them alike.
            Err(error) if error.is_diverged() && self.pool.can_commit() => {
                Err(inner.engine.decline(error, stream))
            }
            // Of this rank alone, or of ranks that cannot communicate any more: this rank cannot tell what the others have.
            Err(error) => Err(inner.engine.give_up(error, stream)),
        }
    }

    /// Waits on the host until every rank has come to a call without data.
    ///
    /// Ranks that make different calls, or none, get their errors here, from the device, and the pool goes on.
    pub(super) fn await_ranks(
        &self,
        cuda: &mut CudaEngine,
        call: Call,
        stream: &Stream,
    ) -> Result<()> {
        // A rank may pass a handshake that another one has given up; in the second one it misses that rank.
        for may_stop in [true, false] {
            cuda.call(*stream, |cuda| cuda.handshake_only(call, *stream))?;
            self.await_handshake(cuda, may_stop, stream)?;
        }
        Ok(())
    }

    /// Waits until every rank has come to the handshake on the stream, or until it is over. Where it `may_stop`, signals such
    /// as Ctrl-C end the wait, and close the communicator: not once another rank may have gone on to a commit, as it would
    /// wait there.
    fn await_handshake(
        &self,
        cuda: &mut CudaEngine,
        may_stop: bool,
        stream: &Stream,
    ) -> Result<()> {
        let (interrupt, begun) = (self.pool.interrupt(), Instant::now());
        let mut asked = begun;
        while !cuda.is_done(*stream)? {
            let now = Instant::now();
            if now - begun < SPIN {
                std::hint::spin_loop();
                continue;
            }
            let asks = may_stop && now - asked >= ASK_TO_STOP;
            asked = if asks { now } else { asked };
            if asks && interrupt.as_ref().is_some_and(|interrupt| interrupt()) {
                let why = Error::interrupted(format!(
                    "interrupted: rank {} waiting for all ranks before memory is taken",
                    self.rank()
                ));
                cuda.close(&why);
                return Err(why);
            }
            thread::sleep(PAUSE);
        }
        cuda.ready()
    }

    /// The block that the memory grows by, as a window; or why no rank has taken one, which is the same on every rank.
    fn allocate_growth(&self, cuda: &CudaEngine) -> Result<Result<Block<u8>>> {
        let (subject, deadline) = (cuda.subject(), self.pool.group().deadline());
        let lane = self.pool.lane(CONTROL_LANE)?;
        self.pool.commit_together(subject, self.check_room(cuda), deadline, || {
            let block = lane.alloc_bytes(cuda.growth_bytes() as usize, 4096, Stream::DEFAULT);
            // A failure counts at the first event in which ranks differ: freeing the block again is one.
            let prepared = block.and_then(|block| cuda.prepare_growth(&block).map(|()| block));
            prepared.inspect_err(|why| lane.note_failure(why))
        })
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
}

/// What ranks compare before they take memory for a call.
fn described(request: &Request) -> Call {
    let Request { collective, count, dtype, op, root, .. } = *request;
    described_by(collective, count, dtype, op, root)
}

/// The same of a call that is none of a [`Request`]'s.
pub(super) fn described_by(
    collective: StandardCollective,
    count: usize,
    dtype: DType,
    op: ReduceOp,
    root: u32,
) -> Call {
    let call = Call::new(Operation::of(collective)).elements(dtype, count);
    match collective {
        StandardCollective::Broadcast => call.root(root),
        _ if collective.reduces() => call.reduce(op),
        _ => call,
    }
}
