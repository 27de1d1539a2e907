//! Checks copies and signals between two ranks: rings of puts and gets, graphs of them that are replayed,
//! signals from several streams, and waits that run out.

use std::time::{Duration, Instant};

use symmpool_allocator::{Block, Pool, Result, Stream};
use symmpool_collectives::{Communicator, DType};

use crate::cuda::{CallGraph, download, stream, upload};
use crate::oracle::{input, random};
use crate::tally::Tally;
use crate::{MAX_LATE, ORDINARY, Options, expect_error};

/// The timeout of waits that must not succeed.
const SHORT: Duration = Duration::from_millis(1500);
const LENGTHS: [usize; 7] = [1, 16, 1000, 4096, 65_539, 1 << 20, (3 << 20) + 5];
/// The longest data, and room for shifts and for bytes behind the end that must not change.
const ROOM: usize = 4 << 20;
const BEYOND: usize = 16;

// The channels, by what a signal on each means.
const HERE: u32 = 0;
const READY: u32 = 1;
const DONE: u32 = 15;

struct Sided<'a> {
    pool: &'a Pool,
    comm: Communicator,
    stream: Stream,
    options: &'a Options,
    next: u32,
    before: u32,
    inbox: Block<u8>,
    mine: Block<u8>,
    /// Memory outside windows.
    source: Block<u8>,
    got: Block<u8>,
    seed: u64,
    tally: Tally,
}

/// Runs the checks. Returns how many cases there were, and how many of them were wrong.
pub(crate) fn run(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let (rank, world) = (pool.rank(), pool.world());
    let ordinary = pool.lane(ORDINARY)?;
    let mut sided = Sided {
        pool,
        comm: Communicator::with_options(pool, &options.communicator())?,
        stream: stream(pool)?,
        options,
        next: (rank + 1) % world,
        before: (rank + world - 1) % world,
        inbox: pool.alloc(ROOM)?,
        mine: pool.alloc(ROOM)?,
        source: ordinary.alloc(ROOM)?,
        got: ordinary.alloc(ROOM)?,
        seed: options.seed,
        tally: Tally::new(pool),
    };
    pool.commit()?;
    sided.ring()?;
    sided.streams()?;
    sided.graphs()?;
    if !options.quick {
        sided.late()?;
    }
    if rank == 0 {
        println!("one-sided: {} cases, {} wrong", sided.tally.cases, sided.tally.wrong);
    }
    Ok(sided.tally.counts())
}

impl Sided<'_> {
    /// The timeout of waits that must succeed.
    fn long(&self) -> Duration {
        self.options.communicator().timeout
    }

    fn data(&self, rank: u32, round: u64, bytes: usize) -> Vec<u8> {
        input(random(self.seed, round), rank, DType::U8, bytes)
    }

    fn judge(&mut self, what: &str, got: &[u8], wanted: &[u8]) {
        self.tally.cases += 1;
        if let Some(at) = got.iter().zip(wanted).position(|(got, wanted)| got != wanted) {
            self.tally.wrong += 1;
            println!(
                "rank {}: {what}: byte {at} is {} and should be {}",
                self.pool.rank(),
                got[at],
                wanted[at]
            );
        }
    }

    /// Puts to the next rank, from windows and other memory, and gets from the one before.
    fn ring(&mut self) -> Result<()> {
        let (next, before, stream) = (self.next, self.before, self.stream);
        let rounds = self.options.few(4, 1) as usize * LENGTHS.len();
        for (round, bytes) in LENGTHS.into_iter().cycle().take(rounds).enumerate() {
            let number = random(self.seed, round as u64);
            let shift = |by: u32| [0, 0, 4, number >> by & 15][(number >> (by + 4) & 3) as usize];
            // The shift is equal on every rank, as it is computed from the seed alone.
            let (into, from) = (self.inbox.address() + shift(8), self.mine.address() + shift(16));
            let (fused, window) = (number & 1 == 0, number & 2 == 0);
            let source = if window { from } else { self.source.address() + shift(24) };
            let data = self.data(self.pool.rank(), round as u64, bytes);
            upload(self.pool, into, &vec![0xa5; bytes + BEYOND])?;
            upload(self.pool, self.got.address(), &vec![0xa5; bytes + BEYOND])?;
            upload(self.pool, from, &data)?;
            upload(self.pool, source, &data)?;
            let comm = &self.comm;
            // This rank's inbox and data are ready, and so are the next rank's.
            comm.signal(before, READY, &stream)?;
            comm.wait(next, READY, self.long(), &stream)?;
            let (to, source) = (into as *mut u8, source as *const u8);
            if fused {
                // SAFETY: all ranges lie in blocks with room for them, which nothing else uses
                // between these signals; so do those below.
                unsafe { comm.put_signal_at(to, source, bytes, next, HERE, &stream) }?;
            } else {
                // SAFETY: all ranges lie in blocks with room for them, which nothing else uses between these signals.
                unsafe { comm.put_at(to, source, bytes, next, &stream) }?;
                comm.signal(next, HERE, &stream)?;
            }
            comm.wait(before, HERE, self.long(), &stream)?;
            let got = self.got.as_ptr();
            // SAFETY: all ranges lie in blocks with room for them; the rank before had its data ready before it
            // signalled.
            unsafe { comm.get_at(got, from as *const u8, bytes, before, &stream) }?;
            // From now on the data of the previous and of the next rank may change again.
            for peer in [next, before] {
                comm.signal(peer, DONE, &stream)?;
            }
            for peer in [next, before] {
                comm.wait(peer, DONE, self.long(), &stream)?;
            }
            comm.synchronize(&stream)?;
            let wanted = [self.data(before, round as u64, bytes), vec![0xa5; BEYOND]].concat();
            let how = if fused { "put_signal" } else { "put" };
            let what = format!("{how} of {bytes} bytes, round {round}");
            let arrived = download(self.pool, into, bytes + BEYOND)?;
            self.judge(&what, &arrived, &wanted);
            let fetched = download(self.pool, self.got.address(), bytes + BEYOND)?;
            self.judge(&format!("get of {bytes} bytes, round {round}"), &fetched, &wanted);
        }
        Ok(())
    }

    /// A channel's signals from two streams in turn; a wait on one while another signals.
    fn streams(&mut self) -> Result<()> {
        let other = stream(self.pool)?;
        let (next, before) = (self.next, self.before);
        for call in 0..40 {
            let which = if call % 2 == 0 { &self.stream } else { &other };
            self.comm.signal(next, 2, which)?;
        }
        // The waits are made first, on one stream; the signals they wait for depend on the other stream.
        for _ in 0..40 {
            self.comm.wait(before, 2, self.long(), &self.stream)?;
        }
        self.comm.wait(before, 3, self.long(), &self.stream)?;
        self.comm.signal(next, 3, &other)?;
        self.comm.synchronize(&self.stream)?;
        self.comm.synchronize(&other)?;
        self.tally.expect("signals of two streams", self.comm.failure().is_none());
        Ok(())
    }

    /// S2, S8: a ring is captured into a graph and replayed, with eager rings in between.
    fn graphs(&mut self) -> Result<()> {
        let (next, before, stream) = (self.next, self.before, self.stream);
        let bytes = 200_000;
        let (into, from) = (self.inbox.address(), self.mine.address());
        // The communicator has done nothing yet: its first signal is captured.
        let comm = Communicator::with_options(self.pool, &self.options.communicator())?;
        let long = self.long();
        let around = || {
            comm.signal(before, READY, &stream)?;
            comm.wait(next, READY, long, &stream)?;
            // SAFETY: both blocks are longer, and used by nothing else between these signals.
            unsafe {
                comm.put_signal_at(into as *mut u8, from as *const u8, bytes, next, HERE, &stream)
            }?;
            comm.wait(before, HERE, long, &stream)
        };
        let graph = CallGraph::capture(self.pool, stream, around)?;
        for round in 100..100 + self.options.few(40, 4) {
            upload(self.pool, into, &vec![0xa5; bytes])?;
            upload(self.pool, from, &self.data(self.pool.rank(), round, bytes))?;
            if random(self.seed, round).is_multiple_of(4) {
                around()?;
            } else {
                graph.launch(self.pool, stream)?;
            }
            comm.synchronize(&stream)?;
            let wanted = self.data(before, round, bytes);
            let arrived = download(self.pool, into, bytes)?;
            self.judge(&format!("replay {round} of a ring"), &arrived, &wanted);
        }
        let replays = self.options.few(500, 10);
        // Many replays at once: the counts of all ranks stay equal.
        for _ in 0..replays {
            graph.launch(self.pool, stream)?;
        }
        around()?;
        comm.synchronize(&stream)?;
        self.tally.expect(&format!("{replays} replays in a row"), comm.failure().is_none());
        comm.barrier(&stream)?;
        comm.synchronize(&stream)?;
        graph.destroy(self.pool)
    }

    /// S5: waits for signals that nobody sends.
    fn late(&mut self) -> Result<()> {
        let (stream, before) = (self.stream, self.before);
        for (timeout, channel) in [(SHORT, 5), (Duration::ZERO, 9)] {
            let comm = Communicator::new(self.pool)?;
            // A wait whose signal comes does not fail.
            comm.signal(self.next, channel, &stream)?;
            comm.wait(before, channel, self.long(), &stream)?;
            comm.synchronize(&stream)?;
            let began = Instant::now();
            let result = comm.wait(before, channel, timeout, &stream);
            let result = result.and_then(|()| comm.synchronize(&stream));
            let error = expect_error(result, "a wait without a signal")?;
            let took = began.elapsed();
            let text = error.to_string();
            let named = error.ranks() == [before]
                && text.contains(&format!("rank {before} on channel {channel}"));
            // Devices measure time with a coarser clock.
            let step = Duration::from_millis(10);
            let in_time = took + step >= timeout && took < timeout + MAX_LATE;
            let what = format!("a late signal: after {took:?}: {error}");
            self.tally.expect(&what, error.is_timeout() && named && in_time);
            // No call succeeds after it.
            let again = expect_error(comm.signal(self.next, channel, &stream), "a later signal")?;
            self.tally.expect(&format!("after a failure: {again}"), again.is_timeout());
            if self.pool.rank() == 0 && !timeout.is_zero() {
                println!("{error}");
            }
        }
        // Invalid arguments are refused, and do not fail the communicator.
        let refused = [
            self.comm.signal(self.pool.world(), 0, &stream),
            self.comm.wait(before, Communicator::CHANNELS, self.long(), &stream),
            self.comm.put(&self.inbox, 1, &self.mine, self.next, &stream),
            self.comm.put(&self.source, 0, &self.mine, self.next, &stream),
        ];
        for outcome in refused {
            let error = expect_error(outcome, "nonsense")?;
            self.tally.expect(&format!("{error}"), error.is_invalid_argument());
        }
        self.comm.barrier(&stream)?;
        self.comm.synchronize(&stream)
    }
}
