//! Frames and messages: what travels between a client and the server.
//!
//! A frame is a [`FrameHeader`] with the magic "symS", a *head* and a *tail*; the header's two numbers are their
//! lengths. The head is a message in postcard's encoding. The tail is the value that belongs to it, as it
//! is: values are neither copied nor interpreted on their way. Both lengths are limited, depending on what
//! the sender may send at that point, and are checked before anything is stored.

use serde::{Deserialize, Serialize};

use crate::error::ErrorKind;
use crate::framing::{self, FrameHeader};
use crate::store::{MAX_GATHERED, MAX_KEY, MAX_VALUE, MAX_WORLD};
use crate::{Error, Result};

pub(super) const MAGIC: [u8; 4] = *b"symS";

/// Changes whenever a frame would be read differently.
pub(super) const VERSION: u16 = 3;

pub(super) const HEADER: usize = framing::HEADER;

/// The longest head and tail that a reader accepts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Caps {
    pub(super) head: usize,
    pub(super) tail: usize,
}

impl Caps {
    /// Caps of anything before a connection is admitted, from either side.
    pub(super) const HANDSHAKE: Self = Self { head: 8 << 10, tail: 0 };
    /// Caps of a request: a key and a few numbers.
    pub(super) const REQUEST: Self = Self { head: MAX_KEY + 64, tail: MAX_VALUE };
    /// Caps of a reply: the lengths and the index of a gather have at most ten bytes a rank each.
    pub(super) const REPLY: Self = Self { head: 20 * MAX_WORLD as usize, tail: MAX_GATHERED };
}

/// Message of a client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum ToServer {
    Hello(ClientHello),
    Request(StoreRequest),
    /// The client no longer waits for its last request, which is answered at once unless the reply has been
    /// sent already.
    Cancel,
}

/// The client's side of the handshake.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct ClientHello {
    pub(super) identity: Option<Identity>,
    pub(super) nonce: [u8; 32],
    pub(super) proof: Option<[u8; 32]>,
}

/// The rank a client says it is. Connections of one client share a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Identity {
    pub(super) rank: u32,
    pub(super) session: [u8; 16],
}

/// A call of the store. The value of `Set` and `AllGather` is the frame's tail.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum StoreRequest {
    Set { key: String },
    Get { key: String, wait_ms: u64 },
    Add { key: String, delta: i64 },
    Delete { key: String },
    AllGather { key: String, rank: u32, world: u32, wait_ms: u64 },
}

/// Message of the server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum ToClient {
    /// The first message on a connection.
    Challenge {
        /// Tells one server from its successor at the same address.
        instance: [u8; 16],
        nonce: [u8; 32],
        secret_needed: bool,
    },
    Welcome {
        proof: Option<[u8; 32]>,
    },
    Done,
    /// The tail is the value.
    Value,
    Sum(i64),
    Deleted(bool),
    /// The tail is the distinct parts one after another; `runs` are (part, count of ranks).
    Gathered {
        lengths: Vec<u32>,
        runs: Vec<(u32, u32)>,
    },
    Failed(ErrorKind),
    /// The request was cancelled, and a part that it brought is taken back.
    Cancelled {
        /// The ranks that are missing, in a gather.
        missing: Vec<u32>,
    },
    /// The client cannot be admitted yet and should try again.
    Later {
        why: String,
    },
    /// No reply, and sent at any time after `Welcome`: of the ranks that have left and not come back, the first.
    FirstLeft(Option<u32>),
}

/// The lengths a header announces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lengths {
    pub(super) head: usize,
    pub(super) tail: usize,
}

/// A frame up to its tail, which is to follow and has `tail` bytes.
pub(super) fn encode(message: &impl Serialize, tail: usize) -> Vec<u8> {
    let mut frame = framing::encode(message)
        .expect("messages are sequences, strings and integers, and memory grows");
    let head = u32::try_from(frame.len() - HEADER).expect("heads are capped far below 4 GiB");
    let tail = u32::try_from(tail).expect("tails are capped far below 4 GiB");
    FrameHeader { magic: MAGIC, version: VERSION, kind: 0, numbers: [head, tail] }
        .write(&mut frame);
    frame
}

/// Reads a header. The error says what is wrong with it; whoever sent it is not to be read from
/// again, since where its next frame begins is not known.
pub(super) fn decode_header(header: &[u8; HEADER], caps: Caps) -> Result<Lengths> {
    let FrameHeader { magic, version, numbers, .. } = FrameHeader::read(header);
    if magic != MAGIC {
        return Err(Error::refused("the peer does not speak the symmpool store protocol"));
    }
    if version != VERSION {
        return Err(Error::refused(format!(
            "the peer speaks version {version} of the store protocol, this side speaks version \
             {VERSION}; use one release of symmpool in a job"
        )));
    }
    let [head, tail] = numbers.map(|length| length as usize);
    if head > caps.head || tail > caps.tail {
        return Err(Error::invalid_argument(format!(
            "a frame of {head} + {tail} bytes, where at most {} + {} are allowed",
            caps.head, caps.tail
        )));
    }
    Ok(Lengths { head, tail })
}

/// Reads a head, which must be one message and nothing more.
pub(super) fn decode<'a, M: Deserialize<'a>>(head: &'a [u8]) -> Result<M> {
    framing::decode(head)
        .map_err(|why| Error::invalid_argument(format!("a message of the store {why}")))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key() -> impl Strategy<Value = String> {
        proptest::collection::vec(any::<char>(), 0..64).prop_map(String::from_iter)
    }

    fn to_server() -> impl Strategy<Value = ToServer> {
        let identity = (any::<u32>(), any::<[u8; 16]>())
            .prop_map(|(rank, session)| Identity { rank, session });
        prop_oneof![
            Just(ToServer::Cancel),
            (proptest::option::of(identity), any::<[u8; 32]>(), any::<Option<[u8; 32]>>())
                .prop_map(|(identity, nonce, proof)| ToServer::Hello(ClientHello {
                    identity,
                    nonce,
                    proof
                })),
            key().prop_map(|key| ToServer::Request(StoreRequest::Set { key })),
            (key(), any::<u64>())
                .prop_map(|(key, wait_ms)| ToServer::Request(StoreRequest::Get { key, wait_ms })),
            (key(), any::<i64>())
                .prop_map(|(key, delta)| ToServer::Request(StoreRequest::Add { key, delta })),
            key().prop_map(|key| ToServer::Request(StoreRequest::Delete { key })),
            (key(), any::<u32>(), any::<u32>(), any::<u64>()).prop_map(
                |(key, rank, world, wait_ms)| ToServer::Request(StoreRequest::AllGather {
                    key,
                    rank,
                    world,
                    wait_ms
                })
            ),
        ]
    }

    fn to_client() -> impl Strategy<Value = ToClient> {
        prop_oneof![
            (any::<[u8; 16]>(), any::<[u8; 32]>(), any::<bool>()).prop_map(
                |(instance, nonce, secret_needed)| ToClient::Challenge {
                    instance,
                    nonce,
                    secret_needed
                }
            ),
            any::<Option<[u8; 32]>>().prop_map(|proof| ToClient::Welcome { proof }),
            Just(ToClient::Done),
            Just(ToClient::Value),
            key().prop_map(|why| ToClient::Later { why }),
            any::<Vec<u32>>().prop_map(|missing| ToClient::Cancelled { missing }),
            any::<i64>().prop_map(ToClient::Sum),
            any::<Option<u32>>().prop_map(ToClient::FirstLeft),
            any::<bool>().prop_map(ToClient::Deleted),
            (any::<Vec<u32>>(), any::<Vec<(u32, u32)>>())
                .prop_map(|(lengths, runs)| ToClient::Gathered { lengths, runs }),
            (key(), any::<Vec<u32>>())
                .prop_map(|(what, ranks)| ToClient::Failed(ErrorKind::PeerLost { ranks, what })),
        ]
    }

    fn header_of(frame: &[u8]) -> [u8; HEADER] {
        *frame.first_chunk().unwrap()
    }

    proptest! {
        #[test]
        fn requests_survive_the_wire(message in to_server(), tail in 0..=MAX_VALUE) {
            let frame = encode(&message, tail);
            let caps = Caps { head: 1 << 20, tail: MAX_VALUE };
            let lengths = decode_header(&header_of(&frame), caps).unwrap();
            prop_assert_eq!(lengths, Lengths { head: frame.len() - HEADER, tail });
            prop_assert_eq!(decode::<ToServer>(&frame[HEADER..]).unwrap(), message);
        }

        #[test]
        fn replies_survive_the_wire(message in to_client()) {
            let frame = encode(&message, 0);
            prop_assert_eq!(decode::<ToClient>(&frame[HEADER..]).unwrap(), message);
        }

        #[test]
        fn random_bytes_are_decoded_or_refused(
            header in any::<[u8; HEADER]>(),
            head in proptest::collection::vec(any::<u8>(), 0..512),
        ) {
            let _ = decode_header(&header, Caps::REQUEST);
            // A head that decodes is encoded to bytes that decode to it again.
            if let Ok(message) = decode::<ToServer>(&head) {
                let again = decode::<ToServer>(&encode(&message, 0)[HEADER..]).unwrap();
                prop_assert_eq!(again, message);
            }
            let _ = decode::<ToClient>(&head);
        }

        #[test]
        fn a_cut_message_is_refused(message in to_server(), cut in any::<prop::sample::Index>()) {
            let frame = encode(&message, 0);
            let head = &frame[HEADER..];
            prop_assert!(decode::<ToServer>(&head[..cut.index(head.len())]).is_err());
        }
    }

    #[test]
    fn other_versions_are_refused_with_both_numbers() {
        let mut frame = encode(&ToClient::Done, 0);
        frame[4] = 77;
        let error = decode_header(&header_of(&frame), Caps::REPLY).unwrap_err();
        assert!(error.is_refused());
        assert!(error.to_string().contains("version 77"), "{error}");
        assert!(error.to_string().contains(&format!("version {VERSION};")), "{error}");
    }

    #[test]
    fn lengths_beyond_the_caps_are_refused_unread() {
        let mut frame = encode(&ToServer::Request(StoreRequest::Set { key: "k".into() }), 0);
        frame[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(
            decode_header(&header_of(&frame), Caps::REQUEST).unwrap_err().is_invalid_argument()
        );
        frame[12..16].copy_from_slice(&0u32.to_le_bytes());
        frame[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(
            decode_header(&header_of(&frame), Caps::REQUEST).unwrap_err().is_invalid_argument()
        );
    }

    #[test]
    fn the_longest_request_and_reply_fit_their_caps() {
        let key = "k".repeat(MAX_KEY);
        let request =
            StoreRequest::AllGather { key, rank: u32::MAX, world: u32::MAX, wait_ms: u64::MAX };
        let frame = encode(&ToServer::Request(request), MAX_VALUE);
        assert!(decode_header(&header_of(&frame), Caps::REQUEST).is_ok());
        let reply = ToClient::Gathered {
            lengths: vec![MAX_VALUE as u32; MAX_WORLD as usize],
            runs: vec![(MAX_WORLD, 1); MAX_WORLD as usize],
        };
        let frame = encode(&reply, MAX_GATHERED);
        assert!(decode_header(&header_of(&frame), Caps::REPLY).is_ok());
    }
}
