//! The physical side of a lane: the memory of its segments, and how it grows.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::due::Due;
use crate::driver::{Event, Physical, Stream};
use crate::heap::Heap;
use crate::lane::{Backing, Growth, Segment};
use crate::{Error, Result};

/// The physical side of a lane.
pub(crate) struct LaneMemory {
    heap: Arc<Heap>,
    base: u64,
    /// By segment counter.
    physical: BTreeMap<u64, Physical>,
    /// Segments below this counter were shared by a commit.
    pub(crate) shared_below: u64,
    /// Raised when a symmetric lane is to grow, even if that fails on this rank: the others then
    /// wait in a commit for this one. The pool settles it at a commit.
    due: Option<Arc<Due>>,
}

impl LaneMemory {
    /// That of a lane that begins at `base` of a slot and has no segments yet.
    pub(super) fn new(heap: Arc<Heap>, base: u64, due: Option<Arc<Due>>) -> Self {
        Self { heap, base, physical: BTreeMap::new(), shared_below: 0, due }
    }

    /// The allocation behind a segment in use.
    pub(crate) fn physical(&self, counter: u64) -> Option<&Physical> {
        self.physical.get(&counter)
    }

    /// Unmaps a segment of this rank that nobody uses any more, and lets go of its memory unless
    /// it moved elsewhere.
    pub(crate) fn drop_segment(&mut self, segment: &Segment) -> Result<()> {
        let rank = self.heap.layout().rank;
        self.heap.unmap(rank, self.base + segment.offset, segment.bytes)?;
        match self.physical.remove(&segment.counter) {
            Some(physical) => self.heap.driver().release(physical),
            None => Ok(()),
        }
    }

    /// Puts a moved segment's memory back under the counter it had before.
    pub(crate) fn rename(&mut self, from: u64, to: u64) {
        if let Some(physical) = self.physical.remove(&from) {
            self.physical.insert(to, physical);
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
    fn planned(&mut self) {
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
        for (step, to) in done.into_iter().zip(targets) {
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
        while let Some((_, physical)) = self.physical.pop_first() {
            if let Err(error) = self.heap.driver().release(physical) {
                tracing::warn!(%error, "releasing a lane's memory");
            }
        }
    }
}
