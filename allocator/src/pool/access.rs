//! Copies between blocks and ordinary memory.
//!
//! This is the only place above the drivers that accesses pool memory. Another thread or process may
//! access the same bytes at the same time, so there is never a reference to them. They are read and
//! written as relaxed atomics, word by word; what is read may be any mixture, which every [`Pod`] type
//! accepts.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use bytemuck::Pod;

use super::block::Block;
use crate::Result;

impl<T: Pod> Block<T> {
    /// Copies `values` to the start of the block.
    ///
    /// Only for memory that the CPU can access; else [`Error::is_unsupported`](crate::Error::is_unsupported). The copy is not
    /// atomic: a peer that reads or writes the same elements at the same time may see, or leave, a mixture.
    pub fn write(&self, values: &[T]) -> Result<()> {
        self.check_access(values.len())?;
        let (words, rest) = bytemuck::cast_slice::<T, u8>(values).as_chunks::<8>();
        let to = self.as_ptr().cast::<u8>();
        for (at, word) in words.iter().enumerate() {
            // SAFETY: the block is borrowed, and has as many elements, in which this word lies.
            unsafe { word_at(to, at) }.store(u64::from_ne_bytes(*word), Ordering::Relaxed);
        }
        for (at, byte) in rest.iter().enumerate() {
            // SAFETY: the block is borrowed, and has as many elements, in which this byte lies.
            unsafe { byte_at(to, words.len() * 8 + at) }.store(*byte, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Copies the block's elements out. Access as in [`Block::write`].
    pub fn read(&self) -> Result<Vec<T>> {
        self.check_access(self.len())?;
        let mut values = vec![T::zeroed(); self.len()];
        let (words, rest) = bytemuck::cast_slice_mut::<T, u8>(&mut values).as_chunks_mut::<8>();
        let from = self.as_ptr().cast::<u8>();
        for (at, word) in words.iter_mut().enumerate() {
            // SAFETY: the block is borrowed, and this word lies within it.
            *word = unsafe { word_at(from, at) }.load(Ordering::Relaxed).to_ne_bytes();
        }
        let bytes = words.len() * 8;
        for (at, byte) in rest.iter_mut().enumerate() {
            // SAFETY: the block is borrowed, and this byte lies within it.
            *byte = unsafe { byte_at(from, bytes + at) }.load(Ordering::Relaxed);
        }
        Ok(values)
    }
}

/// Word number `at` of a block that begins at `base`.
///
/// # Safety
///
/// You must promise that the block is live for `'a`, and holds this word whole.
unsafe fn word_at<'a>(base: *mut u8, at: usize) -> &'a AtomicU64 {
    let word = base.wrapping_add(at * 8).cast::<u64>();
    // SAFETY: a block is mapped readable and writable while it lives, which the caller promised, begins at a multiple of 512
    // bytes, and holds this word whole. In this process its memory is only ever touched through atomics and by collectives,
    // which order their accesses.
    unsafe { AtomicU64::from_ptr(word) }
}

/// Byte number `at` of a block that begins at `base`.
///
/// # Safety
///
/// You must promise that the block is live for `'a`, and holds this byte.
unsafe fn byte_at<'a>(base: *mut u8, at: usize) -> &'a AtomicU8 {
    // SAFETY: the block is mapped readable and writable while it lives, which the caller promised, and holds this byte. In this
    // process its memory is only touched through atomics and by collectives, which order their accesses.
    unsafe { AtomicU8::from_ptr(base.wrapping_add(at)) }
}
