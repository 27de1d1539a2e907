//! Copies and reductions of this rank's own memory: parts of calls over hosts, beside those of the host's ranks.

#![allow(unsafe_code)] // launches kernels on raw addresses

use symmpool_allocator::{Error, Result, Stream};

use crate::cuda::engine::CudaEngine;
use crate::cuda::kernel::spec::{KernelSpec, THREADS};
use crate::cuda::layout::params::{CallParams, LocalReduceWork, MAX_LOCAL_INPUTS};
use crate::engine::LocalReduction;
use crate::jit::sources::REDUCE_LOCAL;
use crate::{DType, ReduceOp};

/// Most blocks of a reduction: enough for the bandwidth of memory, with SMs left for what runs beside it.
const MAX_BLOCKS: u64 = 64;

fn spec(dtype: DType, op: ReduceOp) -> KernelSpec {
    KernelSpec::reduces(&REDUCE_LOCAL, (dtype, op))
}

impl CudaEngine {
    /// Copies bytes within the memory of this rank, its pinned memory included, behind the last call.
    ///
    /// # Safety
    ///
    /// So many bytes are readable at `from` and writable at `to` on the device until the stream has done the copy; they do not
    /// overlap, and nobody else touches them in a way that collides.
    pub(crate) unsafe fn copy_local(
        &mut self,
        to: u64,
        from: u64,
        bytes: u64,
        stream: Stream,
    ) -> Result<()> {
        self.ready()?;
        self.switch_to(stream)?;
        // SAFETY: the caller promised that so many bytes are readable and writable until the stream has done the copy, and that
        // nobody else touches them in a way that collides.
        unsafe { self.copy_by_engine(to, from, bytes, stream) }
    }

    /// Compiles and loads the kernel of a reduction.
    pub(crate) fn load_local_reduction(&mut self, dtype: DType, op: ReduceOp) -> Result<()> {
        self.kernel(spec(dtype, op)).map(drop)
    }

    /// Reduces arrays of this rank's memory in their order, behind the last call.
    ///
    /// # Safety
    ///
    /// The arrays are readable and the result is writable on the device, for all elements, until the stream is past this. The
    /// result is one of the arrays or overlaps none, and nobody else touches them.
    pub(crate) unsafe fn reduce_local(
        &mut self,
        work: &LocalReduction<'_>,
        stream: Stream,
    ) -> Result<()> {
        let LocalReduction { from, to, count, dtype, op, divisor } = *work;
        if from.is_empty() || count == 0 {
            return Ok(());
        }
        if from.len() > MAX_LOCAL_INPUTS {
            return Err(Error::unsupported(format!(
                "a reduction of {} arrays on rank {}: devices reduce at most {MAX_LOCAL_INPUTS} at once",
                from.len(),
                self.rank()
            )));
        }
        self.ready()?;
        let mut inputs = [0; MAX_LOCAL_INPUTS];
        for (input, array) in inputs.iter_mut().zip(from) {
            *input = array.expose_provenance() as u64;
        }
        let divisor = u32::try_from(divisor).unwrap_or(u32::MAX);
        let work = LocalReduceWork { inputs, count: from.len() as u32, divisor };
        let bytes = (count * dtype.size()) as u64;
        let params = CallParams {
            description: [0; 4],
            input: 0,
            output: to.expose_provenance() as u64,
            bytes,
            stride: 0,
            root: 0,
            peer_blocks: 0,
        };
        let kernel = self.kernel(spec(dtype, op))?.without_waits().after_copies();
        let blocks = bytes.div_ceil(16 * u64::from(THREADS)).clamp(1, MAX_BLOCKS) as u32;
        // SAFETY: the caller promised that the arrays are readable and the result is writable until the stream is past this. The
        // work has the layout of the kernel's third parameter.
        unsafe { self.launch_rest(kernel, (blocks, THREADS), &params, &work, stream) }
    }
}
