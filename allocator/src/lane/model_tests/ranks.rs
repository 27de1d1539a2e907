//! Tests that make equal calls on many ranks, and calls on one rank that diverges.

use std::thread;

use proptest::prelude::*;

use super::script::{KIB, LaneOp, MIB, STREAMS, lane, op, ops};
use crate::driver::Stream;
use crate::lane::{AllocationRequest, BlockKey, Digest, LaneConfig, LaneState, NoBacking, Segment};

/// One rank: a lane, its live blocks, and its own handles for the streams.
pub(super) struct ModelRank {
    pub(super) lane: LaneState,
    pub(super) live: Vec<BlockKey>,
    seed: u64,
}

/// State that ranks must have in common after a call.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Seen {
    placed: Option<(u64, u64)>,
    digest: Digest,
    counter: u64,
    segments: Vec<Segment>,
}

impl ModelRank {
    pub(super) fn new(seed: u64, (config, range, granularity): (LaneConfig, u64, u64)) -> Self {
        let lane = LaneState::new(config, range, granularity).unwrap();
        Self { lane, live: Vec::new(), seed }
    }

    /// This rank's handle for a stream. Handles are in another order on every rank (D3).
    fn stream(&self, stream: u64) -> Stream {
        let mixed = (stream ^ (self.seed % STREAMS)) + 1;
        Stream::numbered(mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(self.seed as u32))
    }

    /// The streams known to the lane, by ordinal, as the script numbers them.
    pub(super) fn streams(&self) -> Vec<u64> {
        let number = |handle| (0..STREAMS).find(|&stream| self.stream(stream) == handle).unwrap();
        self.lane.streams().map(number).collect()
    }

    pub(super) fn call(&mut self, op: LaneOp) -> Seen {
        let n = self.live.len();
        let (lane, backing) = (&mut self.lane, &mut NoBacking);
        let mut placed = None;
        match op {
            LaneOp::Alloc { bytes, align, stream } => {
                let stream = self.stream(stream);
                let request = AllocationRequest { bytes, align, stream, site: None };
                if let Ok(block) = self.lane.alloc(request, backing) {
                    self.live.push(block.key);
                    placed = Some((block.offset, block.bytes));
                }
            }
            LaneOp::Free { nth } if n > 0 => {
                lane.free(self.live.swap_remove(nth % n), None, backing).unwrap();
            }
            LaneOp::FreeUnordered { nth } if n > 0 => {
                lane.free_unordered(self.live.swap_remove(nth % n), None, backing).unwrap();
            }
            LaneOp::Record { nth, stream } if n > 0 => {
                let stream = self.stream(stream);
                self.lane.record_stream(self.live[nth % n], stream, None).unwrap();
            }
            LaneOp::Reserve { bytes, stream } => {
                let stream = self.stream(stream);
                // Out of memory is the same on every rank.
                let _ = self.lane.reserve(bytes, stream, None, backing);
            }
            LaneOp::Reclaim { keep } => {
                let deferred = lane.deferred_frees(usize::MAX);
                let back: Vec<u64> = deferred.into_iter().step_by(keep + 1).collect();
                lane.reclaim(&back, backing).unwrap();
            }
            LaneOp::Trim => drop(lane.trim(None)),
            LaneOp::TakeRetired => drop(lane.take_retired()),
            LaneOp::Forget { stream } => {
                let stream = self.stream(stream);
                self.lane.forget_stream(stream, None, backing).unwrap();
            }
            _ => {}
        }
        let segments = self.lane.segments().to_vec();
        Seen { placed, digest: self.lane.digest(), counter: self.lane.counter(), segments }
    }
}

/// Whether a rank's thread yields before a step, so that threads run in different orders.
fn yields(seed: u64, step: usize) -> bool {
    (seed.wrapping_mul(0x2545_f491_4f6c_dd1d) >> (step % 61)) & 3 == 0
}

/// How one rank diverges from the others.
#[derive(Clone, Copy, Debug)]
enum Difference {
    Skips,
    OtherSize,
    OtherStream,
    FreesOneMore,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    // D1, D3: neither threads nor handles take part in a placement.
    #[test]
    fn ranks_agree(
        lane in lane(),
        ops in ops(150),
        seeds in prop::collection::vec(any::<u64>(), 2..=8),
    ) {
        let seen: Vec<Vec<Seen>> = thread::scope(|scope| {
            let (lane, ops) = (&lane, &ops);
            let run = |seed: u64| move || {
                let mut rank = ModelRank::new(seed, lane.clone());
                let calls = ops.iter().enumerate().map(|(step, &op)| {
                    if yields(seed, step) {
                        thread::yield_now();
                    }
                    rank.call(op)
                });
                calls.collect::<Vec<_>>()
            };
            let ranks: Vec<_> = seeds.iter().map(|&seed| scope.spawn(run(seed))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        for other in &seen[1..] {
            prop_assert_eq!(&seen[0], other);
        }
    }

    // The digest of a rank that does one thing differently differs from then on.
    #[test]
    fn a_rank_that_diverges_has_another_digest(
        before in ops(60),
        after in prop::collection::vec(op(), 0..60),
        bytes in 1_u64..8 * MIB,
        difference in prop_oneof![
            Just(Difference::Skips),
            Just(Difference::OtherSize),
            Just(Difference::OtherStream),
            Just(Difference::FreesOneMore),
        ],
    ) {
        let config = || (LaneConfig::symmetric("test"), 16 << 30, 2 * MIB);
        let (mut good, mut bad) = (ModelRank::new(1, config()), ModelRank::new(2, config()));
        // Make every stream known last, so that another stream has another ordinal: those that the lane
        // has forgotten are new to it, and the first new one has the same ordinal whichever it is.
        let streams = (0..STREAMS).map(|stream| LaneOp::Alloc { bytes: KIB, align: 1, stream });
        for op in before.into_iter().chain(streams) {
            prop_assert_eq!(good.call(op), bad.call(op));
        }
        let op = LaneOp::Alloc { bytes, align: 1, stream: 0 };
        good.call(op);
        match difference {
            Difference::Skips => {}
            Difference::OtherSize => drop(bad.call(LaneOp::Alloc { bytes: bytes + 1, align: 1, stream: 0 })),
            Difference::OtherStream => drop(bad.call(LaneOp::Alloc { bytes, align: 1, stream: 1 })),
            Difference::FreesOneMore => {
                bad.call(op);
                bad.call(LaneOp::Free { nth: 0 });
            }
        }
        prop_assert_ne!(good.lane.digest(), bad.lane.digest());
        // A call that both make, so that the good rank cannot catch up by doing the same a call later.
        let both = LaneOp::Alloc { bytes: KIB, align: 1, stream: 0 };
        prop_assert_ne!(good.call(both).digest, bad.call(both).digest);
        for op in after {
            prop_assert_ne!(good.call(op).digest, bad.call(op).digest);
        }
    }
}
