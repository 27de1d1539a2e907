//! Graphs that are being captured, or that have memory: which lane is whose.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use symmpool_allocator::{Error, Result, Stream};

use super::{Device, GRAPHS, MempoolId};
use crate::guard::lock;

#[derive(Debug, Default)]
pub(super) struct Captures {
    /// The latest last.
    pub(super) open: Vec<Open>,
    pub(super) graphs: BTreeMap<MempoolId, Graph>,
    /// For each graph's lane, whether it has an owner, or memory in use that had one.
    pub(super) taken: [bool; GRAPHS],
    /// Ordinary blocks freed meanwhile: events cannot be recorded while streams are captured.
    pub(super) deferred: Vec<u64>,
}

#[derive(Debug)]
pub(super) struct Open {
    id: MempoolId,
    /// The thread that began.
    thread: usize,
}

#[derive(Debug)]
pub(super) struct Graph {
    lane: usize,
    uses: u32,
}

/// A number that no other live thread has.
fn thread() -> usize {
    thread_local! {
        static MARK: u8 = const { 0 };
    }
    MARK.try_with(|mark| std::ptr::from_ref(mark) as usize).unwrap_or(0)
}

impl Device {
    /// What this thread, and whoever uses streams that are captured, allocates is memory of the
    /// graph `id` from now on.
    pub fn begin(&self, id: MempoolId) -> Result<()> {
        self.own_process()?;
        let mut captures = lock(&self.captures);
        if let Some(graph) = captures.graphs.get_mut(&id) {
            graph.uses += 1;
        } else {
            let free = captures.taken.iter().position(|taken| !taken).ok_or_else(|| {
                Error::invalid_state(format!(
                    "{GRAPHS} graphs have memory of their own; let graphs share it (`pool=`), or \
                     let go of some"
                ))
            })?;
            captures.taken[free] = true;
            captures.graphs.insert(id, Graph { lane: free + 1, uses: 1 });
        }
        captures.open.push(Open { id, thread: thread() });
        self.open.store(captures.open.len(), Ordering::Release);
        Ok(())
    }

    /// Ends the latest [`begin`](Self::begin) of `id`.
    pub fn end(&self, id: MempoolId) -> Result<()> {
        self.own_process()?;
        let mut captures = lock(&self.captures);
        let at = captures.open.iter().rposition(|open| open.id == id);
        let at =
            at.ok_or_else(|| Error::invalid_state(format!("no capture into {id:?} is open")))?;
        captures.open.remove(at);
        self.open.store(captures.open.len(), Ordering::Release);
        if !captures.open.is_empty() {
            return Ok(());
        }
        let deferred = std::mem::take(&mut captures.deferred);
        drop(captures);
        deferred.into_iter().try_for_each(|address| self.give_back(0, address))
    }

    /// One graph less uses the memory of `id`.
    pub fn release(&self, id: MempoolId) -> Result<()> {
        self.own_process()?;
        let mut captures = lock(&self.captures);
        let graph = captures.graphs.get_mut(&id);
        let graph = graph
            .ok_or_else(|| Error::invalid_state(format!("no graph has memory called {id:?}")))?;
        graph.uses -= 1;
        if graph.uses == 0 {
            let lane = graph.lane;
            captures.graphs.remove(&id);
            self.reclaim(&mut captures, lane);
        }
        Ok(())
    }

    /// A graph's lane whose graph is gone is free for another once its last block is.
    pub(super) fn reclaim(&self, captures: &mut Captures, lane: usize) {
        let owned = captures.graphs.values().any(|graph| graph.lane == lane);
        if !owned && captures.taken[lane - 1] && self.is_empty(lane) {
            captures.taken[lane - 1] = false;
            // Its memory stays for the next graph, or goes at the next trim.
        }
    }

    /// Whether a lane has no block. One that refuses to say is not given to another graph.
    fn is_empty(&self, lane: usize) -> bool {
        self.lanes[lane].live_blocks().is_ok_and(|live| live == 0)
    }

    /// Where an allocation on `stream` goes.
    pub(super) fn lane_for(&self, stream: Stream) -> Result<usize> {
        if self.open.load(Ordering::Acquire) == 0 {
            return Ok(0);
        }
        let captures = lock(&self.captures);
        let here = thread();
        let by_thread = captures.open.iter().rev().find(|open| open.thread == here);
        let found = match by_thread {
            Some(open) => Some(open),
            // Another thread's part of a capture, such as autograd's.
            None if self.pool.driver().is_capturing(stream) => captures.open.last(),
            None => None,
        };
        Ok(found.map_or(0, |open| captures.graphs.get(&open.id).map_or(0, |graph| graph.lane)))
    }
}
