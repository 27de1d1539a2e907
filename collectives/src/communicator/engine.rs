//! What runs a communicator's calls: the host, or kernels on a device.

#![allow(unsafe_code)] // passes on the caller's promises about raw memory

use std::sync::{Arc, OnceLock};

use symmpool_allocator::{Error, Result, Stream};

use super::choice::Request;
use crate::algorithm::{
    BuiltIn, CallShape, Constraints, NativeKernel, RequestedAlgorithm, StandardCollective,
};
use crate::call::experts::{ExpertCall, ExpertShape};
use crate::call::plan_call::Arguments;
use crate::cuda::{Area, CudaEngine, CudaFailure, Lifts, Rehearsed};
use crate::host::expect_length;
use crate::plan::CheckedPlan;
use crate::types::communicator_memory::CommunicatorMemory;
use crate::types::timeout::Timeout;
use crate::{DType, HostEngine, NormBuffers, NormShape, Place, ReceivedSizes, SplitRows, SplitsAt};

/// The engine of host memory or of a device. Both are boxed, as they are large and differ in size.
pub(super) enum Engine {
    Host(Box<HostEngine>),
    Cuda(Box<CudaEngine>),
}

impl Engine {
    /// The area of memory that the call under way uses; in host memory there is one.
    pub(super) fn area(&self) -> Area {
        match self {
            Self::Host(_) => Area::Small,
            Self::Cuda(cuda) => cuda.area(),
        }
    }

    /// Begins a rehearsal: until its end calls do nothing but say what they would do.
    pub(super) fn begin_rehearsal(&mut self, lifts: Lifts) {
        match self {
            Self::Host(host) => host.begin_rehearsal(),
            Self::Cuda(cuda) => cuda.begin_rehearsal(lifts),
        }
    }

    /// Ends a rehearsal. Returns what was noted.
    pub(super) fn end_rehearsal(&mut self) -> Rehearsed {
        match self {
            Self::Host(host) => {
                Rehearsed { algorithm: host.end_rehearsal(), ..Rehearsed::default() }
            }
            Self::Cuda(cuda) => cuda.end_rehearsal(),
        }
    }

    /// Has the call under way use an area of memory.
    pub(super) fn use_area(&mut self, area: Area) {
        if let Self::Cuda(cuda) = self {
            cuda.use_area(area);
        }
    }
}

/// Why an engine's calls fail, for threads that do not wait until a call has ended.
#[derive(Clone)]
pub(super) enum FailureHandle {
    Host(Arc<OnceLock<Error>>),
    Cuda(Arc<CudaFailure>),
}

impl FailureHandle {
    pub(super) fn get(&self) -> Option<&Error> {
        match self {
            Self::Host(host) => host.get(),
            Self::Cuda(cuda) => cuda.get(),
        }
    }

    /// Whether the engine's memory must not be given back, once the engine has been dropped.
    pub(super) fn leaks(&self) -> bool {
        matches!(self, Self::Cuda(cuda) if cuda.leaks())
    }
}

/// Where the input and the output of a call lie.
pub(super) type Places = (Place, Place);

/// # Safety
///
/// Of all unsafe methods: the places are readable or writable for the call's lengths by whoever
/// runs it, until the stream is past it, and nobody else touches them meanwhile, in any rank's
/// slot where they are windows.
impl Engine {
    pub(super) fn rank(&self) -> u32 {
        match self {
            Self::Host(host) => host.rank(),
            Self::Cuda(cuda) => cuda.rank(),
        }
    }

    fn world(&self) -> u32 {
        match self {
            Self::Host(host) => host.world(),
            Self::Cuda(cuda) => cuda.world(),
        }
    }

    pub(super) fn timeout(&self) -> &Arc<Timeout> {
        match self {
            Self::Host(host) => &host.timeout,
            Self::Cuda(cuda) => &cuda.timeout,
        }
    }

    pub(super) fn failure(&mut self) -> Option<&Error> {
        match self {
            Self::Host(host) => host.failure(),
            Self::Cuda(cuda) => cuda.failure(),
        }
    }

    /// The same for threads that do not wait until a call has ended.
    pub(super) fn failure_handle(&self) -> FailureHandle {
        match self {
            Self::Host(host) => FailureHandle::Host(host.failure_handle()),
            Self::Cuda(cuda) => FailureHandle::Cuda(cuda.failure_handle()),
        }
    }

    pub(super) fn ready(&mut self) -> Result<()> {
        match self {
            Self::Host(host) => host.ready(),
            Self::Cuda(cuda) => cuda.ready(),
        }
    }

    pub(super) fn set_sm_budget(&mut self, most: Option<u32>) {
        match self {
            Self::Host(_) => {}
            Self::Cuda(cuda) => cuda.set_sm_budget(most),
        }
    }

    /// How a communicator's `total` bytes divide.
    pub(super) fn memory(&self, total: u64) -> CommunicatorMemory {
        match self {
            Self::Host(host) => host.memory(total),
            Self::Cuda(cuda) => cuda.memory(total),
        }
    }

    pub(super) fn extend_order(&mut self, stream: &Stream) -> Result<()> {
        match self {
            Self::Host(_) => Ok(()),
            Self::Cuda(cuda) => cuda.extend_order(*stream),
        }
    }

    pub(super) fn forget_stream(&mut self, stream: &Stream) -> Result<()> {
        match self {
            // In host memory nothing is pending on a stream.
            Self::Host(_) => Ok(()),
            Self::Cuda(cuda) => cuda.forget_stream(*stream),
        }
    }

    pub(super) fn abandon(&mut self) {
        match self {
            Self::Host(host) => host.abandon(),
            Self::Cuda(cuda) => cuda.abandon(),
        }
    }

    /// Declines the call, so that the other ranks get an error too. Returns why.
    pub(super) fn decline(&mut self, why: Error, stream: &Stream) -> Error {
        match self {
            Self::Host(host) => host.decline(why),
            Self::Cuda(cuda) => cuda.decline(why, *stream),
        }
    }

    /// Declines the call on a rank that cannot make any further call. Waits for no other rank.
    pub(super) fn give_up(&mut self, why: Error, stream: &Stream) -> Error {
        match self {
            Self::Host(host) => host.give_up(why),
            // A kernel waits and not the host. If it finds an error, that closes the communicator.
            Self::Cuda(cuda) => cuda.decline(why, *stream),
        }
    }

    /// Closes the communicator where work that belongs to a call failed behind its handshake. Returns why.
    pub(super) fn fail_halfway(&mut self, why: Error, stream: &Stream) -> Error {
        match self {
            Self::Host(host) => host.give_up(why),
            Self::Cuda(cuda) => cuda.fail_halfway(why, *stream),
        }
    }

    /// Declines the call if a length is not the expected one.
    pub(super) fn fits(
        &mut self,
        what: &str,
        length: usize,
        expected: Option<usize>,
        stream: &Stream,
    ) -> Result<()> {
        self.ready()?;
        expect_length(what, self.rank(), length, expected).map_err(|why| self.decline(why, stream))
    }

    /// The engine of host memory, for calls that only it has.
    pub(super) fn host(&mut self, what: &str, stream: &Stream) -> Result<&mut HostEngine> {
        if matches!(self, Self::Cuda(_)) {
            self.ready()?;
            let why = Error::unsupported(format!(
                "{what} on rank {}: a communicator on devices has no such call yet; use memory of \
                 the device, or a pool in host memory",
                self.rank()
            ));
            return Err(self.decline(why, stream));
        }
        match self {
            Self::Host(host) => Ok(host),
            Self::Cuda(_) => Err(Error::invalid_state("the engine is on the host")),
        }
    }

    /// The numbers of a collective's built-in algorithms.
    pub(super) fn algorithms(&self, collective: StandardCollective) -> Vec<u8> {
        match self {
            Self::Host(_) => HostEngine::algorithms(collective),
            Self::Cuda(_) => CudaEngine::algorithms(collective),
        }
    }

    /// Refuses a built-in algorithm that cannot serve a call.
    pub(super) fn check_fit(&self, code: u8, shape: &CallShape) -> Result<()> {
        match self {
            Self::Host(host) => host.check_fit(code, shape),
            Self::Cuda(cuda) => cuda.check_fit(code, shape),
        }
    }

    /// All built-in algorithms.
    pub(super) fn built_in(&self) -> Vec<BuiltIn> {
        let world = self.world();
        let of = |collective: StandardCollective| {
            self.algorithms(collective).into_iter().map(move |code| {
                let fits = |shape: &CallShape| match self {
                    Self::Host(host) => host.check_fit(code, shape).is_ok(),
                    Self::Cuda(cuda) => cuda.may_fit(code, shape),
                };
                let constraints = Constraints::of_built_in(collective, world, fits);
                BuiltIn { collective, code, constraints }
            })
        };
        StandardCollective::ALL.into_iter().flat_map(of).collect()
    }

    /// Runs a call with the built-in algorithm of this number, or with the best one if it is [`AUTO`](crate::algorithm::AUTO).
    #[inline]
    pub(super) unsafe fn run(
        &mut self,
        request: &Request,
        code: u8,
        by_environment: bool,
        stream: &Stream,
    ) -> Result<()> {
        let Request { collective, from, to, count, dtype, op, root } = *request;
        let places = (from, to);
        match (self, collective) {
            // SAFETY: the caller's promises, as in all that follow.
            (Self::Host(host), StandardCollective::AllReduce) => unsafe {
                let algorithm = RequestedAlgorithm::of_code(code, by_environment).algorithm;
                host.all_reduce(from, to, count, dtype, op, algorithm)
            },
            // SAFETY: as above.
            (Self::Host(host), StandardCollective::ReduceScatter) => unsafe {
                host.reduce_scatter_by(from, to, count, (dtype, op), code)
            },
            // SAFETY: as above.
            (Self::Host(host), StandardCollective::AllGather) => unsafe {
                host.all_gather_by(from, to, count, dtype, code)
            },
            // SAFETY: as above.
            (Self::Host(host), StandardCollective::Broadcast) => unsafe {
                host.broadcast_by(to, count, dtype, root, code)
            },
            (Self::Host(host), StandardCollective::AllToAll) => {
                // SAFETY: as above.
                host.exchanging(code, |host| unsafe { host.all_to_all(from, to, count, dtype) })
            }
            // SAFETY: as above.
            (Self::Cuda(cuda), StandardCollective::AllReduce) => unsafe {
                let requested = RequestedAlgorithm::of_code(code, by_environment);
                cuda.call(*stream, |cuda| {
                    cuda.all_reduce(places, count, (dtype, op), requested, *stream)
                })
            },
            // SAFETY: as above.
            (Self::Cuda(cuda), StandardCollective::ReduceScatter) => unsafe {
                cuda.call(*stream, |cuda| {
                    cuda.reduce_scatter(places, count, (dtype, op), code, *stream)
                })
            },
            (Self::Cuda(cuda), StandardCollective::AllGather) => {
                // SAFETY: as above.
                let run = |cuda: &mut CudaEngine| unsafe {
                    cuda.all_gather(places, count, dtype, *stream)
                };
                cuda.call(*stream, |cuda| cuda.exchanging(code, collective, *stream, run))
            }
            (Self::Cuda(cuda), StandardCollective::Broadcast) => {
                // SAFETY: as above.
                let run = |cuda: &mut CudaEngine| unsafe {
                    cuda.broadcast(to, count, dtype, root, *stream)
                };
                cuda.call(*stream, |cuda| cuda.exchanging(code, collective, *stream, run))
            }
            (Self::Cuda(cuda), StandardCollective::AllToAll) => {
                // SAFETY: as above.
                let run = |cuda: &mut CudaEngine| unsafe {
                    cuda.all_to_all(places, count, dtype, *stream)
                };
                cuda.call(*stream, |cuda| cuda.exchanging(code, collective, *stream, run))
            }
        }
    }

    /// Refuses a registered algorithm that cannot serve a call.
    pub(super) fn check_plan(&self, checked: &CheckedPlan, arguments: &Arguments) -> Result<()> {
        match self {
            Self::Host(host) => host.check_plan(checked, arguments),
            Self::Cuda(cuda) => cuda.check_plan(checked, arguments),
        }
    }

    pub(super) unsafe fn all_to_all_v(
        &mut self,
        places: Places,
        sizes: (&[usize], &[usize]),
        dtype: DType,
        stream: &Stream,
    ) -> Result<()> {
        let ((input, output), (send, receive)) = (places, sizes);
        match self {
            // SAFETY: as in `run`.
            Self::Host(host) => unsafe { host.all_to_all_v(input, send, output, receive, dtype) },
            // SAFETY: as in `run`.
            Self::Cuda(cuda) => unsafe {
                cuda.call(*stream, |cuda| cuda.all_to_all_v(places, sizes, dtype, *stream))
            },
        }
    }

    pub(super) unsafe fn all_to_all_splits(
        &mut self,
        places: Places,
        rows: &SplitRows,
        splits: &SplitsAt,
        stream: &Stream,
    ) -> Result<()> {
        let (input, output) = places;
        match self {
            // SAFETY: as in `run`.
            Self::Host(host) => unsafe { host.all_to_all_splits(input, output, rows, splits) },
            // SAFETY: as in `run`.
            Self::Cuda(cuda) => unsafe {
                cuda.call(*stream, |cuda| cuda.all_to_all_splits(places, rows, splits, *stream))
            },
        }
    }

    pub(super) unsafe fn run_plan(
        &mut self,
        checked: &CheckedPlan,
        arguments: &Arguments,
        stream: &Stream,
    ) -> Result<()> {
        match self {
            // SAFETY: as in `all_reduce`.
            Self::Host(host) => unsafe { host.run_plan_for(checked, arguments) },
            // SAFETY: as in `all_reduce`.
            Self::Cuda(cuda) => unsafe {
                cuda.call(*stream, |cuda| cuda.run_plan(checked, arguments, *stream))
            },
        }
    }

    /// Compiles this rank's kernels of plans, so many at a time. In host memory there are none.
    pub(super) fn compile_plans(
        &self,
        plans: &[(&CheckedPlan, DType, crate::ReduceOp, u32)],
        threads: usize,
    ) {
        match self {
            Self::Host(_) => {}
            Self::Cuda(cuda) => cuda.compile_plans(plans, threads),
        }
    }

    pub(super) unsafe fn run_native(
        &mut self,
        native: &NativeKernel,
        arguments: &Arguments,
        stream: &Stream,
    ) -> Result<()> {
        match self {
            Self::Host(host) => {
                host.ready()?;
                Err(host.decline(no_kernels(native, host.rank())))
            }
            // SAFETY: as in `all_reduce`.
            Self::Cuda(cuda) => unsafe {
                cuda.call(*stream, |cuda| cuda.run_native(native, arguments, *stream))
            },
        }
    }

    /// Adds up rows, and adds a residual and norms them. `input` is where the buffers' input lies.
    pub(super) unsafe fn all_reduce_norm(
        &mut self,
        shape: &NormShape,
        buffers: &NormBuffers,
        input: Place,
        stream: &Stream,
    ) -> Result<()> {
        match self {
            // SAFETY: as in `all_reduce`.
            Self::Host(host) => unsafe { host.all_reduce_norm(shape, buffers, input) },
            // SAFETY: as in `all_reduce`.
            Self::Cuda(cuda) => unsafe {
                cuda.call(*stream, |cuda| cuda.all_reduce_norm(shape, buffers, *stream))
            },
        }
    }

    /// Whether a kernel of a program can serve a call.
    pub(super) fn check_native(&self, native: &NativeKernel, arguments: &Arguments) -> Result<()> {
        match self {
            Self::Host(host) => Err(no_kernels(native, host.rank())),
            Self::Cuda(cuda) => cuda.check_native(native, arguments).map(|_| ()),
        }
    }

    /// Loads the kernels that buffers for experts need on a device. A rank that cannot declines its next call.
    pub(super) fn load_experts(&mut self, shape: &ExpertShape) -> Result<()> {
        match self {
            Self::Host(_) => Ok(()),
            Self::Cuda(cuda) => cuda.load_experts(shape),
        }
    }

    /// The same where all ranks learn of a failure by what comes next.
    pub(super) fn load_experts_together(&mut self, shape: &ExpertShape) -> Result<()> {
        match self {
            Self::Host(_) => Ok(()),
            Self::Cuda(cuda) => cuda.load_kernels_of(shape),
        }
    }

    /// Sends tokens to the ranks of their experts. The buffer's memory is at `call.region`.
    pub(super) unsafe fn dispatch(&mut self, call: &ExpertCall, stream: &Stream) -> Result<()> {
        self.ready()?;
        match self {
            // SAFETY: as in `run`.
            Self::Host(host) => unsafe { host.dispatch(call) },
            // SAFETY: as in `run`.
            Self::Cuda(cuda) => unsafe { cuda.call(*stream, |cuda| cuda.dispatch(call, *stream)) },
        }
    }

    /// The same, and says how many rows arrive.
    pub(super) unsafe fn dispatch_exact(
        &mut self,
        call: &ExpertCall,
        stream: &Stream,
    ) -> Result<ReceivedSizes> {
        self.ready()?;
        match self {
            // SAFETY: as in `run`.
            Self::Host(host) => unsafe { host.dispatch_exact(call) },
            // SAFETY: as in `run`.
            Self::Cuda(cuda) => unsafe { cuda.dispatch_exact(call, *stream) },
        }
    }

    /// Sends rows of experts back, and sums them up.
    pub(super) unsafe fn combine(&mut self, call: &ExpertCall, stream: &Stream) -> Result<()> {
        self.ready()?;
        match self {
            // SAFETY: as in `run`.
            Self::Host(host) => unsafe { host.combine(call) },
            // SAFETY: as in `run`.
            Self::Cuda(cuda) => unsafe { cuda.call(*stream, |cuda| cuda.combine(call, *stream)) },
        }
    }

    /// The engine of a device, for calls that need no engine in host memory.
    pub(super) fn cuda(&mut self) -> Result<&mut CudaEngine> {
        match self {
            Self::Cuda(cuda) => Ok(cuda),
            Self::Host(_) => Err(Error::invalid_state("the engine is on a device")),
        }
    }

    pub(super) fn barrier(&mut self, stream: &Stream) -> Result<()> {
        match self {
            Self::Host(host) => host.barrier(),
            Self::Cuda(cuda) => cuda.call(*stream, |cuda| cuda.barrier(*stream)),
        }
    }

    /// A barrier that measures its waits; `waits` is a number for each rank.
    pub(super) unsafe fn measured_barrier(
        &mut self,
        waits: *mut i64,
        stream: &Stream,
    ) -> Result<()> {
        match self {
            // SAFETY: as in `run`.
            Self::Host(host) => unsafe { host.measured_barrier(waits) },
            // SAFETY: as in `run`.
            Self::Cuda(cuda) => unsafe {
                cuda.call(*stream, |cuda| cuda.measured_barrier(waits as u64, *stream))
            },
        }
    }

    /// Waits until the stream has done what was put on it, and returns what went wrong there.
    pub(super) fn synchronize(&mut self, stream: &Stream) -> Result<()> {
        match self {
            Self::Host(host) => host.ready(),
            Self::Cuda(cuda) => cuda.synchronize(*stream),
        }
    }
}

fn no_kernels(native: &NativeKernel, rank: u32) -> Error {
    Error::unsupported(format!(
        "the native algorithm {} on rank {rank}: it is a CUDA kernel, and this communicator is in host memory",
        native.name
    ))
}
