//! A live server against clients that do not keep the rules. After each of them it must still
//! serve the others.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use proptest::prelude::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::wire::{
    self, Caps, ClientHello, HEADER, StoreRequest, ToClient, ToServer, decode_header,
};
use super::{TcpLimits, TcpOptions, TcpServer, TcpStore};
use crate::store::{MAX_VALUE, Store};
use crate::{Deadline, Error};

fn ample() -> Deadline {
    Deadline::seconds(60)
}

fn server(limits: TcpLimits) -> TcpServer {
    TcpServer::bind("127.0.0.1:0", TcpOptions { limits, ..TcpOptions::default() }).unwrap()
}

fn impatient() -> TcpLimits {
    TcpLimits {
        handshake: Duration::from_secs(2),
        stall: Duration::from_secs(2),
        ..TcpLimits::default()
    }
}

/// The server serves a client that keeps the rules.
fn still_serves(server: &TcpServer) {
    let store = TcpStore::connect(server.local_addr(), TcpOptions::default(), ample()).unwrap();
    let sum = store.add("served", 1, ample()).unwrap();
    assert_eq!(store.get("served", ample()).unwrap(), sum.to_string().as_bytes());
}

/// A connection on which a test sends any bytes.
struct Raw(TcpStream);

impl Raw {
    /// Connected and challenged.
    fn open(server: &TcpServer) -> Self {
        let stream = TcpStream::connect(server.local_addr()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut raw = Self(stream);
        assert!(matches!(raw.read(), Some((ToClient::Challenge { .. }, _))));
        raw
    }

    /// Admitted too.
    fn admitted(server: &TcpServer) -> Self {
        let mut raw = Self::open(server);
        raw.write(&hello());
        assert!(matches!(raw.read(), Some((ToClient::Welcome { .. }, _))));
        raw
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
    }

    /// The next frame; `None` at the end of the connection.
    fn read(&mut self) -> Option<(ToClient, Vec<u8>)> {
        let mut header = [0; HEADER];
        self.0.read_exact(&mut header).ok()?;
        let lengths = decode_header(&header, Caps::REPLY).unwrap();
        let mut head = vec![0; lengths.head];
        self.0.read_exact(&mut head).ok()?;
        let mut tail = vec![0; lengths.tail];
        self.0.read_exact(&mut tail).ok()?;
        Some((wire::decode(&head).unwrap(), tail))
    }

    /// The server says why and closes.
    fn expect_dropped(mut self) -> Error {
        let Some((ToClient::Failed(kind), _)) = self.read() else { panic!("no error reply") };
        assert!(self.read().is_none(), "the connection is still open");
        Error::from_kind(kind)
    }
}

fn hello() -> Vec<u8> {
    wire::encode(&ToServer::Hello(ClientHello { identity: None, nonce: [0; 32], proof: None }), 0)
}

fn request(request: StoreRequest, tail: &[u8]) -> Vec<u8> {
    let mut frame = wire::encode(&ToServer::Request(request), tail.len());
    frame.extend_from_slice(tail);
    frame
}

fn set() -> StoreRequest {
    StoreRequest::Set { key: "k".into() }
}

fn get() -> StoreRequest {
    StoreRequest::Get { key: "k".into(), wait_ms: 60_000 }
}

#[test]
fn a_silent_client_is_dropped_after_the_handshake_deadline() {
    let server = server(impatient());
    let silent: Vec<_> = (0..8).map(|_| Raw::open(&server)).collect();
    still_serves(&server);
    for raw in silent {
        assert!(raw.expect_dropped().is_timeout());
    }
    still_serves(&server);
}

#[test]
fn silent_clients_make_room_for_those_that_answer_the_oldest_first() {
    let limits = TcpLimits { max_connections: 8, ..TcpLimits::default() };
    let server = server(limits);
    let silent: Vec<_> = (0..8).map(|_| Raw::open(&server)).collect();
    let stores: Vec<TcpStore> = (0..5)
        .map(|rank| {
            let options = TcpOptions::default();
            TcpStore::connect_as(server.local_addr(), options, rank, ample()).unwrap()
        })
        .collect();
    for (number, mut raw) in silent.into_iter().enumerate() {
        if number < 5 {
            let Some((ToClient::Later { why }, _)) = raw.read() else { panic!("{number}") };
            assert!(why.contains("its place was needed"), "{why}");
            assert!(raw.read().is_none());
        } else {
            // It may answer still.
            raw.write(&hello());
            assert!(matches!(raw.read(), Some((ToClient::Welcome { .. }, _))));
            stores[0].set("k", b"v", ample()).unwrap();
        }
    }
    // Those that have answered keep their places.
    for store in &stores {
        store.set("k", b"v", ample()).unwrap();
    }
}

#[test]
fn who_has_no_secret_keeps_nobody_out() {
    let limits = TcpLimits { max_connections: 4, ..TcpLimits::default() };
    let secret = super::Secret::new("known to the ranks").unwrap();
    let options = TcpOptions { secret: Some(secret), limits, ..TcpOptions::default() };
    let server = TcpServer::bind("127.0.0.1:0", options.clone()).unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut held = std::collections::VecDeque::new();
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                held.extend(TcpStream::connect(server.local_addr()));
                if held.len() > 64 {
                    held.pop_front();
                }
            }
        });
        let begun = std::time::Instant::now();
        for rank in 0..3 {
            let store =
                TcpStore::connect_as(server.local_addr(), options.clone(), rank, ample()).unwrap();
            store.set("k", b"v", ample()).unwrap();
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(begun.elapsed() < TcpLimits::default().handshake);
    });
}

#[test]
fn half_a_frame_stalls_nobody_and_is_dropped() {
    let server = server(impatient());
    let whole = request(set(), &[7; 1000]);
    let slow: Vec<_> = [1, HEADER - 1, HEADER, HEADER + 2, whole.len() - 1]
        .into_iter()
        .map(|cut| {
            let mut raw = Raw::admitted(&server);
            raw.write(&whole[..cut]);
            raw
        })
        .collect();
    still_serves(&server);
    for raw in slow {
        assert!(raw.expect_dropped().is_timeout());
    }
    still_serves(&server);
}

#[test]
fn a_frame_in_single_bytes_is_a_frame() {
    let server = server(TcpLimits::default());
    let mut raw = Raw::admitted(&server);
    for byte in request(set(), b"value") {
        raw.write(&[byte]);
    }
    assert_eq!(raw.read().unwrap().0, ToClient::Done);
    // Two requests sent together are served one after the other.
    raw.write(
        &[request(get(), b""), request(StoreRequest::Delete { key: "k".into() }, b"")].concat(),
    );
    assert_eq!(raw.read().unwrap(), (ToClient::Value, b"value".to_vec()));
    assert_eq!(raw.read().unwrap().0, ToClient::Deleted(true));
}

#[test]
fn another_version_is_refused_with_both_numbers() {
    let server = server(TcpLimits::default());
    let mut raw = Raw::open(&server);
    let mut frame = hello();
    frame[4..6].copy_from_slice(&9u16.to_le_bytes());
    raw.write(&frame);
    let error = raw.expect_dropped();
    assert!(error.is_refused(), "{error}");
    assert!(error.to_string().contains("version 9"), "{error}");
    assert!(error.to_string().contains(&format!("version {};", wire::VERSION)), "{error}");
    still_serves(&server);
}

#[test]
fn another_protocol_is_refused() {
    let server = server(TcpLimits::default());
    let mut raw = Raw::open(&server);
    raw.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
    assert!(raw.expect_dropped().is_refused());
    still_serves(&server);
}

#[test]
fn lengths_beyond_the_limits_are_dropped_with_a_reply() {
    let server = server(TcpLimits::default());
    for (at, length) in [(8, u32::MAX), (12, u32::MAX), (12, MAX_VALUE as u32 + 1)] {
        let mut raw = Raw::admitted(&server);
        let mut frame = request(set(), b"");
        frame[at..at + 4].copy_from_slice(&length.to_le_bytes());
        raw.write(&frame);
        assert!(raw.expect_dropped().is_invalid_argument());
    }
    // Before it is admitted, a client has no use for a tail at all.
    let mut raw = Raw::open(&server);
    let mut frame = hello();
    frame[12..16].copy_from_slice(&1u32.to_le_bytes());
    raw.write(&frame);
    assert!(raw.expect_dropped().is_invalid_argument());
    still_serves(&server);
}

#[test]
fn an_oversized_body_that_keeps_coming_does_not_hide_the_error() {
    let server = server(TcpLimits::default());
    let mut raw = Raw::admitted(&server);
    let mut frame = request(set(), b"");
    frame[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
    frame.resize(1 << 20, 0);
    raw.write(&frame);
    assert!(raw.expect_dropped().is_invalid_argument());
    still_serves(&server);
}

#[test]
fn nonsense_and_messages_out_of_turn_are_dropped_with_a_reply() {
    let server = server(TcpLimits::default());
    let mut unknown_kind = request(set(), b"");
    unknown_kind[HEADER] = 99;
    let mut cut_key = request(set(), b"");
    cut_key[HEADER + 2] = 200;
    for frame in [unknown_kind, cut_key, hello()] {
        let mut raw = Raw::admitted(&server);
        raw.write(&frame);
        assert!(raw.expect_dropped().is_invalid_argument());
    }
    let mut raw = Raw::open(&server);
    raw.write(&request(StoreRequest::Delete { key: "k".into() }, b""));
    assert!(raw.expect_dropped().is_invalid_argument());
    still_serves(&server);
}

#[test]
fn lies_about_ranks_and_worlds_are_answered_and_change_nothing() {
    let server = server(TcpLimits::default());
    let mut raw = Raw::admitted(&server);
    for (rank, world) in [(0, 0), (0, u32::MAX), (5, 5), (u32::MAX, 5)] {
        let gather = StoreRequest::AllGather { key: "g".into(), rank, world, wait_ms: u64::MAX };
        raw.write(&request(gather, b"x"));
        let Some((ToClient::Failed(kind), _)) = raw.read() else { panic!("no error reply") };
        assert!(Error::from_kind(kind).is_invalid_argument());
    }
    // The connection can still be used, and the longest possible wait overflows nothing.
    let gather = StoreRequest::AllGather { key: "g".into(), rank: 0, world: 2, wait_ms: u64::MAX };
    raw.write(&request(gather, b"x"));
    let store = TcpStore::connect(server.local_addr(), TcpOptions::default(), ample()).unwrap();
    assert_eq!(store.all_gather("g", 1, 2, b"y", ample()).unwrap().part(0), b"x");
    assert!(matches!(raw.read(), Some((ToClient::Gathered { .. }, _))));
}

#[test]
fn a_client_that_does_not_read_holds_nothing_up_and_is_dropped() {
    // There is room for two values, so a copy of the reply for each client would not fit.
    let limits = TcpLimits { max_memory: 2 * MAX_VALUE, ..impatient() };
    let server = server(limits);
    let store = TcpStore::connect(server.local_addr(), TcpOptions::default(), ample()).unwrap();
    store.set("k", &vec![1; MAX_VALUE], ample()).unwrap();
    let mut deaf: Vec<_> = (0..8).map(|_| Raw::admitted(&server)).collect();
    for raw in &mut deaf {
        for _ in 0..100 {
            raw.write(&request(get(), b""));
        }
    }
    assert_eq!(store.get("k", ample()).unwrap().len(), MAX_VALUE);
    still_serves(&server);
    for raw in deaf {
        // Reading to the end would read the reply.
        let mut hung_up = [PollFd::new(&raw.0, PollFlags::RDHUP)];
        let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
        assert_eq!(poll(&mut hung_up, Some(&limit)).unwrap(), 1, "still connected");
    }
    store.delete("k", ample()).unwrap();
    // Their replies are freed with their connections.
    store.set("k", &vec![2; MAX_VALUE], ample()).unwrap();
    still_serves(&server);
}

#[test]
fn announced_lengths_take_no_memory() {
    let limits = TcpLimits { max_memory: 1 << 20, ..TcpLimits::default() };
    let server = server(limits);
    let mut announcers: Vec<_> = (0..64).map(|_| Raw::admitted(&server)).collect();
    for raw in &mut announcers {
        raw.write(&wire::encode(&ToServer::Request(set()), MAX_VALUE));
    }
    let store = TcpStore::connect(server.local_addr(), TcpOptions::default(), ample()).unwrap();
    store.set("other", &[0; 512 << 10], ample()).unwrap();
    still_serves(&server);
}

#[test]
fn a_server_that_stops_answering_holds_nobody_past_the_deadline() {
    // A server that completes the handshake and sends nothing after it.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let mute = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let challenge =
            ToClient::Challenge { instance: [0; 16], nonce: [0; 32], secret_needed: false };
        stream.write_all(&wire::encode(&challenge, 0)).unwrap();
        stream.write_all(&wire::encode(&ToClient::Welcome { proof: None }, 0)).unwrap();
        // Open until the client closes the connection.
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let options = TcpOptions { hosted_by: Some(4), ..TcpOptions::default() };
    let store = TcpStore::connect(addr, options, ample()).unwrap();
    let begun = std::time::Instant::now();
    let error = store.get("k", Deadline::after(Duration::from_millis(50))).unwrap_err();
    assert!(error.is_timeout(), "{error}");
    assert_eq!(error.ranks(), [4]);
    assert!(begun.elapsed() < Duration::from_secs(30));
    mute.join().unwrap();
}

/// Frames as clients send them, which a test then damages.
fn frames() -> impl Strategy<Value = Vec<u8>> {
    let one = prop_oneof![
        Just(hello()),
        Just(request(set(), b"some value")),
        Just(request(StoreRequest::Get { key: "k".into(), wait_ms: 5 }, b"")),
        Just(request(StoreRequest::Add { key: "n".into(), delta: 3 }, b"")),
        (0..4u32, 0..4u32).prop_map(|(rank, world)| {
            request(StoreRequest::AllGather { key: "g".into(), rank, world, wait_ms: 5 }, b"part")
        }),
        proptest::collection::vec(any::<u8>(), 0..200),
    ];
    proptest::collection::vec(one, 1..4).prop_map(|frames| frames.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn spoilt_frames_do_not_harm_the_server(
        mut bytes in frames(),
        spoil in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in any::<prop::sample::Index>(),
        admitted in any::<bool>(),
    ) {
        let server = server(TcpLimits::default());
        for (at, byte) in spoil {
            let at = at.index(bytes.len().max(1));
            if let Some(spoilt) = bytes.get_mut(at) {
                *spoilt = byte;
            }
        }
        bytes.truncate(cut.index(bytes.len() + 1));
        let mut raw = if admitted { Raw::admitted(&server) } else { Raw::open(&server) };
        // The server may close at any point of this.
        let _ = raw.0.write_all(&bytes);
        let _ = raw.0.shutdown(std::net::Shutdown::Write);
        let _ = raw.0.read_to_end(&mut Vec::new());
        still_serves(&server);
    }
}
