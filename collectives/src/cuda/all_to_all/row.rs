//! A row of the tables of collectives that exchange data: how an algorithm uses the ways that all of them share.

use crate::algorithm::{AUTO, AlgorithmId, DIRECT, LAMPORT, RING, StandardCollective};

/// Where an exchange uses something that not all of its algorithms use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) enum Use {
    Never,
    WhereFaster,
    /// Wherever it can serve the call.
    Always,
}

/// An algorithm of the collectives that exchange data. What it does not use goes into outputs directly. A row is data alone, as
/// one call may use several of these ways: an algorithm says which, and `ops` divides the call among them.
#[derive(Debug)]
pub(in crate::cuda) struct Exchange {
    pub(in crate::cuda) id: AlgorithmId,
    /// One shot of the LL protocol.
    pub(in crate::cuda) ll: Use,
    /// Escaped Lamport inboxes, as any bits may travel.
    pub(in crate::cuda) inboxes: Use,
    /// Copy engines, for equal parts.
    pub(in crate::cuda) copies: Use,
    /// Stages that peers pass on, for broadcasts.
    pub(in crate::cuda) pipeline: Use,
    /// Whether a rank sends to one peer after the other, whatever the sizes.
    pub(in crate::cuda) ring: bool,
}

impl Exchange {
    /// Data goes into outputs directly.
    pub(in crate::cuda) const DIRECTLY: Self = Self {
        id: DIRECT,
        ll: Use::Never,
        inboxes: Use::Never,
        copies: Use::Never,
        pipeline: Use::Never,
        ring: false,
    };

    /// Exchange where no algorithm is requested: whatever is faster.
    pub(super) const FASTEST: Self = Self {
        id: AUTO,
        ll: Use::WhereFaster,
        inboxes: Use::WhereFaster,
        copies: Use::WhereFaster,
        pipeline: Use::WhereFaster,
        ..Self::DIRECTLY
    };

    /// Whether calls may go another way than by the kernel of all-to-alls.
    pub(in crate::cuda) fn has_own_way(&self) -> bool {
        [self.ll, self.copies, self.pipeline].iter().any(|each| *each != Use::Never)
    }

    pub(in crate::cuda) fn name(&self) -> &'static str {
        self.id.label(StandardCollective::AllToAll)
    }

    /// The name of the way in which a kernel moves data, into outputs directly or through inboxes.
    pub(in crate::cuda) fn way(&self, direct: bool) -> &'static str {
        let id = match (self.ring, direct) {
            (true, _) => RING,
            (false, true) => DIRECT,
            (false, false) => LAMPORT,
        };
        id.label(StandardCollective::AllToAll)
    }
}
