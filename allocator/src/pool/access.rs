//! Copies between blocks and ordinary memory.
//!
//! This is the only place above the drivers that accesses pool memory. Another thread or process may
//! access the same bytes at the same time, so there is never a reference to them. They are read and
//! written as relaxed atomics, word by word; what is read may be any mixture, which every [`Pod`] type
//! accepts.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use bytemuck::Pod;

/// Copies `values` to `to`. The caller has checked that a live block of at least that many elements, which
/// the CPU can access, begins there.
pub(super) fn write<T: Pod>(to: *mut T, values: &[T]) {
    let (words, rest) = bytemuck::cast_slice::<T, u8>(values).as_chunks::<8>();
    let to = to.cast::<u8>();
    for (at, word) in words.iter().enumerate() {
        word_at(to, at).store(u64::from_ne_bytes(*word), Ordering::Relaxed);
    }
    for (at, byte) in rest.iter().enumerate() {
        byte_at(to, words.len() * 8 + at).store(*byte, Ordering::Relaxed);
    }
}

/// Copies `count` elements from `from`; the caller has checked as for [`write`](fn@write).
pub(super) fn read<T: Pod>(from: *mut T, count: usize) -> Vec<T> {
    let mut values = vec![T::zeroed(); count];
    let (words, rest) = bytemuck::cast_slice_mut::<T, u8>(&mut values).as_chunks_mut::<8>();
    let from = from.cast::<u8>();
    for (at, word) in words.iter_mut().enumerate() {
        *word = word_at(from, at).load(Ordering::Relaxed).to_ne_bytes();
    }
    let bytes = words.len() * 8;
    for (at, byte) in rest.iter_mut().enumerate() {
        *byte = byte_at(from, bytes + at).load(Ordering::Relaxed);
    }
    values
}

/// Word number `at` of a block that begins at `base`.
fn word_at<'a>(base: *mut u8, at: usize) -> &'a AtomicU64 {
    let word = base.wrapping_add(at * 8).cast::<u64>();
    // SAFETY: a block is mapped readable and writable while it lives, begins at a multiple of 512
    // bytes, and holds this word whole, as the callers count words within it; in this process its
    // memory is only ever touched through atomics and by collectives, which order their accesses.
    unsafe { AtomicU64::from_ptr(word) }
}

/// Byte number `at` of a block that begins at `base`.
fn byte_at<'a>(base: *mut u8, at: usize) -> &'a AtomicU8 {
    // SAFETY: the block is mapped readable and writable while it lives, and holds this byte, as the callers count
    // bytes within it; in this process its memory is only touched through atomics and by collectives, which order
    // their accesses.
    unsafe { AtomicU8::from_ptr(base.wrapping_add(at)) }
}
