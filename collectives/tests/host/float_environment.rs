//! Ranks whose threads have different floating-point environments get the same bits.

use half::{bf16, f16};
use symmpool_collectives::{AllReduceAlgorithm, Element, F8E4m3, F8E5m2, ReduceOp};

use crate::flat_heap::{FlatHeap, TestBuffer, small_scratch};
use crate::oracle::bits;

/// The control register with the rounding mode and the treatment of subnormals.
#[cfg(target_arch = "x86_64")]
mod control {
    use std::arch::asm;

    /// Flushes subnormal results to zero, reads subnormal inputs as zero, rounds up; exceptions stay masked.
    pub(super) const UNUSUAL: u64 = 0x1f80 | 1 << 15 | 1 << 6 | 0b10 << 13;
    /// All bits but the flags of past exceptions.
    pub(super) const SETTINGS: u64 = !0x3f;

    pub(super) fn get() -> u64 {
        let mut value = 0_u32;
        // SAFETY: stores the register in a local of its size.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut value, options(nostack)) };
        value.into()
    }

    pub(super) fn set(value: u64) {
        let value = value as u32;
        // SAFETY: loads the register from a local of its size, with no exception unmasked. The tested code has to cope
        // with this environment.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const value, options(nostack)) };
    }
}

#[cfg(target_arch = "aarch64")]
mod control {
    use std::arch::asm;

    /// Flushes subnormals to zero, also of halves, and rounds up; nothing traps.
    pub(super) const UNUSUAL: u64 = 1 << 24 | 1 << 19 | 0b01 << 22;
    pub(super) const SETTINGS: u64 = !0;

    pub(super) fn get() -> u64 {
        let value;
        // SAFETY: reads a register that every thread may read.
        unsafe { asm!("mrs {}, fpcr", out(reg) value, options(nostack)) };
        value
    }

    pub(super) fn set(value: u64) {
        // SAFETY: writes a register that every thread may write. The tested code has to cope with this environment.
        unsafe { asm!("msr fpcr, {}", in(reg) value, options(nostack)) };
    }
}

/// Runs `body` as every rank, where the thread of rank 1 has an unusual floating-point environment.
fn with_one_unusual_rank<T: Send>(world: u32, body: impl Fn(u32, &FlatHeap) -> T + Sync) -> Vec<T> {
    let heap = FlatHeap::new(world, 1, 1 << 20, &small_scratch());
    heap.ranks(|rank| {
        if rank != 1 {
            return body(rank, &heap);
        }
        let before = control::get();
        control::set(control::UNUSUAL);
        let result = body(rank, &heap);
        let after = control::get();
        control::set(before);
        let (after, expected) = (after & control::SETTINGS, control::UNUSUAL & control::SETTINGS);
        assert_eq!(after, expected, "the caller's settings are restored");
        result
    })
}

/// Checks inputs whose sums, products and averages are subnormal, or have to be rounded.
fn check<T: Element + PartialEq>(value: impl Fn(u32, usize) -> T) {
    const COUNT: usize = 777;
    const WORLD: u32 = 3;
    let algorithms = [AllReduceAlgorithm::OneShot, AllReduceAlgorithm::TwoShot];
    // Inputs are computed here, in the default environment.
    let inputs: Vec<Vec<T>> =
        (0..WORLD).map(|rank| (0..COUNT).map(|at| value(rank, at)).collect()).collect();
    let run = |rank: u32, heap: &FlatHeap| {
        let mut engine = heap.engine(rank, 0, small_scratch());
        let mut results = Vec::new();
        for op in ReduceOp::ALL {
            for algorithm in algorithms {
                for window in [true, false] {
                    let bytes = COUNT * size_of::<T>();
                    let buffer = match window {
                        true => TestBuffer::window(heap, rank, 0, bytes),
                        false => TestBuffer::plain(bytes, 0),
                    };
                    buffer.write(&inputs[rank as usize]);
                    let place = buffer.place;
                    // SAFETY: the buffer holds `COUNT` elements and belongs to this rank.
                    let done =
                        unsafe { engine.all_reduce(place, place, COUNT, T::DTYPE, op, algorithm) };
                    done.unwrap();
                    results.push(buffer.read::<T>(COUNT));
                }
            }
        }
        results
    };
    let usual = {
        let heap = FlatHeap::new(WORLD, 1, 1 << 20, &small_scratch());
        heap.ranks(|rank| run(rank, &heap)).swap_remove(0)
    };
    let zero = T::zeroed();
    assert!(usual[0].iter().all(|sum| *sum != zero), "sums of subnormals are not zero");
    for (rank, results) in with_one_unusual_rank(WORLD, run).iter().enumerate() {
        for (case, (result, expected)) in results.iter().zip(&usual).enumerate() {
            assert!(bits(result) == bits(expected), "rank {rank}, case {case} of {:?}", T::DTYPE);
        }
    }
}

#[test]
fn a_rank_that_flushes_subnormals_and_rounds_up_gets_the_same_bits() {
    // S7
    let odd = |rank: u32, at: usize| 2 * (at as u32 * 31 + rank * 7) + 1;
    check(|rank, at| f32::from_bits(odd(rank, at)));
    check(|rank, at| f64::from_bits(odd(rank, at).into()));
    check(|rank, at| bf16::from_bits(odd(rank, at) as u16 % 0x80));
    check(|rank, at| f16::from_bits(odd(rank, at) as u16 % 0x400));
    check(|rank, at| F8E4m3::from_bits(odd(rank, at) as u8 % 0x08));
    check(|rank, at| F8E5m2::from_bits(odd(rank, at) as u8 % 0x04));
    // Sums that do not fit the mantissa, so that they depend on the rounding mode.
    check(|rank, at| 1.0 + (rank as f32 + 0.3) * 1e-7 * at as f32);
    check(|rank, at| 1.0 + (f64::from(rank) + 0.3) * 1e-16 * at as f64);
}
