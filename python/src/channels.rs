//! The class `Channels`: channels of their own, in memory of a pool, for what is made on a communicator.

#![allow(unsafe_code)] // channels in memory of a block

use std::sync::Arc;

use pyo3::prelude::*;
use symmpool_collectives::ChannelSet;

use crate::arguments::{Argument, CommunicatorCalls};
use crate::block::Block;
use crate::communicator::Communicator;
use crate::errors::{OrRaise, invalid};
use crate::fork_guarded::ForkGuarded;
use crate::number::Number;
use crate::stream;

/// Channels between all ranks, as many as a communicator has. Signals on them complete no waits but theirs.
#[pyclass(frozen, module = "symmpool")]
pub(crate) struct Channels {
    set: ForkGuarded<Set>,
    /// Keeps the memory.
    _block: Py<Block>,
}

struct Set {
    calls: Arc<CommunicatorCalls>,
    set: ChannelSet,
}

impl Drop for Set {
    fn drop(&mut self) {
        // Another thread may be in a call of the communicator, which this waits for: without the interpreter's lock, as
        // that thread may need it.
        Python::try_attach(|py| py.detach(|| self.calls.comm.forget_channel_set(&self.set)));
    }
}

#[pymethods]
impl Channels {
    /// Bytes that channels between so many ranks take, and of which their place is a multiple.
    #[staticmethod]
    fn bytes(world: u32) -> (usize, u64) {
        (ChannelSet::bytes(world), ChannelSet::ALIGN)
    }

    /// Channels in a block's memory from byte `begin` on, which lies at the same offset on all ranks, was zeros before any
    /// rank came here, and is written by nothing else.
    #[new]
    fn new(
        py: Python<'_>,
        communicator: &Bound<'_, Communicator>,
        block: Bound<'_, Block>,
        begin: usize,
    ) -> PyResult<Self> {
        let calls = Arc::clone(&communicator.get().calls);
        let held = block.get().count() * block.get().element().size();
        let needed = ChannelSet::bytes(calls.world);
        if begin.checked_add(needed).is_none_or(|end| end > held) {
            let why = format!("channels of {needed} bytes from byte {begin} of a block of {held}");
            return Err(invalid(py, why));
        }
        let address = (block.get().address() + begin) as u64;
        // SAFETY: the block has these bytes, and is kept as long as the set; that all ranks have the same, which was zeros
        // and is written by nothing else, is the documented contract.
        let set = unsafe { calls.comm.channel_set_at(address) }.or_raise(py)?;
        Ok(Self { set: ForkGuarded::new(Set { calls, set }), _block: block.unbind() })
    }

    /// Signals like `Communicator.signal`.
    #[pyo3(signature = (peer, channel, stream = None))]
    fn signal(
        &self,
        py: Python<'_>,
        peer: Number<u32>,
        channel: Number<u32>,
        stream: Option<Argument<'_, '_>>,
    ) -> PyResult<()> {
        let Set { calls, set } = self.set(py)?;
        let (peer, channel) = (peer.or_raise(py, "peer")?, channel.or_raise(py, "channel")?);
        let stream = stream::resolve(py, calls.device, stream)?;
        calls.run(py, || calls.comm.signal_in(set, peer, channel, &stream))
    }

    /// Waits like `Communicator.wait`.
    #[pyo3(signature = (peer, channel, timeout, stream = None))]
    fn wait(
        &self,
        py: Python<'_>,
        peer: Number<u32>,
        channel: Number<u32>,
        timeout: Number<f64>,
        stream: Option<Argument<'_, '_>>,
    ) -> PyResult<()> {
        let Set { calls, set } = self.set(py)?;
        let (peer, channel) = (peer.or_raise(py, "peer")?, channel.or_raise(py, "channel")?);
        let timeout = timeout.seconds(py, "timeout")?;
        let stream = stream::resolve(py, calls.device, stream)?;
        calls.run(py, || calls.comm.wait_in(set, peer, channel, timeout, &stream))
    }

    /// Makes a barrier like `Communicator.barrier_on`.
    #[pyo3(signature = (channel, timeout, stream = None))]
    fn barrier(
        &self,
        py: Python<'_>,
        channel: Number<u32>,
        timeout: Number<f64>,
        stream: Option<Argument<'_, '_>>,
    ) -> PyResult<()> {
        let Set { calls, set } = self.set(py)?;
        let channel = channel.or_raise(py, "channel")?;
        let timeout = timeout.seconds(py, "timeout")?;
        let stream = stream::resolve(py, calls.device, stream)?;
        calls.run(py, || calls.comm.barrier_in(set, channel, timeout, &stream))
    }
}

impl Channels {
    fn set(&self, py: Python<'_>) -> PyResult<&Set> {
        self.set.check("a handle's channels").or_raise(py)?;
        Ok(&self.set)
    }
}
