//! Both ends of a connection without sockets, for fuzz targets: what clients send to a server, beside a naive store that
//! says what they must get, and what a server sends to a client.

use std::collections::{BTreeMap, BTreeSet};

use super::client::unpack;
use super::frame_io::{Incoming, Input};
use super::meter::{Meter, MeteredPayload};
use super::server_state::{Admission, Client, ServerState};
use super::wire::{self, Caps, HEADER, Identity, StoreRequest, ToClient, ToServer, decode_header};
use crate::Result;
use crate::store::{MAX_WORLD, check_gather, check_limits};

/// Step of a session of several clients with one server.
#[derive(Clone, Debug)]
pub enum StoreStep {
    /// Any bytes on a client's connection.
    Bytes(Vec<u8>),
    /// A frame with these lengths in its header, where they differ from those of the bytes behind it.
    Framed(Vec<u8>, Option<u32>, Option<u32>),
    /// `Store::set`.
    Set(String, Vec<u8>),
    /// `Store::get`.
    Get(String),
    /// `Store::add`.
    Add(String, i64),
    /// `Store::delete`.
    Delete(String),
    /// `Store::all_gather` as a rank of a world.
    Gather(String, u32, u32, Vec<u8>),
    /// The client no longer waits.
    Cancel,
    /// The client's deadline has passed.
    Expire,
    /// The connection ends, and another one begins, on which the client declares this rank.
    Reconnect(Option<u32>),
}

/// Runs the steps of a session, each by the client with this number. Panics if a client gets a reply that it must not get,
/// or the server's account of its memory is wrong.
pub fn store_session(clients: u64, max_memory: usize, steps: &[(u64, StoreStep)]) {
    let mut session = Session::new(clients, max_memory);
    for (client, step) in steps {
        session.step(client % clients, step);
    }
    session.end(clients);
}

/// Reads a server's bytes as a client does: they are a reply, or refused.
pub fn store_reply(bytes: &[u8], world: u32) {
    let Some((header, rest)) = bytes.split_first_chunk::<HEADER>() else { return };
    let Ok(lengths) = decode_header(header, Caps::REPLY) else { return };
    let Some((head, tail)) = rest.split_at_checked(lengths.head) else { return };
    let Ok(ToClient::Gathered { lengths, runs }) = wire::decode(head) else { return };
    let world = world.clamp(1, MAX_WORLD);
    if let Some(gathered) = unpack(&lengths, &runs, tail, world) {
        assert_eq!(gathered.parts().len(), world as usize);
        let held: usize = gathered.distinct().iter().map(|part| part.len()).sum();
        assert_eq!(held, tail.len(), "every byte belongs to one part");
    }
}

/// A naive store, and what it takes to compare one with the server.
struct Session {
    meter: Meter,
    state: ServerState,
    incoming: BTreeMap<Client, Incoming>,
    max_memory: usize,
    values: BTreeMap<String, Vec<u8>>,
    /// Clients that wait for a key.
    getters: BTreeMap<Client, String>,
    /// Every part that was brought to a gather, by its key and rank.
    brought: BTreeMap<(String, u32), BTreeSet<Vec<u8>>>,
    /// Clients that wait in a gather: its key and world.
    gathering: BTreeMap<Client, (String, u32)>,
}

impl Session {
    fn new(clients: u64, max_memory: usize) -> Self {
        let meter = Meter::new(max_memory);
        let mut session = Self {
            state: ServerState::new(meter.clone()),
            meter,
            incoming: BTreeMap::new(),
            max_memory,
            values: BTreeMap::new(),
            getters: BTreeMap::new(),
            brought: BTreeMap::new(),
            gathering: BTreeMap::new(),
        };
        (0..clients).for_each(|client| session.connect(client, None));
        session
    }

    fn connect(&mut self, client: Client, rank: Option<u32>) {
        let identity = rank.map(|rank| Identity { rank, session: [client as u8; 16] });
        if !matches!(self.state.connect(client, identity), Ok(Admission::Granted)) {
            assert!(rank.is_some(), "who declares no rank is admitted");
            assert!(self.state.connect(client, None).is_ok());
        }
        self.incoming.insert(client, Incoming::default());
    }

    fn disconnect(&mut self, client: Client) {
        self.state.disconnect(client);
        self.getters.remove(&client);
        self.gathering.remove(&client);
        self.incoming.remove(&client);
    }

    fn step(&mut self, client: Client, step: &StoreStep) {
        let request = |request, tail: &[u8]| framed(&ToServer::Request(request), tail);
        let bytes = match step {
            StoreStep::Bytes(bytes) => bytes.clone(),
            StoreStep::Framed(bytes, head, tail) => {
                let mut frame = framed(&ToServer::Cancel, bytes);
                for (at, length) in [(8, head), (12, tail)] {
                    if let Some(length) = length {
                        frame[at..at + 4].copy_from_slice(&length.to_le_bytes());
                    }
                }
                frame
            }
            StoreStep::Set(key, value) => request(StoreRequest::Set { key: key.clone() }, value),
            StoreStep::Get(key) => request(StoreRequest::Get { key: key.clone(), wait_ms: 9 }, &[]),
            StoreStep::Add(key, delta) => {
                request(StoreRequest::Add { key: key.clone(), delta: *delta }, &[])
            }
            StoreStep::Delete(key) => request(StoreRequest::Delete { key: key.clone() }, &[]),
            StoreStep::Gather(key, rank, world, part) => {
                let (key, rank, world) = (key.clone(), *rank, *world);
                request(StoreRequest::AllGather { key, rank, world, wait_ms: 9 }, part)
            }
            StoreStep::Cancel => framed(&ToServer::Cancel, &[]),
            StoreStep::Expire => {
                self.state.expire(client);
                self.getters.remove(&client);
                self.gathering.remove(&client);
                return self.check_replies(&[], Some(client));
            }
            StoreStep::Reconnect(rank) => {
                self.disconnect(client);
                self.connect(client, *rank);
                return self.check_replies(&[], None);
            }
        };
        self.receive(client, &bytes);
    }

    /// Reads bytes as the server's thread does.
    fn receive(&mut self, client: Client, mut bytes: &[u8]) {
        loop {
            let Some(incoming) = self.incoming.get_mut(&client) else { return };
            match incoming.read(&mut bytes, &self.meter, Caps::REQUEST) {
                Input::Frame(head, tail) => match wire::decode(&head) {
                    Ok(ToServer::Request(request)) if !self.state.is_waiting(client) => {
                        self.serve(client, request, tail);
                    }
                    Ok(ToServer::Cancel) => {
                        self.state.cancel(client);
                        self.getters.remove(&client);
                        self.gathering.remove(&client);
                        self.check_replies(&[], Some(client));
                    }
                    _ => return self.drop_client(client),
                },
                Input::Broken(_) => return self.drop_client(client),
                Input::Partial(true) => {}
                // A socket that has nothing more to read is not closed, so the next bytes continue the frame.
                Input::Partial(false) | Input::Closed => return,
            }
        }
    }

    fn drop_client(&mut self, client: Client) {
        self.disconnect(client);
        self.connect(client, None);
        self.check_replies(&[], None);
    }

    fn serve(&mut self, client: Client, request: StoreRequest, tail: Result<MeteredPayload>) {
        let value = tail.as_ref().ok().map(|tail| tail.as_ref().to_vec());
        let mut expected: Vec<(Client, Option<Vec<u8>>)> = Vec::new();
        match &request {
            StoreRequest::Set { key } => {
                if let Some(value) = value
                    && check_limits(key, &value).is_ok()
                {
                    self.now_is(client, key, value, &mut expected);
                }
            }
            StoreRequest::Get { key, .. } if check_limits(key, &[]).is_ok() => {
                match self.values.get(key) {
                    Some(value) => expected.push((client, Some(value.clone()))),
                    None => drop(self.getters.insert(client, key.clone())),
                }
            }
            StoreRequest::Add { key, delta } if check_limits(key, &[]).is_ok() => {
                let old = self.values.get(key).map_or(Some(0), |old| {
                    std::str::from_utf8(old).ok().and_then(|text| text.parse::<i64>().ok())
                });
                if let Some(sum) = old.and_then(|old| old.checked_add(*delta)) {
                    self.now_is(client, key, sum.to_string().into_bytes(), &mut expected);
                }
            }
            StoreRequest::Delete { key } => drop(self.values.remove(key)),
            StoreRequest::AllGather { key, rank, world, .. } => {
                if let Some(value) = value
                    && check_gather(key, *rank, *world, &value).is_ok()
                {
                    self.brought.entry((key.clone(), *rank)).or_default().insert(value);
                    self.gathering.insert(client, (key.clone(), *world));
                }
            }
            _ => {}
        }
        self.state.request(client, request, tail);
        self.check_replies(&expected, Some(client));
    }

    /// Notes a value, and who gets it. The server may refuse a value for which there may be no room.
    fn now_is(
        &mut self,
        client: Client,
        key: &str,
        value: Vec<u8>,
        expected: &mut Vec<(Client, Option<Vec<u8>>)>,
    ) {
        if self.meter.held() + key.len() + value.len() + 1024 > self.max_memory {
            return;
        }
        let waiting: Vec<Client> =
            self.getters.extract_if(.., |_, waited| waited == key).map(|(who, _)| who).collect();
        expected.extend(waiting.into_iter().map(|who| (who, Some(value.clone()))));
        expected.push((client, None));
        self.values.insert(key.to_owned(), value);
    }

    /// Compares replies with those that are `expected`, of which each is a value or none. `asked` may get errors too.
    fn check_replies(&mut self, expected: &[(Client, Option<Vec<u8>>)], asked: Option<Client>) {
        let mut expected = expected.to_vec();
        for (client, frame) in self.state.take_replies() {
            let message: ToClient = wire::decode(&frame.head.as_ref()[HEADER..]).expect("a reply");
            let tail = frame.tail.as_ref().map_or(&[][..], AsRef::as_ref);
            assert!(!self.state.is_waiting(client), "who waits has no reply");
            let at = expected.iter().position(|(who, _)| *who == client);
            match message {
                ToClient::Value => {
                    let value = match at {
                        Some(at) => expected.swap_remove(at).1.expect("a value"),
                        // The server had room where this session left it open.
                        None => self.learn(client, tail),
                    };
                    assert_eq!(value, tail);
                }
                ToClient::Done | ToClient::Sum(_) => {
                    if let Some(at) = at {
                        assert!(expected.swap_remove(at).1.is_none());
                    }
                }
                ToClient::Gathered { lengths, runs } => {
                    let (key, world) = self.gathering.remove(&client).expect("it gathers");
                    let gathered = unpack(&lengths, &runs, tail, world).expect("a whole reply");
                    for (part, rank) in gathered.parts().zip(0..) {
                        assert!(self.brought[&(key.clone(), rank)].contains(part));
                    }
                }
                ToClient::Failed(_) => {
                    let gathered = self.gathering.remove(&client).is_some();
                    assert!(
                        gathered || asked == Some(client),
                        "an error for one who asked nothing"
                    );
                    assert!(at.is_none(), "an error in place of a reply");
                }
                ToClient::Deleted(_) | ToClient::Cancelled { .. } => {
                    assert_eq!(asked, Some(client));
                }
                other => panic!("no reply of a server's state: {other:?}"),
            }
        }
        assert!(expected.is_empty(), "no reply for {expected:?}");
        assert!(self.meter.held() <= 2 * self.max_memory, "{} bytes", self.meter.held());
    }

    /// Takes over a value of which this session did not know whether there was room for it.
    fn learn(&mut self, client: Client, tail: &[u8]) -> Vec<u8> {
        if let Some(key) = self.getters.remove(&client) {
            self.values.insert(key, tail.to_vec());
        }
        tail.to_vec()
    }

    /// Nothing is held for clients that have left, but values and parts.
    fn end(mut self, clients: u64) {
        (0..clients).for_each(|client| self.disconnect(client));
        self.check_replies(&[], None);
        drop(self.state);
        assert_eq!(self.meter.held(), 0, "all memory is counted, and given back");
    }
}

fn framed(message: &ToServer, tail: &[u8]) -> Vec<u8> {
    let mut frame = wire::encode(message, tail.len());
    frame.extend_from_slice(tail);
    frame
}
