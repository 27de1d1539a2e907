//! Calls that ranks of several hosts make differently, decline, or do not come to.

use std::time::{Duration, Instant};

use symmpool_allocator::testing::on_ranks;
use symmpool_allocator::{Driver, Error, Pool, Result};
use symmpool_collectives::{Communicator, ReduceOp, Request, StandardCollective};

use crate::mesh::OuterConnections;
use crate::{STREAM, options, over, over_mesh};

/// Layouts with phases inside hosts, in both orders of ranks, and without.
const LAYOUTS: [&[&str]; 4] =
    [&["a", "a", "b", "b"], &["a", "b", "a", "b"], &["a", "b", "b"], &["a", "b"]];

fn is_usable(comm: &Communicator) {
    let world = i64::from(comm.world());
    for count in [1, 20_000] {
        let mut data = vec![1_i64; count];
        comm.all_reduce_slice(&mut data, ReduceOp::Sum, STREAM).unwrap();
        assert!(data.iter().all(|value| *value == world));
    }
    assert!(comm.failure().is_none());
}

/// The errors of a call that some ranks make differently. No message has a length that its receiver does not expect, nobody
/// waits for a timeout, and all go on behind it.
fn failing(hosts: &[&str], body: impl Fn(&Communicator) -> Result<()> + Sync) -> Vec<Error> {
    let (mesh, begin) = (OuterConnections::default(), Instant::now());
    let errors = over_mesh(hosts, &mesh, |comm| {
        let error = body(comm).unwrap_err();
        is_usable(comm);
        let again = body(comm).unwrap_err();
        assert_eq!(again.is_diverged(), error.is_diverged(), "{again}");
        is_usable(comm);
        error
    });
    assert_eq!(mesh.misfits(), 0);
    assert!(begin.elapsed() < Duration::from_secs(8), "after {:?}", begin.elapsed());
    errors
}

fn host_of(comm: &Communicator) -> usize {
    comm.pool().hosts().of(comm.rank()) as usize
}

fn reduce(comm: &Communicator, count: usize) -> Result<()> {
    comm.all_reduce_slice(&mut vec![1.0_f32; count], ReduceOp::Sum, STREAM)
}

#[test]
fn different_calls_on_different_hosts_are_an_error_that_names_them() {
    for hosts in LAYOUTS {
        let errors = failing(hosts, |comm| reduce(comm, 50_000 + host_of(comm) * 8));
        for error in &errors {
            assert!(error.is_diverged() && !error.ranks().is_empty(), "{error}");
            let text = error.to_string();
            assert!(
                text.contains("50000") && text.contains("50008") && text.contains("host a"),
                "{text}"
            );
        }
    }
}

#[test]
fn no_message_depends_on_a_length_that_was_not_compared() {
    for hosts in LAYOUTS {
        for counts in [[1, 1_000_000], [1_000_000, 2], [8, 9], [1000, 1001], [3000, 500_000]] {
            let errors = failing(hosts, |comm| reduce(comm, counts[host_of(comm)]));
            assert!(errors.iter().all(Error::is_diverged), "{errors:?}");
        }
    }
}

#[test]
fn each_small_call_is_compared() {
    let errors = failing(&["a", "b"], |comm| {
        for nth in 0..3 {
            let op = if comm.rank() == 1 && nth == 1 { ReduceOp::Max } else { ReduceOp::Sum };
            let made = comm.all_reduce_slice(&mut [1.0_f32; 8], op, STREAM);
            assert_eq!(made.is_err(), nth == 1, "{made:?}");
            made.or_else(|why| if nth == 1 { Err(why) } else { Ok(()) })?;
        }
        Ok(())
    });
    assert!(errors.iter().all(Error::is_diverged), "{errors:?}");
}

type MakeCall = fn(&Communicator) -> Result<()>;

/// A call of each collective, small ones and large ones.
fn calls() -> [MakeCall; 10] {
    [
        |comm| reduce(comm, 5),
        |comm| comm.barrier(STREAM),
        |comm| comm.broadcast_slice(&mut [1.0_f32; 5], 1, STREAM),
        |comm| comm.broadcast_slice(&mut [1.0_f32; 5], 0, STREAM),
        |comm| {
            let world = comm.world() as usize;
            comm.all_gather_slice(&mut vec![0.0_f32; 5 * world], &[1.0; 5], STREAM)
        },
        |comm| {
            let long = vec![1.0_f32; 5 * comm.world() as usize];
            comm.reduce_scatter_slice(&mut [0.0; 5], &long, ReduceOp::Sum, STREAM)
        },
        |comm| {
            let long = vec![1.0_f32; 5 * comm.world() as usize];
            comm.all_to_all_slice(&mut long.clone(), &long, STREAM)
        },
        |comm| {
            let world = comm.world() as usize;
            let parts = vec![40_000; world];
            let long = vec![1.0_f32; 40_000 * world];
            comm.all_to_all_v_slice(&mut long.clone(), &long, &parts, &parts, STREAM)
        },
        |comm| reduce(comm, 50_000),
        |comm| comm.broadcast_slice(&mut vec![1.0_f32; 120_000], 1, STREAM),
    ]
}

/// Every rank draws the same numbers, and makes its part of what they say.
#[test]
fn random_calls_fail_on_all_ranks_or_on_none() {
    let calls = calls();
    for (seed, hosts) in (1_u64..).zip(LAYOUTS) {
        let mesh = OuterConnections::default();
        let outcomes = over_mesh(hosts, &mesh, |comm| {
            let (rank, world) = (u64::from(comm.rank()), u64::from(comm.world()));
            let mut state = seed;
            let mut draw = |below: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 33) % below
            };
            let step = |_| {
                let (usual, other) = (draw(10) as usize, draw(10) as usize);
                let (odd, way) = (draw(world), draw(8));
                let differs = match way {
                    0 | 1 => rank == odd,
                    2 => u64::from(comm.pool().hosts().of(comm.rank())) == odd % 2,
                    3 if rank == odd => {
                        return comm
                            .decline(Error::invalid_argument("not so"), STREAM)
                            .is_diverged();
                    }
                    _ => false,
                };
                let made = calls[if differs { other } else { usual }](comm);
                let failed = made.is_err() || (way == 3 && world == 1);
                assert!(comm.failure().is_none(), "{made:?}");
                failed
            };
            (0..250).map(step).collect::<Vec<bool>>()
        });
        assert_eq!(mesh.misfits(), 0);
        // A rank that declines gets its own reason, which is an error as well.
        let all = (0..250).map(|nth| outcomes.iter().filter(|rank| rank[nth]).count());
        let world = hosts.len();
        let (none, some) = all.fold((0, 0), |(none, some), failed| match failed {
            0 => (none + 1, some),
            failed if failed + 1 >= world => (none, some + 1),
            failed => panic!("{failed} of {world} ranks failed"),
        });
        assert!(none > 50 && some > 30, "{none} calls succeeded, {some} failed");
    }
}

#[test]
fn every_collective_is_compared_before_its_data() {
    let calls = calls();
    for (nth, one) in calls.iter().enumerate() {
        let other = &calls[(nth + 1) % calls.len()];
        for by_host in [true, false] {
            let errors = failing(&["a", "b", "b", "a"], |comm| {
                let first = if by_host { host_of(comm) == 0 } else { comm.rank() < 2 };
                if first { one(comm) } else { other(comm) }
            });
            assert!(errors.iter().all(Error::is_diverged), "call {nth}: {errors:?}");
        }
    }
}

#[test]
fn a_call_that_one_rank_declines_is_an_error_on_all_hosts() {
    for hosts in LAYOUTS {
        let errors = failing(hosts, |comm| {
            let world = comm.world() as usize;
            let count = if comm.rank() == 1 { 9_999 } else { 10_000 };
            let input = vec![1.0_f32; 10_000 * world];
            comm.reduce_scatter_slice(&mut vec![1.0; count], &input, ReduceOp::Sum, STREAM)
        });
        for (rank, error) in errors.iter().enumerate() {
            assert_eq!(error.is_invalid_argument(), rank == 1, "rank {rank}: {error}");
            assert_eq!(error.is_diverged(), rank != 1, "rank {rank}: {error}");
            assert!(rank == 1 || error.ranks() == [1], "rank {rank}: {error}");
        }
    }
}

#[test]
fn a_rank_that_declines_several_calls_waits_for_nobody() {
    for hosts in LAYOUTS {
        over(hosts, |comm| {
            for _ in 0..5 {
                if comm.rank() == 1 {
                    let why = Error::invalid_argument("not so");
                    assert!(comm.decline(why, STREAM).is_invalid_argument());
                } else {
                    let error = reduce(comm, 30_000).unwrap_err();
                    assert!(error.is_diverged() && error.ranks() == [1], "{error}");
                }
            }
            is_usable(comm);
        });
    }
}

#[test]
fn wrong_numbers_of_splits_are_declined_on_all_ranks() {
    for hosts in LAYOUTS {
        let errors = failing(hosts, |comm| {
            let world = comm.world() as usize;
            let parts = vec![10; if comm.rank() == 0 { world - 1 } else { world }];
            let data = vec![1_i64; parts.iter().sum()];
            comm.all_to_all_v_slice(&mut data.clone(), &data, &parts, &parts, STREAM)
        });
        assert!(errors[0].is_invalid_argument(), "{}", errors[0]);
        assert!(errors[1..].iter().all(|error| error.ranks() == [0]), "{errors:?}");
    }
}

#[test]
fn differing_splits_are_named() {
    for hosts in [LAYOUTS[0], LAYOUTS[1]] {
        let errors = failing(hosts, |comm| {
            let send = [10; 4];
            let mut receive = [10; 4];
            if comm.rank() == 1 {
                receive[3] = 11;
            }
            let total: usize = receive.iter().sum();
            comm.all_to_all_v_slice(&mut vec![0_i64; total], &[1_i64; 40], &receive, &send, STREAM)
        });
        assert!(errors.iter().all(Error::is_diverged), "{errors:?}");
        let text = errors[1].to_string();
        assert!(text.contains("rank 3 sends rank 1 10") && text.contains("expects 11"), "{text}");
        for rank in [0, 2, 3] {
            assert!(errors[rank].ranks() == [1], "{}", errors[rank]);
        }
    }
}

#[test]
fn buffers_that_overlap_and_roots_that_do_not_exist_are_declined_on_all_ranks() {
    type MakeCall = fn(&Communicator, &mut [f32]) -> Result<()>;
    let calls: [MakeCall; 3] = [
        |comm, memory| {
            let (at, is_wrong) = (memory.as_mut_ptr(), comm.rank() == 1);
            let out = at.wrapping_add(if is_wrong { 50 } else { 100 }).cast();
            let what = StandardCollective::AllReduce;
            // SAFETY: the memory has 200 elements.
            let request =
                unsafe { Request::at(what, out, at.cast(), 100, symmpool_collectives::DType::F32) };
            comm.call(&request, STREAM)
        },
        |comm, _| {
            let is_wrong = comm.rank() == 1;
            comm.broadcast_slice(&mut [1.0_f32; 8], if is_wrong { 77 } else { 0 }, STREAM)
        },
        |comm, _| {
            let mut data = [1_i64; 8];
            if comm.rank() == 1 {
                let what = Request::on_slice(StandardCollective::AllReduce, &mut data);
                return comm.call(&what.algorithm("two_shot"), STREAM);
            }
            reduce(comm, 8)
        },
    ];
    for hosts in [LAYOUTS[0], LAYOUTS[3]] {
        for call in calls {
            let errors = failing(hosts, |comm| call(comm, &mut vec![1.0; 200]));
            for (rank, error) in errors.iter().enumerate() {
                assert!(rank == 1 || error.ranks() == [1], "rank {rank}: {error}");
                assert!((rank == 1) ^ error.is_diverged(), "rank {rank}: {error}");
            }
        }
    }
}

#[test]
fn a_small_call_costs_one_message() {
    let mesh = OuterConnections::default();
    over_mesh(&["a", "b"], &mesh, |comm| {
        for _ in 0..10 {
            reduce(comm, 8).unwrap();
        }
        comm.barrier(STREAM).unwrap();
    });
    // Two ranks, each with one for each call.
    assert_eq!(mesh.messages(), 22);
    let mesh = OuterConnections::default();
    over_mesh(&["a", "b"], &mesh, |comm| {
        for _ in 0..10 {
            reduce(comm, 16 << 10).unwrap();
        }
    });
    // The data of the first of equal calls has a message of its own.
    assert_eq!(mesh.messages(), 2 * (1 + 10));
}

#[test]
fn a_communicator_in_the_place_of_another_does_not_find_its_reason() {
    let (hosts, mesh) = (["a", "b"], [OuterConnections::default(), OuterConnections::default()]);
    on_ranks(2, |group| {
        let rank = group.rank();
        let group = group.with_timeout(Duration::from_secs(30)).with_host_id(hosts[rank as usize]);
        let pool = Pool::builder(group).driver(Driver::host().unwrap()).build().unwrap();
        let mut reasons = Vec::new();
        for (nth, mesh) in (0_u32..).zip(&mesh) {
            let comm =
                Communicator::spanning(&pool, &options(), mesh.outers(&hosts, rank)).unwrap();
            reduce(&comm, 8).unwrap();
            comm.set_timeout(Duration::from_secs(1)).unwrap();
            if rank == nth {
                reasons.push(comm.barrier(STREAM).unwrap_err().to_string());
            } else {
                // The other one does not come, and finds the connection closed.
                std::thread::sleep(Duration::from_millis(1500));
                let _ = comm.barrier(STREAM);
            }
            drop(comm);
            // The place of a communicator that is gone is free behind two commits.
            pool.commit().unwrap();
            pool.commit().unwrap();
        }
        let text = &reasons[0];
        assert!(!text.contains("ended the call for all hosts"), "rank {rank}: {text}");
    });
}

#[test]
fn a_timeout_that_changes_reaches_the_outer_engine() {
    let begin = Instant::now();
    over(&["a", "b"], |comm| {
        comm.barrier(STREAM).unwrap();
        comm.set_timeout(Duration::from_millis(700)).unwrap();
        if comm.rank() == 0 {
            assert!(comm.barrier(STREAM).unwrap_err().is_timeout());
        } else {
            std::thread::sleep(Duration::from_secs(4));
        }
    });
    assert!(begin.elapsed() < Duration::from_secs(8), "after {:?}", begin.elapsed());
}

#[test]
fn a_rank_that_leaves_is_the_error_of_all_hosts() {
    let begin = Instant::now();
    let outcomes = over(&["a", "a", "b", "b"], |comm| {
        comm.barrier(STREAM).unwrap();
        if comm.rank() == 3 {
            return None;
        }
        comm.set_timeout(Duration::from_secs(3)).unwrap();
        let error = comm.barrier(STREAM).unwrap_err();
        // It stays failed.
        let again = comm.barrier(STREAM).unwrap_err();
        assert!(again.to_string().contains("failed on all hosts"), "{again}");
        assert!(comm.failure().is_some());
        Some(error)
    });
    assert!(begin.elapsed() < Duration::from_secs(15), "after {:?}", begin.elapsed());
    for error in outcomes.iter().flatten() {
        assert!(error.to_string().contains("host b"), "{error}");
    }
}

/// One after the other, each transfer of a call fails on a rank: what it begins in every phase, and every chunk.
#[test]
fn a_connection_that_is_cut_in_any_phase_is_the_error_of_all_ranks() {
    let large: [MakeCall; 3] = [
        |comm| reduce(comm, 1_700_003),
        |comm| {
            let long = vec![1.0_f32; 90_005 * comm.world() as usize];
            comm.reduce_scatter_slice(&mut vec![0.0; 90_005], &long, ReduceOp::Sum, STREAM)
        },
        |comm| comm.broadcast_slice(&mut vec![1.0_f32; 1_200_000], 0, STREAM),
    ];
    // A rank waits two seconds for the reason of another one, so all are tried beside each other.
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for hosts in [&["a", "a", "b", "b"][..], &["a", "a", "b"], &["a", "b", "a", "c"]] {
            for call in large {
                scope.spawn(move || cut_in_every_transfer(hosts, call));
            }
        }
    });
    assert!(begin.elapsed() < Duration::from_secs(60), "after {:?}", begin.elapsed());
}

fn cut_in_every_transfer(hosts: &[&str], call: MakeCall) {
    for transfers in 0.. {
        let mesh = OuterConnections::default();
        let outcomes = over_mesh(hosts, &mesh, |comm| {
            // All are there before it is cut.
            comm.barrier(STREAM).unwrap();
            if comm.rank() == 0 {
                mesh.cut(0, transfers);
            }
            // Ranks that exchange nothing with this one find it in their next call.
            let made = call(comm).and_then(|()| comm.barrier(STREAM));
            assert_eq!(made.is_err(), comm.failure().is_some());
            made
        });
        if mesh.is_uncut() {
            assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
            assert!(transfers > 1, "the agreement and the data");
            return;
        }
        let errors: Vec<String> =
            outcomes.into_iter().map(|made| made.unwrap_err().to_string()).collect();
        assert!(errors.iter().all(|text| text.contains("the cable was cut")), "{errors:#?}");
    }
}
