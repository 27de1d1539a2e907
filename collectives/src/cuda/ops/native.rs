//! Runs kernels that programs bring along.

#![allow(unsafe_code)] // passes on the caller's promises about raw buffers

use symmpool_allocator::{Error, Result, Stream};

use crate::algorithm::{NativeKernel, StandardCollective};
use crate::call::{Arguments, CallDescription, OpType};
use crate::cuda::engine::CudaEngine;
use crate::cuda::kernel::launch_config::LaunchConfig;
use crate::cuda::kernel::loaded_kernel::LoadedKernel;
use crate::cuda::layout::params::{CallParams, MAX_PEER_BLOCKS, PlanWork};
use crate::{DType, ReduceOp};

/// Most worker blocks of a call whose kernel does not say how many.
const USUAL_BLOCKS: u32 = 128;

impl CudaEngine {
    /// Runs a kernel for `count` elements of each part.
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` if the source does not compile, with the compiler's messages, or lacks the kernel, and if
    /// buffers overlap; `is_unsupported` if buffers must be windows and are not, and where there is no NVRTC. Ranks
    /// with different kernels get `is_diverged` from a later call.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`CudaEngine::all_reduce`], for the elements of all parts. The kernel accesses
    /// nothing but them and what the device API gives it, and has the two parameters of docs/kernels.md.
    pub(crate) unsafe fn run_native(
        &mut self,
        native: &NativeKernel,
        arguments: &Arguments,
        stream: Stream,
    ) -> Result<()> {
        self.begin(stream)?;
        let part = match self.check_native(native, arguments) {
            Ok(part) => part,
            Err(why) => return Err(self.decline(why, stream)),
        };
        // A kernel may be right in place on all ranks and wrong in place on some, so ranks compare whether the call is in
        // place. In a broadcast only the root has an input.
        let is_in_place = part > 0
            && native.collective != StandardCollective::Broadcast
            && self.is_in_place(native.collective, arguments, part);
        let call = describe(native, arguments).in_place(is_in_place);
        if part == 0 {
            return self.handshake_only(call, stream);
        }
        let (dtype, op) = match native.collective.reduces() {
            true => (arguments.dtype, arguments.op),
            false => (DType::U8, ReduceOp::Sum),
        };
        self.note_algorithm(&native.name, None);
        let key = native.key(self.world(), dtype, op);
        let kernel = match self.generated_kernel(key, || native.generated()) {
            Ok(kernel) => kernel,
            // Errors of the compiler in a program's source are about an argument.
            Err(why) => {
                let why = if why.is_unsupported() || why.is_invalid_argument() {
                    why
                } else {
                    Error::invalid_argument(format!("on rank {}: {why}", self.rank()))
                };
                return Err(self.decline(why, stream));
            }
        };
        if !self.is_rehearsing() {
            self.kernels().share_sms_of_several();
        }
        let config = native_grid(&kernel, part.div_ceil(16), native.threads, native.blocks);
        let blocks = config.worker_blocks();
        let params = CallParams {
            description: *call.peer_blocks(blocks).words(),
            input: self.address(arguments.input),
            output: self.address(arguments.output),
            bytes: part,
            stride: part,
            root: arguments.root,
            peer_blocks: blocks,
        };
        let (grid, unused) = ((config.blocks, config.threads), PlanWork::default());
        // SAFETY: the caller promised that all parts are there until the stream has done the call, that nothing else
        // touches them, and that the kernel accesses nothing else. It has two parameters, and the driver reads no more.
        unsafe { self.launch_with_work(kernel, grid, &params, &unused, stream) }
    }

    /// Checks a call's arguments. Returns the bytes of a part.
    pub(crate) fn check_native(&self, native: &NativeKernel, arguments: &Arguments) -> Result<u64> {
        let (rank, world, name) = (self.rank(), self.world(), &native.name);
        let Arguments { input, output, count, dtype, .. } = *arguments;
        let has_root = native.collective == StandardCollective::Broadcast;
        let of = (name.as_str(), native.collective.name(), has_root);
        arguments.check_ranks(of, native.world, rank, world)?;
        if native.collective.reduces() && !dtype.is_reduced() {
            return Err(dtype.only_moved(native.collective.name(), rank));
        }
        arguments.check_windows(name, rank, [native.input_window, native.output_window])?;
        let [inputs, outputs] = native.collective.both_parts(world).map(u64::from);
        let part = (count as u64).checked_mul(dtype.size() as u64);
        let whole = part.and_then(|part| part.checked_mul(inputs.max(outputs)));
        let (Some(part), Some(whole)) = (part, whole.filter(|whole| *whole <= self.pool_stride()))
        else {
            return Err(Error::invalid_argument(format!(
                "the algorithm {name} of {count} {} on rank {rank}: no memory is that long",
                dtype.name()
            )));
        };
        if let Some(most) = native.max_bytes.filter(|most| whole > *most) {
            return Err(Error::unsupported(format!(
                "the algorithm {name} of {whole} bytes on rank {rank}: it is for {most} at most"
            )));
        }
        let (from, to) = (self.address(input), self.address(output));
        let (from_end, to_end) = (from + part * inputs, to + part * outputs);
        if part > 0 && from < to_end && to < from_end {
            let is_in_place = self.is_in_place(native.collective, arguments, part);
            if !is_in_place || !native.in_place {
                return Err(Error::invalid_argument(format!(
                    "the algorithm {name} on rank {rank}: input and output overlap{}",
                    if is_in_place { "; it is not said to be right in place" } else { "" }
                )));
            }
        }
        Ok(part)
    }

    /// Whether input and output lie as they do in place, with parts of `part` bytes.
    fn is_in_place(
        &self,
        collective: StandardCollective,
        arguments: &Arguments,
        part: u64,
    ) -> bool {
        let (from, to) = (self.address(arguments.input), self.address(arguments.output));
        let own = u64::from(self.rank()) * part;
        match collective {
            StandardCollective::AllGather => from == to + own,
            StandardCollective::ReduceScatter => from + own == to,
            _ => from == to,
        }
    }
}

/// The grid of a kernel of a program. Blocks of equal number work together, so ranks must have as many: it follows from the
/// kernel, the call and the device, and not from a rank's SM budget, which is its own affair. A kernel that does not say
/// how many blocks it has takes a quarter of the device's places at most, so that other communicators' kernels, which
/// expect it to keep to a budget, find theirs.
fn native_grid(
    kernel: &LoadedKernel,
    vectors: u64,
    threads: u32,
    wanted: Option<u32>,
) -> LaunchConfig {
    let usual = || USUAL_BLOCKS.min((kernel.resident(threads) / 4).max(2) - 1);
    let most = wanted.unwrap_or_else(usual).min(MAX_PEER_BLOCKS);
    LaunchConfig::new(&kernel.alone(), vectors, threads, most)
}

/// Describes a call, for ranks to compare.
fn describe(native: &NativeKernel, arguments: &Arguments) -> CallDescription {
    let operation = OpType::of(native.collective);
    let reached = [native.input_window, native.output_window];
    arguments.described(operation, native.collective.reduces(), reached, native.hash())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernel::loaded_kernel::SIZES;
    use crate::cuda::kernel::sm_budget::SmBudget;

    #[test]
    fn ranks_with_different_budgets_launch_as_many_blocks() {
        for (sm_count, places) in [(132, 8), (132, 2), (4, 4), (1, 1)] {
            let resident = SIZES.map(|size| (2048 / size).min(places) * sm_count);
            let whole = LoadedKernel::new(0, resident, 256, sm_count);
            for vectors in [1, 1000, 1 << 20] {
                for wanted in [None, Some(1), Some(100), Some(MAX_PEER_BLOCKS)] {
                    let expected = native_grid(&whole, vectors, 256, wanted);
                    for most_blocks in [2, 3, 44, 1000] {
                        let early = most_blocks > 100;
                        let budget = SmBudget {
                            most_blocks,
                            narrow_blocks: None,
                            early,
                            starts_early: true,
                            concurrent: !early,
                            beside_compute: early,
                        };
                        let mut limited = whole;
                        limited.budget = budget;
                        assert_eq!(native_grid(&limited, vectors, 256, wanted), expected);
                    }
                    let most = whole.resident(256);
                    assert!(expected.blocks <= most.max(2), "all run at once: {expected:?}");
                    assert!(wanted.is_some() || expected.blocks <= (most / 4).max(2));
                }
            }
        }
    }
}
