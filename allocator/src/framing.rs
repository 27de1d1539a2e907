//! The common part of all frames: a header of 16 bytes before a message in postcard's encoding.
//!
//! | bytes | meaning |
//! | --- | --- |
//! | 4 | magic: which protocol |
//! | 2 | version of the protocol, little endian |
//! | 2 | kind of message, or zero |
//! | 4 + 4 | two numbers of the protocol, little endian |
//!
//! The first six bytes stay as they are in every version, so that two builds can always tell that they
//! differ.

use serde::{Deserialize, Serialize};

/// The length of a header in bytes.
pub(crate) const HEADER: usize = 16;

/// The header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FrameHeader {
    pub(crate) magic: [u8; 4],
    pub(crate) version: u16,
    pub(crate) kind: u16,
    pub(crate) numbers: [u32; 2],
}

impl FrameHeader {
    /// Writes the header to the first [`HEADER`] bytes of `frame`.
    pub(crate) fn write(self, frame: &mut [u8]) {
        frame[0..4].copy_from_slice(&self.magic);
        frame[4..6].copy_from_slice(&self.version.to_le_bytes());
        frame[6..8].copy_from_slice(&self.kind.to_le_bytes());
        frame[8..12].copy_from_slice(&self.numbers[0].to_le_bytes());
        frame[12..16].copy_from_slice(&self.numbers[1].to_le_bytes());
    }

    /// Reads a header, whatever its magic and version are.
    pub(crate) fn read(bytes: &[u8; HEADER]) -> Self {
        let [m0, m1, m2, m3, v0, v1, k0, k1, a0, a1, a2, a3, b0, b1, b2, b3] = *bytes;
        Self {
            magic: [m0, m1, m2, m3],
            version: u16::from_le_bytes([v0, v1]),
            kind: u16::from_le_bytes([k0, k1]),
            numbers: [u32::from_le_bytes([a0, a1, a2, a3]), u32::from_le_bytes([b0, b1, b2, b3])],
        }
    }
}

/// Encodes `message` behind room for a header.
pub(crate) fn encode(message: &impl Serialize) -> postcard::Result<Vec<u8>> {
    postcard::to_extend(message, vec![0; HEADER])
}

/// Decodes what must be one message and nothing more; says why it is not.
pub(crate) fn decode<'a, M: Deserialize<'a>>(bytes: &'a [u8]) -> Result<M, String> {
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => Err(format!("has {} bytes too many", rest.len())),
        Err(error) => Err(format!("cannot be read: {error}")),
    }
}
