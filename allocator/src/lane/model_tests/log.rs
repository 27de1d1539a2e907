//! A backing that records every call, and fails on request.

use crate::driver::{Event, Stream};
use crate::lane::{Backing, Growth};
use crate::{Error, Result};

/// One call, in order.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum LaneCall {
    Grow(Growth),
    Record { stream: u64, event: u64 },
    Wait { stream: u64, event: u64 },
    Release { event: u64 },
}

/// The log. A lane cannot query events through it: it can only order waits (D4).
#[derive(Debug, Default)]
pub(super) struct Log {
    pub(super) calls: Vec<LaneCall>,
    /// How many calls succeed before one fails. Releasing an event cannot fail and does not count.
    pub(super) fail_after: Option<usize>,
    /// The streams that are captured.
    pub(super) captured: Vec<u64>,
}

impl Log {
    fn call(&mut self, call: LaneCall) -> Result<()> {
        match &mut self.fail_after {
            Some(0) => {
                self.fail_after = None;
                return Err(Error::system("the planned call", "planned"));
            }
            Some(left) => *left -= 1,
            None => {}
        }
        self.calls.push(call);
        Ok(())
    }

    /// Which stream an event was recorded on, and when.
    pub(super) fn recorded(&self, wanted: u64) -> (usize, u64) {
        let found = self.calls.iter().enumerate().find_map(|(at, call)| match call {
            LaneCall::Record { stream, event } if *event == wanted => Some((at, *stream)),
            _ => None,
        });
        found.expect("only recorded events are used")
    }

    /// Whether `waiter` waits for an event that was recorded on `on` at `since` or later, itself or
    /// through another stream that waits for it.
    pub(super) fn waits(&self, waiter: u64, on: u64, since: usize) -> bool {
        self.waits_by(self.calls.len(), waiter, on, since)
    }

    fn waits_by(&self, until: usize, waiter: u64, on: u64, since: usize) -> bool {
        self.calls[since..until.max(since)].iter().any(|call| match *call {
            LaneCall::Wait { stream, event } if stream == waiter => {
                let (at, recorded_on) = self.recorded(event);
                if recorded_on == on {
                    at >= since
                } else {
                    self.waits_by(at, recorded_on, on, since)
                }
            }
            _ => false,
        })
    }

    /// No wait is on the waiter's own stream, and no event is used after its release.
    pub(super) fn assert_waits_make_sense(&self) {
        let mut released = Vec::new();
        for call in &self.calls {
            match *call {
                LaneCall::Wait { stream, event } => {
                    assert!(!released.contains(&event), "no use after release");
                    assert_ne!(self.recorded(event).1, stream, "never waits for itself");
                }
                LaneCall::Release { event } => {
                    assert!(!released.contains(&event), "released once");
                    released.push(event);
                }
                LaneCall::Grow(_) | LaneCall::Record { .. } => {}
            }
        }
    }

    /// No stream waits for an event twice. (After a failure one may: what a call had waited for
    /// on a stream that was new is forgotten with the stream.)
    pub(super) fn assert_waits_once(&self) {
        let mut waits: Vec<_> =
            self.calls.iter().filter(|call| matches!(call, LaneCall::Wait { .. })).collect();
        while let Some(wait) = waits.pop() {
            assert!(!waits.contains(&wait), "{wait:?} is repeated");
        }
    }
}

impl Backing for Log {
    fn grow(&mut self, growth: &Growth) -> Result<()> {
        self.call(LaneCall::Grow(growth.clone()))
    }

    fn record(&mut self, stream: Stream) -> Result<Event> {
        assert!(!self.is_capturing(stream), "an event of a capture means nothing outside of it");
        let event = self.calls.len() as u64;
        self.call(LaneCall::Record { stream: stream.raw(), event })?;
        Ok(Event::numbered(event))
    }

    fn wait(&mut self, stream: Stream, event: &Event) -> Result<()> {
        self.call(LaneCall::Wait { stream: stream.raw(), event: event.raw() })
    }

    fn is_capturing(&self, stream: Stream) -> bool {
        self.captured.contains(&stream.raw())
    }

    fn release(&mut self, event: Event) {
        self.calls.push(LaneCall::Release { event: event.raw() });
    }
}
