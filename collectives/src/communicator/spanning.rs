//! Communicators of ranks on several hosts.

#![allow(unsafe_code)] // hands raw control memory to the engine

use symmpool_allocator::{Block, Error, Pool, Result};

use super::call_lock::ControlMemory;
use super::decision::{Choices, device_names};
use super::engine::AnyEngine;
use super::make::{CommunicatorParts, all_to_all_of, host_options};
use super::peers::still_there;
use super::{Communicator, CommunicatorOptions};
use crate::outer::Outers;
use crate::spanning::{STAGING_BYTES, SpanningEngine, not_across};
use crate::{HostEngine, HostEngineOptions};

impl Communicator {
    /// A communicator of all ranks of a pool that spans [hosts](Pool::hosts): inside each host by shared memory, between hosts
    /// by `outers`. Collective: every rank makes its communicators in the same order; it commits the pool. Where all ranks are
    /// on one host it is as [`with_options`](Self::with_options), and the outer engines are dropped.
    ///
    /// All-reduces, reduce-scatters, all-gathers, broadcasts, all-to-alls and barriers work as on one host. Results have the
    /// same bits on every rank and in every run, but not those of one host: a host's partial results are rounded to the
    /// element type before they are reduced in the order of hosts. So do dispatches to experts and combines. What else needs
    /// peers' memory is refused on every rank by `is_unsupported`.
    ///
    /// All ranks of all hosts agree on every call before its data leaves a host. Different calls, and a call that a rank
    /// declines, are an error on all ranks, and the communicator stays usable. A call that fails later fails it on all of
    /// them: make a new one.
    ///
    /// # Errors
    ///
    /// Those of [`Pool::commit`]; `is_unsupported` on devices; `is_invalid_argument` for outer engines of other ranks.
    pub fn spanning(pool: &Pool, options: &CommunicatorOptions, outers: Outers) -> Result<Self> {
        if pool.hosts().count() == 1 {
            return Self::with_options(pool, options);
        }
        let near = pool.on_host();
        let devices = device_names(pool);
        let choices = devices.and_then(|devices| Choices::new(options, &devices));
        let all_to_all = choices.as_ref().map(all_to_all_of).unwrap_or_default();
        let options = &CommunicatorOptions { all_to_all, links: None, ..options.clone() };
        let valid = choices.as_ref().map(drop).map_err(Clone::clone);
        let valid = valid.and_then(|()| options.check(near.world())).and_then(|()| {
            if pool.driver().host_accessible() {
                return Ok(());
            }
            Err(Error::unsupported(format!(
                "a communicator over hosts on rank {} in memory of the {} driver: only host memory spans hosts yet",
                pool.rank(),
                pool.driver().name()
            )))
        });
        let alive = still_there(&near);
        // Links of devices have no part in host memory, and hosts may differ in them.
        let engine_options =
            HostEngineOptions { links: None, ..host_options(&near, options, alive) };
        // All hosts take as much, so that their lanes stay alike.
        let inside = |world: u32| HostEngine::control_bytes(world, &engine_options);
        let bytes = valid.and_then(|()| inside(pool.hosts().max_ranks()));
        let own = inside(near.world());
        let zeroed = HostEngine::zeroed_bytes(near.world(), &engine_options);
        let staging = bytes.as_ref().map_or(0, |bytes| bytes.next_multiple_of(4096));
        let total = bytes.map(|_| staging + STAGING_BYTES);
        let prepare = |block: &Block<u8>| block.write(&vec![0; zeroed? as usize]);
        let (engine, control) = Self::on_control_block(pool, total, prepare, |control, number| {
            let offset = control.offset();
            // SAFETY: the control block is a window, so mapped in every slot of this host; each rank zeroed its own before the
            // commit, which all have passed; its place is given to nobody else before every rank has let go of it.
            let engine = unsafe { HostEngine::new(pool.layout(), offset, own?, engine_options) }?;
            let engine =
                SpanningEngine::new(pool, Box::new(engine), outers, (offset + staging, number))?;
            Ok(AnyEngine::Spanning(Box::new(engine)))
        })?;
        let made =
            CommunicatorParts { engine, control: ControlMemory::Block(control), one_sided: None };
        Ok(Self::of(pool, options, made, choices?))
    }

    /// The error of what reaches the memory of one host, where ranks are on several.
    #[cold]
    pub(super) fn not_across(&self, what: &str) -> Error {
        not_across(what, self.pool.hosts(), self.rank())
    }
}
