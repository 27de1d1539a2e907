//! Random sequences of calls to a lane.

use proptest::prelude::*;

use crate::lane::{LaneConfig, WindowPolicy};

pub(super) const KIB: u64 = 1 << 10;
pub(super) const MIB: u64 = 1 << 20;

/// One call. `nth` selects one of the live blocks, modulo their number.
#[derive(Clone, Copy, Debug)]
pub(super) enum LaneOp {
    Alloc {
        bytes: u64,
        align: u64,
        stream: u64,
    },
    Free {
        nth: usize,
    },
    FreeUnordered {
        nth: usize,
    },
    Record {
        nth: usize,
        stream: u64,
    },
    Reserve {
        bytes: u64,
        stream: u64,
    },
    /// Reclaims one of every `keep + 1` deferred frees.
    Reclaim {
        keep: usize,
    },
    Trim,
    TakeRetired,
    Forget {
        stream: u64,
    },
}

pub(super) const STREAMS: u64 = 4;

fn bytes() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => 0..4 * KIB,
        6 => 0..MIB,
        8 => MIB..24 * MIB,
        1 => 24 * MIB..100 * MIB,
    ]
}

fn align() -> impl Strategy<Value = u64> {
    prop_oneof![4 => Just(1_u64), 2 => (0_u32..=21).prop_map(|shift| 1 << shift)]
}

pub(super) fn op() -> impl Strategy<Value = LaneOp> {
    let nth = any::<usize>;
    let stream = || prop_oneof![5 => Just(0), 2 => Just(1), 1 => 2..STREAMS];
    prop_oneof![
        12 => (bytes(), align(), stream())
            .prop_map(|(bytes, align, stream)| LaneOp::Alloc { bytes, align, stream }),
        8 => nth().prop_map(|nth| LaneOp::Free { nth }),
        2 => nth().prop_map(|nth| LaneOp::FreeUnordered { nth }),
        4 => (nth(), 0..STREAMS).prop_map(|(nth, stream)| LaneOp::Record { nth, stream }),
        1 => (bytes(), stream()).prop_map(|(bytes, stream)| LaneOp::Reserve { bytes, stream }),
        1 => (0_usize..3).prop_map(|keep| LaneOp::Reclaim { keep }),
        1 => Just(LaneOp::Trim),
        1 => Just(LaneOp::TakeRetired),
        1 => (0..STREAMS).prop_map(|stream| LaneOp::Forget { stream }),
    ]
}

pub(super) fn ops(most: usize) -> impl Strategy<Value = Vec<LaneOp>> {
    prop::collection::vec(op(), 1..most)
}

/// Arguments of a lane: configuration, range, granularity. Ranges are short, so that lanes reach their end and use
/// holes.
pub(super) fn lane() -> impl Strategy<Value = (LaneConfig, u64, u64)> {
    let policy = prop_oneof![Just(WindowPolicy::Contiguous), Just(WindowPolicy::PerSegment)];
    let limit = prop_oneof![2 => Just(None), 1 => (16_u64..200).prop_map(|n| Some(n * MIB))];
    let granularity = prop_oneof![Just(64 * KIB), Just(2 * MIB)];
    (policy, any::<bool>(), limit, 40_u64..400, granularity).prop_map(
        |(policy, local, limit, range, granularity)| {
            let config =
                if local { LaneConfig::local("test") } else { LaneConfig::symmetric("test") };
            let config = config.window_policy(policy).history(64);
            (limit.into_iter().fold(config, LaneConfig::limit), range * MIB, granularity)
        },
    )
}
