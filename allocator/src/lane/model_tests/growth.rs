//! How many segments a lane is made of, and of what sizes.

use proptest::prelude::*;

use super::script::{KIB, MIB};
use crate::driver::Stream;
use crate::lane::{AllocationRequest, LaneConfig, LaneState, NoBacking, UNIT, WindowPolicy};

const GIB: u64 = 1 << 30;

/// Sizes of the segments of a lane in which blocks of these sizes are allocated and kept.
fn segments(config: LaneConfig, blocks: &[u64], granularity: u64) -> Vec<u64> {
    let mut lane = LaneState::new(config, 1 << 40, granularity).unwrap();
    for &bytes in blocks {
        let request = AllocationRequest { bytes, align: 1, stream: Stream::DEFAULT, site: None };
        lane.alloc(request, &mut NoBacking).unwrap();
    }
    lane.assert_sound();
    lane.segments().iter().map(|segment| segment.bytes).collect()
}

fn shared() -> LaneConfig {
    LaneConfig::symmetric("test")
}

fn in_mib(config: LaneConfig, blocks: &[u64]) -> Vec<u64> {
    let blocks: Vec<_> = blocks.iter().map(|mib| mib * MIB).collect();
    segments(config, &blocks, 2 * MIB).into_iter().map(|bytes| bytes / MIB).collect()
}

/// Segments by the documented rule: a lane grows by half of its size within 16 and 48 MiB, or by a 128th of it, in
/// pieces of 64 MiB or a 128th; a rest of less than half a piece joins the last piece.
fn by_the_rule(blocks: &[u64], granularity: u64) -> Vec<u64> {
    let up = |bytes: u64| bytes.div_ceil(granularity) * granularity;
    let (mut made, mut used, mut reserved) = (Vec::new(), 0, 0_u64);
    for &bytes in blocks {
        used += bytes.max(1).div_ceil(UNIT) * UNIT;
        if used <= reserved {
            continue;
        }
        let usual = if reserved <= 32 * MIB {
            16 * MIB
        } else if reserved < 96 * MIB {
            reserved / 2
        } else {
            48 * MIB
        };
        let mut growth = up(used - reserved);
        for least in [usual, reserved / 128] {
            growth = growth.max(up(least));
        }
        reserved += growth;
        let piece = (64 * MIB).max(granularity).max(reserved / 128 / granularity * granularity);
        let (whole, rest) = (growth / piece, growth % piece);
        made.extend(vec![piece; whole as usize]);
        match made.last_mut() {
            Some(last) if whole > 0 && rest < piece / 2 => *last += rest,
            _ => made.push(rest),
        }
    }
    made
}

fn bytes() -> impl Strategy<Value = u64> {
    prop_oneof![
        2 => 0..MIB,
        6 => MIB..32 * MIB,
        2 => 32 * MIB..300 * MIB,
        1 => 300 * MIB..20 * GIB,
    ]
}

proptest! {
    // D6: sizes follow from the sequence alone, by this rule.
    #[test]
    fn segments_are_as_large_as_documented(
        blocks in prop::collection::vec(bytes(), 1..120),
        granularity in prop_oneof![Just(64 * KIB), Just(2 * MIB), Just(128 * MIB)],
    ) {
        prop_assert_eq!(segments(shared(), &blocks, granularity), by_the_rule(&blocks, granularity));
    }
}

#[test]
fn blocks_made_one_after_the_other_are_few_segments() {
    let mut expected = vec![16, 16, 16, 24, 36];
    expected.resize(14, 48);
    assert_eq!(in_mib(shared(), &[8; 64]), expected);
    // Each block is one segment if it is at least as large as the lane's growth.
    assert_eq!(in_mib(shared(), &[48; 100]), [48; 100]);
    assert_eq!(in_mib(shared(), &[64; 100]), [64; 100]);
}

#[test]
fn a_block_of_64_mib_is_one_segment() {
    for before in [0, 1, 15, 16, 40, 63, 200, 1000] {
        let blocks = [before, 64];
        assert_eq!(
            in_mib(shared(), &blocks).len(),
            in_mib(shared(), &blocks[..1]).len() + 1,
            "{before} MiB before"
        );
    }
    assert_eq!(in_mib(shared(), &[94]), [94]);
    assert_eq!(in_mib(shared(), &[96]), [64, 32]);
    assert_eq!(in_mib(shared(), &[222]), [64, 64, 94]);
}

#[test]
fn a_local_lane_grows_by_little() {
    let local = || LaneConfig::local("test");
    assert_eq!(in_mib(local(), &[8; 64]), [8; 64]);
    assert_eq!(in_mib(local(), &[1; 20]), [8; 3]);
    assert_eq!(in_mib(local(), &[64]), [32, 32]);
    // A large lane grows by a 128th of its size.
    assert_eq!(in_mib(local(), &[2048, 1, 16]).split_off(64), [16, 18]);
}

#[test]
fn windows_grow_by_an_eighth_of_the_lane() {
    let windows = || shared().window_policy(WindowPolicy::PerSegment);
    assert_eq!(in_mib(windows(), &[1]), [16]);
    assert_eq!(in_mib(windows(), &[256, 1]), [256, 32]);
    assert_eq!(in_mib(windows(), &[16 << 10, 1]), [16 << 10, 1 << 10], "at most 1 GiB");
}
