//! Dispatches to experts and combines among the calls of a soak: in a buffer for few tokens, whose rows travel through
//! inboxes alone, and in one for many.

use std::sync::Arc;

use symmpool_allocator::{Block, Pool, Result, Stream};
use symmpool_collectives::{
    CombineAt, Communicator, DType, DispatchAt, ExpertBuffer, ExpertLayout, ExpertQuantization,
    ExpertShape,
};

use crate::cuda::upload;
use crate::experts::model::{TokenRouting, encode, tokens_of};
use crate::oracle::random;
use crate::tools::Tools;

/// Channels, experts of each rank, experts of a token, and tokens of the buffers.
const SHAPES: [(usize, u32, u32, usize); 2] = [(512, 4, 3, 90), (256, 8, 4, 700)];
/// How many routings each buffer has. Tokens differ as well.
const ROUTINGS: usize = 24;
const DTYPE: DType = DType::Bf16;

/// Arguments and expected results of a call: blocks of one rank.
struct Routed {
    tokens: usize,
    input: Block<u8>,
    ids: Block<u8>,
    weights: Block<u8>,
    wanted: Block<u8>,
}

/// A buffer, and what its calls need.
struct ExpertsBuffer {
    buffer: ExpertBuffer<Arc<Communicator>>,
    handle: Block<u8>,
    output: Block<u8>,
    routed: Vec<Routed>,
}

pub(super) struct Experts(Vec<ExpertsBuffer>);

impl Experts {
    /// Buffers on the first communicator and on the last one.
    pub(super) fn new(pool: &Pool, comms: [&Arc<Communicator>; 2], seed: u64) -> Result<Self> {
        let make = |(nth, shape): (usize, (usize, u32, u32, usize))| {
            let (hidden, local, top_k, max_tokens) = shape;
            let experts = local * pool.world();
            let shape =
                ExpertShape { hidden, experts, top_k, max_tokens, dtype: DTYPE, capacity: None };
            let routed =
                |at: usize| Routed::new(pool, &shape, random(seed ^ 13, (nth * 64 + at) as u64));
            let buffer = ExpertBuffer::new(comms[nth].clone(), shape, None)?;
            Ok(ExpertsBuffer {
                handle: pool.alloc::<u8>(buffer.handle_parts().bytes)?,
                output: pool.alloc::<u8>(max_tokens * hidden * DTYPE.size())?,
                routed: (0..ROUTINGS).map(routed).collect::<Result<_>>()?,
                buffer,
            })
        };
        SHAPES.into_iter().enumerate().map(make).collect::<Result<_>>().map(Self)
    }

    fn of(&self, number: u64) -> (&ExpertsBuffer, &Routed) {
        let calls = &self.0[(number >> 12) as usize % self.0.len()];
        (calls, &calls.routed[(number >> 24) as usize % ROUTINGS])
    }

    /// Sends the tokens of a routing, for every other number once more by the handle, and gets them back. Returns how
    /// many calls that were.
    pub(super) fn call(&self, number: u64, stream: &Stream) -> Result<u64> {
        let (calls, routed) = self.of(number);
        let (buffer, handle) = (&calls.buffer, calls.handle.as_ptr().cast());
        let mut dispatch = DispatchAt {
            input: routed.input.as_ptr(),
            quantized: false,
            scales: std::ptr::null(),
            scale_bytes: 0,
            scale_dtype: DType::U8,
            tokens: routed.tokens,
            ids: routed.ids.as_ptr(),
            ids_dtype: DType::I64,
            weights: routed.weights.as_ptr().cast::<f32>(),
            quantize: ExpertQuantization::None,
            layout: ExpertLayout::ByRank,
            known: false,
            more: 0,
        };
        let combine = CombineAt {
            input: buffer.received().rows,
            input_rows: usize::MAX,
            output: calls.output.as_ptr().cast(),
            tokens: routed.tokens,
            weights: std::ptr::null(),
            by_expert: false,
            more: 0,
        };
        let again = number >> 40 & 1 == 1;
        // SAFETY: the blocks are as long as the calls need, and only calls on this stream use them.
        unsafe { buffer.dispatch_at(handle, &dispatch, stream) }?;
        if again {
            dispatch.known = true;
            // SAFETY: the blocks are as long as the calls need, and only calls on this stream use them.
            unsafe { buffer.dispatch_at(handle, &dispatch, stream) }?;
        }
        // SAFETY: the blocks are as long as the calls need, and only calls on this stream use them.
        unsafe { buffer.combine_at(handle, &combine, stream) }?;
        Ok(2 + u64::from(again))
    }

    /// Compares the sums of the call of that number.
    pub(super) fn compare(
        &self,
        number: u64,
        call: u64,
        tools: &Tools<'_>,
        stream: &Stream,
    ) -> Result<()> {
        let (calls, routed) = self.of(number);
        let bytes = routed.tokens * calls.buffer.shape().hidden * DTYPE.size();
        if bytes == 0 {
            return Ok(());
        }
        tools.compare(calls.output.address(), routed.wanted.address(), bytes, call, stream)
    }
}

impl Routed {
    fn new(pool: &Pool, shape: &ExpertShape, seed: u64) -> Result<Self> {
        let (rank, world, hidden) = (pool.rank(), pool.world(), shape.hidden);
        let routing = TokenRouting::random(seed, world, shape);
        let own = rank as usize;
        let tokens = routing.ids[own].len();
        // Every rank allocates the same.
        let put = |bytes: Vec<u8>, each: usize| {
            let block = pool.alloc::<u8>(shape.max_tokens * each)?;
            if !bytes.is_empty() {
                upload(pool, block.address(), &bytes)?;
            }
            Ok(block)
        };
        let ids = routing.ids[own].iter().flatten().flat_map(|id| id.to_le_bytes()).collect();
        let weights = routing.weights[own].iter().flatten();
        let weights = weights.flat_map(|weight| weight.to_le_bytes()).collect();
        let wanted = encode(DTYPE, routing.combined(rank, seed, hidden, false));
        let (row, top_k) = (hidden * DTYPE.size(), shape.top_k as usize);
        Ok(Self {
            tokens,
            input: put(tokens_of(seed, own, tokens, shape), row)?,
            ids: put(ids, 8 * top_k)?,
            weights: put(weights, 4 * top_k)?,
            wanted: put(wanted, row)?,
        })
    }
}
