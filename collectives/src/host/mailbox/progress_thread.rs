//! The thread that moves on messages while nobody waits for one.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use super::Shared;
use super::state::MailboxState;

/// How long messages are left to whoever began them, and how often the thread looks at them from then on.
const EVERY: Duration = Duration::from_millis(2);
/// How long a thread without messages stays.
const STAY: Duration = Duration::from_secs(1);
/// Rounds of the thread from one poll of the sockets, which show peers that have ended, to the next.
const SOCKETS_EVERY: u32 = 16;
/// Polls in a row that find no part of a large message, after which the thread sleeps.
const TRIES: u32 = 200;

impl Shared {
    /// Has a thread look after the messages that are open.
    pub(super) fn ensure_progress(self: &Arc<Self>, state: &mut MailboxState) {
        if state.has_thread {
            self.begun.notify_one();
            return;
        }
        let shared = Arc::downgrade(self);
        let made =
            std::thread::Builder::new().name("symmpool p2p".into()).spawn(move || run(&shared));
        match made {
            Ok(_) => state.has_thread = true,
            // Calls alone make progress.
            Err(error) => tracing::warn!(rank = self.rank, %error, "no thread could be made"),
        }
    }

    /// Moves messages on for a while. Returns false if the thread is to end.
    fn progress_once(&self, round: u32) -> bool {
        let Ok(mut state) = self.lock() else { return false };
        while state.ended.is_none() && !state.is_busy() {
            let waited = self.begun.wait_timeout(state, STAY);
            let (woken, outcome) = waited.unwrap_or_else(PoisonError::into_inner);
            state = woken;
            if outcome.timed_out() && !state.is_busy() {
                state.has_thread = false;
                return false;
            }
        }
        if state.ended.is_some() {
            state.has_thread = false;
            return false;
        }
        drop(state);
        std::thread::sleep(EVERY);
        let mut tries = 0;
        // A thread that waits makes progress on everything itself.
        while tries < TRIES && self.waiting.load(Ordering::Relaxed) == 0 {
            let Ok(mut state) = self.lock() else { return false };
            if tries == 0 && round.is_multiple_of(SOCKETS_EVERY) {
                state.look_at_sockets();
            } else if tries == 0 {
                state.accept();
            }
            let has_moved = state.advance();
            if !has_moved && !state.is_passing() {
                break;
            }
            drop(state);
            tries = if has_moved { 1 } else { tries + 1 };
            std::thread::yield_now();
        }
        true
    }
}

fn run(shared: &Weak<Shared>) {
    for round in 0_u32.. {
        let Some(shared) = shared.upgrade() else { return };
        if !shared.progress_once(round % (1 << 20)) {
            return;
        }
    }
}
