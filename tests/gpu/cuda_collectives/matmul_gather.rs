//! Checks of products of the rows of all ranks, as those of `matmul.rs`.

use std::rc::Rc;

use symmpool_allocator::{Block, Pool, Result, Stream};
use symmpool_collectives::{
    Communicator, CommunicatorOptions, DType, MatmulGather, MatrixView, RightMatrix,
};

use crate::cuda::{download, upload};
use crate::matmul::{
    Matmul, MatmulCall, POISON, SCALES, by_columns, bytes_of, bytes_of_scales, number,
};
use crate::{ORDINARY, Options};

/// Products, and the types of their matrices.
#[derive(Clone, Debug)]
struct Case {
    rows: usize,
    batches: usize,
    inner: usize,
    /// Number of columns of each right matrix.
    columns: Vec<usize>,
    dtype: DType,
    out_dtype: DType,
    right_by_rows: bool,
    /// Whether the gathered rows are wanted.
    gathers: bool,
}

/// The memory of a case.
struct Memory {
    left: Block<u8>,
    /// Each right matrix, with its product.
    rights: Vec<(Block<u8>, Block<u8>)>,
    gathered: Block<u8>,
    scales: Block<u8>,
    slots: Block<u8>,
    control: Block<u8>,
    scratch: Block<u8>,
}

pub(crate) fn run(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let mut gather = Matmul::new(pool, options)?;
    if !gather.comm.has_tensor_kernels() {
        // `matmul.rs` says so, and what a call does then.
        return Ok(gather.tally.counts());
    }
    let case = Case {
        rows: 3,
        batches: 1,
        inner: 8,
        columns: vec![8],
        dtype: DType::Bf16,
        out_dtype: DType::Bf16,
        right_by_rows: true,
        gathers: true,
    };
    gather.gather_case(&case)?;
    // Rows that fill no tile, before those of the next rank; and tiles of several right matrices, side by side.
    let several = Case { rows: 130, inner: 200, columns: vec![8, 264, 72, 512], ..case.clone() };
    gather.gather_case(&several)?;
    let by_columns = Case { right_by_rows: false, gathers: false, ..several.clone() };
    let fp8 =
        Case { dtype: DType::F8E4m3, inner: 208, columns: vec![264, 40], ..by_columns.clone() };
    gather.gather_case(&fp8)?;
    // An inner dimension that is so long that blocks share the last tiles, which have rows.
    let shared = Case { inner: 1544, columns: vec![8], gathers: false, ..several.clone() };
    gather.gather_case(&shared)?;
    // Several batches, whose rows are no multiple of what is copied at once.
    let batches = Case { rows: 256, batches: 2, inner: 24, columns: vec![8], ..case.clone() };
    gather.gather_case(&batches)?;
    if !options.quick {
        let rows = Case { rows: 2304, batches: 3, inner: 4096, columns: vec![264], ..case.clone() };
        gather.gather_case(&rows)?;
        let wide = Case { inner: 72, columns: vec![8, 264], ..batches.clone() };
        gather.gather_case(&Case { rows: 384, batches: 3, ..wide })?;
        gather.gather_case(&by_columns)?;
        gather.gather_case(&Case {
            dtype: DType::F16,
            out_dtype: DType::F16,
            ..several.clone()
        })?;
        gather.gather_case(&Case { out_dtype: DType::F16, gathers: true, ..fp8.clone() })?;
        // Rows that lie further from each other than they are long.
        gather.gather_case(&Case { inner: 201, ..several.clone() })?;
        for columns in [8704, 20_000] {
            gather.gather_case(&Case { rows: 8, columns: vec![columns], ..shared.clone() })?;
        }
        // Several chunks, of which the last has fewer rows.
        for gathers in [false, true] {
            let long =
                Case { rows: 2300, inner: 4096, columns: vec![264], gathers, ..case.clone() };
            gather.gather_case(&long)?;
        }
    }
    // With concurrent communicators, where a second launch makes other ranks' parts.
    gather.renew(&CommunicatorOptions { concurrent: Some(2), ..options.communicator() })?;
    gather.gather_case(&case)?;
    gather.gather_case(&shared)?;
    gather.gather_case(&Case { right_by_rows: false, ..batches })?;
    gather.renew(&options.communicator())?;
    gather.gather_refusals(&case)?;
    Ok(gather.end("matmul_gather"))
}

impl Case {
    fn pitch(&self) -> usize {
        MatmulGather::pitch(self.dtype, self.inner)
    }

    fn left(&self, seed: u64, rank: u32) -> Vec<f32> {
        (0..self.rows * self.inner).map(|at| number(seed, rank, at)).collect()
    }

    /// Row by row; each rank has other ones.
    fn right(&self, seed: u64, rank: u32, nth: usize) -> Vec<f32> {
        let seed = !seed ^ (nth as u64) << 20;
        (0..self.inner * self.columns[nth]).map(|at| number(seed, rank, at)).collect()
    }

    /// The bytes of a rank's rows, with zeros between them.
    fn left_bytes(&self, seed: u64, rank: u32) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.rows * self.pitch());
        for row in self.left(seed, rank).chunks(self.inner) {
            bytes.extend(bytes_of(row.iter().copied(), self.dtype));
            bytes.resize(bytes.len().next_multiple_of(16), 0);
        }
        bytes
    }

    /// Gathers the data of all ranks batch by batch; `of_rank` gives the data of one, `row_bytes` for each row.
    fn gathered(&self, world: u32, row_bytes: usize, of_rank: impl Fn(u32) -> Vec<u8>) -> Vec<u8> {
        let batch = self.rows / self.batches * row_bytes;
        let ranks: Vec<_> = (0..world).map(of_rank).collect();
        let batches = 0..self.batches;
        batches
            .flat_map(|nth| ranks.iter().flat_map(move |rank| &rank[nth * batch..][..batch]))
            .copied()
            .collect()
    }

    fn wanted(&self, seed: u64, (rank, world): (u32, u32), nth: usize) -> Vec<u8> {
        let (right, columns) = (self.right(seed, rank, nth), self.columns[nth]);
        let factor = if self.dtype.size() == 1 { SCALES[0] * SCALES[1] } else { 1.0 };
        self.gathered(world, 2 * columns, |source| {
            let mut bytes = Vec::new();
            for row in self.left(seed, source).chunks(self.inner) {
                let mut sums = vec![0.0_f32; columns];
                for (value, others) in row.iter().zip(right.chunks(columns)) {
                    for (sum, other) in sums.iter_mut().zip(others) {
                        *sum += value * other;
                    }
                }
                bytes.extend(bytes_of(sums.iter().map(|sum| sum * factor), self.out_dtype));
            }
            bytes
        })
    }
}

impl Matmul<'_> {
    fn gather_memory(&self, case: &Case) -> Result<Memory> {
        let (world, ordinary) = (self.pool.world() as usize, self.pool.lane(ORDINARY)?);
        let size = case.dtype.size();
        let rights = case.columns.iter().map(|&columns| {
            let right = ordinary.alloc(case.inner * columns.next_multiple_of(8) * size)?;
            Ok((right, ordinary.alloc(world * case.rows * columns * 2)?))
        });
        let slots = MatmulGather::slots_bytes(case.dtype, case.rows, case.inner, world as u32);
        let memory = Memory {
            left: ordinary.alloc(case.rows * case.pitch())?,
            rights: rights.collect::<Result<_>>()?,
            gathered: ordinary.alloc(world * case.rows * case.pitch())?,
            scales: ordinary.alloc(32)?,
            slots: self.pool.alloc(slots)?,
            control: self.pool.alloc(MatmulGather::CONTROL_BYTES)?,
            scratch: ordinary.alloc(MatmulGather::SCRATCH_BYTES)?,
        };
        self.pool.commit()?;
        upload(self.pool, memory.control.address(), &[0; MatmulGather::CONTROL_BYTES])?;
        upload(self.pool, memory.scales.address(), &bytes_of_scales())?;
        Ok(memory)
    }

    fn gather_rights(case: &Case, memory: &Memory) -> Vec<RightMatrix> {
        let size = case.dtype.size();
        let scale = if size == 1 { memory.scales.address() + 16 } else { 0 };
        let found = case.columns.iter().zip(&memory.rights).map(|(&columns, (right, out))| {
            let across = if case.right_by_rows { columns } else { case.inner };
            RightMatrix {
                right: MatrixView { begin: right.address(), pitch: (across * size) as u64 },
                columns,
                out: MatrixView { begin: out.address(), pitch: 2 * columns as u64 },
                scale,
            }
        });
        found.collect()
    }

    fn gather_operands<'a>(
        case: &Case,
        memory: &Memory,
        rights: &'a [RightMatrix],
    ) -> MatmulGather<'a> {
        MatmulGather {
            dtype: case.dtype,
            out_dtype: case.out_dtype,
            left: MatrixView { begin: memory.left.address(), pitch: case.pitch() as u64 },
            left_scale: if case.dtype.size() == 1 { memory.scales.address() } else { 0 },
            rights,
            right_by_rows: case.right_by_rows,
            rows: case.rows,
            batches: case.batches,
            inner: case.inner,
            gathered: if case.gathers { memory.gathered.address() } else { 0 },
            slots: memory.slots.address(),
            control: memory.control.address(),
            scratch: (memory.scratch.address(), memory.scratch.len()),
        }
    }

    fn gather_upload(&self, case: &Case, memory: &Memory, seed: u64) -> Result<()> {
        let (rank, world) = (self.pool.rank(), self.pool.world() as usize);
        upload(self.pool, memory.left.address(), &case.left_bytes(seed, rank))?;
        let poison = vec![POISON; world * case.rows * case.pitch()];
        upload(self.pool, memory.gathered.address(), &poison)?;
        for (nth, (right, out)) in memory.rights.iter().enumerate() {
            let columns = case.columns[nth];
            let mut values = case.right(seed, rank, nth);
            if !case.right_by_rows {
                values = by_columns(&values, columns);
            }
            upload(self.pool, right.address(), &bytes_of(values, case.dtype))?;
            upload(self.pool, out.address(), &vec![POISON; world * case.rows * columns * 2])?;
        }
        Ok(())
    }

    fn gather_case(&mut self, case: &Case) -> Result<()> {
        let memory = self.gather_memory(case)?;
        let rights = Self::gather_rights(case, &memory);
        let gemm = Self::gather_operands(case, &memory, &rights);
        self.repeat(
            900,
            // SAFETY: the blocks are as long as the products need, and nothing else uses them.
            |gather| unsafe { gather.comm.all_gather_matmul_at(&gemm, 0, &gather.stream) },
            |gather, seed| gather.gather_upload(case, &memory, seed),
            |gather, seed| gather.compare_all(case, &memory, seed),
        )
    }

    /// A product, for checks of all kinds of calls.
    pub(crate) fn call_of_gather(&self) -> Result<MatmulCall<'_>> {
        let case = Case {
            rows: 130,
            batches: 1,
            inner: 72,
            columns: vec![264],
            dtype: DType::Bf16,
            out_dtype: DType::Bf16,
            right_by_rows: true,
            gathers: false,
        };
        let memory = self.gather_memory(&case)?;
        self.gather_upload(&case, &memory, 1)?;
        let (_, out) = &memory.rights[0];
        let output = (out.address(), out.len());
        let zeros = (memory.control.address(), memory.control.len());
        let call = move |comm: &Communicator, stream: &Stream| {
            let rights = Self::gather_rights(&case, &memory);
            let gemm = Self::gather_operands(&case, &memory, &rights);
            // SAFETY: the blocks are as long as the products need, and nothing else uses them.
            unsafe { comm.all_gather_matmul_at(&gemm, 0, stream) }
        };
        Ok(("all_gather_matmul", Rc::new(call), output, zeros))
    }

    fn compare_all(&mut self, case: &Case, memory: &Memory, seed: u64) -> Result<()> {
        let (rank, world) = (self.pool.rank(), self.pool.world());
        for (nth, (_, out)) in memory.rights.iter().enumerate() {
            let wanted = case.wanted(seed, (rank, world), nth);
            self.compare(&format!("{case:?}: product {nth}"), out, &wanted)?;
        }
        if case.gathers {
            let of_rank = |source| case.left_bytes(seed, source);
            let wanted = case.gathered(world, case.pitch(), of_rank);
            let found = download(self.pool, memory.gathered.address(), wanted.len())?;
            self.tally.expect(&format!("{case:?}: the gathered rows"), found == wanted);
        }
        Ok(())
    }

    /// Checks calls that are refused on all ranks, products that differ, and a rank that does not come.
    fn gather_refusals(&mut self, case: &Case) -> Result<()> {
        let memory = self.gather_memory(case)?;
        let rights = Self::gather_rights(case, &memory);
        let right = Self::gather_operands(case, &memory, &rights);
        let many = [rights[0]; MatmulGather::MAX_PROBLEMS + 1];
        let is_alone = self.pool.world() == 1;
        for (wrong, is_wrong_alone) in [
            (MatmulGather { rights: &[], ..right }, true),
            (MatmulGather { batches: 3, ..right }, true),
            (MatmulGather { rights: &many, ..right }, true),
            (MatmulGather { left: MatrixView { pitch: 32, ..right.left }, ..right }, true),
            (MatmulGather { slots: right.left.begin, ..right }, false),
            (MatmulGather { control: 0, ..right }, false),
        ] {
            if is_alone && !is_wrong_alone {
                continue;
            }
            // SAFETY: it is refused before anything is touched.
            let called = unsafe { self.comm.all_gather_matmul_at(&wrong, 0, &self.stream) };
            self.refused(called)?;
        }
        if is_alone {
            return Ok(());
        }
        // SAFETY: the blocks are as long as the products need, and nothing else uses them.
        self.diverged_and_missing(|comm, rest, stream| unsafe {
            comm.all_gather_matmul_at(&right, rest, stream)
        })
    }
}
