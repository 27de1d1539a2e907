//! How long dispatch to experts and combine take: graphs of calls, for as many experts and channels as large models have.

use symmpool_allocator::{Pool, Result, Stream};
use symmpool_collectives::{
    CombineAt, Communicator, DType, DispatchAt, ExpertBuffer, ExpertLayout, ExpertQuantization,
    ExpertShape,
};

use crate::cuda::{CallGraph, StreamTimer, stream, upload};
use crate::oracle::random;
use crate::{ORDINARY, Options};

const CALLS: usize = 20;
const HIDDEN: usize = 7168;
const EXPERTS: u32 = 256;
const TOP_K: u32 = 8;
const MAX_TOKENS: usize = 4096;

/// Prints a line for each number of tokens and SMs. Returns how many lines, of which none is wrong.
pub(crate) fn run(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let ordinary = pool.lane(ORDINARY)?;
    let room = |bytes: usize| ordinary.alloc_bytes(bytes, 512, Stream::DEFAULT);
    let world = pool.world() as usize;
    let row = 2 * HIDDEN;
    let (input, result) = (room(MAX_TOKENS * row)?, room(MAX_TOKENS * row)?);
    let (ids, weights) =
        (room(MAX_TOKENS * TOP_K as usize * 4)?, room(MAX_TOKENS * TOP_K as usize * 4)?);
    let rows = room(MAX_TOKENS * TOP_K as usize * world * row)?;
    let scales = room(MAX_TOKENS * TOP_K as usize * world * HIDDEN / 32)?;
    let handle = room(64 << 20)?;
    pool.commit()?;
    let stream = stream(pool)?;
    let comm = Communicator::with_options(pool, &options.communicator())?;
    let clock = StreamTimer::new(pool, 1)?;
    let mut lines = 0;
    for num_sms in [None, Some(24)] {
        let (max_tokens, dtype) = (MAX_TOKENS, DType::Bf16);
        let shape = ExpertShape {
            hidden: HIDDEN,
            experts: EXPERTS,
            top_k: TOP_K,
            max_tokens,
            dtype,
            capacity: None,
        };
        let buffer = ExpertBuffer::new(&comm, shape, num_sms)?;
        pool.commit()?;
        for tokens in [1, 8, 128, 512, MAX_TOKENS] {
            // The experts of a token lie far from each other, so nearly every token has some on each rank.
            let id = |at: usize| {
                let (token, k) = (at / TOP_K as usize, (at % TOP_K as usize) as u32);
                let first = random(options.seed ^ u64::from(pool.rank()), token as u64);
                ((first % u64::from(EXPERTS)) as u32 + k * (EXPERTS / TOP_K)) % EXPERTS
            };
            let own = (0..tokens * TOP_K as usize).flat_map(|at| id(at).to_le_bytes());
            upload(pool, ids.address(), &own.collect::<Vec<u8>>())?;
            let (input, output) = (input.as_ptr().cast_const().cast(), result.as_ptr().cast());
            let fresh = DispatchAt {
                input,
                quantized: false,
                scales: std::ptr::null(),
                scale_bytes: 0,
                scale_dtype: DType::U8,
                tokens,
                ids: ids.as_ptr().cast(),
                ids_dtype: DType::I32,
                weights: weights.as_ptr().cast(),
                quantize: ExpertQuantization::None,
                layout: ExpertLayout::ByRank,
                known: false,
                more: 0,
            };
            let known = DispatchAt { known: true, ..fresh };
            let (fp8, fp8_known) = (
                DispatchAt { quantize: ExpertQuantization::Fp8, ..fresh },
                DispatchAt { quantize: ExpertQuantization::Fp8, ..known },
            );
            let layout = ExpertLayout::ByExpert {
                output: rows.as_ptr().cast(),
                scales: scales.as_ptr().cast(),
                capacity: buffer.capacity(true, 1),
                alignment: 1,
            };
            let back = CombineAt {
                input: rows.as_ptr().cast_const().cast(),
                input_rows: usize::MAX,
                output,
                tokens,
                weights: std::ptr::null(),
                by_expert: false,
                more: 0,
            };
            let at = handle.as_ptr().cast();
            // SAFETY: the blocks are as long as these calls need, and nothing else uses them; so it is below.
            let dispatch = |call: &DispatchAt| unsafe { buffer.dispatch_at(at, call, &stream) };
            // SAFETY: the blocks are as long as these calls need, and nothing else uses them.
            let combine = |call: &CombineAt| unsafe { buffer.combine_at(at, call, &stream) };
            let mut times = Vec::new();
            let mut time = |what: &str, call: &dyn Fn() -> Result<()>| -> Result<()> {
                call()?;
                comm.synchronize(&stream)?;
                let graph =
                    CallGraph::capture(pool, stream, || (0..CALLS).try_for_each(|_| call()))?;
                let mut best = f64::MAX;
                for _ in 0..12 {
                    best = best.min(clock.time(pool, stream, || graph.launch(pool, stream))?);
                }
                comm.synchronize(&stream)?;
                graph.destroy(pool)?;
                times.push(format!("{what} {:.1}", best / CALLS as f64));
                Ok(())
            };
            time("dispatch", &|| dispatch(&fresh))?;
            time("known", &|| dispatch(&known))?;
            time("combine", &|| combine(&back))?;
            time("both", &|| dispatch(&fresh).and_then(|()| combine(&back)))?;
            time("fp8", &|| dispatch(&fp8))?;
            time("fp8 known", &|| dispatch(&fp8_known))?;
            if tokens < MAX_TOKENS {
                time("by expert", &|| dispatch(&DispatchAt { layout, ..fresh }))?;
                time("fp8", &|| dispatch(&DispatchAt { layout, ..fp8 }))?;
                let back = CombineAt { weights: weights.as_ptr().cast(), by_expert: true, ..back };
                time("combine", &|| combine(&back))?;
            }
            lines += 1;
            if pool.rank() == 0 {
                println!("{tokens} tokens, SMs {num_sms:?}, us: {}", times.join(", "));
            }
        }
    }
    Ok((lines, 0))
}
