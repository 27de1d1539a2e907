//! Checks all-to-alls: random traffic matrices with counts on the host and on the device, any alignment and kind of
//! memory; graphs that replay with new splits, between all-reduces.

mod traps;

use symmpool_allocator::{Block, Error, Pool, Result, Stream};
use symmpool_collectives::{
    AllToAllAlgorithm, Communicator, CommunicatorOptions, DType, SplitRows, SplitsAt,
};

use crate::cuda::{download, stream, upload};
use crate::expect_error;
use crate::matrix::{Matrix, bytes};
use crate::oracle::random;
use crate::{ORDINARY, Options};

/// Bytes of the longest data, of which some parts go through inboxes and others do not; bytes of random matrices;
/// and room for shifts and for bytes around the data that must not change.
const MAX_BYTES: usize = 32 << 20;
const SOME: usize = 6 << 20;
const AROUND: usize = 64;
const POISON: u8 = 0xa5;
/// How many matrices are tried for each algorithm, with counts on the host and on the device.
const MATRICES: u64 = 400;
/// Bytes of rows.
const ROWS: [(DType, usize); 6] = [
    (DType::U8, 1),
    (DType::Bf16, 1),
    (DType::F32, 1),
    (DType::I64, 1),
    (DType::Bf16, 24),
    (DType::U8, 7),
];

struct ExchangeChecks<'a> {
    pool: &'a Pool,
    comm: Communicator,
    stream: Stream,
    /// Indexed by whether it is a window.
    inputs: [Block<u8>; 2],
    outputs: [Block<u8>; 2],
    /// Input splits, output splits and output offsets.
    splits: [Block<u8>; 3],
    /// The inputs of all ranks.
    data: Vec<Vec<u8>>,
    options: &'a Options,
    seed: u64,
    cases: u64,
    wrong: u64,
}

/// Runs the checks. Returns how many cases there were, and how many of them were wrong.
pub(crate) fn run(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let mut exchange = ExchangeChecks::new(pool, options)?;
    for all_to_all in AllToAllAlgorithm::ALL {
        // Little scratch, so that calls take several rounds.
        let matrices = options.few(MATRICES, 12);
        let options = CommunicatorOptions {
            all_to_all,
            device_scratch_bytes: Some(1 << 20),
            ..options.communicator()
        };
        exchange.comm = Communicator::with_options(pool, &options)?;
        let before = (exchange.cases, exchange.wrong);
        for nth in 0..matrices {
            exchange.matrix(nth, all_to_all)?;
        }
        // Call numbers that overflow, and those at which old flags are overwritten.
        for first_epoch in [(1 << 30) - 4, u32::MAX - 5] {
            let options = CommunicatorOptions { first_epoch, ..options.clone() };
            exchange.comm = Communicator::with_options(pool, &options)?;
            for nth in 0..12.min(matrices / 2) {
                exchange.matrix(1000 + nth, all_to_all)?;
            }
        }
        if pool.rank() == 0 {
            println!(
                "all_to_all {}: {} cases, {} wrong",
                all_to_all.name(),
                exchange.cases - before.0,
                exchange.wrong - before.1
            );
        }
    }
    exchange.comm = Communicator::with_options(pool, &options.communicator())?;
    exchange.new_splits_ask_no_host()?;
    exchange.zero_counts_keep_ranks_in_step()?;
    exchange.splits_of_the_host_are_reused_at_once()?;
    if !options.quick {
        exchange.a_slow_consumer_reads_what_it_was_sent()?;
    }
    exchange.nonsense()?;
    if pool.rank() == 0 {
        println!("all_to_all: {} cases, {} wrong", exchange.cases, exchange.wrong);
    }
    Ok((exchange.cases, exchange.wrong))
}

/// Checks matrices in which some parts are too long for inboxes and others are not.
pub(crate) fn mixed(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let mut exchange = ExchangeChecks::new(pool, options)?;
    let world = pool.world();
    // Up to 24 MiB that a rank sends go through inboxes, if all peers get as much.
    let long = (24 << 20) / (world as usize - 1).max(1);
    for nth in 0..options.few(40, 4) {
        let seed = random(options.seed ^ 0x407, nth);
        exchange.exchange(nth, seed, AllToAllAlgorithm::Auto, |size| {
            Matrix::hot(seed, world, nth as u32 % world, long / size)
        })?;
    }
    if pool.rank() == 0 {
        println!(
            "all_to_all in every way at once: {} cases, {} wrong",
            exchange.cases, exchange.wrong
        );
    }
    Ok((exchange.cases, exchange.wrong))
}

impl<'a> ExchangeChecks<'a> {
    fn new(pool: &'a Pool, options: &'a Options) -> Result<Self> {
        let ordinary = pool.lane(ORDINARY)?;
        let room = MAX_BYTES + 2 * AROUND;
        let pair = || Ok([ordinary.alloc::<u8>(room)?, pool.alloc::<u8>(room)?]);
        let few = || ordinary.alloc::<u8>(8 * pool.world() as usize);
        let (seed, world) = (options.seed, pool.world());
        let exchange = Self {
            pool,
            comm: Communicator::with_options(pool, &options.communicator())?,
            stream: stream(pool)?,
            options,
            inputs: pair()?,
            outputs: pair()?,
            splits: [few()?, few()?, few()?],
            data: (0..world)
                .map(|rank| with_empty_words(seed, bytes(seed, rank, MAX_BYTES)))
                .collect(),
            seed,
            cases: 0,
            wrong: 0,
        };
        pool.commit()?;
        Ok(exchange)
    }

    fn judge(&mut self, what: &str, got: &[u8], wanted: &[u8]) {
        self.cases += 1;
        if got == wanted {
            return;
        }
        self.wrong += 1;
        if self.wrong < 20 {
            let differ = got.iter().zip(wanted).filter(|(got, wanted)| got != wanted).count();
            let at = got.iter().zip(wanted).position(|(got, wanted)| got != wanted).unwrap_or(0);
            let part = |bytes: &[u8]| bytes[at..bytes.len().min(at + 8)].to_vec();
            println!(
                "rank {}: {what}: {differ} of {} bytes wrong, from byte {at} on: {:02x?} and should \
                 be {:02x?}",
                self.pool.rank(),
                wanted.len(),
                part(got),
                part(wanted)
            );
        }
    }

    /// Checks one random matrix.
    fn matrix(&mut self, nth: u64, algorithm: AllToAllAlgorithm) -> Result<()> {
        let seed = random(self.seed ^ ((algorithm as u64) << 56), nth);
        let world = self.pool.world();
        self.exchange(nth, seed, algorithm, |size| Matrix::random(seed, world, SOME / size))
    }

    /// Checks one matrix, for rows of so many bytes, with counts on the host and with counts on the device.
    fn exchange(
        &mut self,
        nth: u64,
        seed: u64,
        algorithm: AllToAllAlgorithm,
        matrix: impl FnOnce(usize) -> Matrix,
    ) -> Result<()> {
        let number = |which: u64| random(seed, 50 + which);
        let (rank, world) = (self.pool.rank(), self.pool.world());
        let (dtype, row) = ROWS[(number(0) % ROWS.len() as u64) as usize];
        let size = row * dtype.size();
        let matrix = matrix(size);
        // Each rank decides for itself.
        let own = |which: u64| random(seed, 60 + 10 * u64::from(rank) + which);
        let shift = |number: u64| if number & 3 == 0 { 0 } else { (number >> 2) as usize % 32 };
        let (from_window, to_window) = (own(0) & 1, own(1) & 1);
        let from = self.inputs[from_window as usize].address() + shift(own(2)) as u64;
        let output = self.outputs[to_window as usize].address();
        let to = output + (AROUND / 2 + shift(own(3))) as u64;
        let received: usize = matrix.receives(rank).iter().sum();
        let what = |mode: &str| {
            format!(
                "{mode}, matrix {nth} ({}), {}, rows of {row} {}, input {} at +{}, output {} at +{}, \
                 sends {:?}, receives {:?}",
                matrix.name,
                algorithm.name(),
                dtype.name(),
                ["ordinary", "window"][from_window as usize],
                shift(own(2)),
                ["ordinary", "window"][to_window as usize],
                shift(own(3)),
                matrix.sends(rank),
                matrix.receives(rank)
            )
        };
        let sent = matrix.sends(rank).iter().sum::<usize>() * size;
        upload(self.pool, from, &self.data[rank as usize][..sent.max(SOME)])?;
        let before = (to - output) as usize;
        upload(self.pool, output, &vec![POISON; received * size + AROUND + before])?;
        let elements = |counts: Vec<usize>| counts.iter().map(|n| n * row).collect::<Vec<_>>();
        let (send, receive) = (elements(matrix.sends(rank)), elements(matrix.receives(rank)));
        self.all_to_all_v((to, from), (&receive, &send), dtype)?;
        self.comm.synchronize(&self.stream)?;
        let mut wanted = vec![POISON; before];
        wanted.extend(matrix.output(&self.data, rank, size, received));
        wanted.extend([POISON; AROUND]);
        let got = download(self.pool, output, wanted.len())?;
        self.judge(&what("splits of the host"), &got, &wanted);

        let capacity = |rank: u32| {
            let exact: usize = matrix.receives(rank).iter().sum();
            match random(seed, 200 + u64::from(rank)) % 4 {
                0 => exact,
                1 => exact + exact / 3 + 1,
                2 => exact + 100,
                _ => exact - exact / 4,
            }
        };
        let capacities: Vec<usize> = (0..world).map(capacity).collect();
        let capacity = capacities[rank as usize].min((MAX_BYTES - AROUND) / size);
        let mine = matrix.sends(rank);
        let rows = SplitRows {
            dtype,
            row,
            length: mine.iter().sum::<usize>() + number(1) as usize % 3,
            capacity,
        };
        let counts = if number(2) & 1 == 0 { DType::I32 } else { DType::I64 };
        self.put_splits(counts, &mine)?;
        let room = received.max(capacity) * size + AROUND + before;
        upload(self.pool, output, &vec![POISON; room])?;
        let splits = self.splits_at(counts, number(3) & 1 == 0);
        // SAFETY: both ranges lie in blocks with room for them, which nothing else uses.
        unsafe {
            self.comm.all_to_all_v_splits_at(
                to as *mut u8,
                from as *const u8,
                &rows,
                &splits,
                &self.stream,
            )
        }?;
        let result = self.comm.synchronize(&self.stream);
        let what = format!("{}, capacities {capacities:?}", what("splits of the device"));
        let overflow = result.as_ref().is_err_and(Error::is_overflow);
        if overflow != matrix.overflows(&capacities) || (result.is_err() && !overflow) {
            self.wrong += 1;
            println!("rank {rank}: {what}: synchronize gave {result:?}");
            if self.comm.failure().is_some() {
                result?;
            }
        }
        let mut wanted = vec![POISON; before];
        wanted.extend(matrix.output(&self.data, rank, size, capacity));
        wanted.resize(room, POISON);
        let got = download(self.pool, output, room)?;
        self.judge(&what, &got, &wanted);
        if !splits.output.is_null() {
            let (came, offsets) = (matrix.receives(rank), matrix.offsets(rank));
            let got = self.get_splits(counts, 1)?;
            self.judge(&format!("{what}: output splits"), &words(&got), &words(&came));
            let got = self.get_splits(counts, 2)?;
            self.judge(&format!("{what}: output offsets"), &words(&got), &words(&offsets));
        }
        Ok(())
    }

    /// Sends and receives so many elements, at addresses in this struct's blocks with room for them.
    fn all_to_all_v(
        &self,
        (to, from): (u64, u64),
        (receive, send): (&[usize], &[usize]),
        dtype: DType,
    ) -> Result<()> {
        let (to, from) = (to as *mut u8, from as *const u8);
        // SAFETY: both ranges lie in blocks with room for them, which nothing else uses.
        unsafe { self.comm.all_to_all_v_at(to, from, receive, send, dtype, &self.stream) }
    }

    fn put_splits(&self, dtype: DType, counts: &[usize]) -> Result<()> {
        let all: Vec<u8> = counts
            .iter()
            .flat_map(|count| (*count as u64).to_le_bytes()[..dtype.size()].to_vec())
            .collect();
        upload(self.pool, self.splits[0].address(), &all)
    }

    fn get_splits(&self, dtype: DType, which: usize) -> Result<Vec<usize>> {
        let size = dtype.size();
        let got = download(self.pool, self.splits[which].address(), size * self.data.len())?;
        let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |n, b| n << 8 | usize::from(*b));
        Ok(got.chunks(size).map(number).collect())
    }

    fn splits_at(&self, dtype: DType, written: bool) -> SplitsAt {
        let at = |which: usize| self.splits[which].address() as *mut u8;
        let null = std::ptr::null_mut();
        SplitsAt {
            input: at(0),
            output: if written { at(1) } else { null },
            offsets: if written { at(2) } else { null },
            dtype,
        }
    }

    /// Splits on one rank's device that are negative, or larger than its input: all ranks get an error, and the
    /// communicator stays usable.
    fn nonsense(&mut self) -> Result<()> {
        let (rank, world) = (self.pool.rank(), self.pool.world());
        let (from, to) = (self.inputs[1].address(), self.outputs[1].address());
        let rows = SplitRows { dtype: DType::U8, row: 1, length: 1000, capacity: 1000 };
        let splits = self.splits_at(DType::I64, false);
        for bad in [usize::MAX, 1001, 1 << 62, 10] {
            let mine = if rank == world - 1 { bad } else { 10 };
            self.put_splits(DType::I64, &vec![mine; world as usize])?;
            upload(self.pool, to, &[POISON; 1000])?;
            // SAFETY: both blocks are longer.
            unsafe {
                let (to, from) = (to as *mut u8, from as *const u8);
                self.comm.all_to_all_v_splits_at(to, from, &rows, &splits, &self.stream)
            }?;
            let result = self.comm.synchronize(&self.stream);
            if bad == 10 {
                result?;
            } else {
                let error = expect_error(result, "a call with splits that make no sense")?;
                self.cases += 1;
                if !error.is_invalid_argument() {
                    self.wrong += 1;
                    println!("rank {rank}: splits of {bad}: {error}");
                }
            }
            let sends = |from: u32| if from == world - 1 && bad != 10 { 0 } else { 10 };
            let mut wanted = Vec::new();
            for from in 0..world {
                let part = rank as usize * 10..rank as usize * 10 + sends(from);
                wanted.extend_from_slice(&self.data[from as usize][part]);
            }
            let got = download(self.pool, to, wanted.len())?;
            self.judge(&format!("splits of {bad} on rank {}", world - 1), &got, &wanted);
        }
        Ok(())
    }
}

/// Data in which some words are the patterns that stand for an empty inbox and for data that equals it: `EMPTY` and
/// `ESCAPED` in `symmpool/impl/lamport_escaped.cuh`. From all addresses on, as parts begin anywhere.
pub(crate) fn with_empty_words(seed: u64, mut data: Vec<u8>) -> Vec<u8> {
    const WORDS: [u32; 2] = [0xc35a_96e8, 0xc35a_96e9];
    let mut at = 0;
    for nth in 0.. {
        let number = random(seed ^ 0xf5e5, nth);
        at += (number % 20_000) as usize;
        let length = (number >> 16) as usize % [8, 600][(number >> 60) as usize & 1];
        let Some(stretch) = data.get_mut(at..at + length) else { break };
        for (word, bytes) in stretch.chunks_mut(4).enumerate() {
            let which = random(number, word as u64) % 3;
            if let Some(word) = WORDS.get(which as usize) {
                bytes.copy_from_slice(&word.to_le_bytes()[..bytes.len()]);
            }
        }
    }
    data
}

fn words(counts: &[usize]) -> Vec<u8> {
    counts.iter().flat_map(|count| count.to_le_bytes()).collect()
}
