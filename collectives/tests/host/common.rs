//! Ranks as threads of one process, over zeroed memory that is laid out as a flat heap.

use std::alloc::Layout;
use std::fs::File;
use std::ops::Range;

use half::{bf16, f16};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mprotect, munmap};
use symmpool_allocator::HeapLayout;
use symmpool_allocator::testing::SplitMix64;
use symmpool_allocator::topology::Topology;
use symmpool_collectives::{Element, F8E4m3, F8E5m2, HostEngine, HostOptions, Place, ReduceOp};

/// Memory that plays the flat heap: `world` slots of control blocks and window bytes.
pub(crate) struct Heap {
    /// Where the heap begins for each rank; null for one that is not of this process.
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
    /// So many bytes of a file for each rank, mapped by each on its own.
    Mapped(usize),
}

// SAFETY: the heap is raw memory; who touches which part when is what the tests arrange.
unsafe impl Sync for Heap {}

impl Heap {
    /// `blocks` control blocks for `options`, then `window_bytes` for windows, per slot.
    pub(crate) fn new(world: u32, blocks: u64, window_bytes: u64, options: &HostOptions) -> Self {
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

    /// A heap in which each of `ranks` has its own mapping of `memory`, which may be new, with one
    /// control block. There it reaches its own slot, those of ranks it is linked to, and of all
    /// others nothing but signals: scratch and windows of theirs cannot be touched.
    pub(crate) fn linked(
        links: &Topology,
        ranks: Range<u32>,
        window_bytes: u64,
        options: &HostOptions,
        memory: &File,
    ) -> Self {
        let world = links.world();
        let block = HostEngine::control_bytes(world, options).unwrap();
        // Scratch, both parities, is the end of the block; a page begins there.
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
                // SAFETY: whole pages of the new mapping, which nobody knows of yet.
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
    pub(crate) fn engine(&self, rank: u32, block: u64, options: HostOptions) -> HostEngine {
        let bytes = HostEngine::control_bytes(self.world, &options).unwrap();
        let offset = self.control + block * bytes;
        // SAFETY: the whole heap is there, zeroed, and outlives the engines of a test; every block
        // is used by one communicator.
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

impl Drop for Heap {
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

/// A file without a name, in memory.
pub(crate) fn memory() -> File {
    memfd_create("symmpool-test", MemfdFlags::CLOEXEC).unwrap().into()
}

/// Options with little scratch, so that small data already travels in pieces.
pub(crate) fn small_scratch() -> HostOptions {
    HostOptions { scratch_bytes: 4096, ..HostOptions::default() }
}

/// A buffer of one rank: in its window or in its own memory.
pub(crate) struct Buffer {
    pub(crate) place: Place,
    address: *mut u8,
    bytes: usize,
    _own: Vec<u8>,
}

impl Buffer {
    pub(crate) fn window(heap: &Heap, rank: u32, offset: u64, bytes: usize) -> Self {
        assert!(heap.windows + offset + bytes as u64 <= heap.stride);
        let offset = heap.windows + offset;
        Self { place: Place::Window(offset), address: heap.at(rank, offset), bytes, _own: vec![] }
    }

    /// Begins `skew` bytes into an allocation, so that alignment is no better than an element's.
    pub(crate) fn plain(bytes: usize, skew: usize) -> Self {
        let mut own = vec![0u8; bytes + skew];
        let address = own.as_mut_ptr().wrapping_add(skew);
        Self { place: Place::Plain(address), address, bytes, _own: own }
    }

    /// The place `bytes` bytes into the buffer.
    pub(crate) fn part(&self, bytes: usize) -> Place {
        match self.place {
            Place::Plain(address) => Place::Plain(address.wrapping_add(bytes)),
            Place::Window(offset) => Place::Window(offset + bytes as u64),
        }
    }

    pub(crate) fn write<T: Element>(&self, data: &[T]) {
        let data: &[u8] = bytemuck::cast_slice(data);
        assert!(data.len() <= self.bytes);
        // SAFETY: the buffer holds as many bytes, and peers do not touch it between calls.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), self.address, data.len()) };
    }

    pub(crate) fn read<T: Element>(&self, count: usize) -> Vec<T> {
        let mut data = vec![T::zeroed(); count];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut data);
        assert!(bytes.len() <= self.bytes);
        // SAFETY: the buffer holds as many bytes, and peers do not touch it between calls.
        unsafe { std::ptr::copy_nonoverlapping(self.address, bytes.as_mut_ptr(), bytes.len()) };
        data
    }
}

/// Numbers that look random and are the same for everyone who asks.
pub(crate) fn noise(seed: u64, index: u64) -> u64 {
    SplitMix64::at(seed << 32, index)
}

/// What reductions must give, computed one element at a time, in rank order.
pub(crate) trait Oracle: Element {
    fn from_noise(noise: u64) -> Self;
    fn reduce(op: ReduceOp, values: &[Self]) -> Self;
}

macro_rules! float_oracle {
    ($($ty:ty, $acc:ty, $to:expr, $from:expr;)+) => {$(
        impl Oracle for $ty {
            fn from_noise(noise: u64) -> Self {
                $from((noise % 4001) as $acc / 1000.0 - 2.0)
            }
            fn reduce(op: ReduceOp, values: &[Self]) -> Self {
                let values = values.iter().map(|x| $to(*x));
                let count = values.len() as $acc;
                let total = values.reduce(|a, b| match op {
                    ReduceOp::Sum | ReduceOp::Avg => a + b,
                    ReduceOp::Prod => a * b,
                    ReduceOp::Min => if a < b { a } else { b },
                    ReduceOp::Max => if a > b { a } else { b },
                });
                $from(if op == ReduceOp::Avg { total.unwrap() / count } else { total.unwrap() })
            }
        }
    )+};
}
float_oracle! {
    f32, f32, |x| x, |x| x;
    f64, f64, |x| x, |x| x;
    f16, f32, f16::to_f32, f16::from_f32;
    bf16, f32, bf16::to_f32, bf16::from_f32;
    F8E4m3, f32, F8E4m3::to_f32, F8E4m3::from_f32;
    F8E5m2, f32, F8E5m2::to_f32, F8E5m2::from_f32;
}

macro_rules! integer_oracle {
    ($($ty:ty),+) => {$(
        impl Oracle for $ty {
            fn from_noise(noise: u64) -> Self {
                noise as $ty
            }
            fn reduce(op: ReduceOp, values: &[Self]) -> Self {
                let wide = || values.iter().map(|x| i128::from(*x));
                let total = match op {
                    ReduceOp::Sum => wide().sum(),
                    ReduceOp::Avg => wide().sum::<i128>() / values.len() as i128,
                    ReduceOp::Prod => wide().fold(1, i128::wrapping_mul),
                    ReduceOp::Min => wide().min().unwrap(),
                    ReduceOp::Max => wide().max().unwrap(),
                };
                total as $ty
            }
        }
    )+};
}
integer_oracle!(i32, i64, u8, i8);

/// What `rank` puts in: `count` elements.
pub(crate) fn input<T: Oracle>(seed: u64, rank: u32, count: usize) -> Vec<T> {
    (0..count as u64).map(|i| T::from_noise(noise(seed * 64 + u64::from(rank), i))).collect()
}

/// The reduction of everyone's input.
pub(crate) fn reduced<T: Oracle>(seed: u64, world: u32, count: usize, op: ReduceOp) -> Vec<T> {
    let inputs: Vec<Vec<T>> = (0..world).map(|rank| input(seed, rank, count)).collect();
    let mut values = Vec::new();
    (0..count)
        .map(|i| {
            values.clear();
            values.extend(inputs.iter().map(|input| input[i]));
            T::reduce(op, &values)
        })
        .collect()
}

/// The bits, for comparisons in which -0.0 is not 0.0.
pub(crate) fn bits<T: Element>(data: &[T]) -> &[u8] {
    bytemuck::cast_slice(data)
}
