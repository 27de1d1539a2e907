//! Straight from the sender's window, and this rank's segment for itself, which never travels.

use super::{Route, Work};
use crate::host::HostEngine;
use crate::host::kernels::{copy, copy_own, copy_streaming};

/// From here on an output leaves the caches anyway, so it is written past them; bytes received.
const STREAMING_BYTES: usize = 8 << 20;

/// Copies this rank's segments from every sender that is read directly, and from itself.
///
/// # Safety
///
/// All ranks have entered and agreed on the matrix; input and output are as the caller of the
/// operation promised.
pub(super) unsafe fn pull(work: &Work, engine: &HostEngine) {
    let me = work.rank;
    let bytes = |sender, receiver| work.matrix.bytes(engine, sender, receiver);
    let received: usize = (0..work.world).map(|sender| bytes(sender, me)).sum();
    let streams = received >= STREAMING_BYTES;
    for sender in engine.peers().chain([me]) {
        let source = match work.route_of(engine, sender) {
            _ if sender == me => work.data.from,
            Route::Direct(offset) => engine.window(sender, offset).cast_const(),
            Route::Pieces(_) => continue,
        };
        let in_input: usize = (0..me).map(|rank| bytes(sender, rank)).sum();
        let (in_output, fitting) = work.matrix.place(engine, sender, me);
        let from = source.wrapping_add(in_input);
        let to = work.data.to.wrapping_add(in_output);
        let copy = match streams {
            true => copy_streaming,
            false if sender == me => copy_own,
            false => copy,
        };
        // SAFETY: the sender has shown this offset and leaves its input alone until this
        // rank's step; its segment for this rank lies in it by its own promise, and in this rank's
        // output by the agreed matrix. Input and output of this rank are apart, slots too.
        unsafe { copy(from, to, fitting) };
    }
}
