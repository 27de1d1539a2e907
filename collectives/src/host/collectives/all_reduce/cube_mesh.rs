//! For ranks that are not all linked: two groups, each all linked inside, and every rank linked to
//! one partner in the other group, as in a hybrid cube mesh. Data crosses links only.
//!
//! Every rank reduces one share of the elements:
//!
//! 1. it copies its mates' inputs of its *partner's* share to its own scratch, where the partner
//!    reaches them;
//! 2. it reduces its own share, from its group's inputs, its partner's, and what the partner passed
//!    on, and writes the result to itself and the partner;
//! 3. it collects from each mate the mate's share and that of the mate's partner.
//!
//! Inputs are passed on as they are, not as the group's sum: sums of sums would round otherwise than
//! sums in rank order, which every algorithm gives (rule S7). For eight ranks that is half the data
//! over the link between partners, beside an eighth of results.
//!
//! Signals go between all pairs, in every phase (rule S1). A signal is one word in the control
//! block, which ranks without a link reach as well, if by a longer way; scratch and windows, which
//! hold data, are touched by the owner and those linked to it alone.

use symmpool_allocator::{Error, Result};

use super::paired_groups::Halves;
use super::{Pieces, Work, share};
use crate::host::HostEngine;
use crate::host::kernels::copy;

/// What shares are multiples of, in bytes; see [`share`].
const LINE: usize = 64;

/// A range that every rank has at the same place: its input, its output, or a piece in scratch.
#[derive(Clone, Copy)]
enum Spot {
    /// A heap offset.
    Window(u64),
    /// Bytes into the scratch of the call under way.
    Scratch(usize),
}

impl Spot {
    /// `rank`'s address of the byte `at`.
    fn of(self, engine: &HostEngine, rank: u32, at: usize) -> *mut u8 {
        match self {
            Self::Window(offset) => engine.window(rank, offset + at as u64),
            Self::Scratch(offset) => engine.scratch(rank).wrapping_add(offset + at),
        }
    }
}

/// Where in scratch a rank passes its mates' inputs on: a slot for each mate.
#[derive(Clone, Copy)]
struct Slots {
    offset: usize,
    /// Of one slot; a multiple of a line.
    bytes: usize,
}

impl Slots {
    /// `owner`'s slot for its mate `of`.
    fn at(self, engine: &HostEngine, halves: Halves, owner: u32, of: u32) -> *mut u8 {
        let slot = self.offset + halves.number(owner, of) * self.bytes;
        engine.scratch(owner).wrapping_add(slot)
    }
}

/// Between windows: inputs and outputs are used where they lie.
///
/// # Safety
///
/// As [`HostEngine::all_reduce`]; `from` and `to` are the window offsets of input and output.
pub(super) unsafe fn direct(
    engine: &mut HostEngine,
    work: &Work,
    halves: Halves,
    (from, to): (u64, u64),
) -> Result<()> {
    let (me, world, size) = (engine.rank(), engine.world() as usize, work.size);
    // All of scratch is slots. Without partners none are needed, and all goes in one piece.
    let (slots, each) = match halves.partner(me) {
        None => (Slots { offset: 0, bytes: 0 }, work.count.max(1)),
        Some(_) => {
            let bytes = slot(engine, halves.mate_count())?;
            (Slots { offset: 0, bytes }, bytes / size * world)
        }
    };
    engine.enter(&work.call)?;
    for start in (0..work.count).step_by(each) {
        let (count, at) = (each.min(work.count - start), (start * size) as u64);
        let (input, output) = (Spot::Window(from + at), Spot::Window(to + at));
        // SAFETY: all ranks have entered with these very offsets, so their windows are theirs no
        // more until they have seen this rank's last step. Pieces do not overlap.
        unsafe { reduce(engine, work, halves, (input, output), count, slots)? };
        let target = work.data.to.wrapping_add(start * size);
        for mate in halves.mates(me) {
            // SAFETY: the mate has these results in its output since before its step; nobody
            // writes them again, and in this rank's output nobody else writes to these shares.
            unsafe { collect(engine, halves, output, mate, target, (count, size)) };
        }
    }
    // Every rank is done with this rank's windows when all have come here.
    engine.step()
}

/// Through scratch, in pieces: copy in, step, then as between windows, in place.
///
/// # Safety
///
/// As [`HostEngine::all_reduce`], for the resolved buffers of `work`.
pub(super) unsafe fn staged(engine: &mut HostEngine, work: &Work, halves: Halves) -> Result<()> {
    let (from, size) = (work.data.from, work.size);
    let (me, world) = (engine.rank(), engine.world() as usize);
    let forwards = if halves.partner(me).is_some() { halves.mate_count() } else { 0 };
    // A piece, of which each share fits a slot, and behind it the slots.
    let bytes = slot(engine, world + forwards)?;
    let slots = Slots { offset: world * bytes, bytes };
    let pieces = Pieces::new(work.count, size, world * bytes);
    // SAFETY: the first piece of the input, readable by contract, into scratch that holds a piece
    // and is free (see `next_scratch`).
    unsafe { copy(from, engine.next_scratch(), pieces.range(0).len() * size) };
    engine.enter(&work.call)?;
    for index in 0..pieces.len() {
        let range = pieces.range(index);
        let (at, offset) = (range.start * size, pieces.offset(index));
        if index > 0 {
            let own = engine.scratch(me).wrapping_add(offset);
            // SAFETY: this piece of the input, into the half of scratch that held the piece before
            // the last; every peer has signalled the last one's first step since it collected.
            unsafe { copy(from.wrapping_add(at), own, range.len() * size) };
            engine.step()?;
        }
        let spot = Spot::Scratch(offset);
        // SAFETY: every rank has put its input of this piece there, and signalled since; it fills
        // that half again only after all have signalled the next piece's first step.
        unsafe { reduce(engine, work, halves, (spot, spot), range.len(), slots)? };
        let target = work.data.to.wrapping_add(at);
        for mate in halves.mates(me).chain([me]) {
            // SAFETY: the mate, or this rank, has these results in its scratch since before its
            // step; the output is writable by contract, and scratch is apart from it.
            unsafe { collect(engine, halves, spot, mate, target, (range.len(), size)) };
        }
    }
    Ok(())
}

/// Passes on and reduces one piece of `count` elements: afterwards each rank has in its output its
/// own share's result and its partner's, and every rank has signalled that. Two steps, without
/// partners one.
///
/// # Safety
///
/// Every rank has its input of the piece at `input`, has room for it at `output`, and has signalled
/// so; the two are the same or apart. Until every rank is past this call's last step, nobody else
/// writes to either. A share of the piece fits a slot, and slots lie apart from both.
unsafe fn reduce(
    engine: &mut HostEngine,
    work: &Work,
    halves: Halves,
    (input, output): (Spot, Spot),
    count: usize,
    slots: Slots,
) -> Result<()> {
    let (me, world, size) = (engine.rank(), engine.world(), work.size);
    let partner = halves.partner(me);
    if let Some(partner) = partner {
        let theirs = share(count, size, partner, world);
        for mate in halves.mates(me) {
            let source = input.of(engine, mate, theirs.start * size);
            let slot = slots.at(engine, halves, me, mate);
            // SAFETY: the mate's input of this share, which is written to after all have signalled
            // the step below, into an own slot: the partner has read what it held before its step
            // that ended the last piece, or the call before the last.
            unsafe { copy(source, slot, theirs.len() * size) };
        }
        engine.step()?;
    }
    let mine = share(count, size, me, world);
    let at = mine.start * size;
    let mut sources = std::mem::take(&mut engine.sources);
    let mut outputs = std::mem::take(&mut engine.outputs);
    sources.clear();
    outputs.clear();
    // In rank order, whoever is reached how (S7).
    sources.extend((0..world).map(|rank| match partner {
        Some(partner) if partner != rank && !halves.together(me, rank) => {
            slots.at(engine, halves, partner, rank).cast_const()
        }
        _ => input.of(engine, rank, at).cast_const(),
    }));
    outputs.extend([me].into_iter().chain(partner).map(|rank| output.of(engine, rank, at)));
    // SAFETY: the partner filled its slots with this share before it signalled, and refills them
    // after this rank's next signal. Of the inputs of this group and the partner's, only this rank
    // reads this share from here on, and of the outputs only it writes this share. Input and output
    // are one range or apart, at the same place of every rank, so each output is exactly a source
    // or apart from all.
    unsafe { (work.reduce)(&sources, &outputs, mine.len()) };
    engine.sources = sources;
    engine.outputs = outputs;
    engine.step()
}

/// Copies the results that `mate` has to their places in this rank's piece at `target`: the mate's
/// share, and that of its partner.
///
/// # Safety
///
/// `mate` has both shares of the piece of `count` elements of `size` bytes at `output`, and leaves
/// them there meanwhile; at `target` a piece is writable, which is not the mate's.
unsafe fn collect(
    engine: &HostEngine,
    halves: Halves,
    output: Spot,
    mate: u32,
    target: *mut u8,
    (count, size): (usize, usize),
) {
    for owner in [mate].into_iter().chain(halves.partner(mate)) {
        let share = share(count, size, owner, engine.world());
        let at = share.start * size;
        let result = output.of(engine, mate, at);
        // SAFETY: the caller's promises, for this share.
        unsafe { copy(result, target.wrapping_add(at), share.len() * size) };
    }
}

/// Bytes of each of so many parts of scratch, whole lines; at least one, or the call is declined.
fn slot(engine: &mut HostEngine, parts: usize) -> Result<usize> {
    let bytes = engine.scratch_bytes() / parts.max(1) / LINE * LINE;
    if bytes > 0 {
        return Ok(bytes);
    }
    Err(engine.decline(Error::invalid_argument(format!(
        "{} bytes of scratch are too few for the all-reduce algorithm cube_mesh of {} ranks; raise \
         scratch_bytes to {} or more",
        engine.scratch_bytes(),
        engine.world(),
        (parts * LINE).next_multiple_of(256)
    ))))
}
