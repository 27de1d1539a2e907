//! Calls that this rank cannot make, or cannot finish: the other ranks get an error too, and no later call of this rank stands
//! for the one that it has not made.
//!
//! Every call of all ranks goes through [`CudaEngine::call`], the one place where its error is reported. A call that has put
//! nothing on the device counts as declined: a handshake says so in its place, and if all ranks decline alike, the
//! communicator stays usable. A call that fails behind its first handshake leaves peers in the middle of it. The handshake
//! that says so comes next, and the communicator is closed.
//!
//! The handshake is never captured: a replay would report a call that nobody makes. Nor can it run at once, as graphs that
//! are launched later do not wait for it. So a capture in which a call is declined ends in an error, and the handshake comes
//! before what this rank does next: a call, a look for errors, or the end of the communicator.

use std::time::Duration;

use symmpool_allocator::{Error, Result, Stream};

use super::super::params::CallParams;
use super::{CudaEngine, cuda};
use crate::host::call::{Call, Operation};

/// How often the host looks whether a stream is idle.
const POLL: Duration = Duration::from_micros(100);

/// How far the call under way has come, and calls that are still to be reported.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// How many kernels were launched that open with a handshake.
    handshakes: u32,
    /// Whether the other ranks were notified that this one does not make the call.
    reported: bool,
    /// Calls that were declined during a capture, and are reported before the next call.
    late: u32,
    /// A stream for handshakes that the caller's stream cannot have, made when one is first needed.
    stream: Option<Stream>,
}

impl Progress {
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
        if self.progress.late > 0
            && let Err(why) = self.report_late(stream)
        {
            return Err(self.decline(why, stream));
        }
        (self.progress.handshakes, self.progress.reported) = (0, false);
        make(self).map_err(|why| self.end_in_error(why, stream))
    }

    /// The parameters of the next launch of the call that opens with a handshake. Ranks compare its number, so that no piece
    /// of a call is taken for another one.
    #[inline]
    pub(super) fn numbered(&self, params: &CallParams) -> CallParams {
        let description = Call::from_words(params.description).piece(self.progress.handshakes);
        CallParams { description: *description.words(), ..*params }
    }

    /// To be called when that kernel was put on a stream.
    #[inline]
    pub(super) fn note_handshake(&mut self) {
        self.progress.handshakes += 1;
    }

    /// Reports a call that ended in an error, unless that was done. Returns the error.
    #[cold]
    fn end_in_error(&mut self, why: Error, stream: Stream) -> Error {
        if self.progress.reported || self.ready().is_err() {
            return why;
        }
        let has_begun = self.progress.handshakes > 0;
        let why = self.decline(why, stream);
        if has_begun {
            self.close_halfway(&why);
        }
        why
    }

    /// Makes this rank's next call one that says that it was declined, so that the other ranks get an error
    /// too. Returns why it was declined, or why the communicator is closed, if it is.
    #[cold]
    pub(crate) fn decline(&mut self, why: Error, stream: Stream) -> Error {
        self.progress.reported = true;
        if let Err(closed) = self.ready() {
            return closed;
        }
        if let Err(error) = self.report(stream) {
            tracing::warn!(%error, %why, "the other ranks cannot be notified of a call that was declined");
            // A later call must not stand for this one.
            self.close_halfway(&why);
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

    fn close_halfway(&mut self, why: &Error) {
        let rank = self.rank();
        self.close(&why.clone().context(format!(
            "rank {rank}: a call failed halfway, so this communicator is closed; make a new one"
        )));
    }

    /// Puts the handshake of a declined call on the stream, or on another one where that is none of the device. While the
    /// stream or that of the last call is captured, that is left for later.
    fn report(&mut self, stream: Stream) -> Result<()> {
        if self.is_capturing(stream) {
            // Asking whether a captured stream is idle ends its capture in an error.
            let asked = self.is_idle(stream);
            tracing::debug!(?asked, "a call was declined during a capture, which cannot go on");
        } else if self.declined_on(stream).is_ok() {
            return Ok(());
        } else if self.last_is_free() {
            let own = self.stream_of_reports()?;
            return self.declined_on(own);
        }
        self.progress.late += 1;
        Ok(())
    }

    /// Whether a call may come behind the last one, whose stream is not captured.
    fn last_is_free(&mut self) -> bool {
        self.stream_of_reports().is_ok_and(|own| self.switch_to(own).is_ok())
    }

    fn declined_on(&mut self, stream: Stream) -> Result<()> {
        self.progress.handshakes = 0;
        self.handshake_only(Call::new(Operation::Declined), stream)
    }

    /// Reports calls that were declined during a capture, once it has ended. A graph that is captured next may be launched at
    /// once, so the other ranks' handshakes are waited for then.
    ///
    /// # Errors
    ///
    /// Those of a call; `is_invalid_state` while the capture goes on.
    #[cold]
    pub(super) fn report_late(&mut self, stream: Stream) -> Result<()> {
        self.ready()?;
        let is_captured = self.is_capturing(stream);
        let on = if is_captured { self.stream_of_reports()? } else { stream };
        if self.switch_to(on).is_err() {
            return Err(Error::invalid_state(format!(
                "rank {}: a call was declined during an earlier capture, which the other ranks do not know yet, and the stream \
                 of the last call is captured again; call synchronize, or make any call, outside of captures first",
                self.rank()
            )));
        }
        while self.progress.late > 0 {
            let reported = self.declined_on(on);
            reported.inspect_err(|why| self.close_halfway(why))?;
            self.progress.late -= 1;
        }
        if is_captured {
            while !self.is_idle(on)? {
                std::thread::sleep(POLL);
            }
            self.ready()?;
        }
        Ok(())
    }

    /// The same at the end of the communicator, as far as it can be done.
    pub(super) fn report_at_the_end(&mut self) {
        if self.has_late_reports()
            && let Ok(own) = self.stream_of_reports()
            && let Err(error) = self.report_late(own)
        {
            tracing::debug!(%error, "a call that was declined during a capture is not reported");
        }
    }

    /// Whether declined calls are still to be reported.
    pub(super) fn has_late_reports(&self) -> bool {
        self.progress.late > 0
    }

    fn stream_of_reports(&mut self) -> Result<Stream> {
        if let Some(stream) = self.progress.stream {
            return Ok(stream);
        }
        let api = self.api;
        let made = cuda(&self.pool)?.with_context_unordered(|| api.stream())?;
        Ok(*self.progress.stream.insert(made))
    }
}
