//! Copies between blocks and ordinary memory.
//!
//! The only place above the drivers that touches pool memory. Another process may touch the same
//! bytes at the same time, so there is never a reference to them, and nothing is assumed about
//! what is read beyond its being some bit pattern, which every [`Pod`] type accepts.
#![allow(unsafe_code)]

use bytemuck::Pod;

/// Copies `values` to `to`. The caller has checked that a block of at least that many elements,
/// reachable by the CPU, lives there.
pub(super) fn write<T: Pod>(to: *mut T, values: &[T]) {
    // SAFETY: `Block` owns at least `values.len()` elements at `to`, mapped readable and writable
    // for as long as the block lives and aligned to 512 bytes or more; `values` is ordinary memory
    // and cannot overlap a heap's mapping, to which no reference ever exists.
    unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), to, values.len()) };
}

/// Copies `count` elements from `from`; the caller has checked as for [`write`](fn@write).
pub(super) fn read<T: Pod>(from: *const T, count: usize) -> Vec<T> {
    let mut values = vec![T::zeroed(); count];
    // SAFETY: as in `write`, with the roles exchanged; any bit pattern is a valid `T: Pod`.
    unsafe { std::ptr::copy_nonoverlapping(from, values.as_mut_ptr(), count) };
    values
}
