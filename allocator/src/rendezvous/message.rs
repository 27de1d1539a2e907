//! The frame around everything ranks tell each other at rendezvous and commit.
//!
//! ```text
//! bytes  0..4    magic "SYMM"
//!        4..6    protocol version, little endian
//!        6..8    kind of message
//!        8..12   length of the payload
//!        12..16  low half of the payload's XXH3
//!        16..    payload: the message in postcard's encoding
//! ```
//!
//! The first six bytes stay as they are in every version, so that two builds can always tell each
//! other that they differ.

use serde::Serialize;
use serde::de::DeserializeOwned;
use xxhash_rust::xxh3::xxh3_64;

use crate::store::{Gathered, MAX_VALUE};
use crate::{Error, Result};

/// The version of all messages together; grows with any change to one of them.
pub(crate) const PROTOCOL_VERSION: u16 = 3;

/// The longest payload of a message, in bytes.
pub(crate) const MAX_PAYLOAD: usize = MAX_VALUE - HEADER;

const MAGIC: [u8; 4] = *b"SYMM";
const HEADER: usize = 16;

/// Something ranks send each other.
pub(crate) trait Message: Serialize + DeserializeOwned {
    /// Tells kinds of messages apart; unique among all implementors.
    const KIND: u16;
    /// For error messages.
    const NAME: &'static str;
}

/// Frames `message`. Fails with [`Error::is_invalid_argument`] when it is longer than
/// [`MAX_PAYLOAD`].
pub(crate) fn encode<M: Message>(message: &M) -> Result<Vec<u8>> {
    let frame = postcard::to_extend(message, vec![0; HEADER])
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

fn with_header(kind: u16, mut frame: Vec<u8>) -> Vec<u8> {
    let length = (frame.len() - HEADER) as u32;
    let check = xxh3_64(&frame[HEADER..]) as u32;
    frame[0..4].copy_from_slice(&MAGIC);
    frame[4..6].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
    frame[6..8].copy_from_slice(&kind.to_le_bytes());
    frame[8..12].copy_from_slice(&length.to_le_bytes());
    frame[12..16].copy_from_slice(&check.to_le_bytes());
    frame
}

/// The protocol version of a frame; `None` when it is not one of ours.
pub(crate) fn version_of(bytes: &[u8]) -> Option<u16> {
    let magic = bytes.get(0..4)?;
    let version = bytes.get(4..6)?;
    (magic == MAGIC).then(|| u16::from_le_bytes([version[0], version[1]]))
}

/// The kind of a frame of this protocol version; `None` for anything else.
pub(crate) fn kind_of(bytes: &[u8]) -> Option<u16> {
    let kind = bytes.get(6..8)?;
    (version_of(bytes)? == PROTOCOL_VERSION).then(|| u16::from_le_bytes([kind[0], kind[1]]))
}

/// Reads what every rank sent, in rank order; fails as [`decode`] does, at the first that does.
pub(crate) fn decode_all<M: Message>(gathered: &Gathered) -> Result<Vec<M>> {
    gathered.parts().zip(0..).map(|(part, rank)| decode(rank, part)).collect()
}

/// Reads what `rank` sent. A frame of another program or version is
/// [`Error::is_refused`]; one of another kind, cut short or damaged is a mismatch.
pub(crate) fn decode<M: Message>(rank: u32, bytes: &[u8]) -> Result<M> {
    let name = M::NAME;
    let mismatch = |what: String| {
        Error::mismatch(format!("rank {rank}: {name} message {what}")).naming([rank])
    };
    if bytes.len() < HEADER {
        return Err(mismatch(format!("of {} bytes, shorter than its header", bytes.len())));
    }
    match version_of(bytes) {
        Some(PROTOCOL_VERSION) => {}
        Some(theirs) => {
            return Err(Error::refused(format!(
                "rank {rank} speaks version {theirs} of the rendezvous protocol, this rank \
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
    }
    if kind_of(bytes) != Some(M::KIND) {
        return Err(mismatch(format!(
            "expected (kind {}), but kind {} came: ranks are at different steps",
            M::KIND,
            u16::from_le_bytes([bytes[6], bytes[7]])
        )));
    }
    let payload = &bytes[HEADER..];
    let length = u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]) as usize;
    if length != payload.len() || length > MAX_PAYLOAD {
        return Err(mismatch(format!("announces {length} bytes and has {}", payload.len())));
    }
    let check = u32::from_le_bytes([bytes[12], bytes[13], bytes[14], bytes[15]]);
    if check != xxh3_64(payload) as u32 {
        return Err(mismatch("is damaged: its check does not match".into()));
    }
    match postcard::take_from_bytes::<M>(payload) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => Err(mismatch(format!("has {} bytes too many", rest.len()))),
        Err(error) => Err(mismatch(format!("cannot be read: {error}"))),
    }
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
        let mut frame = postcard::to_extend(&sample(), vec![0; HEADER]).unwrap();
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
