//! Communicators of ranks on several hosts, which are pretended; ranks are threads, and so is what carries data between
//! hosts.

mod differences;
mod mesh;

use std::time::Duration;

use mesh::OuterConnections;
use symmpool_allocator::testing::on_ranks;
use symmpool_allocator::{Driver, Pool, Stream};
use symmpool_collectives::{
    Communicator, CommunicatorOptions, Element, PhaseTimes, ReduceOp, Request, Splits,
    StandardCollective,
};

const STREAM: &Stream = &Stream::DEFAULT;

/// Ranks by host: even ones in the order of hosts and in turns, uneven ones, one a host.
const LAYOUTS: [&[&str]; 8] = [
    &["a", "a", "b", "b"],
    &["a", "b", "a", "b"],
    &["a", "a", "b", "b", "c", "c"],
    &["c", "a", "b", "a", "b", "c"],
    &["a", "a", "a", "b"],
    &["a", "b", "c"],
    &["a", "a", "a", "b", "b", "b"],
    &["a", "b", "a", "c", "b", "a"],
];

/// Runs `body` as every rank of a communicator over hosts; returns their results in rank order.
fn over<R: Send>(hosts: &[&str], body: impl Fn(&Communicator) -> R + Sync) -> Vec<R> {
    over_mesh(hosts, &OuterConnections::default(), body)
}

fn options() -> CommunicatorOptions {
    CommunicatorOptions { timeout: Duration::from_secs(20), ..Default::default() }
}

fn over_mesh<R: Send>(
    hosts: &[&str],
    mesh: &OuterConnections,
    body: impl Fn(&Communicator) -> R + Sync,
) -> Vec<R> {
    on_ranks(hosts.len() as u32, |group| {
        let rank = group.rank();
        let group = group.with_timeout(Duration::from_secs(30)).with_host_id(hosts[rank as usize]);
        let pool = Pool::builder(group).driver(Driver::host().unwrap()).build().unwrap();
        let comm = Communicator::spanning(&pool, &options(), mesh.outers(hosts, rank)).unwrap();
        body(&comm)
    })
}

/// Element `at` of a rank's input: small whole numbers, whose sums every type but those of 8 bits has exactly.
fn value(rank: u32, at: usize) -> i64 {
    ((at * 7 + rank as usize * 3) % 11) as i64
}

fn inputs(rank: u32, count: usize) -> Vec<i64> {
    (0..count).map(|at| value(rank, at)).collect()
}

trait TestElement: Element + PartialEq + std::fmt::Debug {
    fn of(value: i64) -> Self;
}

impl TestElement for i64 {
    fn of(value: i64) -> Self {
        value
    }
}

impl TestElement for f32 {
    fn of(value: i64) -> Self {
        value as f32
    }
}

fn numbers<T: TestElement>(values: impl IntoIterator<Item = i64>) -> Vec<T> {
    values.into_iter().map(T::of).collect()
}

fn check_collectives<T: TestElement>(comm: &Communicator, count: usize) {
    let (pool, me, world) = (comm.pool(), comm.rank(), comm.world());
    let doing = format!("rank {me} of {world}, {count} elements");
    let all = count * world as usize;
    let input = pool.alloc::<T>(count).unwrap();
    let (long, long_out) = (pool.alloc::<T>(all).unwrap(), pool.alloc::<T>(all).unwrap());
    let out = pool.alloc::<T>(count).unwrap();
    pool.commit().unwrap();
    input.write(&numbers::<T>(inputs(me, count))).unwrap();
    long.write(&numbers::<T>(inputs(me, all))).unwrap();
    let reduced = |op: ReduceOp, at: usize| {
        let values = (0..world).map(|rank| value(rank, at));
        match op {
            ReduceOp::Max => values.max().unwrap(),
            ReduceOp::Min => values.min().unwrap(),
            _ => values.sum(),
        }
    };
    for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min] {
        comm.all_reduce_into(&out, &input, op, STREAM).unwrap();
        let wanted = numbers::<T>((0..count).map(|at| reduced(op, at)));
        assert_eq!(out.read().unwrap(), wanted, "all_reduce {op:?}, {doing}");
        comm.reduce_scatter_into(&out, &long, op, STREAM).unwrap();
        let first = me as usize * count;
        let wanted = numbers::<T>((first..first + count).map(|at| reduced(op, at)));
        assert_eq!(out.read().unwrap(), wanted, "reduce_scatter {op:?}, {doing}");
    }
    comm.all_reduce(&input, ReduceOp::Sum, STREAM).unwrap();
    let sum = numbers::<T>((0..count).map(|at| reduced(ReduceOp::Sum, at)));
    assert_eq!(input.read().unwrap(), sum, "all_reduce in place, {doing}");
    input.write(&numbers::<T>(inputs(me, count))).unwrap();

    comm.all_gather_into(&long_out, &input, STREAM).unwrap();
    let gathered = numbers::<T>((0..world).flat_map(|rank| inputs(rank, count)));
    assert_eq!(long_out.read().unwrap(), gathered, "all_gather, {doing}");

    comm.all_to_all_into(&long_out, &long, STREAM).unwrap();
    let first = me as usize * count;
    let sent = |rank: u32| (first..first + count).map(move |at| value(rank, at));
    let exchanged = numbers::<T>((0..world).flat_map(sent));
    assert_eq!(long_out.read().unwrap(), exchanged, "all_to_all, {doing}");

    for root in 0..world {
        let data = numbers::<T>(inputs(me + 100, count));
        out.write(&data).unwrap();
        comm.broadcast(&out, root, STREAM).unwrap();
        let wanted = numbers::<T>(inputs(root + 100, count));
        assert_eq!(out.read().unwrap(), wanted, "broadcast from {root}, {doing}");
    }
    let mut slice = numbers::<T>(inputs(me, count));
    comm.all_reduce_slice(&mut slice, ReduceOp::Sum, STREAM).unwrap();
    assert_eq!(slice, sum, "all_reduce of a slice, {doing}");
    comm.barrier(STREAM).unwrap();
}

#[test]
fn collectives_give_what_those_of_one_host_give() {
    for hosts in LAYOUTS {
        over(hosts, |comm| {
            for count in [1, 5, 96, 20_001] {
                check_collectives::<i64>(comm, count);
            }
            check_collectives::<f32>(comm, 5000);
        });
    }
}

#[test]
fn large_calls_go_in_chunks() {
    for hosts in [&["a", "a", "b", "b"][..], &["a", "b", "b", "a"], &["a", "b", "b"], LAYOUTS[7]] {
        over(hosts, |comm| check_collectives::<i64>(comm, 2_600_003));
    }
}

#[test]
fn averages_are_those_of_all_ranks() {
    for hosts in LAYOUTS {
        over(hosts, |comm| {
            let world = comm.world();
            for count in [3, 6_000] {
                let mut floats: Vec<f32> =
                    inputs(comm.rank(), count).iter().map(|x| *x as f32).collect();
                comm.all_reduce_slice(&mut floats, ReduceOp::Avg, STREAM).unwrap();
                let sum = |at: usize| (0..world).map(|rank| value(rank, at)).sum::<i64>();
                let wanted: Vec<f32> = (0..count).map(|at| sum(at) as f32 / world as f32).collect();
                assert_eq!(floats, wanted);
                // Integers do not wrap on the way.
                let mut large = vec![i64::MAX - i64::from(comm.rank()); count];
                comm.all_reduce_slice(&mut large, ReduceOp::Avg, STREAM).unwrap();
                let whole: i128 =
                    (0..world).map(|rank| i128::from(i64::MAX) - i128::from(rank)).sum();
                assert_eq!(large, vec![(whole / i128::from(world)) as i64; count]);
            }
        });
    }
}

#[test]
fn bits_are_the_same_on_every_rank_and_in_every_run() {
    let noise = |rank: u32, at: usize| {
        let bits = (at as u32).wrapping_mul(2_654_435_761) ^ rank.wrapping_mul(0x9e37_79b9);
        (bits as f32 / 1e6).sin() * 1e3
    };
    for hosts in [LAYOUTS[1], LAYOUTS[4], LAYOUTS[7]] {
        let run = || {
            over(hosts, |comm| {
                let mut all = Vec::new();
                for count in [100, 300_000] {
                    let mut data: Vec<f32> = (0..count).map(|at| noise(comm.rank(), at)).collect();
                    comm.all_reduce_slice(&mut data, ReduceOp::Sum, STREAM).unwrap();
                    all.extend(data.iter().map(|x| x.to_bits()));
                }
                all
            })
        };
        let (one, other) = (run(), run());
        assert!(one.iter().chain(&other).all(|bits| *bits == one[0]), "{hosts:?}");
    }
}

/// Each size takes another way, and all add in the same order.
#[test]
fn bits_do_not_depend_on_the_number_of_elements() {
    let noise = |rank: u32, at: usize| {
        let bits = (at as u32).wrapping_mul(2_654_435_761) ^ rank.wrapping_mul(0x9e37_79b9);
        (bits as f32 / 1e6).sin() * 1e3
    };
    const FEW: usize = 90;
    for hosts in LAYOUTS {
        over(hosts, |comm| {
            let (me, world) = (comm.rank(), comm.world() as usize);
            for op in [ReduceOp::Sum, ReduceOp::Avg] {
                let mut first: Option<Vec<u32>> = None;
                for count in [FEW, 4_000, 66_000, 1_300_000] {
                    let mut data: Vec<f32> = (0..count).map(|at| noise(me, at)).collect();
                    comm.all_reduce_slice(&mut data, op, STREAM).unwrap();
                    let bits: Vec<u32> = data[..FEW].iter().map(|x| x.to_bits()).collect();
                    assert_eq!(first.get_or_insert(bits.clone()), &bits, "{hosts:?}, {count}");
                    let long: Vec<f32> =
                        (0..world).flat_map(|_| (0..count / 4).map(|at| noise(me, at))).collect();
                    let mut part = vec![0.0; count / 4];
                    comm.reduce_scatter_slice(&mut part, &long, op, STREAM).unwrap();
                    let bits: Vec<u32> = part.iter().map(|x| x.to_bits()).take(FEW / 4).collect();
                    let all = first.as_ref().unwrap();
                    assert_eq!(all[..FEW / 4], bits, "{hosts:?}, reduce_scatter of {count}");
                }
            }
        });
    }
}

#[test]
fn parts_of_all_lengths_are_exchanged() {
    for hosts in LAYOUTS {
        over(hosts, |comm| {
            let (me, world) = (comm.rank() as usize, comm.world() as usize);
            for scale in [0, 1, 901] {
                let length = |from: usize, to: usize| (from * 5 + to * 3) % 4 * scale;
                let send: Vec<usize> = (0..world).map(|to| length(me, to)).collect();
                let receive: Vec<usize> = (0..world).map(|from| length(from, me)).collect();
                let part = |from: usize, to: usize| {
                    (0..length(from, to)).map(move |at| (from * 1000 + to * 100 + at % 97) as i64)
                };
                let input: Vec<i64> = (0..world).flat_map(|to| part(me, to)).collect();
                let wanted: Vec<i64> = (0..world).flat_map(|from| part(from, me)).collect();
                let mut out = vec![-1; wanted.len()];
                comm.all_to_all_v_slice(&mut out, &input, &receive, &send, STREAM).unwrap();
                assert_eq!(out, wanted, "rank {me}, scale {scale}");

                let pool = comm.pool();
                // Lengths are the same on every rank, so that ranks stay alike.
                let room = 3 * scale * world + 1;
                let (rows, to) =
                    (pool.alloc::<i64>(room).unwrap(), pool.alloc::<i64>(room).unwrap());
                let counts = pool.alloc::<i64>(world).unwrap();
                let (came, begins) =
                    (pool.alloc::<i64>(world).unwrap(), pool.alloc::<i64>(world).unwrap());
                pool.commit().unwrap();
                let mut padded = input.clone();
                padded.resize(room, 0);
                rows.write(&padded).unwrap();
                counts.write(&send.iter().map(|n| *n as i64).collect::<Vec<_>>()).unwrap();
                let splits =
                    Splits { row: 1, input: &counts, output: Some(&came), offsets: Some(&begins) };
                comm.all_to_all_v(&to, &rows, &splits, STREAM).unwrap();
                assert_eq!(to.read().unwrap()[..wanted.len()], wanted);
                assert_eq!(
                    came.read().unwrap(),
                    receive.iter().map(|n| *n as i64).collect::<Vec<_>>()
                );
            }
        });
    }
}

#[test]
fn rows_beyond_the_output_are_counted_and_not_written() {
    over(&["a", "b", "a", "b"], |comm| {
        let pool = comm.pool();
        let rows = pool.alloc::<i64>(40).unwrap();
        let counts = pool.alloc::<i64>(4).unwrap();
        let room = if comm.rank() == 2 { 25 } else { 40 };
        let to = pool.alloc::<i64>(40).unwrap();
        pool.commit().unwrap();
        rows.write(&[7; 40]).unwrap();
        counts.write(&[10; 4]).unwrap();
        to.write(&[-1; 40]).unwrap();
        let at = symmpool_collectives::SplitRows {
            dtype: symmpool_collectives::DType::I64,
            row: 1,
            length: 40,
            capacity: room,
        };
        let splits = symmpool_collectives::SplitsAt {
            input: counts.as_ptr().cast(),
            output: std::ptr::null_mut(),
            offsets: std::ptr::null_mut(),
            dtype: symmpool_collectives::DType::I64,
        };
        // SAFETY: the blocks are longer than what is said of them, and live until the call has returned.
        let made = unsafe {
            let (out, input) = (to.as_ptr().cast(), rows.as_ptr().cast());
            comm.all_to_all_v_splits_at(out, input, &at, &splits, STREAM)
        };
        let written = to.read().unwrap().iter().filter(|value| **value == 7).count();
        assert_eq!(written, room);
        assert_eq!(made.is_err_and(|error| error.is_overflow()), room < 40);
        // The communicator goes on.
        comm.barrier(STREAM).unwrap();
    });
}

#[test]
fn what_does_not_cross_hosts_says_so() {
    let hosts = ["a", "b", "a", "b"];
    over(&hosts, |comm| {
        let x = comm.pool().alloc::<f32>(1000).unwrap();
        comm.pool().commit().unwrap();
        let peer = (comm.rank() + 1) % comm.world();
        let errors = [
            comm.put(&x, 0, &x, peer, STREAM).unwrap_err(),
            comm.send(&x, peer, STREAM).unwrap_err(),
        ];
        for error in errors {
            assert!(error.is_unsupported(), "{error}");
            assert!(error.to_string().contains("2 hosts"), "{error}");
        }
        let named = Request::new(StandardCollective::AllReduce, &x, &x).algorithm("two_shot");
        assert!(comm.call(&named, STREAM).is_err());
    });
}

#[test]
fn a_pool_over_hosts_needs_an_outer_engine() {
    let hosts = ["a", "b"];
    on_ranks(2, |group| {
        let group = group.clone().with_host_id(hosts[group.rank() as usize]);
        let pool = Pool::builder(group).driver(Driver::host().unwrap()).build().unwrap();
        let error = Communicator::new(&pool).map(drop).unwrap_err();
        assert!(
            error.is_unsupported() && error.to_string().contains("Communicator::spanning"),
            "{error}"
        );
        // That of other ranks is refused as well.
        let mesh = OuterConnections::default();
        let wrong = mesh.outers(&["a", "a", "b"], pool.rank());
        let error = Communicator::spanning(&pool, &CommunicatorOptions::default(), wrong).map(drop);
        assert!(error.unwrap_err().is_invalid_argument());
    });
}

#[test]
fn the_time_of_calls_is_known_by_phase() {
    over(LAYOUTS[0], |comm| {
        let times = || comm.phase_times().expect("two hosts");
        assert_eq!(times(), PhaseTimes::default());
        let x = comm.pool().alloc::<f32>(1 << 20).unwrap();
        comm.all_reduce(&x, ReduceOp::Sum, STREAM).unwrap();
        let large = times();
        let sum = |times: PhaseTimes| {
            times.meeting + times.agreement + times.before + times.between + times.after
        };
        assert!(large.calls == 1 && sum(large) <= large.total, "{large:?}");
        for phase in [large.meeting, large.agreement, large.before, large.between, large.after] {
            assert!(!phase.is_zero(), "{large:?}");
        }
        // The message by which hosts agree has the data of a small call.
        let small = comm.pool().alloc::<f32>(100).unwrap();
        comm.all_reduce(&small, ReduceOp::Sum, STREAM).unwrap();
        let both = times();
        assert_eq!((both.calls, both.agreement), (2, large.agreement));
        assert!(both.between > large.between && sum(both) <= both.total, "{both:?}");
        // A call that is declined is no call that ended well.
        let root = comm.world();
        assert!(comm.broadcast(&small, root, STREAM).is_err());
        assert_eq!(times().calls, 2);
    });
    on_ranks(2, |group| {
        let pool = Pool::builder(group).driver(Driver::host().unwrap()).build().unwrap();
        assert_eq!(Communicator::new(&pool).unwrap().phase_times(), None);
    });
}

#[test]
fn a_byte_that_leaves_a_host_does_so_once() {
    for hosts in [&["a", "a", "a", "a", "b", "b", "b", "b"][..], &["a", "a", "a", "b"]] {
        let mesh = OuterConnections::default();
        let count = 1 << 20;
        let before = over_mesh(hosts, &mesh, |comm| {
            let mut data = vec![1.0_f32; count];
            comm.barrier(STREAM).unwrap();
            let before = mesh.bytes();
            comm.barrier(STREAM).unwrap();
            comm.all_reduce_slice(&mut data, ReduceOp::Sum, STREAM).unwrap();
            before
        });
        // Each host's sums go to the other one.
        let sent = mesh.bytes() - before.iter().max().unwrap();
        let least = 4 * count as u64 * 2;
        assert!(
            (least..least + least / 50).contains(&sent),
            "{hosts:?}: {sent} bytes, {least} at least"
        );
    }
}
