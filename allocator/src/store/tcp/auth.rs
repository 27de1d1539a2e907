//! The shared secret: both sides prove that they know it without sending it.
//!
//! Each side draws a nonce and shows a keyed hash over both nonces, the server's instance and what
//! the client claims to be. A proof is good for one connection in one direction only. Nothing is
//! encrypted: whoever can read or alter the network's traffic can read or alter the values.

use std::fmt;

use super::wire::Identity;
use crate::{Error, Result};

/// A secret that the ranks of a job share. Only a key derived from it is kept; it is never sent
/// or shown.
#[derive(Clone)]
pub struct Secret([u8; 32]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// The side that a proof is made by, so that a proof cannot be sent back to its maker as the other side's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProverRole {
    Client,
    Server,
}

/// All that both sides know when they prove the secret to each other.
#[derive(Clone, Copy, Debug)]
pub(super) struct Handshake {
    pub(super) instance: [u8; 16],
    pub(super) server_nonce: [u8; 32],
    pub(super) client_nonce: [u8; 32],
    pub(super) identity: Option<Identity>,
}

impl Secret {
    /// A secret from any bytes; use 16 random ones or more. An empty secret is refused with
    /// [`Error::is_invalid_argument`].
    pub fn new(bytes: impl AsRef<[u8]>) -> Result<Self> {
        let bytes = bytes.as_ref();
        if bytes.is_empty() {
            return Err(Error::invalid_argument("an empty store secret protects nothing"));
        }
        Ok(Self(blake3::derive_key("symmpool store 2026 shared secret", bytes)))
    }

    pub(super) fn prove(&self, side: ProverRole, handshake: &Handshake) -> [u8; 32] {
        *self.hash(side, handshake).as_bytes()
    }

    /// Whether `proof` is `side`'s. Compares in constant time.
    pub(super) fn verify(&self, side: ProverRole, handshake: &Handshake, proof: &[u8; 32]) -> bool {
        self.hash(side, handshake) == blake3::Hash::from_bytes(*proof)
    }

    /// Every field has a fixed length, so no two inputs run together.
    fn hash(&self, side: ProverRole, handshake: &Handshake) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(match side {
            ProverRole::Client => b"client",
            ProverRole::Server => b"server",
        });
        hasher.update(&handshake.instance);
        hasher.update(&handshake.server_nonce);
        hasher.update(&handshake.client_nonce);
        match handshake.identity {
            None => hasher.update(&[0; 21]),
            Some(identity) => {
                hasher.update(&[1]).update(&identity.rank.to_le_bytes()).update(&identity.session)
            }
        };
        hasher.finalize()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn handshake() -> Handshake {
        Handshake {
            instance: [1; 16],
            server_nonce: [2; 32],
            client_nonce: [3; 32],
            identity: Some(Identity { rank: 4, session: [5; 16] }),
        }
    }

    #[test]
    fn a_proof_holds_for_its_secret_side_and_handshake_only() {
        let secret = Secret::new("correct").unwrap();
        let proof = secret.prove(ProverRole::Client, &handshake());
        assert!(secret.verify(ProverRole::Client, &handshake(), &proof));
        assert!(!secret.verify(ProverRole::Server, &handshake(), &proof));
        assert!(!Secret::new("wrong").unwrap().verify(ProverRole::Client, &handshake(), &proof));
        let others = [
            Handshake { instance: [0; 16], ..handshake() },
            Handshake { server_nonce: [0; 32], ..handshake() },
            Handshake { client_nonce: [0; 32], ..handshake() },
            Handshake { identity: None, ..handshake() },
            Handshake { identity: Some(Identity { rank: 5, session: [5; 16] }), ..handshake() },
        ];
        for other in &others {
            assert!(!secret.verify(ProverRole::Client, other, &proof));
        }
    }

    #[test]
    fn secrets_are_not_shown_and_not_empty() {
        assert_eq!(format!("{:?}", Secret::new("hunter2").unwrap()), "Secret(..)");
        assert!(Secret::new("").unwrap_err().is_invalid_argument());
    }
}
