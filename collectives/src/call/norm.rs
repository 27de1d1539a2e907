//! All-reduces of rows with what layers do next to them: a residual is added, rows are normed, and the result is
//! quantised. This file has what both engines share: the arguments, their checks, and how threads divide a row.
//!
//! `cuda/ops/norm.rs` runs one kernel (`collectives/kernels/fused/`); `host/ops/norm.rs` is the same on the CPU, with equal
//! bits.

use symmpool_allocator::{Error, Result};

use super::{CallDescription, NormFields};
use crate::DType;
use crate::NormOutput;

/// Elements that a thread handles together.
pub(crate) const LANES: usize = 8;
/// Elements that share a scale in [`NormOutput::Fp8PerGroup`].
pub(crate) const GROUP: usize = 128;
/// The most threads of a row, and the fewest.
const THREADS: (usize, usize) = (32, 512);
/// The longest row.
const MAX_HIDDEN: usize = 1 << 16;
/// The most rows of a call.
const MAX_TOKENS: usize = i32::MAX as usize;

/// How the rows of a fused all-reduce travel on devices. Bits are equal with each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum FusedAlgorithm {
    /// The faster of both for the size.
    #[default]
    Auto = 0,
    /// Every rank sends all rows to all peers.
    OneShot = 1,
    /// Every rank adds up a share of the rows, and sends the sums to all peers.
    TwoShot = 2,
}

impl FusedAlgorithm {
    /// Its name in programs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::OneShot => "one_shot",
            Self::TwoShot => "two_shot",
        }
    }

    /// The algorithm of a name.
    pub fn named(name: &str) -> Option<Self> {
        [Self::Auto, Self::OneShot, Self::TwoShot].into_iter().find(|each| each.name() == name)
    }
}

/// The shape of a fused all-reduce, which is the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormShape {
    /// Rows.
    pub tokens: usize,
    /// Elements of a row: a multiple of 8 up to 65,536; of 128 for [`NormOutput::Fp8PerGroup`].
    pub hidden: usize,
    /// The type of input, residual, weight, bias and sum: `F32`, `F16` or `Bf16`.
    pub dtype: DType,
    /// Added to the mean of the squares.
    pub epsilon: f32,
    /// Added to each weight: 1 for layers whose weights are kept as differences from 1, else 0.
    pub weight_bias: f32,
    /// Outputs that are made of the sum.
    pub output: NormOutput,
    /// Whether scales that the call makes are rounded up to powers of two.
    pub powers_of_two: bool,
    /// How rows travel.
    pub algorithm: FusedAlgorithm,
}

/// Where the data of a fused all-reduce lies on this rank. All arrays of rows are contiguous and begin at multiples of
/// 16 bytes; 8-bit outputs at multiples of 8, scales of 4. Null stands for what there is not.
///
/// The output and `residual_out` may be the input or the residual, exactly; otherwise nothing that is written overlaps
/// anything else.
#[derive(Clone, Copy, Debug)]
pub struct NormBuffers {
    /// The rows that are added up.
    pub input: *const u8,
    /// Added to the sum, after the bias.
    pub residual: *const u8,
    /// A row: the factors of the norm. Not needed for [`NormOutput::Sum`].
    pub weight: *const u8,
    /// A row that is added to the sum first.
    pub bias: *const u8,
    /// The norm, or 8-bit floats. Not needed for [`NormOutput::Sum`].
    pub output: *mut u8,
    /// The sum with bias and residual, which is always written.
    pub residual_out: *mut u8,
    /// Norm besides its quantised output; null if it is not wanted.
    pub norm_out: *mut u8,
    /// `f32` scales: one, which is read, for [`NormOutput::Fp8Static`]; else those that the call writes, that of a token and
    /// group at `token * token_stride + group * group_stride`.
    pub scales: *mut f32,
    /// Elements from a token's scales to the next one's.
    pub token_stride: usize,
    /// Elements from a group's scale to the next one's.
    pub group_stride: usize,
}

/// An array of a call, for the check that none overlaps another.
struct Array {
    name: &'static str,
    at: usize,
    bytes: usize,
    align: usize,
}

impl NormShape {
    /// Bytes of the input.
    pub(crate) fn bytes(&self) -> usize {
        self.tokens * self.row_bytes()
    }

    pub(crate) fn row_bytes(&self) -> usize {
        self.hidden * self.dtype.size()
    }

    /// Bytes of a row of the output.
    pub(crate) fn output_row_bytes(&self) -> usize {
        match self.output {
            NormOutput::Sum => 0,
            NormOutput::Norm => self.row_bytes(),
            _ => self.hidden,
        }
    }

    /// Threads that a row is divided among, which says in which tree its squares are added up.
    pub(crate) fn threads(&self) -> usize {
        (self.hidden / LANES).next_power_of_two().clamp(THREADS.0, THREADS.1)
    }

    /// Units that a thread has at once, and whether these are all that it has of a row and stay in registers, of which
    /// more ranks need more.
    pub(crate) fn units(&self, world: u32) -> (usize, bool) {
        let wide = self.dtype == DType::F32;
        match (self.hidden / LANES).div_ceil(self.threads()) {
            0 | 1 => (1, !wide || world <= 2),
            2 if !wide && world <= 4 => (2, true),
            _ => (1, false),
        }
    }

    /// Scales of a token.
    fn groups(&self) -> usize {
        if self.output == NormOutput::Fp8PerGroup { self.hidden / GROUP } else { 1 }
    }

    /// Description of the call that ranks compare.
    pub(crate) fn describe(
        &self,
        buffers: &NormBuffers,
        algorithm: FusedAlgorithm,
    ) -> CallDescription {
        CallDescription::norm(
            (self.dtype, self.tokens.saturating_mul(self.hidden)),
            NormFields {
                hidden: self.hidden as u32,
                epsilon: self.epsilon,
                weight_bias: self.weight_bias,
                output: self.output as u8,
                residual: !buffers.residual.is_null(),
                bias: !buffers.bias.is_null(),
                powers_of_two: self.powers_of_two,
                algorithm: algorithm as u8,
            },
        )
    }

    /// Refuses what no engine can run.
    pub(crate) fn check(&self, buffers: &NormBuffers, rank: u32) -> Result<()> {
        self.problem(buffers).map_or(Ok(()), |why| {
            Err(Error::invalid_argument(format!(
                "all_reduce_norm of {} rows of {} {} on rank {rank}: {why}",
                self.tokens,
                self.hidden,
                self.dtype.name()
            )))
        })
    }

    fn problem(&self, buffers: &NormBuffers) -> Option<String> {
        let Self { tokens, hidden, dtype, .. } = *self;
        if !matches!(dtype, DType::F32 | DType::F16 | DType::Bf16) {
            return Some("it takes f32, f16 and bf16".to_owned());
        }
        if hidden == 0 || !hidden.is_multiple_of(LANES) || hidden > MAX_HIDDEN {
            return Some(format!("rows have a multiple of {LANES} elements, up to {MAX_HIDDEN}"));
        }
        if self.output == NormOutput::Fp8PerGroup && !hidden.is_multiple_of(GROUP) {
            return Some(format!(
                "groups of {GROUP} elements need rows of a multiple of {GROUP} elements"
            ));
        }
        if tokens > MAX_TOKENS {
            return Some(format!("there are at most {MAX_TOKENS} rows"));
        }
        for (name, value) in [("epsilon", self.epsilon), ("weight_bias", self.weight_bias)] {
            if !value.is_finite() {
                return Some(format!("{name} is {value}; it must be a finite number"));
            }
        }
        if self.epsilon < 0.0 {
            return Some(format!("epsilon is {}; it must not be negative", self.epsilon));
        }
        if tokens == 0 {
            return None;
        }
        let norms = self.output != NormOutput::Sum;
        let needed = [
            ("input", buffers.input.is_null()),
            ("weight", norms && buffers.weight.is_null()),
            ("output", norms && buffers.output.is_null()),
            ("scales", self.output.quantizes() && buffers.scales.is_null()),
            ("residual_out", buffers.residual_out.is_null()),
        ];
        if let Some((name, _)) = needed.into_iter().find(|(_, missing)| *missing) {
            return Some(format!("{name} is null, and {} needs it", self.output.name()));
        }
        let (read, written) = self.arrays(buffers);
        let off = read.iter().chain(&written).find(|array| !array.at.is_multiple_of(array.align));
        if let Some(Array { name, at, align, .. }) = off {
            return Some(format!(
                "{name} at {at:#x} does not begin at a multiple of {align} bytes"
            ));
        }
        self.overlap(&read, &written)
    }

    /// The arrays that a call reads, and those that it writes.
    fn arrays(&self, buffers: &NormBuffers) -> (Vec<Array>, Vec<Array>) {
        let (rows, row) = (self.bytes(), self.row_bytes());
        let array = |name, at: usize, bytes, align| Array { name, at, bytes, align };
        let scales = buffers.scales as usize;
        let last = (self.tokens - 1)
            .saturating_mul(buffers.token_stride)
            .saturating_add((self.groups() - 1).saturating_mul(buffers.group_stride));
        let mut read = vec![
            array("input", buffers.input as usize, rows, 16),
            array("residual", buffers.residual as usize, rows, 16),
            array("bias", buffers.bias as usize, row, 16),
        ];
        let mut written = vec![array("residual_out", buffers.residual_out as usize, rows, 16)];
        if self.output != NormOutput::Sum {
            read.push(array("weight", buffers.weight as usize, row, 16));
            let (bytes, align) = (self.tokens * self.output_row_bytes(), self.output_align());
            written.push(array("output", buffers.output as usize, bytes, align));
        }
        if self.output.quantizes() {
            written.push(array("norm_out", buffers.norm_out as usize, rows, 16));
            if self.output == NormOutput::Fp8Static {
                read.push(array("scales", scales, 4, 4));
            } else {
                written.push(array("scales", scales, last.saturating_add(1).saturating_mul(4), 4));
            }
        }
        read.retain(|array| array.at != 0);
        written.retain(|array| array.at != 0);
        (read, written)
    }

    fn output_align(&self) -> usize {
        if self.output.quantizes() { LANES } else { 16 }
    }

    /// Which array that is written overlaps another one, if one does.
    fn overlap(&self, read: &[Array], written: &[Array]) -> Option<String> {
        let overlaps = |a: &Array, b: &Array| {
            a.at < b.at.saturating_add(b.bytes) && b.at < a.at.saturating_add(a.bytes)
        };
        for (nth, to) in written.iter().enumerate() {
            for from in read {
                // A thread reads an element of these before it writes one at the same place.
                let in_place = matches!(from.name, "input" | "residual")
                    && from.at == to.at
                    && (to.name == "residual_out"
                        || (to.name == "output" && self.output == NormOutput::Norm));
                if overlaps(from, to) && !in_place {
                    return Some(format!(
                        "{} at {:#x} overlaps {} at {:#x}",
                        to.name, to.at, from.name, from.at
                    ));
                }
            }
            if let Some(other) = written[nth + 1..].iter().find(|other| overlaps(to, other)) {
                return Some(format!(
                    "{} at {:#x} overlaps {} at {:#x}",
                    to.name, to.at, other.name, other.at
                ));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(tokens: usize, hidden: usize, output: NormOutput) -> NormShape {
        NormShape {
            tokens,
            hidden,
            dtype: DType::Bf16,
            epsilon: 1e-6,
            weight_bias: 0.0,
            output,
            powers_of_two: false,
            algorithm: FusedAlgorithm::Auto,
        }
    }

    /// Arrays of 64 KiB each, one behind the other.
    fn buffers() -> NormBuffers {
        let at = |nth: usize| (nth << 16) as *mut u8;
        NormBuffers {
            input: at(1),
            residual: at(2),
            weight: at(3),
            bias: std::ptr::null(),
            output: at(4),
            residual_out: at(5),
            norm_out: std::ptr::null_mut(),
            scales: at(6).cast(),
            token_stride: 1,
            group_stride: 0,
        }
    }

    fn problem(shape: NormShape, buffers: NormBuffers) -> String {
        let error = shape.check(&buffers, 3).expect_err("a problem");
        assert!(error.is_invalid_argument());
        let text = error.to_string();
        assert!(text.contains("on rank 3"), "{text}");
        text
    }

    #[test]
    fn a_row_has_the_same_threads_whatever_is_made_of_it() {
        for (hidden, threads, units) in [
            (8, 32, (1, true)),
            (264, 64, (1, true)),
            (4096, 512, (1, true)),
            (8192, 512, (2, true)),
            (16_384, 512, (1, false)),
            (16_392, 512, (1, false)),
            (65_536, 512, (1, false)),
        ] {
            let shape = shape(1, hidden, NormOutput::Norm);
            assert_eq!((shape.threads(), shape.units(2)), (threads, units), "{hidden}");
            // There are threads for all units.
            assert!(!units.1 || threads * units.0 * LANES >= hidden, "{hidden}");
        }
    }

    #[test]
    fn arguments_that_cannot_be_right_are_refused_by_name() {
        let usual = shape(4, 128, NormOutput::Norm);
        usual.check(&buffers(), 0).expect("right");
        let bad = [
            (NormShape { dtype: DType::I32, ..usual }, "f32, f16 and bf16"),
            (NormShape { hidden: 132, ..usual }, "multiple of 8"),
            (NormShape { hidden: 0, ..usual }, "multiple of 8"),
            (NormShape { hidden: 1 << 17, ..usual }, "up to 65536"),
            (NormShape { epsilon: f32::NAN, ..usual }, "epsilon is NaN"),
            (NormShape { epsilon: -1.0, ..usual }, "negative"),
            (NormShape { weight_bias: f32::INFINITY, ..usual }, "weight_bias is inf"),
            (shape(4, 136, NormOutput::Fp8PerGroup), "groups of 128"),
        ];
        for (shape, words) in bad {
            let text = problem(shape, buffers());
            assert!(text.contains(words), "{text}");
        }
        let quantized = shape(4, 128, NormOutput::Fp8PerToken);
        let null = std::ptr::null_mut();
        for (shape, buffers, words) in [
            (usual, NormBuffers { weight: null, ..buffers() }, "weight is null"),
            (usual, NormBuffers { output: null, ..buffers() }, "output is null"),
            (quantized, NormBuffers { scales: null.cast(), ..buffers() }, "scales is null"),
            (usual, NormBuffers { residual_out: null, ..buffers() }, "residual_out is null"),
            (
                shape(4, 128, NormOutput::Sum),
                NormBuffers { residual_out: null, ..buffers() },
                "residual_out is null",
            ),
            (
                usual,
                NormBuffers { residual: buffers().residual.wrapping_add(8), ..buffers() },
                "residual at 0x20008 does not begin at a multiple of 16",
            ),
        ] {
            let text = problem(shape, buffers);
            assert!(text.contains(words), "{text}");
        }
    }

    #[test]
    fn only_what_is_exactly_in_place_may_overlap() {
        let (usual, all) = (shape(4, 128, NormOutput::Norm), buffers());
        let quantized = shape(4, 128, NormOutput::Fp8PerToken);
        let (x, residual) = (all.input.cast_mut(), all.residual.cast_mut());
        for (output, residual_out) in [(x, residual), (residual, x), (x, all.residual_out)] {
            usual.check(&NormBuffers { output, residual_out, ..all }, 0).expect("in place");
        }
        for (shape, buffers) in [
            (usual, NormBuffers { output: x.wrapping_add(16), ..all }),
            (usual, NormBuffers { residual_out: residual.wrapping_add(256), ..all }),
            (usual, NormBuffers { residual_out: all.output, ..all }),
            (usual, NormBuffers { output: all.weight.cast_mut(), ..all }),
            (quantized, NormBuffers { output: x, ..all }),
            (quantized, NormBuffers { scales: x.cast(), ..all }),
            (quantized, NormBuffers { norm_out: residual, ..all }),
        ] {
            let text = problem(shape, buffers);
            assert!(text.contains("overlaps"), "{text}");
        }
        // No element is accessed, so it does not matter where arrays lie.
        shape(0, 128, NormOutput::Norm)
            .check(&NormBuffers { output: x.wrapping_add(1), ..all }, 0)
            .expect("empty");
    }
}
