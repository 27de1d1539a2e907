//! The same calls on many ranks, and one rank that strays.

use std::thread;

use proptest::prelude::*;

use super::script::{KIB, MIB, Op, STREAMS, lane, op, ops};
use crate::driver::Stream;
use crate::lane::{BlockKey, Digest, LaneConfig, LaneState, NoBacking, Request, Segment};

/// One rank: a lane, its live blocks, and its own handles for the streams.
pub(super) struct Rank {
    pub(super) lane: LaneState,
    pub(super) live: Vec<BlockKey>,
    seed: u64,
}

/// What ranks must have in common after a call.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Seen {
    placed: Option<(u64, u64)>,
    digest: Digest,
    counter: u64,
    segments: Vec<Segment>,
}

impl Rank {
    pub(super) fn new(seed: u64, (config, range, granularity): (LaneConfig, u64, u64)) -> Self {
        let lane = LaneState::new(config, range, granularity).unwrap();
        Self { lane, live: Vec::new(), seed }
    }

    /// A handle that is this rank's own, in another order on every rank (D3).
    fn stream(&self, stream: u64) -> Stream {
        let mixed = (stream ^ (self.seed % STREAMS)) + 1;
        Stream::numbered(mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(self.seed as u32))
    }

    /// The streams known to the lane, by ordinal, as the program calls them.
    pub(super) fn streams(&self) -> Vec<u64> {
        let number = |handle| (0..STREAMS).find(|&stream| self.stream(stream) == handle).unwrap();
        self.lane.streams().map(number).collect()
    }

    pub(super) fn call(&mut self, op: Op) -> Seen {
        let n = self.live.len();
        let (lane, backing) = (&mut self.lane, &mut NoBacking);
        let mut placed = None;
        match op {
            Op::Alloc { bytes, align, stream } => {
                let stream = self.stream(stream);
                let request = Request { bytes, align, stream, site: None };
                if let Ok(block) = self.lane.alloc(request, backing) {
                    self.live.push(block.key);
                    placed = Some((block.offset, block.bytes));
                }
            }
            Op::Free { nth } if n > 0 => {
                lane.free(self.live.swap_remove(nth % n), None, backing).unwrap();
            }
            Op::FreeUnordered { nth } if n > 0 => {
                lane.free_unordered(self.live.swap_remove(nth % n), None, backing).unwrap();
            }
            Op::Record { nth, stream } if n > 0 => {
                let stream = self.stream(stream);
                self.lane.record_stream(self.live[nth % n], stream, None).unwrap();
            }
            Op::Reserve { bytes, stream } => {
                let stream = self.stream(stream);
                // Out of memory is the same on every rank.
                let _ = self.lane.reserve(bytes, stream, None, backing);
            }
            Op::Reclaim { keep } => {
                let aside = lane.set_aside(usize::MAX);
                let back: Vec<u64> = aside.into_iter().step_by(keep + 1).collect();
                lane.reclaim(&back, backing).unwrap();
            }
            Op::Trim => drop(lane.trim(None)),
            Op::TakeRetired => drop(lane.take_retired()),
            Op::Forget { stream } => {
                let stream = self.stream(stream);
                self.lane.forget_stream(stream, None, backing).unwrap();
            }
            _ => {}
        }
        let segments = self.lane.segments().to_vec();
        Seen { placed, digest: self.lane.digest(), counter: self.lane.counter(), segments }
    }
}

fn shifted_yields(seed: u64, step: usize) -> bool {
    (seed.wrapping_mul(0x2545_f491_4f6c_dd1d) >> (step % 61)) & 3 == 0
}

/// How one rank strays from the others.
#[derive(Clone, Copy, Debug)]
enum Stray {
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
                let mut rank = Rank::new(seed, lane.clone());
                let calls = ops.iter().enumerate().map(|(step, &op)| {
                    if shifted_yields(seed, step) {
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

    // A rank that does one thing differently is known by its digest from then on.
    #[test]
    fn a_rank_that_strays_is_known(
        before in ops(60),
        after in prop::collection::vec(op(), 0..60),
        bytes in 1_u64..8 * MIB,
        stray in prop_oneof![
            Just(Stray::Skips),
            Just(Stray::OtherSize),
            Just(Stray::OtherStream),
            Just(Stray::FreesOneMore),
        ],
    ) {
        let config = || (LaneConfig::symmetric("test"), 16 << 30, 2 * MIB);
        let (mut good, mut bad) = (Rank::new(1, config()), Rank::new(2, config()));
        // Each stream is known, so that another one has another ordinal.
        let streams = (0..STREAMS).map(|stream| Op::Alloc { bytes: KIB, align: 1, stream });
        for op in streams.chain(before) {
            prop_assert_eq!(good.call(op), bad.call(op));
        }
        let op = Op::Alloc { bytes, align: 1, stream: 0 };
        good.call(op);
        match stray {
            Stray::Skips => {}
            Stray::OtherSize => drop(bad.call(Op::Alloc { bytes: bytes + 1, align: 1, stream: 0 })),
            Stray::OtherStream => drop(bad.call(Op::Alloc { bytes, align: 1, stream: 1 })),
            Stray::FreesOneMore => {
                bad.call(op);
                bad.call(Op::Free { nth: 0 });
            }
        }
        prop_assert_ne!(good.lane.digest(), bad.lane.digest());
        // Something both do, so that the others cannot catch up by doing the same a call later.
        let both = Op::Alloc { bytes: KIB, align: 1, stream: 0 };
        prop_assert_ne!(good.call(both).digest, bad.call(both).digest);
        for op in after {
            prop_assert_ne!(good.call(op).digest, bad.call(op).digest);
        }
    }
}
