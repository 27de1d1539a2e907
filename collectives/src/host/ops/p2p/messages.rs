//! How far the messages to and from a peer have come, and whose turn it is to send or receive.

use std::sync::Mutex;
use std::sync::atomic::AtomicU64;

/// Messages to and from one peer.
#[derive(Debug, Default)]
pub(in crate::host) struct PeerMessages {
    pub(in crate::host) sends: Turns,
    pub(in crate::host) receives: Turns,
    /// The last of this rank's messages of which it knows that the peer has declined it.
    pub(in crate::host) known_declined: AtomicU64,
}

/// Messages in one direction. A thread holds the lock while it is in a message.
#[derive(Debug, Default)]
pub(in crate::host) struct Turns {
    pub(in crate::host) position: Mutex<Position>,
    /// Messages that this rank has declined while a thread was in another one.
    pub(in crate::host) declined: AtomicU64,
}

/// How many packets and messages were sent to a peer, or received from it, so far.
#[derive(Debug, Default)]
pub(in crate::host) struct Position {
    pub(in crate::host) packets: u64,
    pub(in crate::host) messages: u64,
}
