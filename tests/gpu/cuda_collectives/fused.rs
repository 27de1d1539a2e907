//! Checks of fused all-reduces: every bit of every output is compared with what the CPU computes step by step.

use half::{bf16, f16};
use symmpool_allocator::{Block, Pool, Result, Stream};
use symmpool_collectives::{
    Communicator, CommunicatorOptions, DType, F8E4m3, FusedAlgorithm, NormBuffers, NormOutput,
    NormShape, ReduceOp,
};

use crate::cuda::{CallGraph, download, stream, upload};
use crate::oracle::{differs, finite, random, reduce};
use crate::{ORDINARY, Options, expect_error};

/// Bytes of each array.
const ROOM: usize = 4 << 20;
/// The bytes before the call in all that it writes.
const POISON: u8 = 0xa5;

/// The arrays of a call, in the order of `Arrays`.
struct Memory {
    name: &'static str,
    blocks: Vec<Block<u8>>,
}

#[derive(Clone, Copy)]
enum Arrays {
    Input,
    Residual,
    Weight,
    Bias,
    Output,
    ResidualOut,
    NormOut,
    Scales,
}

impl Memory {
    fn at(&self, array: Arrays) -> u64 {
        self.blocks[array as usize].address()
    }
}

/// A call, and which of the arrays that it may have it has.
#[derive(Clone, Copy, Debug)]
struct Case {
    shape: NormShape,
    residual: bool,
    bias: bool,
    in_place: bool,
    norm_out: bool,
}

/// Expected outputs of a call.
#[derive(Default)]
struct Wanted {
    sums: Vec<u8>,
    norms: Vec<u8>,
    quantized: Vec<u8>,
    scales: Vec<u8>,
}

struct Fused<'a> {
    pool: &'a Pool,
    comm: Communicator,
    stream: Stream,
    cases: u64,
    wrong: u64,
}

pub(crate) fn run(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let ordinary = pool.lane(ORDINARY)?;
    let memories = [
        Memory {
            name: "windows",
            blocks: (0..8).map(|_| pool.alloc(ROOM)).collect::<Result<_>>()?,
        },
        Memory {
            name: "ordinary",
            blocks: (0..8).map(|_| ordinary.alloc(ROOM)).collect::<Result<_>>()?,
        },
    ];
    pool.commit()?;
    // Little room, so that long calls take several launches.
    let communicator =
        CommunicatorOptions { device_inbox_bytes: Some(1 << 20), ..options.communicator() };
    let comm = Communicator::with_options(pool, &communicator)?;
    let mut fused = Fused { pool, comm, stream: stream(pool)?, cases: 0, wrong: 0 };
    fused.captured_first(&memories[0], options)?;
    for memory in &memories {
        fused.shapes(memory, options)?;
    }
    fused.refusals(&memories[0])?;
    if pool.rank() == 0 {
        println!("fused: {} cases, {} wrong", fused.cases, fused.wrong);
    }
    Ok((fused.cases, fused.wrong))
}

const OUTPUTS: [NormOutput; 5] = [
    NormOutput::Sum,
    NormOutput::Norm,
    NormOutput::Fp8Static,
    NormOutput::Fp8PerToken,
    NormOutput::Fp8PerGroup,
];
const TYPES: [DType; 3] = [DType::Bf16, DType::F16, DType::F32];
/// Rows of one warp, of one unit a thread, of several, and of more than registers hold.
const HIDDEN: [usize; 8] = [64, 128, 1000, 4096, 7168, 8192, 16_384, 24_576];
const TOKENS: [usize; 5] = [0, 1, 7, 128, 300];

fn shape(tokens: usize, hidden: usize, dtype: DType, output: NormOutput) -> NormShape {
    NormShape {
        tokens,
        hidden,
        dtype,
        epsilon: 1e-6,
        weight_bias: 0.0,
        output,
        powers_of_two: false,
        algorithm: FusedAlgorithm::Auto,
    }
}

impl Fused<'_> {
    fn shapes(&mut self, memory: &Memory, options: &Options) -> Result<()> {
        let mut nth = 0;
        for hidden in HIDDEN {
            for tokens in TOKENS {
                for dtype in TYPES {
                    for output in OUTPUTS {
                        nth += 1;
                        let number = random(options.seed, nth);
                        let bytes = tokens * hidden * dtype.size();
                        let grouped = output == NormOutput::Fp8PerGroup;
                        // With --quick a few of each type and output, and rows of each length.
                        let some = !options.quick || number.is_multiple_of(9) && bytes <= 1 << 19;
                        if !some || bytes > ROOM || grouped && !hidden.is_multiple_of(128) {
                            continue;
                        }
                        for algorithm in [FusedAlgorithm::OneShot, FusedAlgorithm::TwoShot] {
                            let shape = NormShape {
                                algorithm,
                                powers_of_two: number & 1 << 20 != 0,
                                weight_bias: if number & 1 << 21 != 0 { 1.0 } else { 0.0 },
                                ..shape(tokens, hidden, dtype, output)
                            };
                            let case = Case {
                                shape,
                                residual: number & 3 << 22 != 0,
                                bias: number & 3 << 24 == 0,
                                in_place: number & 1 << 26 != 0,
                                norm_out: number & 1 << 27 != 0,
                            };
                            self.case(memory, case, number)?;
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// S8: the first call of a communicator is captured. The graph is replayed.
    fn captured_first(&mut self, memory: &Memory, options: &Options) -> Result<()> {
        let usual = shape(7, 1000, DType::Bf16, NormOutput::Norm);
        let case =
            Case { shape: usual, residual: true, bias: false, in_place: false, norm_out: false };
        let wanted = self.prepare(memory, case, options.seed)?;
        let graph = CallGraph::capture(self.pool, self.stream, || {
            self.call(memory, case)?;
            self.call(memory, case)
        })?;
        for _ in 0..3 {
            graph.launch(self.pool, self.stream)?;
            self.comm.synchronize(&self.stream)?;
            self.judge(memory, case, &wanted, "captured")?;
        }
        graph.destroy(self.pool)
    }

    fn case(&mut self, memory: &Memory, case: Case, number: u64) -> Result<()> {
        let wanted = self.prepare(memory, case, number)?;
        self.call(memory, case)?;
        self.comm.synchronize(&self.stream)?;
        self.judge(memory, case, &wanted, memory.name)
    }

    /// Writes a call's data, and computes what it must write.
    fn prepare(&self, memory: &Memory, case: Case, number: u64) -> Result<Wanted> {
        let NormShape { tokens, hidden, dtype, .. } = case.shape;
        let count = tokens * hidden;
        let inputs: Vec<Vec<u8>> =
            (0..self.pool.world()).map(|rank| finite(number, rank, dtype, count)).collect();
        let own = &inputs[self.pool.rank() as usize];
        let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
        // Numbers of ranks that do not exist give other data.
        let [residual, weight, bias] = [(100, count), (101, hidden), (102, hidden)]
            .map(|(rank, count)| finite(number, rank, dtype, count));
        for array in [Arrays::Output, Arrays::ResidualOut, Arrays::NormOut, Arrays::Scales] {
            let bytes = (count * dtype.size() + 16).min(ROOM);
            upload(self.pool, memory.at(array), &vec![POISON; bytes])?;
        }
        for (array, data) in [
            (Arrays::Input, own),
            (Arrays::Residual, &residual),
            (Arrays::Weight, &weight),
            (Arrays::Bias, &bias),
        ] {
            upload(self.pool, memory.at(array), data)?;
        }
        if case.shape.output == NormOutput::Fp8Static {
            upload(self.pool, memory.at(Arrays::Scales), &0.03_f32.to_le_bytes())?;
        }
        let add = |a: Vec<u8>, b: &[u8]| reduce(&[&a, b], dtype, ReduceOp::Sum);
        let mut sums = reduce(&inputs, dtype, ReduceOp::Sum);
        if case.bias {
            sums = add(sums, &bias.repeat(tokens));
        }
        if case.residual {
            sums = add(sums, &residual);
        }
        Ok(norms(&case.shape, sums, &weight))
    }

    fn buffers(memory: &Memory, case: Case) -> NormBuffers {
        let NormShape { hidden, output, .. } = case.shape;
        let at = |array, there: bool| {
            if there { memory.at(array) as *mut u8 } else { std::ptr::null_mut() }
        };
        let in_place = case.in_place && output == NormOutput::Norm;
        NormBuffers {
            input: at(Arrays::Input, true),
            residual: at(Arrays::Residual, case.residual),
            weight: at(Arrays::Weight, true),
            bias: at(Arrays::Bias, case.bias),
            output: at(if in_place { Arrays::Input } else { Arrays::Output }, true),
            residual_out: at(case.sums_at(), true),
            norm_out: at(Arrays::NormOut, case.norm_out && output.quantizes()),
            scales: at(Arrays::Scales, output.quantizes()).cast(),
            token_stride: if output == NormOutput::Fp8PerGroup { hidden / 128 + 1 } else { 1 },
            group_stride: 1,
        }
    }

    fn call(&self, memory: &Memory, case: Case) -> Result<()> {
        let buffers = Self::buffers(memory, case);
        // SAFETY: the blocks have room for the shape, and nothing else uses them.
        unsafe { self.comm.all_reduce_norm_at(&case.shape, &buffers, &self.stream) }
    }

    fn judge(&mut self, memory: &Memory, case: Case, wanted: &Wanted, how: &str) -> Result<()> {
        let NormShape { tokens, hidden, dtype, output, .. } = case.shape;
        let in_place = case.in_place && output == NormOutput::Norm;
        let to = if in_place { Arrays::Input } else { Arrays::Output };
        let mut parts = vec![("sum", case.sums_at(), &wanted.sums, dtype)];
        match output {
            NormOutput::Sum => {}
            NormOutput::Norm => parts.push(("norm", to, &wanted.norms, dtype)),
            _ => {
                parts.push(("8-bit floats", to, &wanted.quantized, DType::F8E4m3));
                if case.norm_out {
                    parts.push(("norm", Arrays::NormOut, &wanted.norms, dtype));
                }
            }
        }
        self.cases += 1;
        let mut bad = Vec::new();
        for (name, array, wanted, dtype) in parts {
            let got = download(self.pool, memory.at(array), wanted.len())?;
            bad.extend(differs(&got, wanted, dtype).map(|at| format!("{name} at {at}")));
        }
        if matches!(output, NormOutput::Fp8PerToken | NormOutput::Fp8PerGroup) {
            let groups = if output == NormOutput::Fp8PerGroup { hidden / 128 } else { 1 };
            let stride = if output == NormOutput::Fp8PerGroup { groups + 1 } else { 1 };
            let got = download(self.pool, memory.at(Arrays::Scales), 4 * tokens * stride)?;
            for token in 0..tokens {
                let row = &got[4 * token * stride..][..4 * groups];
                let wanted = &wanted.scales[4 * token * groups..][..4 * groups];
                bad.extend(
                    differs(row, wanted, DType::F32).map(|at| format!("scale {at} of row {token}")),
                );
            }
        }
        if !bad.is_empty() {
            self.wrong += 1;
            println!("rank {}: {case:?} in {how}: wrong {}", self.pool.rank(), bad.join(", "));
        }
        Ok(())
    }

    /// Checks that arguments which cannot be right, and shapes that differ, are errors on all ranks whose text says
    /// what is wrong.
    fn refusals(&mut self, memory: &Memory) -> Result<()> {
        let usual = shape(4, 128, DType::Bf16, NormOutput::Norm);
        let case =
            |shape| Case { shape, residual: true, bias: false, in_place: false, norm_out: false };
        for (shape, words) in [
            (NormShape { hidden: 100, ..usual }, "multiple of 8"),
            (NormShape { dtype: DType::I32, ..usual }, "bf16"),
            (NormShape { epsilon: f32::NAN, ..usual }, "epsilon"),
        ] {
            let error = expect_error(self.call(memory, case(shape)), words)?;
            self.cases += 1;
            if !error.is_invalid_argument() || !error.to_string().contains(words) {
                self.wrong += 1;
                println!("rank {}: {words}: {error}", self.pool.rank());
            }
        }
        self.comm.barrier(&self.stream)?;
        self.comm.synchronize(&self.stream)?;
        // The last rank passes another epsilon, which fails the communicator on all ranks.
        let is_last = self.pool.rank() + 1 == self.pool.world();
        let epsilon = if is_last { 1e-5 } else { 1e-6 };
        let call = self.call(memory, case(NormShape { epsilon, ..usual }));
        let result = call.and_then(|()| self.comm.synchronize(&self.stream));
        if self.pool.world() > 1 {
            let error = expect_error(result, "another epsilon")?;
            self.cases += 1;
            if !error.is_diverged() || !error.to_string().contains("epsilon 0.00001") {
                self.wrong += 1;
                println!("rank {}: another epsilon: {error}", self.pool.rank());
            }
        }
        Ok(())
    }
}

impl Case {
    /// Where sums go: into the residual, in place, or elsewhere.
    fn sums_at(&self) -> Arrays {
        if self.in_place && self.residual { Arrays::Residual } else { Arrays::ResidualOut }
    }
}

fn widen(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let item = |item: &[u8]| match dtype {
        DType::F16 => f16::from_le_bytes(item.try_into().expect("2")).to_f32(),
        DType::Bf16 => bf16::from_le_bytes(item.try_into().expect("2")).to_f32(),
        _ => f32::from_le_bytes(item.try_into().expect("4")),
    };
    bytes.chunks(dtype.size()).map(item).collect()
}

fn narrow(dtype: DType, value: f32) -> Vec<u8> {
    match dtype {
        DType::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
        DType::Bf16 => bf16::from_f32(value).to_le_bytes().to_vec(),
        _ => value.to_le_bytes().to_vec(),
    }
}

/// Adds up halves of halves of the threads' sums.
fn tree(sums: &[f32]) -> f32 {
    match sums {
        [one] => *one,
        _ => {
            let (low, high) = sums.split_at(sums.len() / 2);
            tree(low) + tree(high)
        }
    }
}

/// Computes the outputs of a norm from the sums.
fn norms(shape: &NormShape, sums: Vec<u8>, weight: &[u8]) -> Wanted {
    let NormShape { hidden, dtype, output, .. } = *shape;
    let mut made = Wanted::default();
    let weight = widen(dtype, weight);
    let threads = (hidden / 8).next_power_of_two().clamp(32, 512);
    for row in widen(dtype, &sums).chunks(hidden) {
        let of_thread = |thread: usize| {
            let units = (thread..hidden / 8).step_by(threads);
            units.flat_map(|unit| &row[8 * unit..8 * unit + 8]).fold(0.0, |sum, x| sum + x * x)
        };
        let squares = tree(&(0..threads).map(of_thread).collect::<Vec<f32>>());
        let factor = 1.0 / (squares / hidden as f32 + shape.epsilon).sqrt();
        let all = row.iter().zip(&weight).map(|(x, w)| (x * factor) * (w + shape.weight_bias));
        let norm: Vec<u8> = all.flat_map(|y| narrow(dtype, y)).collect();
        let wide = widen(dtype, &norm);
        made.norms.extend(norm);
        let groups = if output == NormOutput::Fp8PerGroup { hidden / 128 } else { 1 };
        for group in wide.chunks(hidden / groups) {
            let most = group.iter().fold(0.0_f32, |most, y| most.max(y.abs()));
            let scale = match output {
                NormOutput::Fp8PerToken => (most / 448.0).max(1.0 / (448.0 * 512.0)),
                _ => most.max(1e-10) / 448.0,
            };
            let scale = if shape.powers_of_two { scale.log2().ceil().exp2() } else { scale };
            made.scales.extend(scale.to_le_bytes());
            let item = |y: &f32| match output {
                NormOutput::Fp8Static => y * (1.0 / 0.03),
                _ => y / scale,
            };
            made.quantized.extend(group.iter().map(|y| F8E4m3::from_f32(item(y)).to_bits()));
        }
    }
    made.sums = sums;
    made
}
