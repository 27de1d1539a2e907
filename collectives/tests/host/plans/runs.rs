//! Runs of plans in host memory: results, pieces, buffers, and calls that do not fit.

use std::time::Duration;

use symmpool_collectives::plan::{Buffer as Part, CheckedPlan, Collective, Contribution, Plan};
use symmpool_collectives::{AllReduceAlgorithm, DType, HostEngine, HostEngineOptions, ReduceOp};

use super::builder::{place, plan};
use super::{more_programs, programs};
use crate::flat_heap::{FlatHeap, TestBuffer, small_scratch};

pub(super) const WINDOW: u64 = 1 << 17;

/// Elements of `rank`'s input and output in a call.
pub(super) fn lengths(plan: &Plan, rank: u32, count: usize) -> (usize, usize) {
    match plan.collective {
        Collective::Custom { .. } => {
            (count, count / plan.chunks as usize * plan.output_chunks(rank) as usize)
        }
        _ => (count * plan.input_parts() as usize, count * plan.output_parts() as usize),
    }
}

/// Exact in `f32`, whatever the order of sums of a few of them.
pub(super) fn value(rank: u32, index: usize, call: usize) -> f32 {
    ((index * 7 + rank as usize * 131 + call * 17) % 1009) as f32 - 300.0
}

/// Expected output of `rank`. `root` is the root of broadcasts.
pub(super) fn expected(plan: &Plan, rank: u32, count: usize, call: usize, root: u32) -> Vec<f32> {
    let sum = |index: usize| (0..plan.world).map(|rank| value(rank, index, call)).sum();
    let mine = rank as usize * count;
    let chunk = count / plan.chunks as usize;
    (0..lengths(plan, rank, count).1)
        .map(|index| match &plan.collective {
            Collective::AllReduce => sum(index),
            Collective::ReduceScatter => sum(mine + index),
            Collective::AllGather => value((index / count) as u32, index % count, call),
            Collective::Broadcast => value(root, index, call),
            Collective::AllToAll => value((index / count) as u32, mine + index % count, call),
            Collective::Custom { outputs, .. } => {
                let inputs = outputs[rank as usize][index / chunk].iter();
                inputs
                    .map(|of| value(of.rank, of.chunk as usize * chunk + index % chunk, call))
                    .sum()
            }
        })
        .collect()
}

pub(super) fn run(
    engine: &mut HostEngine,
    checked: &CheckedPlan,
    (input, output): (&TestBuffer, &TestBuffer),
    count: usize,
    root: u32,
) -> symmpool_allocator::Result<()> {
    let (from, to) = (input.place, output.place);
    // SAFETY: the buffers hold what the call reads and writes; between calls only their rank accesses them.
    unsafe { engine.run_plan(checked, from, to, count, DType::F32, ReduceOp::Sum, root) }
}

#[test]
fn every_program_computes_what_was_proved() {
    for world in [1, 2, 3, 4] {
        let options = small_scratch();
        let heap = FlatHeap::new(world, 1, 2 * WINDOW, &options);
        let mut plans = programs::all(world);
        if world > 1 {
            plans.append(&mut more_programs::all(world));
        }
        let plans: Vec<CheckedPlan> = plans
            .into_iter()
            .filter(|plan| world > 1 || plan.name != "ring")
            .map(|plan| plan.check().unwrap())
            .collect();
        heap.ranks(|rank| {
            let mut engine = heap.engine(rank, 0, small_scratch());
            for checked in &plans {
                let plan = checked.plan();
                for (call, count) in [0, 1, 2, 6, 64, 1000, 5000].into_iter().enumerate() {
                    if matches!(plan.collective, Collective::Custom { .. }) && count % 2 == 1 {
                        continue;
                    }
                    let root = if plan.collective == Collective::Broadcast {
                        call as u32 % world
                    } else {
                        0
                    };
                    let (inputs, outputs) = lengths(plan, rank, count);
                    let input = TestBuffer::window(&heap, rank, 0, inputs * 4);
                    let output = TestBuffer::window(&heap, rank, WINDOW, outputs * 4);
                    let data: Vec<f32> =
                        (0..inputs).map(|index| value(rank, index, call)).collect();
                    input.write(&data);
                    output.write(&vec![f32::NAN; outputs]);
                    run(&mut engine, checked, (&input, &output), count, root).unwrap();
                    let found: Vec<f32> = output.read(outputs);
                    let name = &plan.name;
                    assert_eq!(
                        found,
                        expected(plan, rank, count, call, root),
                        "{name}, {count} on rank {rank}"
                    );
                    let unchanged: Vec<f32> = input.read(inputs);
                    assert_eq!(unchanged, data, "{name}: an input stays as it was");
                }
            }
        });
    }
}

#[test]
fn in_place_calls_are_right_or_refused() {
    const WORLD: u32 = 3;
    let options = small_scratch();
    let heap = FlatHeap::new(WORLD, 1, WINDOW, &options);
    let plans: Vec<CheckedPlan> =
        programs::all(WORLD).into_iter().map(|plan| plan.check().unwrap()).collect();
    heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, small_scratch());
        for checked in &plans {
            let plan = checked.plan();
            let count = 250;
            let (inputs, outputs) = lengths(plan, rank, count);
            let own = rank as usize * count * 4;
            let whole = TestBuffer::window(&heap, rank, 0, inputs.max(outputs) * 4);
            let part = TestBuffer::window(&heap, rank, own as u64, inputs.min(outputs) * 4);
            let (input, output) = match plan.collective {
                Collective::AllGather => (&part, &whole),
                Collective::ReduceScatter => (&whole, &part),
                _ => (&whole, &whole),
            };
            let data: Vec<f32> = (0..inputs).map(|index| value(rank, index, 0)).collect();
            input.write(&data);
            let result = run(&mut engine, checked, (input, output), count, 0);
            if checked.in_place().is_ok() {
                result.unwrap();
                let found: Vec<f32> = output.read(outputs);
                assert_eq!(
                    found,
                    expected(plan, rank, count, 0, 0),
                    "{} on rank {rank}",
                    plan.name
                );
            } else {
                let error = result.unwrap_err();
                assert!(
                    error.is_invalid_argument() && error.to_string().contains("in place"),
                    "{error}"
                );
                // The refused call ends for all before the next one begins.
                let found: Vec<f32> = input.read(inputs);
                assert_eq!(found, data, "nothing was changed");
            }
        }
    });
}

/// Rule S7.
#[test]
fn a_flat_program_has_the_bits_of_the_built_in_algorithms() {
    const WORLD: u32 = 4;
    const COUNT: usize = 3001;
    let options = small_scratch();
    let heap = FlatHeap::new(WORLD, 1, 2 * WINDOW, &options);
    let plans =
        [programs::one_shot(WORLD), programs::two_shot(WORLD), programs::two_shot_pull(WORLD)];
    let plans = plans.map(|plan| plan.check().unwrap());
    heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, small_scratch());
        for (dtype, size) in
            [(DType::F32, 4), (DType::Bf16, 2), (DType::I32, 4), (DType::F8E4m3, 1)]
        {
            let input = TestBuffer::window(&heap, rank, 0, COUNT * size);
            let output = TestBuffer::window(&heap, rank, WINDOW, COUNT * size);
            let byte = |index: usize| (index * 29 + rank as usize * 71 + index / 256) as u8 & 0xbf;
            input.write(&(0..COUNT * size).map(byte).collect::<Vec<u8>>());
            let (from, to) = (input.place, output.place);
            for op in ReduceOp::ALL {
                let auto = AllReduceAlgorithm::Auto;
                // SAFETY: the buffers hold what the call reads and writes; between calls only their rank accesses
                // them.
                unsafe { engine.all_reduce(from, to, COUNT, dtype, op, auto) }.unwrap();
                let built_in: Vec<u8> = output.read(COUNT * size);
                for checked in &plans {
                    output.write(&vec![0xff_u8; COUNT * size]);
                    // SAFETY: the buffers hold what the call reads and writes; between calls only their rank accesses
                    // them.
                    unsafe { engine.run_plan(checked, from, to, COUNT, dtype, op, 0) }.unwrap();
                    let found: Vec<u8> = output.read(COUNT * size);
                    assert_eq!(found, built_in, "{} of {dtype:?} by {op:?}", checked.plan().name);
                }
            }
        }
    });
}

#[test]
fn averages_by_partial_sums_divide_once_and_refuse_integers() {
    const WORLD: u32 = 3;
    let options = small_scratch();
    let heap = FlatHeap::new(WORLD, 1, 2 * WINDOW, &options);
    let ring = programs::ring(WORLD).check().unwrap();
    heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, small_scratch());
        let input = TestBuffer::window(&heap, rank, 0, 400);
        let output = TestBuffer::window(&heap, rank, WINDOW, 400);
        input.write(&[3.0_f32 * rank as f32; 100]);
        let (from, to) = (input.place, output.place);
        // SAFETY: the buffers hold what the call reads and writes; between calls only their rank accesses them.
        unsafe { engine.run_plan(&ring, from, to, 100, DType::F32, ReduceOp::Avg, 0) }.unwrap();
        assert_eq!(output.read::<f32>(100), [3.0; 100]);
        // SAFETY: the buffers hold what the call reads and writes; between calls only their rank accesses them.
        let integers =
            unsafe { engine.run_plan(&ring, from, to, 100, DType::I32, ReduceOp::Avg, 0) };
        let error = integers.unwrap_err();
        assert!(error.is_unsupported() && error.to_string().contains("ring"), "{error}");
        // SAFETY: the buffers hold what the call reads and writes; between calls only their rank accesses them.
        let bools = unsafe { engine.run_plan(&ring, from, to, 100, DType::Bool, ReduceOp::Sum, 0) };
        assert!(bools.unwrap_err().is_unsupported_or_invalid());
    });
}

/// Rank r gets the inputs of ranks 0 to r, reduced: each rank makes its result of the result before.
fn scan(world: u32) -> Plan {
    let to = |rank| vec![(0..=rank).map(|rank| Contribution { rank, chunk: 0 }).collect()];
    let collective =
        Collective::Custom { name: "scan".to_owned(), outputs: (0..world).map(to).collect() };
    plan("scan", collective, world, 1, 0, |me| {
        me.barrier();
        if me.rank > 0 {
            me.wait(me.rank - 1);
            let before = place(me.rank - 1, Part::Output, 0);
            me.reduce(me.output(0), vec![before, me.input(0)]);
        } else {
            me.copy(me.output(0), me.input(0));
        }
        if me.rank + 1 < world {
            me.signal(me.rank + 1);
        }
        me.barrier();
    })
}

/// Rank r gets the inputs of ranks 0 to r, reduced at once.
fn flat_scan(world: u32) -> Plan {
    let collective = scan(world).collective;
    plan("flat_scan", collective, world, 1, 0, |me| {
        me.barrier();
        let from = (0..=me.rank).map(|rank| place(rank, Part::Input, 0)).collect();
        me.reduce(me.output(0), from);
        me.barrier();
    })
}

/// Outputs with different numbers of contributions, and results that other results are made of.
#[test]
fn averages_divide_each_output_by_its_own_number_of_contributions() {
    const WORLD: u32 = 4;
    const COUNT: usize = 5000;
    let options = small_scratch();
    let heap = FlatHeap::new(WORLD, 1, 2 * WINDOW, &options);
    let plans = [scan(WORLD), flat_scan(WORLD)].map(|plan| plan.check().unwrap());
    heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, small_scratch());
        let input = TestBuffer::window(&heap, rank, 0, COUNT * 4);
        let output = TestBuffer::window(&heap, rank, WINDOW, COUNT * 4);
        for (call, checked) in plans.iter().enumerate() {
            let data: Vec<f32> = (0..COUNT).map(|index| value(rank, index, call)).collect();
            input.write(&data);
            for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Max] {
                let (from, to) = (input.place, output.place);
                // SAFETY: the buffers hold what the call reads and writes; between calls only their rank accesses
                // them.
                unsafe { engine.run_plan(checked, from, to, COUNT, DType::F32, op, 0) }.unwrap();
                let expected = (0..COUNT).map(|index| {
                    let all = (0..=rank).map(|rank| value(rank, index, call));
                    match op {
                        ReduceOp::Sum => all.sum(),
                        ReduceOp::Avg => all.sum::<f32>() / (rank + 1) as f32,
                        _ => all.fold(f32::MIN, f32::max),
                    }
                });
                let name = &checked.plan().name;
                let expected: Vec<f32> = expected.collect();
                assert!(output.read::<f32>(COUNT) == expected, "{name} on rank {rank} by {op:?}");
            }
        }
    });
}

pub(super) trait RefusedAsExpected {
    fn is_unsupported_or_invalid(&self) -> bool;
}

impl RefusedAsExpected for symmpool_allocator::Error {
    fn is_unsupported_or_invalid(&self) -> bool {
        self.is_unsupported() || self.is_invalid_argument()
    }
}

#[test]
fn calls_that_do_not_fit_a_plan_are_refused_and_nothing_is_lost() {
    const WORLD: u32 = 2;
    let options = small_scratch();
    let heap = FlatHeap::new(WORLD, 1, 2 * WINDOW, &options);
    let [one_shot, pull, other, custom, tree] = [
        programs::one_shot(2),
        programs::two_shot_pull(2),
        programs::one_shot(3),
        programs::custom(2),
        programs::broadcast_tree(2),
    ]
    .map(|plan| plan.check().unwrap());
    heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, small_scratch());
        let input = TestBuffer::window(&heap, rank, 0, 4096);
        let output = TestBuffer::window(&heap, rank, WINDOW, 4096);
        let (plain, own) = (TestBuffer::plain(4096, 0), TestBuffer::plain(4096, 4));
        let mut refused = |checked: &CheckedPlan, buffers, count, root, words: &str| {
            let error = run(&mut engine, checked, buffers, count, root).expect_err(words);
            assert!(error.to_string().contains(words), "{words}: {error}");
            assert!(error.is_unsupported_or_invalid(), "{error}");
        };
        refused(&other, (&input, &output), 8, 0, "it is for 3 ranks");
        refused(&pull, (&plain, &output), 8, 0, "its input, which must lie in a window");
        refused(&pull, (&input, &plain), 8, 0, "its output, which must lie in a window");
        refused(&custom, (&input, &output), 7, 0, "7 elements do not divide");
        refused(&tree, (&input, &output), 8, 2, "root 2 of broadcast");
        refused(&one_shot, (&input, &output), 8, 1, "root 1 of all_reduce");
        refused(&one_shot, (&input, &output), usize::MAX / 2, 0, "elements");
        // Memory of its own does for a program that reaches peers' scratch alone.
        plain.write(&[rank as f32 + 1.0; 8]);
        run(&mut engine, &one_shot, (&plain, &own), 8, 0).unwrap();
        assert_eq!(own.read::<f32>(8), [3.0; 8]);
    });
}

/// Rule S6.
#[test]
fn ranks_with_other_algorithms_are_named() {
    const WORLD: u32 = 3;
    let options = small_scratch();
    let heap = FlatHeap::new(WORLD, 1, 2 * WINDOW, &options);
    let errors = heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, small_scratch());
        let plan = if rank == 1 { programs::two_shot(WORLD) } else { programs::one_shot(WORLD) };
        let mut plan = plan;
        plan.name = "mine".to_owned();
        let checked = plan.check().unwrap();
        let input = TestBuffer::window(&heap, rank, 0, 64);
        let output = TestBuffer::window(&heap, rank, WINDOW, 64);
        let error = run(&mut engine, &checked, (&input, &output), 16, 0).unwrap_err();
        // The communicator stays usable.
        engine.barrier().unwrap();
        error
    });
    for error in errors {
        assert!(error.is_diverged() && error.ranks() == [1], "{error}");
        assert!(error.to_string().contains("registered algorithm of hash"), "{error}");
    }
}

/// Rule S5.
#[test]
fn a_rank_that_never_signals_is_named_in_time() {
    const WORLD: u32 = 2;
    let hasty = || HostEngineOptions { timeout: Duration::from_millis(200), ..small_scratch() };
    let heap = FlatHeap::new(WORLD, 1, 2 * WINDOW, &hasty());
    let checked = programs::one_shot(WORLD).check().unwrap();
    heap.ranks(|rank| {
        if rank == 1 {
            return;
        }
        let mut engine = heap.engine(rank, 0, hasty());
        let input = TestBuffer::window(&heap, rank, 0, 64);
        let output = TestBuffer::window(&heap, rank, WINDOW, 64);
        let error = run(&mut engine, &checked, (&input, &output), 16, 0).unwrap_err();
        assert!(error.is_timeout() && error.ranks() == [1], "{error}");
        assert!(engine.failure().is_some());
    });
}
