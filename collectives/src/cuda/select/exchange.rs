//! The algorithms of collectives that exchange data: how they use the kernels that all of them share.

use crate::algorithm::{
    AUTO, COPY, DIRECT, LAMPORT, LL, RING, STAGES, StandardCollective, name_of,
};

/// Where an exchange uses something that not all of its algorithms use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) enum Use {
    Never,
    WhereFaster,
    /// As far as it can serve the call.
    Always,
}

/// An algorithm of the collectives that exchange data: how it uses the kernels that all of them share. What it does not
/// use goes into outputs directly.
#[derive(Debug)]
pub(in crate::cuda) struct Exchange {
    pub(in crate::cuda) code: u8,
    pub(in crate::cuda) collectives: &'static [StandardCollective],
    /// One shot of the LL protocol.
    pub(in crate::cuda) ll: Use,
    /// Lamport inboxes.
    pub(in crate::cuda) inboxes: Use,
    /// Copy engines, for equal parts.
    pub(in crate::cuda) copies: Use,
    /// Stages that peers pass on, for broadcasts.
    pub(in crate::cuda) stages: Use,
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
    code: DIRECT,
    collectives: EXCHANGES,
    ll: Use::Never,
    inboxes: Use::Never,
    copies: Use::Never,
    stages: Use::Never,
    ring: false,
};

pub(in crate::cuda) static EXCHANGE: [Exchange; 6] = [
    DIRECTLY,
    Exchange { code: LAMPORT, inboxes: Use::Always, ..DIRECTLY },
    Exchange { code: LL, collectives: GATHERS, ll: Use::Always, ..DIRECTLY },
    Exchange { code: COPY, collectives: PARTS, copies: Use::Always, ..DIRECTLY },
    Exchange { code: RING, ring: true, ..DIRECTLY },
    Exchange { code: STAGES, collectives: BROADCAST, stages: Use::Always, ..DIRECTLY },
];

/// What is used where no algorithm is requested: whatever is faster.
static FASTEST: Exchange = Exchange {
    code: AUTO,
    ll: Use::WhereFaster,
    inboxes: Use::WhereFaster,
    copies: Use::WhereFaster,
    stages: Use::WhereFaster,
    ..DIRECTLY
};

impl Exchange {
    /// The algorithm of this number.
    pub(in crate::cuda) fn of(code: u8) -> &'static Self {
        EXCHANGE.iter().find(|entry| entry.code == code).unwrap_or(&FASTEST)
    }

    pub(in crate::cuda) fn name(&self) -> &'static str {
        name_of(StandardCollective::AllToAll, self.code).unwrap_or("?")
    }

    /// The name of the way in which a kernel moves data, into outputs directly or through inboxes.
    pub(in crate::cuda) fn way(&self, direct: bool) -> &'static str {
        let code = match (self.ring, direct) {
            (true, _) => RING,
            (false, true) => DIRECT,
            (false, false) => LAMPORT,
        };
        name_of(StandardCollective::AllToAll, code).unwrap_or("?")
    }
}
