//! A bar on standard error while a replay runs, where that is a terminal.

use std::io::{self, IsTerminal};

use indicatif::{ProgressBar, ProgressDrawTarget};

pub(crate) struct Progress(ProgressBar);

impl Progress {
    pub(crate) fn new(events: u64) -> Self {
        let target = if io::stderr().is_terminal() {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        Self(ProgressBar::with_draw_target(Some(events), target))
    }

    /// From any thread; drawn a few times a second however often it is called.
    pub(crate) fn set(&self, done: u64) {
        self.0.set_position(done);
    }

    pub(crate) fn finish(&self) {
        self.0.finish_and_clear();
    }
}
