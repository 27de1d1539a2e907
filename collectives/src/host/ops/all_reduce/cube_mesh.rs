//! All-reduce for ranks that are not all linked: there are two groups, all ranks of a group are linked to each
//! other, and every rank is linked to one partner in the other group, as in a hybrid cube mesh. Data crosses
//! direct links only.
//!
//! Every rank reduces one share of the elements:
//!
//! 1. It copies the inputs of the other ranks of its group, as far as they are its *partner's* share, to its
//!    own scratch, where the partner can read them.
//! 2. It reduces its own share, from the inputs of its group, of its partner, and those that the partner
//!    forwarded, and writes the result to its own and the partner's output.
//! 3. It collects from each other rank of its group that rank's share and the share of that rank's partner.
//!
//! Inputs are forwarded as they are, not as the group's sum: a sum of sums would be rounded differently from
//! the sum in rank order, which every algorithm gives (rule S7). For eight ranks, the link between partners
//! carries half of the data as inputs, and an eighth of it as results.
//!
//! Signals go between all pairs, in every phase (rule S1). A signal is one word in the control block, which
//! ranks without a direct link reach as well, only more slowly. Scratch and windows, which hold data, are
//! accessed by their owner and by the ranks linked to it only.

use symmpool_allocator::{Error, Result};

use super::{Pieces, ResolvedCall, share};
use crate::host::HostEngine;
use crate::host::kernels::copy;
use crate::host::layout::paired_groups::PairedGroups;

/// Shares are multiples of this many bytes; see [`share`].
const LINE: usize = 64;

/// A range that lies at the same place of every rank: its input, its output, or a piece in scratch.
#[derive(Clone, Copy)]
enum SymmetricRange {
    /// A heap offset.
    Window(u64),
    /// Bytes into the scratch of the call under way.
    Scratch(usize),
}

impl SymmetricRange {
    /// The address of byte `at` of the range of `rank`.
    fn of(self, engine: &HostEngine, rank: u32, at: usize) -> *mut u8 {
        match self {
            Self::Window(offset) => engine.window(rank, offset + at as u64),
            Self::Scratch(offset) => engine.scratch(rank).wrapping_add(offset + at),
        }
    }
}

/// Where in scratch a rank forwards inputs: one slot for each other rank of its group.
#[derive(Clone, Copy)]
struct ForwardSlots {
    offset: usize,
    /// Bytes of one slot; a multiple of [`LINE`].
    bytes: usize,
}

impl ForwardSlots {
    /// The slot in which `owner` forwards the input of `source`, a rank of its group.
    fn at(self, engine: &HostEngine, groups: PairedGroups, owner: u32, source: u32) -> *mut u8 {
        let slot = self.offset + groups.index_in_group(owner, source) * self.bytes;
        engine.scratch(owner).wrapping_add(slot)
    }
}

/// Runs it directly between windows, or through scratch.
///
/// # Safety
///
/// You must keep the promises of [`HostEngine::all_reduce`], for the resolved buffers of `work`.
pub(super) unsafe fn run(engine: &mut HostEngine, work: &ResolvedCall) -> Result<()> {
    let groups = engine.paired_groups.clone().map_err(Error::unsupported)?;
    match work.windows() {
        // SAFETY: the caller promised that the buffers of `work` are there for its lengths; these are their window
        // offsets.
        Some(places) => unsafe { direct(engine, work, groups, places) },
        // SAFETY: the caller promised that the buffers of `work` are there for its lengths on every rank.
        None => unsafe { by_scratch(engine, work, groups) },
    }
}

/// Runs the algorithm where input and output are windows, which are read and written in place.
///
/// # Safety
///
/// You must keep the promises of [`HostEngine::all_reduce`]; `from` and `to` are the window offsets of input and
/// output.
unsafe fn direct(
    engine: &mut HostEngine,
    work: &ResolvedCall,
    groups: PairedGroups,
    (from, to): (u64, u64),
) -> Result<()> {
    let (me, world, size) = (engine.rank(), engine.world() as usize, work.size);
    // All of scratch is used for slots. Without partners none are needed, and one piece is enough.
    let (slots, each) = match groups.partner(me) {
        None => (ForwardSlots { offset: 0, bytes: 0 }, work.count.max(1)),
        Some(_) => {
            let bytes = slot_bytes(engine, groups.group_peer_count())?;
            (ForwardSlots { offset: 0, bytes }, bytes / size * world)
        }
    };
    engine.handshake(&work.call)?;
    for start in (0..work.count).step_by(each) {
        let (count, at) = (each.min(work.count - start), (start * size) as u64);
        let (input, output) = (SymmetricRange::Window(from + at), SymmetricRange::Window(to + at));
        // SAFETY: all ranks have made this call with these offsets, and leave their windows alone until they
        // have seen this rank's last step. Pieces do not overlap.
        unsafe { reduce(engine, work, groups, (input, output), count, slots)? };
        let target = work.data.to.wrapping_add(start * size);
        for peer in groups.group_peers(me) {
            // SAFETY: the peer has these results in its output since before its step; nobody writes them
            // again, and nobody else writes these shares of this rank's output.
            unsafe { collect(engine, groups, output, peer, target, (count, size)) };
        }
    }
    // When all ranks have reached this step, none accesses this rank's windows any more.
    engine.step()
}

/// Runs the algorithm through scratch, in pieces: copies a piece to scratch, makes a step, and then does in
/// scratch, in place, what [`direct`] does in windows.
///
/// # Safety
///
/// You must keep the promises of [`HostEngine::all_reduce`], for the resolved buffers of `work`.
unsafe fn by_scratch(
    engine: &mut HostEngine,
    work: &ResolvedCall,
    groups: PairedGroups,
) -> Result<()> {
    let (from, size) = (work.data.from, work.size);
    let (me, world) = (engine.rank(), engine.world() as usize);
    let forwards = if groups.partner(me).is_some() { groups.group_peer_count() } else { 0 };
    // Scratch holds a piece, each share of which fits a slot, and behind it the slots.
    let bytes = slot_bytes(engine, world + forwards)?;
    let slots = ForwardSlots { offset: world * bytes, bytes };
    let pieces = Pieces::new(work.count, size, world * bytes);
    // SAFETY: the first piece of the input, readable by contract, into scratch that holds a piece
    // and is free (see `next_scratch`).
    unsafe { copy(from, engine.next_scratch(), pieces.range(0).len() * size) };
    engine.handshake(&work.call)?;
    for index in 0..pieces.len() {
        let range = pieces.range(index);
        let (at, offset) = (range.start * size, pieces.offset(index));
        if index > 0 {
            let own = engine.scratch(me).wrapping_add(offset);
            // SAFETY: this piece of the input is copied to the half of scratch that held the piece before
            // the last one. Every peer has signalled the last piece's first step since it collected that.
            unsafe { copy(from.wrapping_add(at), own, range.len() * size) };
            engine.step()?;
        }
        let piece = SymmetricRange::Scratch(offset);
        // SAFETY: every rank has copied its input of this piece there, and signalled since. It fills that half
        // again only after all have signalled the next piece's first step.
        unsafe { reduce(engine, work, groups, (piece, piece), range.len(), slots)? };
        let target = work.data.to.wrapping_add(at);
        for peer in groups.group_peers(me).chain([me]) {
            // SAFETY: the peer, or this rank, has these results in its scratch since before its step; the
            // output is writable by contract, and does not overlap scratch.
            unsafe { collect(engine, groups, piece, peer, target, (range.len(), size)) };
        }
    }
    Ok(())
}

/// Forwards and reduces one piece of `count` elements. Afterwards each rank has in its output the results of
/// its own share and of its partner's, and every rank has signalled that. Takes two steps, or one where ranks
/// have no partners.
///
/// # Safety
///
/// Every rank has its input of the piece at `input` and room for it at `output`, and has signalled so; the two
/// ranges are the same or do not overlap. Until every rank is past this call's last step, nobody else writes
/// to either. A share of the piece fits a slot, and slots overlap neither range.
unsafe fn reduce(
    engine: &mut HostEngine,
    work: &ResolvedCall,
    groups: PairedGroups,
    (input, output): (SymmetricRange, SymmetricRange),
    count: usize,
    slots: ForwardSlots,
) -> Result<()> {
    let (me, world, size) = (engine.rank(), engine.world(), work.size);
    let partner = groups.partner(me);
    if let Some(partner) = partner {
        let theirs = share(count, size, partner, world);
        for peer in groups.group_peers(me) {
            let source = input.of(engine, peer, theirs.start * size);
            let slot = slots.at(engine, groups, me, peer);
            // SAFETY: the source is the peer's input of this share, which is written only after all have
            // signalled the step below. The slot is this rank's own; the partner read its former content
            // before the step that ended the last piece, or the call before the last one.
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
    // The order is that of the ranks, wherever their inputs are read from (S7).
    sources.extend((0..world).map(|rank| match partner {
        Some(partner) if partner != rank && !groups.same_group(me, rank) => {
            slots.at(engine, groups, partner, rank).cast_const()
        }
        _ => input.of(engine, rank, at).cast_const(),
    }));
    outputs.extend([me].into_iter().chain(partner).map(|rank| output.of(engine, rank, at)));
    // SAFETY: the partner filled its slots with this share before it signalled, and refills them after this
    // rank's next signal. From here on only this rank reads this share of the inputs of its group and of its
    // partner, and only it writes this share of the outputs. Input and output are the same range or do not
    // overlap, at the same place of every rank, so each output is exactly a source or overlaps none.
    unsafe { (work.reduce)(&sources, &outputs, mine.len(), sources.len()) };
    engine.sources = sources;
    engine.outputs = outputs;
    engine.step()
}

/// Copies the results that `peer` has, its own share and its partner's, to their places in this rank's piece at
/// `target`.
///
/// # Safety
///
/// `peer` has both shares of the piece of `count` elements of `size` bytes at `output`, and leaves them there
/// meanwhile. A piece is writable at `target`, and is not the peer's.
unsafe fn collect(
    engine: &HostEngine,
    groups: PairedGroups,
    output: SymmetricRange,
    peer: u32,
    target: *mut u8,
    (count, size): (usize, usize),
) {
    for owner in [peer].into_iter().chain(groups.partner(peer)) {
        let share = share(count, size, owner, engine.world());
        let at = share.start * size;
        let result = output.of(engine, peer, at);
        // SAFETY: the caller promised that the peer leaves this share there meanwhile, and that the piece is writable
        // at `target` and not the peer's.
        unsafe { copy(result, target.wrapping_add(at), share.len() * size) };
    }
}

/// Bytes of each part if scratch is divided into `parts` parts, a multiple of [`LINE`]. Declines the call where
/// a part would be empty.
fn slot_bytes(engine: &mut HostEngine, parts: usize) -> Result<usize> {
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
