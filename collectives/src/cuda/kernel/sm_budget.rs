//! How much of a device the kernels of a communicator may occupy: its SM budget.
//!
//! A kernel stays resident on the device while it waits for a peer. If one kernel occupies the whole device,
//! the kernel of another communicator cannot start, and ranks that began with different ones wait for each
//! other until the timeout. So the communicators of a process that are on one device divide it. Each rank
//! decides that for itself: kernels of one call work together whatever their grids are.

use std::cell::LazyCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use symmpool_allocator::Stream;

/// The last of the handles of default streams: 0, `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`.
const LAST_DEFAULT: u64 = Stream::PER_THREAD.raw();

/// The stream that all of a communicator's calls are on, if there is one such stream. `None` before the first
/// call, if calls were captured, as a graph may be launched on any stream, and if calls have changed their
/// stream: they may change it again, while other communicators' kernels still run with their old budgets.
type OnlyStream = Option<u64>;

/// SMs of a call beside compute. On two H100s beside matrix products, a reduce-scatter of 204 MiB parts takes 1.26 ms with
/// 32 SMs, 0.99 with 48 and 1.05 with 64, and costs the products 317, 350 and 409 us; with all 132 it takes 0.74 ms and
/// costs them 688 us. NCCL's takes 1.25 ms and costs them 362 us.
const SMS_BESIDE_COMPUTE: u32 = 48;

/// One of so many SMs of a device is left to kernels that have no budget.
const LEFT: u32 = 16;

/// Options of a communicator about its SM budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BudgetOptions {
    /// How many communicators may have calls under way at once.
    pub(crate) concurrent: Option<u32>,
    /// Most SMs of a kernel.
    pub(crate) most: Option<u32>,
    /// Whether calls on other streams than the default one run beside compute, unless they are captured.
    pub(crate) beside_compute: bool,
}

/// Limits that a question about a budget leaves out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::cuda) struct Lifted {
    /// Other communicators, and other libraries' kernels.
    pub(in crate::cuda) company: bool,
    /// Options about the most SMs, and about compute.
    pub(in crate::cuda) options: bool,
}

/// The communicators of this process on a device.
#[derive(Debug, Default)]
struct Device {
    /// How many communicators may have calls under way at once.
    concurrent: AtomicU32,
    /// How many communicators there are.
    communicators: AtomicU32,
    /// Whether kernels of others are to find SMs, though there may be one communicator alone.
    share_sms: AtomicBool,
    /// Whether the same holds where there are several communicators.
    several_share_sms: AtomicBool,
    /// The stream of every communicator, by the communicator's number.
    streams: Mutex<BTreeMap<u64, OnlyStream>>,
}

impl Device {
    fn streams(&self) -> MutexGuard<'_, BTreeMap<u64, OnlyStream>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut BTreeMap<u64, OnlyStream>)) {
        let mut members = self.streams();
        change(&mut members);
        self.concurrent.store(concurrent(&members), Ordering::Relaxed);
        self.communicators.store(members.len() as u32, Ordering::Relaxed);
    }
}

/// How many communicators may have calls under way at once.
fn concurrent(members: &BTreeMap<u64, OnlyStream>) -> u32 {
    let streams: BTreeSet<u64> = members.values().filter_map(|stream| *stream).collect();
    let on_any_stream = members.values().filter(|stream| stream.is_none()).count();
    (streams.len() + on_any_stream) as u32
}

/// The device with that ordinal.
fn device(ordinal: u32) -> Arc<Device> {
    static DEVICES: Mutex<BTreeMap<u32, Arc<Device>>> = Mutex::new(BTreeMap::new());
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    Arc::clone(devices.entry(ordinal).or_default())
}

/// From now on, this process's communicators on the CUDA device with that ordinal leave a third of its SMs free,
/// even if there is only one communicator. That is for kernels of other libraries that wait for other ranks,
/// such as NCCL's. Call it before the first of those is launched. Communicators made with
/// [`concurrent`](crate::CommunicatorOptions::concurrent) follow that option instead. Ranks may differ. Calls
/// that a graph has captured stay as they were.
pub fn share_sms(ordinal: u32) {
    device(ordinal).share_sms.store(true, Ordering::Relaxed);
}

/// From now on, this process's communicators on the CUDA device with that ordinal leave a third of its SMs free, if there are
/// several of them. One that is alone takes the device. For kernels of other libraries that hardly wait for other ranks while a
/// communicator works that is alone. Otherwise as [`share_sms`].
pub fn share_sms_of_several(ordinal: u32) {
    device(ordinal).several_share_sms.store(true, Ordering::Relaxed);
}

/// Part of a device that a communicator's kernels may occupy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) struct SmBudget {
    /// Most blocks of a kernel.
    pub(in crate::cuda) most_blocks: u32,
    /// Whether the stream's next kernel may start while this one still waits for peers (programmatic dependent launch). Two
    /// kernels are resident at once then.
    pub(in crate::cuda) early: bool,
    /// Whether a kernel may start when the one before it on the stream lets it, at the latest when all blocks of that one have
    /// ended, and before what that one wrote is visible. It takes no more of the device than its own blocks.
    pub(in crate::cuda) starts_early: bool,
    /// Whether other communicators' calls may be under way at the same time.
    pub(in crate::cuda) concurrent: bool,
    /// Whether the call runs beside compute, with no more SMs than it needs.
    pub(in crate::cuda) beside_compute: bool,
}

impl SmBudget {
    /// The whole device.
    pub(in crate::cuda) const ALL: Self = Self {
        most_blocks: u32::MAX,
        early: true,
        starts_early: true,
        concurrent: false,
        beside_compute: false,
    };

    /// Whether kernels may not take the whole device.
    pub(in crate::cuda) fn is_limited(&self) -> bool {
        self.most_blocks < u32::MAX
    }

    /// The budget of one of so many communicators, all of which may have calls under way at once: an equal part of the SMs, but
    /// for a sixteenth. That is for kernels without a budget, as waits for signals. While all others wait, the part of one is
    /// free for kernels of the program, which may stand in front of a call of this one.
    fn equal_part(communicators: u32, sm_count: u32) -> Self {
        let most_blocks = ((sm_count - sm_count / LEFT) / communicators).max(2);
        let concurrent = communicators > 1;
        Self { most_blocks, early: false, starts_early: true, concurrent, beside_compute: false }
    }

    /// The budget of one communicator beside kernels of other libraries, where `concurrent` of `communicators` may have calls
    /// under way at once. Together they get two thirds of the processors, so that a kernel of another library, such as NCCL, which
    /// may need whole processors, can always start. The two thirds are divided by the mean of the two numbers:
    /// when communicators leave a common stream one by one, kernels that run already have the larger budgets of
    /// fewer concurrent ones. Divided by `concurrent` alone, six or more would have more than the device
    /// together; with the mean, they have less than 2/3 of 2 ln 2, which is 0.92 of it.
    fn among(concurrent: u32, communicators: u32, sm_count: u32) -> Self {
        let most_blocks = (4 * sm_count / (3 * (concurrent + communicators))).max(2);
        let concurrent = concurrent > 1;
        Self { most_blocks, early: false, starts_early: true, concurrent, beside_compute: false }
    }

    /// The budget of kernels that start when all before them on the stream has ended.
    pub(in crate::cuda) fn in_turn(self) -> Self {
        Self { early: false, starts_early: false, ..self }
    }
}

/// A communicator as one of those on its device.
#[derive(Debug)]
pub(in crate::cuda) struct BudgetMember {
    device: Arc<Device>,
    /// Its number there. `None` for a communicator of one rank, which waits for nobody.
    number: Option<u64>,
    stream: OnlyStream,
    /// Whether calls may come on any stream: they have changed their stream, or are in graphs.
    any_stream: bool,
    sm_count: u32,
    options: BudgetOptions,
}

impl BudgetMember {
    pub(in crate::cuda) fn new(
        ordinal: u32,
        sm_count: u32,
        world: u32,
        options: BudgetOptions,
    ) -> Self {
        let device = device(ordinal);
        let mut number = None;
        if world > 1 {
            device.change(|streams| {
                let next = streams.last_key_value().map_or(0, |(last, _)| last + 1);
                streams.insert(next, None);
                number = Some(next);
            });
        }
        Self { device, number, stream: None, any_stream: false, sm_count, options }
    }

    /// Whether there are other communicators on the device. Kernels of theirs that are still to come may have the whole device.
    pub(in crate::cuda) fn has_company(&self) -> bool {
        self.number.is_some() && self.device.communicators.load(Ordering::Relaxed) > 1
    }

    /// How many other communicators are on the device.
    pub(in crate::cuda) fn others(&self) -> u32 {
        let all = self.device.communicators.load(Ordering::Relaxed);
        all.saturating_sub(self.number.is_some().into())
    }

    /// Makes this process's communicators on the device leave a third of it to others from now on, if there are several. That
    /// is for calls whose kernels have as many blocks on all ranks, whatever a rank's budget is.
    pub(in crate::cuda) fn has_free_blocks(&self) {
        self.device.several_share_sms.store(true, Ordering::Relaxed);
    }

    /// The most SMs of kernels from now on, whatever the options said before.
    pub(in crate::cuda) fn set_most(&mut self, most: Option<u32>) {
        self.options.most = most;
    }

    /// The budget of the kernels of a call on that stream.
    ///
    /// Calls of one communicator run one after the other, and so do calls on one stream. So as many are under way
    /// at once as there are streams that communicators have their calls on, and one more for each communicator
    /// that has no such stream. That is enough where ranks call alike, though their hosts may reach calls on
    /// different streams in any order: a kernel gets the whole device only if all calls of all communicators
    /// before it were on its stream, so that they have ended. While it runs, later calls on other streams cannot
    /// start; but no peer waits for one of those before this call, as what comes before it is on this stream.
    ///
    /// Beside compute a call has fewer SMs still, and none of its kernels starts before the one before it has ended.
    pub(in crate::cuda) fn budget_in_call(
        &mut self,
        stream: Stream,
        is_captured: impl FnOnce() -> bool,
    ) -> SmBudget {
        let Some(number) = self.number else { return self.budget_outside_calls() };
        // The driver is asked at most once, and only where it matters.
        let is_captured = LazyCell::new(is_captured);
        let shared = self.shared_budget(number, stream, || *is_captured);
        self.limited(shared, stream, || *is_captured)
    }

    /// Budget that [`Self::budget_in_call`] would give a call on that stream now, without what was lifted. Asking changes nothing,
    /// also for other communicators.
    pub(in crate::cuda) fn budget_if_called(
        &self,
        stream: Stream,
        is_captured: bool,
        lifted: Lifted,
    ) -> SmBudget {
        let shared = match self.number {
            _ if lifted.company => SmBudget::ALL,
            None => return self.budget_outside_calls(),
            Some(number) => self.shared_if_called(number, stream, is_captured),
        };
        if lifted.options { shared } else { self.limited(shared, stream, || is_captured) }
    }

    fn shared_if_called(&self, number: u64, stream: Stream, is_captured: bool) -> SmBudget {
        let mut members = self.device.streams().clone();
        let any_stream =
            self.becomes_any_stream(members.len() as u32, stream.raw(), || is_captured);
        members.insert(number, (!any_stream).then_some(stream.raw()));
        self.part_among(concurrent(&members), members.len() as u32)
    }

    /// A budget as the options limit it further.
    fn limited(
        &self,
        shared: SmBudget,
        stream: Stream,
        is_captured: impl FnOnce() -> bool,
    ) -> SmBudget {
        let on_default = stream.raw() <= LAST_DEFAULT;
        let chosen = self.options.most;
        let beside_compute =
            chosen.is_none() && self.options.beside_compute && !on_default && !is_captured();
        let most = if beside_compute { Some(SMS_BESIDE_COMPUTE) } else { chosen };
        most.map_or(shared, |most| SmBudget {
            most_blocks: shared.most_blocks.min(most),
            early: false,
            starts_early: !beside_compute,
            beside_compute,
            ..shared
        })
    }

    /// Part of the device that its communicators leave to this one.
    fn shared_budget(
        &mut self,
        number: u64,
        stream: Stream,
        is_captured: impl FnOnce() -> bool,
    ) -> SmBudget {
        let device = &self.device;
        let communicators = device.communicators.load(Ordering::Relaxed);
        let handle = stream.raw();
        self.any_stream = self.becomes_any_stream(communicators, handle, is_captured);
        let stream = (!self.any_stream).then_some(handle);
        if stream != self.stream {
            self.stream = stream;
            device.change(|streams| {
                streams.insert(number, stream);
            });
        }
        self.part_among(device.concurrent.load(Ordering::Relaxed), communicators)
    }

    /// Whether calls may come on any stream, from a call on that stream on.
    fn becomes_any_stream(
        &self,
        communicators: u32,
        handle: u64,
        is_captured: impl FnOnce() -> bool,
    ) -> bool {
        // A communicator that is alone may change its stream freely.
        if communicators < 2 || self.any_stream {
            return self.any_stream;
        }
        let changes = self.stream.is_some_and(|last| last != handle);
        changes || handle == Stream::PER_THREAD.raw() || is_captured()
    }

    /// The budget where so many of the device's communicators may have calls under way at once.
    fn part_among(&self, concurrent: u32, communicators: u32) -> SmBudget {
        let shares = self.device.share_sms.load(Ordering::Relaxed);
        let (concurrent, communicators) = match self.options.concurrent {
            Some(1) => return SmBudget::ALL,
            Some(configured) => (configured, configured),
            None if concurrent > 1 => (concurrent, communicators.max(concurrent)),
            None if shares => (1, 1),
            None => return SmBudget::ALL,
        };
        if shares || self.device.several_share_sms.load(Ordering::Relaxed) {
            SmBudget::among(concurrent, communicators, self.sm_count)
        } else {
            SmBudget::equal_part(communicators, self.sm_count)
        }
    }

    /// The budget of kernels that wait for no other rank, or have few blocks.
    pub(in crate::cuda) fn budget_outside_calls(&self) -> SmBudget {
        let device = &self.device;
        let alone = match self.options.concurrent {
            Some(configured) => configured == 1,
            None => {
                let communicators = device.communicators.load(Ordering::Relaxed);
                communicators < 2 && !device.share_sms.load(Ordering::Relaxed)
            }
        };
        if alone { SmBudget::ALL } else { SmBudget::ALL.in_turn() }
    }
}

impl Drop for BudgetMember {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            self.device.change(|streams| {
                streams.remove(&number);
            });
        }
    }
}

#[cfg(test)]
mod model;

#[cfg(test)]
mod tests {
    use super::*;

    /// A communicator on a device of 132 processors.
    fn member(ordinal: u32, world: u32, concurrent: Option<u32>) -> BudgetMember {
        let options = BudgetOptions { concurrent, ..BudgetOptions::default() };
        BudgetMember::new(ordinal, 132, world, options)
    }

    /// The budget of a call on that stream, outside captures.
    fn budget(member: &mut BudgetMember, stream: u64) -> SmBudget {
        member.budget_in_call(Stream::numbered(stream), || false)
    }

    fn blocks(member: &mut BudgetMember, stream: u64) -> u32 {
        budget(member, stream).most_blocks
    }

    fn part(most_blocks: u32) -> SmBudget {
        SmBudget { most_blocks, concurrent: true, ..SmBudget::among(1, 1, 3) }
    }

    #[test]
    fn communicators_on_several_streams_divide_the_device() {
        let new = |configured| member(1000, 2, configured);
        let mut first = new(None);
        assert_eq!(budget(&mut first, 7), SmBudget::ALL);
        let mut second = new(None);
        assert_eq!(budget(&mut first, 7), part(62), "the second's first call may be on any stream");
        assert_eq!(budget(&mut second, 7), SmBudget::ALL, "one after the other");
        let mut third = new(None);
        assert_eq!(budget(&mut first, 7), part(41));
        assert_eq!(budget(&mut third, 8), part(41));
        assert_eq!(budget(&mut second, 9), part(41));
        assert_eq!(
            budget(&mut second, 8),
            part(41),
            "what has changed its stream may change it again"
        );
        drop(third);
        assert_eq!(budget(&mut first, 7), part(62));
        drop(second);
        assert_eq!(budget(&mut first, 8), SmBudget::ALL);
        assert_eq!(
            budget(&mut first, 9),
            SmBudget::ALL,
            "it may change its stream while it is alone"
        );
        let mut fourth = new(None);
        assert_eq!(budget(&mut fourth, 9), SmBudget::ALL);
        assert_eq!(budget(&mut first, 9), SmBudget::ALL);
    }

    #[test]
    fn communicators_that_leave_a_stream_one_by_one_have_less_than_the_device() {
        for (several, shares) in (2..=40).flat_map(|several| [(several, false), (several, true)]) {
            let ordinal = 1100 + 2 * several + u32::from(shares);
            if shares {
                share_sms_of_several(ordinal);
            }
            let mut all: Vec<BudgetMember> =
                (0..several).map(|_| member(ordinal, 2, None)).collect();
            for each in &mut all {
                budget(each, 0);
            }
            assert_eq!(budget(&mut all[0], 0), SmBudget::ALL);
            let left: u32 =
                (1..several).map(|nth| blocks(&mut all[nth as usize], u64::from(nth))).sum();
            let together = left + blocks(&mut all[0], 0);
            assert!(together <= 124, "{several} take {together} blocks, shared: {shares}");
        }
    }

    #[test]
    fn asking_for_a_budget_changes_nothing() {
        let [mut first, mut second] = [1005; 2].map(|ordinal| member(ordinal, 2, None));
        let asked = |member: &BudgetMember, stream, is_captured| {
            member.budget_if_called(Stream::numbered(stream), is_captured, Lifted::default())
        };
        assert_eq!(budget(&mut first, 7), part(62), "the second one made no call yet");
        for _ in 0..2 {
            assert_eq!(asked(&second, 7, false), SmBudget::ALL, "one stream");
            assert_eq!(asked(&second, 8, false), part(62), "two streams");
            assert_eq!(asked(&second, 7, true), part(62), "in a graph");
            assert_eq!(asked(&first, 7, false), part(62), "the second one made no call still");
        }
        assert_eq!(budget(&mut second, 7), SmBudget::ALL);
        assert_eq!(asked(&first, 8, false), part(62), "it would change its stream");
        assert_eq!(budget(&mut first, 7), SmBudget::ALL, "it did not");
        // A call gets the budget that was asked for, whatever the options and the call.
        for concurrent in [None, Some(1), Some(3)] {
            for most in [None, Some(20)] {
                let options = BudgetOptions { concurrent, most, beside_compute: true };
                let mut third = BudgetMember::new(1005, 132, 2, options);
                for (stream, is_captured) in [(0, false), (7, false), (7, true), (9, false)] {
                    let before = asked(&third, stream, is_captured);
                    let stream = Stream::numbered(stream);
                    assert_eq!(before, third.budget_in_call(stream, || is_captured));
                    let all = Lifted { company: true, options: true };
                    let best = third.budget_if_called(stream, is_captured, all);
                    assert_eq!(best, SmBudget::ALL);
                }
            }
        }
    }

    #[test]
    fn calls_in_graphs_may_be_on_any_stream() {
        let [mut first, mut second] = [1001; 2].map(|ordinal| member(ordinal, 2, None));
        let stream = Stream::numbered(7);
        assert_eq!(second.budget_in_call(stream, || true).most_blocks, 62);
        assert_eq!(first.budget_in_call(stream, || false).most_blocks, 62);
        assert_eq!(second.budget_in_call(stream, || panic!("is asked once")).most_blocks, 62);
        let mut per_thread = member(1001, 2, None);
        assert_eq!(blocks(&mut per_thread, Stream::PER_THREAD.raw()), 41);
    }

    #[test]
    fn single_ranks_do_not_count_and_options_hold() {
        let mut first = member(1002, 2, None);
        let mut alone = member(1002, 1, None);
        assert_eq!((budget(&mut first, 1), budget(&mut alone, 9)), (SmBudget::ALL, SmBudget::ALL));
        assert_eq!(
            (first.budget_outside_calls(), alone.budget_outside_calls()),
            (SmBudget::ALL, SmBudget::ALL)
        );
        let mut limited = member(1002, 2, Some(4));
        assert_eq!(budget(&mut limited, 1), part(31));
        // They wait for nobody, but would be resident while the kernel before them on the stream waits.
        let late = SmBudget::ALL.in_turn();
        assert_eq!(
            [budget(&mut alone, 9), first.budget_outside_calls(), limited.budget_outside_calls()],
            [late; 3]
        );
        let mut all = member(1002, 2, Some(1));
        assert_eq!(budget(&mut all, 1), SmBudget::ALL);
    }

    #[test]
    fn a_third_is_left_to_other_libraries() {
        let mut first = member(1003, 2, None);
        share_sms(1003);
        assert_eq!(budget(&mut first, 1), SmBudget { concurrent: false, ..part(88) });
        assert!(!first.budget_outside_calls().early);
        let mut second = member(1003, 2, None);
        assert_eq!(blocks(&mut second, 2), 44);
    }

    #[test]
    fn several_leave_a_third_where_they_are_told_to() {
        let mut first = member(1006, 2, None);
        share_sms_of_several(1006);
        assert_eq!(budget(&mut first, 1), SmBudget::ALL, "alone");
        let mut second = member(1006, 2, None);
        assert_eq!([budget(&mut first, 1), budget(&mut second, 2)], [part(44); 2]);
        // A kernel that has as many blocks on all ranks says so by itself.
        let [mut one, mut other] = [1007; 2].map(|ordinal| member(ordinal, 2, None));
        assert_eq!(budget(&mut one, 1), part(62));
        one.has_free_blocks();
        assert_eq!([budget(&mut one, 1), budget(&mut other, 2)], [part(44); 2]);
    }

    #[test]
    fn together_they_fit_whatever_the_device() {
        for sm_count in [1, 46, 108, 132, 148] {
            for count in 1..=16 {
                let two_thirds = SmBudget::among(count, count, sm_count);
                let equal = SmBudget::equal_part(count, sm_count);
                for (budget, most) in
                    [(two_thirds, sm_count * 2 / 3), (equal, sm_count - sm_count / LEFT)]
                {
                    let SmBudget { most_blocks, early, concurrent, .. } = budget;
                    assert!(!early && most_blocks >= 2 && concurrent == (count > 1));
                    // Two blocks are the smallest grid.
                    let is_least = most_blocks == 2 && 2 * count > most - most % count;
                    assert!(is_least || most_blocks * count <= most, "{count} on {sm_count}");
                }
            }
        }
    }

    #[test]
    fn calls_beside_compute_take_few_sms() {
        let new = |most, concurrent| {
            BudgetMember::new(
                1004,
                132,
                2,
                BudgetOptions { concurrent, most, beside_compute: true },
            )
        };
        let mut alone = new(None, None);
        let (concurrent, beside_compute) = (false, true);
        let few = SmBudget {
            most_blocks: SMS_BESIDE_COMPUTE,
            concurrent,
            beside_compute,
            ..SmBudget::ALL.in_turn()
        };
        assert_eq!(budget(&mut alone, 7), few);
        assert_eq!([0, 1, 2].map(|stream| budget(&mut alone, stream)), [SmBudget::ALL; 3]);
        assert_eq!(alone.budget_in_call(Stream::numbered(7), || true), SmBudget::ALL, "captured");
        drop(alone);
        // Options hold on every stream, and other communicators are still left theirs.
        let mut chosen = new(Some(50), None);
        assert_eq!([0, 7].map(|stream| blocks(&mut chosen, stream)), [50; 2]);
        chosen.set_most(Some(20));
        assert_eq!(blocks(&mut chosen, 0), 20);
        chosen.set_most(None);
        assert_eq!(budget(&mut chosen, 7), few);
        drop(chosen);
        let mut shared = new(Some(50), Some(3));
        assert_eq!(blocks(&mut shared, 7), 41);
    }
}
