//! Communicators: collectives on a pool's blocks.
//!
//! | file | holds |
//! | --- | --- |
//! | here | the collectives as methods, on blocks |
//! | `request` | the door of all collectives: a call is one value |
//! | `make` | how one is made |
//! | `options` | how a communicator behaves |
//! | `nested` | communicators of some of the ranks |
//! | `spanning` | communicators of ranks on several hosts |
//! | `slices` | the same calls on ordinary memory |
//! | `splits` | all-to-alls whose counts are in memory |
//! | `experts` | dispatch to experts, and combine |
//! | `expert_making` | how all ranks make a buffer for experts together, or none |
//! | `expert_memory` | the memory that a buffer for experts has for itself |
//! | `explain` | what a call would do now |
//! | `fused` | all-reduces with a residual and a norm |
//! | `matmul` | matrix products that hide their communication |
//! | `growth` | which memory a call uses, and more of it before the first large call |
//! | `addresses` | the same calls on addresses |
//! | `p2p` | `send` and `recv` between two ranks |
//! | `registry` | the algorithms |
//! | `decision` | which algorithm a call takes |
//! | `memory` | what a communicator holds |
//! | `call_lock` | what one call at a time may use |
//! | `decline` | calls whose arguments are wrong |
//! | `channel_set` | channels beside those of a communicator |
//! | `one_sided` | copies and signals between two ranks |
//! | `engine` | what runs the calls: the host, or kernels on a device |
//! | `peers` | the other ranks' processes, and whether they still run |

#![allow(unsafe_code)] // passes on blocks as raw memory that the pool keeps mapped

mod addresses;
mod call_lock;
mod channel_set;
mod decision;
mod decline;
mod engine;
mod expert_making;
mod expert_memory;
mod experts;
mod explain;
mod fused;
mod growth;
mod make;
mod matmul;
mod memory;
mod nested;
mod one_sided;
mod options;
mod p2p;
mod peers;
mod registry;
mod request;
mod slices;
mod spanning;
mod splits;

use std::fmt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use symmpool_allocator::topology::TopologyKind;
use symmpool_allocator::{Block, Error, Pool, Result, Stream, Windows};

use crate::cuda::Area;
use crate::host::HostOneSided;
use crate::host::subgroup_memory::SubgroupMemory;
use crate::sync::MutexGuard;
use crate::types::timeout::Timeout;
use crate::{CommunicatorMemory, Element, Place, ReduceOp, StandardCollective};
use call_lock::CallLock;
pub use channel_set::ChannelSet;
use decision::Choices;
pub use decision::Selector;
use engine::AnyEngine;
pub use experts::{ExpertBuffer, ReceivedParts};
pub use explain::{CallPlan, Explanation};
pub use nested::GroupOffer;
pub use options::CommunicatorOptions;
pub use request::{Callee, Request};
pub use splits::Splits;

/// Collectives between the ranks of a [`Pool`], on its blocks and on ordinary slices.
///
/// Blocks are read and written where they lie: peers have them mapped. Slices, and blocks of lanes
/// that are not shared, are ordinary memory; their data passes through scratch that the
/// communicator has. All ranks use the same kind in one call.
///
/// Every rank makes the same calls in the same order. If a rank calls something else, all ranks get an
/// error ([`Error::is_diverged`]), in host memory before data is touched. A rank that
/// does not come fails the communicator: this call and all later ones fail with
/// [`Error::is_timeout`] or [`Error::is_peer_lost`], which name it. Make a new communicator among the ranks that
/// are left. A peer that was in the failed call, and was late or stopped, may still write into this
/// rank's output until it has left the call itself, in host memory too: use the output for something else only
/// when that peer is known to have left the call, or to be gone.
///
/// On devices data does not wait until calls have been compared: after a call that failed, its output
/// is undefined on every rank. A rank that comes after another one gave up does not write to that rank's memory,
/// except in large calls, which copy engines carry: copies cannot be cancelled. The output of such a call
/// may be written to until every rank has got its error or has ended, also on ranks that
/// never made the call. Do not launch graphs with calls of a communicator that failed.
///
/// There are also point-to-point operations, [`Communicator::send`] and [`Communicator::recv`], and one-sided
/// copies and signals: [`Communicator::put`], [`Communicator::get`], [`Communicator::signal`] and
/// [`Communicator::wait`].
///
/// In host memory calls block until this rank's part is done; on devices they put kernels on a stream and return.
/// Threads take turns, in the order in which they come. You must see to it that this order is the same on all ranks,
/// with a lock that a thread holds from when it is decided which call comes next until the call is made. Where ranks
/// come in different orders, calls that differ are an error, as above; calls that are equal to each other, of as many
/// elements of a type in memory that is no window, cannot be told apart, and give the sums of each other's data.
/// Threads that need to communicate at the same time, or in no order, need a communicator each; a pool can have many. A
/// communicator keeps its pool alive, and dropping it needs no agreement between ranks.
///
/// A call whose lengths do not fit is [`Error::is_invalid_argument`] on its rank, and [`Error::is_diverged`] on the others,
/// which names that rank. Lengths are elements. Outputs come before inputs in arguments, and what is received before what is
/// sent, as in torch.distributed.
///
/// A call commits the pool first if a commit is due, so that blocks are windows when they are
/// used. Only one thread can commit at a time: call [`Pool::commit`] before several threads make calls.
///
/// ```
/// use std::thread;
/// use symmpool_allocator::{Driver, Group, Pool, Result, Stream};
/// use symmpool_collectives::{Communicator, ReduceOp};
///
/// fn rank(group: Group) -> Result<Vec<f32>> {
///     let mine = group.rank() as f32 + 1.0;
///     let pool = Pool::builder(group).driver(Driver::host()?).build()?;
///     let comm = Communicator::new(&pool)?;
///     let x = pool.alloc::<f32>(1000)?;
///     x.write(&[mine; 1000])?;
///     comm.all_reduce(&x, ReduceOp::Sum, &Stream::DEFAULT)?;
///     x.read()
/// }
///
/// // Ranks are usually processes; here they are threads of one process.
/// let ranks: Vec<_> = Group::in_process(2)?
///     .into_iter()
///     .map(|group| thread::spawn(move || rank(group)))
///     .collect();
/// for rank in ranks {
///     assert_eq!(rank.join().expect("no panic")?, [3.0; 1000]);
/// }
/// # Ok::<(), symmpool_allocator::Error>(())
/// ```
pub struct Communicator {
    pool: Pool,
    timeout: Arc<Timeout>,
    shared: Arc<CallLock>,
    registry: registry::Registry,
    /// Changed by a call that makes it grow.
    memory: Mutex<CommunicatorMemory>,
    /// Whether a device had no room for more memory, until [`Communicator::take_shortage`] returns it.
    shortage: AtomicBool,
    /// How the ranks are linked.
    mesh: TopologyKind,
    /// One-sided operations in host memory, which do not wait for a call under way. On a device they are the
    /// engine's.
    one_sided: Option<HostOneSided>,
    /// Memory from which this rank makes communicators of some of the ranks.
    subgroup_memory: Option<Arc<SubgroupMemory>>,
}

/// State that only one call at a time may use.
struct Inner {
    engine: AnyEngine,
    choices: Choices,
    /// The windows of some earlier commit; see [`Communicator::place_block`].
    windows: Arc<Windows>,
}

impl Communicator {
    /// The pool whose ranks these are.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// This process's rank.
    pub fn rank(&self) -> u32 {
        self.pool.rank()
    }

    /// The number of ranks.
    pub fn world(&self) -> u32 {
        self.pool.world()
    }

    /// Why all calls fail, if they do. It does not wait for calls that other threads are in, so that one can watch them.
    pub fn failure(&self) -> Option<Error> {
        self.shared.failure()
    }

    /// Reduces every rank's `x` in place.
    pub fn all_reduce<T: Element>(
        &self,
        x: &Block<T>,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        self.all_reduce_into(x, x, op, stream)
    }

    /// Reduces every rank's `input` into every rank's `out` of the same length.
    pub fn all_reduce_into<T: Element>(
        &self,
        out: &Block<T>,
        input: &Block<T>,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        self.call(&Request::new(StandardCollective::AllReduce, out, input).op(op), stream)
    }

    /// Reduces part `r` of every rank's `input` into rank `r`'s `out`, which has a part's length.
    pub fn reduce_scatter_into<T: Element>(
        &self,
        out: &Block<T>,
        input: &Block<T>,
        op: ReduceOp,
        stream: &Stream,
    ) -> Result<()> {
        self.call(&Request::new(StandardCollective::ReduceScatter, out, input).op(op), stream)
    }

    /// Copies rank `r`'s `input` to part `r` of every rank's `out`, which has `world` parts. On devices,
    /// outputs that are windows lie at one offset on all ranks where parts are as large as is said of
    /// [`Self::all_to_all_into`]; smaller ones lie anywhere.
    pub fn all_gather_into<T: Element>(
        &self,
        out: &Block<T>,
        input: &Block<T>,
        stream: &Stream,
    ) -> Result<()> {
        self.call(&Request::new(StandardCollective::AllGather, out, input), stream)
    }

    /// Copies the root's `x` into every other rank's.
    pub fn broadcast<T: Element>(&self, x: &Block<T>, root: u32, stream: &Stream) -> Result<()> {
        self.call(&Request::new(StandardCollective::Broadcast, x, x).root(root), stream)
    }

    /// Sends part `r` of `input` to rank `r`, where it becomes part `rank` of `out`. Both have the
    /// same length, a multiple of the number of ranks. On devices, where so much leaves a rank that copy engines carry
    /// it (48 MiB or more between two ranks, and 7 MiB more for each further rank, in parts of 16 or more), outputs that
    /// are windows lie at one offset on all ranks ([`Copy`](crate::AllToAllAlgorithm::Copy)); `is_diverged` where they do not.
    pub fn all_to_all_into<T: Element>(
        &self,
        out: &Block<T>,
        input: &Block<T>,
        stream: &Stream,
    ) -> Result<()> {
        self.call(&Request::new(StandardCollective::AllToAll, out, input), stream)
    }

    /// Sends `input_split_sizes[r]` elements to rank `r`, and receives `output_split_sizes[r]`
    /// from it; parts lie in rank order, without gaps. Any may be zero, and blocks may be longer
    /// than the sum of their parts.
    pub fn all_to_all_v_into<T: Element>(
        &self,
        out: &Block<T>,
        input: &Block<T>,
        output_split_sizes: &[usize],
        input_split_sizes: &[usize],
        stream: &Stream,
    ) -> Result<()> {
        let mut inner = self.begin(stream)?;
        inner.holds("input", input.len(), input_split_sizes, stream)?;
        inner.holds("output", out.len(), output_split_sizes, stream)?;
        let places = self.places(&mut inner, input, out, stream)?;
        let sizes = (input_split_sizes, output_split_sizes);
        self.grow_for_splits(&mut inner, T::DTYPE, stream)?;
        // SAFETY: both blocks are borrowed, so live and mapped, and `holds` has checked that neither sum is above its
        // block's length; behind the call blocks stay mapped until a commit, which waits for the device. There are no
        // references into blocks.
        unsafe { inner.engine.all_to_all_v(places, sizes, T::DTYPE, stream) }
    }

    /// Returns once every rank has called it. What ranks wrote before is visible to all after.
    pub fn barrier(&self, stream: &Stream) -> Result<()> {
        self.begin(stream)?.engine.barrier(stream)
    }

    /// Waits until this rank's calls on `stream` are done, and says what went wrong in them. On the
    /// host calls are done when they return.
    ///
    /// # Errors
    ///
    /// Those of the calls: on a device, a late or lost rank (`is_timeout`, `is_peer_lost`) and
    /// ranks that called differently (`is_diverged`) are found while kernels run.
    pub fn synchronize(&self, stream: &Stream) -> Result<()> {
        self.lock().engine.synchronize(stream)?;
        self.one_sided.as_ref().map_or(Ok(()), HostOneSided::report_declined)
    }

    /// Moves the end of the last call behind what `stream` was given so far: the next call waits for that too, on
    /// whatever stream it is. You must call this behind copies out of memory that peers write in the next call, and behind
    /// other work that belongs to a call and follows its kernel, once that stream waits for all of it. Costs next to nothing
    /// where all calls are on one stream, and can be captured.
    ///
    /// The stream must not wait for a peer that in turn waits for the next call of this communicator: neither would end.
    ///
    /// # Errors
    ///
    /// `is_invalid_state` if the last call is on another stream, which is being captured, and this one is not.
    pub fn extend_order(&self, stream: &Stream) -> Result<()> {
        self.lock().engine.extend_order(stream)
    }

    /// Forgets a stream: the communicator does not touch it any more unless a call names it again. You must call this
    /// before you destroy a stream that had calls. What was put on the stream keeps its place in the order of calls. Ranks
    /// need not forget the same streams. The pool's lanes remember streams too: see [`Pool::forget_stream`].
    ///
    /// # Errors
    ///
    /// `is_invalid_state` while the stream is being captured, if the communicator's last call is on it, and
    /// in a forked child.
    pub fn forget_stream(&self, stream: &Stream) -> Result<()> {
        self.lock().engine.forget_stream(stream)
    }

    /// Begins a call: waits for other threads' calls, and commits if a commit is due.
    ///
    /// In host memory a stream has no work that could be pending; it is only named in traces.
    fn begin(&self, stream: &Stream) -> Result<MutexGuard<'_, Inner>> {
        tracing::trace!(rank = self.rank(), stream = stream.raw(), "collective");
        let mut inner = self.shared.begin(&self.pool, stream)?;
        if let AnyEngine::Cuda(cuda) = &mut inner.engine {
            cuda.begin_in_small_area();
        }
        Ok(inner)
    }

    /// Goes on with a call that has given up its turn meanwhile, in the memory that it used.
    fn resume(&self, area: Area, stream: &Stream) -> Result<MutexGuard<'_, Inner>> {
        let mut inner = self.shared.begin(&self.pool, stream)?;
        inner.engine.use_area(area);
        Ok(inner)
    }

    /// Where a block lies, for the engine.
    ///
    /// The windows that are searched first may be older than the pool's. They are still valid: what was ever in a
    /// window is in a symmetric lane's range, and all live blocks of such a lane lie in windows when no commit is
    /// due, which `begin` has made sure of.
    fn place_block(
        &self,
        inner: &mut Inner,
        (address, offset): (*mut u8, u64),
        bytes: usize,
        stream: &Stream,
    ) -> Result<Place> {
        if !self.is_own(address as u64, offset) {
            let why = format!(
                "a block at {address:p} on rank {} is not a block of the communicator's pool",
                self.rank()
            );
            return Err(inner.engine.decline(Error::invalid_argument(why), stream));
        }
        if !inner.windows.covers(address as u64, bytes as u64) {
            inner.windows = self.pool.windows();
            if !inner.windows.covers(address as u64, bytes as u64) {
                return Ok(Place::Unregistered(address));
            }
        }
        Ok(Place::Window(offset))
    }

    /// Whether a block of this address and offset is one of this rank's in the communicator's pool.
    #[inline]
    fn is_own(&self, address: u64, offset: u64) -> bool {
        let layout = self.pool.layout();
        layout.locate(address) == Some((layout.rank, offset))
    }

    /// Refuses what reaches the memory of one host, where ranks are on several.
    #[inline]
    fn check_one_host(&self, what: &str) -> Result<()> {
        if self.pool.hosts().count() == 1 { Ok(()) } else { Err(self.not_across(what)) }
    }

    /// Refuses a block of another pool, which whoever runs the call may not reach.
    fn check_own<T: Element>(&self, what: &str, block: &Block<T>) -> Result<()> {
        if self.is_own(block.address(), block.offset()) {
            return Ok(());
        }
        Err(Error::invalid_argument(format!(
            "{what} on rank {}: {block:?} is not a block of the communicator's pool",
            self.rank()
        )))
    }

    /// Where the blocks of an input and an output lie.
    fn places<T: Element>(
        &self,
        inner: &mut Inner,
        input: &Block<T>,
        out: &Block<T>,
        stream: &Stream,
    ) -> Result<(Place, Place)> {
        let mut place = |block: &Block<T>| {
            let at = (block.as_ptr().cast(), block.offset());
            self.place_block(inner, at, block.bytes() as usize, stream)
        };
        Ok((place(input)?, place(out)?))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.shared.lock()
    }
}

impl Inner {
    /// Declines the call if a block is shorter than its parts.
    fn holds(&mut self, what: &str, length: usize, parts: &[usize], stream: &Stream) -> Result<()> {
        self.engine.ready()?;
        let sum = parts.iter().try_fold(0_usize, |sum, count| sum.checked_add(*count));
        if sum.is_some_and(|sum| sum <= length) {
            return Ok(());
        }
        let why = Error::invalid_argument(format!(
            "all_to_all_v on rank {}: an {what} of {length} elements is too short for parts of \
             {parts:?}",
            self.engine.rank()
        ));
        Err(self.engine.decline(why, stream))
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Communicator")
            .field("rank", &self.rank())
            .field("world", &self.world())
            .finish_non_exhaustive()
    }
}
