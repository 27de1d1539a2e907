//! The points of rendezvous and commit at which tests can intervene.

/// Points of rendezvous and commit at which a `FaultDriver` can stop, fail or kill its rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)]
#[cfg_attr(not(feature = "testing"), allow(unreachable_pub))]
pub enum Step {
    HandshakePublish,
    HandshakeConnect,
    HandshakeConfirm,
    CommitPublish,
    CommitAgree,
    CommitExport,
    CommitSend,
    CommitReceive,
    CommitMap,
    CommitConfirm,
    CommitFinish,
}

#[cfg(feature = "testing")]
impl Step {
    /// Every step in the order in which a pool goes through them.
    pub const ALL: [Self; 11] = [
        Self::HandshakePublish,
        Self::HandshakeConnect,
        Self::HandshakeConfirm,
        Self::CommitPublish,
        Self::CommitAgree,
        Self::CommitExport,
        Self::CommitSend,
        Self::CommitReceive,
        Self::CommitMap,
        Self::CommitConfirm,
        Self::CommitFinish,
    ];
}
