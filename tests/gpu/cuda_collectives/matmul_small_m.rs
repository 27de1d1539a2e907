//! Checks of products of few rows that are added up over all ranks: every bit is compared with what the CPU computes, from
//! numbers whose products and sums are exact until they are rounded.

use std::rc::Rc;

use symmpool_allocator::{Block, Pool, Result, Stream};
use symmpool_collectives::{
    Communicator, CommunicatorOptions, DType, MatmulAllReduce, MatrixView, ReduceOp,
};

use crate::cuda::upload;
use crate::matmul::{Matmul, MatmulCall, POISON, by_columns, bytes_of, number, rounded};
use crate::{ORDINARY, Options, expect_error};

#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    inner: usize,
    columns: usize,
    dtype: DType,
    right_by_rows: bool,
    mean: bool,
}

struct Memory {
    left: Block<u8>,
    right: Block<u8>,
    out: Block<u8>,
}

pub(crate) fn run(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let mut matmul = Matmul::new(pool, options)?;
    if !matmul.comm.has_tensor_kernels() {
        return Ok((0, 0));
    }
    // Less than a tile; tiles that are cut off on both sides, and as many blocks of the inner dimension as stages, with
    // each number of rows that kernels are compiled for; and more tiles than there are blocks on small devices.
    let little = Case { rows: 1, inner: 8, columns: 8, ..Case::USUAL };
    matmul.small_m(little)?;
    matmul.small_m(Case { right_by_rows: false, mean: true, dtype: DType::F16, ..little })?;
    for rows in [8, 9, 32, 64] {
        let right_by_rows = rows % 2 == 0;
        matmul.small_m(Case { rows, right_by_rows, ..Case::USUAL })?;
        if !options.quick {
            let other = Case { rows, right_by_rows: !right_by_rows, mean: true, ..Case::USUAL };
            matmul.small_m(Case { dtype: DType::F16, inner: 4104, ..other })?;
            matmul.small_m(Case { inner: 1000, columns: 8192, ..other })?;
        }
    }
    matmul.small_m(Case { rows: 5, inner: 72, columns: 1032, ..Case::USUAL })?;
    // In clusters of four blocks, and of eight, on devices of 22 SMs or more.
    matmul.small_m(Case { rows: 12, inner: 2056, ..Case::USUAL })?;
    matmul.small_m(Case { rows: 2, inner: 4104, columns: 136, ..Case::USUAL })?;
    if !options.quick {
        matmul.small_m(Case { rows: 17, columns: 20_000, ..Case::USUAL })?;
    }
    // With concurrent communicators, where a second launch adds up.
    matmul.renew(&CommunicatorOptions { concurrent: Some(2), ..options.communicator() })?;
    matmul.small_m(Case { rows: 3, ..Case::USUAL })?;
    matmul.small_m(Case {
        rows: 40,
        inner: 8,
        columns: 1024,
        right_by_rows: false,
        ..Case::USUAL
    })?;
    matmul.renew(&options.communicator())?;
    matmul.refusals_of_small_m()?;
    Ok(matmul.end("matmul_small_m"))
}

impl Case {
    const USUAL: Self = Self {
        rows: 8,
        inner: 520,
        columns: 264,
        dtype: DType::Bf16,
        right_by_rows: true,
        mean: false,
    };

    fn left(&self, seed: u64, rank: u32) -> Vec<f32> {
        (0..self.rows * self.inner).map(|at| number(seed, rank, at)).collect()
    }

    fn right(&self, seed: u64, rank: u32) -> Vec<f32> {
        (0..self.inner * self.columns).map(|at| number(!seed, rank, at)).collect()
    }

    /// The sum: each rank's product is rounded, and then added up in the order of ranks.
    fn wanted(&self, seed: u64, world: u32) -> Vec<u8> {
        let mut sums = vec![0.0_f32; self.rows * self.columns];
        for rank in 0..world {
            let (left, right) = (self.left(seed, rank), self.right(seed, rank));
            for (row, sums) in sums.chunks_mut(self.columns).enumerate() {
                let mut gemm = vec![0.0_f32; self.columns];
                let values = &left[row * self.inner..][..self.inner];
                for (value, others) in values.iter().zip(right.chunks(self.columns)) {
                    for (sum, other) in gemm.iter_mut().zip(others) {
                        *sum += value * other;
                    }
                }
                for (sum, gemm) in sums.iter_mut().zip(gemm) {
                    *sum += rounded(gemm, self.dtype);
                }
            }
        }
        let factor = if self.mean { 1.0 / world as f32 } else { 1.0 };
        bytes_of(sums.into_iter().map(|sum| sum * factor), self.dtype)
    }

    fn gemm(&self, memory: &Memory) -> MatmulAllReduce {
        let of_right = if self.right_by_rows { self.columns } else { self.inner };
        let rows = |block: &Block<u8>, across: usize| MatrixView {
            begin: block.address(),
            pitch: 2 * across as u64,
        };
        MatmulAllReduce {
            dtype: self.dtype,
            left: rows(&memory.left, self.inner),
            right: rows(&memory.right, of_right),
            right_by_rows: self.right_by_rows,
            out: memory.out.address(),
            rows: self.rows,
            inner: self.inner,
            columns: self.columns,
            mean: self.mean,
        }
    }
}

impl Matmul<'_> {
    fn memory_of_small_m(&self, case: &Case) -> Result<Memory> {
        let ordinary = self.pool.lane(ORDINARY)?;
        let matrix = |rows: usize, columns: usize| ordinary.alloc(2 * rows * columns);
        Ok(Memory {
            left: matrix(case.rows, case.inner)?,
            right: matrix(case.inner, case.columns)?,
            out: matrix(case.rows, case.columns)?,
        })
    }

    fn small_m(&mut self, case: Case) -> Result<()> {
        let (rank, world) = (self.pool.rank(), self.pool.world());
        if !self.comm.make_room_for_matmul(case.dtype, (case.rows, case.columns), &self.stream)? {
            return Ok(());
        }
        let memory = self.memory_of_small_m(&case)?;
        let gemm = case.gemm(&memory);
        self.repeat(
            900,
            // SAFETY: the blocks are as long as the product needs, and nothing else uses them.
            |matmul| unsafe { matmul.comm.matmul_all_reduce_at(&gemm, 0, &matmul.stream) },
            |matmul, seed| {
                let right = case.right(seed, rank);
                let right = match case.right_by_rows {
                    true => right,
                    false => by_columns(&right, case.columns),
                };
                let encode = |values: Vec<f32>| bytes_of(values, case.dtype);
                upload(matmul.pool, memory.left.address(), &encode(case.left(seed, rank)))?;
                upload(matmul.pool, memory.right.address(), &encode(right))?;
                upload(matmul.pool, memory.out.address(), &vec![POISON; memory.out.len()])
            },
            |matmul, seed| {
                matmul.compare(&format!("{case:?}"), &memory.out, &case.wanted(seed, world))
            },
        )
    }

    /// A product, for checks of all kinds of calls.
    pub(crate) fn call_of_small_m(&self) -> Result<MatmulCall<'_>> {
        let case = Case::USUAL;
        let memory = self.memory_of_small_m(&case)?;
        let encode = |values: Vec<f32>| bytes_of(values, case.dtype);
        upload(self.pool, memory.left.address(), &encode(case.left(1, self.pool.rank())))?;
        upload(self.pool, memory.right.address(), &encode(case.right(1, self.pool.rank())))?;
        let output = (memory.out.address(), memory.out.len());
        let call = move |comm: &Communicator, stream: &Stream| {
            // SAFETY: the blocks are as long as the product needs, and nothing else uses them.
            unsafe { comm.matmul_all_reduce_at(&case.gemm(&memory), 0, stream) }
        };
        Ok(("matmul_all_reduce", Rc::new(call), output, (output.0, 0)))
    }

    /// Checks calls that are refused on all ranks, and products that differ.
    fn refusals_of_small_m(&mut self) -> Result<()> {
        let memory = self.memory_of_small_m(&Case::USUAL)?;
        let right = Case::USUAL.gemm(&memory);
        for wrong in [
            MatmulAllReduce { rows: 65, ..right },
            MatmulAllReduce { columns: 12, ..right },
            MatmulAllReduce { dtype: DType::F32, ..right },
            MatmulAllReduce { out: right.out + 2, ..right },
        ] {
            // SAFETY: it is refused before anything is touched.
            let called = unsafe { self.comm.matmul_all_reduce_at(&wrong, 0, &self.stream) };
            self.refused(called)?;
        }
        if self.pool.world() == 1 {
            return Ok(());
        }
        // SAFETY: the blocks are as long as the product needs, and nothing else uses them.
        self.diverged_and_missing(|comm, rest, stream| unsafe {
            comm.matmul_all_reduce_at(&right, rest, stream)
        })?;
        self.other_call(&right, &memory.out)
    }

    /// A product on one rank, and on the others an all-reduce of what they have multiplied before, as ranks choose where they
    /// have different numbers of rows.
    fn other_call(&mut self, gemm: &MatmulAllReduce, out: &Block<u8>) -> Result<()> {
        let comm = Communicator::with_options(self.pool, &self.options.communicator())?;
        let (at, count) = (out.as_ptr(), out.len() / 2);
        let called = if self.pool.rank() == 0 {
            // SAFETY: the blocks are as long as the product needs, and nothing else uses them.
            unsafe { comm.matmul_all_reduce_at(gemm, 0, &self.stream) }
        } else {
            // SAFETY: the block has so many elements, and nothing else uses it.
            unsafe { comm.all_reduce_at(at, at, count, DType::Bf16, ReduceOp::Sum, &self.stream) }
        };
        let ended = called.and_then(|()| comm.synchronize(&self.stream));
        let error = expect_error(ended, "a product and an all-reduce")?;
        self.tally.expect(&format!("{error}"), error.is_diverged());
        self.comm.barrier(&self.stream)?;
        self.comm.synchronize(&self.stream)
    }
}
