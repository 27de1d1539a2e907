//! All-reduce in host memory: every rank ends with the reduction of all ranks' inputs.
//!
//! - `one_shot`: every rank copies its input to scratch, and every rank reduces all of it. There is one phase,
//!   which is best while the data is small.
//! - `two_shot`: every rank reduces one share and gives the result to the others, directly between windows or
//!   through scratch for ordinary memory.
//! - `cube_mesh`: for ranks that are not all linked; every rank accesses data only of the ranks that it has a
//!   link to. `paired_groups` finds how such links group the ranks.

#![allow(unsafe_code)] // hands raw buffers to the kernels

mod cube_mesh;
mod one_shot;
mod two_shot;

use symmpool_allocator::Result;

use super::pieces::{Pieces, share};
use crate::AllReduceAlgorithm;
use crate::algorithm::AlgorithmId;
use crate::call::{Arguments, StandardCall};
use crate::host::HostEngine;
use crate::host::engine::host_algorithm::{HostAlgorithm, ResolvedCall, always};
use crate::host::layout::place::InPlace;

/// The algorithms.
pub(crate) static ALGORITHMS: [HostAlgorithm; 3] = [
    HostAlgorithm {
        id: AlgorithmId::of_all_reduce(AllReduceAlgorithm::OneShot),
        fits: always,
        run: one_shot::run,
    },
    HostAlgorithm {
        id: AlgorithmId::of_all_reduce(AllReduceAlgorithm::TwoShot),
        fits: always,
        run: two_shot::run,
    },
    HostAlgorithm {
        id: AlgorithmId::of_all_reduce(AllReduceAlgorithm::CubeMesh),
        fits: |engine, _| engine.paired_groups.clone().map(drop),
        run: cube_mesh::run,
    },
];

/// Windows of up to this many bytes, times the square of the number of ranks, take one phase through scratch
/// instead of two phases without scratch. With more ranks a phase costs more, above all where ranks share cores,
/// and each rank reduces a smaller share. This holds only as far as scratch holds the data in one piece, as every
/// further piece would cost another phase.
const ONE_SHOT_WINDOW_BYTES: usize = 512;
/// Ordinary memory takes one phase instead of two while its bytes times the number of ranks are at most this.
const ONE_SHOT_PLAIN_BYTES: usize = 128 << 10;

impl HostEngine {
    /// Reduces every rank's input into every rank's output. In place if both begin at one address.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::all_reduce`].
    pub(crate) unsafe fn run_all_reduce(&mut self, standard: &StandardCall) -> Result<()> {
        self.ready()?;
        let Arguments { input, output, count, dtype, op, .. } = standard.arguments;
        let reduce = self.reduction("all_reduce", dtype, op)?;
        let size = count.checked_mul(dtype.size());
        let data = self.resolve((input, size), (output, size), InPlace::OutputAt(0));
        let data = self.or_decline(data)?;
        let call = standard.describe().algorithm(standard.algorithm);
        let call = call.input(input).output(output).in_place(data.in_place);
        let work = ResolvedCall { call, data, count, size: dtype.size(), root: 0, reduce };
        let rule = self.rule(work.bytes(), work.windows().is_some());
        // SAFETY: the caller promised that input and output are there for these lengths on every rank, and `data` has
        // their resolved places; `new` was promised that windows are mapped in every slot.
        unsafe { self.run_by(&ALGORITHMS, standard, AlgorithmId::of_all_reduce(rule), &work) }
    }

    /// The best algorithm. It is chosen from what is the same on every rank, so all ranks choose the same.
    fn rule(&self, bytes: usize, windows: bool) -> AllReduceAlgorithm {
        if self.cube_mesh {
            return AllReduceAlgorithm::CubeMesh;
        }
        let one_shot = if windows {
            one_shot_of_windows(bytes, self.world(), self.scratch_bytes())
        } else {
            // With two ranks both algorithms move the same bytes, and one shot waits less.
            self.world() <= 2 || bytes.saturating_mul(self.world() as usize) <= ONE_SHOT_PLAIN_BYTES
        };
        if one_shot { AllReduceAlgorithm::OneShot } else { AllReduceAlgorithm::TwoShot }
    }
}

/// Whether windows of `bytes` bytes go through scratch.
fn one_shot_of_windows(bytes: usize, world: u32, scratch: usize) -> bool {
    bytes <= (ONE_SHOT_WINDOW_BYTES * (world as usize).pow(2)).min(scratch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_go_through_scratch_in_one_piece_or_not_at_all() {
        // The smallest scratch that is possible, that of the tests, and the default.
        for scratch in [256, 4096, 2 << 20] {
            for world in [1, 2, 8, 63, 64, 65, 1024] {
                let square = ONE_SHOT_WINDOW_BYTES * (world as usize).pow(2);
                for bytes in [0, 1, scratch - 1, scratch, scratch + 1, square, square + 1] {
                    let one_shot = one_shot_of_windows(bytes, world, scratch);
                    let pieces = Pieces::new(bytes, 1, scratch).len();
                    assert!(!one_shot || pieces <= 1, "{bytes} bytes of {world} ranks");
                    assert_eq!(one_shot, bytes <= scratch && bytes <= square);
                }
            }
        }
    }
}
