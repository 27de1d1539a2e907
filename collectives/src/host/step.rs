//! The points of calls in host memory at which tests can intervene, as those of commits are the allocator's `Step`.

/// Points that a rank passes in calls of all ranks (a handshake, then phases), in programs, and in messages and signals
/// between two ranks. Each is passed before what it is named for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)]
#[cfg_attr(not(feature = "testing"), allow(unreachable_pub))]
pub enum CallStep {
    HandshakeBegin,
    /// Once for each peer.
    HandshakePublish,
    HandshakeAwait,
    HandshakeCompare,
    PhaseBegin,
    /// Once for each peer.
    PhaseSignal,
    PhaseAwait,
    PhaseEnd,
    ProgramSignal,
    ProgramAwait,
    ChannelSignal,
    ChannelAwait,
    MessageBegin,
    /// Once for each packet, which is written.
    MessageSend,
    MessageAwait,
    /// Once for each packet, which is read.
    MessageTake,
    MessageEnd,
}

/// Passes a point.
#[inline]
pub(in crate::host) fn at_step(step: CallStep) {
    #[cfg(feature = "testing")]
    watch::pass(step);
    #[cfg(not(feature = "testing"))]
    let _ = step;
}

/// Tests that watch the points that this process passes.
#[cfg(feature = "testing")]
pub(crate) mod watch {
    use std::sync::OnceLock;

    use super::CallStep;

    type Watcher = Box<dyn Fn(CallStep) + Send + Sync>;

    static WATCHER: OnceLock<Watcher> = OnceLock::new();

    impl CallStep {
        /// Every point.
        pub const ALL: [Self; 17] = [
            Self::HandshakeBegin,
            Self::HandshakePublish,
            Self::HandshakeAwait,
            Self::HandshakeCompare,
            Self::PhaseBegin,
            Self::PhaseSignal,
            Self::PhaseAwait,
            Self::PhaseEnd,
            Self::ProgramSignal,
            Self::ProgramAwait,
            Self::ChannelSignal,
            Self::ChannelAwait,
            Self::MessageBegin,
            Self::MessageSend,
            Self::MessageAwait,
            Self::MessageTake,
            Self::MessageEnd,
        ];
    }

    /// Calls `watcher` at each point that calls in host memory of this process pass from now on, on the thread that passes
    /// it. Returns whether there was none before, as there is one at most.
    pub fn watch_call_steps(watcher: impl Fn(CallStep) + Send + Sync + 'static) -> bool {
        WATCHER.set(Box::new(watcher)).is_ok()
    }

    pub(super) fn pass(step: CallStep) {
        if let Some(watcher) = WATCHER.get() {
            watcher(step);
        }
    }
}
