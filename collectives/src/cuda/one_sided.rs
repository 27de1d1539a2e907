//! Copies and signals between two ranks: one-sided operations as kernels on a stream.

#![allow(unsafe_code)] // launches kernels on raw addresses

use std::time::Duration;

use symmpool_allocator::{Result, Stream};

use super::engine::CudaEngine;
use super::kernel_spec::{COPIES, FEW_THREADS, SIGNALS, Specialty, WAITS};
use super::params::{CallParams, Channel, Comm};
use super::reductions::THREADS;
use crate::timeout::nanoseconds;

/// What a kernel does.
#[derive(Clone, Copy, Debug)]
enum Does {
    Copy,
    CopyAndSignal,
    Signal,
    Wait,
}

impl Does {
    /// The bits of `SHOTS` in the kernel.
    fn shots(self) -> u8 {
        match self {
            Self::Copy => COPIES,
            Self::CopyAndSignal => COPIES | SIGNALS,
            Self::Signal => SIGNALS,
            Self::Wait => WAITS,
        }
    }

    fn threads(self) -> u32 {
        match self {
            Self::Copy | Self::CopyAndSignal => THREADS,
            Self::Signal | Self::Wait => FEW_THREADS,
        }
    }
}

/// Most blocks that copy: what keeps a link busy, and leaves room beside.
const COPY_BLOCKS: u64 = 64;

impl CudaEngine {
    /// Copies `bytes` bytes between addresses that this rank has mapped, and then, if there is a
    /// channel, signals the peer.
    ///
    /// # Safety
    ///
    /// `from` is readable and `to` writable on the device for `bytes` bytes until the stream is
    /// past it; they do not overlap; nobody else writes the one or touches the other meanwhile.
    pub(crate) unsafe fn copy(
        &mut self,
        (from, to): (u64, u64),
        bytes: u64,
        (peer, channel): (u32, Option<u32>),
        stream: Stream,
    ) -> Result<()> {
        if bytes == 0 {
            return match channel {
                Some(channel) => self.signal(peer, channel, stream),
                None => self.ready(),
            };
        }
        let blocks = bytes.div_ceil(16 * u64::from(THREADS)).min(COPY_BLOCKS) as u32;
        let details = [0, u64::from(channel.unwrap_or(0)), 0, 0];
        let params =
            CallParams { details, input: from, output: to, bytes, stride: 0, root: peer, teams: 0 };
        let signals = channel.map(|number| Channel { sends: true, peer, number });
        let does = if signals.is_some() { Does::CopyAndSignal } else { Does::Copy };
        let comm = self.comm;
        // SAFETY: the caller's promise.
        unsafe { self.put_sided((does, blocks), &comm, &params, signals, stream) }
    }

    /// Signals the peer, after what is on the stream.
    pub(crate) fn signal(&mut self, peer: u32, channel: u32, stream: Stream) -> Result<()> {
        let (params, comm) = (nothing(peer, channel, 0), self.comm);
        let end = Channel { sends: true, peer, number: channel };
        // SAFETY: nothing is pointed to but the control block, which the communicator keeps.
        unsafe { self.put_sided((Does::Signal, 1), &comm, &params, Some(end), stream) }
    }

    /// Has the stream wait for the peer's next signal.
    pub(crate) fn wait(
        &mut self,
        (peer, channel): (u32, u32),
        timeout: Duration,
        stream: Stream,
    ) -> Result<()> {
        let nanoseconds = nanoseconds(timeout);
        let params = nothing(peer, channel, nanoseconds);
        let comm = Comm { timeout: nanoseconds, ..self.comm };
        let end = Channel { sends: false, peer, number: channel };
        // SAFETY: as in `signal`.
        unsafe { self.put_sided((Does::Wait, 1), &comm, &params, Some(end), stream) }
    }

    /// # Safety
    ///
    /// As `Kernels::launch`.
    unsafe fn put_sided(
        &mut self,
        (does, blocks): (Does, u32),
        comm: &Comm,
        params: &CallParams,
        end: Option<Channel>,
        stream: Stream,
    ) -> Result<()> {
        self.ready()?;
        self.expects(stream)?;
        let comm = Comm { early: self.begin_apart().into(), ..*comm };
        let kernel = self.kernel(Specialty::one_sided(does.shots()))?;
        // Only what counts on one end of a channel has an order of its own.
        if let Some(end) = end {
            self.turn_channel_to(end, stream)?;
        }
        if matches!(does, Does::Wait) {
            self.before_a_wait(stream)?;
        }
        let grid = (blocks, does.threads());
        // SAFETY: as the caller promised.
        unsafe { self.launch_apart(kernel, grid, &comm, params, None, stream) }?;
        end.map_or(Ok(()), |end| self.operated(end, stream))
    }
}

/// Parameters of a kernel that copies nothing.
fn nothing(peer: u32, channel: u32, timeout: u64) -> CallParams {
    CallParams {
        details: [timeout, u64::from(channel), 0, 0],
        input: 0,
        output: 0,
        bytes: 0,
        stride: 0,
        root: peer,
        teams: 0,
    }
}
