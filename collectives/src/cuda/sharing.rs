//! How much of a device the kernels of a communicator take.
//!
//! A kernel keeps its place on the device while it waits for a peer. If one takes all of it, that of
//! another communicator waits outside, and ranks that began with different ones wait for each other until
//! time is over. So communicators of a process that are on one device leave each other room. Each rank
//! decides that for itself: kernels work together whatever their grids are.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Streams that are told apart: as many as `concurrent` takes at most.
const MOST_STREAMS: usize = 16;

/// Who is at work on a device, of this process.
#[derive(Debug, Default)]
struct Device {
    communicators: AtomicU32,
    others: AtomicBool,
    streams: AtomicU32,
    /// On which communicators made calls since there is one.
    known: Mutex<BTreeSet<u64>>,
}

/// The device with that ordinal.
fn device(ordinal: u32) -> Arc<Device> {
    static DEVICES: Mutex<BTreeMap<u32, Arc<Device>>> = Mutex::new(BTreeMap::new());
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    Arc::clone(devices.entry(ordinal).or_default())
}

/// Has this process's communicators on the CUDA device with that ordinal leave it a third of its processors
/// from now on, though there may be one alone: for kernels of others that wait for other ranks as theirs do,
/// such as NCCL's. A communicator made with `concurrent` does as that says. Ranks may differ. What a graph has
/// captured stays as it was.
pub fn leave_room(ordinal: u32) {
    device(ordinal).others.store(true, Ordering::Relaxed);
}

/// What a communicator's kernels may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Share {
    /// Blocks of a kernel.
    pub(super) most_blocks: u32,
    /// Whether they may take their places before the kernel before it on the stream has ended: it would
    /// hold them back twice as many.
    pub(super) early: bool,
}

impl Share {
    /// Everything.
    pub(super) const ALL: Self = Self { most_blocks: u32::MAX, early: true };

    /// Of one among so many, which have two thirds of the processors together: a kernel of others, NCCL's
    /// too, may need whole processors, and finds some whatever waits.
    fn among(count: u32, processors: u32) -> Self {
        Self { most_blocks: (2 * processors / (3 * count)).max(2), early: false }
    }
}

/// A communicator's place among those on its device.
#[derive(Debug)]
pub(super) struct Presence {
    device: Arc<Device>,
    processors: u32,
    /// How many may have calls under way at once, if somebody said so.
    told: Option<u32>,
    counts: bool,
}

impl Presence {
    /// Of a communicator of so many ranks: one rank alone waits for nobody.
    pub(super) fn new(ordinal: u32, processors: u32, world: u32, told: Option<u32>) -> Self {
        let (device, counts) = (device(ordinal), world > 1);
        device.communicators.fetch_add(counts.into(), Ordering::Relaxed);
        Self { device, processors, told, counts }
    }

    /// Calls come on that stream from now on.
    pub(super) fn turns_to(&self, stream: u64) {
        let mut known = self.device.known.lock().unwrap_or_else(PoisonError::into_inner);
        if self.counts && known.len() < MOST_STREAMS && known.insert(stream) {
            self.device.streams.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// What kernels that are launched now may take. Calls of one communicator come one after the other, as
    /// do those on one stream: so many are under way at once as there are of either. But two, where there
    /// are several communicators, before ranks know of a second stream: each may be on another.
    pub(super) fn share(&self) -> Share {
        let Device { communicators, others, streams, .. } = &*self.device;
        match (self.told, communicators.load(Ordering::Relaxed)) {
            (Some(1), _) => Share::ALL,
            (Some(told), _) => Share::among(told, self.processors),
            (None, 0 | 1) if others.load(Ordering::Relaxed) => Share::among(1, self.processors),
            (None, 0 | 1) => Share::ALL,
            (None, several) => {
                let streams = streams.load(Ordering::Relaxed).max(2);
                Share::among(several.min(streams), self.processors)
            }
        }
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        if self.counts && self.device.communicators.fetch_sub(1, Ordering::Relaxed) == 1 {
            // A later program's streams are others.
            let mut known = self.device.known.lock().unwrap_or_else(PoisonError::into_inner);
            known.clear();
            self.device.streams.store(0, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn communicators_leave_each_other_room_from_when_there_are_two() {
        let new = |told| Presence::new(1000, 132, 2, told);
        let first = new(None);
        first.turns_to(7);
        assert_eq!(first.share(), Share::ALL);
        let second = new(None);
        assert_eq!(first.share(), Share { most_blocks: 44, early: false });
        let third = new(None);
        assert_eq!(third.share().most_blocks, 44, "on one stream, as far as anybody knows");
        for stream in [8, 7, 9, 9] {
            third.turns_to(stream);
        }
        assert_eq!(first.share().most_blocks, 29, "three streams");
        third.turns_to(10);
        assert_eq!(first.share().most_blocks, 29, "three communicators");
        drop((second, third));
        assert_eq!(first.share(), Share::ALL);
        drop(first);
        let (first, second) = (new(None), new(None));
        assert_eq!(first.share().most_blocks, 44, "streams of before are forgotten");
        drop(second);
    }

    #[test]
    fn ranks_alone_do_not_count_and_what_was_said_holds() {
        let first = Presence::new(1001, 132, 2, None);
        let alone = Presence::new(1001, 132, 1, None);
        alone.turns_to(1);
        assert_eq!((first.share(), alone.share()), (Share::ALL, Share::ALL));
        let told = Presence::new(1001, 132, 2, Some(4));
        assert_eq!(told.share(), Share { most_blocks: 22, early: false });
        let all = Presence::new(1001, 132, 2, Some(1));
        assert_eq!(all.share(), Share::ALL);
    }

    #[test]
    fn others_are_left_a_third() {
        let first = Presence::new(1002, 132, 2, None);
        leave_room(1002);
        assert_eq!(first.share(), Share { most_blocks: 88, early: false });
        let second = Presence::new(1002, 132, 2, None);
        assert_eq!(second.share().most_blocks, 44);
    }

    #[test]
    fn many_streams_are_counted_no_further() {
        let those: Vec<Presence> = (0..20).map(|_| Presence::new(1003, 132, 2, None)).collect();
        (0..100).for_each(|stream| those[0].turns_to(stream));
        assert_eq!(those[0].share().most_blocks, 5);
    }

    #[test]
    fn together_they_leave_a_third_whatever_the_device() {
        for processors in [1, 46, 108, 132, 148] {
            for count in 1..=16 {
                let Share { most_blocks, early } = Share::among(count, processors);
                assert!(!early && most_blocks >= 2);
                assert!(most_blocks == 2 || most_blocks * count <= processors * 2 / 3);
            }
        }
    }
}
