//! Slots of scratch that pieces of a call use in turn, which copy engines carry.

use super::memory_channels::SLOTS;
use super::params::ControlLayout;

/// Slots of inputs and of results.
pub(in crate::cuda) const SLOTS_OF_BOTH: usize = 2 * SLOTS;

/// Bytes of the shortest piece that is worth a copy: a shorter one is sent in less time than a copy takes to start.
pub(in crate::cuda) const SHORTEST: u64 = 4 << 20;

/// Bytes of a slot, where a rank has so many for each peer.
pub(in crate::cuda) fn room(control: &ControlLayout, world: u32, slots: usize) -> u64 {
    control.scratch_room(world) / slots as u64 / 128 * 128
}

/// Whether pieces are worth their signals beside compute: between two ranks whose scratch has room for long ones. With more
/// ranks each peer's part of the scratch is smaller, and what is lost between pieces is more than what compute gains.
pub(in crate::cuda) fn pays_off(control: &ControlLayout, world: u32, slots: usize) -> bool {
    world == 2 && room(control, world, slots) >= SHORTEST
}
