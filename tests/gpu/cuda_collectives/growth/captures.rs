//! First large calls that are captured: memory grows in the capture, on all ranks, and graphs of before and after it are right.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use symmpool_allocator::{Error, Result};

use super::{DTYPE, FEW, GROWN, GrowingCall, GrowthChecks, KINDS, MANY, SMALL};
use crate::cuda::CallGraph;
use crate::{INTERRUPTED, MAX_LATE, expect_error};

/// How long ranks may wait where none comes.
const TIMEOUT: Duration = Duration::from_secs(2);

impl GrowthChecks<'_> {
    /// First large calls in captures.
    pub(super) fn captures(&mut self) -> Result<()> {
        for kind in KINDS {
            self.grows_in_a_capture_of(kind)?;
        }
        self.grows_after_captures()?;
        self.grows_beside_a_graph_that_runs()?;
        self.grows_where_one_rank_captured_small_calls()?;
        self.is_captured_on_all_ranks_or_on_none()?;
        self.says_which_captured_calls_differ()?;
        self.says_which_rank_does_not_capture()?;
        self.a_capture_can_be_interrupted()?;
        self.ranks_that_failed_keep_nobody_waiting()
    }

    /// Captures a call. Its error is the call's, and then there is no graph.
    fn capture(&self, kind: GrowingCall, count: usize) -> Result<CallGraph> {
        let mut error = None;
        let graph = CallGraph::capture(self.pool, self.stream, || {
            error = self.call(kind, count).err();
            Ok(())
        });
        match (graph, error) {
            (Ok(_), Some(error)) => {
                Err(Error::invalid_state(format!("a graph without the call: {error}")))
            }
            (graph, error) => error.map_or(graph, Err),
        }
    }

    /// Replays of a graph with one call are right.
    fn replay(&mut self, graph: &CallGraph, kind: GrowingCall, count: usize) -> Result<()> {
        self.case_by(kind, count, |growth| graph.launch(growth.pool, growth.stream))
    }

    /// The communicator's first call of all is a large one, and captured.
    fn grows_in_a_capture_of(&mut self, kind: GrowingCall) -> Result<()> {
        self.renew()?;
        let count = if kind == GrowingCall::Broadcast { MANY * 2 } else { MANY };
        let graph = self.capture(kind, count)?;
        let total = self.comm.memory().total;
        self.check(&format!("{kind:?} grows in a capture"), (SMALL + 1..=GROWN).contains(&total));
        for few in FEW {
            self.replay(&graph, kind, count)?;
            self.case(GrowingCall::AllReduce, few)?;
            self.case(kind, count)?;
        }
        for other in KINDS {
            self.case(other, MANY)?;
        }
        self.check("memory is taken once", self.comm.memory().total == total);
        self.check("no commit is due", !self.pool.is_commit_due());
        graph.destroy(self.pool)
    }

    /// Small calls that were captured before stay right, in the same graph and in others, as do large ones in their graphs.
    fn grows_after_captures(&mut self) -> Result<()> {
        self.renew()?;
        let mut graphs = Vec::new();
        for (kind, count) in [
            (GrowingCall::AllReduce, 1000),
            (GrowingCall::AllGather, 77),
            (GrowingCall::AllReduce, MANY),
            (GrowingCall::AllReduce, 4096),
            (GrowingCall::AllToAll, 500),
        ] {
            graphs.push((kind, count, self.capture(kind, count)?));
            let grown = self.comm.memory().total > SMALL;
            self.check("the first large call grows", grown == (graphs.len() > 2));
        }
        let total = self.comm.memory().total;
        for kind in KINDS {
            self.case(kind, MANY)?;
            for (kind, count, graph) in &graphs {
                self.replay(graph, *kind, *count)?;
                self.case(GrowingCall::AllGather, 1000)?;
            }
        }
        self.check("memory is taken once", self.comm.memory().total == total);
        graphs.into_iter().try_for_each(|(_, _, graph)| graph.destroy(self.pool))?;
        // Both in one graph, the small call before and behind the large one.
        self.renew()?;
        let both = CallGraph::capture(self.pool, self.stream, || {
            [1000, MANY, 4096]
                .into_iter()
                .try_for_each(|count| self.call(GrowingCall::AllReduce, count))?;
            self.call(GrowingCall::AllReduce, MANY)
        })?;
        for _ in 0..3 {
            self.replay(&both, GrowingCall::AllReduce, MANY)?;
            self.case(GrowingCall::AllReduce, 1000)?;
        }
        both.destroy(self.pool)
    }

    /// A graph of small calls was launched before, and may run while memory is taken: its first calls of all are among these.
    fn grows_beside_a_graph_that_runs(&mut self) -> Result<()> {
        for turn in 0..4 {
            self.renew()?;
            let small = CallGraph::capture(self.pool, self.stream, || {
                (0..20).try_for_each(|_| self.call(GrowingCall::AllReduce, 4096))
            })?;
            let last = self.pool.rank() == self.pool.world() - 1;
            if turn % 2 == 1 && last {
                // The calls of others wait for this rank's.
                std::thread::sleep(Duration::from_millis(100));
            }
            small.launch(self.pool, self.stream)?;
            let large = self.capture(GrowingCall::AllReduce, MANY)?;
            self.check("it grows", self.comm.memory().total > SMALL);
            self.comm.synchronize(&self.stream)?;
            for _ in 0..2 {
                self.replay(&large, GrowingCall::AllReduce, MANY)?;
                self.replay(&small, GrowingCall::AllReduce, 4096)?;
            }
            small.destroy(self.pool)?;
            large.destroy(self.pool)?;
        }
        Ok(())
    }

    /// Small calls that one rank alone captured keep nobody from taking memory, in a capture or outside.
    fn grows_where_one_rank_captured_small_calls(&mut self) -> Result<()> {
        let is_last = self.pool.rank() == self.pool.world() - 1;
        for captured in [false, true] {
            self.renew()?;
            let small = is_last.then(|| self.capture(GrowingCall::AllReduce, 1000)).transpose()?;
            let replayed = |growth: &Self| match &small {
                Some(graph) => graph.launch(growth.pool, growth.stream),
                None => growth.call(GrowingCall::AllReduce, 1000),
            };
            self.case_by(GrowingCall::AllReduce, 1000, replayed)?;
            let large = captured.then(|| self.capture(GrowingCall::AllReduce, MANY)).transpose()?;
            for count in [MANY, 1000, MANY] {
                self.case(GrowingCall::AllReduce, count)?;
                self.case(GrowingCall::AllToAll, count)?;
                self.case_by(GrowingCall::AllReduce, 1000, replayed)?;
            }
            self.check("one rank's graph is no obstacle", self.comm.memory().total > SMALL);
            // Once memory has grown, ranks may capture what others call.
            if is_last {
                let alone = self.capture(GrowingCall::AllReduce, MANY)?;
                self.replay(&alone, GrowingCall::AllReduce, MANY)?;
                alone.destroy(self.pool)?;
            } else {
                self.case(GrowingCall::AllReduce, MANY)?;
            }
            small.into_iter().chain(large).try_for_each(|graph| graph.destroy(self.pool))?;
        }
        let block = self.pool.alloc::<u8>(4 << 20)?;
        self.pool.commit()?;
        self.check("the pool commits", self.pool.is_window(block.address(), 4 << 20));
        Ok(())
    }

    /// A first large call that one rank captures, and the others make, is an error on all of them that says so, at once.
    fn is_captured_on_all_ranks_or_on_none(&mut self) -> Result<()> {
        let (rank, odd) = (self.pool.rank(), self.pool.world() - 1);
        for late in [None, Some(0), Some(odd)] {
            for odd_captures in [true, false] {
                self.renew()?;
                self.case(GrowingCall::AllReduce, 1000)?;
                if late == Some(rank) {
                    std::thread::sleep(Duration::from_millis(200));
                }
                let begun = Instant::now();
                let made = if (rank == odd) == odd_captures {
                    self.capture(GrowingCall::AllReduce, MANY).map(drop)
                } else {
                    self.call(GrowingCall::AllReduce, MANY)
                };
                let made = made.and_then(|()| self.comm.synchronize(&self.stream));
                let error = expect_error(made, "a first large call that some capture")?;
                let named =
                    error.is_diverged() && error.to_string().contains("captures in a graph");
                self.check(&format!("{late:?} {odd_captures}: {error}"), named);
                let patience = self.options.timeout / 2;
                self.check("at once", begun.elapsed() < patience.max(Duration::from_secs(5)));
                let again = expect_error(self.call(GrowingCall::AllReduce, 8), "a call after it")?;
                self.check(&format!("closed: {again}"), again.is_diverged());
            }
        }
        self.renew()
    }

    /// Calls that differ are the same error as outside of captures.
    fn says_which_captured_calls_differ(&mut self) -> Result<()> {
        let first = self.pool.rank() == 0;
        for (kind, count) in [
            (GrowingCall::AllReduce, MANY + 1),
            (GrowingCall::AllGather, MANY),
            (GrowingCall::Splits, 8),
        ] {
            self.renew()?;
            let (kind, count) = if first { (GrowingCall::AllReduce, MANY) } else { (kind, count) };
            let error = expect_error(self.capture(kind, count), "calls that differ")?;
            let named = error.is_diverged() && error.to_string().contains(&MANY.to_string());
            self.check(&format!("{kind:?}: {error}"), named);
        }
        self.renew()
    }

    /// A rank that does not come to a call which the others capture is named, in time, and gets an error when it comes. The pool
    /// goes on.
    fn says_which_rank_does_not_capture(&mut self) -> Result<()> {
        self.renew()?;
        self.case(GrowingCall::AllReduce, 1000)?;
        self.comm.set_timeout(TIMEOUT)?;
        let late = self.pool.world() - 1;
        if self.pool.rank() == late {
            std::thread::sleep(2 * TIMEOUT);
        }
        let begun = Instant::now();
        let captured = self.capture(GrowingCall::AllReduce, MANY);
        let error = expect_error(captured, "a capture to which a rank comes late")?;
        let named = error.is_timeout() && error.to_string().contains(&format!("rank {late}"));
        self.check(&format!("who is late: {error}"), named);
        self.check("in time", begun.elapsed() < TIMEOUT + MAX_LATE);
        self.check("the pool still commits", self.pool.can_commit());
        // Nothing of that is taken for the next communicator's.
        self.grows_in_a_capture_of(GrowingCall::AllReduce)
    }

    /// Ctrl-C ends the wait in a capture, and the other ranks' too.
    fn a_capture_can_be_interrupted(&mut self) -> Result<()> {
        self.renew()?;
        let (rank, last) = (self.pool.rank(), self.pool.world() - 1);
        self.comm.set_timeout(4 * TIMEOUT)?;
        if rank == last {
            std::thread::sleep(TIMEOUT / 2);
        }
        let begun = Instant::now();
        let interrupt = (rank == 0).then(|| {
            std::thread::spawn(|| {
                std::thread::sleep(TIMEOUT / 10);
                INTERRUPTED.store(true, Ordering::Relaxed);
            })
        });
        let error =
            expect_error(self.capture(GrowingCall::AllReduce, MANY), "an interrupted capture")?;
        self.check("soon", begun.elapsed() < TIMEOUT / 2);
        if let Some(interrupt) = interrupt {
            interrupt.join().expect("no panic");
            INTERRUPTED.store(false, Ordering::Relaxed);
            let again = expect_error(self.call(GrowingCall::AllReduce, 8), "a call after it")?;
            let stopped = error.is_interrupted() && again.is_interrupted();
            self.check(&format!("interrupted: {error}"), stopped);
        } else {
            let told = error.is_peer_lost() && error.ranks() == [0];
            self.check(&format!("without rank 0: {error}"), told);
        }
        self.check("the pool still commits", self.pool.can_commit());
        self.renew()
    }

    /// A rank whose communicator has failed says so to those that capture a first large call.
    fn ranks_that_failed_keep_nobody_waiting(&mut self) -> Result<()> {
        self.renew()?;
        let odd = self.pool.world() - 1;
        let begun = Instant::now();
        let mut failed = None;
        if self.pool.rank() == odd {
            // Rank 0 sends nothing.
            self.comm.set_timeout(TIMEOUT / 4)?;
            let to = self.output.as_ptr();
            // SAFETY: the block is longer, and nothing else uses it.
            let received = unsafe { self.comm.recv_at(to, 8, DTYPE, 0, &self.stream) };
            let received = received.and_then(|()| self.comm.synchronize(&self.stream));
            failed = Some(expect_error(received, "a message that nobody sends")?);
        }
        let fails = failed.as_ref().is_none_or(Error::is_timeout);
        self.check(&format!("no message: {failed:?}"), fails);
        let captured = self.capture(GrowingCall::AllReduce, MANY);
        let error = expect_error(captured, "a capture without a rank that has failed")?;
        let right = match self.pool.rank() == odd {
            true => error.to_string().contains("timed out"),
            false => error.is_diverged() && error.ranks().contains(&odd),
        };
        self.check(&format!("a rank has failed before: {error}"), right);
        let patience = self.options.timeout / 2;
        self.check("at once", begun.elapsed() < patience.max(Duration::from_secs(8)));
        self.renew()
    }
}
