//! Copies through the sender's scratch. A sender's segments for other ranks form one byte stream, which begins with
//! the next rank's segment; piece `n` of the byte stream is in scratch in round `n`.

use super::AllToAllCall;
use crate::host::HostEngine;
use crate::host::kernels::copy;
use crate::host::ops::pieces::Pieces;

/// Copies piece `round` of this rank's byte stream to its place in `scratch`. `next` says that the handshake of the
/// call is still to come.
///
/// # Safety
///
/// The input is readable, and the piece's place in this rank's scratch is free.
pub(super) unsafe fn fill(
    work: &AllToAllCall,
    engine: &HostEngine,
    pieces: &Pieces,
    round: usize,
    scratch: *mut u8,
    next: bool,
) {
    let piece = pieces.range(round);
    if piece.is_empty() {
        return;
    }
    let bytes = |rank| {
        if next {
            work.matrix.next_bytes(engine, rank)
        } else {
            work.matrix.bytes(engine, work.rank, rank)
        }
    };
    let (mut in_stream, mut in_input) = (0, (0..=work.rank).map(bytes).sum());
    for peer in engine.peers() {
        if peer == 0 {
            in_input = 0;
        }
        let segment = bytes(peer);
        let (start, end) = (piece.start.max(in_stream), piece.end.min(in_stream + segment));
        if start < end {
            let from = work.data.from.wrapping_add(in_input + start - in_stream);
            let to = scratch.wrapping_add(pieces.offset(round) + start - piece.start);
            // SAFETY: a part of this rank's segment for `peer` is copied to its part of the piece.
            unsafe { copy(from, to, end - start) };
        }
        in_stream += segment;
        in_input += segment;
    }
}

/// Copies what piece `round` of `sender`'s byte stream holds for this rank to the output.
///
/// # Safety
///
/// The sender has filled the piece and signalled; the output is writable.
pub(super) unsafe fn collect(
    work: &AllToAllCall,
    engine: &HostEngine,
    pieces: &Pieces,
    round: usize,
    sender: u32,
) {
    let piece = pieces.range(round);
    let segment = work.matrix.bytes(engine, sender, work.rank);
    if piece.is_empty() || segment == 0 {
        return;
    }
    let world = work.world;
    let before = (1..(work.rank + world - sender) % world).map(|step| (sender + step) % world);
    let in_stream: usize = before.map(|rank| work.matrix.bytes(engine, sender, rank)).sum();
    let (in_output, fitting) = work.matrix.place(engine, sender, work.rank);
    let (start, end) = (piece.start.max(in_stream), piece.end.min(in_stream + fitting));
    if start < end {
        let scratch = engine.scratch(sender).wrapping_add(pieces.offset(round));
        let from = scratch.wrapping_add(start - piece.start);
        let to = work.data.to.wrapping_add(in_output + start - in_stream);
        // SAFETY: this part of the piece is for this rank; the sender leaves it alone until this rank's next
        // signal. The output has room for it, as its size was agreed.
        unsafe { copy(from, to, end - start) };
    }
}
