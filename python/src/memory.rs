//! A block that Python objects hold, and what DLPack consumers keep alive.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use symmpool_allocator::{Pool, Result, Stream};

use crate::convert::MemoryDevice;
use crate::fork_guarded::ForkGuarded;

/// A block that is freed without order when its last holder is gone: holders are garbage of a
/// language whose order of collection differs between ranks (rule D5).
pub(crate) struct UnorderedBlock {
    /// `None` only while dropping.
    block: Option<ForkGuarded<symmpool_allocator::Block<u8>>>,
    /// Whether kernels of any stream may use the block still when its last holder is gone.
    outlived: bool,
    pub(crate) pool: ForkGuarded<Pool>,
    pub(crate) device: MemoryDevice,
    pub(crate) stream: Stream,
    /// The first byte's.
    address: u64,
}

/// Memory of devices that is alive in this process, by where it begins, and where it ends.
type Known = BTreeMap<u64, (u64, Weak<UnorderedBlock>)>;

fn known() -> MutexGuard<'static, Known> {
    static KNOWN: Mutex<Known> = Mutex::new(BTreeMap::new());
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

impl UnorderedBlock {
    pub(crate) fn allocate(
        pool: &Pool,
        device: MemoryDevice,
        bytes: usize,
        stream: Stream,
    ) -> Result<Arc<Self>> {
        // DLPack consumers may count on 256 bytes.
        let block = pool.default_lane().alloc_bytes(bytes, 512, stream)?;
        Ok(Self::of_block(block, pool, device, stream, false))
    }

    /// A block for calls on any stream, which its last holder does not wait for.
    pub(crate) fn for_calls(
        block: symmpool_allocator::Block<u8>,
        pool: &Pool,
        device: MemoryDevice,
        stream: Stream,
    ) -> Arc<Self> {
        Self::of_block(block, pool, device, stream, true)
    }

    fn of_block(
        block: symmpool_allocator::Block<u8>,
        pool: &Pool,
        device: MemoryDevice,
        stream: Stream,
        outlived: bool,
    ) -> Arc<Self> {
        let (address, end) = (block.address(), block.address() + block.bytes().max(1));
        let (block, pool) = (Some(ForkGuarded::new(block)), ForkGuarded::new(pool.clone()));
        let memory = Arc::new(Self { block, outlived, pool, device, stream, address });
        if device != MemoryDevice::Cpu {
            known().insert(address, (end, Arc::downgrade(&memory)));
        }
        memory
    }

    /// The memory in which an address of a device lies.
    pub(crate) fn around(address: u64) -> Option<Arc<Self>> {
        let known = known();
        let (_, (end, memory)) = known.range(..=address).next_back()?;
        if address < *end { memory.upgrade() } else { None }
    }

    /// Has the block's place wait for `stream` before it is reused, on this rank.
    pub(crate) fn record_use(&self, stream: Stream) -> Result<()> {
        self.block().record_use(stream)
    }

    pub(crate) fn block(&self) -> &symmpool_allocator::Block<u8> {
        self.block.as_deref().expect("there until dropped")
    }

    /// Makes `stream` wait for what the block's own stream was given so far, and the block's place
    /// wait for `stream` before it is reused.
    pub(crate) fn use_on(&self, stream: Stream) -> Result<()> {
        if stream == self.stream {
            return Ok(());
        }
        let driver = self.pool.driver();
        let event = driver.record_event(self.stream)?;
        let waited = driver.wait_event(stream, &event);
        driver.release_event(event);
        waited?;
        self.record_use(stream)
    }
}

impl Drop for UnorderedBlock {
    fn drop(&mut self) {
        if self.device != MemoryDevice::Cpu {
            known().remove(&self.address);
        }
        // An error means that the block is no longer the lane's; a destructor cannot raise it.
        if let Some(block) = self.block.take().and_then(ForkGuarded::into_here) {
            let _ = if self.outlived { block.free_after_device() } else { block.free_unordered() };
        }
    }
}
