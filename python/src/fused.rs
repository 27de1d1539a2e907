//! Fused all-reduces of the package `symmpool.fused`, which has checked its tensors and passes their addresses.

#![allow(unsafe_code)] // passes on addresses that tensors gave

use pyo3::prelude::*;
use symmpool_collectives::{DType, FusedAlgorithm, NormBuffers, NormOutput, NormShape};

use crate::communicator::Communicator;
use crate::reading::Refusal;

/// The buffers of a call, which are only handed on to it.
struct Buffers(NormBuffers);

// SAFETY: the addresses are only handed on to a call, whose contract says who may touch what they point to; no thread is
// part of it.
unsafe impl Send for Buffers {}

/// Makes the call of `symmpool.fused.all_reduce_rms_norm` on the current stream. `addresses` are those of input, residual,
/// weight, bias, output, residual output, norm output and scales, 0 where there is none; `sizes` are the numbers of tokens and
/// of elements of a row, and the strides of scales from token to token and from group to group. The caller has checked that
/// tensors of the communicator's device are there, of these sizes, and keeps them alive.
#[pyfunction]
#[pyo3(name = "_all_reduce_norm")]
pub(crate) fn all_reduce_norm(
    py: Python<'_>,
    communicator: &Bound<'_, Communicator>,
    addresses: [usize; 8],
    sizes: [usize; 4],
    dtype: &str,
    numbers: (f32, f32),
    how: (&str, bool, &str),
) -> PyResult<()> {
    let calls = communicator.get().calls();
    let stream = calls.stream(py, None)?;
    let ((epsilon, weight_bias), (output, powers_of_two, algorithm)) = (numbers, how);
    let [tokens, hidden, token_stride, group_stride] = sizes;
    let found = named(dtype, output, algorithm).ok_or_else(|| {
        Refusal::Invalid(format!(
            "all_reduce_rms_norm of {dtype} to {output} by {algorithm}: it takes float32, float16 and bfloat16, and is done \
             by auto, one_shot or two_shot"
        ))
    });
    let (dtype, output, algorithm) = calls.or_decline(py, stream, found)?;
    let shape =
        NormShape { tokens, hidden, dtype, epsilon, weight_bias, output, powers_of_two, algorithm };
    let [input, residual, weight, bias, out, residual_out, norm_out, scales] = addresses;
    let buffers = Buffers(NormBuffers {
        input: input as *const u8,
        residual: residual as *const u8,
        weight: weight as *const u8,
        bias: bias as *const u8,
        output: out as *mut u8,
        residual_out: residual_out as *mut u8,
        norm_out: norm_out as *mut u8,
        scales: scales as *mut f32,
        token_stride,
        group_stride,
    });
    calls.run(py, move || {
        let buffers = buffers;
        // SAFETY: the package passes tensors of these sizes on the communicator's device, which its frame keeps alive; how
        // long work on a stream needs them is the documented contract of the call.
        unsafe { calls.comm.all_reduce_norm_at(&shape, &buffers.0, &stream) }
    })
}

fn named(
    dtype: &str,
    output: &str,
    algorithm: &str,
) -> Option<(DType, NormOutput, FusedAlgorithm)> {
    let dtype = match dtype {
        "float32" => DType::F32,
        "float16" => DType::F16,
        "bfloat16" => DType::Bf16,
        _ => return None,
    };
    let output = match output {
        "sum" => NormOutput::Sum,
        "norm" => NormOutput::Norm,
        "fp8_static" => NormOutput::Fp8Static,
        "fp8_token" => NormOutput::Fp8PerToken,
        "fp8_group" => NormOutput::Fp8PerGroup,
        _ => return None,
    };
    Some((dtype, output, FusedAlgorithm::named(algorithm)?))
}
