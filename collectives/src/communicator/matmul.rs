//! Products of matrices that hide their communication: how such a call begins, and how its data travels.
//!
//! The products themselves are made by whoever calls, who puts them on streams of its own.

#![allow(unsafe_code)] // passes on addresses, about which callers promise

use symmpool_allocator::{Error, Result, Stream};

use super::Communicator;
use super::engine::Engine;
use crate::MatmulShape;
use crate::signal::channel::CHANNELS;

impl Communicator {
    /// How many steps a fused product may have: [`Self::push_step`].
    pub const STEPS: u32 = CHANNELS;

    /// Opens a fused product: returns, or on a device lets `stream` go on, once every rank has opened the same one. What
    /// ranks did before on the streams that they pass has been done then, so a rank may write into memory that its
    /// peers have read before.
    ///
    /// # Errors
    ///
    /// `is_diverged` if ranks pass different shapes; else as all calls.
    pub fn begin_matmul(&self, shape: &MatmulShape, stream: &Stream) -> Result<()> {
        let mut inner = self.begin(stream)?;
        match &mut inner.engine {
            Engine::Host(host) => host.handshake_only(&shape.describe()),
            Engine::Cuda(cuda) => cuda.handshake_only(shape.describe(), *stream),
        }
    }

    /// In an open fused product on a device: copies `bytes` bytes from `src` to where `peer` has what this rank has at
    /// `dst`, by a copy engine, and tells the peer so in a step below [`Self::STEPS`], whose [`Self::await_step`] sees
    /// it. No SM takes part. A step is used once in a product for each pair of ranks.
    ///
    /// # Errors
    ///
    /// As [`Self::put_at`]; `is_unsupported` in host memory.
    ///
    /// # Safety
    ///
    /// As [`Self::put_at`].
    pub unsafe fn push_step(
        &self,
        (dst, src): (*mut u8, *const u8),
        bytes: usize,
        (peer, step): (u32, u32),
        stream: &Stream,
    ) -> Result<()> {
        let channel = self.step("push_step", peer, step)?;
        // SAFETY: the caller's promise.
        unsafe { self.put_by_copy_engine_at(dst, src, bytes, peer, stream) }?;
        self.lock().engine.cuda()?.signal_by_memory((peer, channel), false, *stream)
    }

    /// Tells `peer` in a step of an open fused product that what `stream` did before is done, without data.
    ///
    /// # Errors
    ///
    /// As [`Self::push_step`].
    pub fn signal_step(&self, (peer, step): (u32, u32), stream: &Stream) -> Result<()> {
        let channel = self.step("signal_step", peer, step)?;
        self.lock().engine.cuda()?.signal_by_memory((peer, channel), false, *stream)
    }

    /// Makes `stream` wait until `peer` has come to a step of the open fused product. No SM takes part.
    ///
    /// # Errors
    ///
    /// As [`Self::push_step`]; a peer that does not come within the communicator's timeout is named by
    /// [`Self::synchronize`] or the next call, and the communicator is closed.
    pub fn await_step(&self, (peer, step): (u32, u32), stream: &Stream) -> Result<()> {
        let channel = self.step("await_step", peer, step)?;
        let timeout = self.timeout();
        self.lock().engine.cuda()?.wait_by_memory((peer, channel), timeout, false, *stream)
    }

    /// The channel of a step.
    fn step(&self, what: &str, peer: u32, step: u32) -> Result<u32> {
        self.check_channel(what, peer, 0)?;
        if step < Self::STEPS {
            return Ok(CHANNELS + step);
        }
        Err(Error::invalid_argument(format!(
            "{what} on rank {} for rank {peer}: step {step} of a fused product, of which there are {}",
            self.rank(),
            Self::STEPS
        )))
    }
}
