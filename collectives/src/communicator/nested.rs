//! Communicators of some of a communicator's ranks, for which nobody meets in a store.

#![allow(unsafe_code)] // builds the view of shared memory

use std::sync::Arc;
use std::time::Duration;

use symmpool_allocator::{Error, Group, Pool, Result};

use super::call_lock::ControlMemory;
use super::decision::{Choices, device_names};
use super::engine::AnyEngine;
use super::make::{CommunicatorParts, all_to_all_of, host_options};
use super::peers::still_nested;
use super::{Communicator, CommunicatorOptions};
use crate::host::subgroup_memory::{Arrivals, GroupKey, NestedMemory, Offer};
use crate::{HostEngine, HostEngineOptions};

/// Offer of a rank to the other ranks of a group: that it makes a communicator of them.
///
/// Other ranks find it in shared memory, so nothing is sent. Dropping it leaves it there.
pub struct GroupOffer {
    offer: Offer,
    options: CommunicatorOptions,
}

impl Communicator {
    /// Says to some of this communicator's ranks that this one makes a communicator of them. Does not wait. `ranks` are
    /// their numbers here, in the group's order, this rank's among them; `key` names the group, the same on its ranks, and
    /// never another one of theirs. Options are the same on all of them.
    ///
    /// Returns `None` where this rank makes none so, and must meet the others another way: without
    /// [`CommunicatorOptions::serves_subgroups`], without room, or if one of the others [declines](GroupOffer::decline).
    ///
    /// # Errors
    ///
    /// `is_invalid_argument` for ranks that are none, or twice the same, and for options that make no communicator;
    /// `is_invalid_state` in a forked child.
    pub fn offer(
        &self,
        ranks: &[u32],
        key: GroupKey,
        options: &CommunicatorOptions,
    ) -> Result<Option<GroupOffer>> {
        let Some(subgroup_memory) = &self.subgroup_memory else { return Ok(None) };
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        let are_ranks = sorted.len() == ranks.len()
            && sorted.last().is_some_and(|last| *last < self.world())
            && sorted.binary_search(&self.rank()).is_ok();
        if !are_ranks {
            return Err(Error::invalid_argument(format!(
                "ranks {ranks:?} on rank {} of {}; name some ranks, each once, this one among them",
                self.rank(),
                self.world()
            )));
        }
        let world = ranks.len() as u32;
        options.check(world)?;
        let CommunicatorOptions { timeout, scratch_bytes, .. } = *options;
        let host = HostEngineOptions { timeout, scratch_bytes, ..HostEngineOptions::default() };
        let bytes = HostEngine::control_bytes(world, &host)?;
        let zeroed = HostEngine::zeroed_bytes(world, &host)?;
        let offer = subgroup_memory.offer(ranks.to_vec(), key, (bytes, zeroed))?;
        Ok(offer.map(|offer| GroupOffer { offer, options: options.clone() }))
    }
}

impl GroupOffer {
    /// Looks for the other ranks, for so long at most.
    pub fn wait(&mut self, longest: Duration) -> Arrivals {
        self.offer.wait(longest)
    }

    /// The ranks of the group that were not there yet.
    pub fn missing(&self) -> Vec<u32> {
        self.offer.missing()
    }

    /// Says to the others, for good, that this rank meets them another way.
    pub fn decline(&self) {
        self.offer.decline();
    }

    /// Makes the communicator once [all ranks](Arrivals::All) are there, and the pool that it is on: a [nested](Pool::nested)
    /// one on `group`, which has the same ranks. Talks to nobody. The ranks make a barrier next, which ends by the
    /// communicator's timeout where one of them could not make it; then they call [`Communicator::all_are_here`].
    ///
    /// # Errors
    ///
    /// Those of [`Pool::nested`] and [`Pool::map_room`].
    pub fn accept(self, group: &Group) -> Result<(Pool, Communicator)> {
        let Self { offer, options } = self;
        let (pool, memory) = offer.accept(group)?;
        let made = Communicator::on_nested_memory(&pool, memory, &options)?;
        Ok((pool, made))
    }
}

impl Communicator {
    fn on_nested_memory(
        pool: &Pool,
        memory: Arc<NestedMemory>,
        options: &CommunicatorOptions,
    ) -> Result<Self> {
        let choices = device_names(pool).and_then(|devices| Choices::new(options, &devices))?;
        let options =
            &CommunicatorOptions { all_to_all: all_to_all_of(&choices), ..options.clone() };
        let alive = still_nested(pool, Arc::clone(&memory));
        let engine_options = host_options(pool, options, alive.clone());
        let (offset, bytes) = (memory.offset(), memory.bytes());
        // SAFETY: the memory is mapped in every slot for as long as the pool lives; each rank zeroed its own before any rank
        // knew of it; it is given to nobody else before every rank has let go of it, as `NestedMemory` does behind the
        // engine. Places passed as windows are covered by windows (`place`).
        let engine = unsafe { HostEngine::new(pool.layout(), offset, bytes, engine_options) }?;
        // SAFETY: like the engine, it is not used once the communicator is dropped.
        let one_sided = Some(unsafe { engine.one_sided(Box::new(alive)) });
        let engine = AnyEngine::Host(Box::new(engine));
        let made = CommunicatorParts { engine, control: ControlMemory::Nested(memory), one_sided };
        Ok(Self::of(pool, options, made, choices))
    }

    /// Whether it was made of a [`GroupOffer`].
    pub fn is_nested(&self) -> bool {
        self.shared.is_nested()
    }

    /// Gives back what this rank has said to the others, behind a barrier of a communicator that was made of a
    /// [`GroupOffer`]: all have read it. Does nothing for others.
    pub fn all_are_here(&self) {
        self.shared.take_entry_back();
    }
}
