//! Reduce-scatter on a device: which algorithm serves a call, and how those of kernels are launched.

#![allow(unsafe_code)] // passes on the caller's promises about raw buffers

use std::ops::RangeInclusive;

use symmpool_allocator::{Result, Stream};

use crate::DType;
use crate::algorithm::{AUTO, AlgorithmId, COPY, DIRECT, LAMPORT, LL, PIPELINE};
use crate::call::{Arguments, StandardCall};
use crate::cuda::all_reduce::constraints::fits_lamport;
use crate::cuda::all_reduce::reduction_call::Work;
use crate::cuda::all_reduce::row::KernelLauncher;
use crate::cuda::all_reduce::two_shot::in_inboxes;
use crate::cuda::all_reduce::two_shot_pipeline::{Results, by_pipeline};
use crate::cuda::engine::CudaEngine;
use crate::cuda::kernel::launch_config::LaunchConfig;
use crate::cuda::kernel::mode::TwoShotCollective;
use crate::cuda::kernel::spec::{KernelSpec, MANY_BYTES, THREADS};
use crate::cuda::layout::params::MAX_PEER_BLOCKS;
use crate::cuda::select::reduce_scatter::{ReduceScatter, ReduceScatterLaunch};

/// Reduce-scatters of parts of so many bytes go by loads from inputs that are windows. On two H200s 16 MiB take 59 us so and
/// 61 through inboxes, 32 MiB 109 and 121, 64 MiB 209 and by copy engines 214, and 128 MiB 409 and 392. Four H200s gain
/// nothing from either way: parts of 16 MiB take 170 and 184 us, and 167 through inboxes.
const LOADED_BYTES: RangeInclusive<u64> = 16 << 20..=96 << 20;
/// Copy engines carry parts of so many bytes, or of more than scratch has room for if that is as much. On two H200s 32 MiB
/// take 123 us so and in stages 125, 64 MiB 214 and 222, 128 MiB 392 and 441.
const MIN_COPIED_BYTES: u64 = 48 << 20;
/// Bytes of parts from which on copy engines carry them in pieces beside compute. A step of matrix products of two
/// H200s beside 32 MiB takes 0.97 of what it takes beside NCCL's, and 1.05 beside stages.
const MIN_PIECES_BYTES: u64 = 32 << 20;
/// Reduce-scatters of parts of no more bytes go through inboxes if they take few launches. On four H200s parts of 8 MiB take 84
/// us so and 92 in stages, and parts of 16 MiB 167 and 174.
const SCATTER_BYTES: u64 = 16 << 20;
const MAX_SCATTER_LAUNCHES: u64 = 4;

/// Most bytes of a part of a reduce-scatter through Lamport inboxes. More than four ranks were not measured.
fn scatter_through_inboxes(world: u32) -> u64 {
    let peers = u64::from(world) - 1;
    if world <= 4 { SCATTER_BYTES } else { MANY_BYTES.max(SCATTER_BYTES / peers) }
}

/// Facts by which the algorithm of a reduce-scatter is chosen. They are the same on every rank.
#[derive(Clone, Copy, Debug)]
struct ScatterShape {
    part: u64,
    world: u32,
    lamport: bool,
    input_window: bool,
    /// Whether all ranks' devices are linked by NVLink, or are one device.
    nvlinked: bool,
    /// Whether calls may run beside compute, and whether the large ones then go in pieces.
    beside_compute: bool,
    in_pieces: bool,
    /// Bytes of a part that one launch takes through inboxes, and that scratch has room for.
    launch: u64,
    room: u64,
}

impl ScatterShape {
    /// Through inboxes while that is faster, else through scratch by stores. Between two ranks, loads from inputs that are
    /// windows and copy engines are faster than these.
    fn choose(&self) -> AlgorithmId {
        let Self { part, world, lamport, .. } = *self;
        let (pair, alone) = (world == 2, !self.beside_compute);
        if pair && alone && self.input_window && self.nvlinked && LOADED_BYTES.contains(&part) {
            return DIRECT;
        }
        // LL sends twice the bytes that it carries; Lamport does not.
        let most = if lamport { scatter_through_inboxes(world) } else { 64 << 10 };
        if part <= most.min(MAX_SCATTER_LAUNCHES * self.launch) {
            return if lamport { LAMPORT } else { LL };
        }
        let copied = match alone {
            true => pair && part.min(self.room) >= MIN_COPIED_BYTES,
            false => self.in_pieces && part >= MIN_PIECES_BYTES,
        };
        if copied { COPY } else { PIPELINE }
    }
}

impl CudaEngine {
    fn scatter_shape(&self, part: u64, dtype: DType, input_window: bool) -> ScatterShape {
        let (world, lamport) = (self.world(), fits_lamport(dtype));
        ScatterShape {
            part,
            world,
            lamport,
            input_window,
            nvlinked: self.nvlinked,
            beside_compute: self.beside_compute,
            in_pieces: self.pieces_pay_off(),
            launch: self.scatter_launch(lamport),
            room: self.control.scratch_room(world),
        }
    }

    /// Reduces part `r` of every rank's `input` into rank `r`'s `output`; `count` elements a part.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::all_reduce`], for an input of `world` parts.
    pub(crate) unsafe fn reduce_scatter(
        &mut self,
        call: &StandardCall,
        stream: Stream,
    ) -> Result<()> {
        self.begin(stream)?;
        let StandardCall { algorithm, arguments, .. } = *call;
        let Arguments { input, output, count, dtype, op, .. } = arguments;
        self.check_reducible("reduce_scatter", dtype, stream)?;
        let part = self.byte_count("reduce_scatter", count, dtype, stream)?;
        let whole = self.bytes_of_parts("reduce_scatter", part, stream)?;
        let (from, to) = (self.address(input), self.address(output));
        let in_place = to == from + u64::from(self.rank()) * part;
        // Outputs are no part of the description, as no peer writes into them.
        let call = call.describe().algorithm(algorithm).input(input).in_place(in_place);
        if !in_place {
            self.check_disjoint("reduce_scatter", (from, whole), (to, part), stream)?;
        }
        let (bytes, stride) = (part, part);
        let work =
            Work { call, input: from, output: to, bytes, stride, dtype, op, root: 0, stream };
        if part == 0 {
            return self.handshake_only(call, stream);
        }
        if self.world() == 1 {
            // SAFETY: the caller promised that `input` is readable for all parts and `output` writable for one, until
            // the stream has done the call; a single rank has one part.
            return unsafe { self.copy_alone(call, &arguments, stream) };
        }
        let chosen = match algorithm {
            AUTO => self.scatter_shape(part, dtype, input.is_window()).choose(),
            named => named,
        };
        let entry = match ReduceScatter::named(chosen, dtype, input.is_window()) {
            Ok(entry) => entry,
            Err(error) => return Err(self.decline(error, stream)),
        };
        let max_sms = self.max_sms();
        tracing::debug!(part, %call, algorithm = entry.name(), max_sms, "reduce_scatter");
        self.note_algorithm(entry.name(), None);
        let launch: unsafe fn(&mut Self, &Work) -> Result<()> = match entry.launch {
            ReduceScatterLaunch::Lamport => Self::scatter_lamport,
            ReduceScatterLaunch::Ll => Self::scatter_ll,
            ReduceScatterLaunch::Pipeline => Self::scatter_by_pipeline,
            ReduceScatterLaunch::Copies => Self::scatter_by_copies,
            ReduceScatterLaunch::Direct => Self::scatter_directly,
        };
        // SAFETY: the caller promised that `input` is readable for all parts and `output` writable for one, until the
        // stream has done the call; `work` has their addresses and the bytes of a part.
        unsafe { launch(self, &work) }
    }

    /// Most bytes of a part that one launch of a reduce-scatter takes through inboxes, which must hold a part of each
    /// rank. Longer launches would not be faster, and need another variant of the kernel.
    pub(in crate::cuda) fn scatter_launch(&self, lamport: bool) -> u64 {
        (self.control.inbox_vectors(lamport) / u64::from(self.world()) * 16).min(MANY_BYTES)
    }

    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::reduce_scatter`], for the input and output of `work`.
    pub(in crate::cuda) unsafe fn scatter_by_pipeline(&mut self, work: &Work) -> Result<()> {
        // SAFETY: the caller promised that the input and output of `work` are there until the stream has done the call.
        unsafe { by_pipeline(self, work, TwoShotCollective::ReduceScatter, Results::Direct) }
    }

    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::reduce_scatter`], for the input and output of `work`.
    pub(in crate::cuda) unsafe fn scatter_lamport(&mut self, work: &Work) -> Result<()> {
        // SAFETY: the caller promised that the input and output of `work` are there until the stream has done the call.
        unsafe { self.one_of_two_shots(work, TwoShotCollective::ReduceScatter, true) }
    }

    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::reduce_scatter`], for the input and output of `work`.
    pub(in crate::cuda) unsafe fn scatter_ll(&mut self, work: &Work) -> Result<()> {
        // SAFETY: the caller promised that the input and output of `work` are there until the stream has done the call.
        unsafe { self.one_of_two_shots(work, TwoShotCollective::ReduceScatter, false) }
    }

    /// Runs a collective that is one of the two shots, through inboxes, which have room for a part of each rank.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::reduce_scatter`], for the input and output of `work`.
    pub(in crate::cuda) unsafe fn one_of_two_shots(
        &mut self,
        work: &Work,
        collective: TwoShotCollective,
        lamport: bool,
    ) -> Result<()> {
        let room = (1, self.scatter_launch(lamport));
        // SAFETY: the caller promised that the input and output of `work` are there until the stream has done the call.
        unsafe { in_inboxes(self, work, collective, lamport, room) }
    }

    /// Every rank reduces its part, which it loads from all ranks' inputs.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::reduce_scatter`], for the input and output of `work`.
    pub(in crate::cuda) unsafe fn scatter_directly(&mut self, work: &Work) -> Result<()> {
        let spec =
            KernelSpec::two_shot_pull((work.dtype, work.op), TwoShotCollective::ReduceScatter);
        let loaded = self.kernel(spec)?;
        let vectors = work.bytes.div_ceil(16);
        let config = LaunchConfig::new(&loaded.alone(), vectors, THREADS, MAX_PEER_BLOCKS);
        // SAFETY: the caller promised that the input and output of `work` are there until the stream has done the call.
        unsafe { self.launch_peer_blocks(loaded, config, work) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_choice_follows_length_ranks_memory_and_what_runs_beside() {
        let pair = ScatterShape {
            part: 0,
            world: 2,
            lamport: true,
            input_window: true,
            nvlinked: true,
            beside_compute: false,
            in_pieces: false,
            launch: 4 << 20,
            room: 90 << 20,
        };
        let of = |mib: u64| ScatterShape { part: mib << 20, ..pair };
        assert_eq!(
            [1, 8, 16, 96, 97, 1000].map(|mib| of(mib).choose()),
            [LAMPORT, LAMPORT, DIRECT, DIRECT, COPY, COPY]
        );
        let ordinary = |mib| ScatterShape { input_window: false, ..of(mib) };
        assert_eq!([16, 17, 48].map(|mib| ordinary(mib).choose()), [LAMPORT, PIPELINE, COPY]);
        let little = ScatterShape { room: 2 << 20, ..ordinary(500) };
        assert_eq!(little.choose(), PIPELINE);
        let over_a_bus = ScatterShape { nvlinked: false, ..of(32) };
        assert_eq!(over_a_bus.choose(), PIPELINE);
        let integers = ScatterShape { lamport: false, ..ordinary(1) };
        assert_eq!(integers.choose(), PIPELINE);
        assert_eq!(ScatterShape { part: 64 << 10, ..integers }.choose(), LL);
        let beside =
            |mib, in_pieces| ScatterShape { beside_compute: true, in_pieces, ..of(mib) }.choose();
        assert_eq!(
            [(16, true), (31, true), (32, true), (32, false)].map(|(mib, yes)| beside(mib, yes)),
            [LAMPORT, PIPELINE, COPY, PIPELINE]
        );
        for (world, most) in [(4, 16 << 20), (8, 4 << 20)] {
            let more = |part| ScatterShape { part, world, ..pair };
            assert_eq!(more(most).choose(), LAMPORT, "{world} ranks");
            assert_eq!(more(most + 16).choose(), PIPELINE, "{world} ranks");
        }
    }
}
