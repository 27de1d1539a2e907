//! Checks row exchanges, there and back, against a model that moves one row at a time: any row, alignment
//! and kind of memory; outputs that are too short, destinations that are no ranks, and graphs whose
//! destinations change between replays. Prints how long a usual one takes.

use symmpool_allocator::{Block, Pool, Result, Stream};
use symmpool_collectives::{
    AllToAllAlgorithm, Communicator, CommunicatorOptions, DType, RowExchange, RowLayout, RowShape,
    RowsAt,
};

use crate::cuda::{Clock, Graph, download, stream, upload};
use crate::matrix::bytes;
use crate::oracle::random;
use crate::row_model::{Call, Kind, back, there};
use crate::{ORDINARY, Options, expect_error};

/// Most bytes that a rank sends, and room for shifts and for bytes around the data that must not change.
const MOST: usize = 1 << 20;
const AROUND: usize = 64;
const POISON: u8 = 0xa5;
/// How many calls are made with each shape and algorithm.
const CALLS: u64 = 12;
/// Shapes with rows of one byte, of a few bytes, and with and without whole vectors; with so many rows that blocks
/// handle several tiles.
const SHAPES: [(usize, usize, DType); 9] = [
    (150_000, 1, DType::U8),
    (30_000, 7, DType::U8),
    (200_000, 1, DType::F32),
    (60_000, 2, DType::I64),
    (10_000, 24, DType::Bf16),
    (3000, 33, DType::Bf16),
    (290, 1792, DType::Bf16),
    (70, 7168, DType::Bf16),
    (5, 100_001, DType::F8E4m3),
];

struct Rows<'a> {
    pool: &'a Pool,
    stream: Stream,
    /// Indexed by whether it is a window.
    inputs: [Block<u8>; 2],
    outputs: [Block<u8>; 2],
    back: Block<u8>,
    destinations: Block<u8>,
    /// The inputs of all ranks.
    data: Vec<Vec<u8>>,
    seed: u64,
    cases: u64,
    wrong: u64,
}

/// Runs the checks. Returns how many cases there were, and how many of them were wrong.
pub(crate) fn run(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let ordinary = pool.lane(ORDINARY)?;
    let (one, all) = (MOST + 2 * AROUND, MOST * pool.world() as usize + 2 * AROUND);
    let pair = |room| Ok([ordinary.alloc::<u8>(room)?, pool.alloc::<u8>(room)?]);
    let mut rows = Rows {
        pool,
        stream: stream(pool)?,
        inputs: pair(one)?,
        outputs: pair(all)?,
        back: ordinary.alloc(one)?,
        destinations: ordinary.alloc(8 * 200_000)?,
        data: (0..pool.world()).map(|rank| bytes(options.seed, rank, MOST)).collect(),
        seed: options.seed,
        cases: 0,
        wrong: 0,
    };
    pool.commit()?;
    for all_to_all in AllToAllAlgorithm::ALL {
        // Little scratch, so that calls take several rounds.
        let communicator = CommunicatorOptions {
            all_to_all,
            device_scratch_bytes: Some(1 << 20),
            ..options.communicator()
        };
        let comm = Communicator::with_options(pool, &communicator)?;
        let before = (rows.cases, rows.wrong);
        for (nth, (count, row, dtype)) in SHAPES.into_iter().enumerate() {
            let exchange = RowExchange::new(&comm, RowShape { rows: count, row, dtype })?;
            let layouts = [exchange.layout()?, exchange.layout()?];
            rows.nothing_was_sent(&exchange, &layouts[0])?;
            for call in 0..options.few(CALLS, 1) {
                let seed =
                    random(rows.seed ^ ((all_to_all as u64) << 56), 1000 * nth as u64 + call);
                rows.there_and_back(&exchange, &layouts, seed)?;
            }
        }
        if pool.rank() == 0 {
            let (cases, wrong) = (rows.cases - before.0, rows.wrong - before.1);
            println!(
                "row_exchange, all_to_all {}: {cases} cases, {wrong} wrong",
                all_to_all.name()
            );
        }
    }
    rows.graphs(options)?;
    if !options.quick {
        time(pool, rows.stream)?;
    }
    if pool.rank() == 0 {
        println!("row_exchange: {} cases, {} wrong", rows.cases, rows.wrong);
    }
    Ok((rows.cases, rows.wrong))
}

type Exchange<'a> = RowExchange<&'a Communicator>;

impl Rows<'_> {
    fn judge<T: PartialEq + std::fmt::Debug>(&mut self, what: &str, got: &[T], wanted: &[T]) {
        self.cases += 1;
        if got == wanted {
            return;
        }
        self.wrong += 1;
        if self.wrong < 20 {
            let differ = got.iter().zip(wanted).filter(|(got, wanted)| got != wanted).count();
            let at = got.iter().zip(wanted).position(|(got, wanted)| got != wanted).unwrap_or(0);
            let part = |all: &[T]| format!("{:?}", &all[at..all.len().min(at + 8)]);
            println!(
                "rank {}: {what}: {differ} of {} wrong, from {at} on: {} and should be {}",
                self.pool.rank(),
                wanted.len(),
                part(got),
                part(wanted)
            );
        }
    }

    /// A random call, the same on all ranks for the same seed.
    fn call(&self, exchange: &Exchange<'_>, seed: u64) -> Call {
        Call::random(seed, self.pool.world(), exchange.shape().rows)
    }

    fn put_destinations(&self, to: &[i64], wide: bool) -> Result<(*const u8, usize, DType)> {
        let bytes: Vec<u8> = match wide {
            true => to.iter().flat_map(|to| to.to_le_bytes()).collect(),
            false => to.iter().flat_map(|to| (*to as i32).to_le_bytes()).collect(),
        };
        upload(self.pool, self.destinations.address(), &bytes)?;
        let dtype = if wide { DType::I64 } else { DType::I32 };
        Ok((self.destinations.as_ptr() as *const u8, to.len(), dtype))
    }

    /// With a layout that nothing was sent with, rows that are sent back are zeros.
    fn nothing_was_sent(&mut self, exchange: &Exchange<'_>, layout: &RowLayout) -> Result<()> {
        let RowShape { rows, row, dtype } = exchange.shape();
        let bytes = rows * row * dtype.size();
        upload(self.pool, self.back.address(), &vec![POISON; bytes + AROUND])?;
        let rows = RowsAt {
            input: self.outputs[1].as_ptr(),
            length: rows,
            output: self.back.as_ptr(),
            capacity: rows,
        };
        // SAFETY: the blocks are as long, which nothing else uses; the layout's counts are where it
        // begins. So it is below.
        unsafe { exchange.send_back_at(layout_at(layout), &rows, &self.stream) }?;
        exchange.communicator().synchronize(&self.stream)?;
        let mut wanted = vec![0; bytes];
        wanted.extend([POISON; AROUND]);
        let got = download(self.pool, self.back.address(), wanted.len())?;
        self.judge("nothing_was_sent", &got, &wanted);
        Ok(())
    }

    /// Makes two sends with two layouts, and sends both back, the first one after the second.
    fn there_and_back(
        &mut self,
        exchange: &Exchange<'_>,
        layouts: &[RowLayout; 2],
        seed: u64,
    ) -> Result<()> {
        let (one, two) = (self.call(exchange, seed), self.call(exchange, random(seed, 1)));
        self.send(exchange, &layouts[0], &one, seed)?;
        self.send(exchange, &layouts[1], &two, random(seed, 2))?;
        self.send_back(exchange, &layouts[1], &two, random(seed, 3))?;
        self.send_back(exchange, &layouts[0], &one, random(seed, 4))
    }

    fn send(
        &mut self,
        exchange: &Exchange<'_>,
        layout: &RowLayout,
        call: &Call,
        seed: u64,
    ) -> Result<()> {
        let (rank, world) = (self.pool.rank() as usize, self.pool.world() as usize);
        let RowShape { rows: most, row, dtype } = exchange.shape();
        let size = row * dtype.size();
        // Each rank decides for itself.
        let own = |which: u64| random(seed, 60 + 10 * rank as u64 + which);
        let (from_window, to_window) = ((own(0) & 1) as usize, (own(1) & 1) as usize);
        let (from_shift, to_shift) = (shift(own(2)), AROUND / 2 + shift(own(3)));
        let from = self.inputs[from_window].address() + from_shift as u64;
        let output = self.outputs[to_window].address();
        let to = &call.destinations[rank];
        let capacity = call.capacities[rank];
        let what = format!(
            "send of {} of {most} rows of {row} {} ({}), input {from_window} at +{from_shift}, output \
             {to_window} at +{to_shift}, capacities {:?}, seed {seed}",
            to.len(),
            dtype.name(),
            call.name(),
            call.capacities
        );
        upload(self.pool, from, &self.data[rank][..to.len() * size])?;
        upload(self.pool, output, &vec![POISON; to_shift + capacity * size + AROUND])?;
        let destinations = self.put_destinations(to, own(4) & 1 == 0)?;
        let rows = RowsAt {
            input: from as *const u8,
            length: to.len(),
            output: (output + to_shift as u64) as *mut u8,
            capacity,
        };
        // SAFETY: as above.
        unsafe { exchange.send_at(layout_at(layout), &rows, destinations, &self.stream) }?;
        let result = exchange.communicator().synchronize(&self.stream);
        self.check_result(&what, call, result)?;
        let received = call.received(rank);
        let mut wanted = vec![POISON; to_shift];
        wanted.extend(there(&self.data, &received[..received.len().min(capacity)], size));
        wanted.resize(to_shift + capacity * size + AROUND, POISON);
        let got = download(self.pool, output, wanted.len())?;
        self.judge(&what, &got, &wanted);

        let counts = longs(&download(self.pool, layout.counts() as u64, 8 * world)?);
        let offsets = longs(&download(self.pool, layout.offsets() as u64, 8 * world)?);
        let indices = download(self.pool, layout.source_index() as u64, 4 * received.len())?;
        let of = |rank: usize| received.iter().filter(|(source, _)| *source == rank).count() as i64;
        let wanted: Vec<i64> = (0..world).map(of).collect();
        let begins: Vec<i64> = (0..world).map(|rank| wanted[..rank].iter().sum()).collect();
        let rows: Vec<u8> =
            received.iter().flat_map(|(_, row)| (*row as i32).to_le_bytes()).collect();
        self.judge(&format!("counts, {what}"), &counts, &wanted);
        self.judge(&format!("offsets, {what}"), &offsets, &begins);
        self.judge(&format!("source_index, {what}"), &indices, &rows);
        Ok(())
    }

    /// Checks what `synchronize` returned. It names the first rank with an error.
    fn check_result(&mut self, what: &str, call: &Call, result: Result<()>) -> Result<()> {
        let rank = self.pool.rank() as usize;
        self.cases += 1;
        let good = match (call.first_error(), &result) {
            (None, result) => result.is_ok(),
            (Some((of, Some(row))), Err(error)) => {
                let named = if of == rank {
                    format!("row {row} has dest")
                } else {
                    format!("of rank {of} ")
                };
                error.is_invalid_argument() && error.to_string().contains(&named)
            }
            (Some((_, None)), Err(error)) => error.is_overflow(),
            (Some(_), Ok(())) => false,
        };
        if !good {
            self.wrong += 1;
            println!("rank {rank}: {what}: synchronize gave {result:?}");
        }
        // Errors that close the communicator end the check.
        result.or_else(|error| match error {
            error if error.is_overflow() || error.is_invalid_argument() => Ok(()),
            error => Err(error),
        })
    }

    fn send_back(
        &mut self,
        exchange: &Exchange<'_>,
        layout: &RowLayout,
        call: &Call,
        seed: u64,
    ) -> Result<()> {
        let rank = self.pool.rank() as usize;
        let RowShape { rows: most, row, dtype } = exchange.shape();
        let size = row * dtype.size();
        let own = |which: u64| random(seed, 60 + 10 * rank as u64 + which);
        let from_window = (own(0) & 1) as usize;
        let (from_shift, to_shift) = (shift(own(2)), shift(own(3)));
        let from = self.outputs[from_window].address() + from_shift as u64;
        let to = self.back.address() + to_shift as u64;
        let mut fitting = call.received(rank);
        fitting.truncate(call.capacities[rank]);
        let mut rows = there(&self.data, &fitting, size);
        rows.iter_mut().for_each(|byte| *byte = !*byte);
        upload(self.pool, from, &rows)?;
        // The output has as many rows as were sent, or more, or fewer.
        let sent = call.destinations[rank].len();
        let capacity = match own(4) % 4 {
            0 => most,
            1 => sent / 2,
            _ => sent,
        };
        let what = format!(
            "send_back of {capacity} of {sent} rows of {row} {} ({}), input {from_window} at \
             +{from_shift}, output at +{to_shift}, seed {seed}",
            dtype.name(),
            call.name()
        );
        upload(self.pool, to, &vec![POISON; capacity * size + AROUND])?;
        let rows = RowsAt {
            input: from as *const u8,
            length: fitting.len(),
            output: to as *mut u8,
            capacity,
        };
        // SAFETY: as above.
        unsafe { exchange.send_back_at(layout_at(layout), &rows, &self.stream) }?;
        exchange.communicator().synchronize(&self.stream)?;
        let mut wanted = back(&self.data, call, rank, size, capacity);
        wanted.extend([POISON; AROUND]);
        let got = download(self.pool, to, wanted.len())?;
        self.judge(&what, &got, &wanted);
        Ok(())
    }

    /// S2, S8: an exchange, there and back, is captured once, and replayed with other destinations in memory.
    fn graphs(&mut self, options: &Options) -> Result<()> {
        let (rank, world) = (self.pool.rank() as usize, self.pool.world() as usize);
        let (count, row, size) = (500, 100, 200);
        let shape = RowShape { rows: count, row, dtype: DType::Bf16 };
        // The communicator has made no call yet: its first call is captured.
        let comm = Communicator::with_options(self.pool, &options.communicator())?;
        let exchange = RowExchange::new(&comm, shape)?;
        let layout = exchange.layout()?;
        self.pool.commit()?;
        let capacity = count * world * 2 / 3;
        let (from, to, back_to) =
            (self.inputs[1].address(), self.outputs[1].address(), self.back.address());
        upload(self.pool, from, &self.data[rank][..count * size])?;
        let destinations = self.put_destinations(&vec![-1; count], true)?;
        let (input, output) = (from as *const u8, to as *mut u8);
        let graph = Graph::capture(self.pool, self.stream, || {
            let rows = RowsAt { input, length: count, output, capacity };
            // SAFETY: as above.
            unsafe { exchange.send_at(layout_at(&layout), &rows, destinations, &self.stream) }?;
            let (input, output) = (to as *const u8, back_to as *mut u8);
            let rows = RowsAt { input, length: capacity, output, capacity: count };
            // SAFETY: as above.
            unsafe { exchange.send_back_at(layout_at(&layout), &rows, &self.stream) }
        })?;
        for round in 0..100_u64 {
            let seed = random(self.seed ^ 21, round);
            let mut call = Call::random(seed, world as u32, count);
            call.capacities = vec![capacity; world];
            for to in &mut call.destinations {
                to.resize(count, -1);
            }
            self.put_destinations(&call.destinations[rank], true)?;
            upload(self.pool, to, &vec![POISON; capacity * size + AROUND])?;
            upload(self.pool, back_to, &vec![POISON; count * size + AROUND])?;
            graph.launch(self.pool, self.stream)?;
            let result = comm.synchronize(&self.stream);
            let what = format!("replay {round} ({}), seed {seed}", call.name());
            self.check_result(&what, &call, result)?;
            let received = call.received(rank);
            let mut wanted = there(&self.data, &received[..received.len().min(capacity)], size);
            wanted.resize(capacity * size + AROUND, POISON);
            let got = download(self.pool, to, wanted.len())?;
            self.judge(&format!("there, {what}"), &got, &wanted);
            let mut wanted = back(&self.data, &call, rank, size, count);
            // Rows are sent back unchanged.
            let arrived = call.all_arrived(rank);
            for (row, bytes) in wanted.chunks_mut(size).enumerate() {
                if arrived[row] {
                    bytes.iter_mut().for_each(|byte| *byte = !*byte);
                }
            }
            wanted.extend([POISON; AROUND]);
            let got = download(self.pool, back_to, wanted.len())?;
            self.judge(&format!("back, {what}"), &got, &wanted);
        }
        graph.destroy(self.pool)?;
        self.short_input(&comm)
    }

    /// A rank has fewer rows to send back than it received: all ranks get an error, and other ranks' rows come back.
    fn short_input(&mut self, comm: &Communicator) -> Result<()> {
        let (rank, world) = (self.pool.rank() as usize, self.pool.world() as usize);
        let exchange = RowExchange::new(comm, RowShape { rows: 64, row: 5, dtype: DType::U8 })?;
        let layout = exchange.layout()?;
        let mut call = Call::of(Kind::Even, 1, world as u32, 64);
        call.capacities = vec![64 * world; world];
        self.send(&exchange, &layout, &call, 3)?;
        let received = call.received(rank).len();
        let rows = RowsAt {
            input: self.outputs[1].as_ptr(),
            length: if rank == world - 1 { received - 1 } else { received },
            output: self.back.as_ptr(),
            capacity: 64,
        };
        // SAFETY: as above.
        unsafe { exchange.send_back_at(layout_at(&layout), &rows, &self.stream) }?;
        let error = expect_error(comm.synchronize(&self.stream), "too little to send back")?;
        self.cases += 1;
        if !error.is_invalid_argument() || comm.failure().is_some() {
            self.wrong += 1;
            println!("rank {rank}: too little to send back: {error}");
        }
        let got = download(self.pool, self.back.address(), 64 * 5)?;
        let to = &call.destinations[rank];
        let zeros = |row: &usize| got[row * 5..][..5].iter().all(|byte| *byte == 0);
        let left_out = (0..64).filter(|row| to[*row] == world as i64 - 1).all(|row| zeros(&row));
        self.judge("rows of a rank that had too few", &[left_out], &[true]);
        self.send(&exchange, &layout, &call, 4)?;
        self.send_back(&exchange, &layout, &call, 5)
    }
}

/// How long a usual exchange takes, as a graph of calls.
fn time(pool: &Pool, stream: Stream) -> Result<()> {
    const REPEATS: usize = 10;
    let world = pool.world() as usize;
    let comm = Communicator::new(pool)?;
    let clock = Clock::new(pool, 1)?;
    for count in [128, 4096] {
        let exchange =
            RowExchange::new(&comm, RowShape { rows: count, row: 7168, dtype: DType::Bf16 })?;
        let layout = exchange.layout()?;
        let bytes = count * 7168 * 2;
        let (x, y) = (pool.alloc::<u8>(bytes)?, pool.alloc::<u8>(2 * bytes)?);
        let destinations = pool.alloc::<i64>(count)?;
        pool.commit()?;
        upload(pool, x.address(), &vec![1; bytes])?;
        let to = (0..count).flat_map(|row| ((row * 7 % world) as i64).to_le_bytes());
        upload(pool, destinations.address(), &to.collect::<Vec<_>>())?;
        let given = (destinations.as_ptr() as *const u8, count, DType::I64);
        let there =
            RowsAt { input: x.as_ptr(), length: count, output: y.as_ptr(), capacity: 2 * count };
        let back =
            RowsAt { input: y.as_ptr(), length: 2 * count, output: x.as_ptr(), capacity: count };
        // SAFETY: the blocks are as long; the layout's counts are where it begins.
        let send = || unsafe { exchange.send_at(layout_at(&layout), &there, given, &stream) };
        // SAFETY: as above.
        let send_back = || unsafe { exchange.send_back_at(layout_at(&layout), &back, &stream) };
        let all: [&dyn Fn() -> Result<()>; 2] = [&send, &send_back];
        let mut took = [0.0_f64; 2];
        for (call, took) in all.into_iter().zip(&mut took) {
            let graph = Graph::capture(pool, stream, || (0..REPEATS).try_for_each(|_| call()))?;
            let mut times = Vec::new();
            for _ in 0..7 {
                comm.barrier(&stream)?;
                times.push(clock.time(pool, stream, || graph.launch(pool, stream))?);
            }
            comm.synchronize(&stream)?;
            times.sort_by(f64::total_cmp);
            *took = times[times.len() / 2] / REPEATS as f64;
            graph.destroy(pool)?;
        }
        if pool.rank() == 0 {
            let [there, back] = took;
            println!(
                "row_exchange: {count} of 7168 bf16 a rank, evenly: {there:.1} us there, {back:.1} us back"
            );
        }
    }
    Ok(())
}

/// How many bytes data begins behind an aligned address: mostly none.
fn shift(number: u64) -> usize {
    if number & 3 == 0 { (number >> 2) as usize % 32 } else { 0 }
}

/// The byte of a block at which a layout begins.
fn layout_at(layout: &RowLayout) -> *mut u8 {
    layout.counts() as *mut u8
}

fn longs(bytes: &[u8]) -> Vec<i64> {
    let number = |bytes: &[u8]| i64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    bytes.chunks_exact(8).map(number).collect()
}
