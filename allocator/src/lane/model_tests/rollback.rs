//! Ranks that diverge, and return to a common state.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::ranks::ModelRank;
use super::script::{LaneOp, lane, op, ops};
use crate::lane::{AgreedState, BlockState, BlockView, LaneConfig, LaneKind, NoBacking, Survivor};

/// The first event that is not the same on all ranks.
fn first_difference(ranks: &[ModelRank]) -> u64 {
    let kinds = |counter| ranks.iter().map(move |rank| rank.lane.event(counter).map(|e| e.kind));
    let same = |counter: &u64| {
        let mut kinds = kinds(*counter);
        let one = kinds.next().flatten();
        one.is_some() && kinds.all(|other| other == one)
    };
    (0..).find(|counter| !same(counter)).expect("sequences end")
}

/// The state that the ranks return to, found as a pool does.
fn agreed(ranks: &[ModelRank]) -> AgreedState {
    let first = first_difference(ranks);
    let mut survivors = BTreeMap::<Survivor, usize>::new();
    for survivor in ranks.iter().flat_map(|rank| rank.lane.survivors(first)) {
        *survivors.entry(survivor).or_default() += 1;
    }
    let most = |of: fn(&ModelRank) -> u64| ranks.iter().map(of).max().unwrap();
    AgreedState {
        first,
        counter: most(|rank| rank.lane.counter()),
        next_segment: most(|rank| rank.lane.next_segment()),
        digest: 7,
        forgotten: ranks.iter().fold(0, |mask, rank| mask | rank.lane.forgotten(first)),
        survivors: survivors.into_iter().map(|(s, n)| (s, n == ranks.len())).collect(),
    }
}

/// Rolls one rank back, and checks what must hold on it whatever the others did.
fn roll_back(rank: &mut ModelRank, agreed: &AgreedState) {
    let strays = rank.live.extract_if(.., |key| key.counter >= agreed.first).collect::<Vec<_>>();
    assert_eq!(rank.lane.strays(agreed.first), strays.len() as u64);
    if !strays.is_empty() {
        let before: Vec<_> = rank.lane.blocks().collect();
        let refused = rank.lane.roll_back(agreed, &mut NoBacking).unwrap_err();
        assert!(refused.is_invalid_state(), "{refused}");
        assert_eq!(rank.lane.blocks().collect::<Vec<_>>(), before, "nothing has changed");
    }
    for key in strays {
        rank.lane.free(key, None, &mut NoBacking).unwrap();
    }
    let live = |rank: &ModelRank| -> Vec<BlockView> {
        rank.lane.blocks().filter(|block| block.state == BlockState::Live).collect()
    };
    let mapped = |rank: &ModelRank| {
        let live = rank.lane.segments().iter().copied();
        live.chain(rank.lane.retired()).collect::<Vec<_>>()
    };
    let (held, was_mapped) = (live(rank), mapped(rank));
    let dropped = rank.lane.roll_back(agreed, &mut NoBacking).unwrap();
    rank.lane.assert_sound();
    assert_eq!(live(rank), held, "blocks that are held stay where they are");
    // D6: every segment is kept or dropped, and the youngest are dropped first.
    assert!(dropped.is_sorted_by(|a, b| a.counter > b.counter));
    assert!(dropped.iter().all(|segment| segment.born >= agreed.first));
    let mut now = [mapped(rank), dropped].concat();
    let mut then = was_mapped;
    now.sort_by_key(|segment| segment.counter);
    then.sort_by_key(|segment| segment.counter);
    assert_eq!(now, then);
}

/// Asserts that ranks are alike, except in who holds a block and who has freed it.
fn assert_alike(ranks: &[ModelRank]) {
    let of = |rank: &ModelRank| {
        let mut blocks: Vec<_> = rank.lane.blocks().collect();
        for block in &mut blocks {
            if block.state == BlockState::Deferred {
                block.state = BlockState::Live;
            }
        }
        let mut stats = rank.lane.stats();
        // How a rank came to this state may differ, and so may what it alone has freed.
        (stats.allocs, stats.frees, stats.unordered_frees, stats.deferred) = (0, 0, 0, 0);
        (stats.segments_made, stats.segments_moved, stats.peak_reserved) = (0, 0, 0);
        stats.classes.iter_mut().for_each(|class| class.allocs = 0);
        stats.classes.retain(|class| class.live > 0);
        let lane = &rank.lane;
        (blocks, stats, lane.segments().to_vec(), lane.digest(), lane.next_segment())
    };
    for other in &ranks[1..] {
        assert_eq!(of(&ranks[0]), of(other));
    }
}

/// Applies a commit to lanes. Returns how many blocks returned.
fn commit(ranks: &mut [ModelRank], most: usize) -> usize {
    let mut reports = BTreeMap::<u64, u32>::new();
    for counter in ranks.iter().flat_map(|rank| rank.lane.to_report(most)) {
        *reports.entry(counter).or_default() += 1;
    }
    let reports: Vec<_> = reports.into_iter().collect();
    let world = ranks.len() as u32;
    let mut returned = 0;
    for rank in ranks {
        let back = rank.lane.apply_reports(most, &reports, world);
        rank.lane.take_retired();
        rank.lane.reclaim(&back, &mut NoBacking).unwrap();
        rank.lane.assert_sound();
        returned = back.len();
    }
    returned
}

/// Whether ranks do this between commits, each on its own.
fn between_commits(op: &LaneOp) -> bool {
    !matches!(op, LaneOp::Reclaim { .. } | LaneOp::TakeRetired)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    // D1, D5, D6: after a rollback all ranks place alike, whatever each of them did before.
    #[test]
    fn ranks_that_diverged_return_to_a_common_state(
        (config, range, granularity) in lane(),
        before in ops(60),
        apart in prop::collection::vec(prop::collection::vec(op(), 0..25), 2..4),
        after in ops(40),
        most in 1_usize..20,
    ) {
        // Local lanes take no part in a resync.
        let config = LaneConfig { kind: LaneKind::Symmetric, ..config.history(4096) };
        let mut ranks: Vec<ModelRank> = (1..)
            .zip(&apart)
            .map(|(seed, _)| ModelRank::new(seed, (config.clone(), range, granularity)))
            .collect();
        for rank in &mut ranks {
            before.iter().for_each(|op| drop(rank.call(*op)));
            rank.lane.mark_agreed();
        }
        for (rank, apart) in ranks.iter_mut().zip(&apart) {
            apart.iter().filter(|op| between_commits(op)).for_each(|op| drop(rank.call(*op)));
        }
        let agreed = agreed(&ranks);
        ranks.iter_mut().for_each(|rank| roll_back(rank, &agreed));
        assert_alike(&ranks);

        // D5: blocks that some ranks hold and others have freed return once all have freed them.
        let by_all: Vec<_> =
            agreed.survivors.iter().filter(|(_, all)| *all).map(|(s, _)| s.counter).collect();
        for rank in &mut ranks {
            for key in rank.live.extract_if(.., |key| !by_all.contains(&key.counter)) {
                rank.lane.free(key, None, &mut NoBacking).unwrap();
            }
            rank.live.sort_by_key(|key| key.counter);
        }
        let partial = agreed.survivors.len() - by_all.len();
        let returned: usize = (0..partial.div_ceil(most) + 1).map(|_| commit(&mut ranks, most)).sum();
        prop_assert_eq!(returned, partial);
        assert_alike(&ranks);

        // Ranks with the same events may mean different streams by the same ordinal (D3). Calls that
        // name streams are then not the same on all ranks.
        prop_assume!(ranks.iter().all(|rank| rank.streams() == ranks[0].streams()));
        for op in after.iter().filter(|op| between_commits(op)) {
            let seen: Vec<_> = ranks.iter_mut().map(|rank| rank.call(*op)).collect();
            prop_assert!(seen.iter().all(|other| *other == seen[0]), "{:?}: {:?}", op, seen);
            ranks.iter().for_each(|rank| rank.lane.assert_sound());
        }
        commit(&mut ranks, usize::MAX);
        assert_alike(&ranks);
    }
}
