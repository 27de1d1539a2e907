//! The few functions of the CUDA driver that streams, graphs and timing need.

use std::ffi::{c_int, c_uint, c_void};
use std::mem::transmute_copy;
use std::ptr::NonNull;

use symmpool_allocator::driver::CudaDriver;
use symmpool_allocator::{Pool, Result, Stream};

pub(crate) type ObjectHandle = usize;

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
    let mut handle: ObjectHandle = 0;
    let non_blocking: c_uint = 1;
    driver(pool).with_context(
        || call!("cuStreamCreate"(&raw mut handle => *mut ObjectHandle, non_blocking => c_uint)),
    )?;
    // SAFETY: the stream was just made; `destroy` is called when nothing uses it any more.
    Ok(unsafe { Stream::from_raw(handle as u64) })
}

/// Destroys a stream that nothing uses any more. Work on it still runs to its end.
pub(crate) fn destroy(pool: &Pool, stream: Stream) -> Result<()> {
    driver(pool)
        .with_context(|| call!("cuStreamDestroy_v2"(stream.raw() as ObjectHandle => ObjectHandle)))
}

/// The work that a closure puts on a stream, as a graph.
pub(crate) struct CallGraph(ObjectHandle);

impl CallGraph {
    pub(crate) fn capture(
        pool: &Pool,
        stream: Stream,
        work: impl FnOnce() -> Result<()>,
    ) -> Result<Self> {
        const GLOBAL: c_int = 0;
        Self::capture_in_mode(pool, stream, GLOBAL, work)
    }

    /// Captures like [`capture`](Self::capture), while other threads may do what a capture forbids its own thread.
    pub(crate) fn capture_of_thread(
        pool: &Pool,
        stream: Stream,
        work: impl FnOnce() -> Result<()>,
    ) -> Result<Self> {
        const THREAD_LOCAL: c_int = 1;
        Self::capture_in_mode(pool, stream, THREAD_LOCAL, work)
    }

    fn capture_in_mode(
        pool: &Pool,
        stream: Stream,
        mode: c_int,
        work: impl FnOnce() -> Result<()>,
    ) -> Result<Self> {
        let (mut graph, mut ready): (ObjectHandle, ObjectHandle) = (0, 0);
        let flags = 0u64;
        driver(pool).with_context(
            || call!("cuStreamBeginCapture_v2"(stream.raw() as ObjectHandle => ObjectHandle, mode => c_int)),
        )?;
        let worked = work();
        let ended = driver(pool).with_context(|| {
            call!("cuStreamEndCapture"(
                stream.raw() as ObjectHandle => ObjectHandle, &raw mut graph => *mut ObjectHandle))
        });
        // A call that fails ends the capture in an error that says less.
        worked?;
        ended?;
        driver(pool).with_context(|| {
            call!("cuGraphInstantiateWithFlags"(
                &raw mut ready => *mut ObjectHandle, graph => ObjectHandle, flags => u64))?;
            call!("cuGraphDestroy"(graph => ObjectHandle))
        })?;
        Ok(Self(ready))
    }

    pub(crate) fn launch(&self, pool: &Pool, stream: Stream) -> Result<()> {
        driver(pool).with_context(
            || call!("cuGraphLaunch"(self.0 => ObjectHandle, stream.raw() as ObjectHandle => ObjectHandle)),
        )
    }

    pub(crate) fn destroy(self, pool: &Pool) -> Result<()> {
        driver(pool).with_context(|| call!("cuGraphExecDestroy"(self.0 => ObjectHandle)))
    }
}

/// Events for timing work on a stream.
pub(crate) struct StreamTimer(Vec<ObjectHandle>);

impl StreamTimer {
    /// For up to so many laps.
    pub(crate) fn new(pool: &Pool, laps: usize) -> Result<Self> {
        let mut events = vec![0; laps + 1];
        driver(pool).with_context(|| {
            events.iter_mut().try_for_each(
                |event| call!("cuEventCreate"(event => *mut ObjectHandle, 0 => c_uint)),
            )
        })?;
        Ok(Self(events))
    }

    /// Microseconds that `work` takes on the stream.
    pub(crate) fn time(
        &self,
        pool: &Pool,
        stream: Stream,
        work: impl FnMut() -> Result<()>,
    ) -> Result<f64> {
        Ok(self.laps(pool, stream, 1, work)?[0])
    }

    /// Microseconds of each of so many rounds of `work`, which follow each other without a pause.
    pub(crate) fn laps(
        &self,
        pool: &Pool,
        stream: Stream,
        count: usize,
        mut work: impl FnMut() -> Result<()>,
    ) -> Result<Vec<f64>> {
        let (raw, events) = (stream.raw() as ObjectHandle, &self.0[..=count]);
        let record = |event: ObjectHandle| {
            driver(pool)
                .with_context(|| call!("cuEventRecord"(event => ObjectHandle, raw => ObjectHandle)))
        };
        record(events[0])?;
        for &event in &events[1..] {
            work()?;
            record(event)?;
        }
        driver(pool).with_context(|| {
            call!("cuEventSynchronize"(events[count] => ObjectHandle))?;
            let spans = events.windows(2).map(|pair| {
                let (mut milliseconds, start, end) = (0_f32, pair[0], pair[1]);
                call!("cuEventElapsedTime"(
                    &raw mut milliseconds => *mut f32, start => ObjectHandle, end => ObjectHandle))?;
                Ok(f64::from(milliseconds) * 1000.0)
            });
            spans.collect()
        })
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
    // SAFETY: callers pass addresses inside blocks they hold, with room for these bytes, while nothing runs on them.
    unsafe { driver(pool).copy_to_host(&mut target, address) }?;
    Ok(target)
}
