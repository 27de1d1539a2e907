//! Tests of plans that the check refuses, and of what it says.

use std::time::Instant;

use symmpool_collectives::plan::{
    Buffer, Collective, Contribution, Operation, Plan, PlanError, PlanErrorKind, PlanErrorReason,
    Protocol, Span,
};

use super::builder::{Me, place, plan};
use super::{more_programs, programs};

fn refused(plan: Plan) -> PlanError {
    plan.check().expect_err("a wrong program")
}

fn reduced(program: impl Fn(&mut Me)) -> Plan {
    plan("wrong", Collective::AllReduce, 2, 2, 4, program)
}

#[test]
fn right_programs_are_proved() {
    for world in [2, 3, 4, 8] {
        let all = programs::all(world).into_iter();
        for plan in all.chain(more_programs::all(world)).chain(more_programs::in_ll(world)) {
            let name = plan.name.clone();
            let checked = plan.check().unwrap_or_else(|error| panic!("{name} of {world}: {error}"));
            assert!(checked.explain().contains(&name));
            assert!(checked.draw().starts_with("<svg"));
        }
    }
    for right in [programs::one_shot(1), programs::custom(1)] {
        right.check().expect("a group of one rank");
    }
}

#[test]
fn what_is_wrong_in_place_is_known() {
    let in_place = |plan: Plan| plan.check().unwrap().in_place().is_ok();
    assert!(in_place(programs::one_shot(4)) && in_place(programs::two_shot(4)));
    assert!(in_place(programs::two_shot_pull(4)) && in_place(programs::ring(4)));
    assert!(in_place(programs::all_gather(4)) && in_place(programs::broadcast_tree(4)));
    assert!(!in_place(programs::all_to_all(4)), "a peer's part is overwritten before it is sent");
    let pulled = plan("pulled", Collective::AllGather, 4, 1, 0, |me| {
        me.barrier();
        me.copy(me.output(me.rank), me.input(0));
        for peer in me.peers() {
            me.get(me.output(peer), place(peer, Buffer::Input, 0));
        }
        me.barrier();
    });
    assert!(!in_place(pulled), "inputs lie at another offset on each rank");
}

#[test]
fn sixteen_ranks_take_less_than_a_second() {
    let began = Instant::now();
    for plan in programs::all(16) {
        plan.check().unwrap();
    }
    assert!(began.elapsed().as_secs_f64() < 10.0, "ten programs, in a build that is not optimised");
}

#[test]
fn circles_are_told_with_all_who_wait() {
    let error = refused(reduced(|me| {
        me.wait_all();
        me.signal_all();
    }));
    assert_eq!((error.kind, error.rank, error.line), (PlanErrorKind::Deadlock, 0, 1));
    for words in ["line 1 on rank 0 (wait for rank 1)", "line 1 on rank 1 (wait for rank 0)"] {
        assert!(error.message.contains(words), "{error}");
    }
    let error = refused(reduced(|me| {
        if me.rank == 0 {
            me.barrier();
            me.signal(1);
        } else {
            me.wait(0);
            me.barrier();
        }
    }));
    assert_eq!(error.kind, PlanErrorKind::Deadlock);
    assert!(error.message.contains("barrier"), "{error}");
}

#[test]
fn signals_and_waits_match() {
    let error = refused(reduced(|me| {
        if me.rank == 0 {
            me.wait(1);
        }
    }));
    assert_eq!((error.kind, error.rank, error.line), (PlanErrorKind::UnmatchedSignal, 0, 1));
    let error = refused(reduced(|me| {
        if me.rank == 1 {
            me.signal_on(0, 3);
        }
    }));
    assert_eq!((error.kind, error.rank), (PlanErrorKind::UnmatchedSignal, 1));
    assert!(error.message.contains("channel 3"), "{error}");
    let error = refused(reduced(|me| {
        if me.rank == 1 {
            me.barrier();
        }
    }));
    assert_eq!((error.kind, error.rank), (PlanErrorKind::UnmatchedSignal, 1));
    assert!(error.message.contains("rank 0 comes to 0 barriers"), "{error}");
}

#[test]
fn reads_before_arrival_are_races() {
    let mut early = programs::one_shot(3);
    // Rank 1 reduces before it waits.
    let program = &mut early.programs[1];
    let last = program.pop().unwrap();
    program.insert(4, last);
    let error = refused(early);
    assert_eq!((error.kind, error.rank, error.line), (PlanErrorKind::Race, 1, 7), "{error}");
    assert!(error.message.contains("nothing orders the two"), "{error}");
}

#[test]
fn writes_over_what_is_still_read_are_races() {
    // Both ranks put a second value into the place that the peer reads the first from.
    let error = refused(reduced(|me| {
        let peer = 1 - me.rank;
        for chunk in 0..2 {
            me.put(place(peer, Buffer::Scratch, 0), me.input(chunk));
            me.signal(peer);
            me.wait(peer);
            let (low, high) = (me.input(chunk), me.scratch(0));
            me.reduce(
                me.output(chunk),
                if me.rank == 0 { vec![low, high] } else { vec![high, low] },
            );
        }
    }));
    assert_eq!(error.kind, PlanErrorKind::Race, "{error}");
    assert!(error.message.contains("scratch[0]"), "{error}");
}

#[test]
fn a_peers_buffers_are_not_touched_before_it_enters_nor_after_it_leaves() {
    let error = refused(plan("early", Collective::AllGather, 2, 1, 0, |me| {
        let peer = 1 - me.rank;
        me.copy(me.output(me.rank), me.input(0));
        me.put(place(peer, Buffer::Output, me.rank), me.input(0));
        me.signal(peer);
        me.wait(peer);
    }));
    assert_eq!((error.kind, error.rank, error.line), (PlanErrorKind::Race, 0, 2));
    assert!(error.message.contains("entered the call"), "{error}");
    let error = refused(plan("late", Collective::AllGather, 2, 1, 0, |me| {
        me.barrier();
        me.copy(me.output(me.rank), me.input(0));
        me.get(me.output(1 - me.rank), place(1 - me.rank, Buffer::Input, 0));
    }));
    assert_eq!((error.kind, error.rank, error.line), (PlanErrorKind::Race, 1, 3));
    assert!(error.message.contains("may have left"), "{error}");
}

#[test]
fn block_groups_race_until_they_join() {
    let grouped = |joins: bool| {
        plan("groups", Collective::AllGather, 2, 1, 0, move |me| {
            me.barrier();
            me.in_group(0, |me| me.copy(me.output(me.rank), me.input(0)));
            if joins {
                me.join();
            }
            let own = me.rank;
            me.in_group(1, |me| me.put(place(1 - own, Buffer::Output, own), me.output(own)));
            me.barrier();
        })
    };
    let error = refused(grouped(false));
    assert_eq!((error.kind, error.rank, error.line), (PlanErrorKind::Race, 0, 3), "{error}");
    grouped(true).check().expect("ordered by the join");
    let error = refused(plan("channel", Collective::AllGather, 2, 1, 0, |me| {
        for group in 0..2 {
            me.in_group(group, |me| {
                me.signal(1 - me.rank);
                me.wait(1 - me.rank);
            });
        }
    }));
    assert_eq!(error.kind, PlanErrorKind::Race);
    assert!(error.message.contains("a channel of its own"), "{error}");
}

#[test]
fn results_hold_each_contribution_once() {
    let one = |change: fn(&mut Vec<Span>)| {
        let mut wrong = programs::one_shot(3);
        if let Some(Operation::Reduce { srcs, .. }) =
            wrong.programs[2].last_mut().map(|each| &mut each.operation)
        {
            change(srcs);
        }
        refused(wrong)
    };
    let error = one(|srcs| srcs.truncate(2));
    assert_eq!((error.kind, error.rank), (PlanErrorKind::WrongResult, 2));
    assert!(error.message.contains("it lacks input[0] of rank 2"), "{error}");
    let error = one(|srcs| srcs.push(srcs[0]));
    assert!(error.message.contains("input[0] of rank 0 takes part 2 times"), "{error}");
    let error = refused(plan("none", Collective::AllGather, 2, 1, 0, |me| {
        me.copy(me.output(me.rank), me.input(0));
    }));
    assert_eq!((error.kind, error.rank, error.line), (PlanErrorKind::WrongResult, 0, 1));
    assert!(error.message.contains("output[1] of rank 0 is never written"), "{error}");
    let error = refused(plan("swapped", Collective::AllToAll, 2, 2, 0, |me| {
        me.barrier();
        (0..2).for_each(|rank| me.put_or_copy(rank, 1 - me.rank, rank));
        me.barrier();
    }));
    assert!(error.message.contains("it lacks"), "{error}");
    let error = refused(plan("empty", Collective::AllGather, 1, 1, 0, |_| ()));
    assert_eq!(error.kind, PlanErrorKind::WrongResult);
    let error = refused(reduced(|me| me.copy(me.output(0), me.scratch(1))));
    assert!(error.message.contains("nothing has written"), "{error}");
    let error = refused(plan("root", Collective::Broadcast, 2, 1, 0, |me| {
        me.copy(me.output(0), me.input(0));
    }));
    assert_eq!((error.kind, error.rank), (PlanErrorKind::WrongResult, 1), "only the root has data");
}

impl Me {
    fn put_or_copy(&mut self, to: u32, at: u32, chunk: u32) {
        let (dst, src) = (place(to, Buffer::Output, at), self.input(chunk));
        if to == self.rank { self.copy(dst, src) } else { self.put(dst, src) }
    }
}

#[test]
fn orders_of_reductions_are_the_same_on_all_ranks_or_said_not_to_be() {
    let rotated = || {
        let mut plan = programs::one_shot(3);
        if let Some(Operation::Reduce { srcs, .. }) =
            plan.programs[1].last_mut().map(|each| &mut each.operation)
        {
            srcs.rotate_left(1);
        }
        plan
    };
    let error = refused(rotated());
    assert_eq!((error.kind, error.rank), (PlanErrorKind::NotReproducible, 1));
    let allowed = Plan { reproducible: false, ..rotated() };
    allowed.check().expect("all contributions are there");
}

#[test]
fn places_are_in_range_and_of_the_operations_ranks() {
    let span = |rank, buffer, index, count| Span { rank, buffer, index, count };
    let cases: [(&str, Operation); 9] = [
        (
            "has 2 chunks",
            Operation::Copy {
                dst: span(0, Buffer::Output, 2, 1),
                src: span(0, Buffer::Input, 0, 1),
            },
        ),
        (
            "has 4 chunks",
            Operation::Copy {
                dst: span(0, Buffer::Scratch, 3, 2),
                src: span(0, Buffer::Input, 0, 2),
            },
        ),
        (
            "no rank 7",
            Operation::Get {
                dst: span(0, Buffer::Output, 0, 1),
                src: span(7, Buffer::Input, 0, 1),
            },
        ),
        (
            "copy is within",
            Operation::Copy {
                dst: span(1, Buffer::Scratch, 0, 1),
                src: span(0, Buffer::Input, 0, 1),
            },
        ),
        (
            "put copies",
            Operation::Put {
                dst: span(0, Buffer::Scratch, 0, 1),
                src: span(0, Buffer::Input, 0, 1),
            },
        ),
        (
            "get copies",
            Operation::Get {
                dst: span(0, Buffer::Output, 0, 1),
                src: span(0, Buffer::Input, 0, 1),
            },
        ),
        (
            "do not fit",
            Operation::Copy {
                dst: span(0, Buffer::Output, 0, 2),
                src: span(0, Buffer::Input, 0, 1),
            },
        ),
        (
            "overlap",
            Operation::Copy {
                dst: span(0, Buffer::Scratch, 1, 2),
                src: span(0, Buffer::Scratch, 0, 2),
            },
        ),
        ("no peer", Operation::Signal { peer: 0, channel: 0 }),
    ];
    for (words, operation) in cases {
        let mut wrong = programs::one_shot(2);
        (wrong.chunks, wrong.scratch) = (2, 4);
        wrong.programs[0][0].operation = operation;
        let error = refused(wrong);
        assert_eq!(
            (error.kind, error.rank, error.line),
            (PlanErrorKind::OutOfRange, 0, 1),
            "{words}"
        );
        assert!(error.message.contains(words), "{words}: {error}");
    }
    let error =
        refused(plan("b", Collective::AllGather, 2, 1, 0, |me| me.in_group(0, Me::barrier)));
    assert!(error.message.contains("outside of block groups"), "{error}");
    let nowhere = vec![vec![vec![Contribution { rank: 5, chunk: 0 }]]];
    let collective = Collective::Custom { name: "far".to_owned(), outputs: nowhere };
    assert_eq!(refused(plan("far", collective, 1, 1, 0, |_| ())).kind, PlanErrorKind::OutOfRange);
}

#[test]
fn inputs_are_only_read() {
    let own = plan("own", Collective::AllReduce, 1, 2, 0, |me| {
        me.copy(me.output(0), me.input(0));
        me.copy(me.output(1), me.input(1));
        me.copy(me.input(1), me.output(0));
    });
    let error = refused(own);
    assert_eq!((error.kind, error.rank, error.line), (PlanErrorKind::ReadOnly, 0, 3), "{error}");
    assert!(error.message.contains("only read"), "{error}");
    // Nor are a peer's, and those of whom nobody reads, as of all ranks but a broadcast's root.
    let peers = plan("peers", Collective::Broadcast, 2, 1, 0, |me| {
        me.barrier();
        if me.rank == 0 {
            me.put(place(1, Buffer::Input, 0), me.input(0));
            me.copy(me.output(0), me.input(0));
        }
        me.barrier();
        if me.rank == 1 {
            me.copy(me.output(0), me.input(0));
        }
    });
    let error = refused(peers);
    assert_eq!((error.kind, error.rank, error.line), (PlanErrorKind::ReadOnly, 0, 2), "{error}");
    for into in ["copy", "get", "reduce"] {
        let error = refused(plan("root", Collective::Broadcast, 2, 1, 1, |me| {
            me.barrier();
            let (to, peer) = (me.input(0), place(1 - me.rank, Buffer::Scratch, 0));
            match into {
                "copy" => me.copy(to, me.scratch(0)),
                "get" => me.get(to, peer),
                _ => me.reduce(to, vec![me.input(0), peer]),
            }
        }));
        assert_eq!(error.kind, PlanErrorKind::ReadOnly, "{into}");
    }
}

/// The kind follows from the reason.
#[test]
fn reasons_are_told_apart() {
    let of = |program: fn(&mut Me)| refused(reduced(program)).reason;
    assert_eq!(of(|me| me.copy(me.output(0), me.scratch(1))), PlanErrorReason::Undefined);
    assert_eq!(of(|me| me.copy(me.output(0), me.input(0))), PlanErrorReason::Contributions);
    assert_eq!(of(|_| ()), PlanErrorReason::NeverWritten);
    assert_eq!(of(|me| me.in_group(1, Me::barrier)), PlanErrorReason::GroupedBarrier);
    assert_eq!(of(|me| me.reduce(me.output(0), Vec::new())), PlanErrorReason::NoSources);
    let wrong = Plan { chunks: 0, ..programs::one_shot(2) };
    assert_eq!(refused(wrong).reason, PlanErrorReason::Shape);
    let long = Plan { chunks: 1 << 20, ..programs::one_shot(2) };
    assert_eq!(refused(long).reason, PlanErrorReason::Limits);
    let mut twice = Plan { protocol: Protocol::Ll, ..programs::one_shot(2) };
    let first = twice.programs[0][0].clone();
    twice.programs[0].insert(0, first);
    assert_eq!(refused(twice).reason, PlanErrorReason::LlTwice);
    for reason in PlanErrorReason::ALL {
        assert_eq!(reason.is_in_place_alone(), reason.words().starts_with("in place"));
    }
}

#[test]
fn values_that_grow_at_each_step_are_refused_in_time() {
    let error = refused(plan("growing", Collective::AllReduce, 1, 1, 2, |me| {
        me.copy(me.scratch(0), me.input(0));
        for step in 0..200 {
            me.reduce(me.scratch(1 - step % 2), vec![me.scratch(step % 2), me.scratch(step % 2)]);
        }
        me.copy(me.output(0), me.scratch(0));
    }));
    assert!(error.message.contains("far too many"), "{error}");
}

#[test]
fn ll_reaches_peers_by_puts_into_scratch_alone() {
    let ll = |plan: Plan| Plan { protocol: Protocol::Ll, ..plan }.check();
    ll(programs::one_shot(4)).expect("puts into scratch");
    for wrong in [programs::two_shot(4), programs::two_shot_pull(4), programs::custom(2)] {
        assert_eq!(ll(wrong).unwrap_err().kind, PlanErrorKind::Protocol);
    }
}
