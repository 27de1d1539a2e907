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
use crate::spanning::{SpanningEngine, not_across, staging_bytes};
use crate::{AllReduceAlgorithm, HostEngine, HostEngineOptions};

impl Communicator {
    /// A communicator of all ranks of a pool that spans [hosts](Pool::hosts): inside each host by shared memory or on devices,
    /// between hosts by `outers`, which move memory of the pool's kind. Collective: every rank makes its communicators in the
    /// same order; it commits the pool. Where all ranks are on one host it is as [`with_options`](Self::with_options), and the outer engines are dropped.
    ///
    /// All-reduces, reduce-scatters, all-gathers, broadcasts, all-to-alls and barriers work as on one host. Results have the
    /// same bits on every rank and in every run, but not those of one host: a host's partial results are rounded to the
    /// element type before they are reduced in the order of hosts. So do dispatches to experts and combines. What else needs
    /// peers' memory is refused on every rank by `is_unsupported`.
    ///
    /// On devices calls are work on their streams, and cannot be captured. The ranks compare them behind their backs, so that an
    /// error comes with the next call or [`synchronize`](Self::synchronize), and any error ends the communicator on all ranks.
    /// Dispatches to experts, combines, and all-to-alls whose splits are in device memory are refused there.
    ///
    /// In host memory all ranks of all hosts agree on every call before its data leaves a host. Different calls, and a call that
    /// a rank declines, are an error on all ranks, and the communicator stays usable. A call that fails later fails it on all of
    /// them: make a new one.
    ///
    /// # Errors
    ///
    /// Those of [`Pool::commit`]; `is_invalid_argument` for outer engines of other ranks.
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
        let valid = valid.and_then(|()| options.check(near.world()));
        let is_on_device = pool.driver().as_cuda().is_some();
        let (engine, control) = if is_on_device {
            Self::spanning_on_device(pool, &near, options, valid, outers)?
        } else {
            Self::spanning_in_host_memory(pool, &near, options, valid, outers)?
        };
        let made =
            CommunicatorParts { engine, control: ControlMemory::Block(control), one_sided: None };
        Ok(Self::of(pool, options, made, choices?))
    }

    fn spanning_in_host_memory(
        pool: &Pool,
        near: &Pool,
        options: &CommunicatorOptions,
        valid: Result<()>,
        outers: Outers,
    ) -> Result<(AnyEngine, Block<u8>)> {
        let valid = valid.and_then(|()| {
            if pool.driver().host_accessible() {
                return Ok(());
            }
            Err(Error::unsupported(format!(
                "a communicator over hosts on rank {} in memory of the {} driver: calls run in host memory and on CUDA \
                 devices",
                pool.rank(),
                pool.driver().name()
            )))
        });
        let alive = still_there(near);
        // Links of devices have no part in host memory, and hosts may differ in them.
        let engine_options =
            HostEngineOptions { links: None, ..host_options(near, options, alive) };
        // All hosts take as much, so that their lanes stay alike.
        let inside = |world: u32| HostEngine::control_bytes(world, &engine_options);
        let bytes = valid.and_then(|()| inside(pool.hosts().max_ranks()));
        let own = inside(near.world());
        let zeroed = HostEngine::zeroed_bytes(near.world(), &engine_options);
        let staging = bytes.as_ref().map_or(0, |bytes| bytes.next_multiple_of(4096));
        let total = bytes.map(|_| staging + staging_bytes(false, pool.world()));
        let prepare = |block: &Block<u8>| block.write(&vec![0; zeroed? as usize]);
        Self::on_control_block(pool, total, prepare, |control, number| {
            let offset = control.offset();
            // SAFETY: the control block is a window, so mapped in every slot of this host; each rank zeroed its own before the
            // commit, which all have passed; its place is given to nobody else before every rank has let go of it.
            let engine = unsafe { HostEngine::new(pool.layout(), offset, own?, engine_options) }?;
            let engine = SpanningEngine::new(
                pool,
                Box::new(engine),
                outers,
                (offset + staging, number),
                None,
            )?;
            Ok(AnyEngine::Spanning(Box::new(engine)))
        })
    }

    fn spanning_on_device(
        pool: &Pool,
        near: &Pool,
        options: &CommunicatorOptions,
        valid: Result<()>,
        outers: Outers,
    ) -> Result<(AnyEngine, Block<u8>)> {
        // A first large call would have to grow on all hosts at once.
        let options = CommunicatorOptions { device_memory_grows: false, ..options.clone() };
        let requested = valid.map(|()| AllReduceAlgorithm::Auto);
        let of = |world| Self::device_options(near, world, &options, &requested);
        let (engine_options, _) = of(near.world());
        // All hosts take as much, so that their lanes stay alike.
        let bytes: Result<Vec<u64>> =
            (1..=pool.hosts().max_ranks()).map(|world| of(world).1).collect();
        let bytes = bytes.map(|all| all.into_iter().max().unwrap_or(0));
        let staging = bytes.as_ref().map_or(0, |bytes| bytes.next_multiple_of(4096));
        let total = bytes.map(|_| staging + staging_bytes(true, pool.world()));
        Self::on_device_block(pool, near, total, &engine_options, |engine, offset, number| {
            let engine = SpanningEngine::new(
                pool,
                Box::new(engine),
                outers,
                (offset + staging, number),
                options.sm_budget,
            )?;
            Ok(AnyEngine::Spanning(Box::new(engine)))
        })
    }

    /// The error of what reaches the memory of one host, where ranks are on several.
    #[cold]
    pub(super) fn not_across(&self, what: &str) -> Error {
        not_across(what, self.pool.hosts(), self.rank())
    }
}
