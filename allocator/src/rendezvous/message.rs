//! The frame around every message of rendezvous and commit: a [`FrameHeader`] with the magic "SYMM", whose two
//! numbers are the length of the payload and the low half of its XXH3, and the payload.

use serde::Serialize;
use serde::de::DeserializeOwned;
use xxhash_rust::xxh3::xxh3_64;

use crate::framing::{self, FrameHeader, HEADER};
use crate::store::{Gathered, MAX_VALUE};
use crate::{Error, Result};

/// The version of all messages together, raised with any change to one of them.
pub(crate) const PROTOCOL_VERSION: u16 = 6;

/// The longest payload of a message, in bytes.
pub(crate) const MAX_PAYLOAD: usize = MAX_VALUE - HEADER;

const MAGIC: [u8; 4] = *b"SYMM";

/// A message of one rank to others.
pub(crate) trait Message: Serialize + DeserializeOwned {
    /// The kind of message; unique among all implementors.
    const KIND: u16;
    /// For error messages.
    const NAME: &'static str;
}

/// Frames `message`. Fails with [`Error::is_invalid_argument`] when it is longer than
/// [`MAX_PAYLOAD`].
pub(crate) fn encode<M: Message>(message: &M) -> Result<Vec<u8>> {
    let frame = framing::encode(message)
        .map_err(|error| Error::system(format!("encoding a {} message", M::NAME), error))?;
    let payload = frame.len() - HEADER;
    if payload > MAX_PAYLOAD {
        return Err(Error::invalid_argument(format!(
            "a {} message of {payload} bytes; the limit is {MAX_PAYLOAD}",
            M::NAME
        )));
    }
    Ok(with_header(M::KIND, frame))
}

/// A frame of any payload, as a peer may make it.
#[cfg(feature = "testing")]
pub(crate) fn framed(kind: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![0; HEADER];
    frame.extend_from_slice(payload);
    with_header(kind, frame)
}

fn with_header(kind: u16, mut frame: Vec<u8>) -> Vec<u8> {
    let length = (frame.len() - HEADER) as u32;
    let check = xxh3_64(&frame[HEADER..]) as u32;
    let (magic, version) = (MAGIC, PROTOCOL_VERSION);
    FrameHeader { magic, version, kind, numbers: [length, check] }.write(&mut frame);
    frame
}

/// The header of a frame with our magic; `None` for anything else. A frame of another version may be shorter
/// than a header, but has its first six bytes.
fn header_of(bytes: &[u8]) -> Option<FrameHeader> {
    let mut header = [0; HEADER];
    let length = bytes.len().min(HEADER);
    header[..length].copy_from_slice(&bytes[..length]);
    Some(FrameHeader::read(&header)).filter(|header| length >= 6 && header.magic == MAGIC)
}

/// The protocol version of a frame; `None` when it is not one of ours.
pub(crate) fn version_of(bytes: &[u8]) -> Option<u16> {
    header_of(bytes).map(|header| header.version)
}

/// Decodes the messages of all ranks, in rank order; fails as [`decode`] does, at the first that does.
pub(crate) fn decode_all<M: Message>(gathered: &Gathered) -> Result<Vec<M>> {
    gathered.parts().zip(0..).map(|(part, rank)| decode(rank, part)).collect()
}

/// Decodes a message of `rank`. A frame of another program or version is
/// [`Error::is_refused`]; one of another kind, cut short or damaged is a mismatch.
pub(crate) fn decode<M: Message>(rank: u32, bytes: &[u8]) -> Result<M> {
    let name = M::NAME;
    let mismatch = |what: String| {
        Error::mismatch(format!("rank {rank}: {name} message {what}")).naming([rank])
    };
    if bytes.len() < HEADER {
        return Err(mismatch(format!("of {} bytes, shorter than its header", bytes.len())));
    }
    let header = match header_of(bytes) {
        Some(header) if header.version == PROTOCOL_VERSION => header,
        Some(FrameHeader { version, .. }) => {
            return Err(Error::refused(format!(
                "rank {rank} speaks version {version} of the rendezvous protocol, this rank \
                 version {PROTOCOL_VERSION}; run the same symmpool on every rank"
            ))
            .naming([rank]));
        }
        None => {
            return Err(Error::refused(format!(
                "what rank {rank} sent as {name} does not begin as a message of symmpool \
                 (expected {MAGIC:02x?}, found {:02x?}); is another program using the store's keys?",
                &bytes[0..4]
            ))
            .naming([rank]));
        }
    };
    if header.kind != M::KIND {
        return Err(mismatch(format!(
            "expected (kind {}), but kind {} came: ranks are at different steps",
            M::KIND,
            header.kind
        )));
    }
    let payload = &bytes[HEADER..];
    let [length, check] = header.numbers;
    if length as usize != payload.len() || payload.len() > MAX_PAYLOAD {
        return Err(mismatch(format!("announces {length} bytes and has {}", payload.len())));
    }
    if check != xxh3_64(payload) as u32 {
        return Err(mismatch("is damaged: its check does not match".into()));
    }
    framing::decode(payload).map_err(mismatch)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Sample {
        numbers: Vec<u64>,
        text: String,
        flag: Option<bool>,
    }

    impl Message for Sample {
        const KIND: u16 = 0x7001;
        const NAME: &'static str = "sample";
    }

    #[derive(Debug, Serialize, Deserialize)]
    struct Other;

    impl Message for Other {
        const KIND: u16 = 0x7002;
        const NAME: &'static str = "other";
    }

    fn sample() -> Sample {
        Sample { numbers: vec![1, 300, u64::MAX], text: "tëxt".into(), flag: Some(true) }
    }

    #[test]
    fn what_is_sent_arrives() {
        let bytes = encode(&sample()).unwrap();
        assert_eq!(decode::<Sample>(3, &bytes).unwrap(), sample());
    }

    #[test]
    fn another_version_is_refused_and_both_are_named() {
        let mut bytes = encode(&sample()).unwrap();
        bytes[4..6].copy_from_slice(&9u16.to_le_bytes());
        let error = decode::<Sample>(3, &bytes).unwrap_err();
        assert!(error.is_refused());
        let text = error.to_string();
        let own = format!("version {PROTOCOL_VERSION}");
        assert!(text.contains("rank 3") && text.contains("version 9") && text.contains(&own));
    }

    #[test]
    fn another_program_is_refused() {
        let error = decode::<Sample>(3, b"HTTP/1.1 200 OK\r\n").unwrap_err();
        assert!(error.is_refused() && error.to_string().contains("rank 3"));
    }

    #[test]
    fn another_kind_is_a_mismatch() {
        let error = decode::<Sample>(3, &encode(&Other).unwrap()).unwrap_err();
        assert!(error.is_diverged() && error.to_string().contains("different steps"));
    }

    #[test]
    fn a_payload_with_bytes_left_over_is_a_mismatch() {
        let mut frame = framing::encode(&sample()).unwrap();
        frame.push(0);
        let error = decode::<Sample>(3, &with_header(Sample::KIND, frame)).unwrap_err();
        assert!(error.is_diverged() && error.to_string().contains("too many"));
    }

    #[test]
    fn messages_over_the_limit_are_not_sent() {
        let long = Sample { numbers: Vec::new(), text: "x".repeat(MAX_PAYLOAD), flag: None };
        assert!(encode(&long).unwrap_err().is_invalid_argument());
    }

    proptest! {
        #[test]
        fn random_bytes_are_an_error_and_never_a_panic(bytes: Vec<u8>) {
            prop_assert!(decode::<Sample>(1, &bytes).is_err());
        }

        #[test]
        fn random_payloads_never_panic(payload: Vec<u8>) {
            // A right header lets the bytes through to the decoder of the payload itself.
            let mut frame = vec![0; HEADER];
            frame.extend_from_slice(&payload);
            if let Err(error) = decode::<Sample>(1, &with_header(Sample::KIND, frame)) {
                prop_assert!(error.is_diverged());
            }
        }

        #[test]
        fn every_cut_and_every_flipped_bit_is_noticed(cut in 0usize..40, bit in 0usize..512) {
            let whole = encode(&sample()).unwrap();
            let cut = cut.min(whole.len() - 1);
            prop_assert!(decode::<Sample>(1, &whole[..cut]).is_err());
            let mut flipped = whole.clone();
            let bit = bit % (8 * whole.len());
            flipped[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(decode::<Sample>(1, &flipped).is_err());
        }
    }
}
