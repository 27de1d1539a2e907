//! Programs of two ranks on a pool, beside a naive memory: blocks that keep what was written into them.

use arbitrary::Arbitrary;
use symmpool_allocator::lane::LaneConfig;
use symmpool_allocator::testing::on_ranks;
use symmpool_allocator::{Block, Driver, Group, Pool, Stream};

use crate::{FuzzTarget, value_of};

pub(crate) const TARGET: FuzzTarget = FuzzTarget {
    name: "pool_programs",
    run,
    words: &[],
    quick: 60,
    max_memory: 64 << 20,
    max_input: 1024,
};

/// A step of a program, which all ranks make, but for [`PoolStep::Forget`].
#[derive(Arbitrary, Clone, Debug)]
enum PoolStep {
    /// Bytes, alignment as a power of two, lane, stream.
    Alloc(u16, u8, bool, u8),
    /// A block of so many times 64 KiB.
    AllocLarge(u8, bool),
    Free(u8),
    FreeUnordered(u8),
    /// A rank that is not this one drops the block a step later than the others.
    Forget(u8, u8),
    Record(u8, u8),
    Reserve(u16, bool),
    Trim(bool),
    Commit,
    CommitIfDue,
    /// One rank allocates what the others do not, and all notice it, and go on.
    Differ(u8),
    Peek(u8),
}

/// A live block and what its rank wrote into it.
struct Live {
    block: Block<u8>,
    byte: u8,
}

struct Rank {
    pool: Pool,
    live: Vec<Live>,
    /// Blocks that are dropped at the next step.
    late: Vec<Block<u8>>,
    serial: u8,
}

fn run(bytes: &[u8]) {
    let Some(steps) = value_of::<Vec<PoolStep>>(bytes) else { return };
    let steps = &steps[..steps.len().min(48)];
    let traces = on_ranks(2, |group| Rank::new(group).run(steps));
    assert_eq!(traces[0], traces[1], "ranks place blocks alike");
}

impl Rank {
    fn new(group: Group) -> Self {
        let pool = Pool::builder(group.with_timeout(std::time::Duration::from_secs(20)))
            .driver(Driver::host().expect("memory files"))
            .stride(1 << 30)
            .lane(LaneConfig::symmetric("first"))
            .lane(LaneConfig::symmetric("second").history(8))
            .build()
            .expect("a pool");
        Self { pool, live: Vec::new(), late: Vec::new(), serial: 0 }
    }

    /// Runs the steps; returns what must be the same on all ranks.
    fn run(mut self, steps: &[PoolStep]) -> Vec<(u64, u64)> {
        let mut trace = Vec::new();
        for step in steps {
            let late = std::mem::take(&mut self.late);
            let found = self.step(step);
            drop(late);
            trace.extend(found);
            self.check();
        }
        self.late.clear();
        self.live.clear();
        let report = self.pool.commit().expect("all ranks did the same");
        trace.push((report.number, report.windows_added));
        let stats = self.pool.stats().expect("a pool of this process");
        assert_eq!(stats.allocated(), 0, "all blocks were dropped");
        trace
    }

    fn lane(&self, second: bool) -> symmpool_allocator::Lane {
        self.pool.lane(if second { "second" } else { "first" }).expect("a lane")
    }

    fn at(&self, which: u8) -> Option<usize> {
        (!self.live.is_empty()).then(|| usize::from(which) % self.live.len())
    }

    /// Keeps a block that was allocated, filled with a byte of its own.
    fn keep(&mut self, block: Block<u8>) -> (u64, u64) {
        self.serial = self.serial.wrapping_add(1);
        let byte = self.serial ^ (self.pool.rank() as u8) << 7;
        block.write(&vec![byte; block.len()]).expect("a live block");
        let placed = (block.counter(), block.offset());
        self.live.push(Live { block, byte });
        placed
    }

    fn step(&mut self, step: &PoolStep) -> Option<(u64, u64)> {
        match *step {
            PoolStep::Alloc(bytes, align, second, stream) => {
                let align = 1_u64 << (align % 24);
                let stream = Stream::numbered(u64::from(stream % 70));
                match self.lane(second).alloc_bytes(bytes.into(), align, stream) {
                    Ok(block) => {
                        assert_eq!(block.offset() % align, 0, "aligned");
                        Some(self.keep(block))
                    }
                    Err(error) => {
                        assert!(error.is_invalid_argument(), "{error}");
                        None
                    }
                }
            }
            PoolStep::AllocLarge(units, second) => {
                let bytes = usize::from(units % 32) << 16;
                let block = self.lane(second).alloc_bytes(bytes, 512, Stream::DEFAULT);
                Some(self.keep(block.expect("room")))
            }
            PoolStep::Free(which) => {
                let at = self.at(which)?;
                self.live.swap_remove(at).block.free().expect("a live block");
                None
            }
            PoolStep::FreeUnordered(which) => {
                let at = self.at(which)?;
                self.live.swap_remove(at).block.free_unordered().expect("a live block");
                None
            }
            PoolStep::Forget(which, rank) => {
                let at = self.at(which)?;
                let block = self.live.swap_remove(at).block;
                if u32::from(rank % 2) != self.pool.rank() {
                    self.late.push(block);
                }
                None
            }
            PoolStep::Record(which, stream) => {
                let at = self.at(which)?;
                let stream = Stream::numbered(u64::from(stream % 70));
                let _ = self.live[at].block.record_stream(stream);
                None
            }
            PoolStep::Reserve(units, second) => {
                self.lane(second).reserve(u64::from(units % 256) << 14).expect("room");
                None
            }
            PoolStep::Trim(second) => Some((self.lane(second).trim().expect("a lane"), 0)),
            PoolStep::Commit => self.commit(),
            PoolStep::CommitIfDue if self.pool.is_commit_due() => self.commit(),
            PoolStep::CommitIfDue => None,
            PoolStep::Differ(rank) => {
                // A commit first, as blocks that no commit has seen must be freed before ranks can be made equal again.
                self.commit();
                if u32::from(rank % 2) == self.pool.rank() {
                    drop(self.lane(false).alloc_bytes(1, 1, Stream::DEFAULT).expect("room"));
                }
                let error = self.pool.commit().expect_err("ranks did not do the same");
                assert!(error.is_diverged(), "{error}");
                self.pool.resync().expect("nothing is new but what differs");
                self.commit()
            }
            PoolStep::Peek(which) => {
                let at = self.at(which)?;
                self.commit();
                let live = &self.live[at];
                if live.block.is_empty() {
                    return None;
                }
                let offset = live.block.offset();
                let address = live.block.address();
                let peer = self.pool.peer_ptr(1 - self.pool.rank(), address).expect("a window");
                let stride = self.pool.layout().stride as i64;
                let apart = if self.pool.rank() == 0 { stride } else { -stride };
                assert_eq!(peer as i64 - address as i64, apart, "at the same offset of the peer");
                Some((offset, 0))
            }
        }
    }

    fn commit(&mut self) -> Option<(u64, u64)> {
        let report = self.pool.commit().expect("all ranks did the same");
        for Live { block, .. } in &self.live {
            assert!(block.is_empty() || self.pool.is_window(block.address(), block.bytes()));
        }
        Some((report.number, report.windows_added << 32 | report.windows_removed))
    }

    /// Blocks lie apart, and hold what was written.
    fn check(&self) {
        let mut places: Vec<(u64, u64)> = Vec::new();
        for Live { block, byte } in &self.live {
            let held = block.read().expect("a live block");
            assert!(held.iter().all(|found| found == byte), "a block was written by another");
            if !block.is_empty() {
                places.push((block.offset(), block.bytes()));
            }
        }
        places.sort_unstable();
        for pair in places.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "blocks overlap: {pair:?}");
        }
    }
}
