//! The areas of an engine's memory: where data of calls lies on its way.
//!
//! Every engine has an area for small calls. One whose memory grows gets another one, for large calls, before the first of
//! them (`communicator/growth.rs`). Which area a call uses follows from its kind and size, never from when it is made. So a
//! graph of small calls stays right when the memory has grown since, and what was captured first costs later calls nothing.
//!
//! The areas share flags, counts and descriptions of calls, channels and slots of messages. Each has inboxes and scratch of
//! its own, and on the device its own turn of the Lamport inbox. A call leaves the other area as it is. Only in the
//! calls in which old flags expire (`must_expire_flags` in `symmpool/impl/handshake.cuh`) does it expire them there too, for which the
//! device knows both areas (`AreaFlags` in `symmpool/impl/comm_layout.cuh`).

use std::thread;
use std::time::Duration;

use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::{BarrierId, Block, Deadline, Error, Result, Stream};

use super::CudaEngine;
use crate::cuda::driver::api::{CudaHandle, cuda};
use crate::cuda::layout::params::{AreaFlags, ControlLayout, Footprint, LOCAL_AREAS};

/// Pattern that Lamport inboxes are filled with at first, and that data never has: `EMPTY` in `symmpool/impl/lamport.cuh`.
pub(in crate::cuda) const LAMPORT_PATTERN: u32 = 0xffff_ffff;
/// Pattern that escaped Lamport inboxes are filled with at first: `EMPTY` in `symmpool/impl/lamport_escaped.cuh`.
pub(in crate::cuda) const ESCAPED_PATTERN: u32 = 0xc35a_96e8;

/// Time between the places of an area's flags and their lengths. A call of a graph that was launched before may run
/// meanwhile, and must not read a length without its place; it reads both within nanoseconds.
const BETWEEN_FLAGS: Duration = Duration::from_millis(5);
/// Time between two looks whether the device has done something.
const POLL: Duration = Duration::from_micros(50);

/// Where data of a call lies on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(crate) enum Area {
    Small = 0,
    Large = 1,
}

/// The layouts of the areas that there are, and what the memory may grow to.
#[derive(Debug)]
pub(super) struct Areas {
    pub(super) small: ControlLayout,
    pub(super) large: Option<ControlLayout>,
    /// Until the memory has grown; `None` if it never does.
    growth: Option<AreaGrowth>,
    /// Area of all calls of experts, as a dispatch and its combine have the same.
    expert_area: Option<Area>,
    /// A number that the communicator has on all ranks, and no other one of the pool.
    number: u64,
    /// Whether the call under way has asked already whether it is time to grow.
    has_asked: bool,
    /// Whether that call counts as a large one once it is made.
    is_counted: bool,
    /// Whether other ranks were told that this one failed before it could come to a growth.
    has_reported_failure: bool,
}

/// Growth that an engine's memory may still have, and when it is tried again.
#[derive(Debug)]
struct AreaGrowth {
    /// The parts of the area for large calls.
    footprint: Footprint,
    /// How often some device had no room.
    failures: u32,
    /// Large calls until the next try. All ranks count alike.
    calls_left: u64,
}

impl Areas {
    pub(super) fn new(small: ControlLayout, grown: Option<Footprint>, number: u64) -> Self {
        let growth = grown.map(|footprint| AreaGrowth { footprint, failures: 0, calls_left: 0 });
        let (has_asked, is_counted, has_reported_failure) = (false, false, false);
        Self {
            small,
            large: None,
            growth,
            expert_area: None,
            number,
            has_asked,
            is_counted,
            has_reported_failure,
        }
    }

    /// The layout of an area: of the small one where there is no large one.
    fn layout(&self, area: Area) -> (Area, ControlLayout) {
        match (area, self.large) {
            (Area::Large, Some(large)) => (Area::Large, large),
            _ => (Area::Small, self.small),
        }
    }

    /// Returns [`Self::layout`] as if the memory had grown: an area for large calls then lies somewhere.
    fn as_if_grown(&self, area: Area) -> (Area, ControlLayout) {
        match (area, self.large, self.grown(self.small.ll)) {
            (Area::Large, None, Some(large)) => (Area::Large, large),
            _ => self.layout(area),
        }
    }

    /// The layout of the largest area that there is.
    fn largest(&self) -> &ControlLayout {
        self.large.as_ref().unwrap_or(&self.small)
    }

    /// The layout of the large area from `begin` on, relative to the control block.
    fn grown(&self, begin: u64) -> Option<ControlLayout> {
        self.growth.as_ref().map(|growth| self.small.with_data(begin, growth.footprint))
    }
}

impl CudaEngine {
    /// Whether there is an area for large calls, or may be one. The same on every rank.
    #[inline]
    pub(crate) fn may_have_large_area(&self) -> bool {
        self.areas.large.is_some() || self.areas.growth.is_some()
    }

    /// Begins a call, in the area for small calls.
    #[inline]
    pub(crate) fn begin_in_small_area(&mut self) {
        (self.areas.has_asked, self.areas.is_counted) = (false, false);
        self.use_area(Area::Small);
    }

    /// The area that the call under way uses.
    pub(crate) fn area(&self) -> Area {
        if self.comm.area == Area::Large as u16 { Area::Large } else { Area::Small }
    }

    /// Has the call under way use an area: the one for small calls where there is no large one.
    #[inline]
    pub(crate) fn use_area(&mut self, area: Area) {
        if self.area() == area {
            return;
        }
        let (area, control) = match &self.rehearsal {
            Some(rehearsal) if rehearsal.has_grown => self.areas.as_if_grown(area),
            _ => self.areas.layout(area),
        };
        self.control = control;
        self.comm.places = control.for_links(self.nvlinked);
        self.comm.area = area as u16;
    }

    /// Whether calls of experts have an area yet. Has them use that one, if they do.
    pub(crate) fn use_expert_area(&mut self) -> bool {
        match self.areas.expert_area {
            Some(area) => self.use_area(area),
            None => return false,
        }
        true
    }

    /// Has all later calls of experts use the area of this one, which was made.
    pub(in super::super) fn keep_expert_area(&mut self) {
        self.areas.expert_area = Some(self.area());
    }

    /// Vectors that one call may put into the Lamport inbox of the largest area that there is.
    pub(in super::super) fn largest_lamport_vectors(&self) -> u64 {
        self.areas.largest().lamport_vectors()
    }

    /// Whether a call in which every rank sends `bytes` bytes to each has use for the large area: a small inbox, of Lamport's
    /// protocol or else of LL, has no room for those of all ranks.
    pub(crate) fn is_large(&self, bytes: u64, by_lamport: bool) -> bool {
        exceeds_inbox(&self.areas.small, self.world(), bytes, by_lamport)
    }

    /// Whether the memory would grow before a large call that comes now, and after how many large calls it is tried again.
    /// `None` where it has grown, or never does.
    pub(crate) fn next_growth(&self) -> Option<u64> {
        self.areas.growth.as_ref().map(|growth| growth.calls_left)
    }

    /// Whether the memory is to grow before a large call. A call may ask several times.
    pub(crate) fn is_time_to_grow(&mut self) -> bool {
        let Some(calls_left) = self.next_growth() else { return false };
        let is_time = calls_left == 0;
        self.areas.is_counted = !is_time;
        !std::mem::replace(&mut self.areas.has_asked, true) && is_time
    }

    /// Counts the call under way, if it is a large one. You must call this when its first kernel was put on a stream, and not
    /// before: only calls that all ranks have made count.
    #[inline]
    pub(super) fn count_large_call(&mut self) {
        if std::mem::take(&mut self.areas.is_counted)
            && let Some(growth) = &mut self.areas.growth
        {
            growth.calls_left = growth.calls_left.saturating_sub(1);
        }
    }

    /// Notes that the memory has not grown: it is tried again after twice as many large calls as the last time.
    pub(crate) fn postpone_growth(&mut self) {
        if let Some(growth) = &mut self.areas.growth {
            growth.failures += 1;
            growth.calls_left = 1 << growth.failures.min(32);
        }
    }

    /// Whether this is called for the first time. You must call it where ranks meet for a growth and this one has failed
    /// before: such a rank tells the others once.
    pub(crate) fn is_first_failed_meeting(&mut self) -> bool {
        !std::mem::replace(&mut self.areas.has_reported_failure, true)
    }

    /// Returns what tells this growth from others of the pool where ranks wait for each other.
    pub(crate) fn growth_topic(&self) -> BarrierId {
        let failures = self.areas.growth.as_ref().map_or(0, |growth| growth.failures);
        (self.areas.number, failures.into())
    }

    /// Returns what tells this engine from others of the pool in a question to all ranks.
    pub(crate) fn subject(&self) -> u64 {
        self.comm.control
    }

    /// Bytes of the block that the memory grows by.
    pub(crate) fn growth_bytes(&self) -> u64 {
        self.areas.grown(0).map_or(0, |large| large.data_bytes())
    }

    /// Bytes that the memory would have grown by, had each device had room.
    pub(super) fn wanted_bytes(&self) -> u64 {
        let has_failed = self.areas.growth.as_ref().is_some_and(|growth| growth.failures > 0);
        if has_failed { self.growth_bytes() } else { 0 }
    }

    /// Bytes of the device that nobody has.
    pub(crate) fn free_bytes(&self) -> Result<u64> {
        cuda(self.pool.driver())?.memory_info().map(|(free, _)| free)
    }

    /// Fills such a block as kernels expect it, before peers can see it. Waits for nothing that calls have put on the device,
    /// which may wait for other ranks. Nothing else is under way in the block: those of the control lane are freed without
    /// order, and given out again when no rank uses them any more.
    pub(crate) fn prepare_growth(&self, block: &Block<u8>, deadline: Deadline) -> Result<()> {
        let Some(large) = self.areas.grown(0) else { return Ok(()) };
        let (at, api) = (block.address(), self.api);
        self.run_and_wait(deadline, |stream| {
            initial_data(&large).into_iter().try_for_each(|(begin, word, bytes)| {
                // SAFETY: a part of a block that the caller holds, of which no other rank knows; parts begin and end at
                // multiples of 4096.
                unsafe { api.fill(at + begin, word, bytes / 4, stream) }
            })
        })
    }

    /// Uses a block of that offset as the area for large calls. Every rank has prepared and committed its own. Calls of graphs may
    /// be under way if this one is `captured`, and otherwise none.
    pub(crate) fn grow(&mut self, block: u64, captured: bool, deadline: Deadline) -> Result<()> {
        // The block may lie in front of the control block: places are added modulo 2^64.
        let Some(large) = self.areas.grown(block.wrapping_sub(self.comm.control)) else {
            return Ok(());
        };
        let areas =
            [self.areas.small, large].map(|area| area.for_links(self.nvlinked).area_flags());
        let own = self.pool.layout().address(self.comm.rank, self.comm.control) + LOCAL_AREAS;
        let write = |words: fn(&AreaFlags) -> [(u64, u64); 3]| {
            let each = (own..).step_by(size_of::<AreaFlags>()).zip(&areas);
            let at = |(begin, area)| words(area).map(|(offset, word)| (begin + offset, word));
            self.write(&each.flat_map(at).collect::<Vec<_>>(), deadline)
        };
        write(AreaFlags::places)?;
        if captured {
            thread::sleep(BETWEEN_FLAGS);
        }
        write(AreaFlags::lengths)?;
        (self.areas.large, self.areas.growth) = (Some(large), None);
        Ok(())
    }

    /// Writes words of 64 bits to these addresses in the control block.
    fn write(&self, words: &[(u64, u64)], deadline: Deadline) -> Result<()> {
        let api = self.api;
        self.run_and_wait(deadline, |stream| {
            words.iter().try_for_each(|&(at, word)| {
                // SAFETY: words of the control block that only this rank's kernels read, and that nothing else writes. Kernels
                // may run meanwhile: lengths are 0 until the second batch, so none uses a place before; and the upper half of
                // a length is always 0, so its two halves are never seen apart.
                unsafe { api.fill(at, word as u32, 1, stream) }?;
                // SAFETY: the other half of such a word, to which the same applies.
                unsafe { api.fill(at + 4, (word >> 32) as u32, 1, stream) }
            })
        })
    }

    /// Puts work on a stream of its own, which is part of no capture, and waits until it is done.
    fn run_and_wait(
        &self,
        deadline: Deadline,
        put: impl FnOnce(Stream) -> Result<()>,
    ) -> Result<()> {
        let api = self.api;
        cuda(self.pool.driver())?.with_context_unordered(|| {
            let stream = api.stream()?;
            let done = put(stream).and_then(|()| {
                while !api.is_idle(stream)? {
                    if deadline.expired() {
                        let budget = deadline.budget();
                        // No other rank is late, so it is no timeout of ranks.
                        return Err(Error::invalid_state(format!(
                            "the device has not filled a communicator's memory in {budget:.1?}"
                        )));
                    }
                    thread::sleep(POLL);
                }
                Ok(())
            });
            // SAFETY: made above and given up here; the driver takes it away when it is done.
            let code = unsafe { (api.stream_destroy)(stream.raw() as CudaHandle) };
            done.and(CudaDriver::check(code, || "giving back a stream".to_owned()))
        })
    }

    /// The layouts that calls may have, the largest one last.
    pub(in super::super) fn layouts(&self) -> Vec<ControlLayout> {
        let large = self.areas.large.or_else(|| self.areas.grown(self.areas.small.ll));
        std::iter::once(self.areas.small).chain(large).collect()
    }
}

/// Returns what kernels expect in the parts for data before the first call there: where each range begins, the word
/// that it is filled with, and its bytes. Plans' kernels read of their scratch only what was written in the same call.
pub(super) fn initial_data(control: &ControlLayout) -> [(u64, u32, u64); 4] {
    [
        (control.ll, 0, control.escaped - control.ll),
        (control.escaped, ESCAPED_PATTERN, control.escaped_bytes),
        (control.lamport, LAMPORT_PATTERN, control.lamport_bytes),
        (control.scratch, 0, control.scratch_bytes),
    ]
}

/// Whether an inbox of a layout, of a Lamport protocol or of LL, has no room for `bytes` bytes of every rank. The inbox of
/// all-to-alls, and of collectives that are made of them, is as large as Lamport's.
fn exceeds_inbox(control: &ControlLayout, world: u32, bytes: u64, lamport: bool) -> bool {
    bytes.saturating_mul(world.into()) > 16 * control.inbox_vectors(lamport)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::all_gather::ll::LL_BYTES;
    use crate::cuda::all_reduce::constraints::{AllReduceShape, fits_lamport};
    use crate::cuda::layout::footprint::Requested;
    use crate::cuda::select::table::MeasuredTable;
    use crate::{AllReduceAlgorithm, DType};

    /// Returns what a call of `shape` is launched with: the algorithm, and whether one launch takes all of them.
    fn served(
        shape: &AllReduceShape,
        control: &ControlLayout,
        measured: &MeasuredTable,
    ) -> (&'static str, bool) {
        let auto = AllReduceAlgorithm::Auto;
        let (entry, _) = shape.entry(auto, control, measured).expect("one serves");
        (entry.name.name(), (entry.most_bytes)(shape, control) >= shape.bytes)
    }

    #[test]
    fn calls_that_take_no_memory_are_served_as_with_all_of_it() {
        for world in 2..=8 {
            let small = ControlLayout::new(world, Footprint::at_first(world)).unwrap();
            let full = Footprint::new(world, Requested::default()).unwrap();
            let full = ControlLayout::new(world, full).unwrap();
            assert_eq!(small.escaped_bytes / 2, small.lamport_bytes / 3, "one bound for both");
            // All-gathers and broadcasts in LL take one launch.
            let in_ll = LL_BYTES / (u64::from(world) - 1);
            assert!(!exceeds_inbox(&small, world, in_ll, false), "{world} ranks: {small:?}");
            for device in ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "another device"] {
                let measured = MeasuredTable::of(&vec![device; world as usize]);
                for (dtype, window) in [DType::Bf16, DType::F64, DType::I32, DType::U8]
                    .into_iter()
                    .flat_map(|dtype| [(dtype, true), (dtype, false)])
                {
                    let sizes = (4..22).flat_map(|power| [1 << power, 3 << (power - 1)]);
                    let kept = sizes
                        .filter(|bytes| !exceeds_inbox(&small, world, *bytes, fits_lamport(dtype)));
                    for bytes in kept {
                        let shape = AllReduceShape {
                            input_window: window,
                            output_window: window,
                            ..AllReduceShape::between_windows(bytes, dtype, world)
                        };
                        let [now, then] =
                            [&small, &full].map(|control| served(&shape, control, &measured));
                        assert_eq!(now, then, "{bytes} {dtype:?} of {world} on {device}, {window}");
                    }
                }
            }
        }
    }
}
