//! Mistakes that other implementations of all-to-alls are known for, one in each test. Ranks are threads;
//! `cuda_collectives check` has the same tests for devices.

mod pool_ranks;

use std::thread;
use std::time::Duration;

use symmpool_allocator::{Pool, Stream};
use symmpool_collectives::{
    AllToAllAlgorithm, Communicator, CommunicatorOptions, ReduceOp, Splits,
};

const STREAM: &Stream = &Stream::DEFAULT;
const WORLD: usize = 3;

/// Runs `body` as every rank, with every algorithm.
fn ranks(body: impl Fn(&Pool, &Communicator) + Sync) {
    pool_ranks::ranks(WORLD as u32, |pool| {
        for all_to_all in AllToAllAlgorithm::ALL {
            let options = CommunicatorOptions { all_to_all, ..Default::default() };
            body(pool, &Communicator::with_options(pool, &options).unwrap());
        }
    });
}

/// How many elements rank `from` sends to rank `to` in a call: none, few or many.
fn count(call: usize, from: usize, to: usize) -> usize {
    match (call * 7 + from * 3 + to * 5 + call * from) % 4 {
        0 | 1 => 0,
        2 => 1 + (call + to) % 50,
        _ => 3000 + call,
    }
}

fn element(call: usize, from: usize, to: usize, at: usize) -> i64 {
    (((call * WORLD + from) * WORLD + to) * 100_000 + at) as i64
}

fn sends(call: usize, me: usize) -> (Vec<usize>, Vec<usize>, Vec<i64>) {
    let send: Vec<usize> = (0..WORLD).map(|to| count(call, me, to)).collect();
    let receive = (0..WORLD).map(|from| count(call, from, me)).collect();
    let data =
        (0..WORLD).flat_map(|to| (0..send[to]).map(move |at| element(call, me, to, at))).collect();
    (send, receive, data)
}

fn comes(call: usize, me: usize) -> Vec<i64> {
    (0..WORLD)
        .flat_map(|from| (0..count(call, from, me)).map(move |at| element(call, from, me, at)))
        .collect()
}

#[test]
fn new_splits_need_no_exchange_of_sizes_before() {
    // Splits lie in memory and change with every call, and no rank knows how much it receives.
    ranks(|pool, comm| {
        let me = pool.rank() as usize;
        let (input, out) = (pool.alloc::<i64>(10_000).unwrap(), pool.alloc::<i64>(10_000).unwrap());
        let counts = [pool.alloc::<i32>(WORLD).unwrap(), pool.alloc::<i32>(WORLD).unwrap()];
        for call in 0..100 {
            let (send, _, mut data) = sends(call, me);
            data.resize(10_000, -1);
            input.write(&data).unwrap();
            counts[0].write(&[0, 1, 2].map(|to| send[to] as i32)).unwrap();
            let (sent, received) = (&counts[0], Some(&counts[1]));
            let splits = Splits { input: sent, output: received, offsets: None, row: 1 };
            comm.all_to_all_v(&out, &input, &splits, STREAM).unwrap();
            let wanted = comes(call, me);
            assert_eq!(out.read().unwrap()[..wanted.len()], wanted, "call {call}");
            assert_eq!(
                counts[1].read().unwrap(),
                [0, 1, 2].map(|from| count(call, from, me) as i32)
            );
        }
    });
}

#[test]
fn zero_counts_keep_ranks_in_step() {
    ranks(|pool, comm| {
        let me = pool.rank() as usize;
        let sum = pool.alloc::<i64>(5).unwrap();
        for call in 0..300 {
            let (send, receive, data) = sends(call, me);
            let mut out = vec![-1; receive.iter().sum()];
            comm.all_to_all_v_slice(&mut out, &data, &receive, &send, STREAM).unwrap();
            assert_eq!(out, comes(call, me), "call {call}");
            if call % 5 == 0 {
                sum.write(&[call as i64; 5]).unwrap();
                comm.all_reduce(&sum, ReduceOp::Sum, STREAM).unwrap();
                assert_eq!(sum.read().unwrap(), [(WORLD * call) as i64; 5]);
            }
        }
    });
}

#[test]
fn splits_of_the_host_are_reused_at_once() {
    ranks(|pool, comm| {
        let me = pool.rank() as usize;
        let (input, out) = (pool.alloc::<i64>(10_000).unwrap(), pool.alloc::<i64>(10_000).unwrap());
        let mut lists = [vec![0; WORLD], vec![0; WORLD]];
        for call in 0..100 {
            let (send, receive, mut data) = sends(call, me);
            data.resize(10_000, -1);
            input.write(&data).unwrap();
            lists[0].copy_from_slice(&send);
            lists[1].copy_from_slice(&receive);
            comm.all_to_all_v_into(&out, &input, &lists[1], &lists[0], STREAM).unwrap();
            lists.iter_mut().for_each(|list| list.fill(usize::MAX));
            let wanted = comes(call, me);
            assert_eq!(out.read().unwrap()[..wanted.len()], wanted, "call {call}");
        }
    });
}

#[test]
fn a_slow_consumer_reads_what_it_was_sent() {
    // The other ranks are in their next call long before a rank reads what it received in the last one.
    ranks(|pool, comm| {
        let me = pool.rank() as usize;
        let (input, out) = (pool.alloc::<i64>(10_000).unwrap(), pool.alloc::<i64>(10_000).unwrap());
        for call in 0..12 {
            let (send, receive, mut data) = sends(call, me);
            data.resize(10_000, -1);
            input.write(&data).unwrap();
            comm.all_to_all_v_into(&out, &input, &receive, &send, STREAM).unwrap();
            if call % WORLD == me {
                thread::sleep(Duration::from_millis(50));
            }
            let wanted = comes(call, me);
            assert_eq!(out.read().unwrap()[..wanted.len()], wanted, "call {call}");
        }
    });
}

#[test]
fn an_output_that_is_too_short_is_an_error_and_not_overrun() {
    ranks(|pool, comm| {
        let me = pool.rank() as usize;
        let (input, out) = (pool.alloc::<i64>(300).unwrap(), pool.alloc::<i64>(100).unwrap());
        let counts = pool.alloc::<i64>(WORLD).unwrap();
        input.write(&(0..300).map(|i| i + 1000 * me as i64).collect::<Vec<_>>()).unwrap();
        let splits = Splits { input: &counts, output: None, offsets: None, row: 10 };
        // Ranks send five, two and one rows to each rank, into outputs of ten: all rows fit, unless rank 1 gets six
        // more.
        for (extra, fits) in [(0, true), (6, false), (0, true)] {
            let mine = [5, 2, 1][me];
            let all = (0..WORLD).map(|to| mine + if me == 0 && to == 1 { extra } else { 0 });
            counts.write(&all.collect::<Vec<_>>()).unwrap();
            out.write(&[-1; 100]).unwrap();
            let done = comm.all_to_all_v(&out, &input, &splits, STREAM);
            if fits {
                done.unwrap();
            } else {
                let error = done.unwrap_err();
                assert!(error.is_overflow(), "{error}");
                let text = error.to_string();
                assert!(
                    text.contains("rank 1 was sent 14 rows, and its output holds 10"),
                    "{text}"
                );
            }
            let got = out.read().unwrap();
            let first = if me == 1 { 5 + extra } else { 5 } as usize;
            let before = if me == 2 { 10 + extra } else { 5 * me as i64 } * 10;
            assert_eq!(got[..1], [before]);
            let kept = first.min(10) * 10;
            let wanted: Vec<i64> = (0..kept as i64).map(|at| before + at).collect();
            assert_eq!(got[..kept], wanted);
            if me != 1 || fits {
                assert_eq!(got[first * 10], 1000 + 20 * me as i64);
                assert_eq!(got[80..], [-1; 20]);
            }
        }
    });
}

#[test]
fn ranks_that_send_nothing_or_have_another_kind_of_memory_make_the_same_call() {
    ranks(|pool, comm| {
        let me = pool.rank() as usize;
        let room = 2 * 3100 * WORLD;
        let input = pool.alloc::<i64>(room).unwrap();
        let spare = pool.alloc::<i64>(room).unwrap();
        let out = pool.alloc::<i64>(room).unwrap();
        for call in 0..24 {
            let (mut send, mut receive, mut data) = sends(call, me);
            // In every other call one rank has nothing to send.
            let silent = (call % 2 == 0).then_some(call / 2 % WORLD);
            if silent == Some(me) {
                (send, data) = (vec![0; WORLD], Vec::new());
            }
            let mut wanted = comes(call, me);
            if let Some(silent) = silent {
                let before: usize = receive[..silent].iter().sum();
                wanted.drain(before..before + receive[silent]);
                receive[silent] = 0;
            }
            let got = if (call + me).is_multiple_of(3) {
                let mut got = vec![-1; wanted.len()];
                comm.all_to_all_v_slice(&mut got, &data, &receive, &send, STREAM).unwrap();
                got
            } else {
                let from = if (call / 3 + me).is_multiple_of(2) { &input } else { &spare };
                data.resize(room, -1);
                from.write(&data).unwrap();
                comm.all_to_all_v_into(&out, from, &receive, &send, STREAM).unwrap();
                out.read().unwrap()[..wanted.len()].to_vec()
            };
            assert!(got == wanted, "call {call} on rank {me}");
        }
    });
}
