//! Checks send and recv between two ranks: all sizes and alignments, all pairs at once, sends ahead of their receives,
//! graphs that are replayed, several streams, and collectives at the same time.

use std::time::Duration;

use symmpool_allocator::{Block, Pool, Result, Stream};
use symmpool_collectives::{Communicator, CommunicatorOptions, DType, ReduceOp};

use crate::cuda::{CallGraph, download, stream, upload};
use crate::oracle::random;
use crate::tally::Tally;
use crate::{ORDINARY, Options};

const LENGTHS: [usize; 12] =
    [0, 1, 15, 17, 100, 4096, 16_385, 33_000, 65_539, 300_001, 1 << 20, (3 << 20) + 5];
/// The longest message, and room for shifts and for bytes at both ends that must not change.
const ROOM: usize = 4 << 20;
const AROUND: usize = 32;
/// The bytes of the output before a message is received.
const BEFORE: u8 = 0xa5;
/// How many messages a rank can send to another one without waiting for its receives.
const AHEAD: u64 = 4;

struct Messages<'a> {
    pool: &'a Pool,
    options: &'a Options,
    comm: Communicator,
    /// The streams for sends and for receives.
    sends: Stream,
    receives: Stream,
    /// The buffers for each rank's messages.
    from: Vec<Block<u8>>,
    to: Vec<Block<u8>>,
    seed: u64,
    tally: Tally,
}

/// Runs the checks. Returns how many cases there were, and how many of them were wrong.
pub(crate) fn run(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let (mut cases, mut wrong) = (0, 0);
    // Little scratch first, so that messages take many packets.
    for scratch in [Some(1 << 20), None] {
        let communicator = CommunicatorOptions {
            device_scratch_bytes: scratch,
            concurrent: None,
            ..options.communicator()
        };
        let comm = Communicator::with_options(pool, &communicator)?;
        let ordinary = pool.lane(ORDINARY)?;
        let blocks = |windows: bool| -> Result<Vec<Block<u8>>> {
            (0..pool.world())
                .map(|_| if windows { pool.alloc(ROOM) } else { ordinary.alloc(ROOM) })
                .collect()
        };
        let (from, to) = (blocks(scratch.is_some())?, blocks(scratch.is_none())?);
        let (sends, receives) = (stream(pool)?, stream(pool)?);
        let seed = options.seed ^ scratch.unwrap_or(0);
        let mut messages = Messages {
            pool,
            options,
            comm,
            sends,
            receives,
            from,
            to,
            seed,
            tally: Tally::new(pool),
        };
        messages.all_at_once()?;
        messages.ahead()?;
        messages.streams()?;
        messages.graphs()?;
        messages.beside_collectives()?;
        messages.before_collectives()?;
        messages.comm.barrier(&messages.sends)?;
        messages.comm.synchronize(&messages.sends)?;
        cases += messages.tally.cases;
        wrong += messages.tally.wrong;
    }
    if pool.rank() == 0 {
        println!("p2p: {cases} cases, {wrong} wrong");
    }
    Ok((cases, wrong))
}

/// A message of one rank to another: its length, and where it lies on both ranks.
#[derive(Clone, Copy, Debug)]
struct P2pMessage {
    number: u64,
    bytes: usize,
    from: u64,
    to: u64,
}

impl Messages<'_> {
    fn peers(&self) -> impl Iterator<Item = u32> + use<> {
        let (rank, world) = (self.pool.rank(), self.pool.world());
        (1..world).map(move |step| (rank + step) % world)
    }

    /// The ranks in the order in which their messages arrive: every rank sends to the next rank first.
    fn sources(&self) -> impl Iterator<Item = u32> + use<> {
        let (rank, world) = (self.pool.rank(), self.pool.world());
        (1..world).map(move |step| (rank + world - step) % world)
    }

    fn next(&self) -> u32 {
        (self.pool.rank() + 1) % self.pool.world()
    }

    fn before(&self) -> u32 {
        (self.pool.rank() + self.pool.world() - 1) % self.pool.world()
    }

    /// The message of a round from one rank to another, which both know.
    fn message(&self, round: u64, source: u32, target: u32) -> P2pMessage {
        let number = random(self.seed, round << 8 | u64::from(source << 4 | target));
        let length = LENGTHS[(number >> 16) as usize % LENGTHS.len()];
        // The first rounds have one of each size; others have random sizes.
        let bytes = if round < LENGTHS.len() as u64 {
            LENGTHS[(round as usize + source as usize) % LENGTHS.len()]
        } else {
            length - (number >> 24) as usize % (length / 8 + 1)
        };
        let shift = |by: u32| [0, 0, 4, number >> by & 15][(number >> (by + 4) & 3) as usize];
        P2pMessage { number, bytes, from: shift(40), to: AROUND as u64 / 2 + shift(48) }
    }

    fn data(&self, message: &P2pMessage) -> Vec<u8> {
        let mut data = vec![0; message.bytes];
        for (at, part) in (0..).zip(data.chunks_mut(8)) {
            part.copy_from_slice(&random(message.number, at).to_le_bytes()[..part.len()]);
        }
        data
    }

    /// Prepares the buffers of a message that this rank sends, and of one that it receives.
    fn lay_out(&self, peer: u32, sent: &P2pMessage, received: &P2pMessage) -> Result<()> {
        let from = self.from[peer as usize].address();
        upload(self.pool, from + sent.from, &self.data(sent))?;
        self.clear(peer, received)
    }

    fn clear(&self, peer: u32, received: &P2pMessage) -> Result<()> {
        let to = self.to[peer as usize].address();
        let watched = received.to as usize + received.bytes + AROUND;
        upload(self.pool, to, &vec![BEFORE; watched.min(ROOM)])
    }

    fn send(&self, peer: u32, message: &P2pMessage, stream: &Stream) -> Result<()> {
        let from = (self.from[peer as usize].address() + message.from) as *const u8;
        // SAFETY: the stretch lies in a block with room for it, which nothing else uses; so it does below.
        unsafe { self.comm.send_at(from, message.bytes, DType::U8, peer, stream) }
    }

    fn receive(&self, peer: u32, message: &P2pMessage, stream: &Stream) -> Result<()> {
        let to = (self.to[peer as usize].address() + message.to) as *mut u8;
        // SAFETY: the stretch lies in a block with room for it, which nothing else uses.
        unsafe { self.comm.recv_at(to, message.bytes, DType::U8, peer, stream) }
    }

    fn synchronize(&self) -> Result<()> {
        self.comm.synchronize(&self.sends)?;
        self.comm.synchronize(&self.receives)
    }

    fn judge(&mut self, what: &str, peer: u32, message: &P2pMessage) -> Result<()> {
        let P2pMessage { bytes, to, .. } = *message;
        let to = to as usize;
        let length = (to + bytes + AROUND).min(ROOM);
        let got = download(self.pool, self.to[peer as usize].address(), length)?;
        let mut wanted = vec![BEFORE; length];
        wanted[to..to + bytes].copy_from_slice(&self.data(message));
        self.tally.cases += 1;
        if let Some(at) = got.iter().zip(&wanted).position(|(got, wanted)| got != wanted) {
            self.tally.wrong += 1;
            println!(
                "rank {}: {what}: {bytes} bytes of rank {peer}: byte {} is {} and should be {}",
                self.pool.rank(),
                at as i64 - to as i64,
                got[at],
                wanted[at]
            );
        }
        Ok(())
    }

    /// Every rank sends to all others, and receives from them, at the same time.
    fn all_at_once(&mut self) -> Result<()> {
        let me = self.pool.rank();
        for round in 0..self.options.few(60, LENGTHS.len() as u64 + 2) {
            for peer in self.peers() {
                let (sent, received) =
                    (self.message(round, me, peer), self.message(round, peer, me));
                self.lay_out(peer, &sent, &received)?;
            }
            // On one rank the sends come first, on another the receives.
            let first = random(self.seed ^ u64::from(me), round) & 1;
            for half in [first, 1 - first] {
                if half == 0 {
                    self.peers().try_for_each(|peer| {
                        self.send(peer, &self.message(round, me, peer), &self.sends)
                    })?;
                } else {
                    self.sources().try_for_each(|peer| {
                        self.receive(peer, &self.message(round, peer, me), &self.receives)
                    })?;
                }
            }
            self.synchronize()?;
            for peer in self.peers() {
                self.judge(&format!("round {round}"), peer, &self.message(round, peer, me))?;
            }
        }
        Ok(())
    }

    /// A short message, which is one packet even with the least scratch. Its data differ from round to round.
    fn short(&self, round: u64, source: u32) -> P2pMessage {
        let number = random(self.seed ^ 7, round << 8 | u64::from(source));
        P2pMessage { number, bytes: 1 + number as usize % 1000, from: 0, to: AROUND as u64 }
    }

    /// Messages that are sent before the first one is received: as many as there are slots for on the stream
    /// on which messages are received later, and more on another stream.
    fn ahead(&mut self) -> Result<()> {
        let (next, before, me) = (self.next(), self.before(), self.pool.rank());
        for (count, one_stream) in [(AHEAD, true), (5 * AHEAD, false)] {
            let receives = if one_stream { self.sends } else { self.receives };
            // Messages lie one behind the other in the blocks.
            let place = |nth: u64| nth * 2048;
            for nth in 0..count {
                let message = self.short(nth, me);
                let data = self.data(&message);
                upload(self.pool, self.from[next as usize].address() + place(nth), &data)?;
            }
            upload(
                self.pool,
                self.to[before as usize].address(),
                &vec![BEFORE; place(count) as usize],
            )?;
            for nth in 0..count {
                let message = P2pMessage { from: place(nth), ..self.short(nth, me) };
                self.send(next, &message, &self.sends)?;
            }
            for nth in 0..count {
                let message = P2pMessage { to: place(nth), ..self.short(nth, before) };
                self.receive(before, &message, &receives)?;
            }
            self.synchronize()?;
            let got =
                download(self.pool, self.to[before as usize].address(), place(count) as usize)?;
            for nth in 0..count {
                let message = self.short(nth, before);
                let mut wanted = self.data(&message);
                wanted.resize(2048, BEFORE);
                self.tally.expect(
                    &format!("message {nth} ahead"),
                    got[place(nth) as usize..][..2048] == wanted,
                );
            }
        }
        Ok(())
    }

    /// Messages in one direction keep the order of the calls, whatever streams they are on.
    fn streams(&mut self) -> Result<()> {
        let (next, before, me) = (self.next(), self.before(), self.pool.rank());
        let other = stream(self.pool)?;
        let place = |nth: u64| nth * 2048;
        let count = self.options.few(40, 12);
        for nth in 0..count {
            let data = self.data(&self.short(100 + nth, me));
            upload(self.pool, self.from[next as usize].address() + place(nth), &data)?;
        }
        // While a receive waits on one stream, the rank sends on another one: each call waits for the call before
        // it in its direction, and for nothing else on that call's stream.
        for nth in 0..count {
            let (sent, received) = (self.short(100 + nth, me), self.short(100 + nth, before));
            let (one, two) = if nth % 2 == 0 { (self.sends, other) } else { (other, self.sends) };
            self.send(next, &P2pMessage { from: place(nth), ..sent }, &one)?;
            self.receive(before, &P2pMessage { to: place(nth), ..received }, &two)?;
        }
        self.comm.synchronize(&other)?;
        self.synchronize()?;
        for nth in 0..count {
            let message = self.short(100 + nth, before);
            let at = self.to[before as usize].address() + place(nth);
            let got = download(self.pool, at, message.bytes)?;
            self.tally.expect(&format!("message {nth} of two streams"), got == self.data(&message));
        }
        Ok(())
    }

    /// S2, S8: each replay of a graph sends its captured messages again, among eager ones.
    fn graphs(&mut self) -> Result<()> {
        let (next, before, me) = (self.next(), self.before(), self.pool.rank());
        // The communicator has done nothing yet: its first message is captured.
        let options = CommunicatorOptions { concurrent: None, ..self.options.communicator() };
        let fresh = Communicator::with_options(self.pool, &options)?;
        let usual = std::mem::replace(&mut self.comm, fresh);
        let (bytes, seed) = (200_003, self.seed);
        let of = |round: u64, source: u32| P2pMessage {
            number: random(seed ^ 9, round << 8 | u64::from(source)),
            bytes,
            from: 4,
            to: AROUND as u64 + 1,
        };
        let (to_next, from_before) = (of(0, me), of(0, before));
        let sends =
            CallGraph::capture(self.pool, self.sends, || self.send(next, &to_next, &self.sends))?;
        let receives = CallGraph::capture(self.pool, self.receives, || {
            self.receive(before, &from_before, &self.receives)
        })?;
        for round in 0..self.options.few(40, 6) {
            let (sent, received) = (of(round, me), of(round, before));
            upload(self.pool, self.from[next as usize].address() + sent.from, &self.data(&sent))?;
            self.clear(before, &received)?;
            // Sends and receives are captured in graphs of their own.
            if random(self.seed ^ u64::from(me), round).is_multiple_of(3) {
                self.send(next, &sent, &self.sends)?;
            } else {
                sends.launch(self.pool, self.sends)?;
            }
            if random(self.seed ^ u64::from(me), 1000 + round).is_multiple_of(3) {
                self.receive(before, &received, &self.receives)?;
            } else {
                receives.launch(self.pool, self.receives)?;
            }
            self.synchronize()?;
            self.judge(&format!("replay {round}"), before, &received)?;
        }
        // Many in a row: sends run ahead as far as there are slots.
        for _ in 0..self.options.few(200, 10) {
            sends.launch(self.pool, self.sends)?;
            receives.launch(self.pool, self.receives)?;
        }
        self.synchronize()?;
        sends.destroy(self.pool)?;
        receives.destroy(self.pool)?;
        self.comm.barrier(&self.sends)?;
        self.synchronize()?;
        self.comm = usual;
        Ok(())
    }

    /// One rank receives between two collectives, the second of which is on another stream; the other rank sends
    /// after both. The second collective waits for the first one, and not for the receive.
    fn before_collectives(&mut self) -> Result<()> {
        let rank = self.pool.rank();
        let timeout = Duration::from_secs(20);
        let options =
            CommunicatorOptions { concurrent: None, timeout, ..self.options.communicator() };
        let fresh = Communicator::with_options(self.pool, &options)?;
        let usual = std::mem::replace(&mut self.comm, fresh);
        let message = self.short(300, 1);
        let data = self.data(&message);
        upload(self.pool, self.from[0].address(), &data)?;
        self.comm.barrier(&self.sends)?;
        match rank {
            0 => {
                self.receive(1, &message, &self.sends)?;
                self.comm.barrier(&self.receives)?;
            }
            1 => {
                self.comm.barrier(&self.sends)?;
                self.send(0, &message, &self.sends)?;
            }
            _ => self.comm.barrier(&self.sends)?,
        }
        let outcome = self.synchronize();
        self.tally.expect(&format!("a receive between collectives: {outcome:?}"), outcome.is_ok());
        if rank == 0 {
            let at = self.to[1].address() + message.to;
            let got = download(self.pool, at, message.bytes)?;
            self.tally.expect("what came between collectives", got == data);
        }
        self.comm = usual;
        Ok(())
    }

    /// A receive waits while a collective runs that its message depends on.
    fn beside_collectives(&mut self) -> Result<()> {
        let me = self.pool.rank();
        // The type is one whose kernels are ready: loading code now might wait for the receives.
        const COUNT: usize = 1 << 18;
        let reduced = self.pool.lane(ORDINARY)?.alloc::<f32>(COUNT)?;
        for round in 0..self.options.few(20, 3) {
            let round = 5000 + round;
            for peer in self.peers() {
                let (sent, received) =
                    (self.message(round, me, peer), self.message(round, peer, me));
                self.lay_out(peer, &sent, &received)?;
            }
            upload(self.pool, reduced.address(), &1_f32.to_le_bytes().repeat(COUNT))?;
            for peer in self.sources() {
                self.receive(peer, &self.message(round, peer, me), &self.receives)?;
            }
            let at = reduced.address() as *mut u8;
            // SAFETY: the block is this long, and nothing else uses it.
            unsafe {
                self.comm.all_reduce_at(at, at, COUNT, DType::F32, ReduceOp::Sum, &self.sends)
            }?;
            for peer in self.peers() {
                self.send(peer, &self.message(round, me, peer), &self.sends)?;
            }
            self.synchronize()?;
            for peer in self.peers() {
                self.judge("during a collective", peer, &self.message(round, peer, me))?;
            }
            let sums = download(self.pool, reduced.address(), 4 * COUNT)?;
            let right = (self.pool.world() as f32).to_le_bytes().repeat(COUNT) == sums;
            self.tally.expect("a collective during messages", right);
        }
        Ok(())
    }
}
