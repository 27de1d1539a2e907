//! Checks reduce-scatters: every algorithm by name, any alignment, both kinds of memory, in place, through little scratch
//! and the usual one, eager and in graphs. Two calls with other data follow each other without a pause.

use symmpool_allocator::{Block, Pool, Result, Stream};
use symmpool_collectives::{
    Algorithm, Communicator, CommunicatorOptions, DType, ReduceOp, Request, ScatterCases,
    StandardCollective, checked_reduce_scatters,
};

use crate::cuda::{CallGraph, download, stream, upload};
use crate::oracle::{differs, input, random, reduce};
use crate::{ORDINARY, Options};

const POISON: u8 = 0x5a;
/// Bytes behind the output that must not change.
const AROUND: usize = 64;
/// Bytes of a part, of which calls have whole elements: less than a vector, one piece, pieces of several copies, and more
/// pieces than there are slots for. The last one is for the choice that a communicator makes by itself.
const PARTS: [usize; 6] =
    [8, 100_000, (4 << 20) + 24, (9 << 20) + 8, (24 << 20) + 40, (50 << 20) + 8];
const QUICK: [usize; 3] = [100_000, (4 << 20) + 24, (9 << 20) + 8];
const KINDS: [(DType, ReduceOp); 4] = [
    (DType::Bf16, ReduceOp::Sum),
    (DType::I32, ReduceOp::Max),
    (DType::F64, ReduceOp::Sum),
    (DType::U8, ReduceOp::Min),
];

/// The buffers of a call, indexed by whether they are windows.
struct Buffers {
    inputs: [Block<u8>; 2],
    outputs: [Block<u8>; 2],
}

/// One call of a rank.
#[derive(Clone, Copy)]
struct Case {
    dtype: DType,
    op: ReduceOp,
    count: usize,
    in_place: bool,
    from: u64,
    to: u64,
}

impl Case {
    fn part(&self) -> usize {
        self.count * self.dtype.size()
    }

    /// Data of the part that rank `owner` contributes to rank `of`. Each is made alone, as ranks need few of the
    /// others' parts.
    fn part_of(&self, seed: u64, owner: usize, of: usize) -> Vec<u8> {
        input(random(seed, of as u64), owner as u32, self.dtype, self.count)
    }

    fn prepare(&self, pool: &Pool, seed: u64) -> Result<()> {
        let (rank, world) = (pool.rank() as usize, pool.world() as usize);
        if !self.in_place {
            upload(pool, self.to, &vec![POISON; self.part() + AROUND])?;
        }
        let mine: Vec<Vec<u8>> = (0..world).map(|of| self.part_of(seed, rank, of)).collect();
        upload(pool, self.from, &mine.concat())
    }

    /// The byte from which on the output is wrong, or what must not change around it, if there is one.
    fn wrong_byte(&self, pool: &Pool, seed: u64) -> Result<Option<usize>> {
        let (rank, world) = (pool.rank() as usize, pool.world() as usize);
        let parts: Vec<Vec<u8>> = (0..world).map(|owner| self.part_of(seed, owner, rank)).collect();
        let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        let wanted = reduce(&parts, self.dtype, self.op);
        let got = download(pool, self.to, self.part() + if self.in_place { 0 } else { AROUND })?;
        let (got, around) = got.split_at(self.part());
        let mut wrong = differs(got, &wanted, self.dtype);
        wrong = wrong.or(around.iter().any(|byte| *byte != POISON).then_some(self.part()));
        if self.in_place {
            let whole = download(pool, self.from, world * self.part())?;
            for of in (0..world).filter(|of| *of != rank) {
                let there = &whole[of * self.part()..][..self.part()];
                let kept = there == self.part_of(seed, rank, of);
                wrong = wrong.or((!kept).then_some(of * self.part()));
            }
        }
        Ok(wrong)
    }
}

/// Facts that checks need to know of a reduce-scatter; `None` where no algorithm is requested.
fn cases_of(name: Option<&str>) -> Option<ScatterCases> {
    let found = |name| checked_reduce_scatters().find(|(each, _)| *each == name);
    name.map(|name| found(name).expect("a reduce-scatter of devices").1)
}

/// Runs the checks. Returns how many cases there were, and how many of them were wrong.
pub(crate) fn run(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let (rank, world) = (pool.rank() as usize, pool.world() as usize);
    let parts = PARTS.into_iter().filter(|part| !options.quick || QUICK.contains(part));
    let parts: Vec<usize> = parts.collect();
    let room = parts.iter().copied().max().unwrap_or(0) + 2 * AROUND;
    let ordinary = pool.lane(ORDINARY)?;
    let pair = |bytes: usize| Ok([ordinary.alloc::<u8>(bytes)?, pool.alloc::<u8>(bytes)?]);
    let buffers = || Ok(Buffers { inputs: pair(world * room)?, outputs: pair(room)? });
    let buffers: [Buffers; 2] = [buffers()?, buffers()?];
    pool.commit()?;
    let stream = stream(pool)?;
    let (mut cases, mut wrong) = (0, 0);
    // Little scratch, so that data passes through it in many rounds; and the usual scratch.
    for scratch in [Some(1 << 20), None] {
        let communicator =
            CommunicatorOptions { device_scratch_bytes: scratch, ..options.communicator() };
        let comm = Communicator::with_options(pool, &communicator)?;
        let algorithms = comm.algorithms();
        let scatter =
            |each: &&Algorithm| each.collective() == StandardCollective::ReduceScatter.name();
        let names = algorithms.iter().filter(scatter).map(|each| Some(each.name()));
        // Whatever is drawn, copies between two ranks are from inputs in windows to outputs elsewhere once.
        let names = names.flat_map(|name| {
            let twice = if cases_of(name).is_some_and(|row| row.by_copies) { 2 } else { 1 };
            (0..twice).map(move |time| (name, time == 1))
        });
        for (nth, (name, from_windows)) in names.chain([(None, false)]).enumerate() {
            for &part in &parts {
                for (which, (dtype, op)) in KINDS.into_iter().enumerate() {
                    let long = part > 1 << 20;
                    let skipped = options.quick && which > 1 || part > 48 << 20 && name.is_some();
                    // Emulated devices take long for what does not go by copies.
                    let row = cases_of(name);
                    let from_windows_alone = row.is_some_and(|row| row.input_windows);
                    let copied = from_windows_alone || row.is_none_or(|row| row.by_copies);
                    let slow = options.emulated && long && !(copied && which == 0);
                    let lamport = matches!(dtype, DType::Bf16);
                    let served = lamport || !row.is_some_and(|row| row.lamport_types);
                    if skipped || slow || !served {
                        continue;
                    }
                    let number =
                        random(options.seed ^ ((nth * 8 + which) as u64) << 32, part as u64);
                    let shift = |by: u32| (number >> by) % 4 * dtype.size() as u64;
                    let in_place = number & 1 == 1 && !from_windows;
                    // Ranks can read inputs directly only in windows.
                    let window = from_windows_alone || from_windows || number >> 1 & 1 == 1;
                    let count = part / dtype.size();
                    let case = |buffers: &Buffers| {
                        let from = buffers.inputs[usize::from(window)].address() + shift(8);
                        // Outputs may lie in another kind of memory on each rank.
                        let own = usize::from((number >> 2).is_multiple_of(rank as u64 + 2));
                        let to = match in_place {
                            true => from + (rank * count * dtype.size()) as u64,
                            false => buffers.outputs[own].address() + shift(16),
                        };
                        Case { dtype, op, count, in_place, from, to }
                    };
                    let both = buffers.each_ref().map(case);
                    let call = |stream: &Stream| {
                        both.iter().try_for_each(|case| {
                            let (collective, root) = (StandardCollective::ReduceScatter, 0);
                            let (to, from) = (case.to as *mut u8, case.from as *const u8);
                            // SAFETY: both ranges lie in blocks with room for them, which nothing else uses.
                            unsafe {
                                comm.call(
                                    &Request::at(collective, to, from, count, dtype)
                                        .op(op)
                                        .root(root)
                                        .algorithm(name),
                                    stream,
                                )
                            }
                        })
                    };
                    let graph = CallGraph::capture(pool, stream, || call(&stream))?;
                    for in_graph in [false, true] {
                        let seed = |at: usize| random(number, 2 * at as u64 + u64::from(in_graph));
                        for (at, case) in both.iter().enumerate() {
                            case.prepare(pool, seed(at))?;
                        }
                        if in_graph { graph.launch(pool, stream) } else { call(&stream) }?;
                        comm.synchronize(&stream)?;
                        for (at, case) in both.iter().enumerate() {
                            cases += 1;
                            let Some(byte) = case.wrong_byte(pool, seed(at))? else { continue };
                            wrong += 1;
                            let name = name.unwrap_or("auto");
                            println!(
                                "rank {rank}: reduce_scatter by {name} of {count} {}, call {at}, in a graph: \
                                 {in_graph}, in place: {in_place}: wrong from byte {byte} on",
                                dtype.name()
                            );
                        }
                    }
                    graph.destroy(pool)?;
                }
            }
        }
    }
    if rank == 0 {
        println!("reduce_scatter: {cases} cases, {wrong} wrong");
    }
    Ok((cases, wrong))
}
