//! The engine on a device, as communicators use it.

#![allow(unsafe_code)] // passes on the caller's promises about raw memory

use std::sync::Arc;

use symmpool_allocator::{Error, Result, Stream};

use super::{CudaEngine, CudaFailure};
use crate::algorithm::{AlgorithmId, CallShape, NativeKernel, StandardCollective};
use crate::call::experts::{ExpertCall, ExpertShape};
use crate::call::rehearsal::{Lifts, Rehearsed};
use crate::call::{Arguments, StandardCall};
use crate::engine::{Engine, FailureHandle, LocalReduction};
use crate::plan::CheckedPlan;
use crate::types::timeout::Timeout;
use crate::{
    CommunicatorMemory, DType, NormBuffers, NormShape, Place, ReceivedSizes, ReduceOp, SplitRows,
    SplitsAt,
};

impl FailureHandle for CudaFailure {
    fn get(&self) -> Option<&Error> {
        CudaFailure::get(self)
    }

    fn leaks(&self) -> bool {
        CudaFailure::leaks(self)
    }
}

impl Engine for CudaEngine {
    fn rank(&self) -> u32 {
        CudaEngine::rank(self)
    }

    fn world(&self) -> u32 {
        CudaEngine::world(self)
    }

    fn timeout(&self) -> &Arc<Timeout> {
        &self.timeout
    }

    fn failure(&self) -> Option<&Error> {
        CudaEngine::failure(self)
    }

    fn failure_handle(&self) -> Arc<dyn FailureHandle> {
        CudaEngine::failure_handle(self) as _
    }

    fn ready(&mut self) -> Result<()> {
        CudaEngine::ready(self)
    }

    fn memory(&self, total: u64) -> CommunicatorMemory {
        CudaEngine::memory(self, total)
    }

    fn fail_after_panic(&mut self) {
        CudaEngine::fail_after_panic(self);
    }

    fn decline(&mut self, why: Error, stream: &Stream) -> Error {
        CudaEngine::decline(self, why, *stream)
    }

    /// A kernel waits and not the host. If its handshake finds that ranks differ, that fails the communicator on all of them, so
    /// nothing that ranks saw differently can follow.
    fn decline_and_fail(&mut self, why: Error, stream: &Stream) -> Error {
        CudaEngine::decline(self, why, *stream)
    }

    fn fail_halfway(&mut self, why: Error, stream: &Stream) -> Error {
        CudaEngine::fail_halfway(self, why, *stream)
    }

    fn begin_rehearsal(&mut self, lifts: Lifts) {
        CudaEngine::begin_rehearsal(self, lifts);
    }

    fn end_rehearsal(&mut self) -> Rehearsed {
        CudaEngine::end_rehearsal(self)
    }

    fn algorithms(&self, collective: StandardCollective) -> Vec<AlgorithmId> {
        CudaEngine::algorithms(collective)
    }

    fn check_fit(&self, id: AlgorithmId, shape: &CallShape) -> Result<()> {
        CudaEngine::check_fit(self, id, shape)
    }

    fn may_fit(&self, id: AlgorithmId, shape: &CallShape) -> bool {
        CudaEngine::may_fit(self, id, shape)
    }

    fn check_plan(&self, plan: &CheckedPlan, arguments: &Arguments) -> Result<()> {
        CudaEngine::check_plan(self, plan, arguments)
    }

    fn check_native(&self, kernel: &NativeKernel, arguments: &Arguments) -> Result<()> {
        CudaEngine::check_native(self, kernel, arguments).map(drop)
    }

    #[inline]
    unsafe fn run(&mut self, call: &StandardCall, stream: &Stream) -> Result<()> {
        let run: unsafe fn(&mut Self, &StandardCall, Stream) -> Result<()> = match call.collective {
            StandardCollective::AllReduce => Self::all_reduce,
            StandardCollective::ReduceScatter => Self::reduce_scatter,
            StandardCollective::AllGather => Self::all_gather,
            StandardCollective::Broadcast => Self::broadcast,
            StandardCollective::AllToAll => Self::all_to_all,
        };
        // SAFETY: the caller promised that the places in `call` are there for its lengths until the stream is past it.
        self.call(*stream, |cuda| unsafe { run(cuda, call, *stream) })
    }

    unsafe fn run_plan(
        &mut self,
        plan: &CheckedPlan,
        arguments: &Arguments,
        stream: &Stream,
    ) -> Result<()> {
        // SAFETY: the caller promised that the places in `arguments` are there for the plan's parts until the stream is
        // past the call.
        self.call(*stream, |cuda| unsafe { cuda.run_plan(plan, arguments, *stream) })
    }

    unsafe fn run_native(
        &mut self,
        kernel: &NativeKernel,
        arguments: &Arguments,
        stream: &Stream,
    ) -> Result<()> {
        // SAFETY: the caller promised that the places in `arguments` are there for all parts until the stream is past
        // the call. The program that brings the kernel answers for what else it accesses.
        self.call(*stream, |cuda| unsafe { cuda.run_native(kernel, arguments, *stream) })
    }

    unsafe fn all_to_all_v(
        &mut self,
        places: (Place, Place),
        splits: (&[usize], &[usize]),
        dtype: DType,
        stream: &Stream,
    ) -> Result<()> {
        // SAFETY: the caller promised that the places are there for the sums of `splits` until the stream is past the
        // call.
        self.call(*stream, |cuda| unsafe { cuda.all_to_all_v(places, splits, dtype, *stream) })
    }

    unsafe fn all_to_all_splits(
        &mut self,
        places: (Place, Place),
        rows: &SplitRows,
        splits: &SplitsAt,
        stream: &Stream,
    ) -> Result<()> {
        // SAFETY: the caller promised that the places are there for the lengths in `rows`, and the splits for a count
        // for each rank, until the stream is past the call.
        self.call(*stream, |cuda| unsafe { cuda.all_to_all_splits(places, rows, splits, *stream) })
    }

    unsafe fn all_reduce_norm(
        &mut self,
        shape: &NormShape,
        buffers: &NormBuffers,
        _: Place,
        stream: &Stream,
    ) -> Result<()> {
        // SAFETY: the caller promised that the buffers are there for the rows of `shape` until the stream is past the
        // call.
        self.call(*stream, |cuda| unsafe { cuda.all_reduce_norm(shape, buffers, *stream) })
    }

    unsafe fn dispatch(&mut self, call: &ExpertCall, stream: &Stream) -> Result<()> {
        CudaEngine::ready(self)?;
        // SAFETY: the caller promised that what `call` points to is there for its lengths until the stream is past it.
        self.call(*stream, |cuda| unsafe { cuda.dispatch(call, *stream) })
    }

    unsafe fn dispatch_exact(
        &mut self,
        call: &ExpertCall,
        stream: &Stream,
    ) -> Result<ReceivedSizes> {
        CudaEngine::ready(self)?;
        // SAFETY: the caller promised that what `call` points to is there for its lengths until the stream is past it.
        unsafe { CudaEngine::dispatch_exact(self, call, *stream) }
    }

    unsafe fn combine(&mut self, call: &ExpertCall, stream: &Stream) -> Result<()> {
        CudaEngine::ready(self)?;
        // SAFETY: the caller promised that what `call` points to is there for its lengths until the stream is past it,
        // and that a dispatch made its handle.
        self.call(*stream, |cuda| unsafe { cuda.combine(call, *stream) })
    }

    unsafe fn copy_local(
        &mut self,
        to: *mut u8,
        from: *const u8,
        bytes: usize,
        stream: &Stream,
    ) -> Result<()> {
        // SAFETY: the caller promised that the bytes are readable and writable until the stream is past this.
        unsafe {
            CudaEngine::copy_local(
                self,
                to.expose_provenance() as u64,
                from.expose_provenance() as u64,
                bytes as u64,
                *stream,
            )
        }
    }

    unsafe fn reduce_local(&mut self, work: &LocalReduction<'_>, stream: &Stream) -> Result<()> {
        // SAFETY: the caller promised that the arrays are readable and the result is writable until the stream is past this.
        unsafe { CudaEngine::reduce_local(self, work, *stream) }
    }

    fn load_local_reduction(&mut self, dtype: DType, op: ReduceOp) -> Result<()> {
        CudaEngine::load_local_reduction(self, dtype, op)
    }

    fn barrier(&mut self, stream: &Stream) -> Result<()> {
        self.call(*stream, |cuda| CudaEngine::barrier(cuda, *stream))
    }

    unsafe fn measured_barrier(&mut self, waits: *mut i64, stream: &Stream) -> Result<()> {
        // SAFETY: the caller promised that `waits` is aligned and there for a number for each rank until the stream is
        // past the call.
        self.call(*stream, |cuda| unsafe { cuda.measured_barrier(waits as u64, *stream) })
    }

    fn synchronize(&mut self, stream: &Stream) -> Result<()> {
        CudaEngine::synchronize(self, *stream)
    }

    fn extend_order(&mut self, stream: &Stream) -> Result<()> {
        CudaEngine::extend_order(self, *stream)
    }

    fn forget_stream(&mut self, stream: &Stream) -> Result<()> {
        CudaEngine::forget_stream(self, *stream)
    }

    fn set_sm_budget(&mut self, most: Option<u32>) {
        CudaEngine::set_sm_budget(self, most);
    }

    fn compile_plans(&self, plans: &[(&CheckedPlan, DType, ReduceOp, u32)], threads: usize) {
        CudaEngine::compile_plans(self, plans, threads);
    }

    fn load_experts(&mut self, shape: &ExpertShape) -> Result<()> {
        CudaEngine::load_experts(self, shape)
    }

    fn load_experts_together(&mut self, shape: &ExpertShape) -> Result<()> {
        self.load_kernels_of(shape)
    }
}
