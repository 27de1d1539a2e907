//! Copies straight from the sender's window, or into the receiver's, and this rank's segment for itself, which
//! stays in its memory.

use super::{AllToAllCall, SenderRoute};
use crate::host::HostEngine;
use crate::host::kernels::{copy, copy_own, copy_streaming};
use crate::host::layout::load_balance::LoadBalance;

/// A rank that receives at least this many bytes cannot keep its output in the caches anyway, so it is written
/// past them.
const STREAMING_BYTES: usize = 8 << 20;

/// Copies this rank's segments from every sender that is read directly, and from itself, except for the ends of
/// segments that senders write according to `balance`.
///
/// # Safety
///
/// All ranks have passed the handshake and agree on the matrix; input and output are as the caller of the
/// operation promised.
pub(super) unsafe fn pull(work: &AllToAllCall, engine: &HostEngine, balance: Option<&LoadBalance>) {
    let me = work.rank;
    let streams = streams(work, engine, me);
    for sender in engine.peers().chain([me]) {
        let source = match work.route_of(engine, sender) {
            _ if sender == me => work.data.from,
            SenderRoute::Direct(offset) => engine.window(sender, offset).cast_const(),
            SenderRoute::Scratch(_) => continue,
        };
        let in_input: usize = (0..me).map(|rank| work.matrix.bytes(engine, sender, rank)).sum();
        let (in_output, fitting) = work.matrix.place(engine, sender, me);
        let bytes =
            fitting - balance.map_or(0, |balance| balance.written_by_sender[sender as usize]);
        let from = source.wrapping_add(in_input);
        let to = work.data.to.wrapping_add(in_output);
        let copy = match streams {
            true => copy_streaming,
            false if sender == me => copy_own,
            false => copy,
        };
        // SAFETY: the sender has published this offset and leaves its input alone until this rank's step; its
        // segment for this rank lies in its input by its own promise, and in this rank's output by the agreed
        // matrix. Input and output of this rank do not overlap, and neither do slots.
        unsafe { copy(from, to, bytes) };
    }
}

/// Writes the part of what others receive that this rank writes according to `balance`.
///
/// # Safety
///
/// You must keep the promises of [`pull`].
pub(super) unsafe fn push(work: &AllToAllCall, engine: &HostEngine, balance: &LoadBalance) {
    let me = work.rank;
    for receiver in engine.peers() {
        let bytes = balance.written_by_this_rank[receiver as usize];
        if bytes == 0 {
            continue;
        }
        let in_input: usize = (0..receiver).map(|rank| work.matrix.bytes(engine, me, rank)).sum();
        let (in_output, fitting) = work.matrix.place(engine, me, receiver);
        let from = work.data.from.wrapping_add(in_input + fitting - bytes);
        let output = engine.window(receiver, engine.row(receiver, 2 * work.world + 1));
        let to = output.wrapping_add(in_output + fitting - bytes);
        let copy = if streams(work, engine, receiver) { copy_streaming } else { copy };
        // SAFETY: the receiver has made this call with its output at this offset, which has room for this rank's
        // segment by the agreed matrix. It leaves the output alone until this rank's step, and does not write the
        // end of the segment itself, as it computed the same balance. The segment lies in this rank's input.
        unsafe { copy(from, to, bytes) };
    }
}

/// Whether a rank's output is written past the caches.
fn streams(work: &AllToAllCall, engine: &HostEngine, receiver: u32) -> bool {
    let bytes = |sender| work.matrix.bytes(engine, sender, receiver);
    (0..work.world).map(bytes).sum::<usize>() >= STREAMING_BYTES
}
