//! Copies and signals between two ranks: one-sided operations as kernels on a stream.

#![allow(unsafe_code)] // launches kernels on raw addresses

use std::time::Duration;

use symmpool_allocator::{Result, Stream};

use crate::cuda::engine::CudaEngine;
use crate::cuda::kernel::mode::OneSidedMode;
use crate::cuda::kernel::spec::{KernelSpec, THREADS};
use crate::cuda::layout::params::{CallParams, ChannelEnd, CommFields};
use crate::signal::channel::CHANNELS;
use crate::types::timeout::nanoseconds;

/// Most blocks that copy: enough to keep a link busy, with SMs left for other kernels.
const COPY_BLOCKS: u64 = 64;

impl CudaEngine {
    /// Copies `bytes` bytes between addresses that this rank has mapped. Then it signals the peer, if a
    /// channel is given.
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
                Some(channel) => self.signal((0, peer, channel), stream),
                None => self.ready(),
            };
        }
        let blocks = bytes.div_ceil(16 * u64::from(THREADS)).min(COPY_BLOCKS) as u32;
        let description = [0, u64::from(channel.unwrap_or(0)), 0, 0];
        let params = CallParams {
            description,
            input: from,
            output: to,
            bytes,
            stride: 0,
            root: peer,
            peer_blocks: 0,
        };
        let signals = channel.map(|number| ChannelEnd { set: 0, sends: true, peer, number });
        let action =
            if signals.is_some() { OneSidedMode::CopyAndSignal } else { OneSidedMode::Copy };
        let comm = self.comm;
        // SAFETY: the caller promised that `from` is readable and `to` writable for `bytes` bytes until the stream is
        // past this, and that they do not overlap. The channel's words are in the control block, which the communicator
        // keeps.
        unsafe { self.launch_one_sided((action, blocks), &comm, &params, signals, stream) }
    }

    /// Signals the peer once the stream has done what was put on it before. The channel is one of the communicator's own,
    /// of set 0, or one of the set at an address.
    pub(crate) fn signal(
        &mut self,
        (set, peer, channel): (u64, u32, u32),
        stream: Stream,
    ) -> Result<()> {
        let (params, comm) = (without_data(peer, channel, 0), self.with_channels(set));
        let end = ChannelEnd { set, sends: true, peer, number: channel };
        // SAFETY: nothing is pointed to but the control block, which the communicator keeps, and the set, which whoever
        // made it promised to keep until the last operation on it is over.
        unsafe {
            self.launch_one_sided((OneSidedMode::Signal, 1), &comm, &params, Some(end), stream)
        }
    }

    /// Makes the stream wait for the peer's next signal.
    pub(crate) fn wait(
        &mut self,
        (set, peer, channel): (u64, u32, u32),
        timeout: Duration,
        stream: Stream,
    ) -> Result<()> {
        let nanoseconds = nanoseconds(timeout);
        let params = without_data(peer, channel, nanoseconds);
        let comm = CommFields { timeout: nanoseconds, ..self.with_channels(set) };
        let end = ChannelEnd { set, sends: false, peer, number: channel };
        // SAFETY: nothing is pointed to but the control block, which the communicator keeps, and the set, which whoever
        // made it promised to keep until the last operation on it is over.
        unsafe { self.launch_one_sided((OneSidedMode::Wait, 1), &comm, &params, Some(end), stream) }
    }

    /// Returns what a kernel is given to find the channels of a set, which lies at the same offset on all ranks.
    fn with_channels(&self, set: u64) -> CommFields {
        let mut comm = self.comm;
        if set != 0 {
            let rank = u64::from(comm.rank);
            let control = comm.base + rank * comm.stride + comm.control;
            comm.places.channels = set.wrapping_sub(control);
        }
        comm
    }

    /// Copies by a copy engine between addresses that this rank has mapped.
    ///
    /// # Safety
    ///
    /// You must keep the promises of [`Self::copy`].
    pub(crate) unsafe fn put_by_copy_engine(
        &mut self,
        (from, to): (u64, u64),
        bytes: u64,
        stream: Stream,
    ) -> Result<()> {
        self.ready()?;
        self.check_stream(stream)?;
        self.begin_outside_calls();
        // SAFETY: the caller promised that `from` is readable and `to` writable for `bytes` bytes until the stream is
        // past this, that they do not overlap, and that nobody else writes the one or touches the other.
        unsafe { self.copy_by_engine(to, from, bytes, stream) }
    }

    /// Signals the peer by memory operations. Where `acknowledged`, once it has taken the last signal, and behind the last
    /// such signal on this channel, whatever stream that is on. Else the caller knows that it has, as in the steps of a
    /// product, which are part of a call.
    pub(crate) fn signal_by_memory(
        &mut self,
        (peer, channel): (u32, u32),
        acknowledged: bool,
        stream: Stream,
    ) -> Result<()> {
        self.ready()?;
        self.check_stream(stream)?;
        self.begin_outside_calls();
        let end = acknowledged.then(|| memory_end(true, peer, channel));
        if let Some(end) = end {
            self.switch_channel_to(end, stream)?;
            self.before_wait(stream)?;
        }
        let timeout = self.comm.timeout;
        self.memory_operations.signal((peer, channel), timeout, acknowledged, stream)?;
        end.map_or(Ok(()), |end| self.after_operation(end, stream))
    }

    /// Makes the stream wait for the peer's next signal by memory operations. With `acknowledge` it takes the signal: the
    /// next such wait on this channel begins when this one has reset its flag, whatever stream that is on.
    pub(crate) fn wait_by_memory(
        &mut self,
        (peer, channel): (u32, u32),
        timeout: Duration,
        acknowledge: bool,
        stream: Stream,
    ) -> Result<()> {
        self.ready()?;
        self.check_stream(stream)?;
        self.begin_outside_calls();
        let end = acknowledge.then(|| memory_end(false, peer, channel));
        if let Some(end) = end {
            self.switch_channel_to(end, stream)?;
        }
        self.before_wait(stream)?;
        let timeout = nanoseconds(timeout);
        self.memory_operations.wait((peer, channel), timeout, acknowledge, stream)?;
        end.map_or(Ok(()), |end| self.after_operation(end, stream))
    }

    /// # Safety
    ///
    /// You must keep the promises of `Kernels::launch`, for what `comm` and `params` point to.
    unsafe fn launch_one_sided(
        &mut self,
        (mode, blocks): (OneSidedMode, u32),
        comm: &CommFields,
        params: &CallParams,
        end: Option<ChannelEnd>,
        stream: Stream,
    ) -> Result<()> {
        self.ready()?;
        self.check_stream(stream)?;
        let comm = CommFields { early: self.begin_outside_calls().into(), ..*comm };
        let spec = KernelSpec::one_sided(mode);
        let kernel = self.kernel(spec)?;
        // Signals and waits on one end of a channel are counted, so they keep the order of the calls.
        if let Some(end) = end {
            self.switch_channel_to(end, stream)?;
        }
        if mode == OneSidedMode::Wait {
            self.before_wait(stream)?;
        }
        let grid = (blocks, spec.threads);
        // SAFETY: the caller promised that what `comm` and `params` point to stays mapped until the kernel has run, and
        // that nothing else touches it. One-sided kernels have no traffic.
        unsafe { self.launch_unordered(kernel, grid, &comm, params, None, stream) }?;
        end.map_or(Ok(()), |end| self.after_operation(end, stream))
    }
}

/// One end of a channel of memory operations. Their numbers come behind those of kernels' channels and of messages.
fn memory_end(sends: bool, peer: u32, channel: u32) -> ChannelEnd {
    ChannelEnd { set: 0, sends, peer, number: CHANNELS + 1 + channel }
}

/// Parameters of a kernel that only signals or waits.
fn without_data(peer: u32, channel: u32, timeout: u64) -> CallParams {
    CallParams {
        description: [timeout, u64::from(channel), 0, 0],
        input: 0,
        output: 0,
        bytes: 0,
        stride: 0,
        root: peer,
        peer_blocks: 0,
    }
}
