//! Dispatch to experts and combine, compared with a model. Ranks are threads.

mod contract;
mod model;
#[path = "../pool_ranks/mod.rs"]
mod pool_ranks;

use symmpool_allocator::{Block, Pool, Result, Stream};
use symmpool_collectives::{
    CombineAt, Communicator, DType, DispatchAt, ExpertBuffer, ExpertLayout, ExpertQuantization,
    ExpertShape, HandleParts,
};

use model::{RoutingModel, bytes, mixed, quantized};

const STREAM: &Stream = &Stream::DEFAULT;

/// Runs `body` as every rank.
fn ranks(world: usize, body: impl Fn(&Pool, &Communicator) + Sync) {
    pool_ranks::ranks(world as u32, |pool| body(pool, &Communicator::new(pool).unwrap()));
}

/// How a dispatch is made.
#[derive(Clone, Copy, Debug)]
struct How {
    /// Rows by expert, with this alignment.
    by_expert: Option<usize>,
    weights: bool,
    wide: bool,
    quantize: ExpertQuantization,
    /// Rows by expert that the output has less room for than there can be.
    missing: usize,
}

const BY_RANK: How = How {
    by_expert: None,
    weights: true,
    wide: true,
    quantize: ExpertQuantization::None,
    missing: 0,
};

struct Rank<'a> {
    pool: &'a Pool,
    me: usize,
    buffer: ExpertBuffer<&'a Communicator>,
}

/// A handle, and rows by expert of the dispatch with it.
struct RoutedRows {
    memory: Block<u8>,
    output: Block<u8>,
    scales: Block<u8>,
    how: How,
    room: usize,
}

impl<'a> Rank<'a> {
    fn new(pool: &'a Pool, comm: &'a Communicator, shape: ExpertShape) -> Self {
        let buffer = ExpertBuffer::new(comm, shape, None).unwrap();
        Self { pool, me: pool.rank() as usize, buffer }
    }

    fn block(&self, content: &[u8]) -> Block<u8> {
        let block = self.pool.lane("own").unwrap().alloc::<u8>(content.len().max(16)).unwrap();
        let mut padded = content.to_vec();
        padded.resize(block.len(), 0);
        block.write(&padded).unwrap();
        block
    }

    fn handle(&self, how: How) -> RoutedRows {
        let alignment = how.by_expert.unwrap_or(1) as u32;
        let rows = self.buffer.capacity(how.by_expert.is_some(), alignment);
        let room = rows.saturating_sub(how.missing);
        let row = self.buffer.shape().hidden * self.buffer.shape().dtype.size();
        let by_expert = if how.by_expert.is_some() { rows } else { 1 };
        RoutedRows {
            memory: self.block(&vec![0xaa; self.buffer.handle_parts().bytes]),
            output: self.block(&vec![0xbb; by_expert * row]),
            scales: self.block(&vec![0xcc; by_expert * 4 * row.div_ceil(128)]),
            how,
            room,
        }
    }

    fn dispatch(
        &self,
        routing: &RoutingModel,
        call: usize,
        handle: &RoutedRows,
        known: bool,
    ) -> Result<()> {
        let (me, how) = (self.me, handle.how);
        let tokens = routing.tokens(me);
        let rows = (0..tokens).flat_map(|token| routing.token(call, (me, token)));
        let input = self.block(&bytes(routing.shape.dtype, rows));
        let ids: Vec<u8> = if how.wide {
            routing.ids[me].iter().flat_map(|id| id.to_ne_bytes()).collect()
        } else {
            routing.ids[me].iter().flat_map(|id| (*id as i32).to_ne_bytes()).collect()
        };
        let ids = self.block(&ids);
        let weights = self.block(&self.weights(routing, call));
        let layout = match how.by_expert {
            None => ExpertLayout::ByRank,
            Some(alignment) => ExpertLayout::ByExpert {
                output: handle.output.as_ptr(),
                scales: handle.scales.as_ptr(),
                capacity: handle.room,
                alignment: alignment as u32,
            },
        };
        let none = std::ptr::null();
        let dispatch = DispatchAt {
            input: input.as_ptr(),
            quantized: false,
            scales: none,
            scale_bytes: 0,
            scale_dtype: DType::U8,
            tokens,
            ids: if known { none } else { ids.as_ptr() },
            ids_dtype: if how.wide { DType::I64 } else { DType::I32 },
            weights: if how.weights && !known { weights.as_ptr().cast() } else { none.cast() },
            quantize: how.quantize,
            layout,
            known,
            more: 0,
        };
        // SAFETY: the blocks have these lengths, and nobody else uses them.
        unsafe { self.buffer.dispatch_at(handle.memory.as_ptr(), &dispatch, STREAM) }
    }

    /// The weights of this rank's tokens.
    fn weights(&self, routing: &RoutingModel, call: usize) -> Vec<u8> {
        let top_k = routing.shape.top_k as usize;
        let all = (0..routing.tokens(self.me))
            .flat_map(|token| (0..top_k).map(move |k| ((self.me, token), k)));
        all.flat_map(|(row, k)| routing.weight(call, row, k).to_ne_bytes()).collect()
    }

    fn numbers(&self, handle: &RoutedRows, part: impl Fn(HandleParts) -> usize) -> Vec<i32> {
        let bytes = handle.memory.read().unwrap();
        let numbers = bytes[part(self.buffer.handle_parts())..].chunks_exact(4);
        numbers.map(|it| i32::from_ne_bytes(it.try_into().unwrap())).collect()
    }

    /// The first bytes at an address of the buffer's memory.
    fn received_bytes(&self, at: *const u8, count: usize) -> Vec<u8> {
        // SAFETY: parts of the buffer's memory have room for its capacity, and no call runs.
        (0..count).map(|index| unsafe { at.wrapping_add(index).read() }).collect()
    }

    /// Checks what a dispatch received.
    fn check_received(
        &self,
        routing: &RoutingModel,
        call: usize,
        handle: &RoutedRows,
        known: bool,
    ) {
        let (me, how, shape) = (self.me, handle.how, routing.shape);
        let received = routing.received(me);
        let row = |row| match how.quantize {
            ExpertQuantization::None => (bytes(shape.dtype, routing.token(call, row)), Vec::new()),
            how => quantized(&routing.token(call, row), how),
        };
        let count = received.len();
        assert_eq!(self.numbers(handle, |parts| parts.head)[0], count as i32);
        let begins = (0..=routing.world())
            .map(|rank| received.iter().filter(|(source, _)| *source < rank).count() as i32);
        let offsets = self.numbers(handle, |parts| parts.source_offsets);
        assert_eq!(offsets[..=routing.world()], begins.collect::<Vec<_>>());
        let tokens: Vec<i32> = received.iter().map(|(_, token)| *token as i32).collect();
        assert_eq!(self.numbers(handle, |parts| parts.tokens)[..count], tokens);
        let parts = self.buffer.received();
        let (rows, scales): (Vec<_>, Vec<_>) = received.iter().map(|it| row(*it)).unzip();
        let (row_bytes, scale_bytes) =
            (rows.first().map_or(0, Vec::len), scales.first().map_or(0, Vec::len));
        assert_eq!(self.received_bytes(parts.rows, count * row_bytes), rows.concat());
        assert_eq!(self.received_bytes(parts.scales, count * scale_bytes), scales.concat());
        if !known {
            let top_k = shape.top_k as usize;
            let experts: Vec<_> =
                received.iter().flat_map(|row| routing.experts_on(me, *row)).collect();
            let ids = experts.iter().map(|it| it.map_or(-1, |id| id as i32));
            let ids: Vec<u8> = ids.flat_map(i32::to_ne_bytes).collect();
            assert_eq!(self.received_bytes(parts.ids.cast(), 4 * count * top_k), ids);
            let weight = |row, k| if how.weights { routing.weight(call, row, k) } else { 1.0 };
            let weights: Vec<u8> = received
                .iter()
                .flat_map(|row| (0..top_k).map(move |k| weight(*row, k)))
                .flat_map(f32::to_ne_bytes)
                .collect();
            assert_eq!(self.received_bytes(parts.weights.cast(), weights.len()), weights);
        }
        let Some(alignment) = how.by_expert else { return };
        let (offsets, places) = routing.by_expert(me, alignment);
        let found = self.numbers(handle, |parts| parts.expert_offsets);
        let clamped: Vec<i32> = offsets.iter().map(|it| (*it).min(handle.room) as i32).collect();
        assert_eq!(found[..offsets.len()], clamped);
        let mut wanted = vec![0xbb; handle.output.len()];
        let mut wanted_scales = vec![0xcc; handle.scales.len()];
        for (at, place) in places.iter().enumerate() {
            if let Some(place) = place.filter(|place| *place < handle.room) {
                let at = at / shape.top_k as usize;
                wanted[place * row_bytes..][..row_bytes].copy_from_slice(&rows[at]);
                wanted_scales[place * scale_bytes..][..scale_bytes].copy_from_slice(&scales[at]);
            }
        }
        assert!(handle.output.read().unwrap() == wanted, "rows by expert");
        assert!(handle.scales.read().unwrap() == wanted_scales, "scales by expert");
    }

    /// Combines answers to a dispatch, and checks the sums.
    fn combine(&self, routing: &RoutingModel, call: usize, handle: &RoutedRows, weights: bool) {
        let (me, how, shape) = (self.me, handle.how, routing.shape);
        let rows = match how.by_expert {
            None => routing.received(me).len(),
            Some(alignment) => routing.by_expert(me, alignment).0[routing.local()],
        };
        let answers = (0..rows).flat_map(|row| routing.answer(call, me, row));
        let input = self.block(&bytes(shape.dtype, answers));
        let tokens = routing.tokens(me);
        let output = self.block(&vec![0xdd; tokens * shape.hidden * shape.dtype.size()]);
        let given = self.block(&self.weights(routing, call + 1));
        let combine = CombineAt {
            input: input.as_ptr(),
            input_rows: rows,
            output: output.as_ptr(),
            tokens,
            weights: if weights { given.as_ptr().cast() } else { std::ptr::null() },
            by_expert: how.by_expert.is_some(),
            more: 0,
        };
        // SAFETY: the blocks have these lengths, and nobody else uses them.
        unsafe { self.buffer.combine_at(handle.memory.as_ptr(), &combine, STREAM) }.unwrap();
        let weight = |row, k| match (weights, how.weights) {
            (true, _) => routing.weight(call + 1, row, k),
            (false, true) => routing.weight(call, row, k),
            (false, false) => 1.0,
        };
        let wanted = (0..tokens).flat_map(|token| {
            routing.combined((me, token), |rank, row| match how.by_expert {
                None => routing.answer(call, rank, row),
                Some(alignment) => routing.weighted((call, rank, alignment), row, weight),
            })
        });
        let wanted = bytes(shape.dtype, wanted);
        assert!(output.read().unwrap()[..wanted.len()] == wanted, "rank {me}");
    }
}

/// Experts of `tokens` tokens of a rank, in one of several ways.
fn ids(way: usize, seed: usize, tokens: usize, shape: &ExpertShape) -> Vec<i64> {
    let experts = shape.experts as usize;
    let each = |at: usize| {
        let drawn = mixed(&[seed, 5, at]) as usize;
        match way {
            0 => 0,
            1 => -1,
            2 => (drawn % (experts + 1)) as i64 - 1,
            3 => (drawn % experts.min(2)) as i64,
            // Different experts for each token, as routers choose them.
            _ => ((drawn % experts / 7 + at * (1 + seed % 3)) % experts) as i64,
        }
    };
    (0..tokens * shape.top_k as usize).map(each).collect()
}

fn random(world: usize, seed: usize) -> (ExpertShape, [RoutingModel; 2], How) {
    let draw = |what: usize, most: usize| mixed(&[seed, what]) as usize % most;
    let quantize = [ExpertQuantization::None, ExpertQuantization::None, ExpertQuantization::Fp8]
        .into_iter()
        .chain([ExpertQuantization::Fp8PowerOfTwo, ExpertQuantization::Fp8Ue8m0]);
    let quantize = quantize.collect::<Vec<_>>()[draw(0, 5)];
    let dtype = if draw(1, 3) == 0 { DType::F32 } else { DType::Bf16 };
    let hidden = match (quantize, seed % 50) {
        (_, 49) => 16384,
        (ExpertQuantization::None, _) => 8 * (1 + draw(2, 40)),
        _ => 128 * (1 + draw(2, 4)),
    };
    let shape = ExpertShape {
        hidden,
        experts: (world * (1 + draw(3, 9))) as u32,
        top_k: 1 + (seed % 12) as u32,
        max_tokens: 1 + draw(4, 24),
        dtype,
        capacity: None,
    };
    let routing = |nth: usize| {
        let of = |rank: usize| {
            let tokens = match draw(20 + rank + 10 * nth, 4) {
                0 => 0,
                1 => shape.max_tokens,
                _ => draw(30 + rank + 10 * nth, shape.max_tokens + 1),
            };
            ids(draw(7 + nth, 7), seed + 1000 * rank + nth, tokens, &shape)
        };
        RoutingModel { shape, ids: (0..world).map(of).collect(), seed: seed + nth }
    };
    let how = How {
        by_expert: (draw(5, 2) == 0).then(|| [1, 2, 16, 128][draw(6, 4)]),
        weights: draw(9, 3) > 0,
        wide: draw(10, 2) == 0,
        quantize,
        missing: 0,
    };
    (shape, [routing(0), routing(1)], how)
}

/// Two routings with handles of their own, used again; 1,000 in all.
fn random_routings(world: usize) {
    ranks(world, |pool, comm| {
        for seed in 0..125 {
            let (shape, [first, second], how) = random(world, seed);
            let rank = Rank::new(pool, comm, shape);
            let handles = [rank.handle(how), rank.handle(how)];
            rank.dispatch(&first, 10, &handles[0], false).unwrap();
            rank.check_received(&first, 10, &handles[0], false);
            rank.dispatch(&second, 20, &handles[1], false).unwrap();
            rank.check_received(&second, 20, &handles[1], false);
            rank.combine(&first, 10, &handles[0], false);
            rank.combine(&second, 20, &handles[1], how.by_expert.is_some());
            rank.dispatch(&first, 30, &handles[0], true).unwrap();
            rank.check_received(&first, 30, &handles[0], true);
            rank.combine(&first, 10, &handles[0], false);
        }
    });
}

#[test]
fn random_routings_of_one_rank() {
    random_routings(1);
}

#[test]
fn random_routings_of_two_ranks() {
    random_routings(2);
}

#[test]
fn random_routings_of_three_ranks() {
    random_routings(3);
}

#[test]
fn random_routings_of_four_ranks() {
    random_routings(4);
}
