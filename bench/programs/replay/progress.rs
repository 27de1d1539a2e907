//! A progress bar on standard error while a replay runs, if that is a terminal.

use std::io::{self, IsTerminal};

use indicatif::{ProgressBar, ProgressDrawTarget};

pub(crate) struct ReplayProgress(ProgressBar);

impl ReplayProgress {
    pub(crate) fn new(events: u64) -> Self {
        let target = if io::stderr().is_terminal() {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        Self(ProgressBar::with_draw_target(Some(events), target))
    }

    /// Sets the number of events that are done. May be called from any thread, as often as wanted: the bar is drawn a
    /// few times a second.
    pub(crate) fn set(&self, done: u64) {
        self.0.set_position(done);
    }

    pub(crate) fn finish(&self) {
        self.0.finish_and_clear();
    }
}
