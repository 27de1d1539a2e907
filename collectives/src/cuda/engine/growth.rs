//! How an engine's memory grows: once, from what small calls need to what every size has use for. Which call it grows before
//! is decided in `communicator/growth.rs`; here data moves.
//!
//! Parts for data move to another block, which every rank has at one offset of its slot. Flags, counts and descriptions of
//! calls, channels and slots of messages stay where they are, and so does the memory that data had before: it is used no
//! more once every call before the growth has ended, but lies between the other parts of the control block.

use symmpool_allocator::{Block, Error, Result, Stream};

use super::super::footprint::Footprint;
use super::super::params::Control;
use super::setup::initial_data;
use super::{CudaEngine, cuda};

/// The legacy default stream is 0 or this one. It cannot be captured.
const LEGACY: u64 = 1;

/// What an engine's memory may grow to.
#[derive(Debug)]
pub(super) struct Growth {
    /// The parts for data afterwards.
    pub(super) footprint: Footprint,
    /// Whether a call was captured. A graph keeps the places that its calls were captured with, and calls in other places
    /// would not restore the inboxes that those find.
    pub(super) has_captured_calls: bool,
}

impl Growth {
    pub(super) fn new(footprint: Footprint) -> Self {
        Self { footprint, has_captured_calls: false }
    }

    /// Notes a call on that stream; `is_capturing` says whether the stream is being captured.
    #[inline]
    pub(super) fn note_call(&mut self, stream: Stream, is_capturing: impl FnOnce() -> bool) {
        if !self.has_captured_calls && stream.raw() > LEGACY {
            self.has_captured_calls = is_capturing();
        }
    }
}

impl CudaEngine {
    /// Whether large calls may still make the memory grow. The same on every rank.
    #[inline]
    pub(crate) fn may_grow(&self) -> bool {
        self.growth.is_some()
    }

    /// Whether a call in which every rank sends so many bytes to each has use for more memory than there is: an inbox, of
    /// Lamport's protocol or else of LL, has no room for those of all ranks.
    pub(crate) fn is_large(&self, bytes: u64, by_lamport: bool) -> bool {
        exceeds_inbox(&self.control, self.world(), bytes, by_lamport)
    }

    /// Bytes of the block that the memory grows by.
    pub(crate) fn growth_bytes(&self) -> u64 {
        self.growth.as_ref().map_or(0, |growth| self.data_in(growth, 0).data_bytes())
    }

    /// Bytes of the device that nobody has.
    pub(crate) fn free_bytes(&self) -> Result<u64> {
        cuda(&self.pool)?.memory_info().map(|(free, _)| free)
    }

    /// Why this rank's memory cannot grow, whatever room there is.
    ///
    /// # Errors
    ///
    /// `is_invalid_state` if a call was captured.
    pub(crate) fn check_growth(&self) -> Result<()> {
        match &self.growth {
            Some(growth) if growth.has_captured_calls => Err(Error::invalid_state(format!(
                "calls on rank {} were captured before the first large one; make one outside of captures first, or say how \
                 much memory the communicator has",
                self.rank()
            ))),
            _ => Ok(()),
        }
    }

    /// Fills such a block as kernels expect it, before peers can see it. Waits for nothing that calls have put on the device,
    /// which may wait for other ranks. Nothing else is under way in the block: those of the control lane are freed without
    /// order, and given out again when no rank uses them any more.
    pub(crate) fn prepare_growth(&self, block: &Block<u8>) -> Result<()> {
        let Some(growth) = &self.growth else { return Ok(()) };
        let (at, api, stream) = (block.address(), self.api, self.copy_stream);
        let data = self.data_in(growth, 0);
        cuda(&self.pool)?.with_context(|| {
            for (begin, word, bytes) in initial_data(&data) {
                // SAFETY: a part of a block that the caller holds, of which no other rank knows; parts begin and end at
                // multiples of 4096.
                unsafe { api.fill(at + begin, word, bytes / 4, stream) }?;
            }
            api.synchronize(stream)
        })
    }

    /// Uses a block of that offset for data from the next call on. Every rank has prepared and committed its own, and all
    /// calls before have ended.
    pub(crate) fn grow(&mut self, block: u64) {
        let Some(growth) = self.growth.take() else { return };
        self.idle_bytes = self.control.data_bytes();
        // The block may lie in front of the control block: places are added modulo 2^64.
        self.control = self.data_in(&growth, block.wrapping_sub(self.comm.control));
        self.comm.places = self.control.for_links(self.direct);
    }

    /// Keeps the memory that it has.
    pub(crate) fn stay_small(&mut self) {
        self.growth = None;
    }

    /// The layouts that calls may have, the largest one last.
    pub(in super::super) fn layouts(&self) -> Vec<Control> {
        let grown = self.growth.as_ref().map(|growth| self.data_in(growth, self.control.ll));
        std::iter::once(self.control).chain(grown).collect()
    }

    /// The layout with grown parts for data from `begin` on, relative to the control block.
    fn data_in(&self, growth: &Growth, begin: u64) -> Control {
        self.control.with_data(begin, growth.footprint)
    }
}

/// Whether an inbox of a layout, of a Lamport protocol or of LL, has no room for so many bytes of every rank. All-to-alls and
/// what is made of them have an inbox as large as Lamport's.
fn exceeds_inbox(control: &Control, world: u32, bytes: u64, lamport: bool) -> bool {
    bytes.saturating_mul(world.into()) > 16 * control.inbox_vectors(lamport)
}

#[cfg(test)]
mod tests {
    use super::super::super::all_gather_broadcast::LL_BYTES;
    use super::super::super::constraints::{AllReduceShape, fits_lamport};
    use super::super::super::footprint::Requested;
    use super::super::super::table::MeasuredTable;
    use super::*;
    use crate::algorithm::RequestedAlgorithm;
    use crate::{AllReduceAlgorithm, DType};

    /// What a call of so many bytes is launched with: the algorithm, and how many bytes of it a launch takes at most.
    fn served(
        shape: &AllReduceShape,
        control: &Control,
        measured: &MeasuredTable,
    ) -> (&'static str, bool) {
        let auto =
            RequestedAlgorithm { algorithm: AllReduceAlgorithm::Auto, by_environment: false };
        let (entry, _) = shape.entry(auto, control, measured).expect("one serves");
        (entry.name.name(), (entry.most_bytes)(shape, control) >= shape.bytes)
    }

    #[test]
    fn calls_that_take_no_memory_are_served_as_with_all_of_it() {
        for world in 2..=8 {
            let small = Control::new(world, Footprint::at_first(world)).unwrap();
            let full = Footprint::new(world, Requested::default()).unwrap();
            let full = Control::new(world, full).unwrap();
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
