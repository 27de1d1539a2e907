//! All-gather and broadcast on a device: every peer is sent the same data.
//!
//! Small calls go through inboxes in the LL protocol. Larger ones are all-to-alls in which all peers get the same
//! part of the input: through Lamport inboxes in one hop, by copy engines or kernels into outputs that are
//! windows, and through scratch into other outputs. A broadcast of medium size takes two such steps, as one step would
//! use the links of its root alone: the root sends a share to each rank, and each rank sends its share to all. In a
//! large one the steps overlap, in stages.

#![allow(unsafe_code)] // passes on the caller's promises about raw buffers

use symmpool_allocator::{Error, Result, Stream};

use super::all_to_all::{ExchangeArgs, Parts};
use super::copy_engine::all_to_all::EqualParts;
use crate::algorithm::{COPY, StandardCollective};
use crate::call::{Arguments, CallDescription, StandardCall};
use crate::cuda::all_gather::ll;
use crate::cuda::broadcast::pipeline;
use crate::cuda::engine::CudaEngine;
use crate::cuda::kernel::mode::TwoShotCollective;
use crate::cuda::kernel::reduction_call::ReductionCall;
use crate::{DType, ReduceOp};

/// Bytes from which on broadcasts take two steps where there are more than two ranks. The second step costs about 4 us.
const TWO_STEP_BYTES: u64 = 2 << 20;
/// Bytes that links carry at once: shares of a broadcast in two steps begin at multiples of them.
const LINE: u64 = 128;

impl CudaEngine {
    /// Copies rank `r`'s `input` to part `r` of every rank's `output`; `count` elements a part.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::all_reduce`], for an output of `world` parts.
    pub(crate) unsafe fn all_gather(&mut self, call: &StandardCall, stream: Stream) -> Result<()> {
        let by = self.exchange_of(call, stream)?;
        self.begin(stream)?;
        let Arguments { input, output, count, dtype, .. } = call.arguments;
        let part = self.byte_count("all_gather", count, dtype, stream)?;
        let whole = self.bytes_of_parts("all_gather", part, stream)?;
        let (from, to) = (self.address(input), self.address(output));
        if from != to + u64::from(self.rank()) * part {
            self.check_disjoint("all_gather", (from, part), (to, whole), stream)?;
        }
        let call = call.describe().algorithm(by.id);
        if ll::serves(by, part, self.world()) {
            let work =
                ReductionCall { stride: part, ..moved(call, (from, to), part, dtype, stream) };
            // SAFETY: the caller promised that `input` is readable for a part and `output` writable for all parts,
            // until the stream has done the call; `work` has their addresses and the bytes of a part.
            return unsafe { self.send_in_ll(&work, TwoShotCollective::AllGather) };
        }
        if self.copies_parts(by, output, part) || self.gathers_by_copies(by, part) {
            let call = call.output(output).algorithm(COPY);
            let parts = EqualParts { from, to, part, input_stride: 0 };
            if output.is_window() {
                // SAFETY: the caller promised that `input` is readable for a part and `output` writable for all parts,
                // until the stream has done the call. The output is a window, and ranks compare its offset, which
                // `call` has.
                return unsafe { self.copy_parts(call, parts, stream) };
            }
            // SAFETY: the caller promised that `input` is readable for a part and `output` writable for all parts,
            // until the stream has done the call; `parts` has their addresses.
            return unsafe { self.gather_in_pieces(call, parts, stream) };
        }
        let parts = Parts::gathered(
            self.rank(),
            &vec![count as u64; self.world() as usize],
            dtype.size() as u64,
        );
        let args =
            ExchangeArgs { call, by, places: (input, output), size: dtype.size() as u64, stream };
        // SAFETY: the caller promised that `input` is readable for a part and `output` writable for all parts, until
        // the stream has done the call; `args` has both, and `parts` their lengths.
        unsafe { self.exchange_in_pieces(&args, &parts, count as u64) }
    }

    /// Copies `count` elements of the root's output into every other rank's.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::all_reduce`], of the output as input and output.
    pub(crate) unsafe fn broadcast(&mut self, call: &StandardCall, stream: Stream) -> Result<()> {
        let by = self.exchange_of(call, stream)?;
        self.begin(stream)?;
        let Arguments { output: place, count, dtype, root, .. } = call.arguments;
        let bytes = self.byte_count("broadcast", count, dtype, stream)?;
        let (rank, world) = (self.rank(), self.world());
        if root >= world {
            let why = Error::invalid_argument(format!(
                "broadcast from rank {root} on rank {rank}: there are {world} ranks"
            ));
            return Err(self.decline(why, stream));
        }
        let call = call.describe().algorithm(by.id);
        if ll::serves(by, bytes, world) {
            let at = self.address(place);
            let work = ReductionCall { root, ..moved(call, (at, at), bytes, dtype, stream) };
            // SAFETY: the caller promised that the output is readable and writable for `count` elements until the
            // stream has done the call; it is both input and output of `work`.
            return unsafe { self.send_in_ll(&work, TwoShotCollective::Broadcast) };
        }
        if pipeline::serves(by, bytes, world) {
            let at = self.address(place);
            let work = ReductionCall { root, ..moved(call, (at, at), bytes, dtype, stream) };
            self.note_algorithm(pipeline::ROW.id.label(StandardCollective::Broadcast), None);
            // SAFETY: the caller promised that the output is readable and writable for `count` elements until the
            // stream has done the call; it is both input and output of `work`.
            return unsafe { pipeline::launch(self, &work, place) };
        }
        let (size, count) = (dtype.size() as u64, count as u64);
        let args = |places| ExchangeArgs { call, by, places, size, stream };
        if world <= 2 || bytes < TWO_STEP_BYTES {
            let parts = Parts::from_root((rank, root), &vec![count; world as usize], &[]);
            // SAFETY: the caller promised that the output is readable and writable for `count` elements until the
            // stream has done the call; the root sends them, and the others receive them.
            return unsafe { self.exchange_in_pieces(&args((place, place)), &parts, count) };
        }
        let shares = shares(count, size, world);
        let begins: Vec<u64> = begins(&shares).map(|before| before * size).collect();
        let own = place.offset_by(begins[rank as usize]);
        let parts = Parts::from_root((rank, root), &shares, &begins);
        let gathered = Parts::gathered(rank, &shares, size);
        let longest = shares.iter().copied().max().unwrap_or(0);
        self.load_exchanges()?;
        // SAFETY: the caller promised that the output is readable and writable for `count` elements until the stream
        // has done the call. The root sends shares of them, and others receive their own; shares do not overlap.
        unsafe { self.exchange_in_pieces(&args((place, own)), &parts, longest) }?;
        // SAFETY: the caller promised that the output is readable and writable for `count` elements until the stream
        // has done the call. A rank sends its share, and receives the others where they lie.
        unsafe { self.exchange_in_pieces(&args((own, place)), &gathered, longest) }
    }

    /// A reduction of a single rank, which is a copy.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::all_reduce`], for the input and output in `arguments`.
    pub(in crate::cuda) unsafe fn copy_alone(
        &mut self,
        call: CallDescription,
        arguments: &Arguments,
        stream: Stream,
    ) -> Result<()> {
        let Arguments { input, output, count, dtype, .. } = *arguments;
        let (size, by) = (dtype.size() as u64, self.default_exchange);
        let args = ExchangeArgs { call, by, places: (input, output), size, stream };
        // SAFETY: the caller promised that `input` is readable and `output` writable for `count` elements until the
        // stream has done the call; the only part has as many.
        unsafe { self.exchange(&args, &Parts::gathered(0, &[count as u64], size)) }
    }

    /// One shot of the LL protocol.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::all_reduce`], for the input and output of `work`.
    unsafe fn send_in_ll(
        &mut self,
        work: &ReductionCall,
        collective: TwoShotCollective,
    ) -> Result<()> {
        if work.bytes == 0 {
            return self.handshake_only(work.call, work.stream);
        }
        self.note_algorithm("ll", None);
        // SAFETY: the caller promised that the input and output of `work` are there until the stream has done the call.
        unsafe { ll::launch(self, work, collective) }
    }
}

/// A call that moves data without reducing it.
fn moved(
    call: CallDescription,
    (input, output): (u64, u64),
    bytes: u64,
    dtype: DType,
    stream: Stream,
) -> ReductionCall {
    let op = ReduceOp::Sum;
    ReductionCall { call, input, output, bytes, stride: 0, dtype, op, root: 0, stream }
}

/// How many of `count` elements each rank's share has.
fn shares(count: u64, size: u64, world: u32) -> Vec<u64> {
    let line = (LINE / size).max(1);
    let each = count.div_ceil(u64::from(world)).next_multiple_of(line);
    let begins = (0..u64::from(world)).map(|rank| (rank * each).min(count));
    begins.map(|begin| each.min(count - begin)).collect()
}

/// The element at which each share begins.
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
    fn shares_follow_each_other_and_cover_everything() {
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
