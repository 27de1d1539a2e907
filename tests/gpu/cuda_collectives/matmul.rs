//! Checks of products of tensor cores whose parts are added up over all ranks: every bit is compared with what the CPU
//! computes, from numbers whose products and sums are exact until they are rounded.

use std::rc::Rc;
use std::time::{Duration, Instant};

use half::{bf16, f16};
use symmpool_allocator::{Block, Pool, Result, Stream};
use symmpool_collectives::{
    Communicator, CommunicatorOptions, DType, MatmulScatter, MatmulTerm, MatrixView,
};

use crate::cuda::{CallGraph, download, stream, upload};
use crate::oracle::random;
use crate::tally::Tally;
use crate::{ORDINARY, Options, expect_error};

/// Bytes of the result before a call.
pub(crate) const POISON: u8 = 0xa5;
/// How long a product waits for a rank that does not come. Emulated devices take their time.
const SHORT: Duration = Duration::from_secs(3);
/// The scales of 8-bit floats, which are exact.
pub(crate) const SCALES: [f32; 2] = [0.5, 0.25];

/// A sum of products, and the types of its matrices.
#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    batches: usize,
    /// Whether rows of the same number in all batches of a left matrix lie together in memory, and not those of a batch.
    batches_inside: bool,
    /// The inner dimensions of the products.
    inner: &'static [usize],
    columns: usize,
    dtype: DType,
    out_dtype: DType,
    right_by_rows: bool,
    mean: bool,
}

/// The memory of a case: of each product its left and its right matrix.
struct Memory {
    factors: Vec<(Block<u8>, Block<u8>)>,
    out: Block<u8>,
    scales: Block<u8>,
    parts: Block<u8>,
    control: Block<u8>,
    scratch: Block<u8>,
}

/// A call of a product: its name, what makes it, what it writes, and what must be zeros before a communicator's first call;
/// addresses with bytes.
pub(crate) type MatmulCall<'a> = (
    &'static str,
    Rc<dyn Fn(&Communicator, &Stream) -> Result<()> + 'a>,
    (u64, usize),
    (u64, usize),
);

/// Common part of the checks of products.
pub(crate) struct Matmul<'a> {
    pub(crate) pool: &'a Pool,
    pub(crate) options: &'a Options,
    pub(crate) comm: Communicator,
    pub(crate) stream: Stream,
    pub(crate) tally: Tally,
}

pub(crate) fn run(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let mut matmul = Matmul::new(pool, options)?;
    if !matmul.comm.has_tensor_kernels() {
        if pool.rank() == 0 {
            println!("matmul: the device is of another kind than the kernel is for");
        }
        return matmul.refused_elsewhere();
    }
    // Less than a tile; tiles that are cut off on both sides, with more blocks of the inner dimension than stages; and, on
    // devices, parts of several chunks. Rows of 8-bit floats begin at multiples of 16 elements.
    let mut sizes: Vec<(usize, &'static [usize], usize)> = vec![(3, &[16], 8), (130, &[208], 264)];
    if !options.quick {
        sizes.extend([(384, &[512_usize][..], 1024), (1000, &[80], 1032), (2048, &[64], 4096)]);
    }
    for (nth, (rows, inner, columns)) in sizes.into_iter().enumerate() {
        for (dtype, out_dtype, right_by_rows) in [
            (DType::Bf16, DType::Bf16, true),
            (DType::Bf16, DType::Bf16, false),
            (DType::F16, DType::F16, true),
            (DType::F8E4m3, DType::Bf16, false),
            (DType::F8E4m3, DType::F16, false),
        ] {
            // Each way to lie in memory, and one of each pair of types.
            let many = right_by_rows != (dtype == DType::F8E4m3) && out_dtype == DType::Bf16;
            if options.quick && nth == 1 && !many {
                continue;
            }
            let mean = out_dtype == DType::F16;
            let of_types = Case { dtype, out_dtype, right_by_rows, mean, ..Case::SMALL };
            matmul.case(Case { rows, inner, columns, ..of_types })?;
        }
    }
    // An inner dimension that is so long that blocks share the last tiles, which have rows.
    let shared =
        Case { rows: 130, inner: &[1544], right_by_rows: false, mean: true, ..Case::SMALL };
    matmul.case(shared)?;
    // Sums of products: of which blocks share tiles; of several batches of rows; and of as many as there may be.
    let by_rows = Case { right_by_rows: true, ..shared };
    matmul.case(Case { inner: &[72, 680, 8], ..by_rows })?;
    let batches = Case { rows: 256, batches: 2, inner: &[8, 72], ..by_rows };
    matmul.case(batches)?;
    if !options.quick {
        for columns in [8704, 20_000] {
            matmul.case(Case { rows: 8, columns, ..by_rows })?;
        }
        let four = &[264, 8, 64, 1032];
        matmul.case(Case { columns: 264, inner: &[8, 136], batches_inside: true, ..batches })?;
        matmul.case(Case { rows: 384, batches: 3, inner: four, columns: 520, ..shared })?;
        matmul.case(Case { rows: 1024, batches: 4, inner: four, columns: 4096, ..by_rows })?;
        let fp8 = Case { dtype: DType::F8E4m3, inner: &[272, 16], ..shared };
        matmul.case(Case { rows: 256, batches: 1, columns: 512, ..fp8 })?;
    }
    // With concurrent communicators, where a second launch makes a rank's own part.
    matmul.renew(&CommunicatorOptions { concurrent: Some(2), ..options.communicator() })?;
    matmul.case(Case { rows: 3, ..Case::SMALL })?;
    matmul.case(Case { rows: 300, inner: &[72, 64], columns: 520, ..Case::SMALL })?;
    matmul.case(Case { batches_inside: true, right_by_rows: false, ..batches })?;
    matmul.renew(&options.communicator())?;
    matmul.refusals()?;
    Ok(matmul.end("matmul"))
}

impl<'a> Matmul<'a> {
    pub(crate) fn new(pool: &'a Pool, options: &'a Options) -> Result<Self> {
        let comm = Communicator::with_options(pool, &options.communicator())?;
        Ok(Self { pool, options, comm, stream: stream(pool)?, tally: Tally::new(pool) })
    }

    /// Goes on with a new communicator.
    pub(crate) fn renew(&mut self, options: &CommunicatorOptions) -> Result<()> {
        self.comm = Communicator::with_options(self.pool, options)?;
        Ok(())
    }

    pub(crate) fn end(&self, name: &str) -> (u64, u64) {
        let (cases, wrong) = self.tally.counts();
        if self.pool.rank() == 0 {
            println!("{name}: {cases} cases, {wrong} wrong");
        }
        (cases, wrong)
    }

    /// Makes a call eagerly, and in a graph that is replayed, each time with other numbers.
    pub(crate) fn repeat(
        &mut self,
        salt: u64,
        call: impl Fn(&Self) -> Result<()>,
        upload: impl Fn(&Self, u64) -> Result<()>,
        compare: impl Fn(&mut Self, u64) -> Result<()>,
    ) -> Result<()> {
        let graph = CallGraph::capture(self.pool, self.stream, || call(self))?;
        for round in 0..self.options.few(4, 2) {
            let seed = random(self.options.seed, salt + self.tally.cases);
            upload(self, seed)?;
            if round % 2 == 0 {
                call(self)?;
            } else {
                graph.launch(self.pool, self.stream)?;
            }
            self.comm.synchronize(&self.stream)?;
            compare(self, seed)?;
        }
        for _ in 0..self.options.few(50, 1) {
            graph.launch(self.pool, self.stream)?;
        }
        self.comm.synchronize(&self.stream)?;
        graph.destroy(self.pool)
    }

    /// Compares elements of a result.
    pub(crate) fn compare(&mut self, what: &str, out: &Block<u8>, wanted: &[u8]) -> Result<()> {
        let found = download(self.pool, out.address(), wanted.len())?;
        let differs = found.chunks(2).zip(wanted.chunks(2)).position(|(a, b)| a != b);
        self.tally.expect(&format!("{what}, element {differs:?}"), differs.is_none());
        Ok(())
    }

    /// A call that is refused on every rank, after which the communicator goes on.
    pub(crate) fn refused(&mut self, called: Result<()>) -> Result<()> {
        let error = expect_error(called, "a product that cannot be made")?;
        self.tally.expect(&format!("{error}"), error.is_invalid_argument());
        self.comm.synchronize(&self.stream)
    }

    /// Ranks that differ in `rest`, which `call` passes; and S5, a rank that does not come: the errors of the others name it,
    /// and their streams go on.
    pub(crate) fn diverged_and_missing(
        &mut self,
        call: impl Fn(&Communicator, u64, &Stream) -> Result<()>,
    ) -> Result<()> {
        let (rank, last) = (self.pool.rank(), self.pool.world() - 1);
        let comm = Communicator::with_options(self.pool, &self.options.communicator())?;
        let called = call(&comm, rank.into(), &self.stream);
        let ended = called.and_then(|()| comm.synchronize(&self.stream));
        let error = expect_error(ended, "products that differ")?;
        self.tally.expect(&format!("{error}"), error.is_diverged());
        let options = CommunicatorOptions { timeout: SHORT, ..self.options.communicator() };
        let comm = Communicator::with_options(self.pool, &options)?;
        if rank != last {
            let began = Instant::now();
            let called = call(&comm, 0, &self.stream);
            let ended = called.and_then(|()| comm.synchronize(&self.stream));
            let error = expect_error(ended, "a product without a rank")?;
            // Whoever gives up first is a rank that others miss then.
            let in_time = began.elapsed() < 3 * SHORT;
            self.tally.expect(&format!("{error}"), !error.ranks().is_empty() && in_time);
        }
        // Nobody makes a new communicator's calls before this one's have ended.
        self.comm.barrier(&self.stream)?;
        self.comm.synchronize(&self.stream)
    }
}

/// A small number, as an element of each of the types.
pub(crate) fn number(seed: u64, rank: u32, at: usize) -> f32 {
    (random(seed ^ u64::from(rank) << 40, at as u64) % 5) as f32 - 2.0
}

/// The bytes of these elements.
pub(crate) fn bytes_of(values: impl IntoIterator<Item = f32>, dtype: DType) -> Vec<u8> {
    let values = values.into_iter();
    match dtype {
        DType::Bf16 => values.flat_map(|value| bf16::from_f32(value).to_le_bytes()).collect(),
        DType::F16 => values.flat_map(|value| f16::from_f32(value).to_le_bytes()).collect(),
        // Zeros, ones and twos of 8-bit floats.
        _ => values
            .map(|value| [0, 0x38, 0x40][value.abs() as usize] | if value < 0.0 { 0x80 } else { 0 })
            .collect(),
    }
}

pub(crate) fn rounded(value: f32, dtype: DType) -> f32 {
    match dtype {
        DType::Bf16 => bf16::from_f32(value).to_f32(),
        _ => f16::from_f32(value).to_f32(),
    }
}

/// A matrix of so many columns, which lies row by row, column by column.
pub(crate) fn by_columns(matrix: &[f32], columns: usize) -> Vec<f32> {
    (0..columns).flat_map(|column| matrix.iter().skip(column).step_by(columns)).copied().collect()
}

/// The scales, each at a multiple of 16 bytes.
pub(crate) fn bytes_of_scales() -> Vec<u8> {
    let padded = |scale: f32| {
        let mut bytes = scale.to_le_bytes().to_vec();
        bytes.resize(16, 0);
        bytes
    };
    SCALES.into_iter().flat_map(padded).collect()
}

impl Case {
    const SMALL: Self = Self {
        rows: 8,
        batches: 1,
        batches_inside: false,
        inner: &[8],
        columns: 8,
        dtype: DType::Bf16,
        out_dtype: DType::Bf16,
        right_by_rows: true,
        mean: false,
    };

    /// A left matrix row by row, as they lie in memory.
    fn left(&self, seed: u64, rank: u32, (world, nth): (u32, usize)) -> Vec<f32> {
        let count = self.rows * world as usize * self.inner[nth];
        (0..count).map(|at| number(seed + nth as u64, rank, at)).collect()
    }

    /// A right matrix row by row of the inner dimension.
    fn right(&self, seed: u64, rank: u32, nth: usize) -> Vec<f32> {
        let count = self.inner[nth] * self.columns;
        (0..count).map(|at| number(!(seed + nth as u64), rank, at)).collect()
    }

    /// The row in memory of a left matrix that is a row of a rank's part.
    fn row(&self, (rank, row): (u32, usize), world: u32) -> usize {
        let of_part = self.rows / self.batches;
        let (batch, in_batch) = (row / of_part, rank as usize * of_part + row % of_part);
        match self.batches_inside {
            true => in_batch * self.batches + batch,
            false => batch * world as usize * of_part + in_batch,
        }
    }

    /// Computes the sums that a rank adds to the part of another one, row by row.
    fn partial(&self, seed: u64, from: u32, (to, world): (u32, u32)) -> Vec<f32> {
        let mut sums = vec![0.0_f32; self.rows * self.columns];
        for (nth, &inner) in self.inner.iter().enumerate() {
            let (left, right) = (self.left(seed, from, (world, nth)), self.right(seed, from, nth));
            for (row, sums) in sums.chunks_mut(self.columns).enumerate() {
                let first = self.row((to, row), world) * inner;
                for (value, others) in left[first..][..inner].iter().zip(right.chunks(self.columns))
                {
                    for (sum, other) in sums.iter_mut().zip(others) {
                        *sum += value * other;
                    }
                }
            }
        }
        let factor = if self.dtype.size() == 1 { SCALES[0] * SCALES[1] } else { 1.0 };
        sums.into_iter().map(|sum| sum * factor).collect()
    }

    /// Computes the expected output of a rank: each rank's sums are rounded, and then added up from this rank on.
    fn wanted(&self, seed: u64, rank: u32, world: u32) -> Vec<u8> {
        let mut sums = self.partial(seed, rank, (rank, world));
        for distance in 1..world {
            let partial = self.partial(seed, (rank + distance) % world, (rank, world));
            for (sum, partial) in sums.iter_mut().zip(partial) {
                *sum += rounded(partial, self.out_dtype);
            }
        }
        let factor = if self.mean { 1.0 / world as f32 } else { 1.0 };
        bytes_of(sums.into_iter().map(|sum| sum * factor), self.out_dtype)
    }
}

impl Matmul<'_> {
    fn memory(&self, case: &Case) -> Result<Memory> {
        let (world, ordinary) = (self.pool.world(), self.pool.lane(ORDINARY)?);
        let parts = MatmulScatter::parts_bytes(case.rows, case.columns, world).max(16);
        let factors = |&inner: &usize| {
            let left = ordinary.alloc(case.rows * world as usize * inner * case.dtype.size())?;
            Ok((left, ordinary.alloc(inner * case.columns * case.dtype.size())?))
        };
        let memory = Memory {
            factors: case.inner.iter().map(factors).collect::<Result<_>>()?,
            out: ordinary.alloc(case.rows * case.columns * 2)?,
            scales: ordinary.alloc(32)?,
            parts: self.pool.alloc(parts)?,
            control: self.pool.alloc(MatmulScatter::CONTROL_BYTES)?,
            scratch: ordinary.alloc(MatmulScatter::SCRATCH_BYTES)?,
        };
        self.pool.commit()?;
        upload(self.pool, memory.control.address(), &[0; MatmulScatter::CONTROL_BYTES])?;
        upload(self.pool, memory.scales.address(), &bytes_of_scales())?;
        Ok(memory)
    }

    fn terms(&self, case: &Case, memory: &Memory) -> Vec<MatmulTerm> {
        let size = case.dtype.size();
        let term = |((left, right), &inner): (&(Block<u8>, Block<u8>), &usize)| {
            let row = (inner * size) as u64;
            let batch = (case.rows / case.batches * self.pool.world() as usize) as u64 * row;
            let (pitch, batch_pitch) = match case.batches_inside {
                true => (case.batches as u64 * row, row),
                false => (row, batch),
            };
            let of_right = if case.right_by_rows { case.columns } else { inner };
            MatmulTerm {
                left: MatrixView { begin: left.address(), pitch },
                batch_pitch,
                right: MatrixView { begin: right.address(), pitch: (of_right * size) as u64 },
                inner,
            }
        };
        memory.factors.iter().zip(case.inner).map(term).collect()
    }

    fn gemm<'a>(case: &Case, memory: &Memory, terms: &'a [MatmulTerm]) -> MatmulScatter<'a> {
        let scales = memory.scales.address();
        MatmulScatter {
            dtype: case.dtype,
            out_dtype: case.out_dtype,
            terms,
            right_by_rows: case.right_by_rows,
            out: MatrixView { begin: memory.out.address(), pitch: case.columns as u64 * 2 },
            scales: if case.dtype.size() == 1 { (scales, scales + 16) } else { (0, 0) },
            rows: case.rows,
            batches: case.batches,
            columns: case.columns,
            mean: case.mean,
            parts: memory.parts.address(),
            control: memory.control.address(),
            scratch: (memory.scratch.address(), memory.scratch.len()),
        }
    }

    fn upload(&self, case: &Case, memory: &Memory, seed: u64) -> Result<()> {
        let (rank, world) = (self.pool.rank(), self.pool.world());
        let encode = |values: Vec<f32>| bytes_of(values, case.dtype);
        for (nth, (left, right)) in memory.factors.iter().enumerate() {
            upload(self.pool, left.address(), &encode(case.left(seed, rank, (world, nth))))?;
            let mut values = case.right(seed, rank, nth);
            if !case.right_by_rows {
                values = by_columns(&values, case.columns);
            }
            upload(self.pool, right.address(), &encode(values))?;
        }
        upload(self.pool, memory.out.address(), &vec![POISON; case.rows * case.columns * 2])
    }

    fn case(&mut self, case: Case) -> Result<()> {
        let (rank, world) = (self.pool.rank(), self.pool.world());
        let memory = self.memory(&case)?;
        let terms = self.terms(&case, &memory);
        let gemm = Self::gemm(&case, &memory, &terms);
        self.repeat(
            700,
            // SAFETY: the blocks are as long as the product needs, and nothing else uses them.
            |matmul| unsafe { matmul.comm.matmul_reduce_scatter_at(&gemm, 0, &matmul.stream) },
            |matmul, seed| matmul.upload(&case, &memory, seed),
            |matmul, seed| {
                matmul.compare(&format!("{case:?}"), &memory.out, &case.wanted(seed, rank, world))
            },
        )
    }

    /// A product, for checks of all kinds of calls.
    pub(crate) fn call_of_scatter(&self) -> Result<MatmulCall<'_>> {
        let case = Case { rows: 130, inner: &[72], columns: 264, ..Case::SMALL };
        let memory = self.memory(&case)?;
        self.upload(&case, &memory, 1)?;
        let output = (memory.out.address(), memory.out.len());
        let zeros = (memory.control.address(), memory.control.len());
        let call = move |comm: &Communicator, stream: &Stream| {
            let terms = self.terms(&case, &memory);
            let gemm = Self::gemm(&case, &memory, &terms);
            // SAFETY: the blocks are as long as the product needs, and nothing else uses them.
            unsafe { comm.matmul_reduce_scatter_at(&gemm, 0, stream) }
        };
        Ok(("matmul_reduce_scatter", Rc::new(call), output, zeros))
    }

    /// A product of each kind.
    pub(crate) fn calls_of_matmuls(&self) -> Result<Vec<MatmulCall<'_>>> {
        Ok(vec![self.call_of_scatter()?, self.call_of_gather()?, self.call_of_small_m()?])
    }

    /// Checks calls that are refused on all ranks, and products that differ.
    fn refusals(&mut self) -> Result<()> {
        let memory = self.memory(&Case::SMALL)?;
        let terms = self.terms(&Case::SMALL, &memory);
        let right = Self::gemm(&Case::SMALL, &memory, &terms);
        let left = terms[0].left;
        let moved = MatmulTerm { left: MatrixView { begin: left.begin + 2, ..left }, ..terms[0] };
        for wrong in [
            MatmulScatter { terms: &[terms[0], moved], ..right },
            MatmulScatter { terms: &[], ..right },
            MatmulScatter { batches: 2, ..right },
            MatmulScatter { dtype: DType::F32, ..right },
            MatmulScatter { parts: right.out.begin, ..right },
            MatmulScatter { control: 0, ..right },
        ] {
            if self.pool.world() == 1
                && (wrong.parts, wrong.control) != (right.parts, right.control)
            {
                continue;
            }
            // SAFETY: it is refused before anything is touched.
            let called = unsafe { self.comm.matmul_reduce_scatter_at(&wrong, 0, &self.stream) };
            self.refused(called)?;
        }
        if self.pool.world() == 1 {
            return Ok(());
        }
        // SAFETY: the blocks are as long as the product needs, and nothing else uses them.
        self.diverged_and_missing(|comm, rest, stream| unsafe {
            comm.matmul_reduce_scatter_at(&right, rest, stream)
        })
    }

    /// Where there is no kernel, the call says so, and the communicator goes on.
    fn refused_elsewhere(&mut self) -> Result<(u64, u64)> {
        let memory = self.memory(&Case::SMALL)?;
        let terms = self.terms(&Case::SMALL, &memory);
        let gemm = Self::gemm(&Case::SMALL, &memory, &terms);
        // SAFETY: it is refused before anything is touched.
        let refused = unsafe { self.comm.matmul_reduce_scatter_at(&gemm, 0, &self.stream) };
        let error = expect_error(refused, "a product on another device")?;
        self.tally.expect(&format!("{error}"), error.is_unsupported());
        self.comm.barrier(&self.stream)?;
        self.comm.synchronize(&self.stream)?;
        Ok(self.tally.counts())
    }
}
