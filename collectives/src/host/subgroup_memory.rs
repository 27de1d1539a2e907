//! Memory of a communicator's ranks from which communicators of some of them are made.
//!
//! A communicator of its own pool costs a rendezvous in the store, connections and two gathers. All that its ranks have to
//! know of each other is where their control blocks lie, and that those are there. Ranks that share memory already tell
//! each other by that: each has a *board*, on which it alone writes, and chunks of which it makes control blocks.
//!
//! ```text
//! board: entry | entry | ...    chunk: who has let go of it | control block
//! ```
//!
//! An entry has the key of a group, which its ranks know, and what the rank says to it: where its chunk lies, or that it
//! comes another way. Who has found the entries of all ranks [maps](Pool::map_room) their chunks a second time, where the
//! group's pool has its slots. Ranks need not agree on where chunks lie.
//!
//! A chunk is used again when every rank of its group has let go of it, so no late signal reaches a later communicator.

#![allow(unsafe_code)] // atomics in shared memory, and a control block that is filled with zeros

mod entry;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use symmpool_allocator::{Block, Deadline, Error, Group, Lane, Pool, ProcessId, Result};

use entry::{BoardEntry, SILENT};

/// Key of a group: the same on its ranks, and no other group's.
pub type GroupKey = [u64; 2];

/// Bytes of each rank's memory. Pages come with their first accesses.
const BYTES: u64 = 512 << 20;
/// How many groups may be on a board.
const ENTRIES: u64 = 512;
const ENTRY: u64 = size_of::<BoardEntry>() as u64;
const BOARD: u64 = (ENTRIES * ENTRY).next_multiple_of(PAGE);
const PAGE: u64 = 4096;
/// Chunks are mapped in pieces of this size, the host driver's granularity.
const GRANULE: u64 = 2 << 20;
/// The address space of a rank in the pool of a group. An eighth is for control memory.
const STRIDE: u64 = 32 << 30;

/// How often a rank that waits looks before it sleeps between looks.
const YIELDS: u32 = 200;
const PAUSE: Duration = Duration::from_micros(50);

/// Word of a rank that comes another way. All other words are an address in the rank's slot and a number that makes them differ.
const DECLINED: u64 = 1;
const OFFSET: u64 = (1 << 48) - 1;

/// Memory of a communicator's ranks for communicators of some of them.
pub(crate) struct SubgroupMemory {
    pool: Pool,
    /// `None` only while dropping.
    block: Option<Block<u8>>,
    state: Mutex<State>,
    /// Where segments of the pool begin, from the beginning of the block on. A chunk lies in one of them: memory is mapped
    /// a second time by segments.
    cuts: Vec<u64>,
    maker: ProcessId,
}

#[derive(Default)]
struct State {
    /// Which entries of the board are used.
    entries: Vec<bool>,
    /// Chunks, by where they begin.
    chunks: Vec<Chunk>,
    /// Entries that were made, to tell them apart.
    made: u64,
}

#[derive(Clone, Copy)]
struct Chunk {
    offset: u64,
    bytes: u64,
    world: u32,
    /// Whether this rank has let go of it.
    is_left: bool,
}

impl SubgroupMemory {
    /// Allocates the memory of this rank, which a commit must share before it is used.
    pub(crate) fn allocate(lane: &Lane) -> Result<Block<u8>> {
        let block = lane.alloc_sparsely(BYTES as usize, PAGE)?;
        block.write(&vec![0; BOARD as usize])?;
        Ok(block)
    }

    /// Makes it of memory that [`Self::allocate`] has made on every rank, and a commit has shared.
    pub(crate) fn new(pool: &Pool, block: Block<u8>) -> Arc<Self> {
        let (state, maker) = (Mutex::default(), ProcessId::here());
        let windows = pool.windows();
        let begins =
            windows.list().iter().filter_map(|each| each.offset.checked_sub(block.offset()));
        let cuts = begins.filter(|begin| *begin < BYTES).collect();
        Arc::new(Self { pool: pool.clone(), block: Some(block), state, cuts, maker })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where the memory of a rank begins in this process.
    fn base(&self, rank: u32) -> u64 {
        let offset = self.block.as_ref().expect("there until dropped").offset();
        self.pool.layout().address(rank, offset)
    }

    fn entry(&self, rank: u32, index: u64) -> &BoardEntry {
        debug_assert!(index < ENTRIES);
        let at = (self.base(rank) + index * ENTRY) as *const BoardEntry;
        // SAFETY: within the board, which is a window of every rank for as long as the block lives; aligned, as blocks
        // are to pages; nothing but atomics, valid for any bits.
        unsafe { &*at }
    }

    /// Returns the word of `rank` for a group, if there is one.
    fn said(&self, rank: u32, key: GroupKey) -> Option<u64> {
        (0..ENTRIES).find_map(|index| self.entry(rank, index).said(key))
    }

    /// Says to a group that this rank is here, with room for a control block of `control` bytes, of which the first
    /// `zeroed` are zero. `ranks` are those of the group here, in its order. `None` where there is no room for it: the
    /// rank comes another way.
    pub(crate) fn offer(
        self: &Arc<Self>,
        ranks: Vec<u32>,
        key: GroupKey,
        (control, zeroed): (u64, u64),
    ) -> Result<Option<Offer>> {
        self.maker.check("a communicator")?;
        if ranks.iter().any(|rank| self.said(*rank, key) == Some(DECLINED)) {
            return Ok(None);
        }
        let world = ranks.len() as u32;
        let bytes = (head(world) + control).next_multiple_of(GRANULE);
        let mut state = self.state();
        let place = state.entries.iter().position(|used| !used).unwrap_or(state.entries.len());
        let offset = self.place(&mut state, bytes);
        let (Some(offset), true) = (offset, (place as u64) < ENTRIES) else { return Ok(None) };
        // The other way says what is wrong with it.
        if self.pool.driver().check_room(bytes).is_err() {
            return Ok(None);
        }
        let entries = state.entries.len().max(place + 1);
        state.entries.resize(entries, false);
        state.entries[place] = true;
        state.chunks.push(Chunk { offset, bytes, world, is_left: false });
        state.made += 1;
        let word = (state.made << 48) | (BOARD + offset);
        drop(state);
        let start = self.base(self.pool.rank()) + BOARD + offset;
        // SAFETY: a range of this rank's own memory that no other chunk has, and that no rank uses: those of its last
        // group have let go of it.
        unsafe { std::ptr::write_bytes(start as *mut u8, 0, (head(world) + zeroed) as usize) };
        self.entry(self.pool.rank(), place as u64).say(key, word);
        let found = vec![None; ranks.len()];
        let (memory, entry) = (Arc::clone(self), place as u64);
        Ok(Some(Offer { memory, ranks, key, entry, offset, bytes, control, found }))
    }

    /// A place for a chunk: the first gap between those that some rank has not let go of.
    fn place(&self, state: &mut State, bytes: u64) -> Option<u64> {
        state.chunks.retain(|chunk| !chunk.is_left || !self.is_free(chunk));
        state.chunks.sort_unstable_by_key(|chunk| chunk.offset);
        let mut at = self.within(0, bytes);
        for chunk in &state.chunks {
            if at + bytes <= chunk.offset {
                break;
            }
            at = self.within(chunk.offset + chunk.bytes, bytes);
        }
        (BOARD + at + bytes <= BYTES).then_some(at)
    }

    /// The first place from `at` on where a chunk lies in one segment.
    fn within(&self, mut at: u64, bytes: u64) -> u64 {
        while let Some(cut) = self.cut(BOARD + at, bytes) {
            at = cut - BOARD;
        }
        at
    }

    /// The last place where another segment begins within some bytes of the block.
    fn cut(&self, from: u64, bytes: u64) -> Option<u64> {
        self.cuts.iter().copied().filter(|cut| from < *cut && *cut < from + bytes).max()
    }

    /// Whether every rank has let go of one of this rank's chunks.
    fn is_free(&self, chunk: &Chunk) -> bool {
        let start = self.base(self.pool.rank()) + BOARD + chunk.offset;
        // SAFETY: the chunk begins there, in this rank's block, which lives as long as `self`; its head has a word for each rank.
        (0..chunk.world).all(|rank| unsafe { left(start, rank) }.load(Ordering::Acquire) != 0)
    }

    fn take_back(&self, offset: u64) {
        let mut state = self.state();
        if let Some(chunk) = state.chunks.iter_mut().find(|chunk| chunk.offset == offset) {
            chunk.is_left = true;
        }
    }
}

impl Drop for SubgroupMemory {
    fn drop(&mut self) {
        let Some(block) = self.block.take() else { return };
        if !self.maker.is_here() {
            std::mem::forget(block);
            return;
        }
        if let Err(error) = block.free_unordered() {
            tracing::error!(%error, "freeing the memory of communicators of some ranks");
        }
    }
}

/// Bytes of a chunk before its control block.
fn head(world: u32) -> u64 {
    (u64::from(world) * size_of::<AtomicU32>() as u64).next_multiple_of(PAGE)
}

/// Whether `rank` of a group has let go of the chunk that begins at an address.
///
/// # Safety
///
/// You must promise that a chunk's head begins there, with a word for this rank, and is mapped for `'a`.
unsafe fn left<'a>(chunk: u64, rank: u32) -> &'a AtomicU32 {
    let at = (chunk + u64::from(rank) * size_of::<AtomicU32>() as u64) as *mut u32;
    // SAFETY: the caller promised a mapped head with this word, which is only ever used as this atomic.
    unsafe { AtomicU32::from_ptr(at) }
}

/// Offer of a rank to a group, whose other ranks it has not all found yet.
pub(crate) struct Offer {
    memory: Arc<SubgroupMemory>,
    /// The group's ranks, as the pool around them numbers them.
    ranks: Vec<u32>,
    key: GroupKey,
    entry: u64,
    /// Where the chunk begins behind the board.
    offset: u64,
    bytes: u64,
    control: u64,
    /// Where the chunks of the ranks begin, as far as they were found: from the beginning of their memory on.
    found: Vec<Option<u64>>,
}

/// Result of a wait for the other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrivals {
    /// All ranks are there.
    All,
    /// A rank comes another way, so all do.
    Declined,
    /// Some have said nothing yet.
    Some,
}

impl Offer {
    /// Waits for the other ranks for so long.
    pub(crate) fn wait(&mut self, longest: Duration) -> Arrivals {
        let deadline = Deadline::after(longest);
        let mut looks = 0_u32;
        loop {
            for (rank, found) in self.ranks.iter().zip(&mut self.found) {
                if found.is_some() {
                    continue;
                }
                match self.memory.said(*rank, self.key) {
                    Some(DECLINED) => return Arrivals::Declined,
                    Some(word) => *found = Some(word & OFFSET),
                    None => {}
                }
            }
            if self.found.iter().all(Option::is_some) {
                // One that was found long ago may have gone.
                let declines = |rank: &u32| self.memory.said(*rank, self.key) == Some(DECLINED);
                return if self.ranks.iter().any(declines) {
                    Arrivals::Declined
                } else {
                    Arrivals::All
                };
            }
            if deadline.expired() {
                return Arrivals::Some;
            }
            looks += 1;
            if looks < YIELDS {
                std::thread::yield_now();
            } else {
                std::thread::sleep(PAUSE);
            }
        }
    }

    /// The ranks of the group that were not found.
    pub(crate) fn missing(&self) -> Vec<u32> {
        (0..).zip(&self.found).filter(|(_, found)| found.is_none()).map(|(rank, _)| rank).collect()
    }

    /// Says to the group's other ranks that this one comes another way, for good: a rank that has found the offer before
    /// may go on with it, and is not answered.
    pub(crate) fn decline(&self) {
        let own = self.memory.entry(self.memory.pool.rank(), self.entry);
        own.say_then(DECLINED);
        // The entry stays, as ranks may come late. So does the chunk, which they may signal.
    }

    /// The group's pool and its control memory, once [all ranks](Arrivals::All) are there.
    pub(crate) fn accept(self, group: &Group) -> Result<(Pool, Arc<NestedMemory>)> {
        let accepted = self.map(group);
        // The others, which may have gone on, see that this rank has let go of the memory.
        accepted.inspect_err(|_| {
            self.decline();
            self.let_go();
        })
    }

    /// Says in the chunks of all ranks that were found that this one does not use them.
    fn let_go(&self) {
        let Self { memory, ranks, found, .. } = self;
        let own = ranks.iter().position(|rank| *rank == memory.pool.rank()).unwrap_or(0) as u32;
        for (rank, found) in ranks.iter().zip(found) {
            // A chunk's head is within the memory of its rank, whatever that has said.
            if let Some(at) = found.filter(|at| *at >= BOARD && at + PAGE <= BYTES) {
                // SAFETY: the page is within the rank's block, whose window lives as long as `memory`.
                unsafe { left(memory.base(*rank) + at, own) }.store(1, Ordering::Release);
            }
        }
        memory.take_back(self.offset);
    }

    fn map(&self, group: &Group) -> Result<(Pool, Arc<NestedMemory>)> {
        let Self { memory, ranks, entry, offset, bytes, control, found, .. } = self;
        let (world, bytes) = (ranks.len() as u32, *bytes);
        let pool = memory.pool.nested(group, ranks, STRIDE, bytes)?;
        let chunks = ranks.iter().zip(found).map(|(&rank, found)| {
            let fits =
                |at: &u64| *at >= BOARD && at + bytes <= BYTES && memory.cut(*at, bytes).is_none();
            let found = found.filter(fits);
            let found = found.ok_or_else(|| {
                Error::invalid_state(format!("rank {rank} has said nothing that can be"))
            });
            Ok(memory.base(rank) + found?)
        });
        let chunks: Vec<u64> = chunks.collect::<Result<_>>()?;
        let memory = NestedMemory {
            memory: Arc::clone(memory),
            pool: pool.clone(),
            chunks,
            entry: *entry,
            offset: *offset,
            control: *control,
            world,
            is_entry_free: AtomicBool::new(false),
        };
        // SAFETY: each is a chunk of a rank's block of that memory, a window for as long as that lives.
        unsafe { pool.map_room(&memory.chunks, bytes)? };
        Ok((pool, Arc::new(memory)))
    }
}

/// The control memory of a communicator of some ranks. Dropping it says so to the others.
pub(crate) struct NestedMemory {
    memory: Arc<SubgroupMemory>,
    /// The pool of those ranks.
    pool: Pool,
    /// Where the ranks' chunks are in this process, in the memory of the pool around it.
    chunks: Vec<u64>,
    entry: u64,
    offset: u64,
    control: u64,
    world: u32,
    /// Whether the entry was given back.
    is_entry_free: AtomicBool,
}

impl NestedMemory {
    /// Where the control block lies in each slot of the pool.
    pub(crate) fn offset(&self) -> u64 {
        self.pool.room() + head(self.world)
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.control
    }

    /// Whether a rank has let go of its memory, as it does where its communicator ends.
    pub(crate) fn has_left(&self, rank: u32) -> bool {
        let own = self.chunks[self.pool.rank() as usize];
        // SAFETY: the chunk's head has a word for each rank below `world`, and its window lives as long as `self`.
        rank < self.world && unsafe { left(own, rank) }.load(Ordering::Acquire) != 0
    }

    /// All ranks have found this one's entry: it is free for another group.
    pub(crate) fn take_entry_back(&self) {
        if self.is_entry_free.swap(true, Ordering::AcqRel) {
            return;
        }
        let own = self.memory.entry(self.memory.pool.rank(), self.entry);
        own.say_then(SILENT);
        if let Some(used) = self.memory.state().entries.get_mut(self.entry as usize) {
            *used = false;
        }
    }
}

impl Drop for NestedMemory {
    fn drop(&mut self) {
        // A forked child would say so in its parent's name.
        if !self.memory.maker.is_here() {
            return;
        }
        for &chunk in &self.chunks {
            // SAFETY: the chunk's head has a word for this rank, and its window lives as long as `self`.
            unsafe { left(chunk, self.pool.rank()) }.store(1, Ordering::Release);
        }
        self.memory.take_back(self.offset);
    }
}

impl fmt::Debug for NestedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NestedMemory")
            .field("world", &self.world)
            .field("bytes", &self.control)
            .finish_non_exhaustive()
    }
}
