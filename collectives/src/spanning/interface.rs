//! The engine over hosts, as communicators use it.

#![allow(unsafe_code)] // passes on the caller's promises about raw memory

use std::sync::Arc;
use std::time::Duration;

use symmpool_allocator::{Error, Result, Stream};

use super::ranks::Route;
use super::staging::staging_bytes;
use super::state::{SpanningEngine, sms_inside};
use crate::algorithm::{AUTO, AlgorithmId, CallShape, NativeKernel, StandardCollective};
use crate::call::experts::ExpertCall;
use crate::call::rehearsal::{Lifts, Rehearsed};
use crate::call::{Arguments, CallDescription, OpType, StandardCall};
use crate::cuda::MAX_LOCAL_INPUTS;
use crate::engine::{Engine, FailureHandle, LocalReduction};
use crate::host::experts::received_sizes;
use crate::plan::CheckedPlan;
use crate::types::timeout::Timeout;
use crate::{
    CommunicatorMemory, DType, NormBuffers, NormShape, Place, ReceivedSizes, SplitRows, SplitsAt,
};

impl Engine for SpanningEngine {
    fn rank(&self) -> u32 {
        self.ranks.rank
    }

    fn world(&self) -> u32 {
        self.ranks.hosts.world()
    }

    fn timeout(&self) -> &Arc<Timeout> {
        self.inner.timeout()
    }

    fn failure(&self) -> Option<&Error> {
        self.failed.get().or_else(|| self.inner.failure())
    }

    fn failure_handle(&self) -> Arc<dyn FailureHandle> {
        Arc::clone(&self.failed) as _
    }

    fn ready(&mut self) -> Result<()> {
        SpanningEngine::ready(self)
    }

    fn memory(&self, total: u64) -> CommunicatorMemory {
        let staging = staging_bytes(self.device.is_some(), self.ranks.hosts.world());
        let inside = self.inner.memory(total - staging);
        CommunicatorMemory { total, staging: inside.staging + staging, ..inside }
    }

    fn fail_after_panic(&mut self) {
        let why = Error::invalid_state("a call panicked");
        self.stop(why, Duration::ZERO);
    }

    /// The other ranks of the host learn of it by their handshake, and those of other hosts by the call's message.
    fn decline(&mut self, why: Error, stream: &Stream) -> Error {
        if self.rehearses {
            return why;
        }
        if let Err(failed) = SpanningEngine::ready(self) {
            return failed;
        }
        if self.device.is_some() {
            return self.fail(why);
        }
        self.inner.decline(why.clone(), stream);
        match self.tell_declined(&why) {
            Ok(()) => why,
            Err(error) => self.fail(error),
        }
    }

    fn decline_and_fail(&mut self, why: Error, _: &Stream) -> Error {
        self.stop(why, Duration::ZERO)
    }

    fn fail_halfway(&mut self, why: Error, _: &Stream) -> Error {
        self.stop(why, Duration::ZERO)
    }

    fn begin_rehearsal(&mut self, _: Lifts) {
        (self.rehearses, self.rehearsed) = (true, self.way_between(self.route()));
    }

    fn end_rehearsal(&mut self) -> Rehearsed {
        self.rehearses = false;
        Rehearsed { algorithm: self.rehearsed.into(), ..Rehearsed::default() }
    }

    fn algorithms(&self, _: StandardCollective) -> Vec<AlgorithmId> {
        Vec::new()
    }

    fn check_fit(&self, _: AlgorithmId, _: &CallShape) -> Result<()> {
        Err(self.not_across("an algorithm of one host"))
    }

    fn check_plan(&self, _: &CheckedPlan, _: &Arguments) -> Result<()> {
        Err(self.not_across("an algorithm of a program"))
    }

    fn check_native(&self, _: &NativeKernel, _: &Arguments) -> Result<()> {
        Err(self.not_across("a kernel of a program"))
    }

    unsafe fn run(&mut self, call: &StandardCall, stream: &Stream) -> Result<()> {
        if self.device.is_some() && call.algorithm != AUTO {
            return Err(self.decline_across(&format!("{} by a named algorithm", call.collective)));
        }
        let given = call.arguments;
        let sums = if Self::divides(given.dtype, given.op) {
            self.ranks.host_count()
        } else {
            self.ranks.world()
        };
        if self.device.is_some() && call.collective.reduces() && sums > MAX_LOCAL_INPUTS {
            return Err(self.decline_across(&format!(
                "{} of {sums} partial sums, of which devices add up {MAX_LOCAL_INPUTS} at most",
                call.collective
            )));
        }
        let sound = self.check(call);
        let description = call.describe();
        let plan = if sound.is_ok() && self.device.is_none() {
            self.by_leaders(call.collective, &given)
        } else {
            None
        };
        if let Some(plan) = plan {
            self.rehearsed = "leaders";
            // SAFETY: the caller promised that the places are there for the call's lengths until it has returned.
            return self.call_behind(sound, |engine, ()| unsafe {
                engine.run_by_leaders(description, &plan, |_| ())
            });
        }
        if call.collective.reduces() {
            let route = if self.divides_unevenly(given.dtype, given.op) {
                Route::Rail
            } else {
                self.reduction_route(given.dtype, given.op)
            };
            self.rehearsed = self.way_between(route);
        }
        let bytes = given.bytes_of(call.collective.parts(self.ranks.hosts.world()));
        self.call((description, bytes), sound, stream, |engine, ()| {
            if given.count == 0 {
                return Ok(());
            }
            if call.collective.reduces() {
                engine.inner.load_local_reduction(given.dtype, given.op)?;
            }
            match call.collective {
                // SAFETY: the caller promised that the places are there for the call's lengths until it has returned.
                StandardCollective::AllReduce => unsafe { engine.all_reduce(&given, stream) },
                // SAFETY: the caller promised that the places are there for the call's lengths until it has returned.
                StandardCollective::ReduceScatter => unsafe {
                    engine.reduce_scatter(&given, stream)
                },
                // SAFETY: the caller promised that the places are there for the call's lengths until it has returned.
                StandardCollective::AllGather => unsafe { engine.all_gather(&given, stream) },
                // SAFETY: the caller promised that the places are there for the call's lengths until it has returned.
                StandardCollective::Broadcast => unsafe { engine.broadcast(&given, stream) },
                // SAFETY: the caller promised that the places are there for the call's lengths until it has returned.
                StandardCollective::AllToAll => unsafe { engine.all_to_all(&given, stream) },
            }
        })
    }

    unsafe fn run_plan(&mut self, _: &CheckedPlan, _: &Arguments, _: &Stream) -> Result<()> {
        Err(self.decline_across("an algorithm of a program"))
    }

    unsafe fn run_native(&mut self, _: &NativeKernel, _: &Arguments, _: &Stream) -> Result<()> {
        Err(self.decline_across("a kernel of a program"))
    }

    unsafe fn all_to_all_v(
        &mut self,
        places: (Place, Place),
        splits: (&[usize], &[usize]),
        dtype: DType,
        stream: &Stream,
    ) -> Result<()> {
        let call = CallDescription::new(OpType::AllToAllV).elements(dtype, 0);
        let sound = self.check_parts(places, splits, dtype);
        if self.device.is_some() {
            // SAFETY: the caller promised that the places are there for the sums of the splits until the stream is past this.
            return self.call((call, u64::MAX), sound, stream, |engine, parts| unsafe {
                engine.exchange_directly(places, &parts, stream)
            });
        }
        // SAFETY: the caller promised that the places are there for the sums of the splits until this has returned.
        self.call((call, 0), sound, stream, |engine, parts| unsafe {
            engine.exchange_parts(call, places, &parts, dtype)
        })
    }

    unsafe fn all_to_all_splits(
        &mut self,
        places: (Place, Place),
        rows: &SplitRows,
        splits: &SplitsAt,
        stream: &Stream,
    ) -> Result<()> {
        if self.device.is_some() {
            return Err(self.decline_across("an all-to-all with splits on the device"));
        }
        let call = CallDescription::new(OpType::AllToAllV).elements(rows.dtype, rows.row);
        // SAFETY: the caller promised that the splits are readable for a count for each rank.
        let sound = unsafe { self.check_rows(places, rows, splits) };
        let mut arrived = 0;
        self.call((call, 0), sound, stream, |engine, (send, size)| {
            // SAFETY: the caller promised that the places are there for `rows`, and the arrays of splits for a count for
            // each rank.
            arrived = unsafe { engine.exchange_splits(call, places, (&send, size), rows, splits) }?;
            Ok(())
        })?;
        if arrived <= rows.capacity {
            return Ok(());
        }
        Err(Error::overflow(format!(
            "all_to_all_v on rank {}: {arrived} rows came, and the output has room for {}; rows beyond it were not written",
            self.ranks.rank, rows.capacity
        )))
    }

    unsafe fn all_reduce_norm(
        &mut self,
        _: &NormShape,
        _: &NormBuffers,
        _: Place,
        _: &Stream,
    ) -> Result<()> {
        Err(self.decline_across("an all-reduce with a norm"))
    }

    unsafe fn dispatch(&mut self, call: &ExpertCall, _: &Stream) -> Result<()> {
        self.refuse_experts()?;
        // SAFETY: the caller promised what `dispatch` asks.
        unsafe { self.dispatch_over_hosts(call) }
    }

    unsafe fn dispatch_exact(&mut self, call: &ExpertCall, _: &Stream) -> Result<ReceivedSizes> {
        self.refuse_experts()?;
        // SAFETY: the caller promised what `dispatch` asks.
        unsafe { self.dispatch_over_hosts(call) }?;
        // SAFETY: the caller promised the handle, which the dispatch has written.
        Ok(unsafe { received_sizes(call, self.ranks.hosts.world()) })
    }

    unsafe fn combine(&mut self, call: &ExpertCall, _: &Stream) -> Result<()> {
        self.refuse_experts()?;
        // SAFETY: the caller promised what `combine` asks.
        unsafe { self.combine_over_hosts(call) }
    }

    unsafe fn copy_local(&mut self, _: *mut u8, _: *const u8, _: usize, _: &Stream) -> Result<()> {
        Err(self.not_across("a copy"))
    }

    unsafe fn reduce_local(&mut self, _: &LocalReduction<'_>, _: &Stream) -> Result<()> {
        Err(self.not_across("a reduction of one rank"))
    }

    fn barrier(&mut self, stream: &Stream) -> Result<()> {
        // An agreement is a barrier.
        self.meet_all(CallDescription::new(OpType::Barrier), stream)
    }

    unsafe fn measured_barrier(&mut self, _: *mut i64, _: &Stream) -> Result<()> {
        Err(self.decline_across("a measured barrier"))
    }

    /// In host memory calls are over when they return.
    fn synchronize(&mut self, stream: &Stream) -> Result<()> {
        if self.device.is_some() && self.failed.get().is_none() {
            let ended = self.inner.synchronize(stream).map_err(|why| self.in_group(why));
            // Errors between hosts come first.
            self.look_back()?;
            ended.map_err(|why| self.fail(why))?;
        }
        SpanningEngine::ready(self)
    }

    fn extend_order(&mut self, stream: &Stream) -> Result<()> {
        self.inner.extend_order(stream)
    }

    fn forget_stream(&mut self, stream: &Stream) -> Result<()> {
        self.inner.forget_stream(stream)
    }

    fn set_sm_budget(&mut self, most: Option<u32>) {
        if let Some(device) = &self.device {
            self.inner.set_sm_budget(sms_inside(device, most));
        }
    }
}
