//! Which budgets communicators get.

use super::*;

/// A communicator on a device of 132 processors.
fn member(ordinal: u32, world: u32, concurrent: Option<u32>) -> BudgetMember {
    let options = BudgetOptions { concurrent, ..BudgetOptions::default() };
    BudgetMember::new(ordinal, 132, world, options)
}

/// The budget of a call on that stream, outside captures.
fn budget(member: &mut BudgetMember, stream: u64) -> SmBudget {
    member.budget_in_call(Stream::numbered(stream), || false)
}

fn blocks(member: &mut BudgetMember, stream: u64) -> u32 {
    budget(member, stream).max_blocks
}

/// The budget of one of so many communicators, of 248 places: a sixteenth of the device's 264 is left to others.
fn part(communicators: u32) -> SmBudget {
    let max_places = 248 / communicators;
    let may_be_large = communicators <= 2;
    SmBudget { max_places, may_be_large, early: false, concurrent: true, ..SmBudget::ALL }
}

/// The budget of so many blocks, where each counts as an SM.
fn sms(max_blocks: u32) -> SmBudget {
    SmBudget { max_blocks, early: false, concurrent: true, ..SmBudget::ALL }
}

#[test]
fn communicators_on_several_streams_divide_the_device() {
    let new = |configured| member(1000, 2, configured);
    let mut first = new(None);
    assert_eq!(budget(&mut first, 7), SmBudget::ALL);
    let mut second = new(None);
    assert_eq!(budget(&mut first, 7), part(2), "the second's first call may be on any stream");
    assert_eq!(budget(&mut second, 7), SmBudget::ALL, "one after the other");
    let mut third = new(None);
    assert_eq!(budget(&mut first, 7), part(3), "whatever the number of streams is");
    assert_eq!(budget(&mut third, 8), part(3));
    assert_eq!(budget(&mut second, 9), part(3));
    assert_eq!(budget(&mut second, 8), part(3), "what has changed its stream may change it again");
    drop(third);
    assert_eq!(budget(&mut first, 7), part(2));
    drop(second);
    assert_eq!(budget(&mut first, 8), SmBudget::ALL);
    assert_eq!(budget(&mut first, 9), SmBudget::ALL, "it may change its stream while it is alone");
    let mut fourth = new(None);
    assert_eq!(budget(&mut fourth, 9), SmBudget::ALL);
    assert_eq!(budget(&mut first, 9), SmBudget::ALL);
}

#[test]
fn communicators_that_leave_a_stream_one_by_one_have_less_than_the_device() {
    for several in 2..=40 {
        let ordinal = 1100 + several;
        let mut all: Vec<BudgetMember> = (0..several).map(|_| member(ordinal, 2, None)).collect();
        for each in &mut all {
            budget(each, 0);
        }
        assert_eq!(budget(&mut all[0], 0), SmBudget::ALL);
        let places = |member: &mut BudgetMember, stream| budget(member, stream).max_places;
        let left: u32 =
            (1..several).map(|nth| places(&mut all[nth as usize], u64::from(nth))).sum();
        let together = left + places(&mut all[0], 0);
        assert!(together <= 248, "{several} take {together} places");

        // Beside other libraries two thirds of the SMs are divided, by how many leave one by one.
        share_sms(ordinal);
        for each in &mut all {
            each.any_stream = false;
            each.stream = None;
            budget(each, 0);
        }
        for each in &mut all {
            budget(each, 0);
        }
        let left: u32 =
            (1..several).map(|nth| blocks(&mut all[nth as usize], u64::from(nth))).sum();
        let together = left + blocks(&mut all[0], 0);
        assert!(together < 132, "{several} take {together} SMs");
    }
}

#[test]
fn asking_for_a_budget_changes_nothing() {
    let [mut first, mut second] = [1005; 2].map(|ordinal| member(ordinal, 2, None));
    let asked = |member: &BudgetMember, stream, is_captured| {
        member.budget_if_called(Stream::numbered(stream), is_captured, Lifted::default())
    };
    assert_eq!(budget(&mut first, 7), part(2), "the second one made no call yet");
    for _ in 0..2 {
        assert_eq!(asked(&second, 7, false), SmBudget::ALL, "one stream");
        assert_eq!(asked(&second, 8, false), part(2), "two streams");
        assert_eq!(asked(&second, 7, true), part(2), "in a graph");
        assert_eq!(asked(&first, 7, false), part(2), "the second one made no call still");
    }
    assert_eq!(budget(&mut second, 7), SmBudget::ALL);
    assert_eq!(asked(&first, 8, false), part(2), "it would change its stream");
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
                let all = Lifted { company: true, options: true, places: true };
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
    assert_eq!(second.budget_in_call(stream, || true), part(2));
    assert_eq!(first.budget_in_call(stream, || false), part(2));
    assert_eq!(second.budget_in_call(stream, || panic!("is asked once")), part(2));
    let mut per_thread = member(1001, 2, None);
    assert_eq!(budget(&mut per_thread, Stream::PER_THREAD.raw()), part(3));
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
    assert_eq!(budget(&mut limited, 1), part(4));
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
    assert_eq!(budget(&mut first, 1), SmBudget { concurrent: false, ..sms(88) });
    assert!(!first.budget_outside_calls().early);
    let mut second = member(1003, 2, None);
    assert_eq!(blocks(&mut second, 2), 44);
}

#[test]
fn large_blocks_count_as_sms_where_a_device_is_shared() {
    let mut first = member(1006, 2, None);
    count_sms(1006);
    assert_eq!(budget(&mut first, 1), SmBudget::ALL);
    let mut second = member(1006, 2, None);
    assert_eq!([budget(&mut first, 1), budget(&mut second, 2)], [sms(44); 2]);
    let [mut one, mut other] = [1007; 2].map(|ordinal| member(ordinal, 2, None));
    assert_eq!(budget(&mut one, 1), part(2));
    one.count_sms();
    assert_eq!([budget(&mut one, 1), budget(&mut other, 2)], [sms(44); 2]);
}

#[test]
fn together_they_fit_whatever_the_device() {
    for sm_count in [1, 46, 108, 132, 148] {
        for count in 1..=16 {
            let SmBudget { max_blocks, early, concurrent, .. } =
                SmBudget::of_sms(count, count, sm_count);
            assert!(!early && max_blocks >= 2 && concurrent == (count > 1));
            assert!(max_blocks == 2 || max_blocks * count <= sm_count * 2 / 3);
            let SmBudget { max_places, early, concurrent, .. } =
                SmBudget::of_places(count, sm_count);
            assert!(!early && concurrent == (count > 1));
            // Two blocks that fill an SM each are the smallest grid that any kernel has.
            assert!(max_places >= 2 * PLACES);
            let left = PLACES * sm_count / LEFT;
            assert!(max_places == 2 * PLACES || max_places * count <= PLACES * sm_count - left);
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
        max_blocks: SMS_BESIDE_COMPUTE,
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
    let mut shared = new(Some(50), Some(2));
    assert_eq!(budget(&mut shared, 7), SmBudget { max_blocks: 50, ..part(2) });
}

#[test]
fn a_call_of_large_blocks_is_asked_for_as_it_is_made() {
    let [mut first, _second] = [1008; 2].map(|ordinal| member(ordinal, 2, None));
    let stream = Stream::numbered(7);
    let asked = |member: &BudgetMember, places| {
        member.budget_if_called(stream, false, Lifted { places, ..Lifted::default() })
    };
    assert_eq!([asked(&first, false), asked(&first, true)], [part(2), sms(44)]);
    assert_eq!(budget(&mut first, 7), part(2), "a question changes nothing");
    first.count_sms();
    assert_eq!([asked(&first, false), budget(&mut first, 7)], [sms(44); 2]);
}
