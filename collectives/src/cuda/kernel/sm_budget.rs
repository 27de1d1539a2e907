//! How much of a device the kernels of a communicator may occupy: its SM budget.
//!
//! A kernel stays resident on the device while it waits for a peer. If one kernel occupies the whole device,
//! the kernel of another communicator cannot start, and ranks that began with different ones wait for each
//! other until the timeout. So the communicators of a process that are on one device share it: one kernel at a
//! time is wide, and has most SMs, and those of other communicators are narrow meanwhile. The device decides which
//! one is wide when kernels begin (`symmpool/impl/sm_grant.cuh`). Each rank decides that for itself: kernels of one call
//! work together whatever their grids are.

use std::cell::LazyCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use symmpool_allocator::Stream;

use crate::cuda::layout::params::SM_LOCK_MEMBERS;

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

/// The divisor of a device's SMs for the part that is left to kernels without a budget.
const LEFT: u32 = 16;

/// Elevenths of the SMs that the narrow grids of all communicators but one have together: 24 of 132 SMs. A kernel that finds the
/// lock taken is slow, and one that finds it free has most SMs.
const NARROW_ELEVENTHS: u32 = 2;
/// Smallest grid: a leader block and a worker block.
const SMALLEST: u32 = 2;

/// Tags of communicators in the lock of SMs: the primes from 1031 on, which is more than the blocks of any wide grid.
const TAGS: [u16; SM_LOCK_MEMBERS] = {
    let (mut tags, mut found, mut number) = ([0; SM_LOCK_MEMBERS], 0, 1031);
    while found < SM_LOCK_MEMBERS {
        let mut divisor = 2;
        while number % divisor != 0 {
            divisor += 1;
        }
        if divisor == number {
            tags[found] = number;
            found += 1;
        }
        number += 1;
    }
    tags
};

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

/// Whether the process has communicators on the device.
pub(in crate::cuda) fn has_communicators(ordinal: u32) -> bool {
    device(ordinal).communicators.load(Ordering::Relaxed) > 0
}

/// Part of a device that a communicator's kernels may occupy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) struct SmBudget {
    /// Most blocks of a kernel. Budgets count a block as an SM, as it may need one of its own.
    pub(in crate::cuda) most_blocks: u32,
    /// How many of these work while another communicator's kernel is wide. `None` where all do.
    pub(in crate::cuda) narrow_blocks: Option<u32>,
    /// Whether the stream's *next* kernel may start while this one still waits for peers (programmatic dependent launch). Two
    /// kernels are resident at once then.
    pub(in crate::cuda) early: bool,
    /// Whether *this* kernel may start when the one before it on the stream lets it, at the latest when all blocks of that one have
    /// ended, and before what that one wrote is visible. It takes no more of the device than its own blocks.
    pub(in crate::cuda) starts_early: bool,
    /// Whether other communicators' calls may be under way at the same time. (`concurrent` of options is their number.)
    pub(in crate::cuda) concurrent: bool,
    /// Whether the call runs beside compute, with no more SMs than it needs.
    pub(in crate::cuda) beside_compute: bool,
}

impl SmBudget {
    /// The whole device.
    pub(in crate::cuda) const ALL: Self = Self {
        most_blocks: u32::MAX,
        narrow_blocks: None,
        early: true,
        starts_early: true,
        concurrent: false,
        beside_compute: false,
    };

    /// Whether kernels may not take the whole device.
    pub(in crate::cuda) fn is_limited(&self) -> bool {
        self.most_blocks < u32::MAX
    }

    /// Whether kernels ask for a grant.
    pub(in crate::cuda) fn shares(&self) -> bool {
        self.narrow_blocks.is_some()
    }

    /// The budget of `most_blocks` blocks, but at least two, where `concurrent` communicators may have calls under way at once.
    fn limited_to(most_blocks: u32, concurrent: u32) -> Self {
        let (most_blocks, concurrent) = (most_blocks.max(2), concurrent > 1);
        Self { most_blocks, early: false, concurrent, ..Self::ALL }
    }

    /// The budget of one of `communicators` communicators, all of which may have calls under way at once. By turns they have all
    /// SMs but a sixteenth, which is left to kernels without a budget, such as waits for signals, and to kernels of the program,
    /// which may stand in front of a call of a communicator.
    fn by_turns(communicators: u32, sm_count: u32) -> Self {
        Self::wide_or_narrow(sm_count - sm_count / LEFT, communicators, sm_count)
    }

    /// The budget of one communicator beside kernels of other libraries, where `concurrent` of `communicators` may have calls
    /// under way at once. Together they get two thirds of the SMs, so that a kernel of another library, such as NCCL,
    /// which may need whole SMs, can always start.
    fn among(concurrent: u32, communicators: u32, sm_count: u32) -> Self {
        let free = 2 * sm_count / 3;
        if concurrent == 1 {
            return Self::limited_to(free, concurrent);
        }
        Self::wide_or_narrow(free, communicators, sm_count)
    }

    /// The budget of one of `communicators` communicators that have `free` SMs together. Each block may need an SM of its own.
    /// Besides the wide grid of one communicator there is room for the narrow grids of all others.
    fn wide_or_narrow(free: u32, communicators: u32, sm_count: u32) -> Self {
        let others = communicators.saturating_sub(1).max(1);
        let narrow = (NARROW_ELEVENTHS * sm_count / 11 / others).max(SMALLEST);
        let wide = free.saturating_sub(others * narrow);
        let equal = free / communicators;
        // Without a place in the lock for each, or without enough SMs for a wide grid, all get equal parts.
        if wide <= equal.max(narrow) || communicators > SM_LOCK_MEMBERS as u32 {
            return Self::limited_to(equal, communicators);
        }
        Self { narrow_blocks: Some(narrow), ..Self::limited_to(wide, communicators) }
    }

    /// The budget of the communicator of that number. Those without a place in the lock have narrow grids alone.
    fn at_place(self, number: Option<u64>) -> Self {
        match self.narrow_blocks {
            Some(narrow) if number.is_some_and(|number| number >= SM_LOCK_MEMBERS as u64) => {
                Self { most_blocks: narrow, narrow_blocks: None, ..self }
            }
            _ => self,
        }
    }

    /// The budget of a kernel that neither starts early nor lets the next one: it comes when all before it on the stream has
    /// ended. (`by_turns` is about communicators that share SMs.)
    pub(in crate::cuda) fn in_turn(self) -> Self {
        Self { early: false, starts_early: false, ..self }
    }
}

/// A communicator as one of those on its device.
#[derive(Debug)]
pub(in crate::cuda) struct BudgetMember {
    device: Arc<Device>,
    /// Its number there. `None` for a communicator of one rank, which waits for nobody, and for one that stays among the
    /// device's communicators for ever ([`Self::keep`]).
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
                let next = (0..).find(|number| !streams.contains_key(number)).unwrap_or(0);
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

    /// The communicator's place in the device's lock of SMs, and its tag there.
    pub(in crate::cuda) fn place(&self) -> (u16, u16) {
        let member = self.number.unwrap_or(0).min(SM_LOCK_MEMBERS as u64 - 1);
        (member as u16, TAGS[member as usize])
    }

    /// Makes this process's communicators on the device leave a third of it to others from now on, if there are several. That
    /// is for calls whose kernels have as many blocks on all ranks, whatever a rank's budget is.
    pub(in crate::cuda) fn share_sms_of_several(&self) {
        self.device.several_share_sms.store(true, Ordering::Relaxed);
    }

    /// Stays among the device's communicators for ever: a kernel of this one may never end.
    pub(in crate::cuda) fn keep(&mut self) {
        self.number = None;
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

    /// The budget where `concurrent` of the device's communicators may have calls under way at once.
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
            SmBudget::among(concurrent, communicators, self.sm_count).at_place(self.number)
        } else {
            SmBudget::by_turns(communicators, self.sm_count).at_place(self.number)
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
mod tests;
