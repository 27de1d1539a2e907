//! The engine in host memory, as communicators use it.

#![allow(unsafe_code)] // passes on the caller's promises about raw memory

use std::sync::{Arc, OnceLock};

use symmpool_allocator::{Error, Result, Stream};

use super::HostEngine;
use crate::algorithm::{AlgorithmId, CallShape, NativeKernel, StandardCollective};
use crate::call::experts::ExpertCall;
use crate::call::rehearsal::{Lifts, Rehearsed};
use crate::call::{Arguments, CallDescription, StandardCall};
use crate::engine::{Engine, FailureHandle, LocalReduction};
use crate::plan::CheckedPlan;
use crate::types::timeout::Timeout;
use crate::{
    CommunicatorMemory, DType, NormBuffers, NormShape, Place, ReceivedSizes, SplitRows, SplitsAt,
};

impl FailureHandle for OnceLock<Error> {
    fn get(&self) -> Option<&Error> {
        OnceLock::get(self)
    }
}

impl Engine for HostEngine {
    fn rank(&self) -> u32 {
        self.layout.rank
    }

    fn world(&self) -> u32 {
        self.layout.world
    }

    fn timeout(&self) -> &Arc<Timeout> {
        &self.timeout
    }

    fn failure(&self) -> Option<&Error> {
        self.failed.get()
    }

    fn failure_handle(&self) -> Arc<dyn FailureHandle> {
        Arc::clone(&self.failed) as _
    }

    fn ready(&mut self) -> Result<()> {
        HostEngine::ready(self)
    }

    fn memory(&self, total: u64) -> CommunicatorMemory {
        self.control.memory(total)
    }

    fn fail_after_panic(&mut self) {
        HostEngine::fail_after_panic(self);
    }

    fn decline(&mut self, why: Error, _: &Stream) -> Error {
        HostEngine::decline(self, why)
    }

    fn decline_and_fail(&mut self, why: Error, _: &Stream) -> Error {
        HostEngine::decline_and_fail(self, why)
    }

    fn fail_halfway(&mut self, why: Error, _: &Stream) -> Error {
        HostEngine::decline_and_fail(self, why)
    }

    fn begin_rehearsal(&mut self, _: Lifts) {
        HostEngine::begin_rehearsal(self);
    }

    fn end_rehearsal(&mut self) -> Rehearsed {
        Rehearsed { algorithm: HostEngine::end_rehearsal(self), ..Rehearsed::default() }
    }

    fn algorithms(&self, collective: StandardCollective) -> Vec<AlgorithmId> {
        HostEngine::algorithms(collective)
    }

    fn check_fit(&self, id: AlgorithmId, shape: &CallShape) -> Result<()> {
        HostEngine::check_fit(self, id, shape)
    }

    fn check_plan(&self, plan: &CheckedPlan, arguments: &Arguments) -> Result<()> {
        HostEngine::check_plan(self, plan, arguments)
    }

    fn check_native(&self, kernel: &NativeKernel, _: &Arguments) -> Result<()> {
        Err(no_kernels(kernel, self.layout.rank))
    }

    #[inline]
    unsafe fn run(&mut self, call: &StandardCall, _: &Stream) -> Result<()> {
        // SAFETY: the caller promised that the call's places are readable or writable for its lengths until it
        // returns on every rank.
        unsafe { HostEngine::run(self, call) }
    }

    unsafe fn run_plan(
        &mut self,
        plan: &CheckedPlan,
        arguments: &Arguments,
        _: &Stream,
    ) -> Result<()> {
        // SAFETY: the caller promised that the arguments' places are readable or writable for their lengths until the
        // call returns on every rank.
        unsafe { self.run_plan_for(plan, arguments) }
    }

    unsafe fn run_native(
        &mut self,
        kernel: &NativeKernel,
        _: &Arguments,
        _: &Stream,
    ) -> Result<()> {
        HostEngine::ready(self)?;
        Err(HostEngine::decline(self, no_kernels(kernel, self.layout.rank)))
    }

    unsafe fn all_to_all_v(
        &mut self,
        (input, output): (Place, Place),
        (send, receive): (&[usize], &[usize]),
        dtype: DType,
        _: &Stream,
    ) -> Result<()> {
        // SAFETY: the caller promised that input and output are readable and writable for the sums of their splits
        // until the call returns on every rank.
        unsafe { HostEngine::all_to_all_v(self, input, send, output, receive, dtype) }
    }

    unsafe fn all_to_all_splits(
        &mut self,
        (input, output): (Place, Place),
        rows: &SplitRows,
        splits: &SplitsAt,
        _: &Stream,
    ) -> Result<()> {
        // SAFETY: the caller promised that input and output are readable and writable for `rows`, and the arrays of
        // `splits` for a count for each rank.
        unsafe { HostEngine::all_to_all_splits(self, input, output, rows, splits) }
    }

    unsafe fn all_reduce_norm(
        &mut self,
        shape: &NormShape,
        buffers: &NormBuffers,
        input: Place,
        _: &Stream,
    ) -> Result<()> {
        // SAFETY: the caller promised that the buffers and the input are readable or writable for the shape until the
        // call returns on every rank.
        unsafe { HostEngine::all_reduce_norm(self, shape, buffers, input) }
    }

    unsafe fn dispatch(&mut self, call: &ExpertCall, _: &Stream) -> Result<()> {
        HostEngine::ready(self)?;
        // SAFETY: the caller promised that the addresses in the call are as `ExpertsWork` describes them, until the
        // call returns on every rank.
        unsafe { HostEngine::dispatch(self, call) }
    }

    unsafe fn dispatch_exact(&mut self, call: &ExpertCall, _: &Stream) -> Result<ReceivedSizes> {
        HostEngine::ready(self)?;
        // SAFETY: the caller promised that the addresses in the call are as `ExpertsWork` describes them, until the
        // call returns on every rank.
        unsafe { HostEngine::dispatch_exact(self, call) }
    }

    unsafe fn combine(&mut self, call: &ExpertCall, _: &Stream) -> Result<()> {
        HostEngine::ready(self)?;
        // SAFETY: the caller promised that the addresses in the call are as `ExpertsWork` describes them, until the
        // call returns on every rank.
        unsafe { HostEngine::combine(self, call) }
    }

    unsafe fn copy_local(
        &mut self,
        to: *mut u8,
        from: *const u8,
        bytes: usize,
        _: &Stream,
    ) -> Result<()> {
        // SAFETY: the caller promised that the bytes are readable and writable, and that they do not overlap.
        unsafe { from.copy_to_nonoverlapping(to, bytes) };
        Ok(())
    }

    unsafe fn reduce_local(&mut self, work: &LocalReduction<'_>, _: &Stream) -> Result<()> {
        let reduce = self
            .reduce_loop(work.dtype, work.op)
            .ok_or_else(|| work.dtype.only_moved("a reduction between hosts", self.layout.rank))?;
        // SAFETY: the caller promised that the arrays are readable and the result is writable, and that it is one of them or
        // overlaps none.
        unsafe { reduce(work.from, &[work.to], work.count, work.divisor) };
        Ok(())
    }

    fn barrier(&mut self, _: &Stream) -> Result<()> {
        HostEngine::barrier(self)
    }

    fn meet(&mut self, call: &CallDescription) -> Result<()> {
        self.handshake_only(call)
    }

    fn catch_up(&mut self) -> Result<()> {
        HostEngine::ready(self)?;
        HostEngine::catch_up(self)
    }

    fn sleep_soon(&mut self) {
        HostEngine::sleep_soon(self);
    }

    unsafe fn measured_barrier(&mut self, waits: *mut i64, _: &Stream) -> Result<()> {
        // SAFETY: the caller promised that `waits` is readable and writable for a number for each rank.
        unsafe { HostEngine::measured_barrier(self, waits) }
    }

    /// Calls are over when they return.
    fn synchronize(&mut self, _: &Stream) -> Result<()> {
        HostEngine::ready(self)
    }
}

fn no_kernels(kernel: &NativeKernel, rank: u32) -> Error {
    Error::unsupported(format!(
        "the native algorithm {} on rank {rank}: it is a CUDA kernel, and this communicator is in host memory",
        kernel.name
    ))
}
