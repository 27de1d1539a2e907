//! Compares every collective with the oracle, bit for bit.

use symmpool_allocator::{Block, Pool, Result, Stream};
use symmpool_collectives::{
    AllReduceAlgorithm, Communicator, CommunicatorOptions, DType, ReduceOp, take_sms,
};

use crate::cuda::{CallGraph, download, stream, upload};
use crate::oracle::{differs, input, random, reduce};
use crate::{
    ORDINARY, Options, all_gather_broadcast, all_to_all, call_order, epochs, equal_parts, experts,
    explain, families, first_calls, fused, growth, huge, matmul, matmul_gather, matmul_small_m,
    measured_barrier, memory_operations, native, one_sided, one_sided_streams, p2p, plans,
    random_calls, reduce_scatter, repeats, slow, streams, two_threads,
};

/// Room for the longest data and any alignment.
const ROOM: usize = 5 << 20;

/// Buffers of one kind of memory.
struct Memory {
    name: &'static str,
    input: Block<u8>,
    output: Block<u8>,
}

struct Check<'a> {
    pool: &'a Pool,
    options: &'a Options,
    comm: Communicator,
    stream: Stream,
    cases: u64,
    wrong: u64,
    /// Calls that the algorithm does not serve.
    declined: u64,
}

/// When a part of the check runs, if the options want it.
#[derive(Clone, Copy)]
enum When {
    Always,
    /// It takes long: not in a quick check, unless it is named.
    Thorough,
    /// It takes very long, or much memory: only if it is named.
    Named,
}

/// A part of the check: how many cases there were, and how many of them wrong.
type CheckedPart = fn(&Pool, &Options) -> Result<(u64, u64)>;

/// Everything besides all-reduces by single algorithms, in the order in which it runs.
const PARTS: [(&str, When, CheckedPart); 30] = [
    ("growth", When::Always, growth::run),
    ("all_to_all", When::Always, equal_parts::run),
    ("all_to_all", When::Always, all_to_all::run),
    ("all_gather_broadcast", When::Always, all_gather_broadcast::run),
    ("reduce_scatter", When::Always, reduce_scatter::run),
    ("experts", When::Always, experts::run),
    ("handles", When::Always, experts::damage::run),
    ("one_sided", When::Always, one_sided::run),
    ("one_sided", When::Always, one_sided_streams::run),
    ("one_sided", When::Always, memory_operations::run),
    ("one_sided", When::Always, measured_barrier::run),
    ("call_order", When::Always, call_order::run),
    ("p2p", When::Always, p2p::run),
    ("plans", When::Always, plans::run),
    ("odd_plans", When::Always, plans::run_odd),
    ("native", When::Always, native::run),
    ("fused", When::Always, fused::run),
    ("matmul", When::Always, matmul::run),
    ("matmul", When::Always, matmul_gather::run),
    ("matmul_small_m", When::Always, matmul_small_m::run),
    ("mixed", When::Thorough, all_to_all::mixed),
    ("repeats", When::Thorough, repeats::run),
    ("streams", When::Thorough, streams::run),
    ("slow", When::Thorough, slow::run),
    ("epochs", When::Thorough, epochs::run),
    ("threads", When::Thorough, two_threads::run),
    ("random_plans", When::Named, random_calls::run),
    ("explain", When::Thorough, explain::run),
    ("huge", When::Named, huge::run),
    ("experts_time", When::Named, experts::time::run),
];

pub(crate) fn run(pool: &Pool, options: &Options) -> Result<bool> {
    let (mut cases, mut wrong) = (0, 0);
    if options.narrow && pool.rank() > 0 {
        take_sms(pool)?;
    }
    // Runs before any other call.
    if options.wants("first_calls") {
        (cases, wrong) = first_calls::run(pool, options)?;
    }
    let ordinary = pool.lane(ORDINARY)?;
    let memories = [
        Memory { name: "windows", input: pool.alloc(ROOM)?, output: pool.alloc(ROOM)? },
        Memory { name: "ordinary", input: ordinary.alloc(ROOM)?, output: ordinary.alloc(ROOM)? },
    ];
    pool.commit()?;
    for algorithm in AllReduceAlgorithm::ALL {
        let row = algorithm.checked().map(|checked| checked.cases);
        let one_of_all = row.is_some() && options.wants(families::ALL_REDUCES);
        if !options.wants(algorithm.name()) && !one_of_all {
            continue;
        }
        if pool.rank() == 0 {
            families::announce(algorithm.name());
        }
        // Little room, so that large calls go in several rounds.
        let communicator = CommunicatorOptions {
            algorithm,
            device_inbox_bytes: Some(2 << 20),
            device_scratch_bytes: Some(1 << 20),
            ..options.communicator()
        };
        let comm = Communicator::with_options(pool, &communicator)?;
        let mut check =
            Check { pool, options, comm, stream: stream(pool)?, cases: 0, wrong: 0, declined: 0 };
        for memory in &memories {
            check.all_reduces(memory, algorithm, options.seed)?;
            // Where ranks share a device, nothing goes in pieces, which ordinary memory needs.
            let served = !options.shared || memory.name != ORDINARY;
            if row.is_some_and(|row| row.by_copies) && served {
                check.pieces(memory, &communicator)?;
            }
            if algorithm == AllReduceAlgorithm::Auto {
                check.halves(memory, options.seed)?;
            }
            if row.is_some_and(|row| row.has_two_layouts) {
                check.in_company(memory, algorithm)?;
            }
        }
        if algorithm == AllReduceAlgorithm::Auto {
            check.graphs(&memories[0], options.seed)?;
        }
        if algorithm == AllReduceAlgorithm::Auto || !options.quick {
            check.numbers(&memories[0], &communicator, options.seed)?;
        }
        cases += check.cases;
        wrong += check.wrong;
        let name = algorithm.name();
        if pool.rank() == 0 {
            let declined = match check.declined {
                0 => String::new(),
                calls => format!(", {calls} calls that it does not serve"),
            };
            println!("{name}: {} cases, {} wrong{declined}", check.cases, check.wrong);
        }
        // An algorithm that was requested by its name and served nothing was not checked.
        if check.cases == 0 && options.names(name) {
            wrong += 1;
            if pool.rank() == 0 {
                println!("{name} served none of these calls on {} ranks", pool.world());
            }
        }
    }
    for (name, when, part) in PARTS {
        let named = !options.algorithms.is_empty();
        let wanted = match when {
            When::Always => true,
            When::Thorough => named || !options.quick,
            When::Named => named,
        };
        if wanted && options.wants(name) {
            if pool.rank() == 0 {
                families::announce(name);
            }
            let (part_cases, part_wrong) = part(pool, options)?;
            cases += part_cases;
            wrong += part_wrong;
        }
    }
    println!("rank {}: {cases} cases, {wrong} wrong", pool.rank());
    Ok(wrong == 0)
}

const COUNTS: [usize; 13] =
    [0, 1, 3, 8, 127, 1000, 2049, 4096, 16_411, 65_536, 131_099, 262_144, 1_000_003];

/// Enough for every branch of every kernel: one hop and several rounds, and each width of elements.
const QUICK: [(DType, ReduceOp); 3] =
    [(DType::Bf16, ReduceOp::Sum), (DType::F32, ReduceOp::Avg), (DType::U8, ReduceOp::Max)];
const QUICK_COUNTS: [usize; 2] = [1000, 1_000_003];

impl Check<'_> {
    fn all_reduces(
        &mut self,
        memory: &Memory,
        algorithm: AllReduceAlgorithm,
        seed: u64,
    ) -> Result<()> {
        for dtype in DType::REDUCED {
            for (which, op) in ReduceOp::ALL.into_iter().enumerate() {
                for (nth, count) in COUNTS.into_iter().enumerate() {
                    let bytes = count * dtype.size();
                    // All types and operations with some sizes, and all sizes with some types and operations.
                    let some = match self.options.quick {
                        true => QUICK.contains(&(dtype, op)) && QUICK_COUNTS.contains(&count),
                        false => {
                            op == ReduceOp::Sum || (which + nth + dtype as usize).is_multiple_of(4)
                        }
                    };
                    if !some || bytes > 4 << 20 {
                        continue;
                    }
                    let number = random(seed, self.cases);
                    let in_place = number.is_multiple_of(3);
                    let shift = |by: u32| match number >> by & 3 {
                        0 | 1 => 0,
                        2 => dtype.size(),
                        _ => (number >> (by + 2) & 15) as usize * dtype.size(),
                    };
                    let case = Case { dtype, op, count, in_place, from: shift(8), to: shift(16) };
                    match self.all_reduce(memory, case, number) {
                        Err(error) if error.is_unsupported() => {
                            // A call that an algorithm does not support is refused by all ranks alike.
                            if algorithm == AllReduceAlgorithm::Auto {
                                return Err(error);
                            }
                            self.declined += 1;
                        }
                        other => other?,
                    }
                }
            }
        }
        Ok(())
    }

    /// Calls by copy engines in one piece, two, three and more, each several times and in a graph: pieces take the same
    /// places in scratch again, and the same signals.
    fn pieces(&mut self, memory: &Memory, options: &CommunicatorOptions) -> Result<()> {
        let (dtype, op, count) = (DType::F32, ReduceOp::Sum, 400_003);
        let seed = self.options.seed;
        for scratch in [1_u64 << 20, 3 << 20, 4 << 20, 8 << 20] {
            let with =
                CommunicatorOptions { device_scratch_bytes: Some(scratch), ..options.clone() };
            self.comm = Communicator::with_options(self.pool, &with)?;
            for in_place in [false, true] {
                let case = Case { dtype, op, count, in_place, from: 0, to: 0 };
                for nth in 0..3 {
                    self.all_reduce(memory, case, random(seed, nth))?;
                }
            }
            let case = Case { dtype, op, count, in_place: false, from: 0, to: 0 };
            let graph = CallGraph::capture(self.pool, self.stream, || self.call(memory, case))?;
            for nth in 0..2 {
                self.all_reduce_by(memory, case, random(seed, nth), |check| {
                    graph.launch(check.pool, check.stream)
                })?;
            }
            graph.destroy(self.pool)?;
        }
        Ok(())
    }

    /// Calls of more than 4 MiB, where data lies otherwise in inboxes, of ranks that are alone or in company: all agree on the
    /// places, though kernels differ.
    fn in_company(&mut self, memory: &Memory, algorithm: AllReduceAlgorithm) -> Result<()> {
        let (dtype, op, count) = (DType::F32, ReduceOp::Sum, 1_150_000);
        for company in [[1, 1], [1, 2], [2, 1], [2, 2]] {
            let concurrent = Some(company[self.pool.rank() as usize % 2]);
            // Memory as by default.
            let options =
                CommunicatorOptions { algorithm, concurrent, ..self.options.communicator() };
            self.comm = Communicator::with_options(self.pool, &options)?;
            let case = Case { dtype, op, count, in_place: false, from: 0, to: 0 };
            // The inbox's thirds take turns.
            for nth in 0..4 {
                self.all_reduce(memory, case, random(self.options.seed, nth))?;
            }
        }
        Ok(())
    }

    /// Where a case has its input and its output.
    fn places(memory: &Memory, case: Case) -> (u64, u64) {
        let from = memory.input.address() + case.from as u64;
        (from, if case.in_place { from } else { memory.output.address() + case.to as u64 })
    }

    /// Puts the call of a case on the stream.
    fn call(&self, memory: &Memory, case: Case) -> Result<()> {
        let (from, to) = Self::places(memory, case);
        let (to, from) = (to as *mut u8, from as *const u8);
        let Case { dtype, op, count, .. } = case;
        // SAFETY: both ranges lie in blocks with room for them, which nothing else uses.
        unsafe { self.comm.all_reduce_at(to, from, count, dtype, op, &self.stream) }
    }

    fn all_reduce(&mut self, memory: &Memory, case: Case, seed: u64) -> Result<()> {
        self.all_reduce_by(memory, case, seed, |check| check.call(memory, case))
    }

    /// Fills input and output, has `make` put the call on the stream, and compares the result.
    fn all_reduce_by(
        &mut self,
        memory: &Memory,
        case: Case,
        seed: u64,
        make: impl FnOnce(&Self) -> Result<()>,
    ) -> Result<()> {
        let Case { dtype, op, count, .. } = case;
        let inputs: Vec<Vec<u8>> =
            (0..self.pool.world()).map(|rank| input(seed, rank, dtype, count)).collect();
        let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
        let (from, to) = Self::places(memory, case);
        let bytes = count * dtype.size();
        // The output is poisoned before the input is written, so that in-place data stays. Bytes beyond both ends
        // are checked, too.
        upload(self.pool, to, &vec![0xa5; bytes + 16])?;
        upload(self.pool, from, inputs[self.pool.rank() as usize])?;
        make(self)?;
        self.comm.synchronize(&self.stream)?;
        let wanted = reduce(&inputs, dtype, op);
        let got = download(self.pool, to, bytes + 16)?;
        self.judge(memory, &format!("all_reduce {case:?}"), &got, &wanted, dtype);
        Ok(())
    }

    fn halves(&mut self, memory: &Memory, seed: u64) -> Result<()> {
        let (rank, world) = (self.pool.rank(), self.pool.world());
        for dtype in DType::REDUCED {
            for count in COUNTS {
                let part = count * dtype.size();
                let quick = dtype == DType::Bf16 && QUICK_COUNTS.contains(&count);
                if part * world as usize > 4 << 20 || self.options.quick && !quick {
                    continue;
                }
                let number = random(seed, self.cases);
                let (from, to) = (memory.input.address(), memory.output.address());
                let shift = if number & 1 == 0 { 0 } else { dtype.size() as u64 };
                let (from, to) = (from + shift, to + shift);
                let whole: Vec<Vec<u8>> = (0..world)
                    .map(|rank| input(number, rank, dtype, count * world as usize))
                    .collect();

                upload(self.pool, to, &vec![0xa5; part + 16])?;
                upload(self.pool, from, &whole[rank as usize])?;
                let sum = ReduceOp::Sum;
                // SAFETY: both ranges lie in blocks with room for them, which nothing else uses.
                unsafe {
                    self.comm.reduce_scatter_at(
                        to as *mut u8,
                        from as *const u8,
                        count,
                        dtype,
                        sum,
                        &self.stream,
                    )
                }?;
                self.comm.synchronize(&self.stream)?;
                let own = rank as usize * part..(rank as usize + 1) * part;
                let parts: Vec<&[u8]> = whole.iter().map(|of| &of[own.clone()]).collect();
                let got = download(self.pool, to, part + 16)?;
                let what = format!("reduce_scatter of {count} {}", dtype.name());
                self.judge(memory, &what, &got, &reduce(&parts, dtype, sum), dtype);

                upload(self.pool, to, &vec![0xa5; part * world as usize + 16])?;
                // SAFETY: both ranges lie in blocks with room for them, which nothing else uses.
                unsafe {
                    self.comm.all_gather_at(
                        to as *mut u8,
                        from as *const u8,
                        count,
                        dtype,
                        &self.stream,
                    )
                }?;
                self.comm.synchronize(&self.stream)?;
                let wanted: Vec<u8> = whole.iter().flat_map(|of| &of[..part]).copied().collect();
                let got = download(self.pool, to, part * world as usize + 16)?;
                let what = format!("all_gather of {count} {}", dtype.name());
                self.judge(memory, &what, &got, &wanted, DType::U8);

                let root = (number >> 8) as u32 % world;
                // SAFETY: both ranges lie in blocks with room for them, which nothing else uses.
                unsafe {
                    self.comm.broadcast_at(from as *mut u8, count, dtype, root, &self.stream)
                }?;
                self.comm.synchronize(&self.stream)?;
                let got = download(self.pool, from, part)?;
                let what = format!("broadcast of {count} {} from {root}", dtype.name());
                self.judge_exact(memory, &what, &got, &whole[root as usize][..part], DType::U8);
            }
        }
        Ok(())
    }

    /// Calls whose numbers overflow, and those at which old flags are overwritten.
    fn numbers(&mut self, memory: &Memory, options: &CommunicatorOptions, seed: u64) -> Result<()> {
        for first_epoch in [(1 << 30) - 4, u32::MAX - 5] {
            let options = CommunicatorOptions { first_epoch, ..options.clone() };
            let usual =
                std::mem::replace(&mut self.comm, Communicator::with_options(self.pool, &options)?);
            for call in 0..12_u64 {
                let count = 1 + random(seed, call) as usize % 40_000;
                let (dtype, op) = (DType::Bf16, ReduceOp::Sum);
                let case = Case { dtype, op, count, in_place: call % 2 == 0, from: 0, to: 0 };
                match self.all_reduce(memory, case, seed ^ call) {
                    Err(error) if error.is_unsupported() => {}
                    other => other?,
                }
            }
            self.comm = usual;
        }
        Ok(())
    }

    /// S2, S8: calls are captured into graphs, which are replayed in turn with eager calls in between.
    fn graphs(&mut self, memory: &Memory, seed: u64) -> Result<()> {
        let counts = [4096, 100_000, 1 << 20];
        let (from, to) = (memory.input.address(), memory.output.address());
        let data = input(seed, self.pool.rank(), DType::Bf16, 1 << 20);
        let all: Vec<Vec<u8>> =
            (0..self.pool.world()).map(|rank| input(seed, rank, DType::Bf16, 1 << 20)).collect();
        let all: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
        let wanted = reduce(&all, DType::Bf16, ReduceOp::Sum);
        upload(self.pool, from, &data)?;
        let call = |comm: &Communicator, count: usize, stream: &Stream| {
            // SAFETY: both ranges lie in blocks with room for them, which nothing else uses.
            unsafe {
                comm.all_reduce_at(
                    to as *mut u8,
                    from as *const u8,
                    count,
                    DType::Bf16,
                    ReduceOp::Sum,
                    stream,
                )
            }
        };
        // The communicator has made no call yet: its first call is captured.
        let comm = Communicator::with_options(self.pool, &self.options.communicator())?;
        let graphs: Vec<CallGraph> = counts
            .iter()
            .map(|count| {
                CallGraph::capture(self.pool, self.stream, || {
                    call(&comm, *count, &self.stream)?;
                    call(&comm, *count / 2, &self.stream)
                })
            })
            .collect::<Result<_>>()?;
        for round in 0..self.options.few(60, 6) {
            let which = random(seed, round) as usize % counts.len();
            upload(self.pool, to, &vec![0xa5; 2 << 20])?;
            graphs[which].launch(self.pool, self.stream)?;
            let mut longest = counts[which];
            if round % 3 == 0 {
                let eager = 1 + random(seed, round) as usize % 300_000;
                call(&comm, eager, &self.stream)?;
                longest = longest.max(eager);
            }
            comm.synchronize(&self.stream)?;
            let got = download(self.pool, to, 2 * longest)?;
            let what = format!("round {round} of graphs");
            self.judge_exact(memory, &what, &got, &wanted[..2 * longest], DType::Bf16);
        }
        for graph in graphs {
            graph.destroy(self.pool)?;
        }
        Ok(())
    }

    /// Compares a result. `got` has 16 bytes more, which must not have changed.
    fn judge(&mut self, memory: &Memory, what: &str, got: &[u8], wanted: &[u8], dtype: DType) {
        let (result, beyond) = got.split_at(wanted.len());
        if beyond.iter().any(|byte| *byte != 0xa5) {
            self.wrong += 1;
            println!("rank {}: {}: {what}: wrote past the end", self.pool.rank(), memory.name);
        }
        self.judge_exact(memory, what, result, wanted, dtype);
    }

    fn judge_exact(
        &mut self,
        memory: &Memory,
        what: &str,
        got: &[u8],
        wanted: &[u8],
        dtype: DType,
    ) {
        self.cases += 1;
        if let Some(at) = differs(got, wanted, dtype) {
            self.wrong += 1;
            if self.wrong < 20 {
                let of = |bytes: &[u8]| bytes[at * dtype.size()..][..dtype.size()].to_vec();
                println!(
                    "rank {}: {}: {what}: element {at} is {:?} and should be {:?}",
                    self.pool.rank(),
                    memory.name,
                    of(got),
                    of(wanted)
                );
            }
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Case {
    dtype: DType,
    op: ReduceOp,
    count: usize,
    in_place: bool,
    /// How many bytes behind an aligned address the data begins.
    from: usize,
    to: usize,
}
