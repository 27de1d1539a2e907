//! Cases in which implementations of all-to-all with splits on the device have failed before.

use std::time::Duration;

use symmpool_allocator::{Block, Result};
use symmpool_collectives::{Communicator, DType, ReduceOp, SplitRows};

use super::{ExchangeChecks, MAX_BYTES, POISON, SOME};
use crate::cuda::{CallGraph, download, upload};
use crate::matrix::Matrix;
use crate::oracle::random;

impl ExchangeChecks<'_> {
    /// A call is captured once, and replayed with other splits in the device's memory, between
    /// eager all-reduces and all-reduces of another graph.
    pub(super) fn new_splits_ask_no_host(&mut self) -> Result<()> {
        let (rank, world) = (self.pool.rank(), self.pool.world());
        let (from, to) = (self.inputs[1].address(), self.outputs[1].address());
        let (length, capacity) = (SOME, SOME);
        let rows = SplitRows { dtype: DType::U8, row: 1, length, capacity };
        let splits = self.splits_at(DType::I64, true);
        upload(self.pool, from, &self.data[rank as usize][..length])?;
        let sums: Block<u8> = self.pool.alloc(1 << 16)?;
        self.pool.commit()?;
        let zeros = vec![0; 1 << 16];
        upload(self.pool, sums.address(), &zeros)?;
        // The communicator has made no call yet: its first call is captured.
        let comm = Communicator::with_options(self.pool, &self.options.communicator())?;
        let stream = self.stream;
        let reduce = |count: usize| {
            let at = sums.address() as *mut u8;
            // SAFETY: the block is as long.
            unsafe { comm.all_reduce_at(at, at, count, DType::I32, ReduceOp::Sum, &stream) }
        };
        let graphs = [1 << 14, 100].map(|count| {
            CallGraph::capture(self.pool, self.stream, || {
                reduce(count)?;
                // SAFETY: both blocks are longer.
                unsafe {
                    comm.all_to_all_v_splits_at(
                        to as *mut u8,
                        from as *const u8,
                        &rows,
                        &splits,
                        &self.stream,
                    )
                }
            })
        });
        let [one, two] = graphs;
        let graphs = [one?, two?];
        for round in 0..self.options.few(100, 6) {
            let seed = random(self.seed ^ 7, round);
            let matrix = Matrix::random(seed, world, length);
            self.put_splits(DType::I64, &matrix.sends(rank))?;
            upload(self.pool, to, &vec![POISON; capacity])?;
            graphs[(seed & 1) as usize].launch(self.pool, self.stream)?;
            if round % 3 == 0 {
                reduce(1 + (seed >> 8) as usize % 10_000)?;
            }
            comm.synchronize(&self.stream)?;
            let mut wanted = matrix.output(&self.data, rank, 1, capacity);
            wanted.resize(capacity, POISON);
            let got = download(self.pool, to, capacity)?;
            let what = format!(
                "new_splits_ask_no_host, replay {round} ({}), sends {:?}, receives {:?}",
                matrix.name,
                matrix.sends(rank),
                matrix.receives(rank)
            );
            self.judge(&what, &got, &wanted);
        }
        let got = download(self.pool, sums.address(), 1 << 16)?;
        self.judge("all-reduces between replays, of zeros", &got, &zeros);
        for graph in graphs {
            graph.destroy(self.pool)?;
        }
        Ok(())
    }

    /// Which ranks and pairs of ranks send nothing changes from call to call, with no pause between.
    pub(super) fn zero_counts_keep_ranks_in_step(&mut self) -> Result<()> {
        let (rank, world) = (self.pool.rank(), self.pool.world());
        let (from, to) = (self.inputs[1].address(), self.outputs[1].address());
        for call in 0..self.options.few(300, 20) {
            let seed = random(self.seed ^ 9, call);
            let most = if call % 3 == 0 { SOME } else { 2000 };
            let mut matrix = Matrix::random(seed, world, most);
            for other in 0..20 {
                if call % 2 == 0 && !matrix.has_zeros() {
                    matrix = Matrix::random(random(seed, other), world, most);
                }
            }
            let (send, receive) = (matrix.sends(rank), matrix.receives(rank));
            self.all_to_all_v((to, from), (&receive, &send), DType::U8)?;
            if call % 10 == 9 {
                self.comm.synchronize(&self.stream)?;
                let wanted = matrix.output(&self.data, rank, 1, MAX_BYTES);
                let got = download(self.pool, to, wanted.len())?;
                let what = format!(
                    "zero_counts_keep_ranks_in_step, call {call} ({}), sends {send:?}, receives \
                     {receive:?}",
                    matrix.name
                );
                self.judge(&what, &got, &wanted);
            }
        }
        Ok(())
    }

    /// The lists of splits are overwritten as soon as a call returns, long before it runs on the device.
    pub(super) fn splits_of_the_host_are_reused_at_once(&mut self) -> Result<()> {
        let (rank, world) = (self.pool.rank(), self.pool.world());
        let (from, output) = (self.inputs[1].address(), self.outputs[1].address());
        let mut lists = [vec![0; world as usize], vec![0; world as usize]];
        let matrices: Vec<Matrix> = (0..20)
            .map(|nth| Matrix::random(random(self.seed ^ 11, nth), world, 100_000))
            .collect();
        for (nth, matrix) in (0_u64..).zip(&matrices) {
            lists[0].copy_from_slice(&matrix.sends(rank));
            lists[1].copy_from_slice(&matrix.receives(rank));
            let to = output + nth * 100_000;
            let [send, receive] = &mut lists;
            self.all_to_all_v((to, from), (receive, send), DType::U8)?;
            send.fill(usize::MAX);
            receive.fill(1);
        }
        self.comm.synchronize(&self.stream)?;
        for (nth, matrix) in (0_u64..).zip(&matrices) {
            let wanted = matrix.output(&self.data, rank, 1, MAX_BYTES);
            let got = download(self.pool, output + nth * 100_000, wanted.len())?;
            self.judge(
                &format!("splits_of_the_host_are_reused_at_once, call {nth}"),
                &got,
                &wanted,
            );
        }
        Ok(())
    }

    /// A rank's stream still reads the output of one call long after the others have made the next.
    pub(super) fn a_slow_consumer_reads_what_it_was_sent(&mut self) -> Result<()> {
        const CHANNEL: u32 = 5;
        let (rank, world) = (self.pool.rank(), self.pool.world());
        let (from, to) = (self.inputs[1].address(), self.outputs[1].address());
        let taken = self.outputs[0].address();
        // Loads all kernels first, as loading may wait for running kernels.
        if rank == world - 1 {
            self.comm.signal(0, CHANNEL + 1, &self.stream)?;
        } else if rank == 0 {
            self.comm.wait(world - 1, CHANNEL + 1, Duration::from_secs(20), &self.stream)?;
        }
        for (nth, most) in [(0, 3000), (1, SOME)] {
            let matrices = [0, 1].map(|which| {
                let seed = random(self.seed ^ 13, 2 * nth + which);
                Matrix::new_even(seed, world, most)
            });
            let call = |matrix: &Matrix| {
                let (send, receive) = (matrix.sends(rank), matrix.receives(rank));
                self.all_to_all_v((to, from), (&receive, &send), DType::U8)
            };
            call(&matrices[0])?;
            let wanted = matrices[0].output(&self.data, rank, 1, MAX_BYTES);
            if rank == 0 {
                // The copy waits until the last rank signals, which is long after that rank's own next call.
                self.comm.wait(world - 1, CHANNEL, Duration::from_secs(20), &self.stream)?;
                // SAFETY: blocks of this rank, as long.
                unsafe {
                    self.comm.get_at(
                        taken as *mut u8,
                        to as *const u8,
                        wanted.len(),
                        rank,
                        &self.stream,
                    )
                }?;
            }
            call(&matrices[1])?;
            if rank == world - 1 {
                std::thread::sleep(Duration::from_millis(1500));
                self.comm.signal(0, CHANNEL, &crate::cuda::stream(self.pool)?)?;
            }
            self.comm.synchronize(&self.stream)?;
            if rank == 0 {
                let got = download(self.pool, taken, wanted.len())?;
                self.judge("a_slow_consumer_reads_what_it_was_sent, first call", &got, &wanted);
            }
            let wanted = matrices[1].output(&self.data, rank, 1, MAX_BYTES);
            let got = download(self.pool, to, wanted.len())?;
            self.judge("a_slow_consumer_reads_what_it_was_sent, second call", &got, &wanted);
        }
        Ok(())
    }
}
