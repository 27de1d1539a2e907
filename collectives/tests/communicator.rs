//! Communicators over pools in host memory; ranks are threads.

mod pool_ranks;

use std::thread;
use std::time::{Duration, Instant};

use pool_ranks::ranks;
use symmpool_allocator::topology::{Link, LinkMatrix, Topology, TopologyKind};
use symmpool_allocator::{Block, Driver, Group, Pool, Stream};
use symmpool_collectives::{
    AllReduceAlgorithm, Communicator, CommunicatorOptions, DType, FusedAlgorithm, NormOutput,
    NormShape, ReduceOp, Request, Splits, StandardCollective,
};

const STREAM: &Stream = &Stream::DEFAULT;

fn filled<T: symmpool_collectives::Element>(pool: &Pool, values: &[T]) -> Block<T> {
    let block = pool.alloc(values.len()).unwrap();
    block.write(values).unwrap();
    block
}

#[test]
fn blocks_and_slices_give_the_same_results() {
    ranks(3, |pool| {
        let comm = Communicator::new(pool).unwrap();
        let (me, world) = (i64::from(comm.rank()), 3);
        for count in [1_i64, 1000, 200_000] {
            let mine: Vec<i64> = (0..count * world).map(|i| i * 10 + me).collect();
            let part = &mine[..count as usize];
            let block = filled(pool, &mine);
            let small = filled(pool, part);
            let out = pool.alloc::<i64>(mine.len()).unwrap();
            let small_out = pool.alloc::<i64>(part.len()).unwrap();

            let sum: Vec<i64> = (0..count * world).map(|i| i * 30 + 3).collect();
            comm.all_reduce_into(&out, &block, ReduceOp::Sum, STREAM).unwrap();
            assert_eq!(out.read().unwrap(), sum);
            let mut slice = mine.clone();
            comm.all_reduce_slice(&mut slice, ReduceOp::Sum, STREAM).unwrap();
            assert_eq!(slice, sum);

            let at = (me * count) as usize;
            comm.reduce_scatter_into(&small_out, &block, ReduceOp::Sum, STREAM).unwrap();
            assert_eq!(small_out.read().unwrap(), sum[at..at + count as usize]);
            let mut slice = vec![0; part.len()];
            comm.reduce_scatter_slice(&mut slice, &mine, ReduceOp::Sum, STREAM).unwrap();
            assert_eq!(slice, sum[at..at + count as usize]);

            let gathered: Vec<i64> =
                (0..world).flat_map(|rank| (0..count).map(move |i| i * 10 + rank)).collect();
            comm.all_gather_into(&out, &small, STREAM).unwrap();
            assert_eq!(out.read().unwrap(), gathered);
            let mut slice = vec![0; mine.len()];
            comm.all_gather_slice(&mut slice, part, STREAM).unwrap();
            assert_eq!(slice, gathered);

            let exchanged: Vec<i64> = (0..world)
                .flat_map(|rank| (0..count).map(move |i| (me * count + i) * 10 + rank))
                .collect();
            comm.all_to_all_into(&out, &block, STREAM).unwrap();
            assert_eq!(out.read().unwrap(), exchanged);
            comm.all_to_all_slice(&mut slice, &mine, STREAM).unwrap();
            assert_eq!(slice, exchanged);

            // Rank r sends r + 1 elements to each.
            let send = vec![me as usize + 1; 3];
            let (receive, total) = ([1, 2, 3], 3 * (me as usize + 1));
            if count > 1 {
                comm.all_to_all_v_into(&out, &block, &receive, &send, STREAM).unwrap();
                let mut slice = vec![0; 6];
                comm.all_to_all_v_slice(&mut slice, &mine[..total], &receive, &send, STREAM)
                    .unwrap();
                assert_eq!(slice, out.read().unwrap()[..6]);
                assert_eq!(slice[0], me * 10, "the part for rank {me} of rank 0");
                assert_eq!(slice[5], (me * 3 + 2) * 10 + 2);
            }

            comm.broadcast(&block, 2, STREAM).unwrap();
            assert_eq!(block.read().unwrap()[0], 2);
            let mut slice = vec![me; 10];
            comm.broadcast_slice(&mut slice, 1, STREAM).unwrap();
            assert_eq!(slice, [1; 10]);
            comm.barrier(STREAM).unwrap();
        }
    });
}

#[test]
fn every_algorithm_gives_the_same_bits() {
    // S7
    ranks(3, |pool| {
        let values: Vec<f32> = (0..5000).map(|i| (i as f32).sin() * pool.rank() as f32).collect();
        let results = [AllReduceAlgorithm::OneShot, AllReduceAlgorithm::TwoShot].map(|algorithm| {
            let options = CommunicatorOptions { algorithm, ..CommunicatorOptions::default() };
            let comm = Communicator::with_options(pool, &options).unwrap();
            let block = filled(pool, &values);
            comm.all_reduce(&block, ReduceOp::Avg, STREAM).unwrap();
            block.read().unwrap().iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        });
        assert_eq!(results[0], results[1]);
    });
}

#[test]
fn a_due_commit_happens_in_the_call_and_only_then() {
    ranks(2, |pool| {
        let comm = Communicator::new(pool).unwrap();
        let commits = pool.stats().unwrap().commits;
        let first = filled(pool, &[1_i32; 100]);
        assert!(!pool.is_window(first.address(), first.bytes()));
        comm.all_reduce(&first, ReduceOp::Sum, STREAM).unwrap();
        assert!(pool.is_window(first.address(), first.bytes()));
        let second = filled(pool, &[1_i32; 100]);
        comm.all_reduce(&second, ReduceOp::Sum, STREAM).unwrap();
        assert_eq!(pool.stats().unwrap().commits, commits + 1, "the second block needed no growth");
        // A commit by the caller, which the communicator does not take part in.
        let large = filled(pool, &vec![1_i32; 8 << 20]);
        pool.commit().unwrap();
        comm.all_reduce(&large, ReduceOp::Sum, STREAM).unwrap();
        assert_eq!(large.read().unwrap()[(8 << 20) - 1], 2);
    });
}

#[test]
fn blocks_of_unshared_lanes_pass_through_scratch() {
    ranks(2, |pool| {
        let comm = Communicator::new(pool).unwrap();
        let lane = pool.lane("own").unwrap();
        // Local lanes may differ between ranks, so the blocks lie at different offsets.
        let _shift = lane.alloc::<u8>(pool.rank() as usize * 100_000 + 1).unwrap();
        let block = lane.alloc::<f64>(300_000).unwrap();
        block.write(&vec![1.5; 300_000]).unwrap();
        comm.all_reduce(&block, ReduceOp::Sum, STREAM).unwrap();
        assert_eq!(block.read().unwrap(), vec![3.0; 300_000]);
    });
}

#[test]
fn refusals_are_an_error_on_all_and_leave_the_communicator_usable() {
    // S6
    ranks(2, |pool| {
        let comm = Communicator::new(pool).unwrap();
        let (long, short) = (filled(pool, &[1_f32; 64]), filled(pool, &[1_f32; 32]));
        let wrong = if comm.rank() == 0 { &short } else { &long };
        let error = comm.all_reduce_into(wrong, &long, ReduceOp::Sum, STREAM).unwrap_err();
        assert!(if comm.rank() == 0 { error.is_invalid_argument() } else { error.is_diverged() });
        let error = comm.all_to_all_v_into(&short, &long, &[32, 0], &[64, 1], STREAM).unwrap_err();
        assert!(error.is_invalid_argument(), "{error}");
        assert!(comm.all_reduce(wrong, ReduceOp::Sum, STREAM).unwrap_err().is_diverged());
        assert!(comm.failure().is_none());
        comm.all_reduce(&short, ReduceOp::Sum, STREAM).unwrap();
        assert_eq!(short.read().unwrap(), [2.0; 32]);
    });
}

#[test]
fn wrong_numbers_of_splits_on_one_rank_are_an_error_on_all() {
    ranks(2, |pool| {
        let comm = Communicator::new(pool).unwrap();
        let (x, out) = (filled(pool, &[1_i32; 8]), filled(pool, &[0_i32; 8]));
        let right = [(); 3].map(|()| filled(pool, &[2_i64; 2]));
        let wrong = filled(pool, &[2_i64; 3]);
        for case in 0..4 {
            let bad = comm.rank() == 1;
            let pick = |at: usize| if bad && case == at { &wrong } else { &right[at] };
            let (output, offsets) = (Some(pick(1)), Some(pick(2)));
            let row = usize::from(!bad || case != 3);
            let splits = Splits { input: pick(0), output, offsets, row };
            let error = comm.all_to_all_v(&out, &x, &splits, STREAM).unwrap_err();
            assert_eq!(error.is_invalid_argument(), bad, "{error}");
            assert_eq!(error.is_diverged(), !bad, "{error}");
        }
        // Parts may fill their blocks exactly.
        comm.all_to_all_v_into(&out, &x, &[4, 4], &[4, 4], STREAM).unwrap();
        assert_eq!(out.read().unwrap(), [1; 8]);
    });
}

#[test]
fn invalid_options_on_one_rank_are_an_error_on_all_at_once() {
    let wrong = [
        CommunicatorOptions { scratch_bytes: 100, ..CommunicatorOptions::default() },
        CommunicatorOptions { timeout: Duration::ZERO, ..CommunicatorOptions::default() },
    ];
    ranks(3, |pool| {
        for (options, why) in wrong.iter().zip(["scratch of 100 bytes", "pass a time above zero"]) {
            let right = CommunicatorOptions::default();
            let options = if pool.rank() == 1 { options } else { &right };
            let started = Instant::now();
            let error = Communicator::with_options(pool, options).unwrap_err();
            assert!(started.elapsed() < Duration::from_secs(10), "nobody waits for rank 1");
            assert!(error.is_invalid_argument() && error.to_string().contains(why), "{error}");
            if pool.rank() != 1 {
                assert!(error.to_string().contains("rank 1 failed in event"), "{error}");
            }
            pool.resync().unwrap();
        }
        // If all ranks have the same invalid options, they need no resync.
        assert!(Communicator::with_options(pool, &wrong[0]).unwrap_err().is_invalid_argument());
        Communicator::new(pool).unwrap().barrier(STREAM).unwrap();
    });
}

#[test]
fn blocks_of_another_pool_are_refused() {
    ranks(2, |pool| {
        let other = Pool::builder(pool.group().child("other"))
            .driver(Driver::host().unwrap())
            .build()
            .unwrap();
        let comm = Communicator::new(pool).unwrap();
        let block = filled(&other, &[1_u8; 10]);
        let error = comm.all_reduce(&block, ReduceOp::Max, STREAM).unwrap_err();
        assert!(error.is_invalid_argument(), "{error}");
        comm.barrier(STREAM).unwrap();
    });
}

#[test]
fn communicators_of_one_pool_work_at_the_same_time() {
    ranks(2, |pool| {
        let comms = [(); 3].map(|()| Communicator::new(pool).unwrap());
        let blocks = [10_usize, 5000, 100_000].map(|count| filled(pool, &vec![1_i64; count]));
        pool.commit().unwrap();
        thread::scope(|scope| {
            for (comm, block) in comms.iter().zip(&blocks) {
                scope.spawn(move || {
                    for _ in 0..20 {
                        comm.all_reduce(block, ReduceOp::Sum, STREAM).unwrap();
                    }
                });
            }
        });
        for block in &blocks {
            assert!(block.read().unwrap().iter().all(|x| *x == 1 << 20));
        }
    });
}

#[test]
fn communicators_may_be_dropped_in_any_order() {
    // D5: their control memory can be reused once every rank has dropped them.
    ranks(2, |pool| {
        for round in 0..5 {
            let mut comms =
                vec![Communicator::new(pool).unwrap(), Communicator::new(pool).unwrap()];
            let block = filled(pool, &[1_i32; 7]);
            for comm in &comms {
                comm.all_reduce(&block, ReduceOp::Sum, STREAM).unwrap();
            }
            assert_eq!(block.read().unwrap(), [4; 7], "round {round}");
            if pool.rank() == 1 {
                comms.reverse();
            }
            comms.into_iter().for_each(drop);
        }
        let lane = pool.lane(symmpool_allocator::CONTROL_LANE).unwrap();
        assert!(
            lane.stats().unwrap().reserved < 64 << 20,
            "memory was reused: {:?}",
            lane.stats().unwrap()
        );
    });
}

#[test]
fn a_rank_that_does_not_come_fails_the_communicator() {
    // S5
    ranks(2, |pool| {
        let timeout = Duration::from_millis(200);
        let options = CommunicatorOptions { timeout, ..CommunicatorOptions::default() };
        let comm = Communicator::with_options(pool, &options).unwrap();
        if comm.rank() == 0 {
            let error = comm.barrier(STREAM).unwrap_err();
            assert!(error.is_timeout() && error.ranks() == [1], "{error}");
            assert!(comm.barrier(STREAM).unwrap_err().is_timeout());
            assert!(comm.failure().is_some());
        }
        pool.commit().unwrap();
        // Both make a new communicator, which works.
        Communicator::new(pool).unwrap().barrier(STREAM).unwrap();
    });
}

#[test]
fn a_timeout_is_changed_for_later_calls() {
    // S5
    ranks(2, |pool| {
        let timeout = Duration::from_millis(700);
        let options = CommunicatorOptions { timeout, ..CommunicatorOptions::default() };
        let [first, second] = [(); 2].map(|()| Communicator::with_options(pool, &options).unwrap());
        if first.rank() == 0 {
            thread::scope(|scope| {
                let running = scope.spawn(|| first.barrier(STREAM).unwrap_err().to_string());
                thread::sleep(Duration::from_millis(100));
                first.set_timeout(Duration::from_secs(60)).unwrap();
                assert!(!running.is_finished(), "set_timeout waited for the call");
                let text = running.join().unwrap();
                assert!(text.contains("700.0ms"), "the running call has another timeout: {text}");
            });
            let error = second.set_timeout(Duration::ZERO).unwrap_err();
            assert!(error.is_invalid_argument(), "{error}");
            assert_eq!(second.timeout(), timeout, "the refused timeout took effect");
            second.set_timeout(Duration::from_millis(200)).unwrap();
            assert_eq!(second.timeout(), Duration::from_millis(200));
            let error = second.barrier(STREAM).unwrap_err();
            assert!(error.to_string().contains("200.0ms") && error.ranks() == [1], "{error}");
        }
        pool.commit().unwrap();
    });
}

#[test]
fn a_running_call_keeps_its_timeout_in_all_its_waits() {
    // S5: rank 0 waits for rank 1, and then for rank 2, which comes later than the new timeout allows.
    ranks(3, |pool| {
        let comm = Communicator::new(pool).unwrap();
        thread::scope(|scope| {
            if comm.rank() == 0 {
                scope.spawn(|| {
                    thread::sleep(Duration::from_millis(100));
                    comm.set_timeout(Duration::from_millis(1)).unwrap();
                });
            }
            thread::sleep(Duration::from_millis([0, 300, 600][comm.rank() as usize]));
            comm.barrier(STREAM).unwrap();
        });
        if comm.rank() == 0 {
            assert_eq!(comm.timeout(), Duration::from_millis(1));
        }
    });
}

#[test]
fn memory_that_the_cpu_cannot_reach_is_refused() {
    let group = Group::in_process(1).unwrap().remove(0);
    let pool = Pool::builder(group).driver(Driver::sim(1)).build().unwrap();
    let error = Communicator::new(&pool).unwrap_err();
    assert!(error.is_unsupported(), "{error}");
}

#[test]
fn the_environment_requests_an_algorithm_where_options_leave_it_open() {
    // This runs in processes of its own, because all threads share the environment.
    let role = "SYMMPOOL_TEST_FORCED";
    if let Ok(outcome) = std::env::var(role) {
        ranks(2, |pool| {
            let comm = Communicator::new(pool).unwrap();
            let block = filled(pool, &[1_i32; 100]);
            match comm.all_reduce(&block, ReduceOp::Sum, STREAM) {
                Ok(()) => assert_eq!(outcome, "done"),
                Err(error) => {
                    // A name may be registered later, so it is looked up by the first call.
                    assert_eq!(error.is_invalid_argument(), outcome == "refused", "{error}");
                    assert_eq!(error.is_unsupported(), outcome == "unsupported", "{error}");
                    let text = error.to_string();
                    assert!(text.contains("SYMMPOOL_ALL_REDUCE=") && text.contains("two_shot"));
                }
            }
            // The environment does not change an algorithm that the options request.
            let options = CommunicatorOptions {
                algorithm: AllReduceAlgorithm::TwoShot,
                ..CommunicatorOptions::default()
            };
            let comm = Communicator::with_options(pool, &options).unwrap();
            let block = filled(pool, &[2_i32; 100]);
            comm.all_reduce(&block, ReduceOp::Sum, STREAM).unwrap();
            assert_eq!(block.read().unwrap(), [4; 100]);
        });
        return;
    }
    let values = [("nonsense", "refused"), ("one_shot", "done"), ("", "done")];
    for (value, outcome) in values.into_iter().chain([("two_shot_pull", "unsupported")]) {
        let test = "the_environment_requests_an_algorithm_where_options_leave_it_open";
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args([test, "--exact"]).env(role, outcome).env("SYMMPOOL_ALL_REDUCE", value);
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{value:?}: {text}");
    }
}

/// Links of two groups, the even and the odd ranks, and of every rank to its neighbour.
fn even_and_odd(world: u32) -> Topology {
    let link =
        |a: u32, b: u32| if a % 2 == b % 2 || a / 2 == b / 2 { Link::NvLink(1) } else { Link::Pci };
    Topology::from_matrix(LinkMatrix::from_fn(world, link))
}

#[test]
fn given_links_choose_the_algorithm_and_change_no_bits() {
    // S7
    assert_eq!(even_and_odd(8).kind(), TopologyKind::HybridCubeMesh);
    ranks(8, |pool| {
        let values: Vec<f32> =
            (0..5000).map(|i| (i as f32 + 0.1).sin() / (1.0 + pool.rank() as f32)).collect();
        let results = [
            (AllReduceAlgorithm::OneShot, None),
            (AllReduceAlgorithm::CubeMesh, None),
            (AllReduceAlgorithm::CubeMesh, Some(even_and_odd(8))),
            (AllReduceAlgorithm::Auto, Some(even_and_odd(8))),
        ]
        .map(|(algorithm, links)| {
            let options =
                CommunicatorOptions { algorithm, links, ..CommunicatorOptions::default() };
            let comm = Communicator::with_options(pool, &options).unwrap();
            let block = filled(pool, &values);
            comm.all_reduce(&block, ReduceOp::Sum, STREAM).unwrap();
            let mut slice = values.clone();
            comm.all_reduce_slice(&mut slice, ReduceOp::Sum, STREAM).unwrap();
            let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&block.read().unwrap()), bits(&slice));
            bits(&slice)
        });
        assert!(results.iter().all(|result| *result == results[0]));
    });
}

#[test]
fn unsuitable_links_fail_the_call_and_links_of_other_ranks_the_communicator() {
    ranks(3, |pool| {
        let line =
            LinkMatrix::from_fn(3, |a, b| if b - a == 1 { Link::NvLink(1) } else { Link::Pci });
        let options = CommunicatorOptions {
            algorithm: AllReduceAlgorithm::CubeMesh,
            links: Some(Topology::from_matrix(line)),
            ..CommunicatorOptions::default()
        };
        let comm = Communicator::with_options(pool, &options).unwrap();
        let block = filled(pool, &[1_i32; 10]);
        let error = comm.all_reduce(&block, ReduceOp::Sum, STREAM).unwrap_err();
        assert!(error.is_unsupported(), "{error}");
        assert!(error.to_string().contains("no link between ranks 0 and 2"), "{error}");
        comm.barrier(STREAM).unwrap();
        let options = CommunicatorOptions { links: Some(even_and_odd(8)), ..options };
        let error = Communicator::with_options(pool, &options).unwrap_err();
        assert!(error.is_invalid_argument(), "{error}");
        Communicator::new(pool).unwrap().barrier(STREAM).unwrap();
    });
}

#[test]
fn a_rank_that_dropped_its_pool_is_lost_soon() {
    // S5: its process runs on, but it has dropped the pool.
    ranks(2, |pool| {
        let comm = Communicator::new(pool).unwrap();
        comm.barrier(STREAM).unwrap();
        if comm.rank() == 1 {
            return;
        }
        let started = Instant::now();
        let error = comm.all_reduce_slice(&mut [1_i32; 10], ReduceOp::Sum, STREAM).unwrap_err();
        assert!(error.is_peer_lost(), "{error}");
        assert_eq!(error.ranks(), [1], "{error}");
        assert!(started.elapsed() < Duration::from_secs(5), "{error}");
    });
}

#[test]
fn options_for_devices_are_checked_in_host_memory_too() {
    ranks(2, |pool| {
        for concurrent in [Some(0), Some(17)] {
            let options = CommunicatorOptions { concurrent, ..Default::default() };
            let error = Communicator::with_options(pool, &options).unwrap_err();
            assert!(error.is_invalid_argument(), "{error}");
            assert!(error.to_string().contains("concurrent"), "{error}");
        }
        Communicator::new(pool).unwrap().barrier(STREAM).unwrap();
    });
}

/// Makes a barrier that adds its waits to `waits`.
fn measured(comm: &Communicator, waits: &mut [i64]) -> symmpool_allocator::Result<()> {
    // SAFETY: a number for each rank, and nobody else has them.
    unsafe { comm.measured_barrier_at(waits.as_mut_ptr(), STREAM) }
}

#[test]
fn barriers_measure_who_is_late() {
    const LATE: Duration = Duration::from_millis(300);
    ranks(3, |pool| {
        let comm = Communicator::new(pool).unwrap();
        let me = comm.rank() as usize;
        for late in 0..3 {
            let mut waits = [1_i64; 3];
            comm.barrier(STREAM).unwrap();
            if me == late {
                thread::sleep(LATE);
            }
            measured(&comm, &mut waits).unwrap();
            assert_eq!(waits[me], 1, "rank {me} does not wait for itself");
            if me != late {
                assert!(waits[late] > LATE.as_nanos() as i64 / 2, "{waits:?}");
                assert!(waits.iter().all(|wait| *wait <= waits[late]), "{waits:?}");
            }
            // Others need not measure.
            match me {
                0 => measured(&comm, &mut waits).unwrap(),
                _ => comm.barrier(STREAM).unwrap(),
            }
        }
    });
}

#[test]
fn barriers_that_measure_fail_as_others_do() {
    ranks(2, |pool| {
        let options =
            CommunicatorOptions { timeout: Duration::from_millis(600), ..Default::default() };
        let comm = Communicator::with_options(pool, &options).unwrap();
        let me = comm.rank();
        let mut waits = [0_i64; 2];
        let block = filled(pool, &[1_i32]);
        // Another call on one rank.
        let error = match me {
            0 => measured(&comm, &mut waits),
            _ => comm.all_reduce(&block, ReduceOp::Sum, STREAM),
        };
        assert!(error.unwrap_err().is_diverged());
        // An address that is none.
        let error = match me {
            // SAFETY: it is refused.
            0 => unsafe { comm.measured_barrier_at(std::ptr::null_mut(), STREAM) },
            _ => measured(&comm, &mut waits),
        };
        let error = error.unwrap_err();
        assert_eq!(error.is_invalid_argument(), me == 0, "{error}");
        assert_eq!(error.is_diverged(), me == 1, "{error}");
        measured(&comm, &mut waits).unwrap();
        // A rank that does not come.
        if me == 0 {
            let error = measured(&comm, &mut waits).unwrap_err();
            assert!(error.is_timeout() && error.ranks() == [1], "{error}");
        } else {
            thread::sleep(Duration::from_millis(1200));
        }
    });
}

#[test]
fn blocks_of_another_pool_are_refused_in_every_place() {
    ranks(2, |pool| {
        let comm = Communicator::new(pool).unwrap();
        let other = Pool::builder(pool.group().child("other"))
            .driver(Driver::host().unwrap())
            .build()
            .unwrap();
        let (x, counts) = (filled(pool, &[1.0_f32; 128]), filled(pool, &[1_i64, 1]));
        let (far, far_counts) = (filled(&other, &[1.0_f32; 128]), filled(&other, &[1_i64, 1]));
        let splits = |input, output| Splits { input, output, offsets: None, row: 1 };
        let shape = NormShape {
            dtype: DType::F32,
            tokens: 2,
            hidden: 64,
            epsilon: 1e-6,
            weight_bias: 0.0,
            output: NormOutput::Norm,
            powers_of_two: false,
            algorithm: FusedAlgorithm::Auto,
        };
        let request = |out, input| Request::new(StandardCollective::AllReduce, out, input);
        let refused = [
            comm.call(&request(&x, &far), STREAM),
            comm.call(&request(&far, &x), STREAM),
            comm.all_to_all_v(&x, &x, &splits(&far_counts, None), STREAM),
            comm.all_to_all_v(&x, &x, &splits(&counts, Some(&far_counts)), STREAM),
            comm.all_reduce_norm(&x, &x, &x, &x, &far, &shape, STREAM),
            comm.all_reduce_norm(&far, &x, &x, &x, &x, &shape, STREAM),
        ];
        for (nth, refused) in refused.into_iter().enumerate() {
            let error = refused.unwrap_err();
            assert!(error.is_invalid_argument(), "{nth}: {error}");
            assert!(
                error.to_string().contains("not a block of the communicator's pool"),
                "{error}"
            );
        }
        comm.all_reduce(&x, ReduceOp::Sum, STREAM).unwrap();
        assert_eq!(x.read().unwrap(), [2.0; 128]);
    });
}
