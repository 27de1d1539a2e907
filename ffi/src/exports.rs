//! The exported pairs of functions, one for each slot.
//!
//! torch takes plain function pointers for an allocator, so which pool a call is for can only be
//! told by which function it is. Names are fixed (`symmpool_alloc_7`), so that
//! `torch.cuda.memory.CUDAPluggableAllocator` finds them in the library.

use std::ffi::{c_int, c_void};

use crate::guard::guarded;
use crate::slots;

/// `void *alloc(ssize_t size, int device, cudaStream_t stream)`
pub(crate) type Alloc = extern "C" fn(isize, c_int, *mut c_void) -> *mut c_void;
/// `void free(void *ptr, size_t size, int device, cudaStream_t stream)`
pub(crate) type Free = extern "C" fn(*mut c_void, usize, c_int, *mut c_void);

fn alloc(slot: usize, size: isize, device: c_int, stream: *mut c_void) -> *mut c_void {
    let work = || slots::alloc(slot, size, device, stream as u64).map(|at| at as *mut c_void);
    guarded(work, |_| std::ptr::null_mut())
}

fn free(slot: usize, pointer: *mut c_void) {
    guarded(|| slots::free(slot, pointer as u64), |_| ());
}

macro_rules! exports {
    ($($slot:literal)*) => {
        /// The functions of all slots, in order.
        pub(crate) static FUNCTIONS: [(Alloc, Free); slots::SLOTS] = [$({
            #[unsafe(export_name = concat!("symmpool_alloc_", $slot))]
            extern "C" fn alloc_here(
                size: isize,
                device: c_int,
                stream: *mut c_void,
            ) -> *mut c_void {
                alloc($slot, size, device, stream)
            }
            #[unsafe(export_name = concat!("symmpool_free_", $slot))]
            extern "C" fn free_here(
                pointer: *mut c_void,
                _size: usize,
                _device: c_int,
                _stream: *mut c_void,
            ) {
                free($slot, pointer);
            }
            (alloc_here as Alloc, free_here as Free)
        }),*];
    };
}

exports! {
    0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15
    16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
    32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47
    48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63
}
