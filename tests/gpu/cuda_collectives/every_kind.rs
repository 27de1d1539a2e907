//! One call of every kind, and of every way through it: for checks of what must hold for all calls alike.

use symmpool_allocator::{Block, Pool, Result, Stream};
use symmpool_collectives::{
    Algorithm, AllReduceAlgorithm, CombineAt, Communicator, CommunicatorOptions, DType, DispatchAt,
    ExpertBuffer, ExpertLayout, ExpertQuantization, ExpertShape, FusedAlgorithm, NormBuffers,
    NormOutput, NormShape, ReduceOp, Request, SplitRows, SplitsAt, StandardCollective,
    checked_exchanges, checked_reduce_scatters,
};

use crate::cuda::{download, upload};
use crate::matmul::Matmul;
use crate::oracle::input;
use crate::{ORDINARY, Options, native, plans};

/// Bytes of the input and of the output.
const ROOM: usize = 8 << 20;
const POISON: u8 = 0xa5;

type Make<'a> = Box<dyn Fn(&Communicator, &Stream) -> Result<()> + 'a>;

/// A kind of call.
pub(crate) struct CallKind<'a> {
    pub(crate) name: String,
    /// The options of its communicators.
    pub(crate) options: CommunicatorOptions,
    make: Make<'a>,
    /// Output of the call: its address and its length in bytes.
    output: (u64, usize),
    /// Memory that must hold zeros before the first call of a communicator.
    zeros: (u64, usize),
}

impl CallKind<'_> {
    /// Makes the call.
    pub(crate) fn call(&self, comm: &Communicator, stream: &Stream) -> Result<()> {
        (self.make)(comm, stream)
    }

    /// You must call this before the first call of a communicator, when no rank makes calls of another one.
    pub(crate) fn reset(&self, pool: &Pool) -> Result<()> {
        upload(pool, self.zeros.0, &vec![0; self.zeros.1])
    }

    /// Poisons what the call writes.
    pub(crate) fn poison(&self, pool: &Pool) -> Result<()> {
        upload(pool, self.output.0, &vec![POISON; self.output.1])
    }

    /// Returns the output of the call.
    pub(crate) fn written(&self, pool: &Pool) -> Result<Vec<u8>> {
        download(pool, self.output.0, self.output.1)
    }
}

/// The memory of all kinds, and what their calls are given.
pub(crate) struct EveryKind<'a> {
    pool: &'a Pool,
    matmul: Matmul<'a>,
    usual: CommunicatorOptions,
    windows: [Block<u8>; 2],
    ordinary: [Block<u8>; 2],
    splits: Block<i64>,
    waits: Block<i64>,
    ids: Block<i32>,
    handle: Block<u8>,
    region: Block<u8>,
    shape: ExpertShape,
}

impl<'a> EveryKind<'a> {
    /// Allocates what the calls need. `usual` are the options of their communicators.
    pub(crate) fn new(
        pool: &'a Pool,
        options: &'a Options,
        usual: CommunicatorOptions,
    ) -> Result<Self> {
        let world = pool.world();
        let ordinary = pool.lane(ORDINARY)?;
        let (tokens, experts, dtype) = (150, 2 * world, DType::Bf16);
        let shape =
            ExpertShape { hidden: 256, experts, top_k: 2, max_tokens: 200, dtype, capacity: None };
        let region = ExpertBuffer::<&Communicator>::region_bytes(shape, pool.rank(), world)?;
        let every = Self {
            pool,
            matmul: Matmul::new(pool, options)?,
            usual,
            windows: [pool.alloc(ROOM)?, pool.alloc(ROOM)?],
            ordinary: [ordinary.alloc(ROOM)?, ordinary.alloc(ROOM)?],
            splits: pool.alloc(world as usize)?,
            waits: pool.alloc(world as usize)?,
            ids: pool.alloc(2 * tokens)?,
            handle: pool.alloc(1 << 20)?,
            region: pool.alloc(region)?,
            shape,
        };
        pool.commit()?;
        let data = input(options.seed, pool.rank(), DType::Bf16, ROOM / 2);
        for block in [&every.windows[0], &every.ordinary[0]] {
            upload(pool, block.address(), &data)?;
        }
        let splits = 1000_i64.to_le_bytes().repeat(world as usize);
        upload(pool, every.splits.address(), &splits)?;
        let ids =
            (0..2 * tokens as u32).flat_map(|at| ((at * 7 + pool.rank()) % experts).to_le_bytes());
        upload(pool, every.ids.address(), &ids.collect::<Vec<u8>>())?;
        Ok(every)
    }

    /// Every kind, with so much data that calls go in several pieces, or with less. All ranks make them in the same order.
    pub(crate) fn all(&self, in_pieces: bool) -> Result<Vec<CallKind<'_>>> {
        let some = |count: usize| if in_pieces { count } else { count / 16 };
        // Little room, so that large calls go in several pieces.
        let little = CommunicatorOptions {
            device_inbox_bytes: Some(2 << 20),
            device_scratch_bytes: Some(1 << 20),
            ..self.usual.clone()
        };
        let mut all = Vec::new();
        let [windows, ordinary] = [&self.windows, &self.ordinary];
        for algorithm in AllReduceAlgorithm::ALL {
            use AllReduceAlgorithm as A;
            let count = match algorithm.checked() {
                Some(checked) if checked.cases.in_pieces => some(checked.cases.count),
                Some(checked) => checked.cases.count,
                None if matches!(algorithm, A::OneShot | A::TwoShot) => some(1_800_000),
                None => continue,
            };
            let options = CommunicatorOptions { algorithm, ..little.clone() };
            let all_reduce = StandardCollective::AllReduce;
            all.push(self.standard((all_reduce, None), windows, count, options.clone()));
            if algorithm.checked().is_some_and(|checked| checked.cases.by_copies) {
                let options = CommunicatorOptions { beside_compute: true, ..options };
                all.push(self.standard((all_reduce, None), ordinary, count, options));
            }
        }
        use StandardCollective::{AllGather, AllToAll, Broadcast, ReduceScatter};
        let world = self.pool.world() as usize;
        let (part, whole) = (some(3_000_000) / world, some(1_500_000));
        let mut kinds = Vec::new();
        for (name, cases) in checked_reduce_scatters() {
            kinds.push((ReduceScatter, Some(name), part, false));
            kinds.extend(cases.by_copies.then_some((ReduceScatter, Some(name), part, true)));
        }
        for (collective, count) in [(AllGather, part), (Broadcast, whole), (AllToAll, part)] {
            kinds.push((collective, None, count, false));
            kinds.extend(
                checked_exchanges(collective).map(|name| (collective, Some(name), count, false)),
            );
        }
        for (collective, algorithm, count, beside_compute) in kinds {
            let options = CommunicatorOptions { beside_compute, ..little.clone() };
            all.push(self.standard((collective, algorithm), windows, count, options));
        }
        let gather = (AllGather, Some("copy"));
        let options = CommunicatorOptions { beside_compute: true, ..little.clone() };
        all.push(self.standard(gather, ordinary, part, options));
        all.push(self.splits(&little));
        all.push(self.norm(&little, if in_pieces { 300 } else { 20 }));
        all.push(self.barrier(&little));
        all.push(self.experts(&little));
        all.extend(self.programs(&little, some(1_500_000)));
        if self.matmul.comm.has_tensor_kernels() {
            let products = self.matmul.calls_of_matmuls()?;
            for (name, make, output, zeros) in products {
                for concurrent in [1, 2] {
                    let options =
                        CommunicatorOptions { concurrent: Some(concurrent), ..self.usual.clone() };
                    let name = format!("{name}, {concurrent} at once");
                    let make = std::rc::Rc::clone(&make);
                    let make =
                        Box::new(move |comm: &Communicator, stream: &Stream| make(comm, stream));
                    all.push(CallKind { name, options, make, output, zeros });
                }
            }
        }
        Ok(all)
    }

    fn standard<'b>(
        &'b self,
        (collective, algorithm): (StandardCollective, Option<&'static str>),
        [from, to]: &'b [Block<u8>; 2],
        count: usize,
        options: CommunicatorOptions,
    ) -> CallKind<'b> {
        let by = algorithm.unwrap_or(options.algorithm.name());
        let beside = if options.beside_compute { ", beside compute" } else { "" };
        let memory =
            if from.address() == self.windows[0].address() { "windows" } else { "ordinary memory" };
        let name = format!("{} by {by}, {memory}{beside}", collective.name());
        let (world, root) = (self.pool.world() as usize, self.pool.world() - 1);
        let parts = match collective {
            StandardCollective::AllGather | StandardCollective::AllToAll => world,
            _ => 1,
        };
        let (input, output) = (from.address(), to.address());
        let is_root = collective == StandardCollective::Broadcast && self.pool.rank() == root;
        let input = if collective == StandardCollective::Broadcast { output } else { input };
        let make = move |comm: &Communicator, stream: &Stream| {
            let (dtype, op) = (DType::Bf16, ReduceOp::Sum);
            let (to, from) = (output as *mut u8, input as *const u8);
            // SAFETY: both blocks have room for the call, and nothing else uses them.
            unsafe {
                comm.call(
                    &Request::at(collective, to, from, count, dtype)
                        .op(op)
                        .root(root)
                        .algorithm(algorithm),
                    stream,
                )
            }
        };
        // The root's data stays as it is: all zeros.
        let written = if is_root { 0 } else { 2 * count * parts };
        CallKind {
            name,
            options,
            make: Box::new(make),
            output: (output, written),
            zeros: (output, 0),
        }
    }

    fn splits(&self, options: &CommunicatorOptions) -> CallKind<'_> {
        let (world, null) = (self.pool.world() as usize, std::ptr::null_mut());
        let [from, to] = &self.windows;
        let length = 1000 * world;
        let rows = SplitRows { dtype: DType::Bf16, row: 64, length, capacity: length };
        let input = self.splits.as_ptr().cast_const().cast();
        let splits = SplitsAt { input, output: null, offsets: null, dtype: DType::I64 };
        let make = move |comm: &Communicator, stream: &Stream| {
            // SAFETY: both blocks have room for the rows, and nothing else uses them; there is a split for each rank.
            unsafe {
                comm.all_to_all_v_splits_at(to.as_ptr(), from.as_ptr(), &rows, &splits, stream)
            }
        };
        let (name, output) = ("all_to_all_v of splits".to_owned(), (to.address(), 128 * length));
        CallKind {
            name,
            options: options.clone(),
            make: Box::new(make),
            output,
            zeros: (output.0, 0),
        }
    }

    /// All-reduces of rows that go in several launches.
    fn norm(&self, options: &CommunicatorOptions, tokens: usize) -> CallKind<'_> {
        let shape = NormShape {
            tokens,
            hidden: 4096,
            dtype: DType::Bf16,
            epsilon: 1e-6,
            weight_bias: 0.0,
            output: NormOutput::Norm,
            powers_of_two: false,
            algorithm: FusedAlgorithm::Auto,
        };
        let null = std::ptr::null_mut();
        let [from, to] = &self.windows;
        let buffers = NormBuffers {
            input: from.as_ptr(),
            residual: null,
            weight: self.ordinary[0].as_ptr(),
            bias: null,
            output: to.as_ptr(),
            residual_out: self.ordinary[1].as_ptr(),
            norm_out: null,
            scales: null.cast(),
            token_stride: 1,
            group_stride: 1,
        };
        let make = move |comm: &Communicator, stream: &Stream| {
            // SAFETY: both blocks have room for the call, and nothing else uses them.
            unsafe { comm.all_reduce_norm_at(&shape, &buffers, stream) }
        };
        let output = (to.address(), 2 * tokens * 4096);
        let name = "all_reduce_norm".to_owned();
        CallKind {
            name,
            options: options.clone(),
            make: Box::new(make),
            output,
            zeros: (output.0, 0),
        }
    }

    fn barrier(&self, options: &CommunicatorOptions) -> CallKind<'_> {
        let make = move |comm: &Communicator, stream: &Stream| {
            comm.barrier(stream)?;
            // SAFETY: there is a number for each rank, and nothing else uses them.
            unsafe { comm.measured_barrier_at(self.waits.as_ptr(), stream) }
        };
        let (name, output) = ("barriers".to_owned(), (self.waits.address(), 0));
        CallKind {
            name,
            options: options.clone(),
            make: Box::new(make),
            output,
            zeros: (output.0, 0),
        }
    }

    /// A dispatch, and a combine of what it gave.
    fn experts(&self, options: &CommunicatorOptions) -> CallKind<'_> {
        let [from, to] = &self.windows;
        let make = move |comm: &Communicator, stream: &Stream| {
            // SAFETY: the block is as long as the region of the shape, and of the pool of all communicators here.
            let buffer = unsafe { ExpertBuffer::at(comm, self.shape, None, self.region.as_ptr()) }?;
            assert!(self.handle.len() >= buffer.handle_parts().bytes, "room for the handle");
            let dispatch = DispatchAt {
                input: from.as_ptr(),
                quantized: false,
                scales: std::ptr::null(),
                scale_bytes: 0,
                scale_dtype: DType::U8,
                tokens: self.ids.len() / 2,
                ids: self.ids.as_ptr().cast_const().cast(),
                ids_dtype: DType::I32,
                weights: std::ptr::null(),
                quantize: ExpertQuantization::None,
                layout: ExpertLayout::ByRank,
                known: false,
                more: 0,
            };
            let handle = self.handle.as_ptr();
            // SAFETY: the blocks are as long as the call needs, and nothing else uses them; so it is below.
            unsafe { buffer.dispatch_at(handle, &dispatch, stream) }?;
            let (input, output) = (buffer.received().rows.cast_const(), to.as_ptr());
            let (tokens, weights) = (dispatch.tokens, std::ptr::null());
            let combine = CombineAt {
                input,
                input_rows: usize::MAX,
                output,
                tokens,
                weights,
                by_expert: false,
                more: 0,
            };
            // SAFETY: the blocks are as long as the call needs, and nothing else uses them.
            unsafe { buffer.combine_at(handle, &combine, stream) }
        };
        let output = (to.address(), 2 * self.shape.hidden * self.ids.len() / 2);
        let name = "experts".to_owned();
        CallKind {
            name,
            options: options.clone(),
            make: Box::new(make),
            output,
            zeros: (output.0, 0),
        }
    }

    /// Collectives that programs bring along: plans, one of which goes in several launches, and a kernel.
    fn programs(&self, options: &CommunicatorOptions, long: usize) -> Vec<CallKind<'_>> {
        let [from, to] = &self.windows;
        let plans = plans::all(self.pool.world()).into_iter();
        let plans = plans
            .filter(|plan| ["two_shot", "two_shot_in_scratch_ll"].contains(&plan.name.as_str()));
        let plans = plans.map(|plan| Algorithm::from_plan(plan).expect("a right program"));
        let kernels = native::kernels().into_iter().filter(|kernel| kernel.name == "my_all_reduce");
        let kernels = kernels.map(|kernel| Algorithm::native(kernel).expect("a right kernel"));
        let kind = |algorithm: Algorithm| {
            let count = if algorithm.name().ends_with("_ll") { long } else { 100_000 };
            let name = format!("the program {}", algorithm.name());
            let make = move |comm: &Communicator, stream: &Stream| {
                let (to, from, dtype) = (to.as_ptr(), from.as_ptr(), DType::Bf16);
                // SAFETY: both blocks have room for the call, and nothing else uses them.
                unsafe { comm.call(&Request::at(&algorithm, to, from, count, dtype), stream) }
            };
            let output = (to.address(), 2 * count);
            CallKind {
                name,
                options: options.clone(),
                make: Box::new(make),
                output,
                zeros: (output.0, 0),
            }
        };
        plans.chain(kernels).map(kind).collect()
    }
}
