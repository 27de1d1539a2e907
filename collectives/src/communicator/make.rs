//! How a communicator is made: control memory that every rank has, and the engine on it.

use std::cell::Cell;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use symmpool_allocator::{Block, CONTROL_LANE, Error, Pool, Result, Stream};

use super::call_lock::{CallLock, ControlMemory};
use super::decision::{Choices, device_names};
use super::engine::AnyEngine;
use super::peers::{self, still_there};
use super::{Communicator, CommunicatorOptions, Inner};
use crate::algorithm::{RequestedName, SCRATCH, StandardCollective};
use crate::cuda::{
    CudaEngine, CudaEngineOptions, Footprint, MEMORY_VARIABLE, ReadyKernels, RequestedMemory,
    as_text, requested_total,
};
use crate::host::HostOneSided;
use crate::host::cores::enough_for;
use crate::host::subgroup_memory::SubgroupMemory;
use crate::{AllReduceAlgorithm, AllToAllAlgorithm, HostEngine, HostEngineOptions};

/// How long a rank that cannot make its communicator waits for the others. Those that are there come in less, and
/// everything is then as after any other commit.
const GRACE: Duration = Duration::from_millis(500);

impl Communicator {
    /// A communicator of all ranks of `pool`, with default options. Collective: every rank makes
    /// its communicators in the same order; it commits the pool.
    ///
    /// # Errors
    ///
    /// Those of [`Pool::commit`]; `is_unsupported` if the CPU cannot reach the pool's memory.
    pub fn new(pool: &Pool) -> Result<Self> {
        Self::with_options(pool, &CommunicatorOptions::default())
    }

    /// [`Self::new`] with options, the same on every rank.
    pub fn with_options(pool: &Pool, options: &CommunicatorOptions) -> Result<Self> {
        if pool.hosts().count() > 1 {
            return Err(Error::unsupported(format!(
                "a communicator of rank {}: the pool's ranks are on {} hosts ({}), and nothing carries data between \
                 them; give an outer engine (Communicator::spanning), or make a group of the ranks of one host",
                pool.rank(),
                pool.hosts().count(),
                pool.hosts()
            )));
        }
        // A wrong name fails in the commit below, so that all ranks get an error.
        let choices = device_names(pool).and_then(|devices| Choices::new(options, &devices));
        let requested = |collective| {
            let requested = choices.as_ref().ok().and_then(|all| all.requested(collective));
            requested.and_then(RequestedName::id).unwrap_or_default()
        };
        let all_reduce = requested(StandardCollective::AllReduce).all_reduce().unwrap_or_default();
        let all_to_all = choices.as_ref().map(all_to_all_of).unwrap_or_default();
        let valid = choices.as_ref().map(drop).map_err(Clone::clone);
        let valid = valid.and_then(|()| options.check(pool.world()));
        let options = &CommunicatorOptions { all_to_all, ..options.clone() };
        if pool.driver().as_cuda().is_some() {
            let requested = valid.map(|()| all_reduce);
            let (engine, control) = Self::on_device(pool, options, &requested)?;
            let made = CommunicatorParts {
                engine,
                control: ControlMemory::Block(control),
                one_sided: None,
            };
            return Ok(Self::of(pool, options, made, choices?));
        }
        let (made, subgroup_memory) = Self::in_host_memory(pool, options, valid)?;
        Ok(Self { subgroup_memory, ..Self::of(pool, options, made, choices?) })
    }

    /// Makes a communicator of the parts that were made.
    pub(super) fn of(
        pool: &Pool,
        options: &CommunicatorOptions,
        made: CommunicatorParts,
        choices: Choices,
    ) -> Self {
        let CommunicatorParts { engine, control, one_sided } = made;
        let windows = pool.windows();
        Self {
            pool: pool.clone(),
            timeout: Arc::clone(engine.timeout()),
            memory: Mutex::new(engine.memory(control.bytes())),
            shortage: AtomicBool::new(false),
            registry: super::registry::Registry::new(engine.built_in()),
            mesh: options.links.as_ref().unwrap_or(pool.topology()).kind(),
            shared: Arc::new(CallLock::new(Inner { engine, choices, windows }, control)),
            one_sided,
            subgroup_memory: None,
        }
    }

    /// Declines to make a communicator. You must call this in place of making one if you have found your own options wrong:
    /// the other ranks then get an error from the commit that makes theirs. Returns `why`, and does not wait for the other
    /// ranks: a background thread does, in front of this rank's next commit.
    #[cold]
    pub fn decline_new(pool: &Pool, why: Error) -> Error {
        if let Ok(lane) = pool.lane(CONTROL_LANE) {
            lane.note_failure(&why);
            pool.commit_in_background(GRACE);
        }
        why
    }

    fn in_host_memory(
        pool: &Pool,
        options: &CommunicatorOptions,
        valid: Result<()>,
    ) -> Result<(CommunicatorParts, Option<Arc<SubgroupMemory>>)> {
        let driver = pool.driver();
        if !driver.host_accessible() {
            return Err(Error::unsupported(format!(
                "a communicator over memory of the {} driver: collectives run in host memory and \
                 on CUDA devices",
                driver.name()
            )));
        }
        let alive = still_there(pool);
        let engine_options = host_options(pool, options, alive.clone());
        let bytes = valid.and_then(|()| HostEngine::control_bytes(pool.world(), &engine_options));
        let zeroed = HostEngine::zeroed_bytes(pool.world(), &engine_options);
        let (mut one_sided, mut subgroup_memory) = (None, None);
        let prepare = |block: &Block<u8>| {
            if options.serves_subgroups && pool.world() > 1 {
                subgroup_memory = Some(SubgroupMemory::allocate(&pool.lane(CONTROL_LANE)?)?);
            }
            block.write(&vec![0; zeroed? as usize])
        };
        let (engine, control) = Self::on_control_block(pool, bytes, prepare, |control, _| {
            let (offset, bytes) = (control.offset(), control.bytes());
            // SAFETY: the control block is a window, so mapped in every slot; each rank zeroed its
            // own before the commit, which all have passed; its place is given to nobody else
            // before every rank has let go of it (an unordered free, see `drop`). Places passed as
            // windows are covered by windows (`place`).
            let engine = unsafe { HostEngine::new(pool.layout(), offset, bytes, engine_options) }?;
            // SAFETY: like the engine, it is not used once the communicator is dropped.
            one_sided = Some(unsafe { engine.one_sided(Box::new(alive)) });
            Ok(AnyEngine::Host(Box::new(engine)))
        })?;
        let made = CommunicatorParts { engine, control: ControlMemory::Block(control), one_sided };
        Ok((made, subgroup_memory.map(|block| SubgroupMemory::new(pool, block))))
    }

    fn on_device(
        pool: &Pool,
        options: &CommunicatorOptions,
        requested: &Result<AllReduceAlgorithm>,
    ) -> Result<(AnyEngine, Block<u8>)> {
        let (options, bytes) = Self::device_options(pool, pool.world(), options, requested);
        Self::on_device_block(pool, pool, bytes, &options, |engine, _, _| {
            Ok(AnyEngine::Cuda(Box::new(engine)))
        })
    }

    /// [`Self::on_control_block`] on a device: `build` is given the engine of the ranks of `near`, the pool itself or as the ranks
    /// of one host see it, the block's place in a slot, and the number of the commit.
    pub(super) fn on_device_block(
        pool: &Pool,
        near: &Pool,
        bytes: Result<u64>,
        options: &CudaEngineOptions,
        build: impl FnOnce(CudaEngine, u64, u64) -> Result<AnyEngine>,
    ) -> Result<(AnyEngine, Block<u8>)> {
        let ready: Cell<Option<ReadyKernels>> = Cell::new(None);
        let prepare = |block: &Block<u8>| {
            ready.set(Some(CudaEngine::prepare(near, block, options)?));
            Ok(())
        };
        let alive = Box::new(still_there(near));
        Self::on_control_block(pool, bytes, prepare, |control, number| {
            let ready = ready.take().ok_or_else(|| Error::invalid_state("nothing was prepared"))?;
            let offset = control.offset();
            build(CudaEngine::new(near, offset, options, ready, alive, number)?, offset, number)
        })
    }

    /// How the engine of a communicator of `world` ranks on a device behaves, and bytes of its control block. Where these are an
    /// error, no engine is made with these options.
    pub(super) fn device_options(
        pool: &Pool,
        world: u32,
        options: &CommunicatorOptions,
        requested: &Result<AllReduceAlgorithm>,
    ) -> (CudaEngineOptions, Result<u64>) {
        let footprint =
            requested.as_ref().map_err(Clone::clone).and_then(|_| footprint(pool, world, options));
        let options = CudaEngineOptions {
            requested: requested.clone().unwrap_or_default(),
            timeout: options.timeout,
            footprint: footprint.as_ref().map_or(Footprint::NONE, |(footprint, _)| *footprint),
            grown: footprint.as_ref().ok().and_then(|(_, grown)| *grown),
            first_epoch: options.first_epoch,
            all_to_all: options.all_to_all,
            budget: options.budget(),
            links: options.links.as_ref().unwrap_or(pool.topology()).clone(),
        };
        let bytes = footprint.and_then(|_| CudaEngine::control_bytes(world, &options));
        (options, bytes)
    }

    /// Allocates and prepares a control block of `bytes` bytes, commits it, and builds the engine on it, which is given the
    /// number of that commit.
    pub(super) fn on_control_block(
        pool: &Pool,
        bytes: Result<u64>,
        prepare: impl FnOnce(&Block<u8>) -> Result<()>,
        build: impl FnOnce(&Block<u8>, u64) -> Result<AnyEngine>,
    ) -> Result<(AnyEngine, Block<u8>)> {
        // Preparing writes to memory that a forked child shares with its parent.
        pool.check_process()?;
        let lane = pool.lane(CONTROL_LANE)?;
        let control = bytes.and_then(|bytes| {
            let block = lane.alloc_bytes(bytes as usize, 4096, Stream::DEFAULT)?;
            prepare(&block)?;
            Ok(block)
        });
        let control = match control {
            Ok(control) => control,
            Err(error) => {
                // A rank without a block commits too: the other ranks wait in this commit, and get an error there.
                lane.note_failure(&error);
                pool.commit_in_background(GRACE);
                return Err(error);
            }
        };
        let number = pool.commit()?.number;
        match build(&control, number) {
            Ok(engine) => Ok((engine, control)),
            Err(error) => {
                // An unordered free, as other ranks may keep their blocks.
                control.free_unordered()?;
                Err(error)
            }
        }
    }
}

/// The parts of a communicator that was made.
pub(super) struct CommunicatorParts {
    pub(super) engine: AnyEngine,
    pub(super) control: ControlMemory,
    pub(super) one_sided: Option<HostOneSided>,
}

/// The algorithm of all-to-alls that is requested.
pub(super) fn all_to_all_of(choices: &Choices) -> AllToAllAlgorithm {
    let requested = choices.requested(StandardCollective::AllToAll);
    match requested.and_then(RequestedName::id).unwrap_or_default() {
        // In host memory that is what `lamport` stands for.
        SCRATCH => AllToAllAlgorithm::Lamport,
        id => id.all_to_all().unwrap_or_default(),
    }
}

/// How the engine of a communicator in host memory behaves.
pub(super) fn host_options(
    pool: &Pool,
    options: &CommunicatorOptions,
    alive: impl Fn(u32) -> bool + Send + 'static,
) -> HostEngineOptions {
    HostEngineOptions {
        timeout: options.timeout,
        scratch_bytes: options.scratch_bytes,
        spin: Some(enough_for(&peers::pids(pool))),
        links: Some(options.links.as_ref().unwrap_or(pool.topology()).clone()),
        first_epoch: u64::from(options.first_epoch),
        peer_alive: Some(Box::new(alive)),
        interrupted: pool.interrupt(),
        all_to_all: options.all_to_all,
    }
}

/// The sizes of the parts of a communicator's memory on a device, and those that it may grow to. The same on every rank, as
/// options and the environment are.
fn footprint(
    pool: &Pool,
    world: u32,
    options: &CommunicatorOptions,
) -> Result<(Footprint, Option<Footprint>)> {
    let total = match options.device_memory_bytes {
        Some(bytes) => Some(bytes),
        None => {
            // No communicator of this pool has taken memory of its lane yet.
            let first_of_pool = pool.lane(CONTROL_LANE)?.stats()?.allocs == 0;
            let first = pool.is_first_on_device() && first_of_pool;
            let value = std::env::var_os(MEMORY_VARIABLE);
            requested_total(as_text(value.as_deref())?, first)?
        }
    };
    let (inbox, scratch) = (options.device_inbox_bytes, options.device_scratch_bytes);
    let requested = RequestedMemory { total, inbox, scratch };
    let full = Footprint::new(world, requested)?;
    // Where anything says how much it is, it is that from the beginning.
    let grows = options.device_memory_grows && requested == RequestedMemory::default();
    if grows && world > 1 {
        return Ok((Footprint::at_first(world), Some(full)));
    }
    Ok((full, None))
}
