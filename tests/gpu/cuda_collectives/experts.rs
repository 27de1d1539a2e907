//! Checks dispatch to experts and combine against a model that moves one row at a time: random routings in both layouts,
//! quantised and not, with handles that are used again, and graphs whose routing changes between replays.

mod cases;
pub(crate) mod damage;
mod handles;
pub(crate) mod model;
pub(crate) mod time;

use symmpool_allocator::{Block, Pool, Result, Stream};
use symmpool_collectives::{
    CombineAt, Communicator, CommunicatorOptions, DType, DispatchAt, ExpertBuffer, ExpertLayout,
    ExpertQuantization, ExpertShape, ReceivedSizes,
};

use self::model::{TokenRouting, channel, encode, tokens_of};
use crate::cuda::{download, stream, upload};
use crate::oracle::random;
use crate::{ORDINARY, Options};

const POISON: u8 = 0xa5;

/// Shapes: channels, experts of each rank, experts of a token, tokens.
const SHAPES: [(usize, u32, u32, usize); 6] = [
    (8, 1, 1, 5),
    (128, 4, 2, 700),
    (256, 3, 6, 130),
    (384, 16, 8, 40),
    (1024, 5, 12, 9),
    (16, 64, 8, 300),
];

type BorrowedBuffer<'a> = ExpertBuffer<&'a Communicator>;

struct Check<'a> {
    pool: &'a Pool,
    stream: Stream,
    input: Block<u8>,
    ids: Block<u8>,
    weights: Block<u8>,
    output: Block<u8>,
    scales: Block<u8>,
    rows: Block<u8>,
    result: Block<u8>,
    handles: [Block<u8>; 2],
    cases: u64,
    wrong: u64,
}

/// Runs the checks. Returns how many cases there were, and how many of them were wrong.
pub(crate) fn run(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let mut check = Check::new(pool)?;
    let comm = Communicator::with_options(pool, &options.communicator())?;
    for (nth, (hidden, local, top_k, max_tokens)) in SHAPES.into_iter().enumerate() {
        let experts = local * pool.world();
        for dtype in [DType::F32, DType::Bf16] {
            let (top_k, capacity) = (top_k.min(experts), None);
            let shape = ExpertShape { hidden, experts, top_k, max_tokens, dtype, capacity };
            let num_sms = [None, Some(2), Some(7)][(nth + dtype as usize) % 3];
            let buffer = ExpertBuffer::new(&comm, shape, num_sms)?;
            for call in 0..options.few(12, 2) {
                let seed = random(options.seed ^ 77, 1000 * nth as u64 + 10 * dtype as u64 + call);
                check.by_rank(&buffer, seed)?;
                check.by_expert(&buffer, seed)?;
                check.packed(&buffer, seed)?;
                if hidden.is_multiple_of(128) {
                    check.quantized(&buffer, seed)?;
                }
            }
            if nth == 1 {
                for exact in [false, true] {
                    check.bad_ids(&buffer, options.seed, exact)?;
                }
                check.graphs(&buffer, options.seed)?;
                // Through inboxes, and with flags.
                for tokens in [3, max_tokens.min(200)] {
                    check.wrong_handles(&buffer, tokens, options.seed)?;
                }
            }
        }
    }
    check.many(&comm, options.seed)?;
    for exact in [false, true] {
        check.overflow(&comm, options.seed, exact)?;
    }
    check.exact_faults(&options.communicator())?;
    // Call numbers that overflow, and those at which old flags are overwritten.
    for first_epoch in [1, (1 << 30) - 4, u32::MAX - 5] {
        let comm = CommunicatorOptions { first_epoch, ..options.communicator() };
        let comm = Communicator::with_options(pool, &comm)?;
        let (experts, dtype) = (3 * pool.world(), DType::Bf16);
        let shape =
            ExpertShape { hidden: 64, experts, top_k: 3, max_tokens: 91, dtype, capacity: None };
        let buffer = ExpertBuffer::new(&comm, shape, None)?;
        for call in 0..2 {
            check.by_rank(&buffer, options.seed ^ call)?;
            check.by_expert(&buffer, options.seed ^ call)?;
        }
    }
    if pool.rank() == 0 {
        println!("experts: {} cases, {} wrong", check.cases, check.wrong);
    }
    Ok((check.cases, check.wrong))
}

fn numbers(bytes: &[u8]) -> Vec<i32> {
    bytes.chunks_exact(4).map(|four| i32::from_le_bytes(four.try_into().expect("four"))).collect()
}

impl<'a> Check<'a> {
    fn new(pool: &'a Pool) -> Result<Self> {
        let ordinary = pool.lane(ORDINARY)?;
        let room = |bytes: usize| ordinary.alloc_bytes(bytes, 512, Stream::DEFAULT);
        let check = Self {
            pool,
            stream: stream(pool)?,
            input: room(1 << 20)?,
            ids: room(1 << 17)?,
            weights: room(1 << 17)?,
            output: room(64 << 20)?,
            scales: room(4 << 20)?,
            rows: room(64 << 20)?,
            result: room(1 << 20)?,
            handles: [room(8 << 20)?, room(8 << 20)?],
            cases: 0,
            wrong: 0,
        };
        pool.commit()?;
        Ok(check)
    }
}

impl Check<'_> {
    fn judge<T: PartialEq + std::fmt::Debug>(&mut self, what: &str, got: &[T], wanted: &[T]) {
        self.cases += 1;
        if got == wanted {
            return;
        }
        self.wrong += 1;
        if self.wrong < 20 {
            let at = got.iter().zip(wanted).position(|(got, wanted)| got != wanted).unwrap_or(0);
            let part = |all: &[T]| format!("{:?}", &all[at.min(all.len())..all.len().min(at + 8)]);
            println!(
                "rank {}: {what}: wrong from {at} of {} on: {} and should be {}",
                self.pool.rank(),
                wanted.len(),
                part(got),
                part(wanted)
            );
        }
    }

    /// Puts a rank's tokens, ids and weights into memory.
    fn put(&self, routing: &TokenRouting, shape: &ExpertShape, seed: u64) -> Result<DispatchAt> {
        let rank = self.pool.rank() as usize;
        let tokens = routing.ids[rank].len();
        upload(self.pool, self.input.address(), &tokens_of(seed, rank, tokens, shape))?;
        let wide = random(seed, 3 + rank as u64).is_multiple_of(2);
        let ids = routing.ids[rank].iter().flatten();
        let ids: Vec<u8> = match wide {
            true => ids.flat_map(|id| id.to_le_bytes()).collect(),
            false => ids.flat_map(|id| (*id as i32).to_le_bytes()).collect(),
        };
        upload(self.pool, self.ids.address(), &ids)?;
        let weights =
            routing.weights[rank].iter().flatten().flat_map(|weight| weight.to_le_bytes());
        upload(self.pool, self.weights.address(), &weights.collect::<Vec<u8>>())?;
        Ok(DispatchAt {
            input: self.input.as_ptr(),
            quantized: false,
            scales: std::ptr::null(),
            scale_bytes: 0,
            scale_dtype: DType::U8,
            tokens,
            ids: self.ids.as_ptr(),
            ids_dtype: if wide { DType::I64 } else { DType::I32 },
            weights: self.weights.as_ptr().cast::<f32>(),
            quantize: ExpertQuantization::None,
            layout: ExpertLayout::ByRank,
            known: false,
            more: 0,
        })
    }

    fn dispatch(
        &self,
        buffer: &BorrowedBuffer<'_>,
        handle: usize,
        call: &DispatchAt,
    ) -> Result<()> {
        let handle = self.handles[handle].as_ptr().cast();
        assert!(self.handles[0].len() >= buffer.handle_parts().bytes, "room for handles");
        // SAFETY: the blocks are as long as these calls need, and nothing else uses them.
        unsafe { buffer.dispatch_at(handle, call, &self.stream) }
    }

    fn dispatch_exact(
        &self,
        buffer: &BorrowedBuffer<'_>,
        handle: usize,
        call: &DispatchAt,
    ) -> Result<ReceivedSizes> {
        let handle = self.handles[handle].as_ptr().cast();
        // SAFETY: the blocks are as long as these calls need, and nothing else uses them.
        unsafe { buffer.dispatch_exact_at(handle, call, &self.stream) }
    }

    /// A dispatch of a new routing. For every other seed it waits for sizes, which are compared then.
    fn dispatch_new(
        &mut self,
        buffer: &BorrowedBuffer<'_>,
        handle: usize,
        (call, wanted): (&DispatchAt, &ReceivedSizes),
        seed: u64,
        what: &str,
    ) -> Result<()> {
        if random(seed, 7).is_multiple_of(2) {
            return self.dispatch(buffer, handle, call);
        }
        let found = self.dispatch_exact(buffer, handle, call)?;
        self.judge(&format!("exact sizes, {what}"), &[&found], &[wanted]);
        Ok(())
    }

    fn combine(&self, buffer: &BorrowedBuffer<'_>, handle: usize, call: &CombineAt) -> Result<()> {
        // SAFETY: the blocks are as long as these calls need, and nothing else uses them.
        unsafe { buffer.combine_at(self.handles[handle].as_ptr().cast(), call, &self.stream) }
    }

    fn settle(&self, buffer: &BorrowedBuffer<'_>) -> Result<()> {
        buffer.communicator().synchronize(&self.stream)
    }

    /// The bytes of the rows that this rank receives, in the order of ranks.
    fn received(&self, routing: &TokenRouting, shape: &ExpertShape, seed: u64) -> Vec<u8> {
        let rows = routing.received(self.pool.rank());
        let row = |&(source, token): &(usize, usize)| {
            encode(shape.dtype, (0..shape.hidden).map(move |at| channel(seed, source, token, at)))
        };
        rows.iter().flat_map(row).collect()
    }

    fn by_rank(&mut self, buffer: &BorrowedBuffer<'_>, seed: u64) -> Result<()> {
        let (shape, rank) = (buffer.shape(), self.pool.rank());
        let routing = TokenRouting::random(seed, self.pool.world(), &shape);
        let other = TokenRouting::random(random(seed, 9), self.pool.world(), &shape);
        let what = format!("{shape:?} by rank, seed {seed}");
        let call = self.put(&routing, &shape, seed)?;
        let sizes = routing.sizes(rank, 0);
        self.dispatch_new(buffer, 0, (&call, &sizes), seed, &what)?;
        self.settle(buffer)?;
        let wanted = self.received(&routing, &shape, seed);
        let at = buffer.received();
        let got = download(self.pool, at.rows as u64, wanted.len())?;
        self.judge(&format!("rows, {what}"), &got, &wanted);
        let rows = routing.received(rank);
        let details = rows.len() * shape.top_k as usize;
        let ids = numbers(&download(self.pool, at.ids as u64, 4 * details)?);
        let weights = download(self.pool, at.weights as u64, 4 * details)?;
        self.judge(&format!("ids, {what}"), &ids, &routing.local_ids(rank));
        let wanted: Vec<u8> =
            routing.local_weights(rank).iter().flat_map(|one| one.to_le_bytes()).collect();
        self.judge(&format!("weights, {what}"), &weights, &wanted);
        let parts = buffer.handle_parts();
        let handle = self.handles[0].address();
        let read = |part: usize, count: usize| {
            Ok(numbers(&download(self.pool, handle + part as u64, 4 * count)?))
        };
        let offsets: Vec<i32> = read(parts.source_offsets, self.pool.world() as usize + 1)?;
        let tokens: Vec<i32> = read(parts.tokens, rows.len())?;
        let head: Vec<i32> = read(parts.head, 2)?;
        let counts: Vec<i32> =
            read(parts.expert_counts, (shape.experts / self.pool.world()) as usize)?;
        self.judge(&format!("offsets, {what}"), &offsets, &routing.source_offsets(rank));
        let wanted: Vec<i32> = rows.iter().map(|(_, token)| *token as i32).collect();
        self.judge(&format!("tokens, {what}"), &tokens, &wanted);
        self.judge(&format!("head, {what}"), &head, &[rows.len() as i32, call.tokens as i32]);
        self.judge(&format!("counts, {what}"), &counts, &routing.expert_counts(rank));

        // Another dispatch, into another handle, before the first one's rows go back; and the first one's routing again.
        let another = self.put(&other, &shape, seed)?;
        self.dispatch(buffer, 1, &another)?;
        let again = self.put(&routing, &shape, random(seed, 1))?;
        self.dispatch(buffer, 0, &DispatchAt { known: true, ids: std::ptr::null(), ..again })?;
        self.settle(buffer)?;
        let wanted = self.received(&routing, &shape, random(seed, 1));
        let got = download(self.pool, at.rows as u64, wanted.len())?;
        self.judge(&format!("rows again, {what}"), &got, &wanted);
        upload(self.pool, self.rows.address(), &self.received(&routing, &shape, seed))?;
        self.back(buffer, (0, false), &routing, seed, &what)
    }

    /// Sends `rows` back by a handle, and compares the sums.
    fn back(
        &mut self,
        buffer: &BorrowedBuffer<'_>,
        (handle, by_expert): (usize, bool),
        routing: &TokenRouting,
        seed: u64,
        what: &str,
    ) -> Result<()> {
        let (shape, rank) = (buffer.shape(), self.pool.rank());
        let tokens = routing.ids[rank as usize].len();
        let bytes = tokens * shape.hidden * shape.dtype.size();
        // Weights that dispatch was given, or the same ones given now.
        let now = by_expert && random(seed, 40).is_multiple_of(2);
        for given in [false, now] {
            upload(self.pool, self.result.address(), &vec![POISON; bytes + 64])?;
            let weights = if given { self.weights.as_ptr().cast() } else { std::ptr::null() };
            let (input, output) =
                (self.rows.as_ptr().cast_const().cast(), self.result.as_ptr().cast());
            let input_rows = usize::MAX;
            self.combine(
                buffer,
                handle,
                &CombineAt { input, input_rows, output, tokens, weights, by_expert, more: 0 },
            )?;
            self.settle(buffer)?;
            let mut wanted =
                encode(shape.dtype, routing.combined(rank, seed, shape.hidden, by_expert));
            wanted.extend([POISON; 64]);
            let got = download(self.pool, self.result.address(), wanted.len())?;
            self.judge(&format!("sums, weights {given}, {what}"), &got, &wanted);
        }
        Ok(())
    }

    fn by_expert(&mut self, buffer: &BorrowedBuffer<'_>, seed: u64) -> Result<()> {
        let (shape, rank) = (buffer.shape(), self.pool.rank());
        let routing = TokenRouting::random(seed, self.pool.world(), &shape);
        let alignment = [1, 4, 16][(random(seed, 5) % 3) as usize];
        let what = format!("{shape:?} by expert, alignment {alignment}, seed {seed}");
        let (offsets, rows) = routing.by_expert(rank, alignment);
        let (row, capacity) =
            (shape.hidden * shape.dtype.size(), offsets[offsets.len() - 1] as usize);
        upload(self.pool, self.output.address(), &vec![POISON; capacity * row + 64])?;
        let layout = ExpertLayout::ByExpert {
            output: self.output.as_ptr().cast(),
            scales: std::ptr::null_mut(),
            capacity,
            alignment: alignment as u32,
        };
        let call = DispatchAt { layout, ..self.put(&routing, &shape, seed)? };
        let sizes = routing.sizes(rank, capacity);
        self.dispatch_new(buffer, 1, (&call, &sizes), seed, &what)?;
        self.settle(buffer)?;
        let mut wanted = vec![POISON; capacity * row + 64];
        let mut back = wanted.clone();
        for (at, source, token, expert) in rows {
            let values = (0..shape.hidden).map(|each| channel(seed, source, token, each));
            wanted[at * row..][..row].copy_from_slice(&encode(shape.dtype, values.clone()));
            let values = values.map(|value| value + (expert % 3) as f32);
            back[at * row..][..row].copy_from_slice(&encode(shape.dtype, values));
        }
        let got = download(self.pool, self.output.address(), wanted.len())?;
        self.judge(&format!("rows, {what}"), &got, &wanted);
        let parts = buffer.handle_parts();
        let found = download(
            self.pool,
            self.handles[1].address() + parts.expert_offsets as u64,
            4 * offsets.len(),
        )?;
        self.judge(&format!("expert_offsets, {what}"), &numbers(&found), &offsets);
        // Another dispatch, into another handle, and the first one's routing again.
        let other = TokenRouting::random(random(seed, 9), self.pool.world(), &shape);
        let another = self.put(&other, &shape, seed)?;
        self.dispatch(buffer, 0, &another)?;
        self.settle(buffer)?;
        upload(self.pool, self.output.address(), &vec![POISON; capacity * row + 64])?;
        let again = DispatchAt { layout: call.layout, ..self.put(&routing, &shape, seed)? };
        self.dispatch(buffer, 1, &DispatchAt { known: true, ..again })?;
        self.settle(buffer)?;
        let got = download(self.pool, self.output.address(), wanted.len())?;
        self.judge(&format!("rows again, {what}"), &got, &wanted);
        upload(self.pool, self.rows.address(), &back)?;
        self.back(buffer, (1, true), &routing, seed, &what)
    }

    /// So many tokens that blocks send them in several steps, with many SMs and with few.
    fn many(&mut self, comm: &Communicator, seed: u64) -> Result<()> {
        let (hidden, experts, dtype) = (8, 2 * self.pool.world(), DType::Bf16);
        let shape =
            ExpertShape { hidden, experts, top_k: 2, max_tokens: 4200, dtype, capacity: None };
        for (call, num_sms) in [None, Some(2), Some(7)].into_iter().enumerate() {
            let buffer = ExpertBuffer::new(comm, shape, num_sms)?;
            for turn in 0..2 {
                self.by_rank(&buffer, seed ^ (2 * call as u64 + turn))?;
                self.by_expert(&buffer, seed ^ (2 * call as u64 + turn))?;
            }
        }
        Ok(())
    }
}
