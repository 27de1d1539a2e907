//! One-sided operations in host memory: signals and copies between two ranks, outside of calls.
//!
//! This is separate from [`HostEngine`], which serves one call at a time: a thread may wait here while another one
//! signals or makes a call. Nothing here takes part in the epoch protocol.

#![allow(unsafe_code)] // copies between ranks' memory, and a view of the control block

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use symmpool_allocator::{Deadline, Error, HeapLayout, ProcessId, Result};

use crate::host::HostEngine;
use crate::host::kernels::copy;
use crate::host::layout::control::{ControlBlock, SLOT};
use crate::host::ops::p2p::PeerMessages;
use crate::host::step::{CallStep, at_step};
use crate::host::wait::fault::Cause;
use crate::host::wait::waiter::{Interrupted, SpinPolicy, WaitWatchdog, Waiter, wake_all};
use crate::signal::channel::{CHANNELS, take};
use crate::signal::wake_sleepers;
use crate::types::timeout::Timeout;

/// Returns whether a rank's process still runs.
type PeerAlive = Box<dyn Fn(u32) -> bool + Send + Sync>;

/// One rank's side of the channels and of the point-to-point messages of a communicator.
pub(crate) struct HostOneSided {
    pub(in crate::host) layout: HeapLayout,
    pub(in crate::host) control: ControlBlock,
    pub(in crate::host) spin_policy: SpinPolicy,
    /// The engine's error: once the communicator has failed, these operations fail too.
    pub(in crate::host) failed: Arc<OnceLock<Error>>,
    maker: ProcessId,
    pub(in crate::host) alive: PeerAlive,
    pub(in crate::host) interrupted: Option<Interrupted>,
    /// The engine's timeout, for messages. A wait on a channel has a timeout of its own.
    pub(in crate::host) timeout: Arc<Timeout>,
    /// Messages to and from each peer.
    pub(in crate::host) messages: Vec<PeerMessages>,
    /// The communicator's own channels, in its control block.
    pub(crate) channels: HostChannels,
}

/// Channels between all ranks, as many as a communicator has: where they lie, and this rank's side of them.
#[derive(Debug)]
pub(crate) struct HostChannels {
    /// From the beginning of the control block on, modulo 2^64: channels of a set lie elsewhere in the heap.
    part: u64,
    /// Counts of signals taken, by source and channel.
    taken: Vec<AtomicU64>,
    /// For each channel, the ranks whose signals barriers that timed out have not taken yet.
    unfinished: [Mutex<Vec<Vec<u32>>>; CHANNELS as usize],
}

impl HostChannels {
    /// Channels lie at a multiple of this many bytes.
    pub(crate) const ALIGN: u64 = SLOT;

    /// The bytes that channels of `world` ranks take in each rank's memory.
    pub(crate) const fn bytes(world: u32) -> usize {
        world as usize * CHANNELS as usize * SLOT as usize
    }

    fn new(part: u64, world: u32) -> Self {
        let pairs = world as usize * CHANNELS as usize;
        Self {
            part,
            taken: (0..pairs).map(|_| AtomicU64::new(0)).collect(),
            unfinished: Default::default(),
        }
    }

    fn unfinished(&self, channel: u32) -> MutexGuard<'_, Vec<Vec<u32>>> {
        self.unfinished[channel as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HostEngine {
    /// This rank's side of the channels and messages.
    ///
    /// # Safety
    ///
    /// The promises made to [`HostEngine::new`] hold until the value is dropped.
    pub(crate) unsafe fn one_sided(&self, alive: PeerAlive) -> HostOneSided {
        HostOneSided {
            layout: self.layout,
            control: self.control,
            spin_policy: self.spin_policy,
            failed: Arc::clone(&self.failed),
            maker: self.maker,
            alive,
            interrupted: self.options.interrupted.clone(),
            timeout: Arc::clone(&self.timeout),
            messages: (0..self.world()).map(|_| PeerMessages::default()).collect(),
            channels: HostChannels::new(self.control.own_channels(), self.world()),
        }
    }
}

impl HostOneSided {
    /// Channels of their own, in this rank's memory from `address` on and at the same offset on all ranks.
    pub(crate) fn channels_at(&self, address: u64) -> HostChannels {
        let part = self.control.part_at(self.layout.rank, address);
        HostChannels::new(part, self.layout.world)
    }

    /// Returns an error after the communicator failed, and in a process that was forked from its own.
    pub(crate) fn ready(&self) -> Result<()> {
        self.maker.check("a communicator")?;
        self.failed.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Copies `bytes` bytes.
    ///
    /// # Safety
    ///
    /// `from` is readable and `to` writable for `bytes`; they do not overlap; nobody else writes `from` or accesses
    /// `to` meanwhile.
    pub(crate) unsafe fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<()> {
        self.ready()?;
        // SAFETY: the caller promised that `from` is readable and `to` writable for `bytes`, apart from each other,
        // and that nobody else interferes.
        unsafe { copy(from as *const u8, to as *mut u8, bytes) };
        Ok(())
    }

    /// Signals `peer`, which sees whatever this thread wrote before. `peer` and `channel` must be in range.
    pub(crate) fn signal(&self, on: &HostChannels, peer: u32, channel: u32) -> Result<()> {
        self.ready()?;
        at_step(CallStep::ChannelSignal);
        let slot = self.control.channel(on.part, (peer, self.layout.rank), channel);
        slot.count_up();
        wake_sleepers(std::iter::once(slot), wake_all);
        Ok(())
    }

    /// Waits for the next signal of `peer`. `peer` and `channel` must be in range.
    pub(crate) fn wait(
        &self,
        on: &HostChannels,
        peer: u32,
        channel: u32,
        timeout: Duration,
    ) -> Result<()> {
        self.ready()?;
        at_step(CallStep::ChannelAwait);
        let slot = self.control.channel(on.part, (self.layout.rank, peer), channel);
        let taken = &on.taken[peer as usize * CHANNELS as usize + channel as usize];
        let mut waiter = Waiter::new(self.spin_policy, self.watchdog(peer, channel, timeout));
        take(slot, taken, &mut waiter).map(|_| ())
    }

    /// Signals every peer, and waits for a signal of each. If it fails, the next barrier on the channel continues it:
    /// this rank's signals are sent, and peers may have taken them, so another round of signals would let peers pass
    /// a barrier that this rank has not reached. `channel` must be in range.
    pub(crate) fn barrier(&self, on: &HostChannels, channel: u32, timeout: Duration) -> Result<()> {
        self.ready()?;
        let (me, world) = (self.layout.rank, self.layout.world);
        let begun = on.unfinished(channel).pop();
        let awaited = match begun {
            Some(awaited) => awaited,
            None => {
                let peers: Vec<u32> = (1..world).map(|step| (me + step) % world).collect();
                peers.iter().try_for_each(|peer| self.signal(on, *peer, channel))?;
                peers
            }
        };
        let deadline = Deadline::after(timeout);
        let (mut late, mut failure) = (Vec::new(), None::<Error>);
        for peer in awaited {
            // The other peers are checked after a failure too, so that the error names only peers that have not
            // signalled.
            let left = if failure.is_none() { deadline.remaining() } else { Duration::ZERO };
            if let Err(error) = self.wait(on, peer, channel, left) {
                late.push(peer);
                failure = failure.or(Some(error).filter(|error| !error.is_timeout()));
            }
        }
        if late.is_empty() {
            return Ok(());
        }
        on.unfinished(channel).push(late.clone());
        Err(failure.unwrap_or_else(|| {
            let what = format!("in a barrier on channel {channel}, on rank {me}");
            Error::timeout(format!("{what}; the next barrier on it continues it"), timeout, late)
        }))
    }

    /// The check that ends a wait without its signal: if the communicator failed, here or on a peer, if the peer's
    /// process has ended, or if the timeout has passed.
    fn watchdog(&self, peer: u32, channel: u32, timeout: Duration) -> impl FnMut() -> Result<()> {
        let mut watchdog = None;
        move || {
            let me = self.layout.rank;
            self.ready()?;
            if let Some(failure) = self.control.reported_fault(&self.layout) {
                return Err(failure.fault.to_error(me, failure.reporter, &[]));
            }
            let watchdog = watchdog.get_or_insert_with(|| WaitWatchdog::new(timeout));
            let alive = (peer != me).then_some(|| (self.alive)(peer));
            watchdog.run(alive, self.interrupted.as_ref()).map_err(|cause| match cause {
                Cause::PeerLost => {
                    let what = format!(
                        "its process ended, or dropped its pool, while rank {me} waited for its \
                         signal on channel {channel}"
                    );
                    Error::peer_lost(vec![peer], what)
                }
                Cause::Interrupted => Error::invalid_state(format!(
                    "rank {me}: interrupted while waiting for a signal of rank {peer} on channel {channel}"
                )),
                Cause::Timeout => {
                    let what = format!("waiting for a signal of rank {peer} on channel {channel}");
                    Error::timeout(format!("{what}, on rank {me}"), timeout, vec![peer])
                }
            })
        }
    }
}

impl fmt::Debug for HostOneSided {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostOneSided").field("layout", &self.layout).finish_non_exhaustive()
    }
}
