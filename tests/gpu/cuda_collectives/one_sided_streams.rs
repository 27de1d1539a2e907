//! Checks operations of one communicator on several streams: each waits for the operation that it must follow, and
//! for nothing that comes later on that operation's stream.

use std::time::Duration;

use symmpool_allocator::{Pool, Result, Stream};
use symmpool_collectives::Communicator;

use crate::Options;
use crate::cuda::{CallGraph, destroy, stream};
use crate::tools::Tools;

/// The timeout after which operations that wait for each other fail. The first use of a kernel takes a second on
/// emulated devices.
const PATIENCE: Duration = Duration::from_secs(8);
/// How long a stream is held up.
const PAUSE: Duration = Duration::from_millis(300);

// The channels, by what a signal on each means.
const ASK: u32 = 6;
const ANSWER: u32 = 7;

struct Sided<'a> {
    pool: &'a Pool,
    options: &'a Options,
    next: u32,
    before: u32,
    /// This rank's own operations of a case are on two of them; its answers to the peer are on the third.
    streams: [Stream; 3],
    cases: u64,
    wrong: u64,
}

/// Runs the checks. Returns how many cases there were, and how many of them were wrong.
pub(crate) fn run(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let (rank, world) = (pool.rank(), pool.world());
    let mut sided = Sided {
        pool,
        options,
        next: (rank + 1) % world,
        before: (rank + world - 1) % world,
        streams: [stream(pool)?, stream(pool)?, stream(pool)?],
        cases: 0,
        wrong: 0,
    };
    sided.signals()?;
    sided.waits()?;
    sided.calls()?;
    sided.captures()?;
    sided.gone()?;
    if rank == 0 {
        println!("one-sided, on streams: {} cases, {} wrong", sided.cases, sided.wrong);
    }
    Ok((sided.cases, sided.wrong))
}

impl Sided<'_> {
    /// A communicator of its own for each case, so that only that case fails if it waits too long.
    fn communicator(&self) -> Result<Communicator> {
        Communicator::with_options(self.pool, &self.options.communicator())
    }

    fn judge(&mut self, what: &str, comm: &Communicator) -> Result<()> {
        self.cases += 1;
        // All streams finish, with or without an error.
        let outcomes = self.streams.map(|stream| comm.synchronize(&stream));
        if let Err(error) = outcomes.into_iter().collect::<Result<Vec<()>>>() {
            self.wrong += 1;
            println!("rank {}: {what}: {error}", self.pool.rank());
        }
        Ok(())
    }

    /// A channel's second signal, on another stream, does not wait for a wait that follows the first signal
    /// on its stream: the peer answers that wait when it has both signals.
    fn signals(&mut self) -> Result<()> {
        let (next, before, [one, two, answers]) = (self.next, self.before, self.streams);
        let comm = self.communicator()?;
        comm.signal(next, ASK, &one)?;
        comm.wait(next, ANSWER, PATIENCE, &one)?;
        comm.signal(next, ASK, &two)?;
        comm.wait(before, ASK, PATIENCE, &answers)?;
        comm.wait(before, ASK, PATIENCE, &answers)?;
        comm.signal(before, ANSWER, &answers)?;
        self.judge("signals on two streams with a wait between them", &comm)
    }

    /// A channel's second wait, on another stream, does not wait for a later wait on the first one's stream either,
    /// whose signal depends on it.
    fn waits(&mut self) -> Result<()> {
        let (next, before, [one, two, answers]) = (self.next, self.before, self.streams);
        let comm = self.communicator()?;
        comm.wait(before, ASK, PATIENCE, &one)?;
        comm.wait(before, ANSWER, PATIENCE, &one)?;
        comm.wait(before, ASK, PATIENCE, &two)?;
        comm.signal(before, ASK + 2, &two)?;
        comm.signal(next, ASK, &answers)?;
        comm.signal(next, ASK, &answers)?;
        comm.wait(next, ASK + 2, PATIENCE, &answers)?;
        comm.signal(next, ANSWER, &answers)?;
        self.judge("waits on two streams with a third wait between them", &comm)
    }

    /// A call of all ranks, on another stream, does not wait for a wait that follows the call before on its stream.
    fn calls(&mut self) -> Result<()> {
        let (next, before, [one, two, answers]) = (self.next, self.before, self.streams);
        let comm = self.communicator()?;
        comm.barrier(&one)?;
        comm.wait(before, ANSWER, PATIENCE, &one)?;
        comm.barrier(&two)?;
        // The peer signals after the second call.
        comm.signal(next, ANSWER, &two)?;
        comm.wait(before, ASK, PATIENCE, &answers)?;
        comm.signal(next, ASK, &two)?;
        self.judge("calls on two streams with a wait between them", &comm)
    }

    /// S8: captured operations wait for nothing that was put on other streams, whether it is done or not, and do not
    /// change the order of operations outside the capture.
    fn captures(&mut self) -> Result<()> {
        let (next, before, [one, two, answers]) = (self.next, self.before, self.streams);
        let tools = Tools::new(self.pool)?;
        let comm = self.communicator()?;
        tools.pause(PAUSE, &one)?;
        comm.signal(next, ASK, &one)?;
        comm.barrier(&one)?;
        // The calls are not done yet.
        let graph = CallGraph::capture(self.pool, two, || {
            comm.signal(next, ASK, &two)?;
            comm.wait(before, ASK, PATIENCE, &two)?;
            comm.barrier(&two)
        });
        comm.wait(before, ASK, PATIENCE, &answers)?;
        comm.barrier(&answers)?;
        self.judge("a capture while calls are under way", &comm)?;
        let graph = graph?;
        graph.launch(self.pool, two)?;
        self.judge("a graph that was captured while calls were under way", &comm)?;
        graph.destroy(self.pool)?;
        // The calls are done.
        let graph = CallGraph::capture(self.pool, two, || {
            comm.signal(next, ASK, &two)?;
            comm.wait(before, ASK, PATIENCE, &two)?;
            comm.barrier(&two)
        })?;
        graph.launch(self.pool, two)?;
        self.judge("a graph that was captured behind calls on another stream", &comm)?;
        graph.destroy(self.pool)
    }

    /// Streams are forgotten and destroyed with work on them: what follows still waits for that work, and neither
    /// the communicator nor the pool uses them again, though there are more streams than a lane can have.
    fn gone(&mut self) -> Result<()> {
        let (next, before, [one, ..]) = (self.next, self.before, self.streams);
        let tools = Tools::new(self.pool)?;
        let comm = self.communicator()?;
        for round in 0..80 {
            let brief = stream(self.pool)?;
            let block = self.pool.default_lane().alloc_on::<u8>(1000, brief)?;
            if round % 16 == 0 {
                tools.pause(PAUSE, &brief)?;
            }
            comm.signal(next, ASK, &brief)?;
            comm.wait(before, ASK, PATIENCE, &brief)?;
            comm.barrier(&brief)?;
            comm.forget_stream(&brief)?;
            block.free()?;
            self.pool.forget_stream(brief)?;
            destroy(self.pool, brief)?;
            if round % 20 == 0 {
                self.pool.commit()?;
            }
        }
        comm.signal(next, ASK, &one)?;
        comm.wait(before, ASK, PATIENCE, &one)?;
        comm.barrier(&one)?;
        self.judge("streams that are gone", &comm)?;
        // A stream with a communicator's last call cannot be forgotten while it is captured.
        let two = self.streams[1];
        comm.barrier(&two)?;
        let mut refused = Ok(());
        let graph = CallGraph::capture(self.pool, two, || {
            refused = comm.forget_stream(&two);
            comm.barrier(&two)
        })?;
        self.cases += 1;
        if !refused.is_err_and(|error| error.is_invalid_state()) {
            self.wrong += 1;
            println!("rank {}: a stream is forgotten in its capture", self.pool.rank());
        }
        comm.forget_stream(&two)?;
        comm.barrier(&one)?;
        self.judge("a stream that was captured and forgotten", &comm)?;
        graph.destroy(self.pool)
    }
}
