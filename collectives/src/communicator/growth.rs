//! Which memory a call uses, and how a communicator gets more of it: before the first call that has use for it.
//!
//! Small calls need little memory, and many groups of a program make no others. So a communicator whose memory may grow
//! ([`device_memory_grows`](super::CommunicatorOptions::device_memory_grows)) begins with an area for small calls. Its first
//! large call waits on the host until every rank has come to it; then all ranks allocate a block of one size and share it, and it
//! is the area of this call and of all large ones to come (`cuda/engine/areas.rs`). Where a rank has no room on its device, all
//! keep what they have, the call is made in more pieces, and it is tried again, after twice as many large calls each time.
//!
//! Ranks meet for the call by two handshakes on the device, which compare it with what other ranks call, whatever that is. A
//! call that is captured has no handshakes then: the device may run graphs that were launched before, and the call itself runs
//! when its own graph does. Ranks that capture it meet on the host instead, with the same description of the call. A rank that
//! makes the call outside of captures tells them so, and listens for them: a first large call is captured on all ranks or on
//! none.
//!
//! Whether a call is large must follow from what ranks have alike: its kind and its size.

use std::thread;
use std::time::{Duration, Instant};

use symmpool_allocator::{Block, CONTROL_LANE, Deadline, Error, JointBlock, Pool, Result, Stream};

use super::decision::Chosen;
use super::engine::AnyEngine;
use super::{Communicator, Inner};
use crate::algorithm::Source;
use crate::call::{Arguments, CallDescription, OpType, StandardCall, mismatch_of_first_large};
use crate::cuda::{Area, CudaEngine, fits_lamport};
use crate::{DType, StandardCollective};

/// Bytes of a device that stay free for others.
const SPARE_BYTES: u64 = 64 << 20;
/// Time for which a wait for other ranks asks the device again at once. Later it pauses in between.
const SPIN: Duration = Duration::from_millis(1);
const PAUSE: Duration = Duration::from_micros(50);
/// Time between two looks whether a signal, such as Ctrl-C, is to end the wait.
const INTERRUPT_PERIOD: Duration = Duration::from_millis(100);
/// Longest wait until a rank has said that it comes to handshakes, where another thread commits or others do not listen.
const MAX_NOTIFICATION: Duration = Duration::from_millis(20);

/// Looks why other ranks do not come to a handshake.
type Look<'a> = dyn FnMut(&Pool, u32) -> Result<()> + 'a;

/// Small inboxes that hold what all ranks send in a small call. LL's is the smallest one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Inbox {
    Lamport,
    Ll,
}

impl Communicator {
    /// Has a call of a collective use the memory for large calls if it is one. `by_rule` says whether the engine chooses the
    /// algorithm.
    pub(super) fn grow_for(
        &self,
        inner: &mut Inner,
        call: &StandardCall,
        by_rule: bool,
        stream: &Stream,
    ) -> Result<()> {
        if !matches!(&inner.engine, AnyEngine::Cuda(cuda) if cuda.may_have_large_area()) {
            return Ok(());
        }
        let StandardCall { collective, arguments, .. } = *call;
        let Arguments { dtype, root, .. } = arguments;
        let bytes = arguments.bytes_of(1);
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
        let by_lamport = by_rule && (!collective.reduces() || fits_lamport(dtype));
        let inbox = if by_lamport { Inbox::Lamport } else { Inbox::Ll };
        self.grow_above(inner, (bytes, inbox), call.describe(), stream)
    }

    /// Grows before a call with an algorithm that a program brings along, whatever its size: how much memory that
    /// needs is the program's affair.
    pub(super) fn grow_for_program(
        &self,
        inner: &mut Inner,
        chosen: &Chosen,
        call: &StandardCall,
        stream: &Stream,
    ) -> Result<()> {
        match chosen {
            Chosen::Registered(algorithm) if !matches!(algorithm.source(), Source::BuiltIn(_)) => {
                self.grow(inner, call.describe(), stream)
            }
            _ => Ok(()),
        }
    }

    /// Grows before an all-to-all, whatever its size: ranks do not know each other's splits.
    pub(super) fn grow_for_splits(
        &self,
        inner: &mut Inner,
        dtype: DType,
        stream: &Stream,
    ) -> Result<()> {
        self.grow(inner, CallDescription::new(OpType::AllToAllV).elements(dtype, 0), stream)
    }

    /// Grows before any call in which every rank sends `bytes` bytes to each, if they do not fit into `inbox`.
    pub(super) fn grow_above(
        &self,
        inner: &mut Inner,
        (bytes, inbox): (u64, Inbox),
        call: CallDescription,
        stream: &Stream,
    ) -> Result<()> {
        let is_large = |cuda: &CudaEngine| cuda.is_large(bytes, inbox == Inbox::Lamport);
        match &inner.engine {
            AnyEngine::Cuda(cuda) if cuda.may_have_large_area() && is_large(cuda) => {
                self.grow(inner, call, stream)
            }
            _ => Ok(()),
        }
    }

    /// Has a large call use the memory for large calls, which the communicator takes now if it has none yet.
    ///
    /// # Errors
    ///
    /// Those of the call, on every rank: `is_diverged` if ranks make different calls, or only some of them capture it, a late or
    /// lost rank; and those of a commit.
    pub(super) fn grow(
        &self,
        inner: &mut Inner,
        call: CallDescription,
        stream: &Stream,
    ) -> Result<()> {
        let AnyEngine::Cuda(cuda) = &mut inner.engine else { return Ok(()) };
        if cuda.is_rehearsing() {
            self.rehearse_growth(cuda);
        } else if cuda.is_time_to_grow() {
            self.take_memory(inner, call, stream)?;
        }
        inner.engine.use_area(Area::Large);
        Ok(())
    }

    /// Says what [`Self::grow`] would do, as far as this rank knows.
    fn rehearse_growth(&self, cuda: &mut CudaEngine) {
        let Some(calls_left) = cuda.next_growth() else { return };
        if cuda.lifts_memory() {
            return cuda.rehearse_growth(0);
        }
        let why = if calls_left > 0 {
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

    /// Grows before a call of experts. All of these use the memory that the first one used that was made, whichever
    /// it is: how much that is decides how rows travel, which must be the same in a dispatch and its combine.
    pub(super) fn grow_for_experts(
        &self,
        inner: &mut Inner,
        call: CallDescription,
        stream: &Stream,
    ) -> Result<()> {
        let AnyEngine::Cuda(cuda) = &mut inner.engine else { return Ok(()) };
        if cuda.use_expert_area() {
            return Ok(());
        }
        self.grow(inner, call, stream)
    }

    /// Takes the memory for large calls, on every rank or on none.
    #[cold]
    fn take_memory(&self, inner: &mut Inner, call: CallDescription, stream: &Stream) -> Result<()> {
        let AnyEngine::Cuda(cuda) = &mut inner.engine else { return Ok(()) };
        let captures = self.pool.driver().is_capturing(*stream);
        let call = call.grows();
        if captures {
            self.meet_ranks(cuda, call, stream)?;
        } else {
            self.come_to_handshakes(cuda, call, stream)?;
        }
        let deadline = self.pool.group().deadline();
        let total = self.memory().total;
        match self.allocate_growth(cuda, captures, deadline) {
            Ok(Ok(block)) => {
                inner.windows = self.pool.windows();
                let (offset, bytes) = (block.offset(), block.bytes());
                // From here on it is the communicator's, whatever becomes of that.
                self.shared.keep_grown(block);
                cuda.grow(offset, captures, deadline)
                    .map_err(|why| cuda.fail_halfway(why, *stream))?;
                self.set_memory(cuda.memory(total + bytes));
                Ok(())
            }
            Ok(Err(why)) => {
                cuda.postpone_growth();
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
            // An error of this rank alone, or of ranks that cannot communicate any more: this rank cannot tell what
            // the others have.
            Err(error) => Err(inner.engine.decline_and_fail(error, stream)),
        }
    }

    /// Waits on the host until every rank has come to capture the call, and fails the communicator where that fails.
    fn meet_ranks(
        &self,
        cuda: &mut CudaEngine,
        call: CallDescription,
        stream: &Stream,
    ) -> Result<()> {
        let (rank, topic) = (self.rank(), cuda.growth_topic());
        let deadline = Deadline::after(self.timeout.get());
        let own = Arrival { captures: true, call };
        if let Err(why) = cuda.ready() {
            // Other ranks need not wait for one that makes no further call. They are told once.
            if cuda.is_first_failed_meeting() {
                let _ = self.pool.come_elsewhere(topic, &Arrival::FAILED, deadline);
            }
            return Err(why);
        }
        let met = self.pool.host_barrier(topic, &own.bytes(), deadline, |peer, message| {
            own.compare(rank, peer, message)
        });
        met.map_err(|why| cuda.fail_halfway(why, *stream))
    }

    /// Waits until every rank has come to the call outside of captures.
    fn come_to_handshakes(
        &self,
        cuda: &mut CudaEngine,
        call: CallDescription,
        stream: &Stream,
    ) -> Result<()> {
        cuda.ready()?;
        let topic = cuda.growth_topic();
        let own = Arrival { captures: false, call };
        // Another thread may commit, and wait for what this call is to do on the device.
        let deadline = Deadline::after(self.timeout.get().min(MAX_NOTIFICATION));
        if let Err(why) = self.pool.come_elsewhere(topic, &own.bytes(), deadline) {
            // Errors are found by the handshakes, or by the commit behind them.
            tracing::debug!(%why, "ranks that capture a first large call are not told of one that does not");
        }
        self.await_ranks_unless(cuda, call, stream, &mut |pool, rank| {
            pool.have_come(topic)
                .into_iter()
                .try_for_each(|(peer, message)| own.compare_captures(rank, peer, &message))
        })
    }

    /// Waits on the host until every rank has come to a call without data.
    ///
    /// Ranks that make different calls, or none, get their errors here, from the device, and the pool goes on.
    pub(super) fn await_ranks(
        &self,
        cuda: &mut CudaEngine,
        call: CallDescription,
        stream: &Stream,
    ) -> Result<()> {
        self.await_ranks_unless(cuda, call, stream, &mut |_, _| Ok(()))
    }

    /// Waits like `await_ranks`, and fails the communicator when `look` finds why ranks do not come, which is asked
    /// now and then.
    fn await_ranks_unless(
        &self,
        cuda: &mut CudaEngine,
        call: CallDescription,
        stream: &Stream,
        look: &mut Look<'_>,
    ) -> Result<()> {
        // A rank may pass a handshake that another one has given up; in the second one it misses that rank.
        for is_interruptible in [true, false] {
            cuda.call(*stream, |cuda| cuda.handshake_only(call, *stream))?;
            self.await_handshake(cuda, is_interruptible, stream, look)?;
        }
        Ok(())
    }

    /// Waits until every rank has come to the handshake on the stream, or until it is over. Where it `is_interruptible`,
    /// signals such as Ctrl-C end the wait, and fail the communicator. They must not once another rank may have gone on to
    /// a commit, as it would wait there.
    fn await_handshake(
        &self,
        cuda: &mut CudaEngine,
        is_interruptible: bool,
        stream: &Stream,
        look: &mut Look<'_>,
    ) -> Result<()> {
        let (interrupt, begun) = (self.pool.interrupt(), Instant::now());
        let (mut polled, mut looked) = (begun, begun);
        while !cuda.is_done(*stream)? {
            let now = Instant::now();
            if now - begun < SPIN {
                std::hint::spin_loop();
                continue;
            }
            if now - looked >= SPIN {
                looked = now;
                look(&self.pool, self.rank()).inspect_err(|why| cuda.fail_because(why))?;
            }
            let polls = is_interruptible && now - polled >= INTERRUPT_PERIOD;
            polled = if polls { now } else { polled };
            if polls && interrupt.as_ref().is_some_and(|interrupt| interrupt()) {
                let why = Error::interrupted(format!(
                    "interrupted: rank {} waiting for all ranks before memory is taken",
                    self.rank()
                ));
                cuda.fail(&why);
                return Err(why);
            }
            thread::sleep(PAUSE);
        }
        // A rank that captures the call has departed by now, of which the device says less than the host knows.
        look(&self.pool, self.rank()).inspect_err(|why| cuda.fail_because(why))?;
        cuda.ready()
    }

    /// The block that the memory grows by, as a window; or why no rank has taken one, which is the same on every rank.
    fn allocate_growth(
        &self,
        cuda: &CudaEngine,
        captures: bool,
        deadline: Deadline,
    ) -> Result<Result<Block<u8>>> {
        let lane = self.pool.lane(CONTROL_LANE)?;
        let (bytes, subject) = (cuda.growth_bytes(), cuda.subject());
        let joint = JointBlock { bytes, align: 4096, subject, captures };
        let fill = |block: &Block<u8>| cuda.prepare_growth(block, deadline);
        self.pool.alloc_together(&lane, joint, self.check_room(cuda), deadline, fill)
    }

    /// Refuses to grow on a device that has no room.
    fn check_room(&self, cuda: &CudaEngine) -> Result<()> {
        let lane = self.pool.lane(CONTROL_LANE)?.stats()?;
        let needed = cuda.growth_bytes().saturating_sub(lane.reserved - lane.allocated);
        let free = cuda.free_bytes()?;
        if needed > 0 && free < needed + SPARE_BYTES {
            return Err(Error::out_of_memory(format!(
                "{free} bytes of the device are free on rank {}, and a communicator's memory would grow by {needed}",
                self.rank()
            )));
        }
        Ok(())
    }
}

/// How a rank comes to a first large call, as ranks tell each other on the host.
#[derive(Clone, Copy, Debug)]
struct Arrival {
    /// Whether it captures the call.
    captures: bool,
    /// The call's description, as the handshakes on the device compare it.
    call: CallDescription,
}

impl Arrival {
    /// Message of a rank that makes no further call.
    const FAILED: [u8; 0] = [];

    fn bytes(&self) -> Vec<u8> {
        let words = self.call.words().iter().flat_map(|word| word.to_le_bytes());
        std::iter::once(u8::from(self.captures)).chain(words).collect()
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        let (captures, words) = bytes.split_first()?;
        let (words, rest) = words.as_chunks::<8>();
        let words = words.iter().map(|word| u64::from_le_bytes(*word)).collect::<Vec<_>>();
        let call = CallDescription::from_words(words.try_into().ok().filter(|_| rest.is_empty())?);
        Some(Self { captures: *captures != 0, call })
    }

    /// Finds out whether a peer captures the same call, as this rank does or does not.
    fn compare(&self, rank: u32, peer: u32, message: &[u8]) -> Result<()> {
        let Some(theirs) = Self::read(message) else {
            return Err(Error::mismatch(format!(
                "rank {peer} has failed before, and makes no further call of the communicator; see its error"
            ))
            .naming([peer]));
        };
        if (theirs.captures, theirs.call) == (self.captures, self.call) {
            return Ok(());
        }
        Err(mismatch_of_first_large(
            (rank, &self.call, self.captures),
            (peer, &theirs.call, theirs.captures),
        ))
    }

    /// Finds out whether a peer captures a call that this rank makes. Handshakes on the device compare calls otherwise.
    fn compare_captures(&self, rank: u32, peer: u32, message: &[u8]) -> Result<()> {
        match Self::read(message) {
            Some(theirs) if theirs.captures => self.compare(rank, peer, message),
            _ => Ok(()),
        }
    }
}
