//! Why ranks stopped something that all do together, for those that notice only that something went wrong.
//!
//! An outer engine closes its connections when a rank stops, and says no more. So a rank leaves its reason in
//! the store first.

use serde::{Deserialize, Serialize};

use super::message::{self, Message};
use crate::error::ErrorKind;
use crate::{Deadline, Error, Group, Result};

/// Rank that stopped, and why: the error, and what was being done, the innermost first.
#[derive(Debug, Serialize, Deserialize)]
struct Reason(u32, ErrorKind, Vec<String>);

impl Message for Reason {
    const KIND: u16 = 14;
    const NAME: &'static str = "reason";
}

impl Group {
    /// Leaves the reason why this rank takes no further part in `what`, for [`found_reason`](Self::found_reason) on the other
    /// ranks. Where several ranks leave one, the last stays. `what` must be the same on all ranks, and nothing else of the group.
    ///
    /// # Errors
    ///
    /// Those of the store.
    pub fn leave_reason(&self, what: &str, why: &Error, deadline: Deadline) -> Result<()> {
        let rank = self.rank();
        let frame = message::encode(&Reason(rank, why.kind().clone(), why.frames().to_vec()))?;
        self.store().set(&self.reason_key(what), &frame, deadline)?;
        self.store().add(&self.reason_count(what), 1, deadline).map(drop)
    }

    /// Whether a rank has left a reason for `what`. It waits for none: one request to the store; false where that fails.
    pub fn has_reason(&self, what: &str, deadline: Deadline) -> bool {
        self.store().add(&self.reason_count(what), 0, deadline).is_ok_and(|count| count > 0)
    }

    /// The reason that a rank has left for `what`, and that rank. Waits for one until `deadline`; `None` if there is none by
    /// then, or none that can be read.
    pub fn found_reason(&self, what: &str, deadline: Deadline) -> Option<(u32, Error)> {
        let frame = self.store().get(&self.reason_key(what), deadline).ok()?;
        let Reason(rank, kind, frames) = message::decode(self.rank(), &frame).ok()?;
        Some((rank, frames.into_iter().fold(Error::from_kind(kind), Error::context)))
    }

    fn reason_count(&self, what: &str) -> String {
        format!("{}/count", self.reason_key(what))
    }

    fn reason_key(&self, what: &str) -> String {
        format!("{}/stopped/{what}", self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_found_by_all_and_is_the_last_one() {
        let groups = Group::in_process(2).unwrap();
        let soon = || Deadline::after(std::time::Duration::from_millis(20));
        assert!(groups[1].found_reason("a call", soon()).is_none());
        assert!(!groups[1].has_reason("a call", soon()));
        groups[0]
            .leave_reason("a call", &Error::out_of_memory("none left").context("at work"), soon())
            .unwrap();
        let (rank, why) = groups[1].found_reason("a call", soon()).unwrap();
        assert!(rank == 0 && why.is_out_of_memory());
        assert_eq!(why.to_string(), "symmpool: at work: none left");
        groups[1].leave_reason("a call", &Error::invalid_state("later"), soon()).unwrap();
        assert_eq!(groups[0].found_reason("a call", soon()).unwrap().0, 1);
        assert!(groups[0].found_reason("another", soon()).is_none());
        assert!(groups[1].has_reason("a call", soon()) && !groups[1].has_reason("another", soon()));
    }
}
