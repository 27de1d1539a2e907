//! Checks that what belongs to a call and follows its kernel comes before the next call, whatever streams both are on;
//! that calls captured on several streams are in order; that threads which name their own default stream are told apart;
//! that signals and waits by memory operations keep the order in which they were made; and that memory which another stream
//! uses is reused behind that.

use std::time::Duration;

use symmpool_allocator::{Block, Pool, Result, Stream};
use symmpool_collectives::{
    Communicator, CommunicatorOptions, DType, MatmulKind, MatmulShape, ReduceOp,
};

use crate::cuda::{CallGraph, download, stream, upload};
use crate::oracle::{input, random};
use crate::tally::Tally;
use crate::tools::Tools;
use crate::{ORDINARY, Options};

const BYTES: usize = 40_004;
/// How long a stream is held up where another one must not overtake it.
const PAUSE: Duration = Duration::from_millis(60);
/// The channel of signals by memory operations.
const CHANNEL: u32 = 3;

struct OrderChecks<'a> {
    pool: &'a Pool,
    options: &'a Options,
    tools: Tools<'a>,
    streams: [Stream; 2],
    next: u32,
    before: u32,
    /// Where the rank before writes.
    slot: Block<u8>,
    sources: [Block<u8>; 2],
    got: [Block<u8>; 2],
    tally: Tally,
}

/// Runs the checks. Returns how many cases there were, and how many of them were wrong.
pub(crate) fn run(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let (rank, world) = (pool.rank(), pool.world());
    let ordinary = pool.lane(ORDINARY)?;
    let mut order = OrderChecks {
        pool,
        options,
        tools: Tools::new(pool)?,
        streams: [stream(pool)?, stream(pool)?],
        next: (rank + 1) % world,
        before: (rank + world - 1) % world,
        slot: pool.alloc(BYTES)?,
        sources: [ordinary.alloc(BYTES)?, ordinary.alloc(BYTES)?],
        got: [ordinary.alloc(BYTES)?, ordinary.alloc(BYTES)?],
        tally: Tally::new(pool),
    };
    pool.commit()?;
    for captured in [false, true] {
        order.products(captured)?;
        order.calls(captured)?;
    }
    order.threads()?;
    order.signals()?;
    order.waits()?;
    order.reuses()?;
    if rank == 0 {
        println!("the order of calls: {} cases, {} wrong", order.tally.cases, order.tally.wrong);
    }
    Ok(order.tally.counts())
}

impl OrderChecks<'_> {
    /// A communicator beside which others may have calls under way, so that the next call waits for the last one's kernel
    /// alone.
    fn communicator(&self) -> Result<Communicator> {
        let options = CommunicatorOptions { concurrent: Some(2), ..self.options.communicator() };
        Communicator::with_options(self.pool, &options)
    }

    /// Whether this rank is the one that is held up.
    fn is_late(&self, turn: u64) -> bool {
        u64::from(self.pool.rank()) == turn % u64::from(self.pool.world())
    }

    fn hold_up(&self, turn: u64, stream: &Stream) -> Result<()> {
        if self.is_late(turn) { self.tools.pause(PAUSE, stream) } else { Ok(()) }
    }

    fn data(&self, rank: u32, number: u64) -> Vec<u8> {
        input(random(self.options.seed, 700 + number), rank, DType::U8, BYTES)
    }

    /// Counts a case: what went wrong in the calls, or what arrived.
    fn judge(&mut self, what: &str, comm: &Communicator, numbers: [u64; 2]) -> Result<()> {
        for stream in self.streams {
            let outcome = comm.synchronize(&stream);
            self.tally.expect(&format!("{what}: {outcome:?}"), outcome.is_ok());
        }
        for (got, number) in self.got.iter().zip(numbers) {
            let arrived = download(self.pool, got.address(), BYTES)?;
            let wanted = self.data(self.before, number);
            self.tally.expect(&format!("{what}: what call {number} got"), arrived == wanted);
        }
        Ok(())
    }

    /// Uploads new data for two calls.
    fn refill(&self, numbers: [u64; 2]) -> Result<()> {
        for (source, number) in self.sources.iter().zip(numbers) {
            upload(self.pool, source.address(), &self.data(self.pool.rank(), number))?;
        }
        self.got.iter().try_for_each(|got| upload(self.pool, got.address(), &[0xa5; BYTES]))
    }

    /// Runs `work` on both streams at once, in a graph if it is to be captured.
    fn around(&self, captured: bool, work: impl FnOnce() -> Result<()>) -> Result<()> {
        if !captured {
            return work();
        }
        let ([one, two], driver) = (self.streams, self.pool.driver());
        let fork = |from: Stream, to: Stream| {
            let event = driver.record_event(from)?;
            let waited = driver.wait_event(to, &event);
            driver.release_event(event);
            waited
        };
        let graph = CallGraph::capture(self.pool, one, || {
            fork(one, two)?;
            work()?;
            fork(two, one)
        })?;
        graph.launch(self.pool, one)?;
        // The graph runs to its end before it is destroyed.
        self.tools.found()?;
        graph.destroy(self.pool)
    }

    /// Copies by copy engines into a slot, which is read behind the call's kernel: the next call, on another stream, does
    /// not overwrite it before.
    fn products(&mut self, captured: bool) -> Result<()> {
        let comm = self.communicator()?;
        let shape = MatmulShape {
            kind: MatmulKind::AllGatherMatmul,
            dtype: DType::Bf16,
            rows: 128,
            inner: 64,
            columns: 0,
            rest: 7,
        };
        for turn in 0..self.options.few(12, 4) {
            let numbers = [2 * turn, 2 * turn + 1];
            self.refill(numbers)?;
            let order = &*self;
            order.around(captured, || {
                for ((stream, source), got) in
                    order.streams.iter().zip(&order.sources).zip(&order.got)
                {
                    comm.begin_matmul(&shape, stream)?;
                    let ends = (order.slot.as_ptr(), source.as_ptr().cast_const());
                    // SAFETY: the blocks are as long; all ranks have begun the product, behind what read the slot.
                    unsafe { comm.push_step(ends, BYTES, (order.next, 0), stream) }?;
                    comm.await_step((order.before, 0), stream)?;
                    order.hold_up(turn, stream)?;
                    order.tools.copy(got.address(), order.slot.address(), BYTES, stream)?;
                    comm.extend_order(stream)?;
                }
                Ok(())
            })?;
            self.judge(&format!("products, captured: {captured}"), &comm, numbers)?;
        }
        Ok(())
    }

    /// Two calls that follow each other on two streams, of which the first one's is held up on one rank.
    fn calls(&mut self, captured: bool) -> Result<()> {
        let comm = self.communicator()?;
        for turn in 0..self.options.few(12, 4) {
            // The last call outside graphs is on either stream, or on none of both.
            comm.barrier(&self.streams[turn as usize % 2])?;
            if turn % 3 == 2 {
                comm.forget_stream(&self.streams[turn as usize % 2])?;
            }
            for stream in self.streams {
                comm.synchronize(&stream)?;
            }
            let order = &*self;
            let made = order.around(captured, || {
                order.hold_up(turn, &order.streams[0])?;
                for (nth, stream) in order.streams.iter().enumerate() {
                    let (to, from) = (order.got[nth].as_ptr(), order.sources[nth].as_ptr());
                    let count = BYTES / 4 - nth;
                    // SAFETY: the blocks are as long, and nothing else uses them meanwhile.
                    unsafe {
                        comm.all_reduce_at(to, from, count, DType::I32, ReduceOp::Max, stream)
                    }?;
                }
                Ok(())
            });
            self.tally.expect(&format!("calls, captured: {captured}: {made:?}"), made.is_ok());
            for stream in self.streams {
                let outcome = comm.synchronize(&stream);
                self.tally
                    .expect(&format!("calls, captured: {captured}: {outcome:?}"), outcome.is_ok());
            }
        }
        Ok(())
    }

    /// Two threads take turns on the stream that both name by one handle.
    fn threads(&mut self) -> Result<()> {
        let comm = self.communicator()?;
        let own = Stream::PER_THREAD;
        for turn in 0..self.options.few(6, 2) {
            let order = &*self;
            let outcomes = [0, 1].map(|nth: usize| {
                std::thread::scope(|scope| {
                    let call = scope.spawn(|| {
                        if nth == 0 {
                            order.hold_up(turn, &own)?;
                        }
                        let (to, from) = (order.got[nth].as_ptr(), order.sources[nth].as_ptr());
                        let count = BYTES / 4 - nth;
                        // SAFETY: the blocks are as long, and nothing else uses them meanwhile.
                        unsafe {
                            comm.all_reduce_at(to, from, count, DType::I32, ReduceOp::Max, &own)
                        }
                    });
                    call.join().expect("a thread that makes a call")
                })
            });
            self.tools.found()?;
            let outcome = outcomes.into_iter().collect::<Result<Vec<()>>>();
            let outcome = outcome.and_then(|_| comm.synchronize(&self.streams[0]));
            self.tally.expect(&format!("threads: {outcome:?}"), outcome.is_ok());
        }
        Ok(())
    }

    /// A signal on a stream that is held up comes before the next one on another stream: what the first one announces is
    /// there when the peer has taken one.
    fn signals(&mut self) -> Result<()> {
        let comm = self.communicator()?;
        let long = self.options.communicator().timeout;
        let [one, two] = self.streams;
        for turn in 0..self.options.few(6, 2) {
            let numbers = [100 + turn, 100 + turn];
            self.refill(numbers)?;
            upload(self.pool, self.slot.address(), &[0x5a; BYTES])?;
            comm.barrier(&one)?;
            comm.synchronize(&one)?;
            let (next, before, slot) = (self.next, self.before, self.slot.as_ptr());
            self.tools.pause(PAUSE, &one)?;
            let from = self.sources[0].as_ptr().cast_const();
            // SAFETY: the blocks are as long; the slot is read behind the signal alone.
            unsafe { comm.put_by_copy_engine_at(slot, from, BYTES, next, &one) }?;
            comm.signal_by_memory(next, CHANNEL, &one)?;
            comm.signal_by_memory(next, CHANNEL, &two)?;
            // Streams of their own take what both announce.
            let takers = [stream(self.pool)?, stream(self.pool)?];
            for (taker, got) in takers.iter().zip(&self.got) {
                comm.wait_by_memory(before, CHANNEL, long, taker)?;
                self.tools.copy(got.address(), self.slot.address(), BYTES, taker)?;
            }
            for taker in takers {
                comm.synchronize(&taker)?;
                comm.forget_stream(&taker)?;
                crate::cuda::destroy(self.pool, taker)?;
            }
            self.judge("signals by memory operations", &comm, numbers)?;
        }
        Ok(())
    }

    /// The first wait takes the first signal, although its stream is held up: what follows the second wait, on another
    /// stream, comes after the second signal.
    fn waits(&mut self) -> Result<()> {
        let comm = self.communicator()?;
        let long = self.options.communicator().timeout;
        let [one, two] = self.streams;
        for turn in 0..self.options.few(6, 2) {
            let numbers = [200 + 2 * turn, 201 + 2 * turn];
            self.refill(numbers)?;
            upload(self.pool, self.slot.address(), &[0x5a; BYTES])?;
            comm.barrier(&one)?;
            comm.synchronize(&one)?;
            let (next, before, slot) = (self.next, self.before, self.slot.as_ptr());
            let sender = stream(self.pool)?;
            for (nth, source) in self.sources.iter().enumerate() {
                if nth == 1 {
                    // The peer has taken the first signal, and what it announced.
                    comm.wait(next, CHANNEL, long, &sender)?;
                }
                let from = source.as_ptr().cast_const();
                // SAFETY: the blocks are as long; the second copy comes when the first one was read.
                unsafe { comm.put_by_copy_engine_at(slot, from, BYTES, next, &sender) }?;
                comm.signal_by_memory(next, CHANNEL, &sender)?;
            }
            self.tools.pause(PAUSE, &one)?;
            comm.wait_by_memory(before, CHANNEL, long, &one)?;
            comm.wait_by_memory(before, CHANNEL, long, &two)?;
            self.tools.copy(self.got[0].address(), self.slot.address(), BYTES, &one)?;
            comm.signal(before, CHANNEL, &one)?;
            self.tools.copy(self.got[1].address(), self.slot.address(), BYTES, &two)?;
            comm.synchronize(&sender)?;
            comm.forget_stream(&sender)?;
            crate::cuda::destroy(self.pool, sender)?;
            self.judge("waits by memory operations", &comm, numbers)?;
        }
        Ok(())
    }

    /// D4: a block that another stream of this rank still writes when it is freed.
    fn reuses(&mut self) -> Result<()> {
        let lane = self.pool.lane(ORDINARY)?;
        let [one, two] = self.streams;
        for turn in 0..self.options.few(6, 2) as u8 {
            let block = lane.alloc_on::<u8>(BYTES, one)?;
            let address = block.address();
            self.tools.pause(PAUSE, &two)?;
            self.tools.fill(address, 0xee, BYTES, &two)?;
            block.record_use(two)?;
            block.free()?;
            let again = lane.alloc_on::<u8>(BYTES, one)?;
            self.tools.fill(again.address(), turn, BYTES, &one)?;
            self.tools.found()?;
            let found = download(self.pool, again.address(), BYTES)?;
            let right = again.address() == address && found.iter().all(|byte| *byte == turn);
            self.tally.expect("a block that another stream writes", right);
            again.free()?;
        }
        Ok(())
    }
}
