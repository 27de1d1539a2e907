//! Checks calls that are refused while a graph is captured: the capture ends in an error, so that there is no graph without
//! the call, and the other ranks get an error when they launch theirs, as soon as this rank does anything else. Where all
//! ranks refuse alike, all goes on. So it is with messages between two ranks.

use std::time::{Duration, Instant};

use symmpool_allocator::{Block, Error, Pool, Result, Stream};
use symmpool_collectives::{Communicator, CommunicatorOptions, DType, ReduceOp};

use crate::cuda::{CallGraph, download, stream, upload};
use crate::{MAX_LATE, Options, expect_error};

const COUNT: usize = 10_000;

/// Next step of a rank when a call of its capture was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    /// It goes on with the capture, which ends in an error, and makes another one without the call, and launches it.
    CapturesAnew,
    /// It gives the graph up, and makes the same call eagerly.
    MakesTheCall,
    /// It gives the graph up, and does nothing but look for errors.
    Synchronizes,
    /// It gives the communicator up.
    Drops,
}

struct CaptureChecks<'a> {
    pool: &'a Pool,
    options: CommunicatorOptions,
    block: Block<f32>,
    /// The stream that is captured, and another one.
    streams: [Stream; 2],
    meeting: Communicator,
    timeout: Duration,
    wrong: u32,
}

/// Runs the checks. Returns how many of them were wrong.
pub(crate) fn run(pool: &Pool, options: &Options, timeout: Duration) -> Result<u32> {
    let options = CommunicatorOptions { timeout, ..options.communicator() };
    let mut captures = CaptureChecks {
        pool,
        options,
        block: pool.alloc(2 * COUNT)?,
        streams: [stream(pool)?, stream(pool)?],
        meeting: Communicator::new(pool)?,
        timeout,
        wrong: 0,
    };
    pool.commit()?;
    captures.meeting.set_timeout(20 * timeout)?;
    // The communicator's last call is on another stream, on none, or on the stream that is captured.
    for last in [Some(1), None, Some(0)] {
        for then in [Then::CapturesAnew, Then::MakesTheCall, Then::Synchronizes, Then::Drops] {
            captures.one_rank(last, then)?;
        }
        for anew in [false, true] {
            captures.all_ranks(last, anew)?;
        }
    }
    for sends in [true, false] {
        for then in [Then::CapturesAnew, Then::MakesTheCall, Then::Synchronizes, Then::Drops] {
            captures.one_end(sends, then)?;
        }
        captures.both_ends(sends)?;
    }
    Ok(captures.wrong)
}

impl CaptureChecks<'_> {
    fn expect(&mut self, what: &str, right: bool) {
        if !right {
            self.wrong += 1;
            println!("rank {}: {what}", self.pool.rank());
        }
    }

    fn meet(&self) -> Result<()> {
        self.meeting.barrier(&self.streams[0])?;
        self.meeting.synchronize(&self.streams[0])
    }

    /// An all-reduce in place, of the first half of the block.
    fn call(&self, comm: &Communicator, stream: Stream) -> Result<()> {
        let at = self.block.as_ptr().cast();
        // SAFETY: the block is longer, and nothing else uses it.
        unsafe { comm.all_reduce_at(at, at, COUNT, DType::F32, ReduceOp::Sum, &stream) }
    }

    /// A call whose buffers overlap, which is refused.
    fn refused(&self, comm: &Communicator) -> Result<Error> {
        let at = self.block.address();
        let (to, from, stream) = ((at + 64) as *mut u8, at as *const u8, &self.streams[0]);
        // SAFETY: it is refused before anything is touched.
        let called =
            unsafe { comm.all_reduce_at(to, from, COUNT, DType::F32, ReduceOp::Sum, stream) };
        expect_error(called, "a call with buffers that overlap")
    }

    /// A communicator whose last call is on that stream, and which has done it.
    fn begin(&self, last: Option<usize>) -> Result<Communicator> {
        let comm = Communicator::with_options(self.pool, &self.options)?;
        if let Some(which) = last {
            self.call(&comm, self.streams[which])?;
            comm.synchronize(&self.streams[which])?;
        }
        let ones = vec![1_f32; 2 * COUNT];
        let bytes: Vec<u8> = ones.into_iter().flat_map(f32::to_le_bytes).collect();
        upload(self.pool, self.block.address(), &bytes)?;
        self.meet()?;
        Ok(comm)
    }

    /// Whether every element of the first half is that number.
    fn holds(&self, number: f32) -> Result<bool> {
        let found = download(self.pool, self.block.address(), 4 * COUNT)?;
        Ok(found.chunks_exact(4).all(|four| four == number.to_le_bytes()))
    }

    /// One rank refuses a call that the others capture.
    fn one_rank(&mut self, last: Option<usize>, then: Then) -> Result<()> {
        let name = format!("a call refused in a capture, last call on {last:?}, {then:?}");
        let (comm, captured) = (self.begin(last)?, self.streams[0]);
        let odd = self.pool.world() - 1;
        let began = Instant::now();
        let ended = if self.pool.rank() == odd {
            let graph = CallGraph::capture(self.pool, captured, || {
                let error = self.refused(&comm)?;
                self.expect_refusal(&error)?;
                // Whoever goes on gets errors, or a graph that does not become one.
                let _ = self.call(&comm, captured);
                Ok(())
            });
            self.expect(&format!("{name}: a graph without the call"), graph.is_err());
            match then {
                Then::CapturesAnew => self.capture_anew(&comm, last),
                Then::MakesTheCall => self.call(&comm, captured),
                Then::Synchronizes => comm.synchronize(&captured),
                Then::Drops => {
                    drop(comm);
                    return self.meet();
                }
            }
            .and_then(|()| self.settle(&comm))
        } else {
            let graph = CallGraph::capture(self.pool, captured, || {
                self.call(&comm, captured)?;
                self.call(&comm, captured)
            })?;
            graph.launch(self.pool, captured)?;
            let ended = comm.synchronize(&captured);
            graph.destroy(self.pool)?;
            ended
        };
        self.expect_diverged(&name, ended, odd, began.elapsed());
        // No replay and no call succeeds in silence afterwards.
        let again = self.call(&comm, captured).and_then(|()| comm.synchronize(&captured));
        self.expect(&format!("{name}: the next call succeeds"), again.is_err());
        self.meet()
    }

    /// Expects an error, in time, that names a rank which has made another call.
    fn expect_diverged(&mut self, name: &str, ended: Result<()>, odd: u32, took: Duration) {
        match ended {
            Ok(()) => self.expect(&format!("{name}: no error"), false),
            Err(error) => {
                let right = error.is_diverged() && error.ranks().contains(&odd);
                self.expect(&format!("{name}: {error}"), right);
                self.expect(&format!("{name}: after {took:?}"), took < self.timeout + MAX_LATE);
            }
        }
    }

    /// Waits until a rank that has refused a call learns itself that the others have made another one.
    fn settle(&self, comm: &Communicator) -> Result<()> {
        let until = Instant::now() + self.timeout;
        while Instant::now() < until {
            comm.synchronize(&self.streams[0])?;
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    fn expect_refusal(&self, error: &Error) -> Result<()> {
        match error.is_invalid_argument() {
            true => Ok(()),
            false => Err(error.clone()),
        }
    }

    /// Does what a rank must do before it captures the stream of its last call again.
    fn may_capture(&self, comm: &Communicator, last: Option<usize>) -> Result<()> {
        let captured = self.streams[0];
        if last != Some(0) {
            return Ok(());
        }
        let mut early = None;
        let graph = CallGraph::capture(self.pool, captured, || {
            early = self.call(comm, captured).err();
            Ok(())
        });
        if graph.is_ok() || !early.as_ref().is_some_and(Error::is_invalid_state) {
            return Err(Error::invalid_state(format!("a capture before the report: {early:?}")));
        }
        comm.synchronize(&captured)
    }

    /// Captures and launches a graph without the call that was refused.
    fn capture_anew(&self, comm: &Communicator, last: Option<usize>) -> Result<()> {
        self.may_capture(comm, last)?;
        let graph =
            CallGraph::capture(self.pool, self.streams[0], || self.call(comm, self.streams[0]))?;
        graph.launch(self.pool, self.streams[0])?;
        let ended = comm.synchronize(&self.streams[0]);
        graph.destroy(self.pool)?;
        ended
    }

    /// All ranks refuse a call of their captures alike. What they capture and call afterwards is right.
    fn all_ranks(&mut self, last: Option<usize>, anew: bool) -> Result<()> {
        let name = format!("a call that all refuse in a capture, last call on {last:?}, {anew}");
        let (comm, captured) = (self.begin(last)?, self.streams[0]);
        let world = self.pool.world() as f32;
        let graph = CallGraph::capture(self.pool, captured, || self.refused(&comm).map(drop));
        self.expect(&format!("{name}: a graph without the call"), graph.is_err());
        let mut number = 1.0;
        let graph = match anew {
            true => {
                self.may_capture(&comm, last)?;
                Some(CallGraph::capture(self.pool, captured, || self.call(&comm, captured))?)
            }
            false => None,
        };
        for _ in 0..3 {
            match &graph {
                Some(graph) => graph.launch(self.pool, captured)?,
                None => self.call(&comm, captured)?,
            }
            number *= world;
            comm.synchronize(&captured)?;
            let right = self.holds(number)?;
            self.expect(&format!("{name}: sums that are not {number}"), right);
        }
        if let Some(graph) = graph {
            graph.destroy(self.pool)?;
        }
        self.call(&comm, self.streams[1])?;
        comm.synchronize(&self.streams[1])?;
        let right = self.holds(number * world)?;
        self.expect(&format!("{name}: an eager call afterwards"), right);
        self.meet()
    }

    /// This rank's end of a message between ranks 0 and the last one, of the first half of the block; null for one that is
    /// refused.
    fn message(&self, comm: &Communicator, sends: bool, is_refused: bool) -> Result<()> {
        let at = if is_refused { 0 } else { self.block.address() };
        let odd = self.pool.world() - 1;
        let peer = if self.pool.rank() == odd { 0 } else { odd };
        let stream = &self.streams[0];
        match sends {
            // SAFETY: the block is longer, and nothing else uses it; what is refused is not touched.
            true => unsafe { comm.send_at(at as *const u8, COUNT, DType::F32, peer, stream) },
            // SAFETY: the block is longer, and nothing else uses it; what is refused is not touched.
            false => unsafe { comm.recv_at(at as *mut u8, COUNT, DType::F32, peer, stream) },
        }
    }

    fn message_by_graph(&self, comm: &Communicator, sends: bool) -> Result<()> {
        let captured = self.streams[0];
        let graph = CallGraph::capture(self.pool, captured, || self.message(comm, sends, false))?;
        graph.launch(self.pool, captured)?;
        let ended = comm.synchronize(&captured);
        graph.destroy(self.pool)?;
        ended
    }

    /// Refuses this rank's end of a message in a capture, which is to end in an error.
    fn refuse_message(&mut self, name: &str, comm: &Communicator, sends: bool) {
        let mut refused = None;
        let graph = CallGraph::capture(self.pool, self.streams[0], || {
            refused = self.message(comm, sends, true).err();
            Ok(())
        });
        self.expect(&format!("{name}: a graph without the message"), graph.is_err());
        let right = refused.as_ref().is_some_and(Error::is_invalid_argument);
        self.expect(&format!("{name}: refused by {refused:?}"), right);
    }

    /// The last rank refuses its end of a message, which it `sends` or receives, that rank 0 captures.
    fn one_end(&mut self, sends: bool, then: Then) -> Result<()> {
        let name = format!("a message refused in a capture, sent by its rank: {sends}, {then:?}");
        let (comm, captured) = (self.begin(None)?, self.streams[0]);
        let (rank, odd) = (self.pool.rank(), self.pool.world() - 1);
        let began = Instant::now();
        let ended = if rank == odd {
            self.refuse_message(&name, &comm, sends);
            match then {
                Then::CapturesAnew => self.message_by_graph(&comm, sends),
                Then::MakesTheCall => self.message(&comm, sends, false),
                Then::Synchronizes => comm.synchronize(&captured),
                Then::Drops => {
                    drop(comm);
                    return self.meet();
                }
            }
        } else if rank == 0 {
            self.message_by_graph(&comm, !sends)
        } else {
            Ok(())
        };
        // A sender may be past the message, and other ranks have no part in it.
        let ended = ended.and_then(|()| comm.synchronize(&captured)).and_then(|()| {
            comm.barrier(&captured)?;
            comm.synchronize(&captured)
        });
        self.expect_diverged(&name, ended, odd, began.elapsed());
        self.meet()
    }

    /// Both ends refuse a message of their captures. What they send afterwards arrives.
    fn both_ends(&mut self, sends: bool) -> Result<()> {
        let name = format!("a message that both ends refuse in a capture, {sends}");
        let (comm, captured) = (self.begin(None)?, self.streams[0]);
        let (rank, odd) = (self.pool.rank(), self.pool.world() - 1);
        if rank == 0 || rank == odd {
            let sends = sends == (rank == odd);
            self.refuse_message(&name, &comm, sends);
            let number = if sends { 3_f32 } else { 1.0 };
            upload(self.pool, self.block.address(), &number.to_le_bytes().repeat(COUNT))?;
            for _ in 0..2 {
                self.message(&comm, sends, false)?;
                comm.synchronize(&captured)?;
            }
            let right = self.holds(3.0)?;
            self.expect(&format!("{name}: it does not arrive"), right);
        }
        self.call(&comm, captured)?;
        comm.synchronize(&captured)?;
        self.meet()
    }
}
