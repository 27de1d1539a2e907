//! Runs of programs that do what the usual ones never do: chunks in the places of shorter ones, ranks without data or
//! without anything to do, and calls that are in place on some ranks only.

use symmpool_collectives::plan::{Buffer as Part, CheckedPlan, Collective, Plan};
use symmpool_collectives::{DType, HostEngine, Place, ReduceOp};

use super::builder::{place, plan};
use super::runs::{RefusedAsExpected, WINDOW, expected, lengths, run, value};
use super::{more_programs, odd_programs, programs};
use crate::flat_heap::{FlatHeap, TestBuffer, small_scratch};

/// Elements behind an output, which a call must not touch.
const GUARD: usize = 64;

fn data(plan: &Plan, rank: u32, count: usize, call: usize) -> Vec<f32> {
    (0..lengths(plan, rank, count).0).map(|index| value(rank, index, call)).collect()
}

/// Makes a call, and compares the output, what lies behind it, and the input.
fn judge(
    heap: &FlatHeap,
    engine: &mut HostEngine,
    checked: &CheckedPlan,
    (rank, count, call): (u32, usize, usize),
) {
    let plan = checked.plan();
    let (inputs, outputs) = lengths(plan, rank, count);
    let input = TestBuffer::window(heap, rank, 0, inputs * 4);
    let output = TestBuffer::window(heap, rank, WINDOW, (outputs + GUARD) * 4);
    let data = data(plan, rank, count, call);
    input.write(&data);
    output.write(&vec![7.0_f32; outputs + GUARD]);
    run(engine, checked, (&input, &output), count, 0).unwrap();
    let found: Vec<f32> = output.read(outputs + GUARD);
    let name = format!("{}, {count} on rank {rank}", plan.name);
    assert!(found[..outputs] == expected(plan, rank, count, call, 0), "{name}");
    assert!(found[outputs..] == [7.0; GUARD], "{name}: nothing is written past the end");
    assert!(input.read::<f32>(inputs) == data, "{name}: an input stays as it was");
}

#[test]
fn odd_programs_compute_what_was_proved_for_every_count() {
    for world in [2, 3, 4] {
        let options = small_scratch();
        let heap = FlatHeap::new(world, 1, 2 * WINDOW, &options);
        let plans: Vec<CheckedPlan> =
            odd_programs::all(world).into_iter().map(|plan| plan.check().unwrap()).collect();
        heap.ranks(|rank| {
            let mut engine = heap.engine(rank, 0, small_scratch());
            for checked in &plans {
                let counts = [0, 1, 2, 15, 16, 17, 18, 32, 34, 64, 1000, 4500];
                for (call, count) in counts.into_iter().enumerate() {
                    let (plan, chunks) = (checked.plan(), checked.plan().chunks as usize);
                    let is_custom = matches!(plan.collective, Collective::Custom { .. });
                    if (is_custom || plan.name == "parked") && count % chunks != 0 {
                        continue;
                    }
                    judge(&heap, &mut engine, checked, (rank, count, call));
                }
            }
        });
    }
}

/// A program that would lose elements in the place of a shorter chunk takes calls only in which no chunk is shorter.
#[test]
fn chunks_that_pass_through_shorter_ones_need_equal_chunks() {
    const WORLD: u32 = 2;
    let heap = FlatHeap::new(WORLD, 1, 2 * WINDOW, &small_scratch());
    let parked = odd_programs::parked(WORLD).check().unwrap();
    assert!(parked.explain().contains("must divide into equal chunks"), "{}", parked.explain());
    heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, small_scratch());
        let input = TestBuffer::window(&heap, rank, 0, 17 * 4);
        let output = TestBuffer::window(&heap, rank, WINDOW, (17 + GUARD) * 4);
        output.write(&[7.0_f32; 17 + GUARD]);
        let error = run(&mut engine, &parked, (&input, &output), 17, 0).expect_err("17 elements");
        assert!(error.is_invalid_argument(), "{error}");
        assert!(error.to_string().contains("17 elements do not divide"), "{error}");
        assert_eq!(output.read::<f32>(17 + GUARD), [7.0; 17 + GUARD], "nothing was written");
        // The refused call ended on all ranks, and those that divide are right.
        judge(&heap, &mut engine, &parked, (rank, 34, 1));
    });
}

/// A call is right whichever ranks make it in place, or is refused on those that do.
#[test]
fn calls_may_be_in_place_on_some_ranks_only() {
    const WORLD: u32 = 3;
    let heap = FlatHeap::new(WORLD, 1, 2 * WINDOW, &small_scratch());
    let all = programs::all(WORLD).into_iter().chain(more_programs::all(WORLD));
    let plans: Vec<CheckedPlan> = all
        .chain(odd_programs::all(WORLD))
        .map(|plan| plan.check().unwrap())
        .filter(|checked| checked.in_place().is_ok())
        .collect();
    assert!(plans.len() > 15, "{} programs are right in place", plans.len());
    heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, small_scratch());
        for checked in &plans {
            let plan = checked.plan();
            let count = 252;
            let (inputs, outputs) = lengths(plan, rank, count);
            let longest = inputs.max(outputs) * 4;
            let own = u64::from(rank) * count as u64 * 4;
            for subset in 0..1_u32 << WORLD {
                let in_place = subset >> rank & 1 == 1;
                // Peers find what they access at one offset, so one of the two moves only where they do not.
                let (mut from, mut to) = match plan.collective {
                    Collective::AllGather => (WINDOW + own, WINDOW),
                    Collective::ReduceScatter => (0, own),
                    _ => (WINDOW, WINDOW),
                };
                if !in_place && checked.needs_input_window() {
                    to = WINDOW + longest as u64;
                } else if !in_place {
                    from = 0;
                    to = to.max(WINDOW);
                }
                let both = checked.needs_input_window() && checked.needs_output_window();
                if both && subset != 0 && subset + 1 != 1 << WORLD {
                    continue;
                }
                let input = TestBuffer::window(&heap, rank, from, inputs * 4);
                let output = TestBuffer::window(&heap, rank, to, outputs * 4);
                output.write(&vec![7.0_f32; outputs]);
                input.write(&data(plan, rank, count, subset as usize));
                let name = format!("{} in place on {subset:03b}, rank {rank}", plan.name);
                run(&mut engine, checked, (&input, &output), count, 0)
                    .unwrap_or_else(|error| panic!("{name}: {error}"));
                let found: Vec<f32> = output.read(outputs);
                assert!(found == expected(plan, rank, count, subset as usize, 0), "{name}");
            }
        }
    });
}

#[test]
fn what_is_wrong_in_place_on_one_rank_alone_is_refused_in_place() {
    let heap = FlatHeap::new(2, 1, 2 * WINDOW, &small_scratch());
    let crossed = odd_programs::right_in_place_on_both_or_none().check().unwrap();
    assert!(crossed.in_place().is_err());
    heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, small_scratch());
        let [input, output] = [0, WINDOW].map(|at| TestBuffer::window(&heap, rank, at, 16));
        input.write(&[rank as f32, 2.0 + rank as f32]);
        let to = if rank == 0 { &input } else { &output };
        let error = run(&mut engine, &crossed, (&input, to), 2, 0).expect_err("in place on rank 0");
        if rank == 0 {
            assert!(error.is_invalid_argument(), "{error}");
            assert!(error.to_string().contains("in place"), "{error}");
        } else {
            assert!(error.is_diverged() && error.ranks() == [0], "{error}");
        }
        run(&mut engine, &crossed, (&input, &output), 2, 0).unwrap();
        let wanted = if rank == 0 { [1.0, 0.0] } else { [0.0, 3.0] };
        assert_eq!(output.read::<f32>(2), wanted);
    });
}

/// Peers take the root's input where it lies.
fn pulled_broadcast(world: u32) -> Plan {
    plan("pulled_broadcast", Collective::Broadcast, world, 1, 0, |me| {
        me.barrier();
        match me.rank {
            0 => me.copy(me.output(0), me.input(0)),
            _ => me.get(me.output(0), place(0, Part::Input, 0)),
        }
        me.barrier();
    })
}

#[test]
fn who_is_not_the_root_needs_no_input() {
    const WORLD: u32 = 3;
    const COUNT: usize = 100;
    let heap = FlatHeap::new(WORLD, 1, 2 * WINDOW, &small_scratch());
    let broadcasts = [
        programs::broadcast_tree(WORLD),
        more_programs::flat_broadcast(WORLD),
        more_programs::broadcast_chain(WORLD),
    ];
    let plans = broadcasts.map(|plan| plan.check().unwrap());
    let pulled = pulled_broadcast(WORLD).check().unwrap();
    heap.ranks(|rank| {
        let mut engine = heap.engine(rank, 0, small_scratch());
        let input = TestBuffer::window(&heap, rank, 0, COUNT * 4);
        let output = TestBuffer::window(&heap, rank, WINDOW, COUNT * 4);
        for root in 0..WORLD {
            let data = [root as f32 + 1.0; COUNT];
            input.write(&data);
            let nowhere = Place::Unregistered(std::ptr::null_mut());
            let from = if rank == root { input.place } else { nowhere };
            for checked in &plans {
                output.write(&[f32::NAN; COUNT]);
                let (to, sum) = (output.place, ReduceOp::Sum);
                // SAFETY: the root's input holds what the call reads; no other is read.
                unsafe { engine.run_plan(checked, from, to, COUNT, DType::F32, sum, root) }
                    .unwrap();
                assert_eq!(output.read::<f32>(COUNT), data, "{}", checked.plan().name);
            }
            // Where peers look for the root's input, it lies at one offset on all ranks.
            let (to, sum) = (output.place, ReduceOp::Sum);
            // SAFETY: the call is refused before anything is accessed.
            let refused =
                unsafe { engine.run_plan(&pulled, from, to, COUNT, DType::F32, sum, root) };
            let error = refused.expect_err("an input that is no window");
            match rank == root {
                true => assert!(error.is_diverged(), "{error}"),
                false => assert!(error.is_unsupported_or_invalid(), "{error}"),
            }
            run(&mut engine, &pulled, (&input, &output), COUNT, root).unwrap();
            assert_eq!(output.read::<f32>(COUNT), data);
        }
    });
}
