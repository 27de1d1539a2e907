//! State of a mailbox's messages, and the functions that move them on. Nothing here waits.

#![allow(unsafe_code)] // copies between callers' memory and segments

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use symmpool_allocator::{Dialled, Error, PairAddress, PairListener, PairSocket, Result};

use super::operation::BegunMessage;
use super::peer::{MailboxPeer, PairLink, PassingMessage, Queued, Unexpected};
use super::segment::{EntryHeader, EntryKind, RingSegment, before_sleep};
use crate::call::p2p::{Afterwards, Direction, Payload, payloads_differ};
use crate::signal::Native;

/// Messages up to this length are sent whole, wherever the receiver is.
pub(super) const WHOLE: u64 = 1 << 16;
/// Bytes of whole messages that one rank may have sent to another one which has not received them. Beyond that
/// messages of any length wait at the sender until they are received.
pub(super) const UNRECEIVED: u64 = 1 << 22;

/// The state of a mailbox, under its lock.
pub(super) struct MailboxState {
    pub(super) rank: u32,
    /// `None` once the mailbox has ended, so that who connects sees that nobody is there.
    listener: Option<Arc<PairListener>>,
    /// Empty until the mailbox is connected.
    pub(super) addresses: Vec<PairAddress>,
    peers: Vec<MailboxPeer>,
    /// Receives that wait for their message, in the order of their calls.
    pub(super) posted: VecDeque<Arc<BegunMessage>>,
    pub(super) arrivals: u64,
    /// Why the mailbox takes no more calls.
    pub(super) ended: Option<Error>,
    /// Whether a thread moves on what nobody waits for.
    pub(super) has_thread: bool,
    /// Whether a peer has ever refused what it was sent whole.
    has_reports: Arc<AtomicBool>,
}

impl MailboxState {
    pub(super) fn new(
        rank: u32,
        world: u32,
        listener: PairListener,
        has_reports: Arc<AtomicBool>,
    ) -> Self {
        Self {
            rank,
            listener: Some(Arc::new(listener)),
            addresses: Vec::new(),
            peers: (0..world).map(|_| MailboxPeer::default()).collect(),
            posted: VecDeque::new(),
            arrivals: 0,
            ended: None,
            has_thread: false,
            has_reports,
        }
    }

    /// All ranks but this one.
    fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let me = self.rank;
        (0..self.peers.len() as u32).filter(move |peer| *peer != me)
    }

    pub(super) fn peer(&mut self, rank: u32) -> &mut MailboxPeer {
        &mut self.peers[rank as usize]
    }

    pub(super) fn listener(&self) -> Option<Arc<PairListener>> {
        self.listener.clone()
    }

    /// The connections that wake this rank.
    pub(super) fn sockets(&self) -> Vec<Arc<PairSocket>> {
        let links = self.peers.iter().flat_map(|peer| [&peer.outgoing, &peer.incoming]);
        links.flatten().map(|link| Arc::clone(&link.socket)).collect()
    }

    /// Whether messages wait for something.
    pub(super) fn is_busy(&self) -> bool {
        !self.posted.is_empty()
            || self.peers.iter().any(|peer| {
                !(peer.queue.is_empty()
                    && peer.offered.is_empty()
                    && peer.streams.is_empty()
                    && peer.awaited.is_empty())
            })
    }

    /// Whether bytes of large messages are passing.
    pub(super) fn is_passing(&self) -> bool {
        self.peers.iter().any(|peer| !peer.streams.is_empty() || !peer.awaited.is_empty())
    }

    /// Begins a message.
    pub(super) fn begin(&mut self, op: &Arc<BegunMessage>) -> Result<()> {
        if let Some(error) = &self.ended {
            return Err(error.clone());
        }
        match op.direction {
            _ if op.peer == Some(self.rank) => {
                self.begin_own(op);
                Ok(())
            }
            Direction::Send => self.begin_send(op),
            Direction::Receive => self.begin_receive(op),
        }
    }

    fn begin_send(&mut self, op: &Arc<BegunMessage>) -> Result<()> {
        let rank = op.peer.expect("a send has a receiver");
        self.connect(rank)?;
        let bytes = op.payload.bytes();
        let peer = self.peer(rank);
        peer.sent += 1;
        let released = peer.outgoing.as_ref().map_or(0, |link| link.segment.released());
        let unreceived = peer.sent_whole.wrapping_sub(released).saturating_add(bytes);
        let is_whole = bytes <= WHOLE && unreceived <= UNRECEIVED;
        let (number, tag, payload) = (peer.sent, op.tag, op.payload.word());
        let (kind, bytes) =
            if is_whole { (EntryKind::Whole, bytes) } else { (EntryKind::Offer, 0) };
        let entry = EntryHeader { kind, number, tag, payload, bytes };
        if is_whole {
            peer.sent_whole = peer.sent_whole.wrapping_add(bytes);
            peer.queue.push_back(Queued { entry, op: Some(Arc::clone(op)) });
        } else {
            peer.offered.insert(number, Arc::clone(op));
            peer.queue.push_back(Queued { entry, op: None });
        }
        peer.write();
        Ok(())
    }

    fn begin_receive(&mut self, op: &Arc<BegunMessage>) -> Result<()> {
        let from: Vec<u32> = op.peer.map_or_else(|| self.others().collect(), |peer| vec![peer]);
        let (mut lost, mut is_unknown) = (None, false);
        for rank in &from {
            // The connection shows this rank that the other one has ended.
            lost = lost.or(self.connect(*rank).err());
            is_unknown |= self.peer(*rank).incoming.is_none();
        }
        if is_unknown {
            self.accept();
        }
        self.advance();
        let found = from
            .iter()
            .filter_map(|rank| {
                let waiting = &self.peers[*rank as usize].unexpected;
                let at = waiting.iter().position(|message| message.tag == op.tag)?;
                Some((waiting[at].arrival, *rank, at))
            })
            .min();
        if let Some((_, rank, at)) = found {
            let message = self.peer(rank).unexpected.remove(at).expect("found there");
            let data = message.data.as_deref().map_or(std::ptr::null(), <[u8]>::as_ptr);
            // SAFETY: `data` is null, or the data of a message that came whole, which has as many bytes as its
            // payload says.
            unsafe { self.receive(op, rank, &message, data) };
            self.peer(rank).write();
            return Ok(());
        }
        match lost {
            Some(error) if self.is_hopeless(op) => Err(error),
            _ => {
                self.posted.push_back(Arc::clone(op));
                Ok(())
            }
        }
    }

    /// Whether no rank is left that could send what a receive waits for.
    fn is_hopeless(&self, op: &BegunMessage) -> bool {
        let is_lost = |rank: u32| self.peers[rank as usize].lost.is_some();
        op.peer.map_or_else(|| self.others().all(is_lost), is_lost)
    }

    /// Gives a message to its receive: copies its bytes, or asks for them, or refuses it where it is not what is
    /// expected.
    ///
    /// # Safety
    ///
    /// If `message` has data or comes whole, `data` is readable for the bytes of its payload.
    unsafe fn receive(
        &mut self,
        op: &Arc<BegunMessage>,
        rank: u32,
        message: &Unexpected,
        data: *const u8,
    ) {
        let (me, sent) = (self.rank, Payload::from_word(message.payload));
        let is_whole = !data.is_null();
        let peer = self.peer(rank);
        if is_whole && let Some(link) = &peer.incoming {
            link.segment.release(sent.bytes());
        }
        if sent != op.payload {
            let (tag, payload) = (sent.word(), op.payload.word());
            let kind = if is_whole { EntryKind::Refusal } else { EntryKind::Decline };
            peer.say(EntryHeader { tag, payload, ..EntryHeader::about(kind, message.number) });
            let payloads = (sent, op.payload);
            op.finish(Err(payloads_differ(me, (rank, me), payloads, Afterwards::UsableGroup)));
        } else if is_whole {
            // SAFETY: the caller promised that `data` is readable for the message's payload, which the operation's is
            // as well; whoever began the operation promised that its memory is writable for that.
            unsafe { std::ptr::copy_nonoverlapping(data, op.memory(), sent.bytes() as usize) };
            op.finish(Ok(rank));
        } else {
            peer.say(EntryHeader::about(EntryKind::Want, message.number));
            let (op, number) = (Arc::clone(op), message.number);
            peer.awaited.push_back(PassingMessage { op, number, passed: 0 });
        }
    }

    /// Moves on whatever can be moved. Returns whether anything was.
    pub(super) fn advance(&mut self) -> bool {
        let mut has_moved = false;
        for rank in self.others() {
            if self.peer(rank).lost.is_some() {
                continue;
            }
            match self.take_in(rank) {
                Ok(moved) => has_moved |= moved,
                Err(error) => {
                    self.lose(rank, &error.naming([rank]));
                    has_moved = true;
                    continue;
                }
            }
            let peer = self.peer(rank);
            if !peer.queue.is_empty() || !peer.streams.is_empty() {
                if peer.outgoing.is_none() {
                    // Why it is lost is the error of its messages.
                    let _ = self.connect(rank);
                }
                has_moved |= self.peer(rank).write();
            }
        }
        has_moved
    }

    /// Takes what a rank has sent. Returns whether there was anything.
    fn take_in(&mut self, rank: u32) -> Result<bool> {
        let mut has_moved = false;
        loop {
            // Before entries are: what they say of the messages that these bytes are of is known then.
            let written = self.peer(rank).incoming.as_ref().map_or(0, |l| l.segment.bulk_written());
            has_moved |= self.take_entries(rank)?;
            if !self.peer(rank).read_bulk(rank, written) {
                return Ok(has_moved);
            }
            has_moved = true;
        }
    }

    fn take_entries(&mut self, rank: u32) -> Result<bool> {
        let mut has_moved = false;
        loop {
            let Some(link) = &mut self.peer(rank).incoming else { return Ok(has_moved) };
            let Some((entry, data)) = link.segment.next()? else { return Ok(has_moved) };
            if entry.kind == EntryKind::Whole
                && Payload::from_word(entry.payload).bytes() != entry.bytes
            {
                return Err(Error::mismatch("a peer's message is not as long as it says"));
            }
            // SAFETY: `data` is where the segment has the entry's bytes, until the entry is passed below.
            unsafe { self.take(rank, &entry, data) };
            if let Some(link) = &mut self.peer(rank).incoming {
                link.segment.pass(&entry);
                link.wake();
            }
            has_moved = true;
        }
    }

    /// Acts on one entry.
    ///
    /// # Safety
    ///
    /// You must promise that the entry's bytes lie at `data` until this returns.
    unsafe fn take(&mut self, rank: u32, entry: &EntryHeader, data: *const u8) {
        let (me, EntryHeader { number, tag, payload, .. }) = (self.rank, *entry);
        match entry.kind {
            EntryKind::Whole | EntryKind::Offer => {
                let fits = |op: &Arc<BegunMessage>| {
                    op.tag == tag && op.peer.is_none_or(|source| source == rank)
                };
                let found = self.posted.iter().position(fits);
                let data = if entry.kind == EntryKind::Whole { data } else { std::ptr::null() };
                self.arrivals += 1;
                let arrival = self.arrivals;
                let (data_of, own) = (None, None);
                let mut message = Unexpected { arrival, number, tag, payload, data: data_of, own };
                match found.and_then(|at| self.posted.remove(at)) {
                    // SAFETY: the caller promised the entry's bytes, which are as many as its payload says.
                    Some(op) => unsafe { self.receive(&op, rank, &message, data) },
                    None => {
                        if !data.is_null() {
                            // SAFETY: the caller promised the entry's bytes.
                            let bytes =
                                unsafe { std::slice::from_raw_parts(data, entry.bytes as usize) };
                            message.data = Some(bytes.into());
                        }
                        self.peer(rank).unexpected.push_back(message);
                    }
                }
            }
            EntryKind::Want => {
                let peer = self.peer(rank);
                match peer.offered.remove(&number) {
                    Some(op) => peer.streams.push_back(PassingMessage { op, number, passed: 0 }),
                    None => peer.say(EntryHeader::about(EntryKind::Cancellation, number)),
                }
            }
            EntryKind::Refusal | EntryKind::Decline => {
                let payloads = (Payload::from_word(tag), Payload::from_word(payload));
                let error = payloads_differ(me, (me, rank), payloads, Afterwards::UsableGroup);
                match self.peer(rank).offered.remove(&number) {
                    Some(op) => op.finish(Err(error)),
                    None if entry.kind == EntryKind::Refusal => {
                        self.peer(rank).reports.push_back(error);
                        self.has_reports.store(true, Ordering::Relaxed);
                    }
                    // Its send was given up, and has said so.
                    None => {}
                }
            }
            EntryKind::Cancellation => {
                let peer = self.peer(rank);
                // Its later receive is for what the sender sends in its place.
                peer.unexpected.retain(|message| message.number != number);
                let awaited = &mut peer.awaited;
                let found = awaited.iter().position(|stream| stream.number == number);
                if let Some(stream) = found.and_then(|at| awaited.remove(at)) {
                    stream.op.finish(Err(Error::invalid_state(format!(
                        "rank {rank} has given up the message that rank {me} was to receive: its send timed out, or was \
                         interrupted"
                    ))
                    .naming([rank])));
                }
            }
            EntryKind::Failure => {
                let why = if tag == 1 { "was interrupted" } else { "timed out" };
                let error = Error::peer_lost(
                    vec![rank],
                    format!(
                        "rank {rank} has given up a large message while its bytes were passing, as its wait {why}: it \
                         and rank {me} can have no more messages"
                    ),
                );
                self.lose(rank, &error);
            }
            EntryKind::Skip => {}
        }
    }

    /// Connects to a rank, if need be. Where too many others wait there, the next try does.
    fn connect(&mut self, rank: u32) -> Result<()> {
        let peer = &self.peers[rank as usize];
        if let Some(error) = &peer.lost {
            return Err(error.clone());
        }
        if peer.outgoing.is_some() {
            return Ok(());
        }
        let (segment, file) = RingSegment::create()?;
        match self.addresses[rank as usize].dial(self.rank, file.as_fd())? {
            Dialled::Connected(socket) => {
                self.peer(rank).outgoing = Some(PairLink { segment, socket: Arc::new(socket) });
            }
            Dialled::Busy => {}
            Dialled::Gone => {
                // It may have sent something before.
                self.accept();
                let _ = self.take_entries(rank);
                let peer = &self.peers[rank as usize];
                let error = match &peer.lost {
                    Some(error) => error.clone(),
                    None if peer.incoming.is_some() => self.loss(rank),
                    None => {
                        let what = "its process has ended, or has destroyed the group";
                        Error::peer_lost(vec![rank], format!("{what}, seen on rank {}", self.rank))
                    }
                };
                self.lose(rank, &error);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Accepts the connections of other ranks. Returns whether there was one.
    pub(super) fn accept(&mut self) -> bool {
        let mut has_accepted = false;
        let Some(listener) = self.listener() else { return false };
        loop {
            match listener.accept() {
                Ok(None) => return has_accepted,
                Ok(Some(accepted)) => {
                    let from = accepted.from;
                    let segment = RingSegment::open(&accepted.memory);
                    let is_peer = from != self.rank && (from as usize) < self.peers.len();
                    let (true, Ok(segment)) = (is_peer, segment) else {
                        tracing::warn!(rank = self.rank, from, "turned away a caller");
                        continue;
                    };
                    let peer = self.peer(from);
                    if peer.incoming.is_none() && peer.lost.is_none() {
                        let socket = Arc::new(accepted.socket);
                        peer.incoming = Some(PairLink { segment, socket });
                        has_accepted = true;
                    }
                }
                Err(error) => {
                    tracing::warn!(rank = self.rank, %error, "no connection could be accepted");
                    return has_accepted;
                }
            }
        }
    }

    /// Accepts connections, takes what has woken this rank, and notices ranks that have ended.
    pub(super) fn look_at_sockets(&mut self) {
        self.accept();
        for rank in self.others() {
            let peer = &self.peers[rank as usize];
            let links = [&peer.outgoing, &peer.incoming];
            if links.into_iter().flatten().all(|link| link.socket.drain()) {
                continue;
            }
            // Everything that the rank did before it ended is there.
            self.accept();
            self.advance();
            let error = self.loss(rank);
            self.lose(rank, &error);
        }
    }

    /// The error of messages with a rank whose connection is closed.
    fn loss(&self, rank: u32) -> Error {
        let peer = &self.peers[rank as usize];
        let what = if peer.has_ended() {
            "it has destroyed the group, or its program has ended"
        } else {
            "its process has ended without destroying the group"
        };
        Error::peer_lost(vec![rank], format!("{what}, seen on rank {}", self.rank))
    }

    /// There are no more messages with a rank.
    pub(super) fn lose(&mut self, rank: u32, error: &Error) {
        let peer = self.peer(rank);
        if peer.lost.is_some() {
            return;
        }
        let in_order = peer.has_ended();
        peer.lost = Some(error.clone());
        peer.outgoing = None;
        peer.incoming = None;
        let queued = peer.queue.drain(..).filter_map(|queued| queued.op);
        let offered = std::mem::take(&mut peer.offered).into_values();
        let streams = peer.streams.drain(..).chain(peer.awaited.drain(..)).map(|stream| stream.op);
        for op in queued.chain(offered).chain(streams) {
            op.finish(Err(error.clone()));
        }
        peer.unexpected.retain(|message| message.data.is_some());
        // A receive from any rank is waiting for this one, for all that is known, unless it has ended in good order.
        let posted = std::mem::take(&mut self.posted);
        let (over, rest) = posted.into_iter().partition(|op| {
            op.peer == Some(rank) || op.peer.is_none() && (!in_order || self.is_hopeless(op))
        });
        self.posted = rest;
        let over: VecDeque<Arc<BegunMessage>> = over;
        for op in over {
            op.finish(Err(error.clone()));
        }
    }

    /// Gives up a message, for this reason. The peer is told of one that was offered to it. One whose bytes are passing
    /// ends all messages with its peer, which is told why.
    pub(super) fn cancel(&mut self, op: &Arc<BegunMessage>, why: &Error) {
        if op.outcome().is_some() {
            return;
        }
        self.posted.retain(|posted| !Arc::ptr_eq(posted, op));
        let is_own =
            |message: &Unexpected| message.own.as_ref().is_some_and(|sent| Arc::ptr_eq(sent, op));
        let me = self.rank;
        self.peer(me).unexpected.retain(|message| !is_own(message));
        for rank in self.others() {
            let peer = self.peer(rank);
            let is_it =
                |queued: &Queued| queued.op.as_ref().is_some_and(|queued| Arc::ptr_eq(queued, op));
            let unsent = peer.queue.iter().position(is_it);
            if unsent.and_then(|at| peer.queue.remove(at)).is_some() {
                peer.sent_whole = peer.sent_whole.wrapping_sub(op.payload.bytes());
            }
            if peer.cancel(op) {
                continue;
            }
            let mut streams = peer.streams.iter().chain(&peer.awaited);
            if streams.any(|stream| Arc::ptr_eq(&stream.op, op)) {
                peer.fail(why.is_interrupted());
                let what = "a large message was given up while its bytes were passing";
                self.lose(rank, &why.clone().context(what));
            }
        }
        op.finish(Err(why.clone()));
    }

    /// That a rank has refused an earlier message, which no call has reported yet.
    pub(super) fn report(&mut self, rank: u32) -> Option<Error> {
        self.peer(rank).reports.pop_front()
    }

    /// Says to the peers that this rank sleeps, or is awake.
    pub(super) fn set_asleep(&self, asleep: bool) {
        let links = self.peers.iter().flat_map(|peer| [&peer.outgoing, &peer.incoming]);
        for link in links.flatten() {
            if asleep { link.segment.fall_asleep() } else { link.segment.wake_up() }
        }
        if asleep {
            before_sleep::<Native>();
        }
    }

    /// Ends all messages, and all later calls.
    pub(super) fn end(&mut self, error: &Error) {
        // Those that nobody has accepted yet see that this rank ends in good order too.
        self.accept();
        for link in self.peers.iter().flat_map(|peer| [&peer.outgoing, &peer.incoming]).flatten() {
            link.segment.end_here();
        }
        self.listener = None;
        self.ended = Some(error.clone());
        for rank in self.others() {
            self.lose(rank, error);
        }
        self.end_own(error);
    }
}
