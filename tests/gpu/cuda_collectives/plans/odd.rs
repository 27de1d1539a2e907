//! Calls with plans that are the first of their communicator, or around the end of epochs, calls that are in place on one
//! rank alone, and broadcasts of which only the root has an input.

use symmpool_allocator::Result;
use symmpool_collectives::plan::Plan;
use symmpool_collectives::{
    Algorithm, Communicator, CommunicatorOptions, DType, ReduceOp, Request,
};

use super::{Plans, more_programs, odd_programs, programs};
use crate::oracle::{input, reduce};

impl Plans<'_> {
    /// S2: calls in whose epochs old flags expire, with odd and even numbers of flags on all blocks.
    pub(super) fn first_calls(&mut self) -> Result<()> {
        let (world, rank) = (self.pool.world(), self.pool.rank());
        let [input_at, output_at] = [0, 1].map(|nth: usize| self.buffers.windows[nth].address());
        let (dtype, op) = (DType::I32, ReduceOp::Sum);
        for (nth, first_epoch) in [1, (1 << 30) - 1, u32::MAX - 1].into_iter().enumerate() {
            for blocks in 1..=self.options.few(3, 2) as u32 {
                let options = CommunicatorOptions { first_epoch, ..self.options.communicator() };
                let comm = Communicator::with_options(self.pool, &options)?;
                for (call, plan) in [programs::two_shot(world), odd_programs::all_twice(world)]
                    .into_iter()
                    .enumerate()
                {
                    let plan = Plan { blocks: Some(blocks), ..plan };
                    let algorithm = Algorithm::from_plan(plan).expect("a right program");
                    let count = 30_000;
                    for again in 0..2 {
                        let seed = 100 * nth as u64 + 10 * call as u64 + again;
                        let all: Vec<Vec<u8>> =
                            (0..world).map(|rank| input(seed, rank, dtype, count)).collect();
                        crate::cuda::upload(self.pool, input_at, &all[rank as usize])?;
                        crate::cuda::upload(self.pool, output_at, &vec![0xa5; 4 * count])?;
                        let (to, from) = (output_at as *mut u8, input_at as *const u8);
                        // SAFETY: both blocks are longer, and nothing else uses them.
                        unsafe {
                            comm.call(
                                &Request::at(&algorithm, to, from, count, dtype).op(op),
                                &self.stream,
                            )
                        }?;
                        comm.synchronize(&self.stream)?;
                        let all: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
                        let got = crate::cuda::download(self.pool, output_at, 4 * count)?;
                        let what = format!("{} from epoch {first_epoch}", algorithm.name());
                        self.judge(&what, &got, &reduce(&all, dtype, op), dtype);
                    }
                }
            }
        }
        Ok(())
    }

    /// Who is not the root of a broadcast has no input.
    pub(super) fn broadcasts_without_an_input(&mut self) -> Result<()> {
        let (world, rank) = (self.pool.world(), self.pool.rank());
        let [input_at, output_at] = [0, 1].map(|nth: usize| self.buffers.windows[nth].address());
        let (dtype, op, count) = (DType::I32, ReduceOp::Sum, 1000);
        for plan in [programs::broadcast_tree(world), more_programs::broadcast_chain(world)] {
            let algorithm = Algorithm::from_plan(plan).expect("a right program");
            for root in 0..world {
                let data = input(root.into(), root, dtype, count);
                crate::cuda::upload(self.pool, input_at, &data)?;
                crate::cuda::upload(self.pool, output_at, &vec![0xa5; 4 * count])?;
                let from = if rank == root { input_at } else { 0 } as *const u8;
                let to = output_at as *mut u8;
                // SAFETY: both blocks are longer, and nothing else uses them; no other input is read than the root's.
                unsafe {
                    self.comm.call(
                        &Request::at(&algorithm, to, from, count, dtype).op(op).root(root),
                        &self.stream,
                    )
                }?;
                self.comm.synchronize(&self.stream)?;
                let got = crate::cuda::download(self.pool, output_at, 4 * count)?;
                let what = format!("{} from rank {root}", algorithm.name());
                self.judge(&what, &got, &data, dtype);
            }
        }
        Ok(())
    }

    /// A program that is wrong where one rank alone is in place is refused there, and the others learn it; one that is right
    /// in place is so on any ranks.
    pub(super) fn in_place_on_one_rank(&mut self) -> Result<()> {
        let (world, rank) = (self.pool.world(), self.pool.rank());
        let [input_at, output_at] = [0, 1].map(|nth: usize| self.buffers.windows[nth].address());
        let (dtype, op, count) = (DType::I32, ReduceOp::Sum, 1000);
        let algorithm = Algorithm::from_plan(programs::one_shot(world)).expect("a right program");
        for alone in 0..world {
            let all: Vec<Vec<u8>> =
                (0..world).map(|rank| input(alone.into(), rank, dtype, count)).collect();
            crate::cuda::upload(self.pool, input_at, &all[rank as usize])?;
            let at = if rank == alone { input_at } else { output_at };
            let (to, from) = (at as *mut u8, input_at as *const u8);
            // SAFETY: both blocks are longer, and nothing else uses them.
            unsafe {
                self.comm
                    .call(&Request::at(&algorithm, to, from, count, dtype).op(op), &self.stream)
            }?;
            self.comm.synchronize(&self.stream)?;
            let all: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
            let got = crate::cuda::download(self.pool, at, 4 * count)?;
            let what = format!("one_shot in place on rank {alone}");
            self.judge(&what, &got, &reduce(&all, dtype, op), dtype);
        }
        if world != 2 {
            return Ok(());
        }
        let plan = odd_programs::right_in_place_on_both_or_none();
        let algorithm = Algorithm::from_plan(plan).expect("a right program");
        let comm = Communicator::with_options(self.pool, &self.options.communicator())?;
        let to = if rank == 0 { input_at } else { output_at } as *mut u8;
        // SAFETY: both blocks are longer, and nothing else uses them.
        let refused = unsafe {
            comm.call(
                &Request::at(&algorithm, to, input_at as *const u8, count, dtype).op(op),
                &self.stream,
            )
        };
        let refused = refused.and_then(|()| comm.synchronize(&self.stream));
        self.cases += 1;
        let error = crate::expect_error(refused, "in place on rank 0")?;
        let is_right = if rank == 0 { error.is_invalid_argument() } else { error.is_diverged() };
        if !is_right {
            self.wrong += 1;
            println!("rank {rank}: {error}");
        }
        Ok(())
    }
}
