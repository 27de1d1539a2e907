//! The algorithms of collectives that exchange data: how they use the kernels that all of them share.

use crate::algorithm::{
    AUTO, AlgorithmId, COPY, DIRECT, LAMPORT, LL, PIPELINE, RING, StandardCollective,
};

/// Where an exchange uses something that not all of its algorithms use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) enum Use {
    Never,
    WhereFaster,
    /// Wherever it can serve the call.
    Always,
}

/// An algorithm of the collectives that exchange data: how it uses the kernels that all of them share. What it does not
/// use goes into outputs directly.
#[derive(Debug)]
pub(in crate::cuda) struct Exchange {
    pub(in crate::cuda) id: AlgorithmId,
    pub(in crate::cuda) collectives: &'static [StandardCollective],
    /// One shot of the LL protocol.
    pub(in crate::cuda) ll: Use,
    /// Lamport inboxes.
    pub(in crate::cuda) inboxes: Use,
    /// Copy engines, for equal parts.
    pub(in crate::cuda) copies: Use,
    /// Stages that peers pass on, for broadcasts.
    pub(in crate::cuda) pipeline: Use,
    /// Whether a rank sends to one peer after the other, whatever the sizes.
    pub(in crate::cuda) ring: bool,
}

const GATHERS: &[StandardCollective] =
    &[StandardCollective::AllGather, StandardCollective::Broadcast];
const PARTS: &[StandardCollective] = &[StandardCollective::AllToAll, StandardCollective::AllGather];
const BROADCAST: &[StandardCollective] = &[StandardCollective::Broadcast];
const EXCHANGES: &[StandardCollective] =
    &[StandardCollective::AllToAll, StandardCollective::AllGather, StandardCollective::Broadcast];

const DIRECTLY: Exchange = Exchange {
    id: DIRECT,
    collectives: EXCHANGES,
    ll: Use::Never,
    inboxes: Use::Never,
    copies: Use::Never,
    pipeline: Use::Never,
    ring: false,
};

pub(in crate::cuda) static EXCHANGE: [Exchange; 6] = [
    DIRECTLY,
    Exchange { id: LAMPORT, inboxes: Use::Always, ..DIRECTLY },
    Exchange { id: LL, collectives: GATHERS, ll: Use::Always, ..DIRECTLY },
    Exchange { id: COPY, collectives: PARTS, copies: Use::Always, ..DIRECTLY },
    Exchange { id: RING, ring: true, ..DIRECTLY },
    Exchange { id: PIPELINE, collectives: BROADCAST, pipeline: Use::Always, ..DIRECTLY },
];

/// Exchange where no algorithm is requested: whatever is faster.
static FASTEST: Exchange = Exchange {
    id: AUTO,
    ll: Use::WhereFaster,
    inboxes: Use::WhereFaster,
    copies: Use::WhereFaster,
    pipeline: Use::WhereFaster,
    ..DIRECTLY
};

impl Exchange {
    /// The algorithm of this number.
    pub(in crate::cuda) fn of(id: AlgorithmId) -> &'static Self {
        EXCHANGE.iter().find(|entry| entry.id == id).unwrap_or(&FASTEST)
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
