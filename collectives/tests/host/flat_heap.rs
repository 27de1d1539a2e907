//! Ranks that are threads of one process, over zeroed memory with the layout of a pool's heap.

use std::alloc::Layout;
use std::fs::File;
use std::ops::Range;

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mprotect, munmap};
use symmpool_allocator::HeapLayout;
use symmpool_allocator::topology::Topology;
use symmpool_collectives::{Element, HostEngine, HostEngineOptions, Place};

/// Memory with the layout of a heap: `world` slots, each with control blocks and bytes for windows.
pub(crate) struct FlatHeap {
    /// Where the heap begins for each rank; null for a rank that is in another process.
    bases: Vec<*mut u8>,
    memory: Memory,
    world: u32,
    stride: u64,
    /// Where the control blocks begin in each slot.
    control: u64,
    /// Where the bytes for windows begin in each slot.
    pub(crate) windows: u64,
}

enum Memory {
    /// One allocation for all ranks.
    Allocated(Layout),
    /// This many bytes of a file, which each rank has mapped on its own.
    Mapped(usize),
}

// SAFETY: the heap is raw memory; the tests arrange which thread accesses which part when.
unsafe impl Sync for FlatHeap {}

impl FlatHeap {
    /// A heap whose slots have `blocks` control blocks for `options`, then `window_bytes` for windows.
    pub(crate) fn new(
        world: u32,
        blocks: u64,
        window_bytes: u64,
        options: &HostEngineOptions,
    ) -> Self {
        let control = HostEngine::control_bytes(world, options).unwrap();
        let windows = blocks * control;
        let stride = (windows + window_bytes).next_multiple_of(4096);
        let layout = Layout::from_size_align((stride * u64::from(world)) as usize, 4096).unwrap();
        // SAFETY: the layout is not empty.
        let base = unsafe { std::alloc::alloc_zeroed(layout) };
        assert!(!base.is_null());
        let bases = vec![base; world as usize];
        Self { bases, memory: Memory::Allocated(layout), world, stride, control: 0, windows }
    }

    /// A heap with one control block for each slot, in which each of `ranks` has its own mapping of `memory`, which
    /// may be new. In its mapping, a rank can access its own slot and those of ranks that it is linked to. Of all
    /// other slots it can access the signals only: an access to their scratch and windows is a fault.
    pub(crate) fn linked(
        links: &Topology,
        ranks: Range<u32>,
        window_bytes: u64,
        options: &HostEngineOptions,
        memory: &File,
    ) -> Self {
        let world = links.world();
        let block = HostEngine::control_bytes(world, options).unwrap();
        // The scratch of both parities is the end of the control block. It is placed at the beginning of a page.
        let signals = block - 2 * options.scratch_bytes;
        let page = rustix::param::page_size() as u64;
        let data = signals.next_multiple_of(page);
        let windows = data + 2 * options.scratch_bytes;
        let stride = (windows + window_bytes).next_multiple_of(page);
        let bytes = (stride * u64::from(world)) as usize;
        if memory.metadata().unwrap().len() < bytes as u64 {
            memory.set_len(bytes as u64).unwrap();
        }
        let map = |rank: u32| {
            if !ranks.contains(&rank) {
                return std::ptr::null_mut();
            }
            let (access, shared) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
            // SAFETY: a new mapping at an address of the kernel's choosing.
            let base = unsafe { mmap(std::ptr::null_mut(), bytes, access, shared, memory, 0) };
            let base: *mut u8 = base.unwrap().cast();
            for peer in (0..world).filter(|peer| !links.link(rank, *peer).is_direct()) {
                let start = base.wrapping_add((u64::from(peer) * stride + data) as usize);
                let length = (stride - data) as usize;
                // SAFETY: whole pages of the new mapping, which nothing uses yet.
                unsafe { mprotect(start.cast(), length, MprotectFlags::empty()) }.unwrap();
            }
            base
        };
        let bases = (0..world).map(map).collect();
        let control = data - signals;
        Self { bases, memory: Memory::Mapped(bytes), world, stride, control, windows }
    }

    pub(crate) fn layout(&self, rank: u32) -> HeapLayout {
        let base = self.bases[rank as usize];
        assert!(!base.is_null(), "rank {rank} is of another process");
        HeapLayout { base: base as u64, stride: self.stride, rank, world: self.world }
    }

    /// The engine of `rank` on control block `block`.
    pub(crate) fn engine(&self, rank: u32, block: u64, options: HostEngineOptions) -> HostEngine {
        let bytes = HostEngine::control_bytes(self.world, &options).unwrap();
        let offset = self.control + block * bytes;
        // SAFETY: the whole heap is mapped and zeroed, and outlives the engines of a test; every control block is used
        // by one communicator.
        unsafe { HostEngine::new(self.layout(rank), offset, bytes, options) }.unwrap()
    }

    /// `rank`'s address of `offset`.
    pub(crate) fn at(&self, rank: u32, offset: u64) -> *mut u8 {
        self.layout(rank).address(rank, offset) as *mut u8
    }

    /// Runs `body` as every rank at once, and returns what each returned.
    pub(crate) fn ranks<T: Send>(&self, body: impl Fn(u32) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let body = &body;
            let threads: Vec<_> =
                (0..self.world).map(|rank| scope.spawn(move || body(rank))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }
}

impl Drop for FlatHeap {
    fn drop(&mut self) {
        match self.memory {
            // SAFETY: allocated in `new` with this layout; all users have ended.
            Memory::Allocated(layout) => unsafe { std::alloc::dealloc(self.bases[0], layout) },
            Memory::Mapped(bytes) => {
                for base in self.bases.iter().filter(|base| !base.is_null()) {
                    // SAFETY: mapped in `linked` with this length; all users have ended.
                    unsafe { munmap(base.cast(), bytes) }.unwrap();
                }
            }
        }
    }
}

/// A file in memory.
pub(crate) fn memory() -> File {
    memfd_create("symmpool-test", MemfdFlags::CLOEXEC).unwrap().into()
}

/// Options with little scratch, so that even small data goes through it in pieces.
pub(crate) fn small_scratch() -> HostEngineOptions {
    HostEngineOptions { scratch_bytes: 4096, ..HostEngineOptions::default() }
}

/// A buffer of one rank: in its window or in its own memory.
pub(crate) struct TestBuffer {
    pub(crate) place: Place,
    address: *mut u8,
    bytes: usize,
    _own: Vec<u8>,
}

impl TestBuffer {
    pub(crate) fn window(heap: &FlatHeap, rank: u32, offset: u64, bytes: usize) -> Self {
        assert!(heap.windows + offset + bytes as u64 <= heap.stride);
        let offset = heap.windows + offset;
        Self { place: Place::Window(offset), address: heap.at(rank, offset), bytes, _own: vec![] }
    }

    /// A buffer that begins `skew` bytes into an allocation, so that it is aligned to an element and no better.
    pub(crate) fn plain(bytes: usize, skew: usize) -> Self {
        let mut own = vec![0u8; bytes + skew];
        let address = own.as_mut_ptr().wrapping_add(skew);
        Self { place: Place::Unregistered(address), address, bytes, _own: own }
    }

    /// The place `bytes` bytes into the buffer.
    pub(crate) fn part(&self, bytes: usize) -> Place {
        match self.place {
            Place::Unregistered(address) => Place::Unregistered(address.wrapping_add(bytes)),
            Place::Window(offset) => Place::Window(offset + bytes as u64),
        }
    }

    pub(crate) fn write<T: Element>(&self, data: &[T]) {
        let data: &[u8] = bytemuck::cast_slice(data);
        assert!(data.len() <= self.bytes);
        // SAFETY: the buffer holds as many bytes, and peers do not access it between calls.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), self.address, data.len()) };
    }

    pub(crate) fn read<T: Element>(&self, count: usize) -> Vec<T> {
        let mut data = vec![T::zeroed(); count];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut data);
        assert!(bytes.len() <= self.bytes);
        // SAFETY: the buffer holds as many bytes, and peers do not access it between calls.
        unsafe { std::ptr::copy_nonoverlapping(self.address, bytes.as_mut_ptr(), bytes.len()) };
        data
    }
}
