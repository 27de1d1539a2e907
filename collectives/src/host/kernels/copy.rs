//! Copies: through the caches for what is read again soon, past them for what is not.

/// Copies `bytes` bytes.
///
/// # Safety
///
/// `from` is readable and `to` writable for `bytes`; they do not overlap; nobody else writes
/// `from` or touches `to` meanwhile.
#[inline]
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: exactly the caller's promises.
    unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) }
}

/// Copies `bytes` bytes with stores that bypass the caches where the processor has them: for
/// destinations larger than the caches, which then need not be read before they are written.
/// Complete, as far as other cores see, before it returns.
///
/// # Safety
///
/// As [`copy`].
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn copy_streaming(from: *const u8, to: *mut u8, bytes: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    const LINE: usize = 64;
    let head = to.align_offset(LINE).min(bytes);
    // SAFETY: the first `head <= bytes` bytes of both.
    unsafe { copy(from, to, head) };
    let lines = (bytes - head) / LINE;
    for line in 0..lines {
        let at = head + line * LINE;
        let source = from.wrapping_add(at).cast::<__m128i>();
        let target = to.wrapping_add(at).cast::<__m128i>();
        for part in 0..4 {
            // SAFETY: within the `lines` whole lines that both ranges hold; loads of any
            // alignment.
            let value = unsafe { _mm_loadu_si128(source.wrapping_add(part)) };
            // SAFETY: the same place of the destination, which is aligned to a line here.
            unsafe { _mm_stream_si128(target.wrapping_add(part), value) };
        }
    }
    // Streaming stores are not ordered by a later release store; this fence orders them (S3).
    // SAFETY: SSE is part of every x86-64 processor.
    unsafe { _mm_sfence() };
    let done = head + lines * LINE;
    // SAFETY: the last `bytes - done` bytes of both.
    unsafe { copy(from.wrapping_add(done), to.wrapping_add(done), bytes - done) };
}

/// Copies `bytes` bytes; this processor has no streaming stores that pay.
///
/// # Safety
///
/// As [`copy`].
#[cfg(not(target_arch = "x86_64"))]
pub(crate) unsafe fn copy_streaming(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: exactly the caller's promises.
    unsafe { copy(from, to, bytes) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streaming_copies_every_byte_at_any_alignment() {
        let source: Vec<u8> = (0..1000u32).map(|i| (i * 7 + 3) as u8).collect();
        for (skip, bytes) in [(0, 1000), (1, 999), (13, 64), (63, 1), (5, 0), (64, 700)] {
            let mut target = vec![0u8; 1000];
            // SAFETY: both vectors hold 1000 bytes and `skip + bytes <= 1000`.
            unsafe {
                copy_streaming(source.as_ptr(), target.as_mut_ptr().wrapping_add(skip), bytes)
            };
            assert_eq!(target[skip..skip + bytes], source[..bytes]);
            assert!(target[..skip].iter().all(|b| *b == 0));
            assert!(target[skip + bytes..].iter().all(|b| *b == 0));
        }
    }
}
