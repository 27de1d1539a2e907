//! The trait of engines: one runs a communicator's calls on one rank, in host memory or by kernels on a device.

#![allow(unsafe_code)] // declares what callers promise about raw memory

use std::sync::Arc;

use symmpool_allocator::{Error, Result, Stream};

use crate::algorithm::{AlgorithmId, CallShape, NativeKernel, StandardCollective};
use crate::call::experts::{ExpertCall, ExpertShape};
use crate::call::rehearsal::{Lifts, Rehearsed};
use crate::call::{Arguments, CallDescription, StandardCall};
use crate::plan::CheckedPlan;
use crate::types::communicator_memory::CommunicatorMemory;
use crate::types::timeout::Timeout;
use crate::{DType, NormBuffers, NormShape, Place, ReceivedSizes, ReduceOp, SplitRows, SplitsAt};

/// Why an engine's calls fail, for threads that do not wait until a call has ended.
pub(crate) trait FailureHandle: Send + Sync {
    fn get(&self) -> Option<&Error>;

    /// Whether the engine's memory must not be given back, once the engine has been dropped.
    fn leaks(&self) -> bool {
        false
    }
}

/// A reduction of arrays of one rank's memory, element by element.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LocalReduction<'a> {
    /// The arrays, in the order in which they are reduced.
    pub(crate) from: &'a [*const u8],
    pub(crate) to: *mut u8,
    /// Elements of each array.
    pub(crate) count: usize,
    pub(crate) dtype: DType,
    pub(crate) op: ReduceOp,
    /// The number that averages are divided by.
    pub(crate) divisor: usize,
}

/// One rank's side of a communicator: one call at a time.
///
/// In host memory a call is over when it returns, and streams only have names. On a device it puts work on the stream.
/// Errors of calls have been reported to the other ranks when they are returned.
///
/// # Safety
///
/// Callers of all unsafe methods promise this: the places are readable or writable for the call's lengths by whoever
/// runs it, until the stream is past it, and nobody else touches them meanwhile, in any rank's slot where they are
/// windows.
pub(crate) trait Engine: Send {
    /// This rank. Where the group spans hosts, it is the number in the whole group.
    fn rank(&self) -> u32;

    fn world(&self) -> u32;

    /// How long waits for other ranks last at most.
    fn timeout(&self) -> &Arc<Timeout>;

    /// Why all calls fail, if they do.
    fn failure(&self) -> Option<&Error>;

    fn failure_handle(&self) -> Arc<dyn FailureHandle>;

    /// Refuses a call after a failure, and in a forked child.
    fn ready(&mut self) -> Result<()>;

    /// How a communicator's `total` bytes divide.
    fn memory(&self, total: u64) -> CommunicatorMemory;

    /// Fails the communicator after a panic inside a call: no call can follow.
    fn fail_after_panic(&mut self);

    /// Declines the call, so that the other ranks get an error too. Returns why.
    fn decline(&mut self, why: Error, stream: &Stream) -> Error;

    /// Declines the call where ranks may have come to different calls, and waits for no other rank. In host memory the
    /// communicator fails on this rank. On a device it fails when the handshake finds that ranks differ: if all ranks decline
    /// the call, it stays usable.
    fn decline_and_fail(&mut self, why: Error, stream: &Stream) -> Error;

    /// Fails the communicator where work that belongs to a call failed behind its handshake. Returns why.
    fn fail_halfway(&mut self, why: Error, stream: &Stream) -> Error;

    /// Begins a rehearsal: until its end calls do nothing but say what they would do.
    fn begin_rehearsal(&mut self, lifts: Lifts);

    /// Ends a rehearsal. Returns what was noted.
    fn end_rehearsal(&mut self) -> Rehearsed;

    /// A collective's built-in algorithms.
    fn algorithms(&self, collective: StandardCollective) -> Vec<AlgorithmId>;

    /// Refuses a built-in algorithm that cannot serve a call with the memory there is.
    fn check_fit(&self, id: AlgorithmId, shape: &CallShape) -> Result<()>;

    /// Whether a built-in algorithm can serve a call with all memory that the communicator may have.
    fn may_fit(&self, id: AlgorithmId, shape: &CallShape) -> bool {
        self.check_fit(id, shape).is_ok()
    }

    /// Refuses a plan that cannot serve a call.
    fn check_plan(&self, plan: &CheckedPlan, arguments: &Arguments) -> Result<()>;

    /// Refuses a kernel of a program that cannot serve a call.
    fn check_native(&self, kernel: &NativeKernel, arguments: &Arguments) -> Result<()>;

    /// Runs a call by the built-in algorithm that it names, or by the best one.
    unsafe fn run(&mut self, call: &StandardCall, stream: &Stream) -> Result<()>;

    /// Runs a call by a plan that was proved. Declines it where the plan cannot serve it.
    unsafe fn run_plan(
        &mut self,
        plan: &CheckedPlan,
        arguments: &Arguments,
        stream: &Stream,
    ) -> Result<()>;

    /// Runs a call by a kernel of the program. Declines it where the kernel cannot serve it.
    unsafe fn run_native(
        &mut self,
        kernel: &NativeKernel,
        arguments: &Arguments,
        stream: &Stream,
    ) -> Result<()>;

    /// An all-to-all of so many elements to and from each rank.
    unsafe fn all_to_all_v(
        &mut self,
        places: (Place, Place),
        splits: (&[usize], &[usize]),
        dtype: DType,
        stream: &Stream,
    ) -> Result<()>;

    /// An all-to-all whose counts lie in memory.
    unsafe fn all_to_all_splits(
        &mut self,
        places: (Place, Place),
        rows: &SplitRows,
        splits: &SplitsAt,
        stream: &Stream,
    ) -> Result<()>;

    /// Adds up rows, and adds a residual and norms them. `input` is where the buffers' input lies.
    unsafe fn all_reduce_norm(
        &mut self,
        shape: &NormShape,
        buffers: &NormBuffers,
        input: Place,
        stream: &Stream,
    ) -> Result<()>;

    /// Sends tokens to the ranks of their experts. The buffer's memory is at `call.region`.
    unsafe fn dispatch(&mut self, call: &ExpertCall, stream: &Stream) -> Result<()>;

    /// A dispatch that says how many rows arrive.
    unsafe fn dispatch_exact(
        &mut self,
        call: &ExpertCall,
        stream: &Stream,
    ) -> Result<ReceivedSizes>;

    /// Sends rows of experts back, and sums them up.
    unsafe fn combine(&mut self, call: &ExpertCall, stream: &Stream) -> Result<()>;

    /// Copies bytes of this rank's memory, behind what the stream was given: part of a call over hosts.
    unsafe fn copy_local(
        &mut self,
        to: *mut u8,
        from: *const u8,
        bytes: usize,
        stream: &Stream,
    ) -> Result<()>;

    /// Reduces arrays of this rank's memory in their order, behind what the stream was given: part of a call over hosts. The
    /// result may be one of the arrays, and overlaps no other one.
    unsafe fn reduce_local(&mut self, work: &LocalReduction<'_>, stream: &Stream) -> Result<()>;

    /// Has all that a reduction needs ready, before anything of its call is under way.
    fn load_local_reduction(&mut self, _: DType, _: ReduceOp) -> Result<()> {
        Ok(())
    }

    /// Waits until all ranks have come: on a device the stream does.
    fn barrier(&mut self, stream: &Stream) -> Result<()>;

    /// Meets all ranks, which must make the same call, and does nothing else. In host memory alone.
    fn meet(&mut self, call: &CallDescription) -> Result<()> {
        Err(Error::unsupported(format!("{call} without its data, on rank {}", self.rank())))
    }

    /// Waits until the other ranks have reached the calls that this one declined, as the next call does. In host memory alone.
    fn catch_up(&mut self) -> Result<()> {
        Ok(())
    }

    /// Waits sleep soon from now on, as the ranks share the cores with threads that carry data for them. In host memory alone.
    fn sleep_soon(&mut self) {}

    /// A barrier that measures its waits. `waits` is the aligned address of an `i64` for each rank, to which the wait is added:
    /// nanoseconds in host memory, cycles of an SM on a device.
    unsafe fn measured_barrier(&mut self, waits: *mut i64, stream: &Stream) -> Result<()>;

    /// Waits until the stream has done what was put on it, and returns what went wrong there.
    fn synchronize(&mut self, stream: &Stream) -> Result<()>;

    /// Moves the end of the last call behind what the stream was given so far.
    fn extend_order(&mut self, _: &Stream) -> Result<()> {
        Ok(())
    }

    /// Does not touch the stream any more unless a call names it.
    fn forget_stream(&mut self, _: &Stream) -> Result<()> {
        Ok(())
    }

    /// Kernels that are launched from now on take no more SMs than that.
    fn set_sm_budget(&mut self, _: Option<u32>) {}

    /// Compiles this rank's kernels of plans, so many at a time.
    fn compile_plans(&self, _: &[(&CheckedPlan, DType, ReduceOp, u32)], _threads: usize) {}

    /// Loads the kernels that buffers for experts need. A rank that cannot load them declines its next call.
    fn load_experts(&mut self, _: &ExpertShape) -> Result<()> {
        Ok(())
    }

    /// Loads these kernels where all ranks learn of a failure by what comes next.
    fn load_experts_together(&mut self, _: &ExpertShape) -> Result<()> {
        Ok(())
    }
}
