//! Budgets that communicators get.

use super::*;

/// A communicator on a device of 132 SMs.
fn member(ordinal: u32, world: u32, concurrent: Option<u32>) -> BudgetMember {
    let options = BudgetOptions { concurrent, ..BudgetOptions::default() };
    BudgetMember::new(ordinal, 132, world, options)
}

/// The budget of a call on that stream, outside captures.
fn budget(member: &mut BudgetMember, stream: u64) -> SmBudget {
    member.budget_in_call(Stream::numbered(stream), || false)
}

fn blocks(member: &mut BudgetMember, stream: u64) -> u32 {
    budget(member, stream).most_blocks
}

/// The budget of kernels with that wide and that narrow grid.
fn turns(most_blocks: u32, narrow_blocks: u32) -> SmBudget {
    let narrow_blocks = Some(narrow_blocks);
    SmBudget { most_blocks, narrow_blocks, concurrent: true, ..SmBudget::among(1, 1, 3) }
}

/// Most SMs that kernels of communicators with these budgets have at once: one is wide.
fn at_once(budgets: &[SmBudget]) -> u32 {
    let of = |wide: usize| -> u32 {
        let grid = |(nth, budget): (usize, &SmBudget)| match budget.narrow_blocks {
            Some(narrow) if nth != wide => narrow,
            _ => budget.most_blocks,
        };
        budgets.iter().enumerate().map(grid).sum()
    };
    (0..budgets.len()).map(of).max().unwrap_or(0)
}

#[test]
fn communicators_on_several_streams_have_the_device_by_turns() {
    let new = |configured| member(1000, 2, configured);
    let mut first = new(None);
    assert_eq!(budget(&mut first, 7), SmBudget::ALL);
    let mut second = new(None);
    let (two, shared) = (turns(100, 24), turns(100, 12));
    assert_eq!(budget(&mut first, 7), two, "the second's first call may be on any stream");
    assert_eq!(budget(&mut second, 7), SmBudget::ALL, "one after the other");
    let mut third = new(None);
    assert_eq!(budget(&mut first, 7), shared);
    assert_eq!(budget(&mut third, 8), shared);
    assert_eq!(budget(&mut second, 9), shared);
    assert_eq!(budget(&mut second, 8), shared, "what has changed its stream may change it again");
    drop(third);
    assert_eq!(budget(&mut first, 7), two);
    drop(second);
    assert_eq!(budget(&mut first, 8), SmBudget::ALL);
    assert_eq!(budget(&mut first, 9), SmBudget::ALL, "it may change its stream while it is alone");
    let mut fourth = new(None);
    assert_eq!(budget(&mut fourth, 9), SmBudget::ALL);
    assert_eq!(budget(&mut first, 9), SmBudget::ALL);
}

#[test]
fn communicators_that_leave_a_stream_one_by_one_have_less_than_the_device() {
    for (several, shares) in (2..=40).flat_map(|several| [(several, false), (several, true)]) {
        let ordinal = 1100 + 2 * several + u32::from(shares);
        if shares {
            share_sms_of_several(ordinal);
        }
        let mut all: Vec<BudgetMember> = (0..several).map(|_| member(ordinal, 2, None)).collect();
        for each in &mut all {
            budget(each, 0);
        }
        assert_eq!(budget(&mut all[0], 0), SmBudget::ALL);
        let mut budgets: Vec<SmBudget> =
            (1..several).map(|nth| budget(&mut all[nth as usize], u64::from(nth))).collect();
        budgets.push(budget(&mut all[0], 0));
        let together = at_once(&budgets);
        assert!(together <= 124, "{several} take {together} blocks, shared: {shares}");
    }
}

#[test]
fn asking_for_a_budget_changes_nothing() {
    let [mut first, mut second] = [1005; 2].map(|ordinal| member(ordinal, 2, None));
    let asked = |member: &BudgetMember, stream, is_captured| {
        member.budget_if_called(Stream::numbered(stream), is_captured, Lifted::default())
    };
    assert_eq!(budget(&mut first, 7), turns(100, 24), "the second one made no call yet");
    for _ in 0..2 {
        assert_eq!(asked(&second, 7, false), SmBudget::ALL, "one stream");
        assert_eq!(asked(&second, 8, false), turns(100, 24), "two streams");
        assert_eq!(asked(&second, 7, true), turns(100, 24), "in a graph");
        assert_eq!(asked(&first, 7, false), turns(100, 24), "the second one made no call still");
    }
    assert_eq!(budget(&mut second, 7), SmBudget::ALL);
    assert_eq!(asked(&first, 8, false), turns(100, 24), "it would change its stream");
    assert_eq!(budget(&mut first, 7), SmBudget::ALL, "it did not");
    // A call gets the budget that was asked for, whatever the options and the call.
    for concurrent in [None, Some(1), Some(3)] {
        for most in [None, Some(20)] {
            let options = BudgetOptions { concurrent, most, beside_compute: true };
            let mut third = BudgetMember::new(1005, 132, 2, options);
            for (stream, is_captured) in [(0, false), (7, false), (7, true), (9, false)] {
                let before = asked(&third, stream, is_captured);
                let stream = Stream::numbered(stream);
                assert_eq!(before, third.budget_in_call(stream, || is_captured));
                let all = Lifted { company: true, options: true };
                let best = third.budget_if_called(stream, is_captured, all);
                assert_eq!(best, SmBudget::ALL);
            }
        }
    }
}

#[test]
fn calls_in_graphs_may_be_on_any_stream() {
    let [mut first, mut second] = [1001; 2].map(|ordinal| member(ordinal, 2, None));
    let stream = Stream::numbered(7);
    assert_eq!(second.budget_in_call(stream, || true).most_blocks, 100);
    assert_eq!(first.budget_in_call(stream, || false).most_blocks, 100);
    assert_eq!(second.budget_in_call(stream, || panic!("is asked once")).most_blocks, 100);
    let mut per_thread = member(1001, 2, None);
    assert_eq!(blocks(&mut per_thread, Stream::PER_THREAD.raw()), 100);
}

#[test]
fn single_ranks_do_not_count_and_options_hold() {
    let mut first = member(1002, 2, None);
    let mut alone = member(1002, 1, None);
    assert_eq!((budget(&mut first, 1), budget(&mut alone, 9)), (SmBudget::ALL, SmBudget::ALL));
    assert_eq!(
        (first.budget_outside_calls(), alone.budget_outside_calls()),
        (SmBudget::ALL, SmBudget::ALL)
    );
    let mut limited = member(1002, 2, Some(4));
    assert_eq!(budget(&mut limited, 1), turns(100, 8));
    // They wait for nobody, but would be resident while the kernel before them on the stream waits.
    let late = SmBudget::ALL.in_turn();
    assert_eq!(
        [budget(&mut alone, 9), first.budget_outside_calls(), limited.budget_outside_calls()],
        [late; 3]
    );
    let mut all = member(1002, 2, Some(1));
    assert_eq!(budget(&mut all, 1), SmBudget::ALL);
}

#[test]
fn a_third_is_left_to_other_libraries() {
    let mut first = member(1003, 2, None);
    share_sms(1003);
    let alone = SmBudget { concurrent: false, narrow_blocks: None, ..turns(88, 0) };
    assert_eq!(budget(&mut first, 1), alone);
    assert!(!first.budget_outside_calls().early);
    let mut second = member(1003, 2, None);
    assert_eq!(budget(&mut second, 2), turns(64, 24));
}

#[test]
fn several_leave_a_third_where_they_are_told_to() {
    let mut first = member(1006, 2, None);
    share_sms_of_several(1006);
    assert_eq!(budget(&mut first, 1), SmBudget::ALL, "alone");
    let mut second = member(1006, 2, None);
    assert_eq!([budget(&mut first, 1), budget(&mut second, 2)], [turns(64, 24); 2]);
    // A kernel that has as many blocks on all ranks says so by itself.
    let [mut one, mut other] = [1007; 2].map(|ordinal| member(ordinal, 2, None));
    assert_eq!(budget(&mut one, 1), turns(100, 24));
    one.share_sms_of_several();
    assert_eq!([budget(&mut one, 1), budget(&mut other, 2)], [turns(64, 24); 2]);
}

#[test]
fn together_they_fit_whatever_the_device() {
    for sm_count in [1, 24, 46, 66, 108, 132, 148] {
        for count in 1..=60 {
            let two_thirds = SmBudget::among(count, count, sm_count);
            let all = SmBudget::by_turns(count, sm_count);
            for (budget, most) in
                [(two_thirds, sm_count * 2 / 3), (all, sm_count - sm_count / LEFT)]
            {
                let SmBudget { most_blocks, narrow_blocks, early, concurrent, .. } = budget;
                assert!(!early && most_blocks >= 2 && concurrent == (count > 1));
                assert!(narrow_blocks.is_none_or(|narrow| narrow >= 2 && narrow < most_blocks));
                // Two blocks are the smallest grid.
                let is_least = most_blocks == 2 && 2 * count > most - most % count;
                let together = at_once(&vec![budget; count as usize]);
                assert!(is_least || together <= most, "{budget:?}: {count} on {sm_count}");
                // Nobody has less than an equal part.
                assert!(most_blocks >= most / count, "{budget:?}: {count} on {sm_count}");
            }
        }
    }
}

#[test]
fn calls_beside_compute_take_few_sms() {
    let new = |most, concurrent| {
        BudgetMember::new(1004, 132, 2, BudgetOptions { concurrent, most, beside_compute: true })
    };
    let mut alone = new(None, None);
    let (concurrent, beside_compute) = (false, true);
    let few = SmBudget {
        most_blocks: SMS_BESIDE_COMPUTE,
        concurrent,
        beside_compute,
        ..SmBudget::ALL.in_turn()
    };
    assert_eq!(budget(&mut alone, 7), few);
    assert_eq!([0, 1, 2].map(|stream| budget(&mut alone, stream)), [SmBudget::ALL; 3]);
    assert_eq!(alone.budget_in_call(Stream::numbered(7), || true), SmBudget::ALL, "captured");
    drop(alone);
    // Options hold on every stream, and other communicators are still left theirs.
    let mut chosen = new(Some(50), None);
    assert_eq!([0, 7].map(|stream| blocks(&mut chosen, stream)), [50; 2]);
    chosen.set_most(Some(20));
    assert_eq!(blocks(&mut chosen, 0), 20);
    chosen.set_most(None);
    assert_eq!(budget(&mut chosen, 7), few);
    drop(chosen);
    let mut shared = new(Some(50), Some(3));
    assert_eq!(blocks(&mut shared, 7), 50);
}

#[test]
fn a_communicator_without_a_place_in_the_lock_is_narrow() {
    let mut all: Vec<BudgetMember> = (0..=SM_LOCK_MEMBERS).map(|_| member(1300, 2, None)).collect();
    let mut last = all.pop().expect("a communicator");
    all.truncate(2);
    let captured = |each: &mut BudgetMember| each.budget_in_call(Stream::numbered(7), || true);
    let narrow = SmBudget { narrow_blocks: None, ..turns(12, 12) };
    assert_eq!([captured(&mut last), captured(&mut all[0])], [narrow, turns(100, 12)]);
    // A communicator that may still run keeps its place, and others leave it room.
    all[1].keep();
    drop((all, last));
    let mut next = member(1300, 2, None);
    assert_eq!((next.place().0, captured(&mut next)), (0, turns(100, 24)));
    assert_eq!(member(1300, 2, None).place().0, 2);
}
