//! Copies: through the caches for what is read again soon, past them for what is not.
//!
//! Between ranks the C library's `memcpy` is not used for more than a few lines: it may choose string
//! instructions, which are many times slower on some processors when source and destination lie
//! at close offsets of their pages - as equal offsets of symmetric memory do. On others they are up to
//! twice as fast, within one rank's memory, for they need not read what they write. There `own` finds
//! out which it is.

/// Below this the call itself is what costs, and any copy will do; bytes.
const SMALL: usize = 512;
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

/// Copies `bytes` bytes.
///
/// # Safety
///
/// `from` is readable and `to` writable for `bytes`; they do not overlap; nobody else writes
/// `from` or touches `to` meanwhile.
#[inline]
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    if bytes < SMALL {
        // SAFETY: exactly the caller's promises.
        unsafe { small(from, to, bytes) }
    } else {
        // SAFETY: likewise.
        unsafe { large::<false>(from, to, bytes) }
    }
}

/// Copies `bytes` bytes with stores that bypass the caches where the processor has them: for
/// destinations larger than the caches, which then need not be read before they are written.
/// Complete, as far as other cores see, before it returns.
///
/// # Safety
///
/// As [`copy`].
pub(crate) unsafe fn copy_streaming(from: *const u8, to: *mut u8, bytes: usize) {
    if bytes < SMALL {
        // SAFETY: exactly the caller's promises.
        unsafe { small(from, to, bytes) }
    } else {
        // SAFETY: likewise.
        unsafe { large::<true>(from, to, bytes) }
    }
}

/// Has [`copy_own`] know what it needs to, which takes some 0.1 ms the first time.
pub(crate) fn prepare_to_copy() {
    own::measured();
}

/// As [`copy`], from this rank's memory to this rank's, in whichever way is faster here.
///
/// # Safety
///
/// As [`copy`].
pub(crate) unsafe fn copy_own(from: *const u8, to: *mut u8, bytes: usize) {
    if own::library_is_faster(from, to, bytes) {
        // SAFETY: exactly the caller's promises.
        unsafe { small(from, to, bytes) }
    } else {
        // SAFETY: likewise.
        unsafe { copy(from, to, bytes) }
    }
}

/// # Safety
///
/// As [`copy`].
#[inline]
unsafe fn small(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: exactly the caller's promises.
    unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) }
}

/// # Safety
///
/// As [`copy`].
#[cfg(not(target_arch = "x86_64"))]
unsafe fn large<const STREAM: bool>(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: exactly the caller's promises.
    unsafe { small(from, to, bytes) }
}

/// # Safety
///
/// As [`copy`].
#[cfg(target_arch = "x86_64")]
unsafe fn large<const STREAM: bool>(from: *const u8, to: *mut u8, bytes: usize) {
    // Up to the destination's first line boundary, whole lines, and the rest.
    let head = to.align_offset(LINE).min(bytes);
    let lines = (bytes - head) / LINE;
    let done = head + lines * LINE;
    let (source, target) = (from.wrapping_add(head), to.wrapping_add(head));
    // SAFETY: the first `head <= bytes` bytes of both.
    unsafe { small(from, to, head) };
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: whole lines within both, the destination's aligned; the processor has AVX-512.
        unsafe { x86::lines_avx512::<STREAM>(source, target, lines) };
    } else if is_x86_feature_detected!("avx") {
        // SAFETY: as above; the processor has AVX.
        unsafe { x86::lines_avx::<STREAM>(source, target, lines) };
    } else {
        // SAFETY: as above.
        unsafe { small(source, target, lines * LINE) };
    }
    // SAFETY: the last `bytes - done` bytes of both.
    unsafe { small(from.wrapping_add(done), to.wrapping_add(done), bytes - done) };
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        _mm_sfence, _mm256_loadu_si256, _mm256_store_si256, _mm256_stream_si256,
        _mm512_loadu_si512, _mm512_store_si512, _mm512_stream_si512,
    };

    use super::LINE;

    macro_rules! lines {
        ($name:ident, $feature:literal, $bytes:literal, $load:ident, $store:ident, $stream:ident) => {
            /// # Safety
            ///
            /// `lines` lines of `from` are readable and of `to` writable, `to` is aligned to a
            /// line, and the processor has the feature.
            #[target_feature(enable = $feature)]
            pub(super) unsafe fn $name<const STREAM: bool>(
                from: *const u8,
                to: *mut u8,
                lines: usize,
            ) {
                let bytes = lines * LINE;
                let mut at = 0;
                macro_rules! load {
                    ($i:literal) => {
                        // SAFETY: the callers of this macro stay within `bytes` of the source.
                        unsafe { $load(from.wrapping_add(at + $i * $bytes).cast()) }
                    };
                }
                macro_rules! store {
                    ($i:literal, $vector:ident) => {
                        let place = to.wrapping_add(at + $i * $bytes).cast();
                        if STREAM {
                            // SAFETY: within `bytes` of the destination, aligned as `to` is.
                            unsafe { $stream(place, $vector) };
                        } else {
                            // SAFETY: likewise.
                            unsafe { $store(place, $vector) };
                        }
                    };
                }
                // Four vectors at a time, all loads before the stores.
                while at + 4 * $bytes <= bytes {
                    let (a, b, c, d) = (load!(0), load!(1), load!(2), load!(3));
                    store!(0, a);
                    store!(1, b);
                    store!(2, c);
                    store!(3, d);
                    at += 4 * $bytes;
                }
                // A line is a whole number of vectors.
                while at < bytes {
                    let a = load!(0);
                    store!(0, a);
                    at += $bytes;
                }
                if STREAM {
                    // Streaming stores are not ordered by a later release store; this orders
                    // them (S3).
                    _mm_sfence();
                }
            }
        };
    }

    lines!(
        lines_avx512,
        "avx512f",
        64,
        _mm512_loadu_si512,
        _mm512_store_si512,
        _mm512_stream_si512
    );
    lines!(lines_avx, "avx", 32, _mm256_loadu_si256, _mm256_store_si256, _mm256_stream_si256);
}

/// Whether the C library copies faster than vectors do, by measuring it once.
mod own {
    use std::sync::OnceLock;
    use std::time::{Duration, Instant};

    use super::{copy, small};

    const PAGE: usize = 4096;
    /// What is measured, and from where on it decides: where it fits into a core's caches, and the time is
    /// no longer that of the call.
    const MEASURED: usize = 64 << 10;
    const FROM: usize = 16 << 10;
    /// Offsets within a page that differ by less than this are close.
    const CLOSE: usize = 512;
    const FAR: usize = PAGE - CLOSE;
    /// How often each way is measured, in turns; the shortest time counts.
    const ROUNDS: u32 = 4;

    /// For destinations whose offset within a page is the source's, and for others that are not close.
    #[derive(Debug)]
    pub(super) struct Faster {
        same: bool,
        apart: bool,
    }

    pub(super) fn library_is_faster(from: *const u8, to: *mut u8, bytes: usize) -> bool {
        if bytes < FROM {
            return false;
        }
        let faster = measured();
        match (to as usize).wrapping_sub(from as usize) % PAGE {
            0 => faster.same,
            CLOSE..=FAR => faster.apart,
            _ => false,
        }
    }

    pub(super) fn measured() -> &'static Faster {
        static FASTER: OnceLock<Faster> = OnceLock::new();
        FASTER.get_or_init(|| {
            let faster = Faster { same: is_faster(0), apart: is_faster(PAGE / 2 + CLOSE) };
            tracing::debug!(?faster, "memcpy within a rank's memory");
            faster
        })
    }

    fn is_faster(offset: usize) -> bool {
        let mut memory = vec![1u8; 2 * MEASURED + 3 * PAGE];
        let begin = memory.as_ptr().align_offset(PAGE);
        let (source, target) = memory[begin..].split_at_mut(MEASURED + PAGE);
        let (from, to) = (source.as_ptr(), target[offset..][..MEASURED].as_mut_ptr());
        let [mut vectors, mut library] = [Duration::MAX; 2];
        for _ in 0..ROUNDS {
            // SAFETY: both hold as many bytes, and are borrowed apart from each other.
            vectors = vectors.min(time(|| unsafe { copy(from, to, MEASURED) }));
            // SAFETY: likewise.
            library = library.min(time(|| unsafe { small(from, to, MEASURED) }));
        }
        library < vectors
    }

    fn time(copy: impl Fn()) -> Duration {
        let began = Instant::now();
        copy();
        began.elapsed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_arrives_at_any_alignment_and_none_beside_it() {
        let source: Vec<u8> = (0..5000u32).map(|i| (i * 7 + 3) as u8).collect();
        for (skip, bytes) in [(0, 5000), (1, 4999), (13, 64), (63, 1), (5, 0), (64, 700), (7, 4096)]
        {
            for copy in [copy, copy_streaming, copy_own] {
                let mut target = vec![0u8; 5000];
                // SAFETY: both vectors hold 5000 bytes and `skip + bytes <= 5000`.
                unsafe { copy(source.as_ptr(), target.as_mut_ptr().wrapping_add(skip), bytes) };
                assert_eq!(target[skip..skip + bytes], source[..bytes]);
                assert!(target[..skip].iter().all(|b| *b == 0));
                assert!(target[skip + bytes..].iter().all(|b| *b == 0));
            }
        }
    }

    #[test]
    fn copies_within_a_ranks_memory_are_right_in_whichever_way() {
        const BYTES: usize = 40_000;
        let source: Vec<u8> = (0..BYTES as u32 + 8192).map(|i| (i * 7 + 3) as u8).collect();
        let mut target = vec![0u8; source.len()];
        let from = source.as_ptr().wrapping_add(source.as_ptr().align_offset(4096));
        for offset in [0, 1, 64, 511, 512, 2048, 3584, 3585, 4095] {
            target.fill(0);
            let begin = target.as_ptr().align_offset(4096) + offset;
            // SAFETY: both begin 8192 bytes at most into their vectors.
            unsafe { copy_own(from, target.as_mut_ptr().wrapping_add(begin), BYTES) };
            // SAFETY: within the source.
            let expected = unsafe { std::slice::from_raw_parts(from, BYTES) };
            assert_eq!(&target[begin..][..BYTES], expected, "offset {offset}");
            assert!(target[..begin].iter().all(|byte| *byte == 0), "before, offset {offset}");
            assert!(
                target[begin + BYTES..].iter().all(|byte| *byte == 0),
                "after, offset {offset}"
            );
        }
    }
}
