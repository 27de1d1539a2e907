//! Operations that checks put on a stream so that the host need not wait: counting bytes that differ, pauses,
//! copies and fills.
//!
//! The two kernels are in PTX, which the driver itself compiles.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::transmute_copy;
use std::ptr::NonNull;
use std::time::Duration;

use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::{Block, Error, Pool, Result, Stream};

use crate::ORDINARY;
use crate::cuda::{ObjectHandle, call, download, driver, upload};

const PTX: &CStr = cr#"
.version 7.0
.target sm_80
.address_size 64

// Adds how many of `bytes` bytes differ to the first word of `found`, and lowers the second to `name`
// if any does.
.visible .entry differences(
    .param .u64 a, .param .u64 b, .param .u64 bytes, .param .u64 found, .param .u64 name)
{
    .reg .pred %p<3>;
    .reg .b16 %h<3>;
    .reg .b32 %r<5>;
    .reg .b64 %d<14>;
    ld.param.u64 %d1, [a];
    ld.param.u64 %d2, [b];
    ld.param.u64 %d3, [bytes];
    ld.param.u64 %d4, [found];
    ld.param.u64 %d5, [name];
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mov.u32 %r4, %nctaid.x;
    mul.wide.u32 %d6, %r1, %r2;
    cvt.u64.u32 %d7, %r3;
    add.u64 %d6, %d6, %d7;
    mul.wide.u32 %d7, %r4, %r2;
    mov.u64 %d8, 0;
NEXT:
    setp.ge.u64 %p1, %d6, %d3;
    @%p1 bra COUNTED;
    add.u64 %d9, %d1, %d6;
    add.u64 %d10, %d2, %d6;
    ld.u8 %h1, [%d9];
    ld.u8 %h2, [%d10];
    setp.ne.u16 %p2, %h1, %h2;
    @%p2 add.u64 %d8, %d8, 1;
    add.u64 %d6, %d6, %d7;
    bra NEXT;
COUNTED:
    setp.eq.u64 %p1, %d8, 0;
    @%p1 bra OUT;
    atom.add.u64 %d11, [%d4], %d8;
    add.u64 %d12, %d4, 8;
    atom.min.u64 %d13, [%d12], %d5;
OUT:
    ret;
}

.visible .entry pause(.param .u64 nanoseconds)
{
    .reg .pred %p<2>;
    .reg .b64 %d<4>;
    ld.param.u64 %d1, [nanoseconds];
    mov.u64 %d2, %globaltimer;
    add.u64 %d1, %d1, %d2;
AGAIN:
    nanosleep.u32 1000;
    mov.u64 %d3, %globaltimer;
    setp.lt.u64 %p1, %d3, %d1;
    @%p1 bra AGAIN;
    ret;
}
"#;

const THREADS: c_uint = 512;
const MAX_BLOCKS: u64 = 264;
/// `CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT`
const CARVEOUT: c_int = 9;
/// The second word while nothing has differed.
const NONE: u64 = u64::MAX;

/// The kernels, loaded on a rank's device, and what they have found.
pub(crate) struct Tools<'a> {
    pool: &'a Pool,
    differences: ObjectHandle,
    pause: ObjectHandle,
    found: Block<u64>,
}

impl<'a> Tools<'a> {
    /// Loads the kernels and runs each once, as loading code later might wait for running kernels.
    pub(crate) fn new(pool: &'a Pool) -> Result<Self> {
        let (mut module, mut differences, mut pause): (ObjectHandle, ObjectHandle, ObjectHandle) =
            (0, 0, 0);
        driver(pool).with_context(|| {
            let text = PTX.as_ptr();
            call!("cuModuleLoadData"(&raw mut module => *mut ObjectHandle, text => *const c_char))?;
            for (function, name) in [(&mut differences, c"differences"), (&mut pause, c"pause")] {
                let name = name.as_ptr();
                call!("cuModuleGetFunction"(
                    &raw mut *function => *mut ObjectHandle, module => ObjectHandle, name => *const c_char))?;
                // The library's kernels have the same preference, so that none keeps another one from starting.
                let (function, all_cache) = (*function, 0);
                call!("cuFuncSetAttribute"(
                    function => ObjectHandle, CARVEOUT => c_int, all_cache => c_int))?;
            }
            Ok(())
        })?;
        // Two words that differ, to run the kernel with.
        let found = pool.lane(ORDINARY)?.alloc::<u64>(4)?;
        let tools = Self { pool, differences, pause, found };
        let stream = crate::cuda::stream(pool)?;
        let at = tools.found.address();
        let words: Vec<u8> = [0, NONE].into_iter().flat_map(u64::to_le_bytes).collect();
        upload(pool, at + 16, &words)?;
        tools.forget()?;
        tools.pause(Duration::ZERO, &stream)?;
        for name in [7, 5] {
            tools.compare(at + 16, at + 16, 16, 1, &stream)?;
            tools.compare(at + 16, at + 24, 8, name, &stream)?;
        }
        let found = tools.take()?;
        if found != (16, Some(5)) {
            return Err(Error::invalid_state(format!("bytes are not compared rightly: {found:?}")));
        }
        Ok(tools)
    }

    /// Counts which of `bytes` bytes differ, on the stream; `name` stands for what wrote them.
    pub(crate) fn compare(
        &self,
        got: u64,
        wanted: u64,
        bytes: usize,
        name: u64,
        stream: &Stream,
    ) -> Result<()> {
        let blocks = (bytes as u64).div_ceil(THREADS.into()).clamp(1, MAX_BLOCKS) as c_uint;
        let words = [got, wanted, bytes as u64, self.found.address(), name];
        self.launch(self.differences, (blocks, THREADS), &words, stream)
    }

    /// Holds the stream up for so long.
    pub(crate) fn pause(&self, time: Duration, stream: &Stream) -> Result<()> {
        self.launch(self.pause, (1, 1), &[time.as_nanos() as u64], stream)
    }

    /// How many bytes differed so far, and the lowest name among what wrote them. Waits for the device.
    pub(crate) fn found(&self) -> Result<(u64, Option<u64>)> {
        driver(self.pool).with_context(|| call!("cuCtxSynchronize"()))?;
        let words = download(self.pool, self.found.address(), 16)?;
        let word = |at: usize| u64::from_le_bytes(words[at..at + 8].try_into().expect("8 bytes"));
        Ok((word(0), Some(word(8)).filter(|name| *name != NONE)))
    }

    /// Returns the result of [`Self::found`], and resets the count.
    pub(crate) fn take(&self) -> Result<(u64, Option<u64>)> {
        let found = self.found()?;
        self.forget()?;
        Ok(found)
    }

    fn forget(&self) -> Result<()> {
        let words: Vec<u8> = [0, NONE].into_iter().flat_map(u64::to_le_bytes).collect();
        upload(self.pool, self.found.address(), &words)
    }

    /// Copies between places of this device, on the stream.
    pub(crate) fn copy(&self, to: u64, from: u64, bytes: usize, stream: &Stream) -> Result<()> {
        let raw = stream.raw() as ObjectHandle;
        driver(self.pool).with_context(|| {
            call!("cuMemcpyDtoDAsync_v2"(
                to => u64, from => u64, bytes => usize, raw => ObjectHandle))
        })
    }

    /// Fills with a byte, on the stream.
    pub(crate) fn fill(&self, at: u64, byte: u8, bytes: usize, stream: &Stream) -> Result<()> {
        let raw = stream.raw() as ObjectHandle;
        driver(self.pool).with_context(
            || call!("cuMemsetD8Async"(at => u64, byte => u8, bytes => usize, raw => ObjectHandle)),
        )
    }

    fn launch(
        &self,
        function: ObjectHandle,
        (blocks, threads): (c_uint, c_uint),
        words: &[u64],
        stream: &Stream,
    ) -> Result<()> {
        let mut pointers: Vec<*const u64> = words.iter().map(std::ptr::from_ref).collect();
        let (parameters, extra) = (pointers.as_mut_ptr(), std::ptr::null_mut());
        let (one, none, raw): (c_uint, c_uint, ObjectHandle) = (1, 0, stream.raw() as ObjectHandle);
        driver(self.pool).with_context(|| {
            call!("cuLaunchKernel"(
                function => ObjectHandle, blocks => c_uint, one => c_uint, one => c_uint,
                threads => c_uint, one => c_uint, one => c_uint, none => c_uint, raw => ObjectHandle,
                parameters => *mut *const u64, extra => *mut *mut c_void))
        })
    }
}
