//! State and decisions of the server, without any I/O or clock.
//!
//! The event loop passes it requests ([`ServerState::request`]), timeouts ([`ServerState::expire`]) and closed
//! connections ([`ServerState::disconnect`]), and sends the replies that collect in its outbox. A client has at
//! most one request at a time.
//!
//! Lost ranks: a client may declare its rank. When the last connection of a declared rank closes, every
//! gather in which a declared client takes part and which still needs that rank fails at once, and so does
//! every later one until the rank is declared again. Gathers of clients that declared no rank are not
//! affected, as they may number their ranks differently.
//!
//! The server announces which rank left first ([`ServerState::news`]). The rank that serves the store may leave because of it,
//! and the others then find the server gone, which cannot tell them any more.
//!
//! A store that serves one group ends together with it: after the first gather that was answered, a rank
//! that has left does not come back to this store. A client that declares it again belongs to the next
//! group, whose server has not replaced this one yet, and gets the reply to try again.

use std::collections::{BTreeMap, BTreeSet, btree_map};
use std::time::Duration;

use super::meter::{Charge, Meter, MeteredPayload};
use super::wire::{self, Identity, StoreRequest, ToClient};
use crate::store::gathered::runs;
use crate::store::gathering::Gathering;
use crate::store::{MAX_WORLD, check_gather, check_limits, counter_sum};
use crate::{Error, Result};

/// A connection, as the event loop numbers them.
pub(super) type Client = u64;

/// Cost of an entry in addition to its key and value, in bytes.
const ENTRY: usize = 256;

/// Cost of a rank in a gather in addition to its part, in bytes: equal parts are held once, their ranks are not.
const RANK: usize = 64;

/// Whether a client may take part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    Granted,
    /// Not yet; why. The client may try again.
    Later(String),
}

/// A reply ready to be sent; clones share the bytes.
#[derive(Clone, Debug)]
pub(super) struct Frame {
    /// Header and head.
    pub(super) head: MeteredPayload,
    pub(super) tail: Option<MeteredPayload>,
}

/// The store's content and those who wait for it.
#[derive(Debug)]
pub(super) struct ServerState {
    meter: Meter,
    values: BTreeMap<String, StoreEntry>,
    getters: BTreeMap<String, BTreeSet<Client>>,
    gathers: BTreeMap<String, Gather>,
    clients: BTreeMap<Client, Member>,
    /// Declared ranks with a live connection: their session and number of connections.
    live: BTreeMap<u32, ([u8; 16], usize)>,
    /// Declared ranks whose connections have all closed, and the session that each had.
    lost: BTreeMap<u32, [u8; 16]>,
    /// Lost ranks in the order in which they left.
    left: Vec<u32>,
    /// Which of them was the first at the last call of [`news`](ServerState::news).
    announced: Option<u32>,
    /// Whether the store serves one group only.
    one_group: bool,
    /// Whether ranks of that group have met: a gather of declared ranks was answered.
    met: bool,
    outbox: Vec<(Client, Frame)>,
}

#[derive(Debug)]
struct StoreEntry {
    value: MeteredPayload,
    _room: Charge,
}

#[derive(Debug)]
struct Gather {
    gathering: Gathering<MeteredPayload>,
    /// Who waits, and as which rank.
    waiting: BTreeMap<Client, u32>,
    /// Whether a client that declared its rank takes part.
    declared: bool,
    room: Charge,
}

#[derive(Debug, Default)]
struct Member {
    rank: Option<u32>,
    wait: Option<Wait>,
}

#[derive(Debug)]
enum Wait {
    Key { key: String, budget: Duration },
    Gather { key: String, budget: Duration },
}

impl ServerState {
    pub(super) fn new(meter: Meter) -> Self {
        Self {
            meter,
            values: BTreeMap::new(),
            getters: BTreeMap::new(),
            gathers: BTreeMap::new(),
            clients: BTreeMap::new(),
            live: BTreeMap::new(),
            lost: BTreeMap::new(),
            left: Vec::new(),
            announced: None,
            one_group: false,
            met: false,
            outbox: Vec::new(),
        }
    }

    /// Returns this store, for one group.
    pub(super) fn for_one_group(mut self) -> Self {
        self.one_group = true;
        self
    }

    /// Admits a client, or says why not.
    pub(super) fn connect(
        &mut self,
        client: Client,
        identity: Option<Identity>,
    ) -> Result<Admission> {
        if let Some(Identity { rank, session }) = identity {
            if rank >= MAX_WORLD {
                return Err(Error::invalid_argument(format!(
                    "rank {rank} declared to the store; ranks are below {MAX_WORLD}"
                )));
            }
            if self.one_group && self.met && self.lost.get(&rank).is_some_and(|of| *of != session) {
                return Ok(Admission::Later(format!(
                    "rank {rank} has left the group that is served there, and the server of the \
                     next has not taken its place yet"
                )));
            }
            let (of, connections) = self.live.entry(rank).or_insert((session, 0));
            if *of != session {
                return Err(Error::refused(format!(
                    "two ranks with number {rank}: another client of the store has declared it \
                     and is still connected; give every process its own RANK"
                )));
            }
            *connections += 1;
            if self.lost.remove(&rank).is_some() {
                self.left.retain(|left| *left != rank);
                // Gathers that failed because the rank was missing may be tried again.
                self.gathers.retain(|_, gather| !gather.gathering.failed_without(rank));
            }
        }
        let rank = identity.map(|identity| identity.rank);
        self.clients.insert(client, Member { rank, wait: None });
        Ok(Admission::Granted)
    }

    /// Serves a request, now or as soon as it can be answered. `tail` is an error when there was no room
    /// for the value.
    pub(super) fn request(
        &mut self,
        client: Client,
        request: StoreRequest,
        tail: Result<MeteredPayload>,
    ) {
        let reply = match request {
            StoreRequest::Set { key } => {
                self.set(&key, tail).map(|()| Some((ToClient::Done, None)))
            }
            StoreRequest::Get { key, wait_ms } => {
                self.get(client, key, Duration::from_millis(wait_ms))
            }
            StoreRequest::Add { key, delta } => {
                self.add(&key, delta).map(|sum| Some((ToClient::Sum(sum), None)))
            }
            StoreRequest::Delete { key } => check_limits(&key, &[])
                .map(|()| Some((ToClient::Deleted(self.values.remove(&key).is_some()), None))),
            StoreRequest::AllGather { key, rank, world, wait_ms } => {
                let budget = Duration::from_millis(wait_ms);
                self.gather(client, &key, rank, world, tail, budget).map(|()| None)
            }
        };
        match reply {
            Ok(Some((message, tail))) => self.reply(client, &message, tail),
            Ok(None) => {}
            Err(error) => self.reply_error(client, &error),
        }
    }

    /// Ends `client`'s wait with a timeout. A part it had in a gather is taken back.
    pub(super) fn expire(&mut self, client: Client) {
        let Some((wait, missing)) = self.end_wait(client) else { return };
        let error = match wait {
            Wait::Key { key, budget } => {
                Error::timeout(format!("waiting for the store's key {key:?}"), budget, missing)
            }
            Wait::Gather { key, budget } => {
                Error::timeout(format!("in all_gather {key:?}"), budget, missing)
            }
        };
        self.reply_error(client, &error);
    }

    /// Ends `client`'s wait at its own request, if it still waits. A part it had in a gather is taken back.
    pub(super) fn cancel(&mut self, client: Client) {
        if let Some((_, missing)) = self.end_wait(client) {
            self.reply(client, &ToClient::Cancelled { missing }, None);
        }
    }

    /// Ends a wait; returns what `client` waited for, and the ranks that are missing there.
    fn end_wait(&mut self, client: Client) -> Option<(Wait, Vec<u32>)> {
        let wait = self.clients.get_mut(&client)?.wait.take()?;
        let mut missing = Vec::new();
        match &wait {
            Wait::Key { key, .. } => self.forget_getter(client, key),
            Wait::Gather { key, .. } => {
                if let Some(gather) = self.gathers.get_mut(key) {
                    self.met |= gather.declared;
                    missing = gather.gathering.missing();
                    if let Some(rank) = gather.waiting.remove(&client) {
                        gather.gathering.leave(rank);
                    }
                    if gather.gathering.is_spent() {
                        self.gathers.remove(key);
                    }
                }
            }
        }
        Some((wait, missing))
    }

    /// Forgets a client whose connection closed. Its part in a gather stays.
    pub(super) fn disconnect(&mut self, client: Client) {
        let Some(member) = self.clients.remove(&client) else { return };
        match member.wait {
            Some(Wait::Key { key, .. }) => self.forget_getter(client, &key),
            Some(Wait::Gather { key, .. }) => {
                if let Some(gather) = self.gathers.get_mut(&key) {
                    gather.waiting.remove(&client);
                }
            }
            None => {}
        }
        let Some(rank) = member.rank else { return };
        let Some((session, connections)) = self.live.get_mut(&rank) else { return };
        *connections -= 1;
        if *connections > 0 {
            return;
        }
        let session = *session;
        self.live.remove(&rank);
        self.lost.insert(rank, session);
        self.left.push(rank);
        let stuck: Vec<String> = self
            .gathers
            .iter()
            .filter(|(_, gather)| !gather.lost_ranks(&self.lost).is_empty())
            .map(|(key, _)| key.clone())
            .collect();
        for key in stuck {
            self.fail_if_lost(&key);
        }
    }

    /// Whether `client` waits for something.
    pub(super) fn is_waiting(&self, client: Client) -> bool {
        self.clients.get(&client).is_some_and(|member| member.wait.is_some())
    }

    /// The first of the ranks that have left and not come back.
    pub(super) fn first_left(&self) -> Option<u32> {
        self.left.first().copied()
    }

    /// [`first_left`](ServerState::first_left), if it has changed since the last call.
    pub(super) fn news(&mut self) -> Option<Option<u32>> {
        let first = self.first_left();
        (std::mem::replace(&mut self.announced, first) != first).then_some(first)
    }

    /// The replies since the last call.
    pub(super) fn take_replies(&mut self) -> Vec<(Client, Frame)> {
        std::mem::take(&mut self.outbox)
    }

    /// The frame of a message, also for replies of the event loop itself.
    pub(super) fn frame(&self, message: &ToClient, tail: Option<MeteredPayload>) -> Frame {
        let bytes = wire::encode(message, tail.as_ref().map_or(0, |tail| tail.as_ref().len()));
        let charge = self.meter.charge_reply(bytes.len());
        Frame { head: MeteredPayload::new(bytes, charge), tail }
    }

    fn reply(&mut self, client: Client, message: &ToClient, tail: Option<MeteredPayload>) {
        let frame = self.frame(message, tail);
        self.outbox.push((client, frame));
    }

    fn reply_error(&mut self, client: Client, error: &Error) {
        self.reply(client, &ToClient::Failed(error.kind().clone()), None);
    }

    fn set(&mut self, key: &str, value: Result<MeteredPayload>) -> Result<()> {
        let value = value?;
        check_limits(key, value.as_ref())?;
        match self.values.get_mut(key) {
            Some(entry) => entry.value = value.clone(),
            None => {
                let room = self.meter.charge(ENTRY + key.len())?;
                let entry = StoreEntry { value: value.clone(), _room: room };
                self.values.insert(key.to_owned(), entry);
            }
        }
        for client in self.getters.remove(key).unwrap_or_default() {
            if let Some(member) = self.clients.get_mut(&client) {
                member.wait = None;
            }
            self.reply(client, &ToClient::Value, Some(value.clone()));
        }
        Ok(())
    }

    fn get(
        &mut self,
        client: Client,
        key: String,
        budget: Duration,
    ) -> Result<Option<(ToClient, Option<MeteredPayload>)>> {
        check_limits(&key, &[])?;
        if let Some(entry) = self.values.get(&key) {
            return Ok(Some((ToClient::Value, Some(entry.value.clone()))));
        }
        if let Some(member) = self.clients.get_mut(&client) {
            self.getters.entry(key.clone()).or_default().insert(client);
            member.wait = Some(Wait::Key { key, budget });
        }
        Ok(None)
    }

    fn forget_getter(&mut self, client: Client, key: &str) {
        if let Some(getters) = self.getters.get_mut(key) {
            getters.remove(&client);
            if getters.is_empty() {
                self.getters.remove(key);
            }
        }
    }

    fn add(&mut self, key: &str, delta: i64) -> Result<i64> {
        check_limits(key, &[])?;
        let old = self.values.get(key).map(|entry| entry.value.as_ref());
        let sum = counter_sum(key, old, delta)?;
        let text = sum.to_string().into_bytes();
        let charge = self.meter.charge(text.len())?;
        self.set(key, Ok(MeteredPayload::new(text, charge)))?;
        Ok(sum)
    }

    /// Takes `client`'s part in a gather, which is answered once all parts are there or cannot come.
    /// An error is the answer to this client; if the gather has failed, those who wait have been answered.
    fn gather(
        &mut self,
        client: Client,
        key: &str,
        rank: u32,
        world: u32,
        part: Result<MeteredPayload>,
        budget: Duration,
    ) -> Result<()> {
        check_gather(key, rank, world, part.as_ref().map_or(&[], AsRef::as_ref))?;
        let Some(member) = self.clients.get_mut(&client) else { return Ok(()) };
        member.may_gather_as(rank, key)?;
        let gather = match self.gathers.entry(key.to_owned()) {
            btree_map::Entry::Occupied(under_way) => under_way.into_mut(),
            btree_map::Entry::Vacant(place) => {
                place.insert(Gather::new(world, self.meter.charge(ENTRY + key.len())?))
            }
        };
        gather.declared |= member.rank.is_some();
        let part = part.and_then(|part| {
            let cost = if gather.gathering.knows(rank) { 0 } else { RANK };
            gather.room.grow(cost).map(|()| part)
        });
        let arrived = match part {
            Ok(part) => gather.gathering.arrive(key, rank, world, part),
            Err(error) => Err(gather.gathering.arrive_broken(&error)),
        };
        let complete = match arrived {
            Ok(complete) => complete,
            Err(error) => {
                self.answer_failure(key, &error);
                return Err(error);
            }
        };
        gather.waiting.insert(client, rank);
        member.wait = Some(Wait::Gather { key: key.to_owned(), budget });
        if complete {
            self.complete(key);
        } else {
            self.fail_if_lost(key);
        }
        Ok(())
    }

    /// Answers all clients of a gather that has all its parts, with one frame, and forgets the gather.
    fn complete(&mut self, key: &str) {
        let Some(gather) = self.gathers.remove(key) else { return };
        self.met |= gather.declared;
        let (distinct, which) = gather.gathering.finish();
        let length =
            |part: &MeteredPayload| u32::try_from(part.as_ref().len()).expect("capped by wire");
        let message = ToClient::Gathered {
            lengths: distinct.iter().map(length).collect(),
            runs: runs(&which),
        };
        let tail = match &distinct[..] {
            [one] => one.clone(),
            parts => {
                let bytes = parts.iter().map(AsRef::as_ref).collect::<Vec<&[u8]>>().concat();
                let charge = self.meter.charge_reply(bytes.len());
                MeteredPayload::new(bytes, charge)
            }
        };
        self.answer_all(gather.waiting, &message, Some(tail));
    }

    /// Fails the gather under `key` if it needs a rank that is gone.
    fn fail_if_lost(&mut self, key: &str) {
        let Some(gather) = self.gathers.get_mut(key) else { return };
        let lost = gather.lost_ranks(&self.lost);
        if lost.is_empty() {
            return;
        }
        let error = Error::peer_lost(
            lost,
            format!("disconnected from the store without a part in all_gather {key:?}"),
        );
        // The failure is kept for ranks that still come: ranks that received it leave as well, and would
        // then look like the lost ones.
        gather.gathering.lose(&error);
        self.answer_failure(key, &error);
    }

    /// Answers all clients that wait in a gather with its failure, and forgets the gather once every rank
    /// has received it.
    fn answer_failure(&mut self, key: &str, error: &Error) {
        let Some(gather) = self.gathers.get_mut(key) else { return };
        self.met |= gather.declared;
        let waiting = std::mem::take(&mut gather.waiting);
        if gather.gathering.is_spent() {
            self.gathers.remove(key);
        }
        self.answer_all(waiting, &ToClient::Failed(error.kind().clone()), None);
    }

    /// One frame for many clients.
    fn answer_all(
        &mut self,
        waiting: BTreeMap<Client, u32>,
        message: &ToClient,
        tail: Option<MeteredPayload>,
    ) {
        let frame = self.frame(message, tail);
        for client in waiting.into_keys() {
            if let Some(member) = self.clients.get_mut(&client) {
                member.wait = None;
            }
            self.outbox.push((client, frame.clone()));
        }
    }

    /// Values, waited-for keys and gathers under way.
    #[cfg(test)]
    pub(super) fn entries(&self) -> (usize, usize, usize) {
        (self.values.len(), self.getters.len(), self.gathers.len())
    }
}

impl Member {
    /// A client that has declared a rank gathers as that rank only, because its loss is reported by it.
    fn may_gather_as(&self, rank: u32, key: &str) -> Result<()> {
        match self.rank {
            Some(declared) if declared != rank => Err(Error::invalid_argument(format!(
                "all_gather {key:?} as rank {rank} through a store connection declared as rank \
                 {declared}; groups that number their ranks anew need a connection that declares \
                 none"
            ))),
            _ => Ok(()),
        }
    }
}

impl Gather {
    fn new(world: u32, room: Charge) -> Self {
        let gathering = Gathering::new(world);
        Self { gathering, waiting: BTreeMap::new(), declared: false, room }
    }

    /// Those of `lost` that this gather still needs.
    fn lost_ranks(&self, lost: &BTreeMap<u32, [u8; 16]>) -> Vec<u32> {
        if !self.declared || self.gathering.failed() {
            return Vec::new();
        }
        // Ranks that stopped waiting may leave.
        self.gathering.missing_of(lost.keys().copied())
    }
}

#[cfg(test)]
#[path = "server_state_tests.rs"]
mod tests;
