//! Checks reduce-scatters: every algorithm by name, any alignment, both kinds of memory, in place, through little scratch and the usual one, eager and in graphs.

use symmpool_allocator::{Block, Pool, Result, Stream};
use symmpool_collectives::{
    Algorithm, Communicator, CommunicatorOptions, DType, ReduceOp, StandardCollective,
};

use crate::cuda::{Graph, download, stream, upload};
use crate::oracle::{differs, input, random, reduce};
use crate::{ORDINARY, Options};

const POISON: u8 = 0x5a;
/// Bytes behind the output that must not change.
const AROUND: usize = 64;
/// Bytes of a part, of which calls have whole elements: less than a vector, one piece, pieces of several copies, and more
/// pieces than there are slots for.
const PARTS: [usize; 5] = [8, 100_000, (4 << 20) + 24, (9 << 20) + 8, (24 << 20) + 40];
const QUICK: [usize; 3] = [100_000, (4 << 20) + 24, (9 << 20) + 8];
/// Room for the longest part.
const ROOM: usize = 25 << 20;
const KINDS: [(DType, ReduceOp); 4] = [
    (DType::Bf16, ReduceOp::Sum),
    (DType::I32, ReduceOp::Max),
    (DType::F64, ReduceOp::Sum),
    (DType::U8, ReduceOp::Min),
];

/// Runs the checks. Returns how many cases there were, and how many of them were wrong.
pub(crate) fn run(pool: &Pool, options: &Options) -> Result<(u64, u64)> {
    let (rank, world) = (pool.rank() as usize, pool.world() as usize);
    let ordinary = pool.lane(ORDINARY)?;
    // Indexed by whether it is a window.
    let pair = |bytes: usize| Ok([ordinary.alloc::<u8>(bytes)?, pool.alloc::<u8>(bytes)?]);
    let inputs: [Block<u8>; 2] = pair(world * ROOM + AROUND)?;
    let outputs: [Block<u8>; 2] = pair(ROOM + AROUND)?;
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
        for (nth, name) in names.chain([None]).enumerate() {
            for part in PARTS {
                for (which, (dtype, op)) in KINDS.into_iter().enumerate() {
                    let long = part > 1 << 20;
                    let skipped = options.quick && !(QUICK.contains(&part) && which < 2);
                    // Emulated devices take long for what does not go by copies.
                    let copied = matches!(name, Some("copy" | "direct") | None) && part < 16 << 20;
                    let slow = options.emulated && long && !(copied && which == 0);
                    let lamport = matches!(dtype, DType::Bf16);
                    if skipped || slow || (name == Some("lamport") && !lamport) {
                        continue;
                    }
                    let number =
                        random(options.seed ^ ((nth * 8 + which) as u64) << 32, part as u64);
                    let shift = |by: u32| (number >> by) % 4 * dtype.size() as u64;
                    let (count, in_place) = (part / dtype.size(), number & 1 == 1);
                    let part = count * dtype.size();
                    // Ranks can read inputs directly only in windows.
                    let window = name == Some("direct") || number >> 1 & 1 == 1;
                    let from = inputs[usize::from(window)].address() + shift(8);
                    let to = outputs[number as usize >> 2 & 1].address() + shift(16);
                    let to = if in_place { from + (rank * part) as u64 } else { to };
                    let call = |stream: &Stream| {
                        let (collective, root) = (StandardCollective::ReduceScatter, 0);
                        let (to, from) = (to as *mut u8, from as *const u8);
                        // SAFETY: both ranges lie in blocks with room for them, which nothing else uses.
                        unsafe {
                            comm.call_at(collective, name, to, from, count, dtype, op, root, stream)
                        }
                    };
                    // A second call in place would reduce what the first one has left.
                    let calls = if in_place { 1 } else { 2 };
                    let graph = Graph::capture(pool, stream, || {
                        (0..calls).try_for_each(|_| call(&stream))
                    })?;
                    for in_graph in [false, true] {
                        let seed = random(number, 7 + u64::from(in_graph));
                        // Each part of each rank's input is made alone, as ranks need few of the others' parts.
                        let part_of = |owner: usize, of: usize| {
                            input(random(seed, of as u64), owner as u32, dtype, count)
                        };
                        let own: Vec<u8> = (0..world).flat_map(|of| part_of(rank, of)).collect();
                        let parts: Vec<Vec<u8>> =
                            (0..world).map(|owner| part_of(owner, rank)).collect();
                        let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
                        let around = if in_place && rank + 1 < world {
                            own[(rank + 1) * part..][..AROUND.min(part)].to_vec()
                        } else {
                            vec![POISON; AROUND]
                        };
                        upload(pool, to, &vec![POISON; part + AROUND])?;
                        upload(pool, from, &own)?;
                        if in_graph { graph.launch(pool, stream) } else { call(&stream) }?;
                        comm.synchronize(&stream)?;
                        let got = download(pool, to, part + around.len())?;
                        let bad = differs(&got[..part], &reduce(&parts, dtype, op), dtype)
                            .or((got[part..] != around).then_some(part));
                        cases += 1;
                        if let Some(at) = bad {
                            wrong += 1;
                            let (name, how) = (name.unwrap_or("auto"), ["eager", "in a graph"]);
                            let how = how[usize::from(in_graph)];
                            println!(
                                "rank {rank}: reduce_scatter by {name} of {count} {}, {how}, in place: {in_place}: \
                                 wrong from byte {at} on",
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
