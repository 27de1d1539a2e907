//! Checks of products of tensor cores whose parts are added up over all ranks: every bit is compared with what the CPU
//! computes, from numbers whose products and sums are exact until they are rounded.

use std::time::{Duration, Instant};

use half::{bf16, f16};
use symmpool_allocator::{Block, Pool, Result, Stream};
use symmpool_collectives::{Communicator, CommunicatorOptions, DType, MatmulScatter, Rows};

use crate::cuda::{Graph, download, stream, upload};
use crate::oracle::random;
use crate::tally::Tally;
use crate::{ORDINARY, Options, expect_error};

/// Bytes of the result before a call.
pub(crate) const POISON: u8 = 0xa5;
/// How long a product waits for a rank that does not come. Emulated devices take their time.
const SHORT: Duration = Duration::from_secs(3);
/// The scales of 8-bit floats, which are exact.
pub(crate) const SCALES: [f32; 2] = [0.5, 0.25];

/// A product, and the types of its matrices.
#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    inner: usize,
    columns: usize,
    dtype: DType,
    out_dtype: DType,
    right_by_rows: bool,
    mean: bool,
}

/// The memory of a case.
struct Memory {
    left: Block<u8>,
    right: Block<u8>,
    out: Block<u8>,
    scales: Block<u8>,
    parts: Block<u8>,
    control: Block<u8>,
    scratch: Block<u8>,
}

/// What checks of products have in common.
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
    // devices, parts of several chunks.
    let mut sizes: Vec<(usize, usize, usize)> = vec![(3, 8, 8), (130, 200, 264)];
    if !options.quick {
        sizes.extend([(384, 512, 1024), (1000, 72, 1032), (2048, 64, 4096)]);
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
            // Rows of 8-bit floats begin at multiples of 16 elements.
            let inner = if dtype == DType::F8E4m3 { inner.next_multiple_of(16) } else { inner };
            let mean = out_dtype == DType::F16;
            matmul.case(Case { rows, inner, columns, dtype, out_dtype, right_by_rows, mean })?;
        }
    }
    // An inner dimension that is so long that blocks share the last tiles, which have rows.
    let (dtype, out_dtype) = (DType::Bf16, DType::Bf16);
    let shared = Case {
        rows: 130,
        inner: 1544,
        columns: 8,
        dtype,
        out_dtype,
        right_by_rows: false,
        mean: true,
    };
    matmul.case(shared)?;
    if !options.quick {
        for columns in [8704, 20_000] {
            matmul.case(Case { rows: 8, columns, right_by_rows: true, ..shared })?;
        }
    }
    // With concurrent communicators, where a second launch makes a rank's own part.
    matmul.renew(&CommunicatorOptions { concurrent: Some(2), ..options.communicator() })?;
    for (rows, inner, columns) in [(3, 8, 8), (300, 136, 520)] {
        let case =
            Case { rows, inner, columns, dtype, out_dtype, right_by_rows: true, mean: false };
        matmul.case(case)?;
    }
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
        let graph = Graph::capture(self.pool, self.stream, || call(self))?;
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

fn rounded(value: f32, dtype: DType) -> f32 {
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
    /// Row by row, of all ranks' parts.
    fn left(&self, seed: u64, rank: u32, world: u32) -> Vec<f32> {
        let count = self.rows * world as usize * self.inner;
        (0..count).map(|at| number(seed, rank, at)).collect()
    }

    /// Row by row of the inner dimension.
    fn right(&self, seed: u64, rank: u32) -> Vec<f32> {
        (0..self.inner * self.columns).map(|at| number(!seed, rank, at)).collect()
    }

    /// What the rank gets: each rank's sums are rounded, and then added up from this rank on.
    fn wanted(&self, seed: u64, rank: u32, world: u32) -> Vec<u8> {
        let mut sums = vec![0.0_f32; self.rows * self.columns];
        for distance in 0..world {
            let from = (rank + distance) % world;
            let (left, right) = (self.left(seed, from, world), self.right(seed, from));
            let factor = if self.dtype.size() == 1 { SCALES[0] * SCALES[1] } else { 1.0 };
            for row in 0..self.rows {
                let first = (rank as usize * self.rows + row) * self.inner;
                let mut partial = vec![0.0_f32; self.columns];
                for (inner, value) in left[first..first + self.inner].iter().enumerate() {
                    let others = &right[inner * self.columns..][..self.columns];
                    for (sum, other) in partial.iter_mut().zip(others) {
                        *sum += value * other;
                    }
                }
                let into = &mut sums[row * self.columns..][..self.columns];
                for (sum, partial) in into.iter_mut().zip(partial) {
                    let scaled = partial * factor;
                    *sum += if distance == 0 { scaled } else { rounded(scaled, self.out_dtype) };
                }
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
        let memory = Memory {
            left: ordinary.alloc(case.rows * world as usize * case.inner * case.dtype.size())?,
            right: ordinary.alloc(case.inner * case.columns * case.dtype.size())?,
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

    fn product(case: &Case, memory: &Memory) -> MatmulScatter {
        let rows =
            |block: &Block<u8>, bytes: usize| Rows { begin: block.address(), pitch: bytes as u64 };
        let (of_right, size) =
            (if case.right_by_rows { case.columns } else { case.inner }, case.dtype.size());
        let scales = memory.scales.address();
        MatmulScatter {
            dtype: case.dtype,
            out_dtype: case.out_dtype,
            left: rows(&memory.left, case.inner * size),
            right: rows(&memory.right, of_right * size),
            right_by_rows: case.right_by_rows,
            out: rows(&memory.out, case.columns * 2),
            scales: if size == 1 { (scales, scales + 16) } else { (0, 0) },
            rows: case.rows,
            inner: case.inner,
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
        upload(self.pool, memory.left.address(), &encode(case.left(seed, rank, world)))?;
        let mut right = case.right(seed, rank);
        if !case.right_by_rows {
            right = by_columns(&right, case.columns);
        }
        upload(self.pool, memory.right.address(), &encode(right))?;
        upload(self.pool, memory.out.address(), &vec![POISON; case.rows * case.columns * 2])
    }

    fn case(&mut self, case: Case) -> Result<()> {
        let (rank, world) = (self.pool.rank(), self.pool.world());
        let memory = self.memory(&case)?;
        let product = Self::product(&case, &memory);
        self.repeat(
            700,
            // SAFETY: the blocks are as long as the product needs, and nothing else uses them.
            |matmul| unsafe { matmul.comm.matmul_reduce_scatter_at(&product, 0, &matmul.stream) },
            |matmul, seed| matmul.upload(&case, &memory, seed),
            |matmul, seed| {
                matmul.compare(&format!("{case:?}"), &memory.out, &case.wanted(seed, rank, world))
            },
        )
    }

    fn small(&self) -> Result<(Case, Memory)> {
        let (dtype, out_dtype) = (DType::Bf16, DType::Bf16);
        let case = Case {
            rows: 8,
            inner: 8,
            columns: 8,
            dtype,
            out_dtype,
            right_by_rows: true,
            mean: false,
        };
        let memory = self.memory(&case)?;
        Ok((case, memory))
    }

    /// What is refused, on all ranks; and products that differ.
    fn refusals(&mut self) -> Result<()> {
        let (case, memory) = self.small()?;
        let right = Self::product(&case, &memory);
        for wrong in [
            MatmulScatter { left: Rows { begin: right.left.begin + 2, ..right.left }, ..right },
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
        // SAFETY: as in `case`.
        self.diverged_and_missing(|comm, rest, stream| unsafe {
            comm.matmul_reduce_scatter_at(&right, rest, stream)
        })
    }

    /// Where there is no kernel, the call says so, and the communicator goes on.
    fn refused_elsewhere(&mut self) -> Result<(u64, u64)> {
        let (case, memory) = self.small()?;
        let product = Self::product(&case, &memory);
        // SAFETY: it is refused before anything is touched.
        let refused = unsafe { self.comm.matmul_reduce_scatter_at(&product, 0, &self.stream) };
        let error = expect_error(refused, "a product on another device")?;
        self.tally.expect(&format!("{error}"), error.is_unsupported());
        self.comm.barrier(&self.stream)?;
        self.comm.synchronize(&self.stream)?;
        Ok(self.tally.counts())
    }
}
