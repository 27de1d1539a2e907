//! How ranks come to know each other and to reach each other's memory.
//!
//! | part | owns |
//! | --- | --- |
//! | [`identity`] | which process on which machine a rank is |
//! | [`message`] | the frame and checks of everything ranks tell each other |
//! | [`status`] | one error out of the failures of several ranks |
//! | [`handshake`](mod@handshake) | the two rounds through the store by which a pool's ranks meet |
//! | [`hello`] | what a rank says about itself |
//! | [`checks`] | what has to be equal, or different, on all ranks |
//! | [`peers`] | what the handshake found out |
//! | [`agreement`] | what ranks propose to commit, and what follows |
//! | [`search`] | the first event at which ranks differ |
//! | [`sockets`] | Unix sockets between ranks of one machine: gathers, and file descriptors that travel |

pub(crate) mod agreement;
mod checks;
pub(crate) mod handshake;
mod hello;
pub(crate) mod identity;
pub(crate) mod message;
pub(crate) mod peers;
pub(crate) mod search;
pub(crate) mod sockets;
pub(crate) mod status;
#[cfg(test)]
pub(crate) mod testing;

use crate::{Error, Result};

/// Bytes nobody can guess.
pub(crate) fn random() -> Result<[u8; 16]> {
    let mut bytes = [0; 16];
    // Requests of up to 256 bytes are answered whole.
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| Error::system("asking the kernel for random bytes", error))?;
    Ok(bytes)
}
