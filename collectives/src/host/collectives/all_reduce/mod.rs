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
mod paired_groups;
mod two_shot;

use symmpool_allocator::Result;
use symmpool_allocator::topology::Mesh;

pub(crate) use paired_groups::PairedGroups;

use super::pieces::{Pieces, share};
use crate::algorithm::{CallShape, StandardCollective};
use crate::call::{Call, Operation};
use crate::host::host_algorithm::{HostAlgorithm, always};
use crate::host::kernels::ReduceFn;
use crate::host::{Data, HostEngine, InPlace};
use crate::types::place::Place;
use crate::{AllReduceAlgorithm, DType, ReduceOp};

/// The algorithms.
pub(crate) static ALGORITHMS: [HostAlgorithm<Work>; 3] = [
    HostAlgorithm { code: AllReduceAlgorithm::OneShot as u8, fits: always, run: one_shot::run },
    HostAlgorithm { code: AllReduceAlgorithm::TwoShot as u8, fits: always, run: two_shot::run },
    HostAlgorithm {
        code: AllReduceAlgorithm::CubeMesh as u8,
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
    /// Reduces `count` elements of every rank's `input` into every rank's `output`. In place if
    /// both begin at one address; otherwise they must not overlap.
    ///
    /// # Errors
    ///
    /// `is_diverged`, on every rank, if ranks make different calls; `is_invalid_argument` if buffers overlap or
    /// do not fit, or `dtype` is none of [`DType::REDUCED`]; `is_unsupported` if the algorithm does not run in
    /// host memory, or not over the links there are; `is_timeout` or `is_peer_lost` if a rank does not make the
    /// call.
    ///
    /// # Safety
    ///
    /// `input` is readable and `output` writable for `count` elements of `dtype`, and nobody else accesses
    /// either, in any rank's slot if it is a window, until the call returns on every rank.
    pub unsafe fn all_reduce(
        &mut self,
        input: Place,
        output: Place,
        count: usize,
        dtype: DType,
        op: ReduceOp,
        algorithm: AllReduceAlgorithm,
    ) -> Result<()> {
        self.ready()?;
        let reduce = self.reduction("all_reduce", dtype, op)?;
        let size = count.checked_mul(dtype.size());
        let data = self.resolve((input, size), (output, size), InPlace::OutputAt(0));
        let data = self.or_decline(data)?;
        let call = Call::new(Operation::AllReduce)
            .elements(dtype, count)
            .reduce(op)
            .algorithm(algorithm as u8)
            .input(input)
            .output(output)
            .in_place(data.in_place);
        let windows = match (input, output) {
            (Place::Window(from), Place::Window(to)) => Some((from, to)),
            _ => None,
        };
        let work = Work { call, data, count, size: dtype.size(), reduce, windows };
        let shape = CallShape {
            collective: StandardCollective::AllReduce,
            bytes: work.bytes() as u64,
            dtype,
            op: Some(op),
            world: self.world(),
            input_window: input.is_window(),
            output_window: output.is_window(),
            topology: Mesh::Unknown,
        };
        let code = match algorithm {
            AllReduceAlgorithm::Auto => self.rule(work.bytes(), windows.is_some()),
            requested => requested,
        };
        let entry = self.entry(&ALGORITHMS, code as u8, &shape);
        let entry = self.or_decline(entry)?;
        if self.rehearses(StandardCollective::AllReduce, code as u8) {
            return Ok(());
        }
        if count == 0 {
            return self.handshake(&work.call);
        }
        tracing::debug!(
            bytes = work.bytes(),
            dtype = dtype.name(),
            windows = windows.is_some(),
            algorithm = code.name(),
            why = if algorithm == AllReduceAlgorithm::Auto { "rule" } else { "requested" },
            "all_reduce"
        );
        // SAFETY: the caller's promises about input and output, which `data` resolves; that windows are mapped in
        // every slot was promised to `new`.
        unsafe { (entry.run)(self, &work) }
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

/// An all-reduce whose arguments were checked and resolved.
pub(crate) struct Work {
    call: Call,
    data: Data,
    count: usize,
    /// Bytes of an element.
    size: usize,
    reduce: ReduceFn,
    /// Where input and output lie in windows, if both do.
    windows: Option<(u64, u64)>,
}

impl Work {
    fn bytes(&self) -> usize {
        self.count * self.size
    }
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
