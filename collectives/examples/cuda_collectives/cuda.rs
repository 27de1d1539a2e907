//! The few functions of the CUDA driver that streams, graphs and timing need.

use std::ffi::{c_int, c_uint, c_void};
use std::mem::transmute_copy;
use std::ptr::NonNull;

use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::{Pool, Result, Stream};

pub(crate) type Handle = usize;

macro_rules! call {
    ($symbol:literal($($argument:expr => $type:ty),*)) => {{
        let address: NonNull<c_void> = CudaDriver::function($symbol)?;
        // SAFETY: the address is that of the driver's function of this name, whose type this is.
        let function = unsafe {
            transmute_copy::<_, unsafe extern "C" fn($($type),*) -> c_uint>(&address)
        };
        // SAFETY: handles are live and pointers valid, as the callers see to.
        let code = unsafe { function($($argument),*) };
        CudaDriver::check(code, || $symbol.to_owned())
    }};
}
pub(crate) use call;

/// The CUDA driver of a pool.
pub(crate) fn driver(pool: &Pool) -> &CudaDriver {
    pool.driver().as_cuda().expect("a pool on a device")
}

/// A stream that does not wait for the default stream.
pub(crate) fn stream(pool: &Pool) -> Result<Stream> {
    let mut handle: Handle = 0;
    let non_blocking: c_uint = 1;
    driver(pool).with_context(
        || call!("cuStreamCreate"(&raw mut handle => *mut Handle, non_blocking => c_uint)),
    )?;
    Ok(Stream::from_raw(handle as u64))
}

/// What a closure puts on a stream, as a graph.
pub(crate) struct Graph(Handle);

impl Graph {
    pub(crate) fn capture(
        pool: &Pool,
        stream: Stream,
        work: impl FnOnce() -> Result<()>,
    ) -> Result<Self> {
        let (mut graph, mut ready): (Handle, Handle) = (0, 0);
        let (global, flags): (c_int, u64) = (0, 0);
        driver(pool).with_context(
            || call!("cuStreamBeginCapture_v2"(stream.raw() as Handle => Handle, global => c_int)),
        )?;
        let worked = work();
        driver(pool).with_context(|| {
            call!("cuStreamEndCapture"(
                stream.raw() as Handle => Handle, &raw mut graph => *mut Handle))
        })?;
        worked?;
        driver(pool).with_context(|| {
            call!("cuGraphInstantiateWithFlags"(
                &raw mut ready => *mut Handle, graph => Handle, flags => u64))?;
            call!("cuGraphDestroy"(graph => Handle))
        })?;
        Ok(Self(ready))
    }

    pub(crate) fn launch(&self, pool: &Pool, stream: Stream) -> Result<()> {
        driver(pool).with_context(
            || call!("cuGraphLaunch"(self.0 => Handle, stream.raw() as Handle => Handle)),
        )
    }

    pub(crate) fn destroy(self, pool: &Pool) -> Result<()> {
        driver(pool).with_context(|| call!("cuGraphExecDestroy"(self.0 => Handle)))
    }
}

/// A pair of events around what is put on a stream.
pub(crate) struct Clock {
    start: Handle,
    end: Handle,
}

impl Clock {
    pub(crate) fn new(pool: &Pool) -> Result<Self> {
        let (mut start, mut end): (Handle, Handle) = (0, 0);
        driver(pool).with_context(|| {
            call!("cuEventCreate"(&raw mut start => *mut Handle, 0 => c_uint))?;
            call!("cuEventCreate"(&raw mut end => *mut Handle, 0 => c_uint))
        })?;
        Ok(Self { start, end })
    }

    /// Microseconds that `work` takes on the stream.
    pub(crate) fn time(
        &self,
        pool: &Pool,
        stream: Stream,
        work: impl FnOnce() -> Result<()>,
    ) -> Result<f64> {
        let raw = stream.raw() as Handle;
        driver(pool)
            .with_context(|| call!("cuEventRecord"(self.start => Handle, raw => Handle)))?;
        work()?;
        driver(pool).with_context(|| {
            call!("cuEventRecord"(self.end => Handle, raw => Handle))?;
            call!("cuEventSynchronize"(self.end => Handle))
        })?;
        let mut milliseconds = 0_f32;
        driver(pool).with_context(|| {
            call!("cuEventElapsedTime"(
                &raw mut milliseconds => *mut f32, self.start => Handle, self.end => Handle))
        })?;
        Ok(f64::from(milliseconds) * 1000.0)
    }
}

/// Copies to the device.
pub(crate) fn upload(pool: &Pool, address: u64, bytes: &[u8]) -> Result<()> {
    // SAFETY: callers pass addresses inside blocks they hold, with room for these bytes, while
    // nothing runs on them.
    unsafe { driver(pool).copy_from_host(address, bytes) }
}

/// Copies from the device.
pub(crate) fn download(pool: &Pool, address: u64, bytes: usize) -> Result<Vec<u8>> {
    let mut target = vec![0; bytes];
    // SAFETY: as in `upload`.
    unsafe { driver(pool).copy_to_host(&mut target, address) }?;
    Ok(target)
}
