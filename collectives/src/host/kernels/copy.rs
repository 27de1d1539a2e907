//! Copies: through the caches for data that is read again soon, past them for data that is not.
//!
//! Between ranks, the C library's `memcpy` is used for a few cache lines at most: it may choose string instructions,
//! which are many times slower on some processors if source and destination have nearly the same offset within their
//! pages, as equal offsets of symmetric memory do. On other processors string instructions are up to twice as fast
//! within one rank's memory, because they need not read what they overwrite. The module `own` measures which holds
//! here.

/// Copies of fewer bytes than this take about as long as the call itself, so any copy will do.
const SMALL: usize = 512;
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

/// Copies `bytes` bytes.
///
/// # Safety
///
/// `from` is readable and `to` writable for `bytes`; they do not overlap; nobody else writes `from` or accesses `to`
/// meanwhile.
#[inline]
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    if bytes < SMALL {
        // SAFETY: the caller promised that `from` is readable and `to` writable for `bytes`, apart from each other,
        // and that nobody else interferes.
        unsafe { small(from, to, bytes) }
    } else {
        // SAFETY: the caller promised that `from` is readable and `to` writable for `bytes`, apart from each other,
        // and that nobody else interferes.
        unsafe { large::<false>(from, to, bytes) }
    }
}

/// Copies `bytes` bytes with stores that bypass the caches, where the processor has such. This is for destinations that
/// are larger than the caches, which then need not be read before they are written. Other cores see the whole copy
/// before any later store of this thread.
///
/// # Safety
///
/// You must keep the promises of [`copy`].
pub(crate) unsafe fn copy_streaming(from: *const u8, to: *mut u8, bytes: usize) {
    if bytes < SMALL {
        // SAFETY: the caller promised that `from` is readable and `to` writable for `bytes`, apart from each other,
        // and that nobody else interferes.
        unsafe { small(from, to, bytes) }
    } else {
        // SAFETY: the caller promised that `from` is readable and `to` writable for `bytes`, apart from each other,
        // and that nobody else interferes.
        unsafe { large::<true>(from, to, bytes) }
    }
}

/// Makes the measurement that [`copy_own`] depends on, which takes about 0.1 ms the first time.
pub(crate) fn prepare_to_copy() {
    own::measured();
}

/// Copies like [`copy`], within this rank's memory, in whichever way is faster on this processor.
///
/// # Safety
///
/// You must keep the promises of [`copy`].
pub(crate) unsafe fn copy_own(from: *const u8, to: *mut u8, bytes: usize) {
    if own::library_is_faster(from, to, bytes) {
        // SAFETY: the caller promised that `from` is readable and `to` writable for `bytes`, apart from each other,
        // and that nobody else interferes.
        unsafe { small(from, to, bytes) }
    } else {
        // SAFETY: the caller promised that `from` is readable and `to` writable for `bytes`, apart from each other,
        // and that nobody else interferes.
        unsafe { copy(from, to, bytes) }
    }
}

/// # Safety
///
/// You must keep the promises of [`copy`].
#[inline]
unsafe fn small(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller promised that `from` is readable and `to` writable for `bytes`, apart from each other, and
    // that nobody else interferes.
    unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) }
}

/// # Safety
///
/// You must keep the promises of [`copy`].
#[cfg(not(target_arch = "x86_64"))]
unsafe fn large<const STREAM: bool>(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller promised that `from` is readable and `to` writable for `bytes`, apart from each other, and
    // that nobody else interferes.
    unsafe { small(from, to, bytes) }
}

/// # Safety
///
/// You must keep the promises of [`copy`].
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
        // SAFETY: whole lines within both, the destination's aligned; the processor has AVX.
        unsafe { x86::lines_avx::<STREAM>(source, target, lines) };
    } else {
        // SAFETY: whole lines within both, which the caller promised are apart.
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
                            // SAFETY: within `bytes` of the destination, aligned as `to` is.
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
                    // A later release store does not order streaming stores; this fence does (S3).
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

/// Measures once whether the C library copies faster than the vector loops.
mod own {
    use std::sync::OnceLock;
    use std::time::{Duration, Instant};

    use super::{copy, small};

    const PAGE: usize = 4096;
    /// The bytes of the copy that is measured, which fits into a core's caches.
    const MEASURED: usize = 64 << 10;
    /// The measurement decides for copies of at least this many bytes, which take longer than the call itself.
    const FROM: usize = 16 << 10;
    /// Offsets within a page that differ by less than this are close to each other.
    const CLOSE: usize = 512;
    const FAR: usize = PAGE - CLOSE;
    /// How often each way is measured, in turns; the shortest time counts.
    const ROUNDS: u32 = 4;

    /// Whether the C library is faster for destinations with the source's offset within a page, and for those whose
    /// offset is not close to it.
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
            // SAFETY: both have room for as many bytes, and are separate borrows.
            vectors = vectors.min(time(|| unsafe { copy(from, to, MEASURED) }));
            // SAFETY: both have room for as many bytes, and are separate borrows.
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
    fn every_byte_arrives_at_any_alignment_and_no_other_byte_changes() {
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
