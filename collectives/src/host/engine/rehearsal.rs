//! Rehearsals of calls: a call goes through its code up to its handshake, and says which algorithm it would run.

use super::HostEngine;
use crate::algorithm::{StandardCollective, name_of};

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
    pub(crate) fn rehearses(&mut self, collective: StandardCollective, code: u8) -> bool {
        self.rehearses_by(|| name_of(collective, code).unwrap_or("?"))
    }

    /// The same of an algorithm of that name.
    #[inline]
    pub(crate) fn rehearses_by<'a>(&mut self, name: impl FnOnce() -> &'a str) -> bool {
        let Some(rehearsed) = &mut self.rehearsed else { return false };
        name().clone_into(rehearsed);
        true
    }
}
