//! How an engine keeps its calls in order when they change streams.

use symmpool_allocator::{Pool, Result, Stream};

use super::CudaEngine;
use super::stream_order::CudaEvents;
use crate::cuda::driver::api::{Api, cuda};
use crate::cuda::kernel::loaded_kernel::LoadedKernel;
use crate::cuda::layout::params::ChannelEnd;

/// Returns what the order of calls needs of the device.
fn events<'a>(api: &'a Api, pool: &'a Pool) -> Result<CudaEvents<'a>> {
    Ok(CudaEvents { api, driver: cuda(pool.driver())? })
}

impl CudaEngine {
    /// Puts all that comes on the stream from now on behind this communicator's last call on another one.
    pub(in super::super) fn switch_to(&mut self, stream: Stream) -> Result<()> {
        if self.is_rehearsing() {
            return self.check_stream(stream);
        }
        self.order.switch_to(&events(self.api, &self.pool)?, stream)
    }

    /// Moves the end of the last call behind all that the stream was given so far.
    pub(crate) fn extend_order(&mut self, stream: Stream) -> Result<()> {
        self.maker.check("a communicator")?;
        self.order.extend(&events(self.api, &self.pool)?, stream)
    }

    /// Puts all that comes on the stream from now on behind the last operation on this end of a channel.
    pub(in super::super) fn switch_channel_to(
        &mut self,
        end: ChannelEnd,
        stream: Stream,
    ) -> Result<()> {
        let events = events(self.api, &self.pool)?;
        self.channels.entry(end).or_default().switch_to(&events, stream)
    }

    /// Whether the last call is on a stream that is captured, so that no call outside of it can come behind it yet.
    pub(super) fn order_is_captured(&self) -> bool {
        events(self.api, &self.pool).is_ok_and(|events| self.order.is_captured(&events))
    }

    /// Whether the last operation on this end of a channel is on a stream that is captured.
    pub(super) fn channel_is_captured(&self, end: ChannelEnd) -> bool {
        let Some(order) = self.channels.get(&end) else { return false };
        events(self.api, &self.pool).is_ok_and(|events| order.is_captured(&events))
    }

    /// Notes that a call's last kernel so far was put on the stream. You must call this then.
    pub(super) fn after_call(&mut self, kernel: LoadedKernel, stream: Stream) -> Result<()> {
        let concurrent = kernel.budget.concurrent;
        self.order.after_call(&events(self.api, &self.pool)?, stream, concurrent)
    }

    /// Notes that an operation on one end of a channel was put on the stream. You must call this then.
    pub(in super::super) fn after_operation(
        &mut self,
        end: ChannelEnd,
        stream: Stream,
    ) -> Result<()> {
        let events = events(self.api, &self.pool)?;
        self.channels.entry(end).or_default().after_operation(&events, stream)
    }

    /// Lets go of the order of operations on a set of channels, by its address.
    pub(crate) fn forget_channel_set(&mut self, set: u64) {
        let Ok(driver) = cuda(self.pool.driver()) else { return };
        let (api, channels) = (self.api, &mut self.channels);
        // Events that cannot be destroyed now are lost; the driver takes them away with the context.
        let _ = driver.with_context(|| {
            channels
                .iter_mut()
                .filter(|(end, _)| end.set == set)
                .for_each(|(_, order)| order.end(api));
            Ok(())
        });
        channels.retain(|end, _| end.set != set);
    }

    /// Records the end of the last call, if need be. You must call this before you put a wait for a peer, outside calls, on the
    /// stream.
    pub(in super::super) fn before_wait(&mut self, stream: Stream) -> Result<()> {
        self.order.before_wait(&events(self.api, &self.pool)?, stream)
    }

    /// Does not touch the stream again unless a call names it. The stream still lives, and what was put on it
    /// keeps its place in the order.
    pub(crate) fn forget_stream(&mut self, stream: Stream) -> Result<()> {
        self.maker.check("a communicator")?;
        let events = events(self.api, &self.pool)?;
        events.driver.stream_handle(stream)?;
        let mut orders = std::iter::once(&mut self.order).chain(self.channels.values_mut());
        orders.try_for_each(|order| order.forget(&events, stream))
    }

    /// Records one of the engine's events, by number, behind what is on the stream.
    pub(in super::super) fn record(&mut self, number: usize, stream: Stream) -> Result<()> {
        if self.is_rehearsing() {
            return Ok(());
        }
        self.events.record(self.api, cuda(self.pool.driver())?, number, stream)
    }

    /// Puts all that comes on the stream from now on behind what an event was recorded behind.
    pub(in super::super) fn wait_for(&self, number: usize, stream: Stream) -> Result<()> {
        if self.is_rehearsing() {
            return Ok(());
        }
        self.events.wait(self.api, cuda(self.pool.driver())?, number, stream)
    }

    /// Refuses a stream that is none of a device.
    pub(in super::super) fn check_stream(&self, stream: Stream) -> Result<()> {
        cuda(self.pool.driver())?.stream_handle(stream).map(drop)
    }

    /// Makes a stream wait for what another one has been given within a call, in graphs too.
    pub(in super::super) fn fork(&mut self, from: Stream, to: Stream) -> Result<()> {
        if self.is_rehearsing() {
            return Ok(());
        }
        self.events.fork(self.api, cuda(self.pool.driver())?, from, to)
    }
}
