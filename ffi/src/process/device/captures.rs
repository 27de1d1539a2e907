//! Graphs that are being captured or have memory, and which lane each of them has.

use std::collections::BTreeMap;

use symmpool_allocator::{Error, Result};

/// How many graphs (or groups of graphs that share memory) can have memory at the same time.
pub(super) const GRAPHS: usize = 31;

/// torch's identifier of a graph's memory.
pub type MempoolId = (u64, u64);

#[derive(Debug, Default)]
pub(super) struct Captures {
    /// The running captures; the last one began last.
    open: Vec<Open>,
    graphs: BTreeMap<MempoolId, Graph>,
    /// For each lane of graphs, whether a graph has it, or blocks of a former graph are still in use.
    taken: [bool; GRAPHS],
    /// Ordinary blocks that were freed during captures: events cannot be recorded while streams are captured.
    deferred: Vec<u64>,
}

#[derive(Debug)]
struct Open {
    id: MempoolId,
    /// The thread that began the capture.
    thread: usize,
}

#[derive(Debug)]
struct Graph {
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

impl Captures {
    /// How many captures are running.
    pub(super) fn running(&self) -> usize {
        self.open.len()
    }

    /// How many graphs have memory.
    pub(super) fn graphs(&self) -> usize {
        self.graphs.len()
    }

    /// Whether a graph has a lane, or blocks of a former graph are still in use there. Lane 0 is ordinary memory.
    pub(super) fn is_taken(&self, lane: usize) -> bool {
        lane > 0 && self.taken[lane - 1]
    }

    /// Begins a capture into the memory of `id` by this thread.
    pub(super) fn begin(&mut self, id: MempoolId) -> Result<()> {
        if let Some(graph) = self.graphs.get_mut(&id) {
            graph.uses += 1;
        } else {
            let free = self.taken.iter().position(|taken| !taken).ok_or_else(|| {
                Error::invalid_state(format!(
                    "{GRAPHS} graphs have memory of their own; let graphs share memory (`pool=`), or \
                     delete some"
                ))
            })?;
            self.taken[free] = true;
            self.graphs.insert(id, Graph { lane: free + 1, uses: 1 });
        }
        self.open.push(Open { id, thread: thread() });
        Ok(())
    }

    /// Ends the capture of the latest [`begin`](Self::begin) of `id`. Returns the ordinary blocks that are to be freed now:
    /// those that were freed during captures, if this was the last one.
    pub(super) fn end(&mut self, id: MempoolId) -> Result<Vec<u64>> {
        let at = self.open.iter().rposition(|open| open.id == id);
        let at =
            at.ok_or_else(|| Error::invalid_state(format!("no capture into {id:?} is open")))?;
        self.open.remove(at);
        Ok(if self.open.is_empty() { std::mem::take(&mut self.deferred) } else { Vec::new() })
    }

    /// Takes an ordinary block that is freed during a capture. False if there is none.
    pub(super) fn defer(&mut self, address: u64) -> bool {
        let is_running = !self.open.is_empty();
        if is_running {
            self.deferred.push(address);
        }
        is_running
    }

    /// Notes that one of the graphs that use the memory of `id` was destroyed. Returns the lane if that was the last one.
    pub(super) fn release(&mut self, id: MempoolId) -> Result<Option<usize>> {
        let graph = self.graphs.get_mut(&id);
        let graph = graph
            .ok_or_else(|| Error::invalid_state(format!("no graph has memory called {id:?}")))?;
        graph.uses -= 1;
        let lane = graph.lane;
        if graph.uses > 0 {
            return Ok(None);
        }
        self.graphs.remove(&id);
        Ok(Some(lane))
    }

    /// Makes a lane free for another graph if its graph was destroyed and it is empty. The next graph uses its memory, or the
    /// next trim releases it.
    pub(super) fn reclaim(&mut self, lane: usize, is_empty: impl FnOnce() -> bool) {
        let owned = self.graphs.values().any(|graph| graph.lane == lane);
        if !owned && self.taken[lane - 1] && is_empty() {
            self.taken[lane - 1] = false;
        }
    }

    /// The lane for an allocation by this thread on a stream, of which `is_captured` says whether it is being captured.
    pub(super) fn lane(&self, is_captured: impl FnOnce() -> bool) -> usize {
        let here = thread();
        let by_thread = self.open.iter().rev().find(|open| open.thread == here);
        let found = match by_thread {
            Some(open) => Some(open),
            // Another thread takes part in the capture, such as one of autograd.
            None if is_captured() => self.open.last(),
            None => None,
        };
        found.map_or(0, |open| self.graphs.get(&open.id).map_or(0, |graph| graph.lane))
    }
}
