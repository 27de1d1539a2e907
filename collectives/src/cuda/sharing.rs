//! How much of a device the kernels of a communicator take.
//!
//! A kernel keeps its place on the device while it waits for a peer. If one takes all of it, that of
//! another communicator waits outside, and ranks that began with different ones wait for each other until
//! time is over. So communicators of a process that are on one device leave each other room. Each rank
//! decides that for itself: kernels work together whatever their grids are.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use symmpool_allocator::Stream;

/// A stream of each thread's own, by one name: `CU_STREAM_PER_THREAD`.
const OF_A_THREAD: u64 = 2;

/// Where a communicator's last call is, as far as anybody can know: none is, before its first; a graph may be
/// launched on any stream.
type Where = Option<u64>;

/// Who is at work on a device, of this process.
#[derive(Debug, Default)]
struct Device {
    /// How many communicators may have calls under way at once, and how many there are.
    at_once: AtomicU32,
    communicators: AtomicU32,
    /// Whether there are others.
    others: AtomicBool,
    /// Of every communicator, by a number.
    places: Mutex<BTreeMap<u64, Where>>,
}

impl Device {
    fn places(&self) -> MutexGuard<'_, BTreeMap<u64, Where>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut BTreeMap<u64, Where>)) {
        let mut places = self.places();
        change(&mut places);
        let streams: BTreeSet<u64> = places.values().filter_map(|place| *place).collect();
        let anywhere = places.values().filter(|place| place.is_none()).count();
        self.at_once.store((streams.len() + anywhere) as u32, Ordering::Relaxed);
        self.communicators.store(places.len() as u32, Ordering::Relaxed);
    }
}

/// The device with that ordinal.
fn device(ordinal: u32) -> Arc<Device> {
    static DEVICES: Mutex<BTreeMap<u32, Arc<Device>>> = Mutex::new(BTreeMap::new());
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    Arc::clone(devices.entry(ordinal).or_default())
}

/// Has this process's communicators on the CUDA device with that ordinal leave it a third of its processors
/// from now on, though there may be one alone: for kernels of others that wait for other ranks as theirs do,
/// such as NCCL's. To be called before the first of those is launched. A communicator made with `concurrent`
/// does as that says. Ranks may differ. What a graph has captured stays as it was.
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
    /// Its number there, unless it is of one rank, which waits for nobody.
    number: Option<u64>,
    place: Where,
    in_graphs: bool,
    processors: u32,
    /// How many may have calls under way at once, if somebody said so.
    told: Option<u32>,
}

impl Presence {
    pub(super) fn new(ordinal: u32, processors: u32, world: u32, told: Option<u32>) -> Self {
        let device = device(ordinal);
        let mut number = None;
        if world > 1 {
            device.change(|places| {
                let next = places.last_key_value().map_or(0, |(last, _)| last + 1);
                places.insert(next, None);
                number = Some(next);
            });
        }
        Self { device, number, place: None, in_graphs: false, processors, told }
    }

    /// What the kernels of a call on that stream may take. Calls of one communicator come one after the
    /// other, and so do those on one stream. So as many are under way at once as there are streams on which
    /// communicators made their last calls; and each without one, or with calls in graphs, may be on yet
    /// another. Where ranks call alike that is enough, though they need not come to a new stream at once: a
    /// rank that takes everything has nothing else under way, and its peers, which may, know of both streams.
    pub(super) fn share(&mut self, stream: Stream, is_captured: impl FnOnce() -> bool) -> Share {
        let Some(number) = self.number else { return Share::ALL };
        let device = &self.device;
        // While it is alone nobody asks.
        let several = device.communicators.load(Ordering::Relaxed) > 1;
        self.in_graphs |= several && !self.in_graphs && is_captured();
        let known = !self.in_graphs && stream.raw() != OF_A_THREAD;
        let place = known.then_some(stream.raw());
        if place != self.place {
            self.place = place;
            device.change(|places| {
                places.insert(number, place);
            });
        }
        match (self.told, device.at_once.load(Ordering::Relaxed)) {
            (Some(1), _) => Share::ALL,
            (Some(told), _) => Share::among(told, self.processors),
            (None, 0 | 1) if device.others.load(Ordering::Relaxed) => {
                Share::among(1, self.processors)
            }
            (None, 0 | 1) => Share::ALL,
            (None, several) => Share::among(several, self.processors),
        }
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            self.device.change(|places| {
                places.remove(&number);
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A share of a call on that stream.
    fn eager(presence: &mut Presence, stream: u64) -> Share {
        presence.share(Stream::from_raw(stream), || false)
    }

    fn blocks(presence: &mut Presence, stream: u64) -> u32 {
        eager(presence, stream).most_blocks
    }

    #[test]
    fn communicators_on_several_streams_leave_each_other_room() {
        let new = |told| Presence::new(1000, 132, 2, told);
        let mut first = new(None);
        assert_eq!(eager(&mut first, 7), Share::ALL);
        let mut second = new(None);
        assert_eq!(eager(&mut first, 7), Share { most_blocks: 44, early: false });
        assert_eq!(eager(&mut second, 7), Share::ALL, "one after the other");
        let mut third = new(None);
        assert_eq!(blocks(&mut first, 7), 44, "the third's first call may be anywhere");
        assert_eq!(blocks(&mut third, 8), 44);
        assert_eq!(blocks(&mut second, 9), 29);
        assert_eq!(blocks(&mut second, 8), 44, "two streams again");
        drop(third);
        assert_eq!(eager(&mut first, 8), Share::ALL);
        drop(second);
        assert_eq!(eager(&mut first, 7), Share::ALL);
    }

    #[test]
    fn what_graphs_hold_may_be_anywhere() {
        let [mut first, mut second] = [1001; 2].map(|ordinal| Presence::new(ordinal, 132, 2, None));
        let stream = Stream::from_raw(7);
        assert_eq!(second.share(stream, || true).most_blocks, 44);
        assert_eq!(first.share(stream, || false).most_blocks, 44);
        assert_eq!(second.share(stream, || panic!("is asked once")).most_blocks, 44);
        let mut of_a_thread = Presence::new(1001, 132, 2, None);
        assert_eq!(blocks(&mut of_a_thread, OF_A_THREAD), 29);
    }

    #[test]
    fn ranks_alone_do_not_count_and_what_was_said_holds() {
        let mut first = Presence::new(1002, 132, 2, None);
        let mut alone = Presence::new(1002, 132, 1, None);
        assert_eq!((eager(&mut first, 1), eager(&mut alone, 9)), (Share::ALL, Share::ALL));
        let mut told = Presence::new(1002, 132, 2, Some(4));
        assert_eq!(eager(&mut told, 1), Share { most_blocks: 22, early: false });
        let mut all = Presence::new(1002, 132, 2, Some(1));
        assert_eq!(eager(&mut all, 1), Share::ALL);
    }

    #[test]
    fn others_are_left_a_third() {
        let mut first = Presence::new(1003, 132, 2, None);
        leave_room(1003);
        assert_eq!(eager(&mut first, 1), Share { most_blocks: 88, early: false });
        let mut second = Presence::new(1003, 132, 2, None);
        assert_eq!(blocks(&mut second, 2), 44);
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
