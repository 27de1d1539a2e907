//! All-to-alls on a device: what their kernel is given, and its launch configuration.
//!
//! One kernel serves counts that the host knows and counts in the device's memory. How the data of a pair of
//! ranks travels follows from its count, on both ranks alike; so ranks need not launch the same grid, nor the
//! same variant of the kernel.

#![allow(unsafe_code)] // launches kernels on the caller's promises about raw memory

use symmpool_allocator::{Error, Result, Stream};

use crate::call::{Arguments, CallDescription, OpType, StandardCall};
use crate::cuda::all_to_all::row::{Exchange, Use};
use crate::cuda::engine::CudaEngine;
use crate::cuda::kernel::launch_config::LaunchConfig;
use crate::cuda::kernel::mode::AllToAllMode;
use crate::cuda::kernel::spec::KernelSpec;
use crate::cuda::layout::params::{CallParams, ITEM, MAX_RANKS, Traffic, UNKNOWN};
use crate::{DType, Place, SplitRows, SplitsAt};

/// Bytes that a rank sends to all others together through their escaped Lamport inboxes, if all get as much. With more, it is
/// faster to write data once, into outputs, although that must wait for the handshake.
const INBOX_BYTES: u64 = 24 << 20;
/// Bytes that it sends through inboxes at the beginning of longer parts: as much as the links carry while the
/// rows of the traffic matrix are exchanged.
const HEAD_BYTES: u64 = 2 << 20;
/// The most launches through inboxes of an all-gather or a broadcast whose data fits no inbox at once. A launch takes 2 us more
/// than its data (`h100x2_collectives.json`); in this many, 2 MiB each go as fast as directly.
const MAX_LAUNCHES: u64 = 4;
/// How many blocks keep all links busy.
const MAX_BLOCKS: u32 = 132;

/// A number for each rank.
type RankWords = [u64; MAX_RANKS as usize];

/// Elements that a rank sends to and receives from each rank, if the host knows them, and the bytes at which they begin
/// in its input and output. Ranks exchange counts alone, so parts follow each other in outputs.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::cuda) struct Parts {
    send: RankWords,
    receive: RankWords,
    send_begin: RankWords,
    receive_begin: RankWords,
}

impl Parts {
    /// Parts that lie one behind the other in the input and in the output.
    fn contiguous(send: RankWords, receive: RankWords, size: u64) -> Self {
        let (send_begin, receive_begin) = (begins(&send, size), begins(&receive, size));
        Self { send, receive, send_begin, receive_begin }
    }

    /// All that a rank has, sent to every rank; rank `r` has `counts[r]` elements.
    pub(in crate::cuda) fn gathered(rank: u32, counts: &[u64], size: u64) -> Self {
        let receive = per_rank(counts.iter().copied());
        let send = per_rank(counts.iter().map(|_| counts[rank as usize]));
        Self { send_begin: RankWords::default(), ..Parts::contiguous(send, receive, size) }
    }

    /// Parts of a root, which sends `counts[r]` elements to each other rank `r`, which begin at byte `begins[r]` of its
    /// input.
    pub(in crate::cuda) fn from_root(
        (rank, root): (u32, u32),
        counts: &[u64],
        begins: &[u64],
    ) -> Self {
        let others = (0..).zip(counts).map(|(peer, count)| if peer == root { 0 } else { *count });
        let mut parts = Self::default();
        if rank == root {
            parts.send = per_rank(others);
            parts.send_begin = per_rank(begins.iter().copied());
        } else {
            parts.receive[root as usize] = counts[rank as usize];
        }
        parts
    }

    /// The range of `count` elements from element `from` on of each part, as far as the part reaches.
    fn piece(&self, from: u64, count: u64, size: u64) -> Self {
        let counts = |all: RankWords| all.map(|each| each.saturating_sub(from).min(count));
        let begins = |mut begins: RankWords, counts: &RankWords| {
            for (begin, count) in begins.iter_mut().zip(counts) {
                *begin += from.min(*count) * size;
            }
            begins
        };
        Self {
            send: counts(self.send),
            receive: counts(self.receive),
            send_begin: begins(self.send_begin, &self.send),
            receive_begin: begins(self.receive_begin, &self.receive),
        }
    }
}

/// Arguments that the parts of one exchange have in common. A call makes one exchange or several.
#[derive(Clone, Copy)]
pub(in crate::cuda) struct ExchangeArgs {
    pub(in crate::cuda) call: CallDescription,
    pub(in crate::cuda) by: &'static Exchange,
    /// Input and output.
    pub(in crate::cuda) places: (Place, Place),
    /// Bytes of an element.
    pub(in crate::cuda) size: u64,
    pub(in crate::cuda) stream: Stream,
}

/// The ranges of elements in which parts of `count` elements go through inboxes, which take `most` elements of a part at
/// once: as few as possible, of about equal length. All but the last begin and end at multiples of an item.
fn pieces(count: u64, most: u64, size: u64) -> impl Iterator<Item = (u64, u64)> {
    let item = (ITEM / size).max(1);
    let each = count.div_ceil(count.div_ceil(most).max(1)).next_multiple_of(item).max(1);
    (0..count.div_ceil(each)).map(move |nth| (nth * each, each.min(count - nth * each)))
}

fn per_rank(numbers: impl Iterator<Item = u64>) -> RankWords {
    let mut all = RankWords::default();
    for (each, number) in all.iter_mut().zip(numbers) {
        *each = number;
    }
    all
}

impl CudaEngine {
    /// Sends `count` elements to every rank, as [`CudaEngine::all_to_all_v`].
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::all_to_all_v`], for `count` elements to and from each rank.
    pub(crate) unsafe fn all_to_all(&mut self, call: &StandardCall, stream: Stream) -> Result<()> {
        let by = self.exchange_of(call, stream)?;
        let Arguments { input, output, count, dtype, .. } = call.arguments;
        if self.copies_parts(by, output, call.arguments.bytes_of(1)) {
            // SAFETY: the caller promised that `input` is readable and `output` writable for `count` elements to and
            // from each rank, until the stream has done the call. `copies_parts` found that the output is a window.
            return unsafe { self.all_to_all_copy(call, stream) };
        }
        let counts = [count; MAX_RANKS as usize];
        let counts = &counts[..self.world() as usize];
        // SAFETY: the caller promised that `input` is readable and `output` writable for `count` elements to and from
        // each rank, until the stream has done the call.
        unsafe { self.exchange_splits(by, (input, output), (counts, counts), dtype, stream) }
    }

    /// Sends `send[r]` elements to rank `r` and receives `receive[r]` from it, on `stream`.
    ///
    /// # Safety
    ///
    /// `input` is readable for the sum of `send`, and `output` writable for that of `receive`, on the
    /// device until the stream has done the call; nothing else touches them meanwhile, in any
    /// rank's slot if they are windows.
    pub(crate) unsafe fn all_to_all_v(
        &mut self,
        places: (Place, Place),
        splits: (&[usize], &[usize]),
        dtype: DType,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the caller promised that `input` is readable for what is sent, and `output` writable for what is
        // received, until the stream has done the call; `splits` has their counts.
        unsafe { self.exchange_splits(self.default_exchange, places, splits, dtype, stream) }
    }

    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::all_to_all_v`].
    unsafe fn exchange_splits(
        &mut self,
        by: &'static Exchange,
        places: (Place, Place),
        (send, receive): (&[usize], &[usize]),
        dtype: DType,
        stream: Stream,
    ) -> Result<()> {
        self.begin(stream)?;
        let (input, output) = places;
        let (rank, world) = (self.rank() as usize, self.world() as usize);
        let size = dtype.size() as u64;
        let of_all = |counts: &[usize]| per_rank(counts.iter().map(|count| *count as u64));
        let (sent, received) = (of_all(send), of_all(receive));
        let bytes = |counts: &[u64]| {
            let total = counts.iter().try_fold(0_u64, |sum, count| sum.checked_add(*count));
            total?.checked_mul(size).filter(|bytes| *bytes <= self.pool_stride())
        };
        let (Some(length), Some(capacity)) = (bytes(&sent), bytes(&received)) else {
            let why = Error::invalid_argument(format!(
                "all_to_all_v of {send:?} and {receive:?} {} on rank {rank}: no memory is that \
                 long",
                dtype.name()
            ));
            return Err(self.decline(why, stream));
        };
        if send.len() != world || receive.len() != world || send[rank] != receive[rank] {
            let why = Error::invalid_argument(format!(
                "all_to_all_v of {send:?} and {receive:?} {} on rank {rank}: one of each for every \
                 of {world} ranks is needed, and what a rank sends to itself it receives",
                dtype.name()
            ));
            return Err(self.decline(why, stream));
        }
        self.check_disjoint(
            "all_to_all_v",
            (self.address(input), length),
            (self.address(output), capacity),
            stream,
        )?;
        let args = ExchangeArgs { call: describe(by, dtype, 1), by, places, size, stream };
        // SAFETY: the caller promised that `input` is readable for the sum of `send`, and `output` writable for that of
        // `receive`, until the stream has done the call; contiguous parts reach no further.
        unsafe { self.exchange(&args, &Parts::contiguous(sent, received, size)) }
    }

    /// Sends and receives parts that are known here.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::all_to_all_v`], for the parts of input and output.
    pub(in crate::cuda) unsafe fn exchange(
        &mut self,
        args: &ExchangeArgs,
        parts: &Parts,
    ) -> Result<()> {
        let (rank, size) = (self.rank() as usize, args.size);
        let (inbox_bytes, head) = self.inbox_limits(args.by);
        let others = |counts: RankWords| {
            counts.into_iter().enumerate().filter(move |(peer, _)| *peer != rank)
        };
        let longest =
            others(parts.send).chain(others(parts.receive)).map(|(_, count)| count * size);
        let longest = longest.max().unwrap_or(0);
        // Bytes that inboxes take, in whole items, as warps handle them.
        let through_inboxes = |counts| {
            let items = others(counts).map(|(_, count)| (count * size).next_multiple_of(ITEM));
            items.sum::<u64>()
        };
        let [length, capacity] = [parts.send, parts.receive].map(|all| all.iter().sum::<u64>());
        let traffic = Traffic {
            send: parts.send,
            receive: parts.receive,
            send_begin: parts.send_begin,
            receive_begin: parts.receive_begin,
            splits: 0,
            received: 0,
            offsets: 0,
            length,
            capacity,
            window: window(args.places.1),
            inbox_bytes,
            head,
            size: size as u32,
            wide: 0,
            ring: args.by.ring.into(),
        };
        let work = if longest <= inbox_bytes {
            let own = parts.send[rank] * size;
            (
                AllToAllMode::INBOXES,
                through_inboxes(parts.send).max(through_inboxes(parts.receive)).max(own),
            )
        } else {
            (AllToAllMode::DIRECT, length.max(capacity) * size)
        };
        // SAFETY: the caller promised that the parts of input and output are there until the stream has done the call;
        // `traffic` has where they begin, and their counts.
        unsafe { self.launch_exchange(args, work, &traffic) }
    }

    /// Exchanges parts of at most `longest` elements, on all ranks alike, like [`exchange`](Self::exchange), but
    /// possibly through inboxes in several launches. An all-to-all must take one launch: only its rank knows how long
    /// its parts are.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::exchange`].
    pub(in crate::cuda) unsafe fn exchange_in_pieces(
        &mut self,
        args: &ExchangeArgs,
        parts: &Parts,
        longest: u64,
    ) -> Result<()> {
        let size = args.size;
        let slot = self.control.escaped_slot(self.world());
        let wanted = self.largest_inbox_part();
        let bytes = longest * size;
        let several = args.by.inboxes == Use::WhereFaster;
        let few = bytes <= slot || self.world() < 2;
        if !several || few || bytes > wanted.min(MAX_LAUNCHES * slot) {
            // SAFETY: the caller promised that the parts of input and output are there until the stream has done the
            // call.
            return unsafe { self.exchange(args, parts) };
        }
        for (from, count) in pieces(longest, slot / size, size) {
            // SAFETY: the caller promised that the parts of input and output are there until the stream has done the
            // call; pieces lie within them.
            unsafe { self.exchange(args, &parts.piece(from, count, size)) }?;
        }
        Ok(())
    }

    /// Loads what several exchanges of one call may need, before the first of them is on the stream.
    pub(in crate::cuda) fn load_exchanges(&mut self) -> Result<()> {
        [AllToAllMode::INBOXES, AllToAllMode::DIRECT]
            .into_iter()
            .try_for_each(|mode| self.kernel(KernelSpec::all_to_all(self.world(), mode)).map(drop))
    }

    /// Sends as many rows to every rank as the device's memory says when the stream comes to it.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::all_to_all_v`], for input and output of the lengths in `rows`, and
    /// for splits of a count for each rank. None of these overlap.
    pub(crate) unsafe fn all_to_all_splits(
        &mut self,
        (input, output): (Place, Place),
        rows: &SplitRows,
        splits: &SplitsAt,
        stream: Stream,
    ) -> Result<()> {
        self.begin(stream)?;
        let SplitRows { dtype, row, length, capacity } = *rows;
        let size = (row as u64).checked_mul(dtype.size() as u64);
        let size = size.and_then(|size| u32::try_from(size).ok()).filter(|size| *size > 0);
        let bytes = |count: usize| {
            let bytes = u64::from(size?).checked_mul(count as u64);
            bytes.filter(|bytes| *bytes <= self.pool_stride())
        };
        let (Some(input_bytes), Some(output_bytes)) = (bytes(length), bytes(capacity)) else {
            let why = Error::invalid_argument(format!(
                "all_to_all_v of {length} rows into {capacity} on rank {}, of {row} {}: no memory \
                 is that long",
                self.rank(),
                dtype.name()
            ));
            return Err(self.decline(why, stream));
        };
        let split_bytes = match splits.bytes(self.rank(), self.world(), capacity) {
            Ok(bytes) => bytes,
            Err(why) => return Err(self.decline(why, stream)),
        };
        let (counts, received, offsets) =
            (splits.input as u64, splits.output as u64, splits.offsets as u64);
        let unless_null = |address: u64| if address == 0 { 0 } else { split_bytes };
        let written = [
            ("output", self.address(output), output_bytes),
            ("output splits", received, unless_null(received)),
            ("output offsets", offsets, unless_null(offsets)),
        ];
        let read = [(self.address(input), input_bytes), (counts, split_bytes)];
        for (nth, (name, address, bytes)) in written.into_iter().enumerate() {
            let others = written[..nth].iter().map(|(_, address, bytes)| (*address, *bytes));
            for other in read.into_iter().chain(others) {
                let what = format!("all_to_all_v with its {name}");
                self.check_disjoint(&what, other, (address, bytes), stream)?;
            }
        }
        let by = self.default_exchange;
        let (inbox_bytes, head) = self.inbox_limits(by);
        let traffic = Traffic {
            send: RankWords::default(),
            receive: RankWords::default(),
            send_begin: RankWords::default(),
            receive_begin: RankWords::default(),
            splits: counts,
            received,
            offsets,
            length: length as u64,
            capacity: capacity as u64,
            window: window(output),
            inbox_bytes,
            head,
            size: size.unwrap_or(1),
            wide: u32::from(splits.dtype == DType::I64),
            ring: by.ring.into(),
        };
        let work = (AllToAllMode::DEVICE_COUNTS, input_bytes);
        let (call, places) = (describe(by, dtype, row), (input, output));
        let args = ExchangeArgs { call, by, places, size: size.unwrap_or(1).into(), stream };
        // SAFETY: the caller promised that input and output are there for the lengths in `rows`, and the splits for a
        // count for each rank, until the stream has done the call. The kernel reads no more of the input than its
        // length, whatever the counts, and writes no more than the capacity.
        unsafe { self.launch_exchange(&args, work, &traffic) }
    }

    /// The most bytes of a part that goes through inboxes whole, and how many bytes of longer parts go through
    /// inboxes. The same on every rank.
    fn inbox_limits(&self, by: &Exchange) -> (u64, u32) {
        let most = self.control.escaped_slot(self.world());
        // A multiple of an item, so that the rest of a part is aligned as its beginning is.
        let head = (HEAD_BYTES / u64::from(self.world().max(2) - 1)).next_multiple_of(ITEM);
        let (all, head) = match by.inboxes {
            Use::WhereFaster => (most.min(self.largest_inbox_part()), most.min(head)),
            Use::Always => (most, most),
            Use::Never => (0, 0),
        };
        (all, head as u32)
    }

    /// The most bytes of a part that go through inboxes, if these have room.
    fn largest_inbox_part(&self) -> u64 {
        (INBOX_BYTES / u64::from(self.world().max(2) - 1)).next_multiple_of(ITEM)
    }

    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::all_to_all_v`], for the places of `args` and the lengths in
    /// `traffic`.
    unsafe fn launch_exchange(
        &mut self,
        args: &ExchangeArgs,
        (mode, bytes): (AllToAllMode, u64),
        traffic: &Traffic,
    ) -> Result<()> {
        let ExchangeArgs { call, by, places: (input, output), stream, .. } = *args;
        let most = if self.world() <= 4 { MAX_BLOCKS } else { 2 * MAX_BLOCKS };
        self.note_algorithm(by.way(mode.direct), None);
        let loaded = self.kernel(KernelSpec::all_to_all(self.world(), mode))?;
        let bound = loaded.threads;
        // At least so many that every pair of ranks has warps of its own.
        let vectors = bytes.div_ceil(16).max(2 * u64::from(MAX_RANKS) * ITEM / 16);
        // Small blocks start and end sooner.
        let threads = match vectors {
            0..=4096 => 64,
            4097..=32_768 => 256,
            _ => bound,
        };
        let mut grid = LaunchConfig::new(&loaded, vectors, threads, most);
        // Every pair needs warps of its own where blocks are few, too.
        if grid.worker_blocks() * grid.threads / 32 < self.world() {
            grid = LaunchConfig::new(&loaded, vectors, bound, most);
        }
        let params = CallParams {
            input: self.address(input),
            output: self.address(output),
            ..CallParams::of(&call)
        };
        let splits = if mode.device_counts { "device" } else { "host" };
        let direct = mode.direct;
        let (blocks, threads, requested) = (grid.blocks, grid.threads, by.name());
        tracing::debug!(bytes, direct, splits, requested, blocks, threads, "all_to_all_v");
        let grid = (grid.blocks, grid.threads);
        // SAFETY: the caller promised that the places of `args` are there for the lengths in `traffic` until the stream
        // has done the call, and that nothing else touches them. The kernel is one of all-to-alls, and gets its
        // traffic.
        unsafe { self.launch(loaded, grid, &params, Some(traffic), stream) }
    }
}

/// Description of an exchange. It has neither places nor counts: those are in the rows of the traffic matrix.
fn describe(by: &Exchange, dtype: DType, row: usize) -> CallDescription {
    CallDescription::new(OpType::AllToAllV).elements(dtype, row).algorithm(by.id)
}

/// The byte at which each part begins, for parts of `counts` elements that lie one behind the other.
fn begins(counts: &RankWords, size: u64) -> RankWords {
    let mut before = 0;
    counts.map(|count| {
        before += count * size;
        before - count * size
    })
}

/// The offset of a window, for the kernel.
fn window(place: Place) -> u64 {
    match place {
        Place::Window(offset) => offset,
        Place::Unregistered(_) => UNKNOWN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_all_parts_and_fit_inboxes() {
        for size in [1, 2, 4, 8, 16] {
            let most = 3 * ITEM / size;
            for count in [1, 5, most, most + 1, 2 * most + 3, 7 * most - 1] {
                let mut at = 0;
                for (from, length) in pieces(count, most, size) {
                    assert_eq!(from, at);
                    assert!(length > 0 && length <= most, "{length} of {count} at {from}, {size}");
                    assert!((from * size).is_multiple_of(ITEM));
                    at += length;
                }
                assert_eq!(at, count);
            }
        }
        let parts =
            Parts::contiguous(per_rank([5, 0, 9].into_iter()), per_rank([2, 7].into_iter()), 4);
        let piece = parts.piece(4, 4, 4);
        assert_eq!((&piece.send[..3], &piece.receive[..3]), (&[1, 0, 4][..], &[0, 3, 0][..]));
        assert_eq!(piece.send_begin[..3], [16, 20, 20 + 16]);
        assert_eq!(piece.receive_begin[..3], [8, 8 + 16, 36]);
    }
}
