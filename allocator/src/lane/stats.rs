//! A lane's counts and sizes.

use super::UNIT;

/// Numbers of one lane at one moment. Sizes are in bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LaneStats {
    /// Bytes in blocks handed out, rounded up to units of 512 bytes. Blocks whose free is deferred count.
    pub allocated: u64,
    /// The highest `allocated` so far.
    pub peak_allocated: u64,
    /// Bytes in physical segments.
    pub reserved: u64,
    /// The highest `reserved` so far.
    pub peak_reserved: u64,
    /// Bytes in deferred frees: blocks freed without order that other ranks have not freed (rule D5).
    pub deferred: u64,
    /// Blocks handed out, including those whose free is deferred.
    pub live_blocks: u64,
    /// Free pieces of memory.
    pub free_blocks: u64,
    /// Segments now.
    pub segments: u64,
    /// Segments made so far.
    pub segments_made: u64,
    /// Times a free segment was moved to the end of the range instead of making a new one.
    pub segments_moved: u64,
    /// Events so far.
    pub events: u64,
    /// Allocations so far.
    pub allocs: u64,
    /// Ordered frees so far.
    pub frees: u64,
    /// Unordered frees so far.
    pub unordered_frees: u64,
    /// Blocks by size: entry `n` counts blocks of more than 2^(n-1) and at most 2^n units of 512 bytes.
    /// Entries after the last used one are left out.
    pub classes: Vec<ClassStats>,
}

/// Numbers of one size class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClassStats {
    /// Largest size of the class in bytes.
    pub upto: u64,
    /// Live blocks.
    pub live: u64,
    /// Bytes in live blocks.
    pub bytes: u64,
    /// Allocations so far.
    pub allocs: u64,
}

impl LaneStats {
    /// Bytes that are reserved but not handed out.
    pub fn cached(&self) -> u64 {
        self.reserved - self.allocated
    }
}

/// The running counts behind [`LaneStats`].
#[derive(Clone, Debug)]
pub(super) struct RunningCounts {
    pub(super) allocated: u64,
    pub(super) peak_allocated: u64,
    pub(super) deferred: u64,
    pub(super) live_blocks: u64,
    pub(super) allocs: u64,
    pub(super) frees: u64,
    pub(super) unordered_frees: u64,
    classes: [ClassStats; 32],
}

impl RunningCounts {
    pub(super) fn new() -> Self {
        let mut classes = [ClassStats::default(); 32];
        for (at, class) in classes.iter_mut().enumerate() {
            class.upto = UNIT << at;
        }
        Self {
            allocated: 0,
            peak_allocated: 0,
            deferred: 0,
            live_blocks: 0,
            allocs: 0,
            frees: 0,
            unordered_frees: 0,
            classes,
        }
    }

    /// Counts a block of `units` that is handed out.
    pub(super) fn add(&mut self, units: u32) {
        self.allocs += 1;
        self.classes[class_of(units)].allocs += 1;
        self.add_live(units);
    }

    /// Counts a live block of `units`, which is not a new allocation.
    pub(super) fn add_live(&mut self, units: u32) {
        let bytes = u64::from(units) * UNIT;
        self.live_blocks += 1;
        self.allocated += bytes;
        self.peak_allocated = self.peak_allocated.max(self.allocated);
        let class = &mut self.classes[class_of(units)];
        class.live += 1;
        class.bytes += bytes;
    }

    /// Starts over with no live block. Allocations and frees so far stay counted. The peak starts over,
    /// because placement depends on it.
    pub(super) fn clear_live(&mut self) {
        self.allocated = 0;
        self.peak_allocated = 0;
        self.deferred = 0;
        self.live_blocks = 0;
        for class in &mut self.classes {
            class.live = 0;
            class.bytes = 0;
        }
    }

    /// Counts a block of `units` that became free.
    pub(super) fn remove(&mut self, units: u32) {
        let bytes = u64::from(units) * UNIT;
        self.live_blocks -= 1;
        self.allocated -= bytes;
        let class = &mut self.classes[class_of(units)];
        class.live -= 1;
        class.bytes -= bytes;
    }

    pub(super) fn classes(&self) -> Vec<ClassStats> {
        let used = self.classes.iter().rposition(|class| class.allocs > 0).map_or(0, |at| at + 1);
        self.classes[..used].to_vec()
    }
}

fn class_of(units: u32) -> usize {
    (units.next_power_of_two().trailing_zeros() as usize).min(31)
}
