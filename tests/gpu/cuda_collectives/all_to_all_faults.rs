//! Checks all-to-alls that must fail: counts that disagree, and ranks that make no call.

use std::time::{Duration, Instant};

use symmpool_allocator::{Pool, Result};
use symmpool_collectives::{
    AllToAllAlgorithm, Communicator, CommunicatorOptions, DType, SplitRows, SplitsAt,
};

use crate::cuda::{download, stream, upload};
use crate::{MAX_LATE, expect_error};

const POISON: u8 = 0xa5;
/// Elements of a pair of ranks: one size for each way that data travels.
const COUNTS: [usize; 2] = [100, 300_000];
/// Bytes of a part that copy engines carry, whole and after a beginning that the companion kernel sends.
const PARTS: [usize; 2] = [1 << 20, 20 << 20];

/// Runs the checks. Returns how many of them were wrong.
pub(crate) fn run(pool: &Pool, timeout: Duration) -> Result<u32> {
    let (rank, world) = (pool.rank(), pool.world());
    let odd = world - 1;
    let room = (COUNTS[1] + 16) * world as usize;
    let (input, output) = (pool.alloc::<u8>(room)?, pool.alloc::<u8>(room)?);
    let splits = pool.alloc::<i64>(world as usize)?;
    pool.commit()?;
    let (from, to) = (input.as_ptr() as *const u8, output.as_ptr().cast::<u8>());
    let stream = stream(pool)?;
    let mut wrong = 0;
    for all_to_all in AllToAllAlgorithm::ALL {
        let options = CommunicatorOptions { all_to_all, timeout, ..Default::default() };
        for count in COUNTS {
            // Compiles kernels before anything is timed.
            let patient = CommunicatorOptions { timeout: 20 * timeout, ..options.clone() };
            let comm = Communicator::with_options(pool, &patient)?;
            let even = vec![count; world as usize];
            // SAFETY: both blocks are longer.
            unsafe { comm.all_to_all_v_at(to, from, &even, &even, DType::U8, &stream) }?;
            comm.synchronize(&stream)?;
            // Counts that disagree: a rank sends more or less than is expected, also where nothing is expected.
            for (sent, expected) in [(count, count + 7), (count + 7, count), (0, count), (count, 0)]
            {
                let comm = Communicator::with_options(pool, &options)?;
                let mut send = vec![count; world as usize];
                let mut receive = vec![count; world as usize];
                if rank == odd {
                    send[0] = sent;
                }
                if rank == 0 {
                    receive[odd as usize] = expected;
                }
                upload(pool, output.address(), &vec![POISON; room])?;
                let call = || {
                    // SAFETY: both blocks are longer; so it is below.
                    unsafe { comm.all_to_all_v_at(to, from, &receive, &send, DType::U8, &stream) }
                };
                let began = Instant::now();
                let result = call().and_then(|()| comm.synchronize(&stream));
                let error = expect_error(result, "a call with counts that disagree")?;
                let took = began.elapsed();
                let text = error.to_string();
                let names =
                    format!("rank {odd} sends {sent} elements to rank 0, which expects {expected}");
                let again = expect_error(call(), "a call after counts that disagreed")?;
                let beyond: usize = receive.iter().sum();
                let rest = download(pool, output.address() + beyond as u64, room - beyond)?;
                let good = error.is_diverged()
                    && text.contains(&names)
                    && again.is_diverged()
                    && took < timeout + MAX_LATE
                    && rest.iter().all(|byte| *byte == POISON);
                if !good {
                    wrong += 1;
                    println!(
                        "rank {rank}: all_to_all {}, {names}: after {took:?}: {error}",
                        all_to_all.name()
                    );
                } else if all_to_all == AllToAllAlgorithm::Auto && rank == 0 && sent == 0 {
                    println!("{error}");
                }
            }
            // One rank makes no call; first with counts on the host, then on the device.
            for on_device in [false, true] {
                let comm = Communicator::with_options(pool, &options)?;
                let counts = vec![count; world as usize];
                let bytes: Vec<u8> =
                    counts.iter().flat_map(|count| (*count as u64).to_le_bytes()).collect();
                upload(pool, splits.address(), &bytes)?;
                let call = || {
                    if on_device {
                        let (dtype, row) = (DType::U8, 1);
                        let rows = SplitRows { dtype, row, length: room, capacity: room };
                        let null = std::ptr::null_mut();
                        let splits = SplitsAt {
                            input: splits.as_ptr() as *const u8,
                            output: null,
                            offsets: null,
                            dtype: DType::I64,
                        };
                        // SAFETY: both blocks are longer than the rows; there is a split for every rank.
                        unsafe { comm.all_to_all_v_splits_at(to, from, &rows, &splits, &stream) }
                    } else {
                        // SAFETY: both blocks are longer than the sums of the counts.
                        unsafe {
                            comm.all_to_all_v_at(to, from, &counts, &counts, DType::U8, &stream)
                        }
                    }
                };
                // All ranks make a call first, as above.
                comm.set_timeout(20 * timeout)?;
                call()?;
                comm.synchronize(&stream)?;
                comm.set_timeout(timeout)?;
                if rank == odd {
                    std::thread::sleep(timeout + Duration::from_millis(500));
                    continue;
                }
                let began = Instant::now();
                let called = call();
                let result = called.and_then(|()| comm.synchronize(&stream));
                let error = expect_error(result, "an exchange without a peer")?;
                let took = began.elapsed();
                let named = error.ranks() == [odd];
                if !error.is_timeout() || !named || took > timeout + MAX_LATE {
                    wrong += 1;
                    println!(
                        "rank {rank}: all_to_all {} of {count} without a peer, after {took:?}: \
                         {error}",
                        all_to_all.name()
                    );
                }
            }
        }
    }
    Ok(wrong + copied(pool, timeout)?)
}

/// Equal parts by copy engines: a rank that calls with other parts, and one that makes no call.
fn copied(pool: &Pool, timeout: Duration) -> Result<u32> {
    let (rank, world) = (pool.rank(), pool.world());
    let odd = world - 1;
    let room = 2 * PARTS[1] * world as usize;
    let (input, output) = (pool.alloc::<u8>(room)?, pool.alloc::<u8>(room)?);
    pool.commit()?;
    let (from, to) = (input.as_ptr() as *const u8, output.as_ptr().cast::<u8>());
    let stream = stream(pool)?;
    let all_to_all = AllToAllAlgorithm::Copy;
    let options = CommunicatorOptions { all_to_all, timeout, ..Default::default() };
    let mut wrong = 0;
    for part in PARTS {
        for alone in [false, true] {
            let comm = Communicator::with_options(pool, &options)?;
            let call = |bytes: usize| {
                // SAFETY: both blocks are longer.
                unsafe { comm.all_to_all_at(to, from, bytes, DType::U8, &stream) }
            };
            comm.set_timeout(20 * timeout)?;
            call(part)?;
            comm.synchronize(&stream)?;
            comm.set_timeout(timeout)?;
            if alone && rank == odd {
                std::thread::sleep(timeout + Duration::from_millis(500));
                continue;
            }
            let began = Instant::now();
            let result = call(if rank == odd { part / 2 } else { part });
            let result = result.and_then(|()| comm.synchronize(&stream));
            let error = expect_error(result, "equal parts that cannot be")?;
            let took = began.elapsed();
            let good = if alone {
                error.is_timeout() && error.ranks() == [odd]
            } else {
                error.is_diverged()
            };
            let again = expect_error(call(part), "a call after that")?;
            let lasting = again.is_diverged() || again.is_timeout();
            if !good || !lasting || took > timeout + MAX_LATE {
                wrong += 1;
                println!(
                    "rank {rank}: {part} bytes a part copied, alone {alone}: {took:?}: {error}"
                );
            }
        }
    }
    Ok(wrong)
}
