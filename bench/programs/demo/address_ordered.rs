//! The counter-example: shared windows, and a caching allocator that orders its free blocks by size and **address**, as
//! most do.
//!
//! Nothing in it is wrong by itself. Every rank has the same windows and makes the same calls. Only the addresses of
//! the windows differ between ranks, and so does the order of free blocks of equal size.
#![allow(unsafe_code)] // maps windows

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use symmpool_allocator::{Error, Group, Result, Stream};
use symmpool_collectives::Communicator;

use crate::clutter::Clutter;
use crate::program::DemoMemory;
use crate::report::{LiveBlock, Map};

/// The number of windows of each rank.
const WINDOWS: usize = 8;
/// The bytes of a window.
const WINDOW: usize = 4 << 20;

/// One rank's windows and their free blocks.
pub(crate) struct AddressOrdered<'a> {
    /// Every rank's windows, by rank and index. They are the same memory in all processes.
    windows: Vec<Vec<File>>,
    /// The addresses at which this rank's windows begin, with their indices.
    starts: BTreeMap<usize, usize>,
    /// Free blocks, ordered by length, then address.
    free: BTreeSet<(usize, usize)>,
    live: BTreeMap<usize, (u32, usize)>,
    rank: usize,
    comm: &'a Communicator,
}

/// A tensor: its address and its number of elements.
pub(crate) struct DemoTensor {
    address: usize,
    count: usize,
}

impl<'a> AddressOrdered<'a> {
    /// Makes and shares the windows, while other regions of the address space come and go.
    pub(crate) fn new(
        group: &Group,
        comm: &'a Communicator,
        clutter: &mut Clutter,
    ) -> Result<Self> {
        let failed = |error| Error::system("making a window", error);
        let (mut own, mut starts) = (Vec::new(), BTreeMap::new());
        for index in 0..WINDOWS {
            let file = memfd_create("window", MemfdFlags::CLOEXEC).map_err(failed)?;
            ftruncate(&file, WINDOW as u64).map_err(failed)?;
            clutter.churn()?;
            let access = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: a new mapping at an address of the kernel's choosing. Only its address is used; data is accessed
            // through the descriptor, which is the same memory.
            let start =
                unsafe { mmap(std::ptr::null_mut(), WINDOW, access, MapFlags::SHARED, &file, 0) };
            starts.insert(start.map_err(failed)? as usize, index);
            own.push(File::from(file));
        }
        let descriptors: Vec<i32> = own.iter().map(AsRawFd::as_raw_fd).collect();
        let description = serde_json::to_vec(&(std::process::id(), descriptors))
            .map_err(|error| Error::system("describing windows", error))?;
        let all = group.all_gather("windows", &description, group.deadline())?;
        let windows = all.parts().map(open).collect::<Result<_>>()?;
        // No process may end before all ranks have opened its windows.
        comm.barrier(&Stream::DEFAULT)?;
        let free = starts.keys().map(|start| (WINDOW, *start)).collect();
        let rank = comm.rank() as usize;
        Ok(Self { windows, starts, free, live: BTreeMap::new(), rank, comm })
    }

    /// The window that contains an address of this rank, and the offset in it.
    fn locate(&self, address: usize) -> (usize, u64) {
        let (start, index) = self.starts.range(..=address).next_back().expect("in a window");
        (*index, (address - start) as u64)
    }
}

/// Opens another rank's windows through its descriptors.
fn open(description: &[u8]) -> Result<Vec<File>> {
    let failed = |error: &dyn std::fmt::Display| Error::system("opening a peer's windows", error);
    let (pid, descriptors): (u32, Vec<i32>) =
        serde_json::from_slice(description).map_err(|error| failed(&error))?;
    let path = |fd| format!("/proc/{pid}/fd/{fd}");
    let open = |fd| OpenOptions::new().read(true).write(true).open(path(fd));
    descriptors.into_iter().map(|fd| open(fd).map_err(|error| failed(&error))).collect()
}

impl DemoMemory for AddressOrdered<'_> {
    type Tensor = DemoTensor;

    fn alloc(&mut self, number: u32, count: usize) -> Result<DemoTensor> {
        let bytes = count * size_of::<f32>();
        let fit = self.free.range((bytes, 0)..).next().copied();
        let (length, address) =
            fit.ok_or_else(|| Error::out_of_memory(format!("no window has {bytes} bytes left")))?;
        self.free.remove(&(length, address));
        if length > bytes {
            self.free.insert((length - bytes, address + bytes));
        }
        self.live.insert(address, (number, bytes));
        Ok(DemoTensor { address, count })
    }

    fn free(&mut self, tensor: DemoTensor) -> Result<()> {
        let (mut start, mut end) =
            (tensor.address, tensor.address + tensor.count * size_of::<f32>());
        self.live.remove(&tensor.address);
        // Free neighbours merge if they are in the same window.
        let (window, _) = self.locate(start);
        let same_window = |block: &(usize, usize)| self.locate(block.1).0 == window;
        let before =
            self.free.iter().find(|block| block.0 + block.1 == start && same_window(block));
        let after = self.free.iter().find(|block| block.1 == end && same_window(block));
        for (length, address) in [before, after].map(Option::<&_>::copied).into_iter().flatten() {
            self.free.remove(&(length, address));
            (start, end) = (start.min(address), end.max(address + length));
        }
        self.free.insert((end - start, start));
        Ok(())
    }

    fn write(&mut self, tensor: &DemoTensor, values: &[f32]) -> Result<()> {
        let (window, offset) = self.locate(tensor.address);
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let written = self.windows[self.rank][window].write_all_at(&bytes, offset);
        written.map_err(|error| Error::system("writing a tensor", error))
    }

    fn read(&mut self, tensor: &DemoTensor) -> Result<Vec<f32>> {
        self.read_of(self.rank, tensor)
    }

    /// Adds up tensors as libraries with registered windows do: a rank's tensor is identified by its window and its
    /// offset in it, and the memory at that place on the other ranks is taken for the same tensor.
    fn all_reduce(&mut self, tensor: &DemoTensor) -> Result<()> {
        self.comm.barrier(&Stream::DEFAULT)?;
        let mut total = vec![0.0; tensor.count];
        for rank in 0..self.windows.len() {
            let theirs = self.read_of(rank, tensor)?;
            total.iter_mut().zip(theirs).for_each(|(sum, value)| *sum += value);
        }
        self.comm.barrier(&Stream::DEFAULT)?;
        self.write(tensor, &total)
    }

    fn map(&self) -> Result<Map> {
        let placed = self.live.iter().map(|(address, (tensor, bytes))| {
            let (window, offset) = self.locate(*address);
            let offset = (window * WINDOW) as u64 + offset;
            LiveBlock { tensor: *tensor, offset, bytes: *bytes as u64 }
        });
        let mut live: Vec<_> = placed.collect();
        live.sort_by_key(|placed| placed.offset);
        Ok(Map { windows: vec![WINDOW as u64; WINDOWS], live })
    }
}

impl AddressOrdered<'_> {
    /// Reads from `rank`'s memory at the place where this rank has `tensor`.
    fn read_of(&self, rank: usize, tensor: &DemoTensor) -> Result<Vec<f32>> {
        let (window, offset) = self.locate(tensor.address);
        let mut bytes = vec![0; tensor.count * size_of::<f32>()];
        let read = self.windows[rank][window].read_exact_at(&mut bytes, offset);
        read.map_err(|error| Error::system("reading a tensor", error))?;
        let floats = bytes.as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value));
        Ok(floats.collect())
    }
}
