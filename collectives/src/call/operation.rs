//! Operations by number and name: collectives, and point-to-point messages.

use crate::algorithm::StandardCollective;

/// An operation. The numbers are part of call descriptions and fault records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum OpType {
    /// A call whose arguments its own rank refused. It takes part in the handshake only to notify the others.
    Declined = 1,
    Barrier = 2,
    AllReduce = 3,
    ReduceScatter = 4,
    AllGather = 5,
    Broadcast = 6,
    AllToAllV = 7,
    AllToAll = 8,
    /// Point-to-point operations are outside of the order of collectives.
    Send = 9,
    Recv = 10,
    /// A registered algorithm for a collective of the program's own.
    Custom = 11,
    /// An all-reduce of rows, and what layers do next.
    AllReduceNorm = 12,
    /// Tokens go to the ranks of their experts, and come back.
    ExpertDispatch = 13,
    ExpertCombine = 14,
    /// A matrix product that hides its communication.
    FusedMatmul = 15,
    /// Ranks make a buffer for experts, whose memory they allocate behind it.
    ExpertBuffer = 16,
}

impl OpType {
    const ALL: [Self; 16] = [
        Self::Declined,
        Self::Barrier,
        Self::AllReduce,
        Self::ReduceScatter,
        Self::AllGather,
        Self::Broadcast,
        Self::AllToAllV,
        Self::AllToAll,
        Self::Send,
        Self::Recv,
        Self::Custom,
        Self::AllReduceNorm,
        Self::ExpertDispatch,
        Self::ExpertCombine,
        Self::FusedMatmul,
        Self::ExpertBuffer,
    ];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Declined => "a call that the rank itself declined",
            Self::Barrier => "barrier",
            Self::AllReduce => "all_reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::Broadcast => "broadcast",
            Self::AllToAllV => "all_to_all_v",
            Self::AllToAll => "all_to_all",
            Self::Send => "send",
            Self::Recv => "recv",
            Self::Custom => "custom collective",
            Self::AllReduceNorm => "all_reduce_norm",
            Self::ExpertDispatch => "dispatch to experts",
            Self::ExpertCombine => "combine from experts",
            Self::FusedMatmul => "fused matmul",
            Self::ExpertBuffer => "making of a buffer for experts",
        }
    }

    /// A call of a collective with equal parts.
    pub(crate) const fn of(collective: StandardCollective) -> Self {
        match collective {
            StandardCollective::AllReduce => Self::AllReduce,
            StandardCollective::ReduceScatter => Self::ReduceScatter,
            StandardCollective::AllGather => Self::AllGather,
            StandardCollective::Broadcast => Self::Broadcast,
            StandardCollective::AllToAll => Self::AllToAll,
        }
    }

    /// The collective, if it is one of those that have several algorithms.
    pub(crate) fn standard(self) -> Option<StandardCollective> {
        match self {
            Self::AllToAllV => Some(StandardCollective::AllToAll),
            other => StandardCollective::named(other.name()),
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|operation| *operation as u8 == code)
    }
}
