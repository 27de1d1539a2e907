//! Ranks that are not all linked. Memory that a rank has no link to is mapped without access, so a rank that accessed
//! it would end the process, as one test shows.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

use half::{bf16, f16};
use proptest::prelude::*;
use symmpool_allocator::Error;
use symmpool_allocator::topology::{Link, LinkMatrix, Topology, TopologyKind};
use symmpool_collectives::{
    AllReduceAlgorithm, DType, Element, F8E4m3, F8E5m2, HostEngine, HostEngineOptions, ReduceOp,
};

use crate::flat_heap::{FlatHeap, TestBuffer, memory, small_scratch};
use crate::oracle::{Oracle, bits, input, noise, reduced};
use crate::process::{Children, child, role};

/// Bytes of each of the two windows of a test.
const ROOM: u64 = 128 << 10;
/// Bytes behind a buffer that must not change.
const BEHIND: usize = 256;
const UNTOUCHED: u8 = 0xee;
const AUTO: AllReduceAlgorithm = AllReduceAlgorithm::Auto;
const CUBE_MESH: AllReduceAlgorithm = AllReduceAlgorithm::CubeMesh;

fn links(world: u32, linked: impl Fn(u32, u32) -> bool) -> Topology {
    let link = |a, b| if linked(a, b) { Link::NvLink(1) } else { Link::Pci };
    Topology::from_matrix(LinkMatrix::from_fn(world, link))
}

/// Links of two groups of `order.len() / 2` ranks that are all linked inside and linked in pairs; rank `r` has place
/// `order[r]`.
fn paired_groups(order: &[u32]) -> Topology {
    let half = order.len() as u32 / 2;
    links(order.len() as u32, |a, b| {
        let (a, b) = (order[a as usize], order[b as usize]);
        a / half == b / half || a % half == b % half
    })
}

/// The links of a DGX-1: its groups are ranks 0 to 3 and 4 to 7.
fn cube_mesh() -> Topology {
    paired_groups(&[0, 1, 2, 3, 4, 5, 6, 7])
}

/// An order in which rank 0's group is 0, 2, 5, 7, so that the groups are interleaved.
const INTERLEAVED: [u32; 8] = [0, 4, 1, 6, 5, 2, 7, 3];

fn with_links(links: &Topology, scratch_bytes: u64) -> HostEngineOptions {
    HostEngineOptions { links: Some(links.clone()), scratch_bytes, ..HostEngineOptions::default() }
}

/// One all-reduce.
#[derive(Clone, Debug)]
struct Case {
    dtype: DType,
    op: ReduceOp,
    count: usize,
    /// Whether the input and the output are windows.
    windows: (bool, bool),
    in_place: bool,
    seed: u64,
}

fn run<T: Oracle>(
    heap: &FlatHeap,
    engine: &mut HostEngine,
    case: &Case,
    algorithm: AllReduceAlgorithm,
) {
    let (rank, size) = (engine.rank(), size_of::<T>());
    let &Case { op, count, seed, .. } = case;
    let bytes = count * size;
    let buffer = |window: bool, offset: u64, skew: usize| {
        let buffer = if window {
            TestBuffer::window(heap, rank, offset + skew as u64, bytes + BEHIND)
        } else {
            TestBuffer::plain(bytes + BEHIND, skew)
        };
        buffer.write(&vec![UNTOUCHED; bytes + BEHIND]);
        buffer
    };
    let from = buffer(case.windows.0, 0, size);
    let to = buffer(case.windows.1, ROOM, 3 * size);
    let data = input::<T>(seed, rank, count);
    from.write(&data);
    let target = if case.in_place { &from } else { &to };
    // SAFETY: both buffers hold `count` elements and belong to this rank.
    unsafe { engine.all_reduce(from.place, target.place, count, T::DTYPE, op, algorithm) }.unwrap();
    let expected = reduced::<T>(seed, engine.world(), count, op);
    let got = target.read::<T>(count);
    assert!(bits(&got) == bits(&expected), "rank {rank}: {case:?}, {algorithm:?}");
    assert!(case.in_place || bits(&from.read::<T>(count)) == bits(&data), "the input is as it was");
    let behind = &target.read::<u8>(bytes + BEHIND)[bytes..];
    assert_eq!(behind, [UNTOUCHED; BEHIND], "rank {rank}: {case:?}, {algorithm:?}");
}

fn run_any(heap: &FlatHeap, engine: &mut HostEngine, case: &Case, algorithm: AllReduceAlgorithm) {
    let run = match case.dtype {
        DType::F32 => run::<f32>,
        DType::F64 => run::<f64>,
        DType::F16 => run::<f16>,
        DType::Bf16 => run::<bf16>,
        DType::I32 => run::<i32>,
        DType::I64 => run::<i64>,
        DType::U8 => run::<u8>,
        DType::I8 => run::<i8>,
        DType::F8E4m3 => run::<F8E4m3>,
        DType::F8E5m2 => run::<F8E5m2>,
        moved => unreachable!("{moved:?} has no reduction"),
    };
    run(heap, engine, case, algorithm);
}

fn check(links: &Topology, scratch: u64, cases: &[Case]) {
    let options = || with_links(links, scratch);
    let world = links.world();
    let heap = FlatHeap::linked(links, 0..world, 2 * ROOM + 64, &options(), &memory());
    heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, options());
        for case in cases {
            run_any(&heap, &mut engine, case, CUBE_MESH);
            // The automatic choice keeps to links only where they are known to be a cube mesh.
            if links.kind() == TopologyKind::HybridCubeMesh {
                run_any(&heap, &mut engine, case, AUTO);
            }
        }
    });
}

fn any_case() -> impl Strategy<Value = Case> {
    let count = prop_oneof![
        1 => Just(0usize), 3 => 1usize..70, 3 => 70usize..2000, 2 => 2000usize..12_000
    ];
    let (dtype, op) =
        (proptest::sample::select(&DType::REDUCED), proptest::sample::select(&ReduceOp::ALL));
    (dtype, op, count, any::<(bool, bool)>(), any::<bool>(), 0u64..1000).prop_map(
        |(dtype, op, count, windows, in_place, seed)| Case {
            dtype,
            op,
            count,
            windows,
            in_place,
            seed,
        },
    )
}

fn any_order(world: u32) -> impl Strategy<Value = Vec<u32>> {
    Just((0..world).collect::<Vec<u32>>()).prop_shuffle()
}

/// Links of every kind that the algorithm supports, mostly a cube mesh.
fn any_links() -> impl Strategy<Value = Topology> {
    prop_oneof![
        6 => any_order(8).prop_map(|order| paired_groups(&order)),
        // A cube mesh with further links between the groups.
        2 => (any_order(8), any::<u64>()).prop_map(|(order, more)| {
            let fewest = paired_groups(&order);
            links(8, |a, b| fewest.link(a, b).is_direct() || more >> (8 * a + b) & 1 != 0)
        }),
        1 => any_order(4).prop_map(|order| paired_groups(&order)),
        1 => any_order(6).prop_map(|order| paired_groups(&order)),
        1 => any_order(10).prop_map(|order| paired_groups(&order)),
        1 => (1u32..9).prop_map(|world| links(world, |_, _| true)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_call_over_any_such_links_gives_the_reference(
        links in any_links(),
        scratch in proptest::sample::select(vec![1024u64, 4096, 64 << 10, 2 << 20]),
        cases in proptest::collection::vec(any_case(), 1..6),
    ) {
        check(&links, scratch, &cases);
    }
}

#[test]
fn every_type_and_operation_over_a_cube_mesh() {
    let mut cases = Vec::new();
    for (seed, dtype) in (0..).zip(DType::REDUCED) {
        for op in ReduceOp::ALL {
            let windows = (seed % 2 == 0) == (op as u8).is_multiple_of(2);
            for count in [0, 1, 300, 3001] {
                let in_place = count % 3 == 0;
                cases.push(Case { dtype, op, count, windows: (windows, windows), in_place, seed });
            }
        }
    }
    check(&cube_mesh(), 4096, &cases);
    check(&paired_groups(&INTERLEAVED), 4096, &cases);
}

#[test]
fn every_algorithm_gives_the_same_bits_whatever_is_reduced() {
    // S7: with values of all magnitudes and infinities, whose sums depend on the order.
    const COUNT: usize = 5000;
    fn wild<T: Element>(rank: u32, repair: impl Fn(u64) -> T) -> Vec<T> {
        (0..COUNT as u64).map(|i| repair(noise(900 + u64::from(rank), i))).collect()
    }
    fn compare<T: Element>(repair: impl Fn(u64) -> T + Copy + Sync) {
        let links = paired_groups(&INTERLEAVED);
        let (options, linked) = (small_scratch, || with_links(&links, 4096));
        let plain = FlatHeap::new(8, 1, ROOM, &options());
        let mesh = FlatHeap::linked(&links, 0..8, ROOM, &linked(), &memory());
        plain.ranks(|rank| {
            let mut engines = [plain.engine(rank, 0, options()), mesh.engine(rank, 0, linked())];
            for op in ReduceOp::ALL {
                let mut results = Vec::new();
                for (which, algorithm) in [
                    (0, AllReduceAlgorithm::OneShot),
                    (0, AllReduceAlgorithm::TwoShot),
                    (1, CUBE_MESH),
                ] {
                    let heap = [&plain, &mesh][which];
                    let window = TestBuffer::window(heap, rank, 0, COUNT * size_of::<T>());
                    let own = TestBuffer::plain(COUNT * size_of::<T>(), 0);
                    for buffer in [window, own] {
                        buffer.write(&wild(rank, repair));
                        let (place, dtype) = (buffer.place, T::DTYPE);
                        // SAFETY: the buffer holds `COUNT` elements and is this rank's.
                        unsafe {
                            engines[which].all_reduce(place, place, COUNT, dtype, op, algorithm)
                        }
                        .unwrap();
                        results.push(buffer.read::<T>(COUNT));
                    }
                }
                assert!(results.iter().all(|result| bits(result) == bits(&results[0])), "{op:?}");
            }
        });
    }
    // Inputs have no NaNs, so that there is only one kind of NaN in the results.
    compare(|noise| Some(f32::from_bits(noise as u32)).filter(|x| !x.is_nan()).unwrap_or(0.5));
    compare(|noise| Some(f16::from_bits(noise as u16)).filter(|x| !x.is_nan()).unwrap_or(f16::ONE));
    compare(|noise| Some(f64::from_bits(noise)).filter(|x| !x.is_nan()).unwrap_or(0.5));
}

/// Runs `body` if this process is the child of `test`, else starts that child and returns its exit status.
fn in_a_child(test: &str, name: &str, body: impl FnOnce()) -> Option<std::process::ExitStatus> {
    const CHILD: &str = "SYMMPOOL_TEST_CHILD";
    match std::env::var(CHILD) {
        Ok(value) if value == name => {
            let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
            rustix::process::setrlimit(rustix::process::Resource::Core, none).unwrap();
            body();
            None
        }
        Ok(_) => None,
        Err(_) => {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args([test, "--exact", "--nocapture"]).env(CHILD, name);
            Some(command.stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap())
        }
    }
}

#[test]
fn an_algorithm_that_ignores_links_is_caught() {
    const SEGV: i32 = 11;
    let test = "missing_links::an_algorithm_that_ignores_links_is_caught";
    let links = cube_mesh();
    for (algorithm, windows) in [
        (AllReduceAlgorithm::OneShot, true),
        (AllReduceAlgorithm::OneShot, false),
        (AllReduceAlgorithm::TwoShot, true),
        (AllReduceAlgorithm::TwoShot, false),
        (CUBE_MESH, true),
        (CUBE_MESH, false),
    ] {
        let name = format!("{} {windows}", algorithm.name());
        let ended = in_a_child(test, &name, || {
            let options = || with_links(&links, 4096);
            let heap = FlatHeap::linked(&links, 0..8, 2 * ROOM + 64, &options(), &memory());
            let case = Case {
                dtype: DType::F32,
                op: ReduceOp::Sum,
                count: 1000,
                windows: (windows, windows),
                in_place: true,
                seed: 1,
            };
            heap.ranks(|rank| {
                run_any(&heap, &mut heap.engine(rank, 0, options()), &case, algorithm);
            });
        });
        let Some(ended) = ended else { continue };
        if algorithm == CUBE_MESH {
            assert!(ended.success(), "{name}: {ended}");
        } else {
            assert_eq!(ended.signal(), Some(SEGV), "{name}: {ended}");
        }
    }
}

#[test]
fn eight_processes_reduce_over_their_links() {
    let test = "missing_links::eight_processes_reduce_over_their_links";
    let links = paired_groups(&INTERLEAVED);
    if role().as_deref() == Some("mesh") {
        let (rank, memory) = child();
        let options = with_links(&links, 64 << 10);
        let heap = FlatHeap::linked(&links, rank..rank + 1, 2 * ROOM + 64, &options, &memory);
        let mut engine = heap.engine(rank, 0, options);
        println!("\nready");
        for (seed, count) in (0..).zip([0, 1, 500, 7001, 15_000].repeat(6)) {
            let (dtype, op) =
                (DType::REDUCED[seed as usize % 10], ReduceOp::ALL[seed as usize / 2 % 5]);
            let windows = (seed % 3 != 0, seed % 3 != 0);
            let case = Case { dtype, op, count, windows, in_place: seed % 2 == 0, seed };
            run_any(&heap, &mut engine, &case, if seed % 4 == 0 { AUTO } else { CUBE_MESH });
        }
        engine.barrier().unwrap();
        println!("\nwhole");
        return;
    }
    // The file is larger than the heap, so the children need not resize it.
    let mut children = Children::start(test, "mesh", 8, 8 << 20);
    for rank in 0..8 {
        children.expect(rank, "whole");
        assert!(children.wait(rank).success());
    }
}

/// Runs two small sums on eight ranks, with options and a count for each rank. Returns the two errors of the first
/// rank, then those of the next one, and so on.
fn sums(
    options: impl Fn(u32) -> HostEngineOptions + Sync,
    count: impl Fn(u32) -> usize + Sync,
) -> Vec<Error> {
    let heap = FlatHeap::new(8, 1, ROOM, &options(0));
    heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, options(rank));
        let errors: Vec<Error> = [true, false]
            .into_iter()
            .map(|window| {
                let buffer = if window {
                    TestBuffer::window(&heap, rank, 0, 4096)
                } else {
                    TestBuffer::plain(4096, 0)
                };
                buffer.write(&[7.0f32; 1024]);
                let (place, sum) = (buffer.place, ReduceOp::Sum);
                // SAFETY: the buffer holds 1024 elements and is this rank's.
                let error = unsafe {
                    engine.all_reduce(place, place, count(rank), f32::DTYPE, sum, CUBE_MESH)
                };
                assert_eq!(buffer.read::<f32>(1024), [7.0; 1024], "nothing was written");
                error.unwrap_err()
            })
            .collect();
        // All ranks got errors, so all are still in step, and a barrier works.
        let same = (0..8).all(|rank| options(rank).links == options(0).links);
        assert!(engine.failure().is_none());
        assert_eq!(engine.barrier().is_ok(), same);
        errors
    })
    .concat()
}

#[test]
fn links_that_do_not_fit_are_refused_and_named() {
    let short = links(8, |a, b| cube_mesh().link(a, b).is_direct() && (a, b) != (2, 6));
    for (i, error) in sums(|_| with_links(&short, 4096), |_| 100).into_iter().enumerate() {
        let text = error.to_string();
        assert!(error.is_unsupported(), "{text}");
        assert!(text.contains(&format!("cube_mesh on rank {}", i / 2)), "{text}");
        assert!(text.ends_with("no link between ranks 2 and 6"), "{text}");
    }
    for error in sums(|_| with_links(&Topology::unknown(8), 4096), |_| 100) {
        assert!(error.is_unsupported() && error.to_string().contains("`links`"), "{error}");
    }
}

#[test]
fn ranks_that_differ_in_links_or_calls_get_errors() {
    // S6
    let cube = cube_mesh();
    let count = |rank| if rank == 5 { 101 } else { 100 };
    for error in sums(|_| with_links(&cube, 4096), count) {
        assert!(error.is_diverged(), "{error}");
        assert!(error.to_string().contains("rank 5: all_reduce sum of 101 f32"), "{error}");
    }
    let other = paired_groups(&INTERLEAVED);
    let own = |rank| with_links(if rank == 3 { &other } else { &cube }, 4096);
    for error in sums(own, |_| 100) {
        assert!(error.is_diverged() && error.to_string().contains("different options"), "{error}");
    }
}

#[test]
fn too_little_scratch_says_how_much_it_takes() {
    let links = cube_mesh();
    let heap = FlatHeap::linked(&links, 0..8, ROOM, &with_links(&links, 256), &memory());
    heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, with_links(&links, 256));
        let error = engine.all_reduce_slice(&mut [1.0f32; 3], ReduceOp::Sum).unwrap_err();
        assert!(error.is_invalid_argument(), "{error}");
        assert!(error.to_string().contains("raise scratch_bytes to 768 or more"), "{error}");
        // Windows need less.
        let window = TestBuffer::window(&heap, rank, 0, 4000);
        window.write(&[2i32; 1000]);
        let (place, sum) = (window.place, ReduceOp::Sum);
        // SAFETY: the window holds 1000 elements and is this rank's.
        unsafe { engine.all_reduce(place, place, 1000, DType::I32, sum, AUTO) }.unwrap();
        assert_eq!(window.read::<i32>(1000), [16; 1000]);
    });
    check(
        &links,
        768,
        &[Case {
            dtype: DType::F64,
            op: ReduceOp::Sum,
            count: 999,
            windows: (false, false),
            in_place: false,
            seed: 3,
        }],
    );
}

#[test]
fn links_of_another_number_of_ranks_are_refused() {
    let error = HostEngine::control_bytes(4, &with_links(&cube_mesh(), 4096)).unwrap_err();
    assert!(error.is_invalid_argument(), "{error}");
    assert!(error.to_string().contains("8 ranks for a communicator of 4"), "{error}");
}
