//! The rendezvous: how ranks find each other, check that they fit together, and reach each other's memory.
//!
//! | part | owns |
//! | --- | --- |
//! | [`identity`] | which process on which host a rank is |
//! | [`host_id`] | the host that a process pretends to be on |
//! | [`hosts`] | which ranks of a group share a host |
//! | [`message`] | the frame and checks of every message between ranks |
//! | [`status`] | one error out of the failures of several ranks |
//! | [`handshake`](mod@handshake) | the two rounds through the store by which a pool's ranks meet |
//! | [`hello`] | how a rank describes itself |
//! | [`checks`] | what has to be equal, or different, on all ranks |
//! | [`peers`] | the result of the handshake |
//! | [`agreement`] | what ranks propose to commit, and what follows |
//! | [`reasons`] | why a rank stopped, left in the store for ranks that it has no connection to |
//! | [`search`] | the first event at which ranks differ |
//! | [`pairs`] | connections between two ranks, in which no third one takes part |
//! | [`sockets`] | Unix sockets between ranks of one machine: gathers, and exchanges of file descriptors |

pub(crate) mod agreement;
mod checks;
pub(crate) mod handshake;
mod hello;
mod host_id;
mod hosts;
pub(crate) mod identity;
pub(crate) mod message;
pub(crate) mod pairs;
pub(crate) mod peers;
mod reasons;
pub(crate) mod search;
pub(crate) mod sockets;
pub(crate) mod status;
