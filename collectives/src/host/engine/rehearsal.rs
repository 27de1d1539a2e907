//! Rehearsals of calls: a call goes through its code up to its handshake, and says which algorithm it would run.

use super::HostEngine;
use crate::algorithm::{AlgorithmId, StandardCollective};

impl HostEngine {
    /// Begins a rehearsal: until its end calls check their arguments and choose an algorithm, and refusals are reported to
    /// nobody. Nothing else may use the engine meanwhile.
    pub(crate) fn begin_rehearsal(&mut self) {
        self.rehearsed = Some(String::new());
    }

    /// Ends a rehearsal. Returns the algorithm of the call.
    pub(crate) fn end_rehearsal(&mut self) -> String {
        self.rehearsed.take().unwrap_or_default()
    }

    #[inline]
    pub(crate) fn is_rehearsing(&self) -> bool {
        self.rehearsed.is_some()
    }

    /// Whether a call ends here, as it is rehearsed. Notes its algorithm then.
    #[inline]
    pub(crate) fn rehearses(&mut self, collective: StandardCollective, id: AlgorithmId) -> bool {
        self.rehearses_by(|| id.label(collective))
    }

    /// Whether a call with an algorithm of that name ends here, as it is rehearsed. Notes the name then.
    #[inline]
    pub(crate) fn rehearses_by<'a>(&mut self, name: impl FnOnce() -> &'a str) -> bool {
        let Some(rehearsed) = &mut self.rehearsed else { return false };
        name().clone_into(rehearsed);
        true
    }
}
