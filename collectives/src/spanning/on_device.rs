//! Calls over hosts on devices: work on streams, which no host waits for.
//!
//! They take the ways of calls in host memory but for the leaders' one, as copies and reductions of [`SpanningEngine`] are work on
//! the call's stream, too. Hosts compare calls by [records](super::call_records). Whatever goes wrong ends the communicator on
//! all ranks of all hosts: a rank that declines a call cannot tell the others before they put theirs on their streams.

#![allow(unsafe_code)] // hands staging and pinned memory to the engines

use std::thread;
use std::time::Duration;

use symmpool_allocator::{Error, Result, Stream};

use super::call_records::{BegunRecord, CallRecord, CallRecords};
use super::ranks::Route;
use super::staging::RECORD_BYTES;
use super::state::SpanningEngine;
use crate::call::CallDescription;
use crate::outer::Transfer;

/// Time between two looks at a record that is on its way.
const LOOK_AGAIN: Duration = Duration::from_micros(50);

impl SpanningEngine {
    /// Puts a call on the stream, unless this rank has found its own arguments wrong. `bytes` are those of its longest part.
    pub(super) fn call_on_device<T>(
        &mut self,
        (call, bytes): (CallDescription, u64),
        own: Result<T>,
        stream: &Stream,
        run: impl FnOnce(&mut Self, T) -> Result<()>,
    ) -> Result<()> {
        self.put_on_stream((call, bytes), own, stream, |engine, own, record| {
            run(engine, own)?;
            engine.end_record(record, stream)
        })
    }

    /// A barrier of all ranks: no stream is past it before all have come to it.
    pub(super) fn barrier_on_device(
        &mut self,
        call: CallDescription,
        stream: &Stream,
    ) -> Result<()> {
        // Records that are gathered are a meeting of all ranks; then those of a host meet, whose calls may follow.
        self.put_on_stream((call, u64::MAX), Ok(()), stream, |engine, (), record| {
            engine.end_record(record, stream)?;
            engine.inner.barrier(stream).map_err(|why| engine.in_group(why))
        })
    }

    /// Puts a call on the stream whose record `run` ends.
    fn put_on_stream<T>(
        &mut self,
        (call, bytes): (CallDescription, u64),
        own: Result<T>,
        stream: &Stream,
        run: impl FnOnce(&mut Self, T, Option<BegunRecord>) -> Result<()>,
    ) -> Result<()> {
        self.ready()?;
        let own = match own {
            Err(why) if self.rehearses => return Err(why),
            Err(why) => return Err(self.fail(why)),
            Ok(_) if self.rehearses => return Ok(()),
            Ok(own) => own,
        };
        self.refuse_capture(&call, stream)?;
        self.pass_timeout();
        // The last call may have ended on another stream with work that is not of the host's engine, as may this one.
        let made = self
            .inner
            .extend_order(stream)
            .and_then(|()| self.begin_record((call, bytes), stream))
            .and_then(|record| run(self, own, record))
            .and_then(|()| self.inner.extend_order(stream));
        self.clock.times.calls += u64::from(made.is_ok());
        made.map_err(|why| self.fail(why.context(format!("in {call}"))))
    }

    /// Looks for what went wrong since the last call, and ends the communicator on all ranks if it finds anything.
    pub(super) fn look_back(&mut self) -> Result<()> {
        let inside = match self.inner.failure() {
            Some(why) => Err(self.in_group(why.clone())),
            None => Ok(()),
        };
        // A difference between hosts says more than what it led to.
        let found = self.check_records().and_then(|()| self.check_outers()).and(inside);
        found.map_err(|why| self.fail(why))
    }

    /// Waits until the device has done all calls, before their memory is given back. Says whether it has.
    pub(super) fn device_is_done(&self) -> bool {
        let Some(device) = &self.device else { return true };
        let waited = device.synchronize_by(self.group.deadline());
        if let Err(error) = &waited {
            tracing::warn!(%error, "calls of a communicator over hosts have not ended");
        }
        waited.is_ok()
    }

    /// Refuses dispatches to experts and combines on devices, which the hosts' ranks cannot make yet.
    pub(crate) fn refuse_experts(&mut self) -> Result<()> {
        if self.device.is_none() {
            return Ok(());
        }
        Err(self.decline_across("a dispatch to experts, or a combine, on devices"))
    }

    fn refuse_capture(&self, call: &CallDescription, stream: &Stream) -> Result<()> {
        match &self.device {
            Some(device) if device.is_capturing(*stream) => Err(Error::unsupported(format!(
                "{call} on rank {} while a graph is captured: calls over hosts cannot be captured yet",
                self.ranks.rank
            ))),
            _ => Ok(()),
        }
    }
}

impl SpanningEngine {
    /// Counts a call on a device, and begins to gather its record if it has one.
    fn begin_record(
        &mut self,
        (call, bytes): (CallDescription, u64),
        stream: &Stream,
    ) -> Result<Option<BegunRecord>> {
        let Some(records) = &mut self.records else { return Ok(None) };
        let Some(record) = records.count(call, bytes) else { return Ok(None) };
        while self.records.as_ref().is_some_and(CallRecords::is_full) {
            // Transfers that do not end are ended by their deadline.
            self.check_records()?;
            self.check_outers()?;
            thread::sleep(LOOK_AGAIN);
        }
        let Some(records) = &mut self.records else { return Ok(None) };
        let (slot, from) = records.put(&record);
        let (own, all) = (records.own, records.all);
        // SAFETY: the slot's pinned words are written again only when its record has arrived; the staging is this value's own.
        unsafe { self.copy((from, own.at), RECORD_BYTES, stream) }?;
        let gather = Transfer::AllGather { output: all.at, input: own.at, bytes: RECORD_BYTES };
        // SAFETY: staging has room for the records of all ranks, and the stream keeps calls in order.
        let ticket = unsafe { self.begin_on(Route::Flat, gather, stream) }?;
        Ok(Some(BegunRecord { record, slot, ticket }))
    }

    /// Has the stream put the gathered records where the host finds them.
    fn end_record(&mut self, begun: Option<BegunRecord>, stream: &Stream) -> Result<()> {
        let Some(BegunRecord { record, slot, ticket }) = begun else { return Ok(()) };
        self.finish_on(Route::Flat, ticket, stream)?;
        let Some(records) = &self.records else { return Ok(()) };
        let (from, to, bytes) = (records.all.at, records.room(slot), records.world * RECORD_BYTES);
        // SAFETY: the words belong to the slot, whose last record the host has read.
        unsafe { self.copy((from, to), bytes, stream) }?;
        match &mut self.records {
            Some(records) => records.await_arrival((record, slot), stream),
            None => Ok(()),
        }
    }

    /// Compares the records that have arrived. Waits for none.
    fn check_records(&mut self) -> Result<()> {
        while let Some(records) = &mut self.records
            && let Some((record, mut others)) = records.take_arrived()?
        {
            if self.check_outers().is_err() {
                // Where a gathering was aborted, the memory may have records of calls before.
                others.retain(|(_, other)| other.number == record.number);
            }
            if !others.is_empty() {
                return Err(self.different_calls(&record, &others));
            }
        }
        Ok(())
    }

    #[cold]
    fn different_calls(&self, own: &CallRecord, others: &[(u32, CallRecord)]) -> Error {
        let line = |rank: u32, record: &CallRecord| {
            format!(
                "rank {rank} (host {}): call {}, {}",
                self.host_name(rank),
                record.number,
                record.call
            )
        };
        let lines: Vec<String> = others.iter().map(|(rank, record)| line(*rank, record)).collect();
        let is_before = others.iter().all(|(_, other)| other.call == own.call);
        let when = if is_before { " in calls before this one" } else { "" };
        Error::mismatch(format!(
            "ranks of different hosts entered different collectives{when}:\n  {}\n  {}\nResults of calls since the last \
             comparison may be wrong; every rank must make the same calls with the same arguments",
            line(self.ranks.rank, own),
            lines.join("\n  ")
        ))
        .naming(others.iter().map(|(rank, _)| *rank))
    }

    /// Why an outer engine's transfers fail, if they do.
    fn check_outers(&mut self) -> Result<()> {
        let rail = self.outers.rail.is_some().then_some(Route::Rail);
        for route in rail.into_iter().chain([Route::Flat]) {
            if let Some(why) = self.outer(route).failure() {
                return Err(self.between_hosts(route, why));
            }
        }
        Ok(())
    }
}
