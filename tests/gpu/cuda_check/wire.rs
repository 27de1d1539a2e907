//! Messages between the hub and its ranks: a fixed header, a payload, and a descriptor in some.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::{RecvFlags, SendFlags};
use symmpool_allocator::Deadline;
use symmpool_allocator::testing::{receive_with_descriptors, send_with_descriptors};

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MessageKind {
    /// A rank has connected.
    Hello,
    /// A segment's handle, as a descriptor or as the message's bytes.
    Segment,
    /// A rank has reached a barrier or, from the hub, all ranks have.
    Barrier,
    /// A rank is done; the payload is its report.
    Report,
    /// A rank has failed; the payload is its error.
    Failed,
}

const KINDS: [MessageKind; 5] = [
    MessageKind::Hello,
    MessageKind::Segment,
    MessageKind::Barrier,
    MessageKind::Report,
    MessageKind::Failed,
];

/// The longest payload that is accepted.
const MAX_PAYLOAD: u64 = 1 << 20;

const HEADER: usize = 32;

/// One message.
#[derive(Debug)]
pub(crate) struct WireMessage {
    pub(crate) kind: MessageKind,
    pub(crate) rank: u32,
    /// Index of the segment or of the barrier.
    pub(crate) index: u32,
    /// The size of a segment.
    pub(crate) bytes: u64,
    pub(crate) payload: Vec<u8>,
    pub(crate) fd: Option<OwnedFd>,
}

impl WireMessage {
    pub(crate) fn new(kind: MessageKind, rank: u32, index: u32) -> Self {
        Self { kind, rank, index, bytes: 0, payload: Vec::new(), fd: None }
    }

    pub(crate) fn with_payload(mut self, payload: impl Into<Vec<u8>>) -> Self {
        self.payload = payload.into();
        self
    }
}

/// Sends a message, with its descriptor attached to the header.
pub(crate) fn send(
    socket: &mut UnixStream,
    message: &WireMessage,
    deadline: Deadline,
) -> Result<(), String> {
    let text = |error: std::io::Error| format!("sending {:?}: {error}", message.kind);
    socket.set_write_timeout(Some(left(deadline)?)).map_err(text)?;
    let mut header = [0u8; HEADER];
    let kind = KINDS.iter().position(|&kind| kind == message.kind).unwrap_or(0) as u32;
    header[0..4].copy_from_slice(&kind.to_le_bytes());
    header[4..8].copy_from_slice(&message.rank.to_le_bytes());
    header[8..12].copy_from_slice(&message.index.to_le_bytes());
    header[12..16].copy_from_slice(&u32::from(message.fd.is_some()).to_le_bytes());
    header[16..24].copy_from_slice(&message.bytes.to_le_bytes());
    header[24..32].copy_from_slice(&(message.payload.len() as u64).to_le_bytes());
    let fds: Vec<_> = message.fd.iter().map(AsFd::as_fd).collect();
    let sent = send_with_descriptors(&*socket, &header, &fds, SendFlags::NOSIGNAL)
        .map_err(|error| text(error.into()))?;
    socket.write_all(&header[sent..]).map_err(text)?;
    socket.write_all(&message.payload).map_err(text)
}

/// Receives a message, waiting for it until `deadline`.
pub(crate) fn receive(socket: &mut UnixStream, deadline: Deadline) -> Result<WireMessage, String> {
    let text = |error: std::io::Error| format!("receiving: {error}");
    let mut header = [0u8; HEADER];
    let mut filled = 0;
    let mut fd = None;
    while filled < HEADER {
        socket.set_read_timeout(Some(left(deadline)?)).map_err(text)?;
        let got = receive_with_descriptors(&*socket, &mut header[filled..], RecvFlags::empty())
            .map_err(|error| text(error.into()))?;
        if got.bytes == 0 {
            return Err("the other side is gone".to_owned());
        }
        filled += got.bytes;
        fd = got.fds.into_iter().last().or(fd);
    }
    let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| header[at + i]));
    let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| header[at + i]));
    let kind = *KINDS.get(word(0) as usize).ok_or("a message of an unknown kind")?;
    if word(12) != u32::from(fd.is_some()) {
        return Err(format!("a {kind:?} message and its descriptor do not go together"));
    }
    let length = long(24);
    if length > MAX_PAYLOAD {
        return Err(format!("a {kind:?} message of {length} bytes"));
    }
    let mut payload = vec![0; length as usize];
    socket.set_read_timeout(Some(left(deadline)?)).map_err(text)?;
    socket.read_exact(&mut payload).map_err(text)?;
    Ok(WireMessage { kind, rank: word(4), index: word(8), bytes: long(16), payload, fd })
}

/// Receives a message that must be of `kind`. If the other side reports a failure, that is the error.
pub(crate) fn expect(
    socket: &mut UnixStream,
    kind: MessageKind,
    deadline: Deadline,
) -> Result<WireMessage, String> {
    let message = receive(socket, deadline)?;
    match message.kind {
        found if found == kind => Ok(message),
        MessageKind::Failed => Err(String::from_utf8_lossy(&message.payload).into_owned()),
        found => Err(format!("a {found:?} message in place of {kind:?}")),
    }
}

fn left(deadline: Deadline) -> Result<Duration, String> {
    let left = deadline.remaining();
    if left.is_zero() {
        return Err(format!("timed out after {:.0?}", deadline.budget()));
    }
    Ok(left)
}
