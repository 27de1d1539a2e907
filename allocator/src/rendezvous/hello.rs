//! How a rank describes itself in the first round of the handshake.

use serde::{Deserialize, Serialize};

use super::identity::HostIdentity;
use crate::driver::{DeviceIdentity, Transport};

/// The description of a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) config_hash: [u8; 32],
    pub(super) config_text: String,
    pub(super) host: HostIdentity,
    pub(super) device: DeviceIdentity,
    pub(super) allow_shared_device: bool,
    pub(super) transport: Transport,
    pub(super) granularity: u64,
    /// Whether this rank's process has no other pool on its device.
    pub(super) first_on_device: bool,
    /// The abstract socket this rank listens on, with [`Transport::UnixSocket`].
    pub(super) listener: Option<String>,
    /// Random; zero with [`Transport::Derived`], where there is no secret, and equal hellos of thousands of
    /// ranks are sent once.
    pub(super) nonce: [u8; 16],
}
