//! Calls that this rank cannot make, or cannot finish: the other ranks get an error too, and no later call of this rank stands
//! for the one that it has not made.
//!
//! Every call of all ranks goes through [`CudaEngine::call`], the one place where its error is reported. A call that has put
//! nothing on the device counts as declined: a handshake says so in its place, and if all ranks decline alike, the
//! communicator stays usable. A call that fails behind its first handshake leaves peers in the middle of it, and fails the
//! communicator. Then this rank departs: it writes so into the control blocks of the others, behind the calls that it has made
//! and not behind what its streams wait for. All waits for it end by that, in kernels and of streams.
//!
//! The handshake is never captured: a replay would report a call that nobody makes. Nor can it run at once, as graphs that
//! are launched later do not wait for it. So a capture in which a call is declined ends in an error, and the handshake comes
//! before what this rank does next: a call, a message, a look for errors, or the end of the communicator.
//!
//! Messages between two ranks go the same way: in place of one that is declined its other end gets one that it cannot expect.

#![allow(unsafe_code)] // writes words of control blocks by their addresses

use std::collections::BTreeMap;
use std::time::Duration;

use symmpool_allocator::{Error, Result, Stream};

use super::CudaEngine;
use super::areas::Area;
use crate::call::p2p::Direction;
use crate::call::{CallDescription, OpType};
use crate::cuda::driver::api::cuda;
use crate::cuda::layout::fault::halfway_reason;
use crate::cuda::layout::p2p_layout::end_of_messages;
use crate::cuda::layout::params::{
    CallParams, DEPARTURE_REASON, DEPARTURE_WHEN, FAILED_ON_HOST, LOCAL_FAILED,
};

/// How often the host looks whether a stream is idle.
const POLL: Duration = Duration::from_micros(100);

/// Call or message that a rank declines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in super::super) enum Declined {
    /// A call of all ranks.
    Call,
    /// A message to or from that rank.
    Message(Direction, u32),
}

/// How far the call under way has come, and calls that are still to be reported.
#[derive(Debug, Default)]
pub(super) struct CallProgress {
    /// How many kernels were launched that open with a handshake.
    handshakes: u32,
    /// Whether the other ranks were notified that this one does not make the call.
    reported: bool,
    /// Calls and messages that were declined during a capture, and how often. They are reported before the next one.
    late: BTreeMap<Declined, u64>,
    /// Whether the call under way, or that of an open fused matmul, has marked where earlier calls end.
    is_marked: bool,
    /// Whether this rank departs when the capture of the stream of its last call has ended.
    departs: bool,
    /// A stream for handshakes that the caller's stream cannot have, made when one is first needed.
    stream: Option<Stream>,
}

impl CallProgress {
    /// The stream, which the engine destroys at its end, if there is one.
    pub(super) fn stream(&self) -> Option<Stream> {
        self.stream
    }
}

impl CudaEngine {
    /// Makes a call of all ranks. Its error is reported to them, whatever it is.
    #[inline]
    pub(crate) fn call<T>(
        &mut self,
        stream: Stream,
        make: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Result<T> {
        if self.is_rehearsing() {
            return make(self);
        }
        if self.has_late_reports()
            && let Err(why) = self.report_late(stream)
        {
            return Err(self.decline(why, stream));
        }
        (self.progress.handshakes, self.progress.reported) = (0, false);
        self.progress.is_marked = false;
        make(self).map_err(|why| self.end_in_error(why, stream))
    }

    /// The parameters of the next launch of the call that opens with a handshake. Ranks compare its number, so that no piece
    /// of a call is taken for another one.
    #[inline]
    pub(super) fn numbered(&self, params: &CallParams) -> CallParams {
        let description = CallDescription::from_words(params.description)
            .piece(self.progress.handshakes)
            .in_large_area(self.comm.area != 0);
        CallParams { description: *description.words(), ..*params }
    }

    /// Counts a kernel that opens with a handshake. You must call this when it was put on a stream.
    #[inline]
    pub(super) fn note_handshake(&mut self) {
        self.count_large_call();
        self.progress.handshakes += 1;
    }

    /// Reports a call that ended in an error, unless that was done. Returns the error.
    #[cold]
    fn end_in_error(&mut self, why: Error, stream: Stream) -> Error {
        if self.progress.reported || self.ready().is_err() {
            return why;
        }
        if self.progress.handshakes == 0 {
            return self.decline(why, stream);
        }
        self.progress.reported = true;
        self.end_capture(stream);
        self.fail_mid_call(&why);
        why
    }

    /// Makes this rank's next call one that says that it was declined, so that the other ranks get an error
    /// too. Returns why it was declined, or why the communicator has failed, if it has.
    #[cold]
    pub(crate) fn decline(&mut self, why: Error, stream: Stream) -> Error {
        if self.is_rehearsing() {
            return why;
        }
        self.progress.reported = true;
        if let Err(failed) = self.ready() {
            return failed;
        }
        self.report_or_fail(Declined::Call, why, stream)
    }

    /// Puts a message on the stream with `put`, which fails where it has put none, or fails the communicator. Its error is
    /// reported to the other end.
    pub(in super::super) fn message(
        &mut self,
        (direction, peer): (Direction, u32),
        stream: Stream,
        put: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<()> {
        let reported = if self.has_late_reports() { self.report_late(stream) } else { Ok(()) };
        let done = reported.and_then(|()| put(self));
        done.map_err(|why| self.decline_message(why, direction, peer, stream))
    }

    /// Declines a message. You must call this in place of a message that this rank cannot make: its other end fails too.
    /// Returns what to report.
    #[cold]
    pub(crate) fn decline_message(
        &mut self,
        why: Error,
        direction: Direction,
        peer: u32,
        stream: Stream,
    ) -> Error {
        if let Err(failed) = self.ready() {
            return failed;
        }
        self.report_or_fail(Declined::Message(direction, peer), why, stream)
    }

    /// Fails the communicator, and notifies the other ranks. You must call this where work that belongs to a call of all ranks
    /// failed behind its handshake. Returns what to report.
    #[cold]
    pub(crate) fn fail_halfway(&mut self, why: Error, stream: Stream) -> Error {
        if let Err(failed) = self.ready() {
            return failed;
        }
        self.end_capture(stream);
        self.fail_mid_call(&why);
        why
    }

    fn report_or_fail(&mut self, what: Declined, why: Error, stream: Stream) -> Error {
        if let Err(error) = self.report(what, stream) {
            tracing::warn!(%error, %why, ?what, "the other ranks cannot be notified of what was declined");
            // A later call must not stand for this one.
            self.fail_mid_call(&why);
        }
        why
    }

    /// [`Self::decline`] where there is no call, and no stream: on a stream of the engine's.
    #[cold]
    pub(in super::super) fn decline_outside_calls(&mut self, why: Error) -> Error {
        match self.stream_of_reports() {
            Ok(stream) => self.decline(why, stream),
            Err(_) => why,
        }
    }

    fn fail_mid_call(&mut self, why: &Error) {
        let rank = self.rank();
        self.fail(&why.clone().context(format!(
            "rank {rank}: a call failed halfway, so this communicator has failed; make a new one"
        )));
    }

    /// Fails the communicator: all later calls fail for the same reason, and this rank departs.
    pub(crate) fn fail(&mut self, why: &Error) {
        if self.failure().is_none() {
            self.failure.set(why);
            self.depart_or_later();
        }
    }

    /// Fails like [`Self::fail`] where the host knows better than the device, which may have recorded meanwhile that
    /// another rank departed.
    pub(crate) fn fail_because(&mut self, why: &Error) {
        self.failure.set(why);
        self.depart_or_later();
    }

    fn depart_or_later(&mut self) {
        // Behind a call on a captured stream nothing can come yet.
        self.progress.departs = self.order_is_captured();
        if !self.progress.departs
            && let Err(error) = self.depart()
        {
            tracing::warn!(%error, "the other ranks cannot be notified that this one failed, and wait for their timeouts");
        }
    }

    /// Marks where this rank's earlier calls end on the stream. You must call this in calls whose own work on the stream may wait
    /// for what fails on the host: this rank departs behind the mark, and not behind that.
    pub(in super::super) fn mark_earlier_calls(&mut self, stream: Stream) -> Result<()> {
        if self.is_capturing(stream) {
            return Ok(());
        }
        self.events.mark(self.api, cuda(self.pool.driver())?, stream)?;
        self.progress.is_marked = true;
        Ok(())
    }

    /// Writes into the control blocks of the other ranks that this one makes no further call, behind its last one.
    fn depart(&mut self) -> Result<()> {
        let (rank, world, api) = (self.rank(), self.world(), self.api);
        let own = self.stream_of_reports()?;
        if self.progress.is_marked {
            self.events.wait_for_mark(api, cuda(self.pool.driver())?, own)?;
        } else {
            self.switch_to(own)?;
        }
        let at = self.comm.control.wrapping_add(self.control.departure_of(world, rank));
        let layout = self.pool.layout();
        let peers = (0..world).filter(|peer| *peer != rank).map(|peer| layout.address(peer, at));
        let words = [(DEPARTURE_REASON, halfway_reason(rank)), (DEPARTURE_WHEN, 1)];
        let theirs = peers.flat_map(|at| words.map(|(offset, word)| (at + offset, word)));
        // Kernels of this rank do not wait for what does not come either.
        let mine = (layout.address(rank, self.comm.control + LOCAL_FAILED), FAILED_ON_HOST);
        cuda(self.pool.driver())?.with_context_unordered(|| {
            theirs.chain([mine]).try_for_each(|(at, word)| {
                // SAFETY: words of control blocks, which stay mapped until the engine has waited for the device. Peers' words
                // are written by this rank alone, and its own by kernels that write what says the same.
                unsafe { api.fill(at, word, 1, own) }
            })
        })
    }

    /// Puts what stands for a declined call on the stream, or on another one where that is none of the device. While the
    /// stream or that of the last call is captured, that is left for later.
    ///
    /// # Errors
    ///
    /// The errors of the driver. Then the other ranks are not notified, and nothing is left for later.
    fn report(&mut self, what: Declined, stream: Stream) -> Result<()> {
        if self.end_capture(stream) {
        } else if self.declined_on(what, stream).is_ok() {
            return Ok(());
        } else if !self.is_held_by_capture(what) {
            let own = self.stream_of_reports()?;
            return self.declined_on(what, own);
        }
        *self.progress.late.entry(what).or_default() += 1;
        Ok(())
    }

    /// Ends the capture of a stream in an error. Returns whether it is captured.
    fn end_capture(&self, stream: Stream) -> bool {
        let is_captured = self.is_capturing(stream);
        if is_captured {
            // Asking whether a captured stream is idle does that.
            let asked = self.is_idle(stream);
            tracing::debug!(?asked, "a call failed during a capture, which cannot go on");
        }
        is_captured
    }

    /// Whether the last call, or message, is on a stream that is captured, so that nothing can come behind it yet.
    fn is_held_by_capture(&self, what: Declined) -> bool {
        match what {
            Declined::Call => self.order_is_captured(),
            Declined::Message(direction, peer) => {
                self.channel_is_captured(end_of_messages(direction, peer))
            }
        }
    }

    /// Whether something may come behind the last call, or message, on a stream, which waits for it.
    fn may_follow(&mut self, what: Declined, on: Stream) -> bool {
        let switched = match what {
            Declined::Call => self.switch_to(on),
            Declined::Message(direction, peer) => {
                self.switch_channel_to(end_of_messages(direction, peer), on)
            }
        };
        switched.is_ok()
    }

    fn declined_on(&mut self, what: Declined, stream: Stream) -> Result<()> {
        match what {
            Declined::Call => {
                self.progress.handshakes = 0;
                // Ranks may decline a call alike, whether or not they know yet how large it is.
                let area = self.area();
                self.use_area(Area::Small);
                let declined = self.handshake_only(CallDescription::new(OpType::Declined), stream);
                // It may stand in front of a call that is to come.
                self.use_area(area);
                declined
            }
            Declined::Message(direction, peer) => self.put_declined(direction, peer, stream),
        }
    }

    /// Reports calls and messages that were declined during a capture, once it has ended. A graph that is captured next may
    /// be launched at once, so the other ranks are waited for then.
    ///
    /// # Errors
    ///
    /// The errors of a call; `is_invalid_state` while the capture goes on.
    #[cold]
    pub(super) fn report_late(&mut self, stream: Stream) -> Result<()> {
        if let Err(failed) = self.ready() {
            self.progress.late.clear();
            if self.progress.departs {
                self.depart_or_later();
            }
            return Err(failed);
        }
        let is_captured = self.is_capturing(stream);
        let on = if is_captured { self.stream_of_reports()? } else { stream };
        let late = self.progress.late.clone();
        if !late.keys().all(|what| self.may_follow(*what, on)) {
            return Err(Error::invalid_state(format!(
                "rank {}: a call was declined during an earlier capture, which the other ranks do not know yet, and the stream \
                 of the last call is captured again; call synchronize, or make any call, outside of captures first",
                self.rank()
            )));
        }
        self.progress.late.clear();
        for (what, times) in late {
            for _ in 0..times {
                self.declined_on(what, on).inspect_err(|why| self.fail_mid_call(why))?;
            }
        }
        if is_captured {
            // The kernels' own timeouts end this loop (rule S5).
            while !self.is_done(on)? {
                std::thread::sleep(POLL);
            }
            self.ready()?;
        }
        Ok(())
    }

    /// Reports at the end of the communicator what was declined during a capture, as far as it can be done.
    pub(super) fn report_at_the_end(&mut self) {
        if self.has_late_reports()
            && let Ok(own) = self.stream_of_reports()
            && let Err(error) = self.report_late(own)
        {
            tracing::debug!(%error, "a call that was declined during a capture is not reported");
        }
    }

    /// Whether declined calls or messages are still to be reported.
    #[inline]
    pub(super) fn has_late_reports(&self) -> bool {
        self.progress.departs || !self.progress.late.is_empty()
    }

    fn stream_of_reports(&mut self) -> Result<Stream> {
        if let Some(stream) = self.progress.stream {
            return Ok(stream);
        }
        let api = self.api;
        let made = cuda(self.pool.driver())?.with_context_unordered(|| api.stream())?;
        Ok(*self.progress.stream.insert(made))
    }
}
