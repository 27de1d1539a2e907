//! The physical side of a lane: the memory of its segments, and how it grows.

use std::collections::BTreeMap;
use std::mem;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::commit_due::Due;
use super::early_handles::{Ahead, Handles};
use crate::driver::{Event, Physical, Stream};
use crate::heap::Heap;
use crate::lane::{Backing, Growth, LaneState, Segment};
use crate::{Error, Result};

/// What a lane's lock guards: its blocks, and the memory that they are in.
pub(crate) struct LaneInner {
    pub(crate) state: LaneState,
    pub(crate) memory: LaneMemory,
}

impl Drop for LaneInner {
    fn drop(&mut self) {
        // The driver outlives its lanes, and would keep what they recorded. In a forked child it is as
        // the parent's other threads left it, and may be locked for ever.
        if self.memory.heap.is_here() {
            self.state.release_events(&mut self.memory);
        }
    }
}

/// The physical side of a lane.
pub(crate) struct LaneMemory {
    heap: Arc<Heap>,
    base: u64,
    /// By segment counter.
    physical: BTreeMap<u64, Physical>,
    /// Handles of segments that no commit has shared, as far as there are any. By counter.
    ahead: BTreeMap<u64, Ahead>,
    /// `None` in a local lane, whose segments need no handles.
    handles: Option<Arc<Handles>>,
    /// Segments below this counter were shared by a commit.
    pub(crate) shared_below: u64,
    /// Raised when a symmetric lane is to grow, even if that fails on this rank: the others then
    /// wait in a commit for this one. Or when enough waits to be taken back. The pool settles it at a
    /// commit.
    due: Option<Arc<Due>>,
}

impl LaneMemory {
    /// That of a lane that begins at `base` of a slot and has no segments yet.
    pub(super) fn new(
        heap: Arc<Heap>,
        base: u64,
        due: Option<Arc<Due>>,
        handles: Option<Arc<Handles>>,
    ) -> Self {
        let (physical, ahead) = (BTreeMap::new(), BTreeMap::new());
        Self { heap, base, physical, ahead, handles, shared_below: 0, due }
    }

    /// The allocation behind a segment in use.
    pub(crate) fn physical(&self, counter: u64) -> Option<&Physical> {
        self.physical.get(&counter)
    }

    /// The handle of a segment that no commit has shared, if it was made ahead.
    pub(super) fn handle(&self, counter: u64) -> Option<&Ahead> {
        self.ahead.get(&counter)
    }

    /// Takes that handle, because a commit has shared the segment.
    pub(super) fn take_handle(&mut self, counter: u64) -> Option<OwnedFd> {
        self.ahead.remove(&counter).map(Ahead::into_fd)
    }

    /// Unmaps a segment of this rank that nobody uses any more, and lets go of its memory unless
    /// it moved elsewhere.
    pub(crate) fn drop_segment(&mut self, segment: &Segment) -> Result<()> {
        let rank = self.heap.layout().rank;
        self.heap.unmap(rank, self.base + segment.offset, segment.bytes)?;
        let Some(physical) = self.physical.remove(&segment.counter) else { return Ok(()) };
        // Closed in line, if it was never handed over: the memory is free on return.
        self.ahead.remove(&segment.counter);
        self.settle();
        self.heap.driver().release(physical)
    }

    /// Puts a moved segment's memory under the counter it has now, or had before.
    pub(crate) fn rename(&mut self, from: u64, to: u64) {
        if let Some(physical) = self.physical.remove(&from) {
            self.physical.insert(to, physical);
        }
        // What goes back to where a commit has shared it needs no handle any more.
        if let Some(handle) = self.ahead.remove(&from)
            && to >= self.shared_below
        {
            self.ahead.insert(to, handle);
        }
    }

    /// Makes the handle of a segment that the next commit shares. That commit tries again what
    /// fails here.
    fn make_handle(&mut self, counter: u64) {
        if let Some(handles) = &self.handles
            && let Some(physical) = self.physical.get(&counter)
            && !self.ahead.contains_key(&counter)
            && let Some(handle) = handles.make(self.heap.driver(), physical)
        {
            self.ahead.insert(counter, handle);
        }
    }

    /// Waits until descriptors of memory that is given back are closed.
    fn settle(&self) {
        if let Some(handles) = &self.handles {
            handles.settle();
        }
    }

    fn try_grow(&mut self, growth: &Growth, done: &mut Vec<Done>) -> Result<()> {
        let rank = self.heap.layout().rank;
        for step in &growth.moves {
            let physical = self.physical.get(&step.from).ok_or_else(|| {
                Error::invalid_state(format!("segment {} has no memory to move", step.from))
            })?;
            self.heap.map(rank, self.base + step.to.offset, physical)?;
            done.push(Done::Moved(step.to.offset, step.to.bytes));
        }
        if growth.new.len() > 1 {
            self.heap.driver().check_room(growth.new.iter().map(|new| new.bytes).sum())?;
        }
        for new in &growth.new {
            let physical = self.heap.driver().create(new.bytes)?;
            let mapped = self.heap.map(rank, self.base + new.offset, &physical);
            done.push(Done::Made(physical, mapped.is_ok().then_some(new.offset)));
            mapped?;
        }
        Ok(())
    }

    fn undo(&mut self, done: Vec<Done>) {
        let rank = self.heap.layout().rank;
        for step in done.into_iter().rev() {
            let undone = match step {
                Done::Moved(offset, bytes) => self.heap.unmap(rank, self.base + offset, bytes),
                Done::Made(physical, mapped) => mapped
                    .map_or(Ok(()), |at| self.heap.unmap(rank, self.base + at, physical.bytes()))
                    .and_then(|()| self.heap.driver().release(physical)),
            };
            if let Err(error) = undone {
                tracing::error!(%error, "undoing a growth that failed");
            }
        }
    }
}

/// A step of a growth that may have to be undone.
enum Done {
    /// Offset and length of the second mapping.
    Moved(u64, u64),
    /// The allocation, and where it is mapped, if it is.
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

    fn release(&mut self, event: Event) {
        self.heap.driver().release_event(event);
    }
}

impl Drop for LaneMemory {
    fn drop(&mut self) {
        if !self.heap.is_here() {
            // A forked child leaves what its parent made as it is.
            mem::forget(mem::take(&mut self.ahead));
            return;
        }
        self.ahead.clear();
        self.settle();
        while let Some((_, physical)) = self.physical.pop_first() {
            if let Err(error) = self.heap.driver().release(physical) {
                tracing::warn!(%error, "releasing a lane's memory");
            }
        }
    }
}
