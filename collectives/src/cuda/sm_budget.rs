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

/// The one stream that all of a communicator's calls are on, as far as anybody can know. None is, before
/// the first; a graph may be launched on any; and one that has moved may move again, while what others
/// have under way still takes the share of before.
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
    /// Whether they may take their places before the kernel before it on the stream has ended, and those of
    /// the next one before they have: two kernels would hold them at once.
    pub(super) early: bool,
    /// Whether other communicators' calls may be under way beside it.
    pub(super) beside: bool,
}

impl Share {
    /// Everything.
    pub(super) const ALL: Self = Self { most_blocks: u32::MAX, early: true, beside: false };

    /// Of one, where of `several` communicators so many may have calls under way at once. They have two
    /// thirds of the processors together: a kernel of others, NCCL's too, may need whole processors, and
    /// finds some whatever waits. It is divided by the mean of the two numbers. Where communicators that
    /// were on one stream move off it, one by one, kernels have begun with shares of fewer: divided by
    /// `at_once` alone, all together would have more than the device from six on; so it is less than
    /// 2/3 of 2 ln 2, which is 0.92.
    fn among(at_once: u32, several: u32, processors: u32) -> Self {
        let most_blocks = (4 * processors / (3 * (at_once + several))).max(2);
        Self { most_blocks, early: false, beside: at_once > 1 }
    }
}

/// A communicator's place among those on its device.
#[derive(Debug)]
pub(super) struct Presence {
    device: Arc<Device>,
    /// Its number there, unless it is of one rank, which waits for nobody.
    number: Option<u64>,
    place: Where,
    /// It has moved, or has calls in graphs.
    anywhere: bool,
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
        Self { device, number, place: None, anywhere: false, processors, told }
    }

    /// What the kernels of a call on that stream may take. Calls of one communicator come one after the
    /// other, and so do those on one stream. So as many are under way at once as there are streams on which
    /// communicators have their calls; and each without one may be on yet another. Where ranks call alike
    /// that is enough, though hosts may come to calls on different streams in any order: a kernel takes
    /// everything only while all calls of all communicators were on its stream, and so behind them. It keeps
    /// out what they call on other streams later, and no peer has put that before the same call: what has
    /// to be before it is on that stream.
    pub(super) fn share(&mut self, stream: Stream, is_captured: impl FnOnce() -> bool) -> Share {
        let Some(number) = self.number else { return self.apart() };
        let device = &self.device;
        // While it is alone nobody asks.
        let several = device.communicators.load(Ordering::Relaxed);
        let on = stream.raw();
        if several > 1 && !self.anywhere {
            let moves = self.place.is_some_and(|place| place != on);
            self.anywhere = moves || on == OF_A_THREAD || is_captured();
        }
        let place = (!self.anywhere).then_some(on);
        if place != self.place {
            self.place = place;
            device.change(|places| {
                places.insert(number, place);
            });
        }
        match (self.told, device.at_once.load(Ordering::Relaxed)) {
            (Some(1), _) => Share::ALL,
            (Some(told), _) => Share::among(told, told, self.processors),
            (None, 0 | 1) if device.others.load(Ordering::Relaxed) => {
                Share::among(1, 1, self.processors)
            }
            (None, 0 | 1) => Share::ALL,
            (None, at_once) => Share::among(at_once, several.max(at_once), self.processors),
        }
    }

    /// What kernels may take that wait for no other rank's, or are small.
    pub(super) fn apart(&self) -> Share {
        let (device, others) = (&self.device, &self.device.others);
        let alone = match self.told {
            Some(told) => told == 1,
            None => {
                device.communicators.load(Ordering::Relaxed) < 2 && !others.load(Ordering::Relaxed)
            }
        };
        Share { early: alone, ..Share::ALL }
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
        presence.share(Stream::numbered(stream), || false)
    }

    fn blocks(presence: &mut Presence, stream: u64) -> u32 {
        eager(presence, stream).most_blocks
    }

    const fn part(most_blocks: u32) -> Share {
        Share { most_blocks, early: false, beside: true }
    }

    #[test]
    fn communicators_on_several_streams_leave_each_other_room() {
        let new = |told| Presence::new(1000, 132, 2, told);
        let mut first = new(None);
        assert_eq!(eager(&mut first, 7), Share::ALL);
        let mut second = new(None);
        assert_eq!(eager(&mut first, 7), part(44), "the second's first call may be anywhere");
        assert_eq!(eager(&mut second, 7), Share::ALL, "one after the other");
        let mut third = new(None);
        assert_eq!(eager(&mut first, 7), part(35));
        assert_eq!(eager(&mut third, 8), part(35));
        assert_eq!(eager(&mut second, 9), part(29));
        assert_eq!(eager(&mut second, 8), part(29), "what has moved may move again");
        drop(third);
        assert_eq!(eager(&mut first, 7), part(44));
        drop(second);
        assert_eq!(eager(&mut first, 8), Share::ALL);
        assert_eq!(eager(&mut first, 9), Share::ALL, "alone it may move");
        let mut fourth = new(None);
        assert_eq!(eager(&mut fourth, 9), Share::ALL);
        assert_eq!(eager(&mut first, 9), Share::ALL);
    }

    #[test]
    fn those_that_leave_a_stream_one_by_one_have_less_than_the_device() {
        for several in 2..=40 {
            let ordinal = 1100 + several;
            let mut all: Vec<Presence> =
                (0..several).map(|_| Presence::new(ordinal, 132, 2, None)).collect();
            for each in &mut all {
                eager(each, 0);
            }
            assert_eq!(eager(&mut all[0], 0), Share::ALL);
            let left: u32 =
                (1..several).map(|nth| blocks(&mut all[nth as usize], u64::from(nth))).sum();
            let together = left + blocks(&mut all[0], 0);
            assert!(together < 132, "{several} take {together} blocks");
        }
    }

    #[test]
    fn what_graphs_hold_may_be_anywhere() {
        let [mut first, mut second] = [1001; 2].map(|ordinal| Presence::new(ordinal, 132, 2, None));
        let stream = Stream::numbered(7);
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
        assert_eq!((first.apart(), alone.apart()), (Share::ALL, Share::ALL));
        let mut told = Presence::new(1002, 132, 2, Some(4));
        assert_eq!(eager(&mut told, 1), part(22));
        // They wait for nobody, but would hold their places while what is before them waits.
        let late = Share { early: false, ..Share::ALL };
        assert_eq!([eager(&mut alone, 9), first.apart(), told.apart()], [late; 3]);
        let mut all = Presence::new(1002, 132, 2, Some(1));
        assert_eq!(eager(&mut all, 1), Share::ALL);
    }

    #[test]
    fn others_are_left_a_third() {
        let mut first = Presence::new(1003, 132, 2, None);
        leave_room(1003);
        assert_eq!(eager(&mut first, 1), Share { beside: false, ..part(88) });
        assert!(!first.apart().early);
        let mut second = Presence::new(1003, 132, 2, None);
        assert_eq!(blocks(&mut second, 2), 44);
    }

    #[test]
    fn together_they_leave_a_third_whatever_the_device() {
        for processors in [1, 46, 108, 132, 148] {
            for count in 1..=16 {
                let Share { most_blocks, early, beside } = Share::among(count, count, processors);
                assert!(!early && most_blocks >= 2 && beside == (count > 1));
                assert!(most_blocks == 2 || most_blocks * count <= processors * 2 / 3);
            }
        }
    }
}
