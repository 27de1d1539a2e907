//! The physical memory of a lane's segments, and how it grows.

use std::collections::{BTreeMap, BTreeSet};
use std::mem;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::commit_due::CommitDue;
use super::early_handles::{EarlyHandle, EarlyHandles};
use crate::driver::{Event, Physical, Stream};
use crate::heap::Heap;
use crate::lane::{Backing, Growth, LaneState, Segment};
use crate::{Error, Result};

/// Contents of a lane's lock: its state, and its physical memory.
pub(crate) struct LaneInner {
    pub(crate) state: LaneState,
    pub(crate) memory: LaneMemory,
}

impl Drop for LaneInner {
    fn drop(&mut self) {
        // The driver outlives its lanes, and would keep the events that they recorded. In a forked child
        // the driver's lock may be held for ever.
        if self.memory.heap.is_here() {
            self.state.release_events(&mut self.memory);
        }
    }
}

/// The physical memory of a lane.
pub(crate) struct LaneMemory {
    heap: Arc<Heap>,
    /// Where the lane begins in a slot.
    base: u64,
    /// Whether pages of segments come with their first accesses, where the driver can.
    lazily: bool,
    /// Whether far more memory is made than will be used: then nothing checks that so much is available. Set for the time of
    /// one allocation.
    pub(super) sparsely: bool,
    /// The allocations of segments in use, by segment counter.
    physical: BTreeMap<u64, Physical>,
    /// Counters of segments for which this rank found no memory, and which all ranks give up.
    pretended: BTreeSet<u64>,
    /// EarlyHandles of segments that no commit has shared, as far as there are any. By counter.
    early: BTreeMap<u64, EarlyHandle>,
    /// `None` in a local lane, whose segments need no handles.
    handles: Option<Arc<EarlyHandles>>,
    /// Segments below this counter were shared by a commit.
    pub(crate) shared_below: u64,
    /// Raised when a symmetric lane is about to grow, even if the growth then fails on this rank, because the
    /// other ranks will wait for this one in a commit; and when enough frees are deferred. `None` in a local
    /// lane.
    due: Option<Arc<CommitDue>>,
}

impl LaneMemory {
    /// The memory of a lane that begins at `base` of a slot and has no segments yet. See the fields.
    pub(super) fn new(
        heap: Arc<Heap>,
        (base, lazily): (u64, bool),
        due: Option<Arc<CommitDue>>,
        handles: Option<Arc<EarlyHandles>>,
    ) -> Self {
        let (physical, early, pretended) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        let (sparsely, shared_below) = (false, 0);
        Self {
            heap,
            base,
            lazily,
            sparsely,
            physical,
            pretended,
            early,
            handles,
            shared_below,
            due,
        }
    }

    /// The allocation behind a segment in use.
    pub(crate) fn physical(&self, counter: u64) -> Option<&Physical> {
        self.physical.get(&counter)
    }

    /// The early handle of a segment that no commit has shared, if it has one.
    pub(super) fn handle(&self, counter: u64) -> Option<&EarlyHandle> {
        self.early.get(&counter)
    }

    /// Makes a commit due.
    pub(super) fn raise_due(&mut self) {
        self.due();
    }

    /// Takes the early handle of a segment, because a commit has shared the segment.
    pub(super) fn take_handle(&mut self, counter: u64) -> Option<OwnedFd> {
        self.early.remove(&counter).map(EarlyHandle::into_fd)
    }

    /// Unmaps a segment of this rank that is no longer used, and releases its memory unless that was moved
    /// to another segment.
    pub(crate) fn drop_segment(&mut self, segment: &Segment) -> Result<()> {
        if self.pretended.remove(&segment.counter) {
            return Ok(());
        }
        let slot = self.heap.layout().rank;
        self.heap.unmap(slot, self.base + segment.offset, segment.bytes)?;
        let Some(physical) = self.physical.remove(&segment.counter) else { return Ok(()) };
        // A handle that was never sent is closed here, so that the memory is free on return.
        self.early.remove(&segment.counter);
        self.wait_for_closed_handles();
        self.heap.driver().release(physical)
    }

    /// Gives the memory of a moved segment the counter `to`, and its handle too.
    pub(crate) fn rename(&mut self, from: u64, to: u64) {
        if let Some(physical) = self.physical.remove(&from) {
            self.physical.insert(to, physical);
        }
        // A segment that returns to where a commit has shared it needs no handle.
        if let Some(handle) = self.early.remove(&from)
            && to >= self.shared_below
        {
            self.early.insert(to, handle);
        }
    }

    /// Makes the early handle of a segment that the next commit shares. If this fails, the commit tries
    /// again.
    fn make_handle(&mut self, counter: u64) {
        if let Some(handles) = &self.handles
            && let Some(physical) = self.physical.get(&counter)
            && !self.early.contains_key(&counter)
            && let Some(handle) = handles.make(self.heap.driver(), physical)
        {
            self.early.insert(counter, handle);
        }
    }

    /// Waits until the handles that commits have sent are closed.
    fn wait_for_closed_handles(&self) {
        if let Some(handles) = &self.handles {
            handles.wait_until_closed();
        }
    }

    fn try_grow(&mut self, growth: &Growth, done: &mut Vec<Done>) -> Result<()> {
        let slot = self.heap.layout().rank;
        for step in &growth.moves {
            let physical = self.physical.get(&step.from).ok_or_else(|| {
                Error::invalid_state(format!("segment {} has no memory to move", step.from))
            })?;
            self.heap.map(slot, self.base + step.to.offset, physical)?;
            done.push(Done::Moved(step.to.offset, step.to.bytes));
        }
        if growth.new.len() > 1 && !self.sparsely {
            self.heap.driver().check_room(growth.new.iter().map(|new| new.bytes).sum())?;
        }
        for new in &growth.new {
            let driver = self.heap.driver();
            let physical = match self.lazily {
                _ if self.sparsely => driver.create_sparsely(new.bytes)?,
                true => driver.create_lazily(new.bytes)?,
                false => driver.create(new.bytes)?,
            };
            let mapped = self.heap.map(slot, self.base + new.offset, &physical);
            done.push(Done::Made(physical, mapped.is_ok().then_some(new.offset)));
            mapped?;
        }
        Ok(())
    }

    fn undo(&mut self, done: Vec<Done>) {
        let slot = self.heap.layout().rank;
        for step in done.into_iter().rev() {
            let undone = match step {
                Done::Moved(offset, bytes) => self.heap.unmap(slot, self.base + offset, bytes),
                Done::Made(physical, mapped) => mapped
                    .map_or(Ok(()), |at| self.heap.unmap(slot, self.base + at, physical.bytes()))
                    .and_then(|()| self.heap.driver().release(physical)),
            };
            if let Err(error) = undone {
                tracing::error!(%error, "a failed growth could not be undone");
            }
        }
    }
}

/// A step of a growth that may have to be undone.
enum Done {
    /// Offset and length of the second mapping of a moved segment.
    Moved(u64, u64),
    /// A new allocation, and the offset at which it is mapped, if it is.
    Made(Physical, Option<u64>),
}

impl Backing for LaneMemory {
    fn due(&mut self) {
        if let Some(due) = &self.due {
            due.raise();
        }
    }

    fn grow(&mut self, growth: &Growth) -> Result<()> {
        let mut done = Vec::with_capacity(growth.moves.len() + growth.new.len());
        if let Err(error) = self.try_grow(growth, &mut done) {
            self.undo(done);
            return Err(error);
        }
        let targets = growth.moves.iter().map(|step| step.to).chain(growth.new.iter().copied());
        for (step, to) in done.into_iter().zip(targets.clone()) {
            match step {
                Done::Made(physical, _) => {
                    self.physical.insert(to.counter, physical);
                }
                Done::Moved(..) => {}
            }
        }
        for step in &growth.moves {
            self.rename(step.from, step.to.counter);
        }
        for to in targets {
            self.make_handle(to.counter);
        }
        Ok(())
    }

    fn record(&mut self, stream: Stream) -> Result<Event> {
        self.heap.driver().record_event(stream)
    }

    fn wait(&mut self, stream: Stream, event: &Event) -> Result<()> {
        self.heap.driver().wait_event(stream, event)
    }

    fn is_capturing(&self, stream: Stream) -> bool {
        self.heap.driver().is_capturing(stream)
    }

    fn release(&mut self, event: Event) {
        self.heap.driver().release_event(event);
    }
}

/// A lane's memory for an allocation that makes no commit due: all ranks share it at once, or give it up.
pub(super) struct AtOnce<'a> {
    pub(super) memory: &'a mut LaneMemory,
    /// Whether segments are not made, as this rank has no memory for them.
    pub(super) pretends: bool,
}

impl Backing for AtOnce<'_> {
    fn grow(&mut self, growth: &Growth) -> Result<()> {
        if !self.pretends {
            return self.memory.grow(growth);
        }
        let moved = growth.moves.iter().map(|step| step.to.counter);
        self.memory.pretended.extend(moved.chain(growth.new.iter().map(|new| new.counter)));
        Ok(())
    }

    fn record(&mut self, stream: Stream) -> Result<Event> {
        self.memory.record(stream)
    }

    fn wait(&mut self, stream: Stream, event: &Event) -> Result<()> {
        self.memory.wait(stream, event)
    }

    fn is_capturing(&self, stream: Stream) -> bool {
        self.memory.is_capturing(stream)
    }

    fn release(&mut self, event: Event) {
        self.memory.release(event);
    }
}

impl Drop for LaneMemory {
    fn drop(&mut self) {
        if !self.heap.is_here() {
            // A forked child does not close its parent's descriptors.
            mem::forget(mem::take(&mut self.early));
            return;
        }
        self.early.clear();
        self.wait_for_closed_handles();
        while let Some((_, physical)) = self.physical.pop_first() {
            if let Err(error) = self.heap.driver().release(physical) {
                tracing::warn!(%error, "a lane's memory could not be released");
            }
        }
    }
}
