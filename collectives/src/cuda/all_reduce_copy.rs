//! All-reduces that copy engines carry: `two_shot_copy`.
//!
//! A copy engine reaches 389 GB/s on the links of an H200, where stores of kernels end at 361, but only
//! with one copy under way at a time, and each costs 4 us more. So a stream of its own has nothing but
//! copies, as few as can be, while kernels on the caller's stream reduce what came. As much of every
//! share as the scratch holds goes in one round, to each peer in one copy, to the last of them in two:
//! when the first half of the share has come from all, it is reduced while the second is on the links,
//! and that while the first goes to a peer. All other results go when there is nothing else to send.
//!
//! Ranks copy to peers in rotated order. One that is ahead would come to a peer that still receives from
//! another, and delay that one, which would be later still: so they meet before every further round.

#![allow(unsafe_code)] // copies by address, and passes on the caller's promises

use std::ops::Range;

use symmpool_allocator::{Result, Stream};

use super::engine::CudaEngine;
use super::kernel_spec::Specialty;
use super::kernels::Loaded;
use super::params::CallParams;
use super::reductions::{THREADS, Work};
use crate::jit::sources::TWO_SHOT_COPY;

/// Bytes of every share, as far as it is that long.
type Stretch = Range<u64>;

/// The rounds of shares of so many bytes, about equal, of at most `room` bytes each, and in halves. All
/// that there is but the end of the last is on cache lines, as `room` is.
fn rounds(share: u64, room: u64) -> impl Iterator<Item = [Stretch; 2]> {
    let each = share.div_ceil(share.div_ceil(room)).next_multiple_of(128);
    let beginnings = (0..share.div_ceil(each)).map(move |nth| nth * each);
    beginnings.map(move |from| {
        let end = share.min(from + each);
        let middle = end.min(from + (end - from).div_ceil(2).next_multiple_of(128));
        [from..middle, middle..end]
    })
}

/// Where a stretch of a share begins, that `begin`s somewhere and is so long, and its length there.
fn within((begin, length): (u64, u64), stretch: Stretch) -> (u64, u64) {
    let (from, end) = (stretch.start.min(length), stretch.end.min(length));
    (begin + from, end - from)
}

impl CudaEngine {
    /// One call of the protocol, and one without data at its end: what a rank copied to its peers has
    /// arrived when it has entered that, and what they copied to it has been reduced.
    ///
    /// # Safety
    ///
    /// As [`CudaEngine::all_reduce`].
    pub(super) unsafe fn copied(&mut self, work: &Work) -> Result<()> {
        let others: Vec<u32> = self.others().collect();
        let Some((&last, before)) = others.split_last() else {
            return self.enter_only(work.call, work.stream);
        };
        let reduction = Specialty::reduces(&TWO_SHOT_COPY, (work.dtype, work.op));
        let reduce = self.kernel(reduction)?.after_copies();
        let share = work.share(0, self.world()).1;
        let (kernels, copies) = (work.stream, self.aside);
        self.turn_to(kernels)?;
        self.fork(kernels, copies)?;
        self.enter_only(work.call, kernels)?;
        let mut sent = 0;
        for [first, second] in rounds(share, self.control.scratch_room(self.world())) {
            if first.start > 0 {
                // When all have met, nobody reads what is in the scratch any more.
                self.fork(copies, kernels)?;
                self.reduce_copied(reduce, work, 0..0, 0)?;
                self.fork(kernels, copies)?;
            }
            for peer in before {
                self.copy_input(work, *peer, first.start..second.end, 0)?;
            }
            self.copy_input(work, last, first.clone(), 0)?;
            self.fork(copies, kernels)?;
            self.reduce_copied(reduce, work, first.clone(), 0)?;
            let behind = second.start - first.start;
            self.copy_input(work, last, second.clone(), behind)?;
            self.fork(copies, kernels)?;
            // For the results of the first half, so before the second is reduced.
            self.fork(kernels, copies)?;
            self.reduce_copied(reduce, work, second, behind)?;
            self.copy_result(work, others[0], sent..first.end)?;
            sent = first.end;
        }
        self.fork(kernels, copies)?;
        for peer in &others {
            let from = if *peer == others[0] { sent } else { 0 };
            self.copy_result(work, *peer, from..share)?;
        }
        self.fork(copies, kernels)?;
        self.enter_after_copies(work.call, kernels)
    }

    /// Puts a stretch of this rank's part of a peer's share into that peer's scratch, `behind` where
    /// this rank's place there begins.
    fn copy_input(&mut self, work: &Work, peer: u32, stretch: Stretch, behind: u64) -> Result<()> {
        let (rank, room) = (self.rank(), self.control.scratch_room(self.world()));
        let slot = if rank < peer { rank } else { rank - 1 };
        let to = self.scratch_of(peer) + u64::from(slot) * room + behind;
        let (from, bytes) = within(work.share(peer, self.world()), stretch);
        self.copy_by_engine(to, work.input + from, bytes, self.aside)
    }

    /// Reduces a stretch of this rank's share, when what peers copied is there, on the call's stream.
    fn reduce_copied(
        &self,
        kernel: Loaded,
        work: &Work,
        stretch: Stretch,
        behind: u64,
    ) -> Result<()> {
        let (from, bytes) = within(work.share(self.rank(), self.world()), stretch);
        let (input, output) = (work.input + from, work.output + from);
        let params = CallParams { input, output, bytes, stride: behind, ..work.params() };
        let grid = (kernel.resident(THREADS).min(kernel.share.most_blocks), THREADS);
        // SAFETY: a stretch of what the caller of `copied` promised, of which nothing is copied until
        // the kernel has run.
        unsafe { self.launch_apart(kernel, grid, &self.comm, &params, None, work.stream) }
    }

    /// Puts a stretch of this rank's results into a peer's output, whose old contents the peer needs no
    /// more: it had sent them before the kernel reduced.
    fn copy_result(&mut self, work: &Work, peer: u32, stretch: Stretch) -> Result<()> {
        let (from, bytes) = within(work.share(self.rank(), self.world()), stretch);
        let to = self.at_peer(work.output, peer) + from;
        self.copy_by_engine(to, work.output + from, bytes, self.aside)
    }

    /// The others in an order that differs from rank to rank, so that no two copy to one.
    pub(super) fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let (rank, world) = (self.rank(), self.world());
        (1..world).map(move |distance| (rank + distance) % world)
    }

    /// One copy, by a copy engine. The other ranks are told where that is refused.
    pub(super) fn copy_by_engine(
        &mut self,
        to: u64,
        from: u64,
        bytes: u64,
        stream: Stream,
    ) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: callers copy from this rank's buffers, which their caller promised, to peers'
        // scratch or outputs, which are windows at the same place.
        unsafe { self.copy_apart(to, from, bytes, stream) }
            .map_err(|error| self.decline(error, stream))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_are_as_few_as_fit_and_leave_nothing_out() {
        for share in [16, 128, 1 << 20, (1 << 20) + 16, 64 << 20, (5 << 30) - 48] {
            for room in [128, 1024, 64 << 20, (192 << 20) / 7 / 128 * 128, 1 << 40] {
                if share / room > 1 << 20 {
                    continue;
                }
                let mut at = 0;
                let mut count = 0;
                for [first, second] in rounds(share, room) {
                    assert_eq!((at, first.end), (first.start, second.start));
                    assert!(!first.is_empty() && second.start <= second.end);
                    assert!(second.end - first.start <= room, "{first:?} {second:?} of {room}");
                    assert!(first.end == share || first.end.is_multiple_of(128));
                    at = second.end;
                    count += 1;
                }
                assert_eq!((at, count), (share, share.div_ceil(room)), "{share} by {room}");
            }
        }
    }

    #[test]
    fn stretches_end_where_shares_do() {
        let share = (1000, 100);
        assert_eq!(within(share, 0..128), (1000, 100));
        assert_eq!(within(share, 64..128), (1064, 36));
        assert_eq!(within(share, 128..256), (1100, 0));
        assert_eq!(within((1000, 0), 0..128), (1000, 0));
    }
}
