//! Channels of their own, beside those of a communicator: their signals complete no waits but theirs.

#![allow(unsafe_code)] // channels in memory that a caller gives

use std::time::Duration;

use symmpool_allocator::{Error, Result, Stream};

use super::Communicator;
use crate::host::HostChannels;

/// Channels between all ranks, as many as a communicator has, in memory of the pool. See
/// [`Communicator::channel_set_at`].
#[derive(Debug)]
pub struct ChannelSet {
    address: u64,
    /// On the CPU, the signals that this rank has taken.
    host: Option<HostChannels>,
}

impl ChannelSet {
    /// Channels lie at a multiple of this many bytes.
    pub const ALIGN: u64 = HostChannels::ALIGN;

    /// The bytes of memory that channels between `world` ranks take on each of them. On devices they take less: the four
    /// counts of `kernels/one_sided/one_sided.cu`, of 8 bytes each.
    pub const fn bytes(world: u32) -> usize {
        HostChannels::bytes(world)
    }
}

impl Communicator {
    /// Channels in memory from `address` on, which lies in windows at one offset on all ranks.
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` for memory that is no window, or at no multiple of [`ChannelSet::ALIGN`].
    ///
    /// # Safety
    ///
    /// On every rank, from before any rank can come here until the last operation on the set is over on all of them, there
    /// are [`ChannelSet::bytes`] from `address` on, which were zeros at first and which nothing else writes.
    pub unsafe fn channel_set_at(&self, address: u64) -> Result<ChannelSet> {
        let bytes = ChannelSet::bytes(self.world()) as u64;
        if !address.is_multiple_of(ChannelSet::ALIGN) {
            return Err(Error::invalid_argument(format!(
                "channels at {address:#x}: they lie at a multiple of {}",
                ChannelSet::ALIGN
            )));
        }
        self.remote("channels", address, bytes, self.rank())?;
        let host = self.one_sided.as_ref().map(|host| host.channels_at(address));
        Ok(ChannelSet { address, host })
    }

    /// Signals like [`Self::signal`], on a channel of the set.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::signal`].
    pub fn signal_in(
        &self,
        set: &ChannelSet,
        peer: u32,
        channel: u32,
        stream: &Stream,
    ) -> Result<()> {
        self.check_channel("signal", peer, channel)?;
        match (&self.one_sided, &set.host) {
            (Some(host), Some(channels)) => host.signal(channels, peer, channel),
            _ => self.lock().engine.cuda()?.signal((set.address, peer, channel), *stream),
        }
    }

    /// Waits like [`Self::wait`], on a channel of the set.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::wait`].
    pub fn wait_in(
        &self,
        set: &ChannelSet,
        peer: u32,
        channel: u32,
        timeout: Duration,
        stream: &Stream,
    ) -> Result<()> {
        self.check_channel("wait", peer, channel)?;
        match (&self.one_sided, &set.host) {
            (Some(host), Some(channels)) => host.wait(channels, peer, channel, timeout),
            _ => self.lock().engine.cuda()?.wait((set.address, peer, channel), timeout, *stream),
        }
    }

    /// Makes a barrier like [`Self::barrier_on`], on a channel of the set.
    ///
    /// # Errors
    ///
    /// The errors of [`Self::barrier_on`].
    pub fn barrier_in(
        &self,
        set: &ChannelSet,
        channel: u32,
        timeout: Duration,
        stream: &Stream,
    ) -> Result<()> {
        self.check_channel("a barrier", self.rank(), channel)?;
        if let (Some(host), Some(channels)) = (&self.one_sided, &set.host) {
            return host.barrier(channels, channel, timeout);
        }
        let (rank, world) = (self.rank(), self.world());
        let peers = || (1..world).map(|step| (rank + step) % world);
        peers().try_for_each(|peer| self.signal_in(set, peer, channel, stream))?;
        peers().try_for_each(|peer| self.wait_in(set, peer, channel, timeout, stream))
    }

    /// Lets go of what the engine remembers of a set that is used no more.
    pub fn forget_channel_set(&self, set: &ChannelSet) {
        if set.host.is_none()
            && let Ok(engine) = self.lock().engine.cuda()
        {
            engine.forget_channel_set(set.address);
        }
    }
}
