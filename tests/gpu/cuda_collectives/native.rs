//! Checks of kernels that programs bring along: those of docs/kernels.md, and wrong ones.

use std::time::{Duration, Instant};

use symmpool_allocator::{Block, Pool, Result, Stream};
use symmpool_collectives::{
    Algorithm, Communicator, CommunicatorOptions, DType, NativeKernel, ReduceOp, Request,
    StandardCollective,
};

use crate::all_to_all::with_empty_words;
use crate::cuda::{download, stream, upload};
use crate::oracle::{differs, input, random, reduce};
use crate::{MAX_LATE, Options, expect_error};

const DOCUMENT: &str = include_str!("../../../docs/kernels.md");
const ALL_TO_ALL: &str = include_str!("my_all_to_all.cu");
const ROOM: usize = 6 << 20;
/// Bytes whose vectors would lie far behind the memory of a communicator that has little.
const BEYOND: usize = 128 << 20;

/// The kernels of the document.
pub(crate) fn kernels() -> Vec<NativeKernel> {
    let found = DOCUMENT.split("```cuda\n").skip(1).map(|block| {
        let text = block.split("```").next().expect("its end");
        let (_, rest) = text.split_once("__global__ void ").expect("a kernel");
        let name = rest.split('(').next().expect("a name");
        let collective = match name {
            _ if name.starts_with("my_all_reduce") => StandardCollective::AllReduce,
            _ => StandardCollective::AllGather,
        };
        let of_vectors = name.starts_with("my_all_gather_of_vectors");
        NativeKernel {
            output_window: collective == StandardCollective::AllGather,
            in_place: true,
            // Those that send to an inbox: what it has room for with eight ranks.
            max_bytes: match of_vectors {
                true => Some(32 << 20),
                false => collective.reduces().then_some(4 << 20),
            },
            // The document says so of that kernel.
            blocks: (name == "my_all_gather_of_vectors_ahead").then_some(256),
            ..NativeKernel::new(collective, name, text)
        }
    });
    found.collect()
}

/// How many parts the longer one of a kernel's input and output has: those of the document reduce or gather.
pub(crate) fn parts(kernel: &NativeKernel, world: u32) -> usize {
    if kernel.collective.reduces() { 1 } else { world as usize }
}

/// Those, and an all-to-all.
fn checked() -> Vec<NativeKernel> {
    let all_to_all = NativeKernel::new(StandardCollective::AllToAll, "my_all_to_all", ALL_TO_ALL);
    kernels().into_iter().chain([all_to_all]).collect()
}

pub(crate) fn run(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let buffers = [pool.alloc::<u8>(ROOM)?, pool.alloc::<u8>(ROOM)?];
    pool.commit()?;
    let comm = Communicator::with_options(pool, &options.communicator())?;
    let stream = stream(pool)?;
    let mut native = NativeChecks { pool, comm, buffers, stream, cases: 0, wrong: 0 };
    for kernel in checked() {
        native.kernel(&kernel, options, &[0, 1, 1000, 16_411, 100_003])?;
    }
    // The last two of four calls are those in which flags and marks of old calls expire; then where epochs repeat.
    for first_epoch in [(1 << 30) - 2, u32::MAX - 1] {
        for kernel in checked() {
            let started = CommunicatorOptions { first_epoch, ..options.communicator() };
            native.comm = Communicator::with_options(pool, &started)?;
            native.kernel(&kernel, options, &[1000, 16_411])?;
        }
    }
    native.refusals()?;
    native.beyond_the_inbox()?;
    native.in_place_on_one_rank(options)?;
    Ok((native.cases, native.wrong))
}

struct NativeChecks<'a> {
    pool: &'a Pool,
    comm: Communicator,
    buffers: [Block<u8>; 2],
    stream: Stream,
    cases: u64,
    wrong: u64,
}

impl NativeChecks<'_> {
    /// # Safety
    ///
    /// Both buffers hold the call's data, and nothing else uses them.
    unsafe fn execute(
        &self,
        algorithm: &Algorithm,
        (from, to): (u64, u64),
        count: usize,
        dtype: DType,
    ) -> Result<()> {
        let (to, from) = (to as *mut u8, from as *const u8);
        let sum = ReduceOp::Sum;
        // SAFETY: the caller promised that both buffers hold the data of the call, and that nothing else uses them.
        unsafe {
            self.comm.call(&Request::at(algorithm, to, from, count, dtype).op(sum), &self.stream)
        }
    }

    fn kernel(&mut self, kernel: &NativeKernel, options: &Options, counts: &[usize]) -> Result<()> {
        let rank = self.pool.rank();
        let algorithm = Algorithm::native(kernel.clone())?;
        self.comm.register(algorithm.clone())?;
        let reduces = kernel.collective.reduces();
        let types: &[DType] =
            if reduces { &[DType::Bf16, DType::I64] } else { &[DType::Bf16, DType::U8] };
        for (nth, &count) in counts.iter().enumerate() {
            for &dtype in types {
                if options.quick && nth % 2 == 0 && nth > 0 {
                    continue;
                }
                let number = random(options.seed, self.cases);
                // Ranks have as many blocks whatever their SM budgets, here different ones in half of the cases.
                let budget = number.is_multiple_of(2).then_some(2 + 3 * rank);
                self.comm.set_sm_budget(budget)?;
                let all = self.inputs(kernel.collective, number, dtype, count);
                let all: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
                let shift = number % 3 * dtype.size() as u64;
                let [from, to] = [0, 1].map(|which: usize| self.buffers[which].address() + shift);
                let bytes = count * dtype.size();
                let wanted = match kernel.collective {
                    StandardCollective::AllReduce => reduce(&all, dtype, ReduceOp::Sum),
                    StandardCollective::AllToAll => {
                        let mine = |data: &&[u8]| data[rank as usize * bytes..][..bytes].to_vec();
                        all.iter().flat_map(mine).collect()
                    }
                    _ => all.concat(),
                };
                upload(self.pool, to, &vec![0xa5; wanted.len() + 16])?;
                upload(self.pool, from, all[rank as usize])?;
                // SAFETY: both buffers are longer.
                unsafe { self.execute(&algorithm, (from, to), count, dtype) }?;
                self.comm.synchronize(&self.stream)?;
                let got = download(self.pool, to, wanted.len() + 16)?;
                let (result, beyond) = got.split_at(wanted.len());
                self.cases += 1;
                let differs = differs(result, &wanted, dtype);
                if differs.is_some() || beyond.iter().any(|byte| *byte != 0xa5) {
                    self.wrong += 1;
                    println!("rank {rank}: {} of {count} {dtype:?}: {differs:?}", kernel.name);
                }
            }
        }
        self.comm.set_sm_budget(None)?;
        if rank == 0 {
            println!("native {}: {} cases, {} wrong", kernel.name, self.cases, self.wrong);
        }
        Ok(())
    }

    /// Makes the inputs of every rank for a call.
    fn inputs(
        &self,
        collective: StandardCollective,
        seed: u64,
        dtype: DType,
        count: usize,
    ) -> Vec<Vec<u8>> {
        let world = self.pool.world();
        let each = |rank| match collective {
            StandardCollective::AllToAll => {
                with_empty_words(seed, input(seed, rank, dtype, count * world as usize))
            }
            _ => input(seed, rank, dtype, count),
        };
        (0..world).map(each).collect()
    }

    /// Kernels that cannot run are errors on all ranks, which say what is wrong; the communicator stays usable.
    fn refusals(&mut self) -> Result<()> {
        let wrong = [
            ("no_such", "extern \"C\" __global__ void other(int) {}", "no kernel no_such"),
            (
                "broken",
                "\n\nextern \"C\" __global__ void broken() { undeclared = 1; }",
                "broken.cu",
            ),
        ];
        let at = self.buffers[0].address();
        for (name, source, words) in wrong {
            let algorithm =
                Algorithm::native(NativeKernel::new(StandardCollective::AllReduce, name, source))?;
            // SAFETY: the buffer is longer.
            let result = unsafe { self.execute(&algorithm, (at, at + 4096), 8, DType::F32) };
            let error = expect_error(result, name)?;
            self.cases += 1;
            if !error.is_invalid_argument() || !error.to_string().contains(words) {
                self.wrong += 1;
                println!("rank {}: {name}: {error}", self.pool.rank());
            }
        }
        for kernel in kernels() {
            if kernel.max_bytes.is_none() {
                continue;
            }
            let count = 1000;
            let most = count * parts(&kernel, self.pool.world()) as u64 - 1;
            let algorithm = Algorithm::native(NativeKernel { max_bytes: Some(most), ..kernel })?;
            // SAFETY: the call is refused.
            let result = unsafe { self.execute(&algorithm, (at, at), count as usize, DType::U8) };
            let error = expect_error(result, "a call that is too long")?;
            self.cases += 1;
            if !error.is_unsupported() {
                self.wrong += 1;
                println!("rank {}: {}: {error}", self.pool.rank(), algorithm.name());
            }
        }
        self.comm.barrier(&self.stream)?;
        self.comm.synchronize(&self.stream)
    }

    /// A kernel that takes more vectors than its inbox has room for waits until the timeout, and touches nothing else: the
    /// place of a vector that has no room may be no memory.
    fn beyond_the_inbox(&mut self) -> Result<()> {
        let little = CommunicatorOptions {
            device_inbox_bytes: Some(1 << 20),
            device_scratch_bytes: Some(1 << 20),
            timeout: Duration::from_secs(1),
            ..CommunicatorOptions::default()
        };
        let buffer = self.pool.alloc::<u8>(2 * BEYOND)?;
        self.pool.commit()?;
        let (at, to) = (buffer.address(), buffer.address() + BEYOND as u64);
        let fits = |kernel: &NativeKernel| !kernel.source.contains("LlChannel");
        for kernel in kernels().into_iter().filter(|kernel| !fits(kernel)) {
            let algorithm = Algorithm::native(NativeKernel { max_bytes: None, ..kernel })?;
            let comm = Communicator::with_options(self.pool, &little)?;
            let (to, from, sum) = (to as *mut u8, at as *const u8, ReduceOp::Sum);
            let (count, dtype) = (BEYOND / 4, DType::F32);
            // SAFETY: both halves of the buffer are as long.
            let called = unsafe {
                comm.call(&Request::at(&algorithm, to, from, count, dtype).op(sum), &self.stream)
            };
            let ended = called.and_then(|()| comm.synchronize(&self.stream));
            self.cases += 1;
            if !ended.as_ref().is_err_and(symmpool_allocator::Error::is_timeout) {
                self.wrong += 1;
                println!("rank {}: {}: {ended:?}", self.pool.rank(), algorithm.name());
            }
        }
        self.comm.barrier(&self.stream)?;
        self.comm.synchronize(&self.stream)
    }

    /// Ranks that are in place and ranks that are not make different calls.
    fn in_place_on_one_rank(&mut self, options: &Options) -> Result<()> {
        let is_reduced = |kernel: &NativeKernel| {
            kernel.in_place && kernel.collective == StandardCollective::AllReduce
        };
        let Some(kernel) = kernels().into_iter().find(is_reduced) else { return Ok(()) };
        let algorithm = Algorithm::native(kernel)?;
        let comm = Communicator::with_options(self.pool, &options.communicator())?;
        let at = self.buffers[0].address();
        let to = if self.pool.rank() == 0 { at } else { at + 8192 } as *mut u8;
        let (from, op) = (at as *const u8, ReduceOp::Sum);
        // SAFETY: the buffer is longer.
        let result = unsafe {
            comm.call(&Request::at(&algorithm, to, from, 8, DType::F32).op(op), &self.stream)
        };
        let result = result.and_then(|()| comm.synchronize(&self.stream));
        let error = expect_error(result, "in place on rank 0 alone")?;
        self.cases += 1;
        if !error.is_diverged() {
            self.wrong += 1;
            println!("rank {}: {}: {error}", self.pool.rank(), algorithm.name());
        }
        Ok(())
    }
}

/// A rank with another source, and ranks that wait for what never comes: errors in bounded time.
pub(crate) fn faults(pool: &Pool, timeout: Duration) -> Result<u32> {
    const LAZY: &str = "
        #include <symmpool/device.cuh>
        using namespace symmpool;
        extern \"C\" __global__ void lazy(const __grid_constant__ DeviceComm comm,
                                        const __grid_constant__ DeviceCall call) {
            Collective collective(comm, call);
            if (collective && MemoryChannel(collective, comm.after(1)).wait()) {
                call.output[0] = 1;
            }
        }";
    let block = pool.alloc::<u8>(1 << 20)?;
    pool.commit()?;
    let (rank, stream) = (pool.rank(), stream(pool)?);
    let options = CommunicatorOptions { timeout, ..Default::default() };
    let call = |comm: &Communicator, algorithm: &Algorithm| {
        let (to, from) = (block.address() as *mut u8, (block.address() + 8192) as *const u8);
        // SAFETY: the block is longer.
        unsafe { comm.call(&Request::at(algorithm, to, from, 8, DType::F32), &stream) }
    };
    let lazy = Algorithm::native(NativeKernel::new(StandardCollective::AllReduce, "lazy", LAZY))?;
    let other = LAZY.replace("output[0] = 1", "output[0] = 2");
    let other =
        Algorithm::native(NativeKernel::new(StandardCollective::AllReduce, "lazy", &other))?;
    let mut wrong = 0;
    for (name, algorithm) in
        [("lazy", &lazy), ("another source", if rank == 0 { &lazy } else { &other })]
    {
        // Compiles the kernel before anything is timed.
        let first = Communicator::with_options(pool, &options)?;
        call(&first, algorithm)?;
        expect_error(first.synchronize(&stream), name)?;
        let comm = Communicator::with_options(pool, &options)?;
        let began = Instant::now();
        let result = call(&comm, algorithm).and_then(|()| comm.synchronize(&stream));
        let error = expect_error(result, name)?;
        let took = began.elapsed();
        let is_right = if name == "lazy" { error.is_timeout() } else { error.is_diverged() };
        if !is_right || took > timeout + MAX_LATE {
            wrong += 1;
            println!("rank {rank}: {name}, after {took:?}: {error}");
        }
    }
    Ok(wrong)
}
