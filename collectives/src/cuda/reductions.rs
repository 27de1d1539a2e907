//! Which kernels a collective runs.

#![allow(unsafe_code)] // passes on the caller's promises about raw buffers

use symmpool_allocator::{Result, Stream};

use super::constraints::{Algorithm, Shape, fits_lamport};
use super::engine::CudaEngine;
use super::kernel_spec::Specialty;
use super::kernels::Loaded;
use super::launch_config::Grid;
use super::params::{CallParams, LINE_PAYLOAD, MOST_TEAMS};
use crate::algorithm::RequestedAlgorithm;
use crate::host::call::{Call, Operation};
use crate::jit::sources::TWO_SHOT_PUSH;
use crate::{DType, Place, ReduceOp};

/// Bits of `SHOTS` in the kernels.
pub(super) const SCATTER: u8 = 1;
pub(super) const GATHER: u8 = 2;
pub(super) const BROADCAST: u8 = 4;

/// Most threads of a block, which kernels are compiled for.
pub(super) const THREADS: u32 = 512;
/// Most teams that push shares: of so many, all of one length, 64 and 128 MiB take four H200s 1.0 and
/// 1.5% less than of the 131 there is room for (`cuda_collectives bench`).
const PUSHING: u32 = 128;

/// What a call works on, checked.
#[derive(Clone, Copy)]
pub(super) struct Work {
    pub(super) call: Call,
    pub(super) input: u64,
    pub(super) output: u64,
    /// Of the whole, or of a rank's part.
    pub(super) bytes: u64,
    /// From part to part.
    pub(super) stride: u64,
    pub(super) dtype: DType,
    pub(super) op: ReduceOp,
    pub(super) root: u32,
    pub(super) stream: Stream,
}

impl Work {
    pub(super) fn params(&self) -> CallParams {
        CallParams {
            details: *self.call.words(),
            input: self.input,
            output: self.output,
            bytes: self.bytes,
            stride: self.stride,
            root: self.root,
            teams: 0,
        }
    }

    /// Pieces of at most `most` bytes, about equal, all but the last a multiple of `unit`, which
    /// `most` is.
    pub(super) fn pieces(self, most: u64, unit: u64) -> impl Iterator<Item = Self> {
        let count = self.bytes.div_ceil(most).max(1);
        let each = self.bytes.div_ceil(count).div_ceil(unit).saturating_mul(unit).clamp(1, most);
        (0..count)
            .map(move |nth| nth * each)
            .take_while(move |from| *from < self.bytes)
            .map(move |from| self.stretch(from, each.min(self.bytes - from)))
    }

    /// Where a rank's share of the whole begins, and its length, as `Parts` in `symmpool/partition.cuh` has them.
    pub(super) fn share(&self, rank: u32, world: u32) -> (u64, u64) {
        let share = self.bytes.div_ceil(16).div_ceil(u64::from(world)) * 16;
        let from = (u64::from(rank) * share).min(self.bytes);
        (from, share.min(self.bytes - from))
    }

    /// The stretch `[from, from + bytes)` of both buffers.
    fn stretch(&self, from: u64, bytes: u64) -> Self {
        Self { input: self.input + from, output: self.output + from, bytes, ..*self }
    }
}

impl CudaEngine {
    /// Reduces `count` elements of every rank's `input` into every rank's `output`, on `stream`.
    ///
    /// # Safety
    ///
    /// `input` is readable and `output` writable on the device for `count` elements, until the
    /// stream has done the call; nothing else touches them meanwhile, in any rank's slot if they
    /// are windows.
    pub(crate) unsafe fn all_reduce(
        &mut self,
        (input, output): (Place, Place),
        count: usize,
        (dtype, op): (DType, ReduceOp),
        asked: RequestedAlgorithm,
        stream: Stream,
    ) -> Result<()> {
        self.begin(stream)?;
        self.reduces("all_reduce", dtype, stream)?;
        let bytes = self.bytes("all_reduce", count, dtype, stream)?;
        if bytes == 0 {
            let call = Call::new(Operation::AllReduce).elements(dtype, count).reduce(op);
            return self.enter_only(call, stream);
        }
        let shape = Shape {
            bytes,
            dtype,
            world: self.world(),
            input_window: input.is_window(),
            output_window: output.is_window(),
            direct: self.direct,
        };
        let (chosen, why) = match shape.choose(asked, &self.control, &self.rows) {
            Ok(chosen) => chosen,
            Err(error) => return Err(self.decline(error, stream)),
        };
        let (from, to) = (self.address(input), self.address(output));
        if from != to {
            self.apart("all_reduce", (from, bytes), (to, bytes), stream)?;
        }
        let call = Call::new(Operation::AllReduce)
            .elements(dtype, count)
            .reduce(op)
            .algorithm(chosen as u8)
            .input(input)
            .output(output)
            .in_place(from == to);
        let stride = 0;
        let work =
            Work { call, input: from, output: to, bytes, stride, dtype, op, root: 0, stream };
        if self.world() == 1 {
            // SAFETY: the caller's promises, which are passed on.
            return unsafe { self.copy_alone(call, (input, output), count, dtype, stream) };
        }
        let (dtype, why) = (dtype.name(), why.name());
        tracing::debug!(bytes, dtype, algorithm = ?chosen, why, "all_reduce");
        // SAFETY: as above.
        unsafe { self.run(&work, chosen) }
    }

    /// # Safety
    ///
    /// As [`CudaEngine::all_reduce`].
    unsafe fn run(&mut self, work: &Work, algorithm: Algorithm) -> Result<()> {
        const BOTH: u8 = SCATTER | GATHER;
        let vectors = work.bytes.div_ceil(16);
        let share = vectors.div_ceil(u64::from(self.world()));
        // Eight threads a line.
        let of_lines = work.bytes.div_ceil(LINE_PAYLOAD) * 8;
        // Threads that have something to do, how many to a block, and the most blocks. Small blocks
        // begin and end sooner.
        let (wanted, threads, most) = match algorithm {
            Algorithm::OneShotLl | Algorithm::OneShotLamport => (vectors, 32, u32::MAX),
            Algorithm::OneShotLl128 => (of_lines, 64, u32::MAX),
            Algorithm::OneShotPull => (vectors, 256, MOST_TEAMS),
            Algorithm::TwoShotPull => (share, THREADS, 256),
            Algorithm::TwoShotPush => {
                // SAFETY: passed on.
                return unsafe { self.push(work, BOTH) };
            }
            Algorithm::TwoShotCopy => {
                // SAFETY: passed on.
                return unsafe { self.copied(work) };
            }
            Algorithm::TwoShotLl | Algorithm::TwoShotLamport => {
                let lamport = algorithm == Algorithm::TwoShotLamport;
                // SAFETY: passed on.
                return unsafe { self.two_shot(work, BOTH, lamport) };
            }
        };
        let specialty =
            Specialty::all_reduce(algorithm, self.world(), (work.dtype, work.op), work.bytes);
        let loaded = self.kernel(specialty)?;
        if matches!(algorithm, Algorithm::OneShotPull | Algorithm::TwoShotPull) {
            let teams = Grid::new(&loaded.alone(), wanted, threads, most);
            // SAFETY: passed on.
            return unsafe { self.put_in_teams(loaded, teams, work) };
        }
        let grid = Grid::new(&loaded, wanted, threads, most);
        // SAFETY: passed on.
        unsafe { self.put(loaded, grid, &work.params(), work.stream) }
    }

    /// Through inboxes, in as many calls as their room asks for.
    ///
    /// # Safety
    ///
    /// As [`CudaEngine::all_reduce`].
    pub(super) unsafe fn two_shot(&mut self, work: &Work, shots: u8, lamport: bool) -> Result<()> {
        let ranks = u64::from(self.world());
        // Of an all-reduce: shares and results of all ranks. Of a half: parts of all ranks.
        let (shares, most) = if shots == SCATTER | GATHER {
            (ranks, self.control.two_shot_room(lamport, self.world()))
        } else {
            (1, self.control.inbox_vectors(lamport) / ranks * 16)
        };
        let threads = match most.min(work.bytes) {
            0..=524_288 => 64,
            524_289..=1_048_576 => 256,
            _ => THREADS,
        };
        let reduction = (work.dtype, work.op);
        let bytes = most.min(work.bytes);
        let loaded =
            self.kernel(Specialty::two_shot(self.world(), reduction, shots, lamport, bytes))?;
        let threads = threads.min(loaded.threads);
        for piece in work.pieces(most, 16 * shares) {
            let each = piece.bytes.div_ceil(16).div_ceil(shares);
            let grid = Grid::new(&loaded, each, threads, 264);
            // SAFETY: a stretch of what the caller promised.
            unsafe { self.put(loaded, grid, &piece.params(), piece.stream) }?;
        }
        Ok(())
    }

    /// # Safety
    ///
    /// As [`CudaEngine::all_reduce`].
    pub(super) unsafe fn put(
        &mut self,
        kernel: Loaded,
        grid: Grid,
        params: &CallParams,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: passed on.
        unsafe { self.launch(kernel, (grid.blocks, grid.threads), params, None, stream) }
    }

    /// As `put`, of kernels whose teams of one number work together on all ranks, which compare how many
    /// there are. A team for every block of data that the device would hold: one that holds fewer, as its
    /// communicators share it, has blocks that stand for several.
    ///
    /// # Safety
    ///
    /// As [`CudaEngine::all_reduce`].
    unsafe fn put_in_teams(&mut self, kernel: Loaded, whole: Grid, work: &Work) -> Result<()> {
        let work = Work { call: work.call.peer_blocks(whole.data_blocks()), ..*work };
        let params = CallParams { teams: whole.data_blocks(), ..work.params() };
        // SAFETY: passed on.
        unsafe { self.put(kernel, whole.within(&kernel), &params, work.stream) }
    }

    /// Reduces part `r` of every rank's `input` into rank `r`'s `output`; `count` elements a part.
    ///
    /// # Safety
    ///
    /// As [`CudaEngine::all_reduce`]; `input` has `world` parts.
    pub(crate) unsafe fn reduce_scatter(
        &mut self,
        (input, output): (Place, Place),
        count: usize,
        (dtype, op): (DType, ReduceOp),
        stream: Stream,
    ) -> Result<()> {
        self.begin(stream)?;
        self.reduces("reduce_scatter", dtype, stream)?;
        let part = self.bytes("reduce_scatter", count, dtype, stream)?;
        let whole = self.parts("reduce_scatter", part, stream)?;
        let (from, to) = (self.address(input), self.address(output));
        if to != from + u64::from(self.rank()) * part {
            self.apart("reduce_scatter", (from, whole), (to, part), stream)?;
        }
        let call = Call::new(Operation::ReduceScatter)
            .elements(dtype, count)
            .reduce(op)
            .input(input)
            .output(output);
        let (bytes, stride) = (part, part);
        let work =
            Work { call, input: from, output: to, bytes, stride, dtype, op, root: 0, stream };
        if part == 0 {
            return self.enter_only(call, stream);
        }
        if self.world() == 1 {
            // SAFETY: the caller's promises, which are passed on.
            return unsafe { self.copy_alone(call, (input, output), count, dtype, stream) };
        }
        // SAFETY: likewise.
        unsafe { self.scatter(&work, fits_lamport(dtype)) }
    }

    /// Through the inbox while that is faster, else through scratch.
    ///
    /// # Safety
    ///
    /// As [`CudaEngine::all_reduce`].
    unsafe fn scatter(&mut self, work: &Work, lamport: bool) -> Result<()> {
        // LL sends twice the bytes that it carries; Lamport does not.
        let inbox = if lamport { 4 << 20 } else { 64 << 10 };
        let pushed = work.bytes > inbox;
        let (bytes, call) = (work.bytes, work.call);
        tracing::debug!(bytes, %call, pushed, lamport, "through scratch or inboxes");
        if pushed {
            // SAFETY: passed on.
            return unsafe { self.push(work, SCATTER) };
        }
        // SAFETY: passed on.
        unsafe { self.two_shot(work, SCATTER, lamport) }
    }

    /// Through scratch and, of an all-reduce, straight into outputs that are windows, in as many calls as
    /// the scratch asks for. Each begins with all teams of all ranks in step.
    ///
    /// # Safety
    ///
    /// As [`CudaEngine::all_reduce`].
    unsafe fn push(&mut self, work: &Work, shots: u8) -> Result<()> {
        let ranks = u64::from(self.world());
        let base = Specialty::reduces(&TWO_SHOT_PUSH, (work.dtype, work.op));
        let loaded = self.kernel(Specialty { shots, ..base })?;
        // Of what a team's range is of: a share, or a part.
        let shares = if shots == SCATTER | GATHER { ranks } else { 1 };
        let most = self.control.scratch_room(self.world()) * shares;
        for piece in work.pieces(most, 128 * shares) {
            let wanted = piece.bytes.div_ceil(16).div_ceil(shares);
            let teams = Grid::new(&loaded.alone(), wanted, THREADS, PUSHING);
            // SAFETY: a stretch of what the caller promised.
            unsafe { self.put_in_teams(loaded, teams.and_one(&loaded, wanted), &piece) }?;
        }
        Ok(())
    }
}
