//! Graphs that are being captured or have memory, and which lane each of them has.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use symmpool_allocator::{Error, Result, Stream};

use super::{Device, GRAPHS, MempoolId};
use crate::guard::lock;

#[derive(Debug, Default)]
pub(super) struct Captures {
    /// The running captures; the last one began last.
    pub(super) open: Vec<Open>,
    pub(super) graphs: BTreeMap<MempoolId, Graph>,
    /// For each lane of graphs, whether a graph has it, or blocks of a former graph are still in use.
    pub(super) taken: [bool; GRAPHS],
    /// Ordinary blocks that were freed during captures: events cannot be recorded while streams are captured.
    pub(super) deferred: Vec<u64>,
}

#[derive(Debug)]
pub(super) struct Open {
    id: MempoolId,
    /// The thread that began the capture.
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
    /// Begins a capture: from now on, allocations of this thread, and allocations of other threads on streams that are
    /// being captured, are memory of the graph `id`.
    pub fn begin(&self, id: MempoolId) -> Result<()> {
        self.own_process()?;
        let mut captures = lock(&self.captures);
        if let Some(graph) = captures.graphs.get_mut(&id) {
            graph.uses += 1;
        } else {
            let free = captures.taken.iter().position(|taken| !taken).ok_or_else(|| {
                Error::invalid_state(format!(
                    "{GRAPHS} graphs have memory of their own; let graphs share memory (`pool=`), or \
                     delete some"
                ))
            })?;
            captures.taken[free] = true;
            captures.graphs.insert(id, Graph { lane: free + 1, uses: 1 });
        }
        captures.open.push(Open { id, thread: thread() });
        self.open.store(captures.open.len(), Ordering::Release);
        Ok(())
    }

    /// Ends the capture of the latest [`begin`](Self::begin) of `id`.
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

    /// Notes that one of the graphs that use the memory of `id` was destroyed.
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

    /// Makes a lane free for another graph if its graph was destroyed and its last block is freed.
    pub(super) fn reclaim(&self, captures: &mut Captures, lane: usize) {
        let owned = captures.graphs.values().any(|graph| graph.lane == lane);
        if !owned && captures.taken[lane - 1] && self.is_empty(lane) {
            captures.taken[lane - 1] = false;
            // The next graph uses its memory, or the next trim releases it.
        }
    }

    /// Whether a lane has no live block. If that cannot be found out, it is not given to another graph.
    fn is_empty(&self, lane: usize) -> bool {
        self.lanes[lane].live_blocks().is_ok_and(|live| live == 0)
    }

    /// The lane for an allocation on `stream`.
    pub(super) fn lane_for(&self, stream: Stream) -> Result<usize> {
        if self.open.load(Ordering::Acquire) == 0 {
            return Ok(0);
        }
        let captures = lock(&self.captures);
        let here = thread();
        let by_thread = captures.open.iter().rev().find(|open| open.thread == here);
        let found = match by_thread {
            Some(open) => Some(open),
            // Another thread takes part in the capture, such as one of autograd.
            None if self.pool.driver().is_capturing(stream) => captures.open.last(),
            None => None,
        };
        Ok(found.map_or(0, |open| captures.graphs.get(&open.id).map_or(0, |graph| graph.lane)))
    }
}
