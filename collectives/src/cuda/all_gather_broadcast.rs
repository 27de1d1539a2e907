//! All-gather and broadcast: every peer is sent the same.
//!
//! Little goes through inboxes as packets. More goes as in all-to-alls, with one place of the input for
//! all peers: through inboxes in one hop, by copy engines or kernels into outputs that are windows, and
//! through scratch into others. Much of a broadcast goes in two such steps, as the links of its root are
//! all that one step uses: a share to each rank, and every rank's to all.

#![allow(unsafe_code)] // passes on the caller's promises about raw buffers

use symmpool_allocator::{Error, Result, Stream};

use super::all_to_all::Parts;
use super::all_to_all_copy::Copied;
use super::engine::CudaEngine;
use super::reductions::{BROADCAST, GATHER, Work};
use crate::host::call::{Call, Operation};
use crate::{AllToAllAlgorithm, DType, Place, ReduceOp};

/// What a rank sends to its peers together as packets, which are twice as long as what they carry. On two
/// H200s, an all-gather's parts of 8 KiB take 2.7 us so and 3.5 as bare vectors, of 512 KiB 6.3 and 4.3.
const PACKET_BYTES: u64 = 128 << 10;
/// From here on a broadcast of more than two ranks goes in two steps, which cost about 4 us.
const STEPS_BYTES: u64 = 2 << 20;
/// Shares of such a one begin at whole lines of the links.
const LINE: u64 = 128;

impl CudaEngine {
    /// Copies rank `r`'s `input` to part `r` of every rank's `output`; `count` elements a part.
    ///
    /// # Safety
    ///
    /// As [`CudaEngine::all_reduce`]; `output` has `world` parts.
    pub(crate) unsafe fn all_gather(
        &mut self,
        (input, output): (Place, Place),
        count: usize,
        dtype: DType,
        stream: Stream,
    ) -> Result<()> {
        self.begin(stream)?;
        let part = self.bytes("all_gather", count, dtype, stream)?;
        let whole = self.parts("all_gather", part, stream)?;
        let (from, to) = (self.address(input), self.address(output));
        if from != to + u64::from(self.rank()) * part {
            self.apart("all_gather", (from, part), (to, whole), stream)?;
        }
        let call = Call::new(Operation::AllGather).elements(dtype, count);
        if self.goes_as_packets(part) {
            let work = Work { stride: part, ..moved(call, (from, to), part, dtype, stream) };
            // SAFETY: the caller's promises, which are passed on.
            return unsafe { self.as_packets(&work, GATHER) };
        }
        if self.copies_parts(output, part) {
            let call = call.output(output).algorithm(AllToAllAlgorithm::Copy as u8);
            let copied = Copied { from, to, part, apart: 0 };
            // SAFETY: likewise.
            return unsafe { self.copy_parts(call, copied, stream) };
        }
        let parts = Parts::gathered(
            self.rank(),
            &vec![count as u64; self.world() as usize],
            dtype.size() as u64,
        );
        // SAFETY: likewise.
        unsafe { self.exchange(call, (input, output), &parts, dtype, stream) }
    }

    /// Copies `count` elements of the root's `place` into every other rank's.
    ///
    /// # Safety
    ///
    /// As [`CudaEngine::all_reduce`].
    pub(crate) unsafe fn broadcast(
        &mut self,
        place: Place,
        count: usize,
        dtype: DType,
        root: u32,
        stream: Stream,
    ) -> Result<()> {
        self.begin(stream)?;
        let bytes = self.bytes("broadcast", count, dtype, stream)?;
        let (rank, world) = (self.rank(), self.world());
        if root >= world {
            let why = Error::invalid_argument(format!(
                "broadcast from rank {root} on rank {rank}: there are {world} ranks"
            ));
            return Err(self.decline(why, stream));
        }
        let call = Call::new(Operation::Broadcast).elements(dtype, count).root(root);
        if self.goes_as_packets(bytes) {
            let at = self.address(place);
            let work = Work { root, ..moved(call, (at, at), bytes, dtype, stream) };
            // SAFETY: the caller's promises, which are passed on.
            return unsafe { self.as_packets(&work, BROADCAST) };
        }
        let (size, count) = (dtype.size() as u64, count as u64);
        if world <= 2 || bytes < STEPS_BYTES {
            let parts = Parts::from_root((rank, root), &vec![count; world as usize], &[]);
            // SAFETY: likewise.
            return unsafe { self.exchange(call, (place, place), &parts, dtype, stream) };
        }
        let shares = shares(count, size, world);
        let begins: Vec<u64> = begins(&shares).map(|before| before * size).collect();
        let own = place.offset_by(begins[rank as usize]);
        let parts = Parts::from_root((rank, root), &shares, &begins);
        let gathered = Parts::gathered(rank, &shares, size);
        // SAFETY: likewise; shares lie apart.
        unsafe { self.exchange(call, (place, own), &parts, dtype, stream) }?;
        // SAFETY: likewise.
        unsafe { self.exchange(call, (own, place), &gathered, dtype, stream) }
    }

    /// What a call of a single rank comes to.
    ///
    /// # Safety
    ///
    /// As [`CudaEngine::all_reduce`].
    pub(super) unsafe fn copy_alone(
        &mut self,
        call: Call,
        places: (Place, Place),
        count: usize,
        dtype: DType,
        stream: Stream,
    ) -> Result<()> {
        let parts = Parts::gathered(0, &[count as u64], dtype.size() as u64);
        // SAFETY: passed on.
        unsafe { self.exchange(call, places, &parts, dtype, stream) }
    }

    fn goes_as_packets(&self, bytes: u64) -> bool {
        let leaves = bytes.saturating_mul(u64::from(self.world()) - 1);
        let auto = self.all_to_all == AllToAllAlgorithm::Auto;
        bytes == 0 || self.world() > 1 && auto && leaves <= PACKET_BYTES
    }

    /// # Safety
    ///
    /// As [`CudaEngine::all_reduce`].
    unsafe fn as_packets(&mut self, work: &Work, shots: u8) -> Result<()> {
        if work.bytes == 0 {
            return self.enter_only(work.call, work.stream);
        }
        // SAFETY: passed on.
        unsafe { self.two_shot(work, shots, false) }
    }
}

/// What is moved as it is, and not reduced.
fn moved(
    call: Call,
    (input, output): (u64, u64),
    bytes: u64,
    dtype: DType,
    stream: Stream,
) -> Work {
    let op = ReduceOp::Sum;
    Work { call, input, output, bytes, stride: 0, dtype, op, root: 0, stream }
}

/// Elements of each rank's share of so many.
fn shares(count: u64, size: u64, world: u32) -> Vec<u64> {
    let line = (LINE / size).max(1);
    let each = count.div_ceil(u64::from(world)).next_multiple_of(line);
    let begins = (0..u64::from(world)).map(|rank| (rank * each).min(count));
    begins.map(|begin| each.min(count - begin)).collect()
}

/// Where they begin.
fn begins(shares: &[u64]) -> impl Iterator<Item = u64> {
    shares.iter().scan(0, |before, share| {
        *before += share;
        Some(*before - share)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_follow_each_other_and_are_all_there_is() {
        for world in 1..=8 {
            for size in [1, 2, 4, 8, 16] {
                for count in [1, 7, 128, 1 << 20, (1 << 20) + 3] {
                    let shares = shares(count, size, world);
                    let begins: Vec<u64> = begins(&shares).collect();
                    assert_eq!(shares.len(), world as usize);
                    assert_eq!(shares.iter().sum::<u64>(), count);
                    for (begin, share) in begins.iter().zip(&shares) {
                        assert!(*share == 0 || (begin * size).is_multiple_of(LINE));
                        assert!(begin + share <= count);
                    }
                }
            }
        }
    }
}
