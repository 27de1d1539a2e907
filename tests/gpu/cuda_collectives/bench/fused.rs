//! Times fused all-reduces, and all-reduces of the same bytes for comparison.

use symmpool_allocator::{Pool, Result, Stream};
use symmpool_collectives::{
    Communicator, DType, FusedAlgorithm, NormBuffers, NormOutput, NormShape, ReduceOp,
};

use super::Bench;
use crate::Options;

const TOKENS: [usize; 9] = [1, 8, 32, 64, 128, 256, 512, 1024, 2048];
const HIDDEN: [usize; 2] = [4096, 8192];
const MAX_BYTES: usize = 2048 * 8192 * 2;

impl Bench<'_> {
    /// Times all-reduces with a residual and a norm in bf16, if options name them: a line for each length of rows and
    /// number of tokens.
    pub(super) fn fused(&mut self, pool: &Pool, options: &Options) -> Result<()> {
        if !options.algorithms.iter().any(|name| name == "fused") {
            return Ok(());
        }
        let arrays = (0..5).map(|_| pool.alloc::<u8>(MAX_BYTES)).collect::<Result<Vec<_>>>()?;
        pool.commit()?;
        let at = |nth: usize| arrays[nth].address() as *mut u8;
        let comm = Communicator::with_options(pool, &options.communicator())?;
        for hidden in HIDDEN {
            for tokens in TOKENS {
                let bytes = (2 * tokens * hidden) as u64;
                // SAFETY: the blocks are this long, and nothing else uses them.
                let unfused = |stream: &Stream| unsafe {
                    let (dtype, op) = (DType::Bf16, ReduceOp::Sum);
                    comm.all_reduce_at(at(3), at(0), tokens * hidden, dtype, op, stream)
                };
                let mut found = vec![("all_reduce".to_owned(), self.time(&comm, bytes, unfused)?)];
                for (name, algorithm, output) in [
                    ("one_shot", FusedAlgorithm::OneShot, NormOutput::Norm),
                    ("two_shot", FusedAlgorithm::TwoShot, NormOutput::Norm),
                    ("auto", FusedAlgorithm::Auto, NormOutput::Norm),
                    ("fp8_token", FusedAlgorithm::Auto, NormOutput::Fp8PerToken),
                    ("fp8_group", FusedAlgorithm::Auto, NormOutput::Fp8PerGroup),
                ] {
                    let shape = NormShape {
                        tokens,
                        hidden,
                        dtype: DType::Bf16,
                        epsilon: 1e-6,
                        weight_bias: 0.0,
                        output,
                        powers_of_two: false,
                        algorithm,
                    };
                    let buffers = NormBuffers {
                        input: at(0),
                        residual: at(1),
                        weight: at(2),
                        bias: std::ptr::null(),
                        output: at(3),
                        residual_out: at(4),
                        norm_out: std::ptr::null_mut(),
                        // Behind the 8-bit floats, which take half of the output.
                        scales: at(3).wrapping_add(MAX_BYTES / 2).cast(),
                        token_stride: if output == NormOutput::Fp8PerGroup {
                            hidden / 128
                        } else {
                            1
                        },
                        group_stride: 1,
                    };
                    // SAFETY: the blocks are this long, and nothing else uses them.
                    let call = |stream: &Stream| unsafe {
                        comm.all_reduce_norm_at(&shape, &buffers, stream)
                    };
                    found.push((name.to_owned(), self.time(&comm, bytes, call)?));
                }
                if pool.rank() == 0 {
                    print!("fused bf16 hidden {hidden} tokens {tokens:>5}:");
                    for (name, time) in found {
                        match time {
                            Some((us, calls)) => print!(" {name} {us:.2} ({calls})"),
                            None => print!(" {name} -"),
                        }
                    }
                    println!();
                }
            }
        }
        Ok(())
    }
}
