//! Frames of one connection of the server: those that have arrived in part, and those not yet sent.
//!
//! Nothing here blocks. Memory grows with what has arrived, not with what a header announces.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;

use super::meter::{Charge, Meter, MeteredPayload};
use super::server_state::Frame;
use super::wire::{Caps, HEADER, Lengths, decode_header};
use crate::{Error, Result};

/// The most bytes read from one connection before others are read.
const TURN: usize = 256 << 10;

/// Result of an attempt to read.
#[derive(Debug)]
pub(super) enum Input {
    /// A frame: its head, and its tail or the error that there was no room for it.
    Frame(Vec<u8>, Result<MeteredPayload>),
    /// No complete frame yet; true when one has begun.
    Partial(bool),
    /// The peer closed, or the connection broke.
    Closed,
    /// The peer broke the protocol. It can be sent the error, but not read from again.
    Broken(Error),
}

/// A frame on its way in.
#[derive(Debug, Default)]
pub(super) struct Incoming {
    header: [u8; HEADER],
    header_filled: usize,
    body: Option<Body>,
}

#[derive(Debug)]
struct Body {
    lengths: Lengths,
    head: Vec<u8>,
    tail: Vec<u8>,
    /// Room for what `tail` holds; an error once there was none, after which the rest is discarded.
    room: Result<Charge>,
    tail_seen: usize,
}

impl Incoming {
    /// Reads until a frame is complete, the turn is over or nothing more is there.
    pub(super) fn read(&mut self, stream: &mut impl Read, meter: &Meter, caps: Caps) -> Input {
        let mut buffer = [0u8; 16 << 10];
        let mut turn = TURN;
        loop {
            match self.step(meter, caps) {
                Ok(Some((head, tail))) => return Input::Frame(head, tail),
                Ok(None) => {}
                Err(error) => return Input::Broken(error),
            }
            if turn == 0 {
                return Input::Partial(true);
            }
            // Not beyond the end of the frame: what follows belongs to the next request.
            let limit = self.wanted().min(buffer.len()).min(turn);
            match stream.read(&mut buffer[..limit]) {
                Ok(0) => return Input::Closed,
                Ok(count) => {
                    turn -= count;
                    self.take(&buffer[..count]);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    return Input::Partial(self.header_filled > 0);
                }
                Err(_) => return Input::Closed,
            }
        }
    }

    /// Begins the body after a complete header, and returns a complete frame.
    fn step(
        &mut self,
        meter: &Meter,
        caps: Caps,
    ) -> Result<Option<(Vec<u8>, Result<MeteredPayload>)>> {
        if self.header_filled == HEADER && self.body.is_none() {
            let lengths = decode_header(&self.header, caps)?;
            self.body = Some(Body {
                lengths,
                head: Vec::new(),
                tail: Vec::new(),
                room: meter.charge(0),
                tail_seen: 0,
            });
        }
        let done = self.body.as_ref().is_some_and(|body| {
            body.head.len() == body.lengths.head && body.tail_seen == body.lengths.tail
        });
        if !done {
            return Ok(None);
        }
        self.header_filled = 0;
        Ok(self
            .body
            .take()
            .map(|body| (body.head, body.room.map(|room| MeteredPayload::new(body.tail, room)))))
    }

    /// Bytes until the present piece is complete; at least 1 after [`Incoming::step`].
    fn wanted(&self) -> usize {
        match &self.body {
            None => HEADER - self.header_filled,
            Some(body) if body.head.len() < body.lengths.head => {
                body.lengths.head - body.head.len()
            }
            Some(body) => body.lengths.tail - body.tail_seen,
        }
    }

    /// Takes at most [`Incoming::wanted`] bytes.
    fn take(&mut self, bytes: &[u8]) {
        match &mut self.body {
            None => {
                let end = self.header_filled + bytes.len();
                self.header[self.header_filled..end].copy_from_slice(bytes);
                self.header_filled = end;
            }
            Some(body) if body.head.len() < body.lengths.head => body.head.extend(bytes),
            Some(body) => body.take_tail(bytes),
        }
    }
}

impl Body {
    fn take_tail(&mut self, bytes: &[u8]) {
        self.tail_seen += bytes.len();
        let Ok(room) = &mut self.room else { return };
        if let Err(error) = room.grow(bytes.len()) {
            self.tail = Vec::new();
            self.room = Err(error);
            return;
        }
        // Grows by doubling, but never beyond what was announced.
        let missing = self.lengths.tail - self.tail.len();
        if self.tail.capacity() - self.tail.len() < bytes.len() {
            self.tail.reserve_exact(missing.min(self.tail.len().max(bytes.len())));
        }
        self.tail.extend_from_slice(bytes);
    }
}

/// Frames on their way out.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    pieces: VecDeque<MeteredPayload>,
    /// Bytes of the first piece already sent.
    sent: usize,
    /// Whether the last piece is news, which later news replaces.
    ends_with_news: bool,
}

impl Outgoing {
    pub(super) fn push(&mut self, frame: Frame) {
        self.pieces.push_back(frame.head);
        self.pieces.extend(frame.tail);
        self.ends_with_news = false;
    }

    /// Sends a frame that makes those like it before it void. Those that were not begun are left out, so that a client
    /// that reads nothing while it has nothing to ask takes no more memory with time.
    pub(super) fn push_news(&mut self, frame: Frame) {
        let is_begun = self.pieces.len() == 1 && self.sent > 0;
        if self.ends_with_news && !self.is_empty() && !is_begun {
            self.pieces.pop_back();
        }
        self.push(frame);
        self.ends_with_news = true;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Sends what the socket takes; says whether it took anything.
    pub(super) fn flush(&mut self, stream: &mut TcpStream) -> std::io::Result<bool> {
        let mut progress = false;
        while let Some(piece) = self.pieces.front() {
            let rest = &piece.as_ref()[self.sent..];
            if !rest.is_empty() {
                match stream.write(rest) {
                    Ok(0) => return Err(ErrorKind::WriteZero.into()),
                    Ok(count) => {
                        progress = true;
                        self.sent += count;
                    }
                    Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(progress),
                    Err(error) => return Err(error),
                }
            }
            if self.sent == piece.as_ref().len() {
                self.pieces.pop_front();
                self.sent = 0;
            }
        }
        Ok(progress)
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::super::server_state::ServerState;
    use super::super::wire::{StoreRequest, ToClient, decode, decode_header, encode};
    use super::*;

    /// Two ends of a connection; the second does not block.
    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (far, _) = listener.accept().unwrap();
        far.set_nonblocking(true).unwrap();
        (near, far)
    }

    #[test]
    fn frames_that_come_in_pieces_end_where_the_next_begins() {
        let meter = Meter::new(1 << 20);
        let frame = |key: &str, tail: &[u8]| {
            let head = encode(&StoreRequest::Set { key: key.into() }, tail.len());
            [head, tail.to_vec()].concat()
        };
        let (first, second) = (frame("key of the first", &[1; 40]), frame("second", &[2; 9]));
        // In the header, at its end, in the head, and in the tail.
        for cut in [1, HEADER - 1, HEADER, HEADER + 5, first.len() - 40, first.len() - 7] {
            let ((mut near, mut far), mut incoming) = (pair(), Incoming::default());
            let mut read = || incoming.read(&mut far, &meter, Caps::REQUEST);
            assert!(matches!(read(), Input::Partial(false)), "nothing has begun");
            near.write_all(&first[..cut]).unwrap();
            while !matches!(read(), Input::Partial(true)) {
                std::thread::yield_now();
            }
            near.write_all(&[&first[cut..], &second].concat()).unwrap();
            for frame in [&first, &second] {
                let (head, tail) = loop {
                    match read() {
                        Input::Frame(head, tail) => break (head, tail.unwrap()),
                        Input::Partial(_) => std::thread::yield_now(),
                        other => panic!("cut at {cut}: {other:?}"),
                    }
                };
                assert_eq!([&head, tail.as_ref()].concat(), frame[HEADER..], "cut at {cut}");
            }
            assert!(matches!(read(), Input::Partial(false)), "nothing has begun");
        }
    }

    #[test]
    fn news_that_nobody_reads_takes_no_more_room_with_time() {
        let meter = Meter::new(1 << 20);
        let state = ServerState::new(meter.clone());
        let news = |first| state.frame(&ToClient::FirstLeft(Some(first)), None);
        let reply = || state.frame(&ToClient::Later { why: "a reply".to_owned() }, None);
        let ((mut near, mut far), mut outgoing) = (pair(), Outgoing::default());
        let mut newest = 0;
        // Fills the socket, so that nothing more is sent.
        while outgoing.is_empty() {
            outgoing.push_news(news(newest));
            outgoing.flush(&mut far).unwrap();
            newest += 1;
        }
        let used = meter.held();
        for _ in 0..1000 {
            outgoing.push_news(news(newest));
            outgoing.flush(&mut far).unwrap();
            newest += 1;
        }
        assert!(outgoing.pieces.len() <= 2 && meter.held() <= used + 64);
        outgoing.push(reply());
        outgoing.push_news(news(newest));
        outgoing.push_news(news(newest + 1));
        // Whoever reads at last finds whole frames, the reply among them, and the last news last.
        let reader = std::thread::spawn(move || {
            let mut found = Vec::new();
            loop {
                let mut header = [0; HEADER];
                near.read_exact(&mut header).unwrap();
                let mut head = vec![0; decode_header(&header, Caps::REPLY).unwrap().head];
                near.read_exact(&mut head).unwrap();
                match decode(&head).unwrap() {
                    ToClient::FirstLeft(Some(first)) if first == newest + 1 => return found,
                    frame => found.push(frame),
                }
            }
        });
        while !outgoing.is_empty() {
            outgoing.flush(&mut far).unwrap();
            std::thread::yield_now();
        }
        let found = reader.join().unwrap();
        assert!(matches!(found.last(), Some(ToClient::Later { .. })), "{:?}", found.last());
    }
}
