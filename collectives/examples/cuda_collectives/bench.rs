//! Times graphs of calls: the median of replays, the slowest rank.

use std::collections::BTreeMap;
use std::time::Instant;

use serde_json::json;
use symmpool_allocator::{Deadline, Pool, Result, Stream};
use symmpool_collectives::{
    AllReduceAlgorithm, Communicator, CommunicatorOptions, DType, ReduceOp,
};

use crate::Options;
use crate::cuda::{Clock, Graph, download, driver, stream, upload};
use crate::oracle::{differs, input, reduce};

const REPLAYS: usize = 12;
const WARM_UP: usize = 3;

pub(crate) fn run(pool: &Pool, options: &Options) -> Result<bool> {
    let most = options.max as usize;
    let (from, to) = (pool.alloc::<u8>(most)?, pool.alloc::<u8>(most)?);
    pool.commit()?;
    let stream = stream(pool)?;
    let clock = Clock::new(pool)?;
    // Checked up to here; the rest repeats.
    let checked = most.min(4 << 20);
    let all: Vec<Vec<u8>> =
        (0..pool.world()).map(|rank| input(options.seed, rank, DType::Bf16, checked / 2)).collect();
    let all: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
    for at in (0..most).step_by(checked) {
        let bytes = checked.min(most - at);
        upload(pool, from.address() + at as u64, &all[pool.rank() as usize][..bytes])?;
    }
    let wanted = reduce(&all, DType::Bf16, ReduceOp::Sum);
    let mut right = true;
    let mut rows: BTreeMap<u64, Vec<(String, f64)>> = BTreeMap::new();
    let mut number = 0_u32;
    for algorithm in AllReduceAlgorithm::ALL {
        if !options.algorithms.is_empty()
            && !options.algorithms.iter().any(|name| name == algorithm.name())
        {
            continue;
        }
        let communicator = CommunicatorOptions { algorithm, ..Default::default() };
        let mut bytes = options.min;
        while bytes <= options.max {
            let comm = Communicator::with_options(pool, &communicator)?;
            let calls = match bytes {
                0..=1_048_576 => 40,
                1_048_577..=16_777_216 => 16,
                _ => 6,
            };
            let captured = Graph::capture(pool, stream, || {
                for _ in 0..calls {
                    // SAFETY: both blocks are this long, and nothing else uses them.
                    unsafe {
                        comm.all_reduce_at(
                            to.address() as *mut u8,
                            from.address() as *const u8,
                            bytes as usize / 2,
                            DType::Bf16,
                            ReduceOp::Sum,
                            &stream,
                        )
                    }?;
                }
                Ok(())
            });
            let graph = match captured {
                Ok(graph) => graph,
                Err(error) if error.is_unsupported() => {
                    bytes *= 2;
                    continue;
                }
                Err(error) => return Err(error),
            };
            let mut times = Vec::new();
            for _ in 0..REPLAYS {
                number += 1;
                // Ranks begin together, on the device too.
                let deadline = Deadline::seconds(60);
                pool.group().all_gather(&format!("bench{number}"), &[], deadline)?;
                comm.barrier(&stream)?;
                times.push(
                    clock.time(pool, stream, || graph.launch(pool, stream))? / f64::from(calls),
                );
            }
            comm.synchronize(&stream)?;
            let mut times = times.split_off(WARM_UP);
            times.sort_by(f64::total_cmp);
            let mine = times[times.len() / 2];
            let length = (bytes as usize).min(checked);
            let got = download(pool, to.address(), length)?;
            if differs(&got, &wanted[..length], DType::Bf16).is_some() {
                right = false;
                println!("rank {}: {} of {bytes} bytes is wrong", pool.rank(), algorithm.name());
            }
            let deadline = Deadline::seconds(60);
            let of_all =
                pool.group().all_gather(&format!("time{number}"), &mine.to_le_bytes(), deadline)?;
            let slowest = of_all
                .parts()
                .map(|part| f64::from_le_bytes(part.try_into().expect("a number")))
                .fold(0.0, f64::max);
            rows.entry(bytes).or_default().push((algorithm.name().to_owned(), slowest));
            graph.destroy(pool)?;
            bytes *= 2;
        }
    }
    // As in programs that use the device: its context is current.
    let host_us =
        driver(pool).with_context(|| eager(pool, stream, (to.address(), from.address())))?;
    if pool.rank() == 0 {
        show(&rows, pool.world());
        println!("a call of 4 KiB outside of graphs takes {host_us:.2} us of the host's time");
        if let Some(path) = &options.json {
            let facts = driver(pool).facts();
            let results = json!({
                "device": facts.name, "driver": facts.driver_version, "ranks": pool.world(),
                "dtype": "bf16", "op": "sum", "eager_host_us": host_us,
                "command": std::env::args().skip(1).collect::<Vec<_>>().join(" "),
                "us": rows.iter().map(|(bytes, row)| {
                    json!({ "bytes": bytes, "by": row.iter().cloned().collect::<BTreeMap<_, _>>() })
                }).collect::<Vec<_>>(),
            });
            let text = serde_json::to_string_pretty(&results).expect("plain data");
            std::fs::write(path, text + "\n").expect("the results written");
        }
    }
    Ok(right)
}

/// Microseconds that the host takes to put a small call on a stream: the median of bursts that the
/// stream's queue holds.
fn eager(pool: &Pool, stream: Stream, (to, from): (u64, u64)) -> Result<f64> {
    const BURST: u32 = 200;
    let comm = Communicator::new(pool)?;
    let mut times = Vec::new();
    for _ in 0..15 {
        let began = Instant::now();
        for _ in 0..BURST {
            // SAFETY: both blocks are longer, and nothing else uses them.
            unsafe {
                comm.all_reduce_at(
                    to as *mut u8,
                    from as *const u8,
                    2048,
                    DType::Bf16,
                    ReduceOp::Sum,
                    &stream,
                )
            }?;
        }
        times.push(began.elapsed().as_secs_f64() * 1e6 / f64::from(BURST));
        comm.synchronize(&stream)?;
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

fn show(rows: &BTreeMap<u64, Vec<(String, f64)>>, world: u32) {
    for (bytes, row) in rows {
        let mut row = row.clone();
        row.sort_by(|a, b| a.1.total_cmp(&b.1));
        let best = row[0].1;
        let moved = *bytes as f64 * 2.0 * f64::from(world - 1) / f64::from(world);
        print!("{:>9} KiB {:>7.1} GB/s ", bytes >> 10, moved / best / 1000.0);
        for (name, us) in row {
            print!(" {name} {us:.2}");
        }
        println!();
    }
}
